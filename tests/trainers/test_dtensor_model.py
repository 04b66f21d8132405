"""Local tensors, what they hold, and the export of sharded transformers models, against their tagged checkpoints."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.dtensor_trainer import join, load, load_cut, of_transformers_5, shard
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from mcore_reshard.planner.layout.traces import RankTrace
from mcore_reshard.trainers.dtensor.model import checkpoint_of, export_hf, local_tensors, trace_module
from mcore_reshard.validation import tiny
from mcore_reshard.validation.processes import run_processes

pytest.importorskip("transformers")


def filled(
    trace: RankTrace, checkpoint: dict[str, torch.Tensor], parts: dict[str, torch.Tensor]
) -> dict[str, torch.Tensor]:
    """Local tensors as the trace says that they come of the checkpoint's; what nothing writes is NaN."""
    made = {}
    for traced in trace.tensors:
        assert traced.tensor.shape == tuple(parts[traced.tensor.name].shape)
        local = torch.full_like(parts[traced.tensor.name], float("nan"))
        for name, box in traced.copies:
            src = checkpoint[name].to(local.dtype).as_strided(box.extents, box.src_strides, box.src_offset)
            local.as_strided(box.extents, box.dst_strides, box.dst_offset).copy_(src)
        assert sum(box.elements for _, box in traced.copies) == local.numel()
        made[traced.tensor.name] = local
    return made


def compare(rank: int, world: int, kind: str | dict[str, int], folder: Path, config: dict[str, Any]) -> list[str]:
    """Names of local and of exported tensors that differ from the checkpoint that the model was loaded from."""
    join(rank, world, folder)
    golden = dict(tiny.payload(tiny.checkpoint_shapes(config), 1))
    model = shard(load(folder), kind) if isinstance(kind, str) else load_cut(folder, **kind)
    parts, saved = local_tensors(model), checkpoint_of(model)
    assert saved.made_of.keys() == golden.keys()
    made = filled(trace_module(model, saved), golden, parts)
    assert made.keys() == parts.keys()
    wrong = [name for name, part in parts.items() if not made[name].equal(part)]
    exported = dict(export_hf(model, saved))
    assert exported.keys() == golden.keys()
    wrong += [name for name, tensor in exported.items() if not tensor.equal(golden[name].to(tensor.dtype))]
    few = sorted(golden)[1::7]
    assert [name for name, _ in export_hf(model, saved, few)] == [name for name in exported if name in few]
    with pytest.raises(KeyError, match=r"saves no model\.nothing"):
        next(export_hf(model, saved, ["model.nothing", few[0]]))
    return wrong


CASES = [
    ("llama_tied", "fsdp", 2),
    ("qwen2", "hsdp", 4),
    ("qwen3", "tp x fsdp", 4),
    ("qwen3_moe", "fsdp", 4),
    ("deepseek_v3", "tp x fsdp", 4),
    ("gpt_oss", "fsdp", 4),
    ("llama", "replicated", 2),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("family", "kind", "world"), CASES)
def test_every_element_is_where_the_trace_says(family: str, kind: str, world: int, tmp_path: Path) -> None:
    config = tiny.TINY[family]
    tiny.write_checkpoint(config, tmp_path, 1)
    assert run_processes(world, compare, (world, kind, tmp_path, config), timeout_s=120) == [[]] * world


@pytest.mark.parametrize("family", ["qwen3_moe", "deepseek_v3"])
@pytest.mark.parametrize("sizes", [{"tp_size": 2}, {"tp_size": 2, "ep_size": 2}, {"fsdp_size": 2}], ids=str)
def test_every_element_as_transformers_5_cuts_it(family: str, sizes: dict[str, int], tmp_path: Path) -> None:
    """Its tensor parallelism cuts [gate; up] by _StridedShard, its expert parallelism makes a mesh of two dims."""
    if not of_transformers_5():
        pytest.skip("needs transformers 5, as vLLM's environment has: run `make test-vllm`")
    config = tiny.TINY[family]
    tiny.write_checkpoint(config, tmp_path, 1)
    assert run_processes(2, compare, (2, sizes, tmp_path, config), timeout_s=120) == [[]] * 2


def trained(rank: int, folder: Path) -> None:
    """Storage stays over real steps, and what is gathered for a forward is given back."""
    join(rank, 2, folder)
    policy = MixedPrecisionPolicy(param_dtype=torch.bfloat16)
    model = shard(load(folder, torch.float32), "fsdp", reshard_after_forward=False, mp_policy=policy)
    before = {name: (part.data_ptr(), part.clone()) for name, part in local_tensors(model).items()}
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    tokens = torch.arange(12).reshape(2, 6) + rank
    for _ in range(2):
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        model(input_ids=tokens)
    gathered = [name for name, tensor in model.named_parameters() if not isinstance(tensor, DTensor)]
    assert gathered and model.model.layers[0].mlp.up_proj.weight.dtype is torch.bfloat16
    after = local_tensors(model)
    assert after.keys() == before.keys()
    assert all(isinstance(parameter, DTensor) for parameter in model.parameters())
    for name, part in after.items():
        place, values = before[name]
        assert part.data_ptr() == place and part.dtype is torch.float32 and not part.equal(values)


def test_local_tensors_are_the_same_storage_after_steps(tmp_path: Path) -> None:
    import transformers

    config = tiny.TINY["llama"]
    tiny.write_checkpoint(config, tmp_path, 1)
    torch.manual_seed(0)  # tagged weights are too wild to train
    transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.from_pretrained(tmp_path)).save_pretrained(
        tmp_path
    )
    run_processes(2, trained, (tmp_path,), timeout_s=120)


# --- names, and what is refused ------------------------------------------------------------------------------------


def on_meta(family: str) -> Any:
    import transformers

    config = {key: value for key, value in tiny.TINY[family].items() if key not in ("architectures", "auto_map")}
    with torch.device("meta"):
        return transformers.AutoModelForCausalLM.from_config(
            transformers.AutoConfig.for_model(config.pop("model_type"), **config)
        )


def test_wrappers_leave_no_trace_in_names() -> None:
    from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

    model = on_meta("llama")
    saved, plain = tiny.checkpoint_shapes(tiny.TINY["llama"]).keys(), local_tensors(model).keys()
    assert plain == {f"vp0.{name}" for name in saved}
    model.model.layers[0] = checkpoint_wrapper(model.model.layers[0])
    model.model.layers[1] = torch.compile(model.model.layers[1])
    assert local_tensors(torch.compile(model)).keys() == plain
    assert checkpoint_of(torch.compile(model)).made_of.keys() == saved


def vision_language_names(rank: int, folder: Path) -> list[set[str]]:
    """The names in memory, the names that a sharded model is said to save, and those that it saves before."""
    import transformers
    from safetensors import safe_open

    join(rank, 1, folder)
    text = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 1, "num_attention_heads": 4, "vocab_size": 64,
            "num_key_value_heads": 2, "rope_scaling": {"type": "mrope", "mrope_section": [1, 1, 2]}}  # fmt: skip
    vision = {"depth": 1, "hidden_size": 32, "intermediate_size": 48, "num_heads": 2, "out_hidden_size": 32}
    config = transformers.Qwen2_5_VLConfig(text_config=text, vision_config=vision)
    model = transformers.Qwen2_5_VLForConditionalGeneration(config)
    model.save_pretrained(folder)
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    with safe_open(folder / "model.safetensors", "pt") as file:
        return [set(local_tensors(model)), set(checkpoint_of(model).tensors), set(file.keys())]


def test_a_vision_language_model_has_the_names_that_it_saves(tmp_path: Path) -> None:
    ((in_memory, said, saved),) = run_processes(1, vision_language_names, (tmp_path,))
    assert said == saved
    assert "visual.blocks.0.attn.qkv.weight" in saved - in_memory


def test_plain_shards_of_transformers_4_are_refused() -> None:
    if of_transformers_5():
        pytest.skip("transformers 5 makes DTensors of them")
    model = on_meta("deepseek_v3")
    checkpoint_of(model)
    model._tp_size = 2  # as distribute_model sets it
    with pytest.raises(
        ValueError, match=r"cut this model by local, local_colwise, local_rowwise: .* and fully_shard, or"
    ):
        checkpoint_of(model)


def fsdp1(rank: int, folder: Path) -> None:
    from torch.distributed.fsdp import FullyShardedDataParallel

    join(rank, 2, folder)
    with pytest.raises(ValueError, match=r"FSDP1\) keeps flat parameters: shard the model by fully_shard"):
        local_tensors(FullyShardedDataParallel(torch.nn.Linear(4, 4), device_id=torch.device("cpu")))


def test_fsdp1_is_refused(tmp_path: Path) -> None:
    run_processes(2, fsdp1, (tmp_path,))
