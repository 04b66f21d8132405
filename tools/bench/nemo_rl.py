"""NeMo-RL's `xferdtensor` on the experts of a MoE, from a checkout that the user names (`--nemo-rl PATH`).

Its refit stacks a layer's local experts, moves the stack as a DTensor-like reference, and copies the arrived part into
the engine's fused tensor. This does the same. `xferdtensor_python` is its point-to-point path, golden its broadcast.
"""

from __future__ import annotations

import hashlib
import re
import socket
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import torch

from .methods import Options, Prepared, Unavailable
from .ranks import Rank

_LAYER = re.compile(r"\.layers\.(\d+)\.")
_POINT_TO_POINT = "nemo_rl.weight_sync.xferdtensor_python"
_GOLDEN = "nemo_rl.weight_sync.xferdtensor"
_GROUP = "nemo_rl.distributed.stateless_process_group"


def point_to_point(rank: Rank, options: Options) -> Prepared:
    return _prepared(rank, _POINT_TO_POINT, "xferdtensor_python_impl")


def golden(rank: Rank, options: Options) -> Prepared:
    return _prepared(rank, _GOLDEN, "xferdtensor_golden")


def _prepared(rank: Rank, module: str, function: str) -> Prepared:
    if not rank.on_cuda or rank.launch.gpus < rank.ranks:
        raise Unavailable("NCCL needs a GPU for every rank")
    root = rank.launch.nemo_rl
    if root is None:
        raise Unavailable("not given: --nemo-rl PATH of a checkout of github.com/NVIDIA-NeMo/RL")
    start = time.perf_counter()
    load(root)
    try:
        group_of = import_module(_GROUP).StatelessProcessGroup
        move, reference = getattr(import_module(module), function), import_module(_GOLDEN).DTensorRef
    except (ImportError, AttributeError) as error:
        raise Unavailable(f"{root} has no {module}.{function} that can be loaded: {error}") from error
    experts = Experts(rank, reference)
    importing_s = time.perf_counter() - start
    if rank.number == 0:
        rank.store.set("port", str(_free_port()))
    group = group_of("127.0.0.1", int(rank.store.get("port")), rank.number, rank.ranks)
    group.init_nccl_communicator(rank.device.index)
    source = hashlib.sha256((root / f"{module.replace('.', '/')}.py").read_bytes()).hexdigest()[:12]
    return Prepared(
        lambda: experts.move(move, group),
        lambda: None,
        facts=lambda: {"source": f"{module} sha256 {source}"},
        building_s=importing_s,
    )


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


def load(root: Path) -> None:
    """Make `nemo_rl`'s submodules importable without running its packages' own imports (ray and the like)."""
    for name in ("nemo_rl", "nemo_rl.distributed", "nemo_rl.weight_sync"):
        package = ModuleType(name)
        package.__path__ = [str(root / name.replace(".", "/"))]
        sys.modules[name] = package


@dataclass(frozen=True, slots=True)
class _Layer:
    """A layer's expert tensors: one an expert on training ranks, one for all on generation ranks."""

    gate_up: list[torch.Tensor]  # [2 I, H] each, or [E, 2 I / G, H]
    down: list[torch.Tensor]  # [H, I] each, or [E, H, I / G]


class Experts:
    """The workload's experts as NeMo-RL's placements say them: EP cuts dim 0 of the stack, TP the width."""

    def __init__(self, rank: Rank, reference: Callable[..., Any]) -> None:
        from torch.distributed.tensor import Replicate, Shard

        case = rank.case
        mesh = rank.plan.train
        if not case.experts_only or mesh.ep != case.train_ranks or rank.plan.gen.tp != case.gen_ranks:
            raise Unavailable("measured on the experts alone, one expert-parallel group to one tensor-parallel group")
        self._reference = reference
        self._trains = rank.world == "train"
        self._layers = _by_layer(rank.tensors, "linear_fc1" if self._trains else "w13", self._trains)
        self._src_mesh = SimpleNamespace(mesh=torch.arange(case.train_ranks).reshape(1, -1))
        self._dst_mesh = SimpleNamespace(mesh=torch.arange(case.train_ranks, rank.ranks).reshape(1, -1))
        self._src = [Replicate(), Shard(0)]
        self._dst = {"gate": [Replicate(), Shard(1)], "up": [Replicate(), Shard(1)], "down": [Replicate(), Shard(2)]}
        one = self._layers[0]
        experts = len(one.down) * case.train_ranks if self._trains else one.down[0].shape[0]
        hidden = one.down[0].shape[-2]
        width = one.down[0].shape[-1] * (1 if self._trains else case.gen_ranks)
        self._shapes = {
            "gate": (experts, width, hidden),
            "up": (experts, width, hidden),
            "down": (experts, hidden, width),
        }

    def move(self, move: Callable[..., Any], group: Any) -> None:
        for layer in self._layers:
            for projection in ("gate", "up", "down"):
                part = self._part(layer, projection)
                src = dst = None
                if self._trains:
                    src = self._reference(torch.stack(part), self._shapes[projection])
                else:
                    # gate and up share an engine tensor: they land in a buffer of their own first
                    landing = part[0] if projection == "down" else torch.empty_like(part[0]).contiguous()
                    dst = self._reference(landing, self._shapes[projection])
                move(src, self._src_mesh, self._src, dst, self._dst_mesh, self._dst[projection], group)
                if dst is not None and projection != "down":
                    part[0].copy_(dst._local_tensor)

    def _part(self, layer: _Layer, projection: str) -> list[torch.Tensor]:
        if projection == "down":
            return layer.down
        dim = -2
        half = layer.gate_up[0].shape[dim] // 2
        return [tensor.narrow(dim, 0 if projection == "gate" else half, half) for tensor in layer.gate_up]


def _by_layer(tensors: Any, gate_up: str, trains: bool) -> list[_Layer]:
    """Tensors of a rank by layer; on training ranks by expert within it."""
    layers: dict[int, _Layer] = {}
    for name in sorted(tensors, key=_numbers):
        number = int(_LAYER.search(name).group(1))  # type: ignore[union-attr]
        layer = layers.setdefault(number, _Layer([], []))
        (layer.gate_up if gate_up in name else layer.down).append(tensors[name])
    return [layers[number] for number in sorted(layers)]


def _numbers(name: str) -> list[int]:
    return [int(number) for number in re.findall(r"\d+", name)]
