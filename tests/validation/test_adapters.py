"""Adapters of Megatron-Bridge on real models: merged as its export merges them, or refused on all ranks with the reason."""

from __future__ import annotations

from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.trainers import run_trainers

from mcore_reshard.kernels.errors import StaleTensorError
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.trainers.megatron.adapters import merged_adapters
from mcore_reshard.trainers.megatron.model import export_hf, parameters_of_tensors, unwrapped
from mcore_reshard.trainers.megatron.plan_refit import plan_refit
from mcore_reshard.trainers.trainable import freeze, watched
from mcore_reshard.validation import tiny
from mcore_reshard.validation.trainer.build import Trainer, prepare

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)

CONFIG = tiny.tiny_config("qwen3")
PP2 = TrainMesh(pp=2)
Wrap = Callable[[list[torch.nn.Module]], Any]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    prepare()  # once, so that every forked world finds it imported


def dora(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.dora import DoRA

    DoRA(target_modules=["linear_proj"], dim=4)(chunks)


def lora_on_up_alone(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.canonical_lora import CanonicalLoRA

    CanonicalLoRA(target_modules=["linear_fc1_up"], dim=4)(chunks)


def lora_on_a_torch_linear(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.lora_layers import LinearAdapter

    if dist.get_rank() == 1:
        unwrapped(chunks[0]).head = LinearAdapter(torch.nn.Linear(8, 8), dim=4)


def plain_lora(chunks: list[torch.nn.Module]) -> None:
    from megatron.bridge.peft.lora import LoRA

    LoRA(target_modules=["linear_proj"], dim=4)(chunks)


def refusal(trainer: Trainer, _: Path, wrap: Wrap, with_bridge: bool) -> str:
    wrap(trainer.model_chunks)
    with pytest.raises(Exception) as error:
        merged_adapters(trainer.bridge if with_bridge else None, trainer.model_chunks)
    return str(error.value)


@pytest.mark.parametrize(
    ("wrap", "said"),
    [
        (dora, "linear_proj: it leaves out the magnitudes of DoRA; merge the adapters into the weights"),
        (lora_on_a_torch_linear, "1 adapters do, first head: it leaves out the adapter of a LinearAdapter"),
        (
            lora_on_up_alone,
            "has the adapter adapter_up alone, which Megatron-Bridge would merge into all that is fused",
        ),
    ],
    ids=["dora", "torch", "up alone"],
)
def test_what_bridge_merges_wrongly_is_refused_on_every_rank(wrap: Wrap, said: str, tmp_path: Path) -> None:
    told = run_trainers(tmp_path, CONFIG, PP2, refusal, wrap, True)
    assert [said in message for message in told] == [True, True], told


def test_without_a_bridge_nothing_merges(tmp_path: Path) -> None:
    told = run_trainers(tmp_path, CONFIG, PP2, refusal, plain_lora, False)
    assert ["linear_proj has a LoRA adapter: give connect() the AutoBridge" in message for message in told] == [
        True,
        True,
    ]


def import_that_shifts(trainer: Trainer, _: Path) -> str:
    from megatron.bridge.models.conversion.param_mapping import RowParallelMapping

    plain_lora(trainer.model_chunks)
    load = RowParallelMapping.hf_to_megatron
    shifts = mock.patch.object(RowParallelMapping, "hf_to_megatron", lambda *args: load(*args).roll(1, 0))
    with shifts, pytest.raises(ValueError) as error:
        merged_adapters(trainer.bridge, trainer.model_chunks)
    return str(error.value)


def test_a_weight_that_does_not_come_back_is_refused(tmp_path: Path) -> None:
    (told,) = run_trainers(tmp_path, CONFIG, TrainMesh(), import_that_shifts)
    assert "linear_proj.weight on one rank (its import does not undo its export)" in told


def merged_and_exported(trainer: Trainer, _: Path) -> list[str]:
    """Names of merged weights that are not as Bridge exports them; without tensor parallelism both have the same rows."""
    plain_lora(trainer.model_chunks)
    for chunk in trainer.model_chunks:
        for name, parameter in chunk.named_parameters():
            if ".adapter." in name:
                parameter.data.normal_()
    adapters = merged_adapters(trainer.bridge, trainer.model_chunks)
    assert adapters is not None
    before = {name: tensor.clone() for name, tensor in adapters.local_tensors().items()}
    adapters.merge()
    exported = dict(export_hf(trainer.bridge, trainer.model_chunks))
    wrong = []
    for layer in range(4):
        name = f"vp0.decoder.layers.{layer}.self_attention.linear_proj.weight"
        merged = adapters.local_tensors()[name]
        if before[name].equal(merged) or not merged.equal(exported[f"model.layers.{layer}.self_attn.o_proj.weight"]):
            wrong.append(name)
    return wrong


def test_merged_weights_are_those_that_bridge_exports(tmp_path: Path) -> None:
    assert run_trainers(tmp_path, CONFIG, TrainMesh(), merged_and_exported) == [[]]


def frozen(trainer: Trainer, _: Path) -> tuple[str, str]:
    parameters = [parameter for chunk in trainer.model_chunks for parameter in chunk.parameters()]
    made_of = parameters_of_tensors(trainer.model_chunks)
    plan = plan_refit(CONFIG, trainer.model_chunks, GenMesh(tp=2))
    assert not freeze(plan, made_of, dict).frozen  # all of it is trained: every refit moves everything
    for parameter in parameters:
        parameter.requires_grad_(False)
    with pytest.raises(ValueError) as nothing:
        freeze(plan, made_of, dict)
    parameters[-1].requires_grad_(dist.get_rank() == 1)
    assert freeze(plan, made_of, dict).frozen
    tensors = watched(dict, made_of)
    assert tensors() == {}
    parameters[-1].requires_grad_(dist.get_rank() == 0)
    with pytest.raises(StaleTensorError) as changed:
        tensors()
    return str(nothing.value), str(changed.value)


def test_nothing_trained_and_changes_of_what_is_trained_are_errors(tmp_path: Path) -> None:
    for rank, (nothing, changed) in enumerate(run_trainers(tmp_path, CONFIG, PP2, frozen)):
        assert "no parameter has requires_grad" in nothing
        assert f"train:{rank}: requires_grad of 1 tensors has changed since connect(), first of vp0." in changed
