"""What a trace of Megatron-Bridge's import says of a rank's tensors, against the weights that Bridge really loaded there."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.trainers import mesh_label, run_trainers
from helpers.zoo_newest import IS_NEWEST, NEWEST_MESHES

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import HfTensor, TracedTensor
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.build import Trainer, prepare

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)

from mcore_reshard.trainers.megatron import trace
from mcore_reshard.trainers.megatron.trace import trace_live


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    prepare()  # once, so that every forked world finds it imported


def _faults(trainer: Trainer, folder: Path) -> tuple[int, list[str]]:
    """How many elements of this rank a trace explains, and the tensors that are not what it says."""
    from safetensors.torch import load_file

    checkpoint = load_file(folder / "1" / "model.safetensors")
    tensors = {name: HfTensor(tuple(tensor.shape), dtype_name(tensor.dtype)) for name, tensor in checkpoint.items()}
    with te_standin.cpu_as_device():
        traced_rank = trace_live(trainer.bridge, trainer.model_chunks, tensors)
    live = trainer.tensors
    faults = [f"{name} is not traced" for name in live.keys() - {traced.tensor.name for traced in traced_rank.tensors}]
    explained = 0
    for traced in traced_rank.tensors:
        name = traced.tensor.name
        if traced.computed:
            faults.append(f"{name}: {traced.computed}")
            continue
        wrong = int((_assembled(traced, live[name], checkpoint) != live[name].detach()).sum())
        if wrong:
            faults.append(f"{name}: {wrong} of {live[name].numel()} elements differ")
        explained += live[name].numel()
    return explained, sorted(faults)


def _assembled(traced: TracedTensor, live: torch.Tensor, checkpoint: Mapping[str, torch.Tensor]) -> torch.Tensor:
    """The tensor as the trace says, of NaN where it says nothing or the same element twice."""
    made = torch.full((live.numel(),), float("nan"), dtype=live.dtype)
    filled = torch.zeros(live.numel(), dtype=torch.int8)
    for name, copy in [*traced.copies, *(("", copy) for copy in traced.padding)]:
        source = checkpoint[name] if name else torch.zeros(1)
        _box(made, copy.inverse).copy_(_box(source, copy))
        _box(filled, copy.inverse).add_(1)
    made[filled != 1] = float("nan")
    return made.view(live.shape)


def _box(memory: torch.Tensor, copy: StridedCopy) -> torch.Tensor:
    return memory.reshape(-1).as_strided(copy.extents, copy.src_strides, copy.src_offset)


TP2, PP2_TP2, TP2_EP2 = TrainMesh(tp=2), TrainMesh(tp=2, pp=2), TrainMesh(tp=2, ep=2, etp=1)
TP2_EP2_ETP2 = TrainMesh(tp=2, dp=2, ep=2, etp=2)
CASES: list[tuple[str, TrainMesh, dict[str, Any]]] = [
    ("tiny-llama", TP2, {}),
    ("tiny-llama", TrainMesh(tp=4), {"num_key_value_heads": 2, "vocab_size": 250}),
    ("tiny-llama-tied", PP2_TP2, {}),
    ("tiny-qwen3-moe", TP2_EP2, {}),
    ("tiny-qwen3-moe", TP2_EP2_ETP2, {}),
    ("tiny-deepseek-v3", TP2_EP2, {}),
    ("tiny-gpt-oss", TP2_EP2, {"intermediate_size": 48}),
    ("tiny-nemotron-h", TP2_EP2, {}),
    ("tiny-glm4-moe", TP2_EP2, {}),
]
if IS_NEWEST:
    CASES += [(name, meshes[0], {}) for name, meshes in NEWEST_MESHES.items()]


# What is no rearrangement of elements, and of how many tensors of a rank. Step-3.5: Megatron-Core has one gate for each
# element of a head, the checkpoint one for each head. Qwen3.5: norms that are centered on zero.
_CENTERED = "out_norm.weight: aten.sub_.Tensor at megatron/bridge/models/conversion/param_mapping.py:"
COMPUTED = {
    "tiny-step3.5": ("linear_qkv.weight: elements that are repeated", 4),
    "tiny-qwen3.5": (_CENTERED, 3),
    "tiny-qwen3.5-moe": (_CENTERED, 3),
}


@pytest.mark.parametrize(("name", "mesh", "overrides"), CASES, ids=mesh_label)
def test_a_trace_is_what_bridge_loaded(tmp_path: Path, name: str, mesh: TrainMesh, overrides: dict[str, Any]) -> None:
    reason, tensors = COMPUTED.get(name, ("", 0))
    for explained, faults in run_trainers(tmp_path, {**load_config(name), **overrides}, mesh, _faults):
        assert [fault for fault in faults if not reason or reason not in fault] == []
        assert len(faults) == tensors and explained > 10_000


@pytest.mark.skipif(not IS_NEWEST, reason="MiniMax-M2 needs Megatron-Bridge 0.6: make test-newest")
def test_a_rank_that_cuts_as_rank_0_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trace, "_RankZero", lambda rank: 0)
    (_, first), (_, second) = run_trainers(tmp_path, load_config("tiny-minimax-m2"), TP2, _faults)
    assert first == []
    assert [fault.partition(": ")[0] for fault in second] == [
        f"vp0.decoder.layers.{layer}.self_attention.{norm}_layernorm.weight" for layer in (0, 1) for norm in "kq"
    ]
