"""What `mr.dtensor.connect` refuses: on all ranks alike, before it waits for an engine, and without a store left behind."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from helpers.dtensor_trainer import join
from helpers.front_door import free_address, goes_on_listening
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial

import mcore_reshard as mr
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.processes import run_processes


class AsPeftWraps(torch.nn.Module):
    """The modules of a linear that peft has given a LoRA adapter (tuners/lora/layer.py); peft is not installed here."""

    def __init__(self, base_layer: torch.nn.Linear) -> None:
        super().__init__()
        self.base_layer = base_layer
        self.lora_A = torch.nn.ModuleDict({"default": torch.nn.Linear(3, 2, bias=False)})
        self.lora_B = torch.nn.ModuleDict({"default": torch.nn.Linear(2, 4, bias=False)})


def refused(rank: int, folder: Path, address: str) -> dict[str, str]:
    join(rank, 2, folder)
    mesh = init_device_mesh("cpu", (2,))
    said = {}

    def attempt(case: str, module: Any, hf_config: Any = load_config("tiny-llama"), **given: Any) -> None:  # noqa: B008
        arguments: dict[str, Any] = {"gen": "tp=1", "store": address, "connect_timeout_s": 2.0, **given}
        try:
            mr.dtensor.connect(module, hf_config, **arguments)
        except Exception as error:
            said[case] = f"{type(error).__name__}: {error}"
        dist.barrier()
        said[case] += ", and a store was left behind" * goes_on_listening(address)
        dist.barrier()

    def linear(rows: int = 4) -> torch.nn.Module:
        return fully_shard(torch.nn.Linear(3, rows), mesh=mesh)

    sums = torch.nn.Linear(3, 4)
    sums.weight = torch.nn.Parameter(DTensor.from_local(torch.ones(4, 3), mesh, [Partial()]))
    attempt("arguments", "model", 3, store="10.0.0.1", options=None)
    attempt("families", linear(), load_config(("tiny-llama", "tiny-qwen3")[rank]))
    attempt("tensors", torch.nn.Linear(3, 4 + rank))
    attempt("sums", sums)
    attempt("adapters", torch.nn.ModuleDict({"q_proj": AsPeftWraps(torch.nn.Linear(3, 4))}))
    attempt("absent", linear())
    return said


def test_all_ranks_refuse_alike(tmp_path: Path) -> None:
    for said in run_processes(2, refused, (tmp_path, free_address()), timeout_s=90):
        assert not [case for case, message in said.items() if "left behind" in message]
        assert said["arguments"].startswith("RefitError: connect() cannot use its arguments:")
        for part in ("module is a str", "the config is a", "'10.0.0.1' is not the address", "options is a NoneType"):
            assert part in said["arguments"]
        assert "configs of different models: llama on train:0, qwen3 on train:1" in said["families"]
        assert "train:1 would save other tensors than train:0: give every rank the whole module" in said["tensors"]
        assert "weight: P(sum) holds terms of a sum" in said["sums"]
        assert "1 modules have adapters (peft), first q_proj: no tensor holds" in said["adapters"]
        assert "gen:0 did not say within 2 s how they load" in said["absent"]
