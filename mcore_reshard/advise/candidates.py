"""The meshes that a model allows on so many GPUs: degrees that divide, cuts that Megatron-Core and the engine can make."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace

from mcore_reshard.planner.layout.engines import Engine
from mcore_reshard.planner.layout.megatron import MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.layout.partitions import Layout
from mcore_reshard.planner.model.parameters import ModelParameters

MOST_STAGES = 16  # pipeline stages of a trainer
MOST_ENGINE_STAGES = 4
_REASONS_SHOWN = 8


def train_candidates(
    model: ModelParameters, gpus: int, domain_gpus: int
) -> tuple[list[tuple[TrainMesh, Layout]], list[str]]:
    """(meshes with their layouts, why the others are none): tp within an NVLink domain, etp = cp = vpp = 1."""
    reasons: Counter[str] = Counter()
    fitting: list[tuple[TrainMesh, Layout]] = []
    experts = model.architecture.experts or 1
    for tp in _powers_of_two(domain_gpus):
        for pp in _divisors(gpus, MOST_STAGES):
            for ep in _divisors(experts, gpus):
                if gpus % (tp * pp) or (gpus // pp) % ep:
                    continue
                mesh = _with_layers(TrainMesh(tp=tp, pp=pp, ep=ep, dp=gpus // (tp * pp)), model.architecture.layers)
                if mesh is None:
                    reasons[f"pp = {pp} exceeds the {model.architecture.layers} layers"] += 1
                    continue
                layout = MegatronLayout(model, mesh)
                if violations := layout.violations():
                    reasons.update(violations)
                else:
                    fitting.append((mesh, layout))
    return fitting, _most_common(reasons)


def gen_candidates(model: ModelParameters, engine: Engine, gpus: int) -> tuple[list[tuple[GenMesh, Layout]], list[str]]:
    """(meshes with their layouts, why the others are none): experts cut by tp, or expert parallelism over all of a stage."""
    reasons: Counter[str] = Counter()
    fitting: list[tuple[GenMesh, Layout]] = []
    for tp in _powers_of_two(gpus):
        for pp in _divisors(gpus, MOST_ENGINE_STAGES):
            if gpus % (tp * pp):
                continue
            dp = gpus // (tp * pp)
            for ep in {1, tp * dp} if model.architecture.experts else {1}:
                try:
                    mesh = GenMesh(tp=tp, pp=pp, dp=dp, ep=ep)
                    mesh.stage_layers(model.architecture.layers)
                except MeshError as error:
                    reasons.update(error.violations)
                    continue
                layout = engine.layout(model, mesh)
                if violations := layout.violations():
                    reasons.update(violations)
                else:
                    fitting.append((mesh, layout))
    return fitting, _most_common(reasons)


def _with_layers(mesh: TrainMesh, layers: int) -> TrainMesh | None:
    """The mesh with its layers spread as evenly as can be, the longer stages first; None for more stages than layers."""
    if mesh.pp > layers:
        return None
    if layers % mesh.pp == 0:
        return mesh
    base, longer = divmod(layers, mesh.pp)
    return replace(mesh, layers=(base + 1,) * longer + (base,) * (mesh.pp - longer))


def _divisors(number: int, most: int) -> Iterator[int]:
    return (each for each in range(1, min(number, most) + 1) if number % each == 0)


def _powers_of_two(most: int) -> list[int]:
    return [1 << exponent for exponent in range(most.bit_length())]


def _most_common(reasons: Counter[str]) -> list[str]:
    return [reason for reason, _ in reasons.most_common(_REASONS_SHOWN)]
