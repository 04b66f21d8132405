"""A Megatron-Bridge that keeps weights otherwise than the rules is found at `connect`, on every rank, before a byte moves."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest import mock

import pytest

pytest.importorskip("megatron.core", reason="needs the extra `megatron`")

import torch
from helpers.front_door import free_address
from helpers.trainers import run_trainers

import mcore_reshard as mr
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.trainer.build import Trainer


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    """Import it before the ranks are forked."""
    from mcore_reshard.validation.trainer.build import prepare

    prepare()


def connected(trainer: Trainer, folder: Path, address: str) -> str:
    """What `connect` says where Bridge merges k and v in each other's place."""
    from megatron.bridge.models.conversion import param_mapping

    merge = param_mapping.merge_qkv_weights

    def exchanged(config: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
        return merge(config, q, v, k)

    with mock.patch.object(param_mapping, "merge_qkv_weights", exchanged), pytest.raises(RefitError) as raised:
        mr.megatron.connect(
            trainer.model_chunks, trainer.bridge, folder / "1", gen="tp=1", store=address, connect_timeout_s=20
        )
    return str(raised.value)


def test_k_and_v_in_each_others_place(tmp_path: Path) -> None:
    address = free_address()
    for said in run_trainers(tmp_path, load_config("tiny-llama"), TrainMesh(tp=2), connected, address):
        assert "megatron-bridge" in said and "otherwise than the plan's rules" in said
        assert "linear_qkv.weight: of model.layers.0.self_attn.k_proj.weight the plan has" in said
