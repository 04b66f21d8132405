"""Names and shapes of a model's checkpoint, as Megatron-Bridge itself names them: no list of any family's parameters.

Bridge's own mappings turn every parameter of a real Megatron-Core model on the meta device into HF tensors. So tensors
that Bridge drops are absent, and models of any size take no memory.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.trainers.megatron.model import export_hf, unwrapped
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.trainer import te_standin
from mcore_reshard.validation.trainer.build import build_on_meta, prepare

_TIMEOUT_S = 300.0  # a process that has to import Megatron first takes 20 s of it


def exported_tensors(config: Mapping[str, Any]) -> dict[str, HfTensor]:
    """HF name -> shape and dtype of every tensor that Bridge exports of the model of `config` (an HF config.json).

    A forked process builds the model; it starts at once where `build.prepare` has run before.
    Raises ProcessError where Bridge or Megatron cannot build it.
    """
    return run_processes(1, _exported_tensors, (config,), timeout_s=_TIMEOUT_S)[0]


def _exported_tensors(_: int, config: Mapping[str, Any]) -> dict[str, HfTensor]:
    prepare()
    torch.distributed.init_process_group("gloo", store=torch.distributed.HashStore(), rank=0, world_size=1)
    with tempfile.TemporaryDirectory() as folder:
        write_config(config, folder)
        bridge, chunks = build_on_meta(folder)
        use_any_checkpoint(bridge)
        with te_standin.cpu_as_device():
            tensors = {
                name: HfTensor(tuple(tensor.shape), dtype_name(tensor.dtype))
                for name, tensor in export_hf(bridge, chunks)
            }
    if unwrapped(chunks[0]).config.share_embeddings_and_output_weights:  # type: ignore[union-attr]
        tensors.pop("lm_head.weight", None)  # one tensor under two names, stored once
    return tensors


def write_config(config: Mapping[str, Any], folder: Path | str) -> None:
    """Write a checkpoint without tensors: MiMo-V2's provider looks into its files for layers of multi-token prediction."""
    from safetensors.torch import save_file

    (Path(folder) / "config.json").write_text(json.dumps(config))
    save_file({}, Path(folder) / "model.safetensors")


def use_any_checkpoint(bridge: Any) -> None:
    """Let a bridge without a checkpoint build all of its tasks: it skips parameters whose HF tensors are not there."""
    from megatron.bridge.models.hf_pretrained.state import StateDict, StateSource

    source = type("AnyCheckpoint", (_AnyCheckpoint, StateSource), {})()
    bridge.hf_pretrained._state_dict_accessor = StateDict(source)


class _AnyCheckpoint:
    """A checkpoint that has every tensor that it is asked for, by name alone."""

    def get_all_keys(self) -> _AnyCheckpoint:
        return self

    def __contains__(self, name: object) -> bool:
        return True

    def __iter__(self) -> Iterator[str]:
        return iter(())

    def __len__(self) -> int:
        return 0

    def load_tensors(self, keys: list[str]) -> dict[str, torch.Tensor]:
        return {}
