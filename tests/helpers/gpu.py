"""Marks and probes of the tests on GPUs. `make test-gpu` runs them; elsewhere they are skipped with the reason."""

from __future__ import annotations

import os
from importlib.metadata import PackageNotFoundError, version

import pytest
import torch


def needs_gpus(count: int) -> pytest.MarkDecorator:
    available = torch.cuda.device_count()
    return pytest.mark.skipif(available < count, reason=f"needs {count} CUDA devices, there are {available}")


def device_of(number: int) -> torch.device:
    """The GPU of process `number`, from now on its current one. Where processes outnumber GPUs they share them.

    NCCL takes no GPU twice on one host, by the host's hash that `NCCL_HOSTID` replaces (its init.cc): who takes a GPU
    for the second time says that it is on another host. NCCL then connects the two over the network, here by sockets.
    Call it before NCCL is used.
    """
    turn, index = divmod(number, torch.cuda.device_count())
    if turn:
        os.environ["NCCL_HOSTID"] = f"turn-{turn}"
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def has_transformer_engine() -> bool:
    """Whether the real one is installed: in the tests' own process Megatron has the stand-in."""
    try:
        version("transformer-engine")
    except PackageNotFoundError:
        return False
    return True
