"""A Megatron-Bridge that keeps weights otherwise than the rules is found at `connect`, on every rank, before a byte moves."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

import torch
from helpers.front_door import free_address
from helpers.trainers import run_trainers

import mcore_reshard as mr
from mcore_reshard.kernels.errors import LayoutError, RefitError
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.trainers.megatron import plan_traced_refit
from mcore_reshard.trainers.megatron.connect import _layout_check
from mcore_reshard.trainers.megatron.plan_refit import plan_refit
from mcore_reshard.trainers.megatron.plan_traced_refit import _trainer_traces
from mcore_reshard.trainers.megatron.trace import checkpoint_tensors
from mcore_reshard.validation.trainer.build import Trainer


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Import it before the ranks are forked."""
    from mcore_reshard.validation.trainer.build import prepare

    prepare()


@contextmanager
def k_and_v_exchanged() -> Iterator[None]:
    from megatron.bridge.models.conversion import param_mapping

    merge = param_mapping.merge_qkv_weights

    def exchanged(config: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return merge(config, q, v, k)

    with mock.patch.object(param_mapping, "merge_qkv_weights", exchanged):
        yield


def connected(trainer: Trainer, folder: Path, address: str) -> str:
    """What `connect` says where Bridge merges k and v in each other's place."""
    with k_and_v_exchanged(), pytest.raises(RefitError) as raised:
        mr.megatron.connect(
            trainer.model_chunks, trainer.bridge, folder / "1", gen="tp=1", store=address, connect_timeout_s=20
        )
    return str(raised.value)


def test_k_and_v_in_each_others_place(tmp_path: Path) -> None:
    address = free_address()
    for said in run_trainers(tmp_path, load_config("tiny-llama"), TrainMesh(tp=2), connected, address):
        assert "megatron-bridge" in said and "otherwise than the plan's rules" in said
        assert "linear_qkv.weight: of model.layers.0.self_attn.k_proj.weight the plan has" in said


def traced_once(trainer: Trainer, folder: Path) -> None:
    """A trainer that passed the check passes it untraced, until anything that decides on layouts changes on one rank."""
    chunks, bridge, first = trainer.model_chunks, trainer.bridge, torch.distributed.get_rank() == 0
    plan = plan_refit(load_config("tiny-llama"), chunks, GenMesh())
    check = _layout_check(plan, bridge, chunks)
    assert check is not None
    check()
    assert _layout_check(plan, bridge, chunks) is None
    with k_and_v_exchanged() if first else nullcontext():
        again = _layout_check(plan, bridge, chunks)
        assert again is not None
        with pytest.raises(LayoutError) if first else nullcontext():
            again()
    assert _layout_check(plan_refit(load_config("tiny-llama"), chunks, GenMesh(tp=2)), bridge, chunks) is not None

    files = checkpoint_tensors(bridge)
    traces = _trainer_traces(bridge, chunks, files)
    with mock.patch.object(plan_traced_refit, "trace_live", side_effect=AssertionError("traced again")):
        assert _trainer_traces(bridge, chunks, files) == traces
    with k_and_v_exchanged() if first else nullcontext():
        assert _trainer_traces(bridge, chunks, files) != traces


def test_what_bridge_did_for_an_equal_trainer_is_not_traced_again(tmp_path: Path) -> None:
    run_trainers(tmp_path, load_config("tiny-llama"), TrainMesh(tp=2), traced_once)
