"""The meshes with the fastest refits among those that fit in memory.

1. every mesh that the model allows on these GPUs, whose memory is counted from its layout
2. a short list: engine meshes by the bytes of a GPU, training meshes by how evenly their ranks can send
3. a plan for each pair of the short list, on these hosts: how long its busiest link is busy, also with PXN
4. a simulation of the first few
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import log
from typing import Any

import numpy as np

from mcore_reshard.planner.layout.engines import Engine, engine_named
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.parameters import ModelParameters
from mcore_reshard.planner.model.precision import FP8, QUANTIZED, Precision, precision_of
from mcore_reshard.planner.plan.loads import busy_seconds, rail_bytes
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.paths import LINK_NAMES, LINKS, NIC, NVLINK
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology
from mcore_reshard.planning import InputError, PlanRequest
from mcore_reshard.report.text import size
from mcore_reshard.simulate.simulate import simulate

from .candidates import gen_candidates, train_candidates
from .footprint import STATE_BYTES, engine_bytes, placed, send_shares, trainer_bytes

# Bytes of a GPU's memory. Source: NVIDIA's data sheets.
GPU_BYTES = {"h100-8": 80_000_000_000, "h200-8": 141_000_000_000, "gb200-nvl72": 186_000_000_000}
ACTIVATIONS = 0.3  # of a trainer's GPU, kept for activations, buffers and a refit's scratch
KV_CACHE = 0.3  # of an engine's GPU, kept for the KV cache, activations and a refit's tables
MOST_GPUS = 4096  # of a side
_GEN_MESHES, _TRAIN_MESHES = 6, 6  # of the short list
_MANY_GPUS = 64  # of a trainer; with more, plans take longer: half as many of its meshes
_SIMULATED = 3  # pairs
_NEAR = 1.1  # costs that differ by less count as equal: other things decide
_AS_FAST = 1.01  # bounds up to so many times the least count as equal
_NOTEWORTHY_NEAR = 0.005  # of the bytes: less is shown as 0%
_NOTEWORTHY_MISC = 0.01  # share of the bytes
_NOTEWORTHY_RAILS = 1.02  # of what leaves by the busiest GPU's own NIC


@dataclass(frozen=True, slots=True)
class Advice:
    """A pair of meshes that fits in memory, and its refit."""

    train: TrainMesh
    gen: GenMesh
    bound_seconds: float  # for which the busiest link is busy, each at its full bandwidth
    simulated_seconds: float | None  # None: of the first few alone
    train_bytes: int  # on the fullest training GPU: weights, gradients, optimizer states
    gen_bytes: int  # on the fullest generation GPU: weights
    reason: str


@dataclass(frozen=True, slots=True)
class Advised:
    """The answer: pairs of meshes, one for each mesh of the engine. Those that were simulated come first, the fastest ahead."""

    model: str
    gpu_bytes: int
    pairs: tuple[Advice, ...]
    fitting: tuple[int, int]  # training and generation meshes that fit in memory
    allowed: tuple[int, int]  # that the model allows
    assumptions: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Side:
    """A mesh that fits in memory."""

    mesh: Any
    nbytes: int
    cost: float  # what the short list is chosen by: bytes into or out of the busiest GPU


def advise(request: PlanRequest, topology: Topology, *, pxn: bool = True) -> Advised:
    """Advise on the meshes of a model for the ranks of a topology. The meshes of `request` are not looked at.

    `pxn` is as for `simulate`. Raises InputError where no mesh is possible or none fits in memory, with the reasons.
    """
    model, engine = request.model_parameters, engine_named(request.engine)
    train_model = precision_of(request.train_dtype, model).main(model)
    engine_model = _held_by(engine, model, precision_of(request.gen_dtype, model))
    machine, gpu_bytes = topology.machine, GPU_BYTES[topology.machine.name]
    trains, no_train = train_candidates(train_model, len(topology.train), machine.gpus * machine.hosts_per_domain)
    gens, no_gen = gen_candidates(engine_model, engine, len(topology.gen))
    if problems := [
        *(f"training on {len(topology.train)} GPUs: {reason}" for reason in no_train if not trains),
        *(f"generation on {len(topology.gen)} GPUs: {reason}" for reason in no_gen if not gens),
    ]:
        raise InputError(problems)
    shared = bool({*topology.train} & {*topology.gen})
    gen_sides, train_sides = [], []
    for gen_mesh, layout in gens:
        parts = placed(layout, engine_model, gen_mesh.world)
        held = int(engine_bytes(parts, gen_mesh.world).max())
        gen_sides.append(_Side(gen_mesh, held, held))
    for train_mesh, layout in trains:
        parts = placed(layout, train_model, train_mesh.world)
        leaving = float(send_shares(parts, train_mesh.world).max())
        train_sides.append(_Side(train_mesh, int(trainer_bytes(parts, train_model.dtype, train_mesh).max()), leaving))
    train_room, gen_room = gpu_bytes * (1 - ACTIVATIONS), gpu_bytes * (1 - KV_CACHE)
    problems = _misfits(gen_sides, gen_room, "generation", gpu_bytes)
    beside = ""
    if shared and not problems:
        train_room -= min(side.nbytes for side in gen_sides)
        beside = " beside the smallest engine"
    if problems := [*_misfits(train_sides, train_room, "training", gpu_bytes, beside), *problems]:
        raise InputError(problems)
    if shared:
        gen_room -= min(side.nbytes for side in train_sides)
    fitting_trains = [side for side in train_sides if side.nbytes <= train_room]
    fitting_gens = [side for side in gen_sides if side.nbytes <= gen_room]
    pairs: list[tuple[Advice, Plan]] = []
    train_meshes = _TRAIN_MESHES if len(topology.train) <= _MANY_GPUS else _TRAIN_MESHES // 2
    for gen in _short_list(fitting_gens, _GEN_MESHES):
        room = gpu_bytes * (1 - KV_CACHE) - gen.nbytes if shared else train_room
        with_gen = [side for side in fitting_trains if side.nbytes <= room]
        tried = [_advice(request, topology, train, gen, pxn=pxn) for train in _short_list(with_gen, train_meshes)]
        as_fast = _AS_FAST * min((advice.bound_seconds for advice, _ in tried), default=0.0)
        equal = (pair for pair in tried if pair[0].bound_seconds <= as_fast)
        pairs += sorted(equal, key=lambda pair: (_cuts(pair[0].train), pair[0].bound_seconds))[:1]
    pairs.sort(key=lambda pair: pair[0].bound_seconds)
    simulated = [
        replace(advice, simulated_seconds=simulate(plan, topology, pxn=pxn).seconds)
        for advice, plan in pairs[:_SIMULATED]
    ]
    simulated.sort(key=lambda advice: advice.simulated_seconds or 0.0)
    return Advised(
        request.model,
        gpu_bytes,
        (*simulated, *(advice for advice, _ in pairs[_SIMULATED:])),
        (len(fitting_trains), len(fitting_gens)),
        (len(trains), len(gens)),
        _assumptions(train_model, topology, shared),
    )


def _held_by(engine: Engine, model: ModelParameters, precision: Precision) -> ModelParameters:
    """The model in the dtypes that an engine holds. Scales of blocks, 0.02% of the bytes, are left out."""
    model = precision.main(model)
    if precision.format is None:
        return model
    model = engine.quantized(model, precision.format)
    groups = (
        replace(group, dtype=FP8)
        if group.role in QUANTIZED and engine.quantizes(group, group.layers[0] if group.layers else None, model)
        else group
        for group in model.groups
    )
    return replace(model, groups=tuple(groups))


def _misfits(sides: Sequence[_Side], room: float, side: str, gpu_bytes: int, beside: str = "") -> list[str]:
    """What the smallest mesh takes, where none fits; `beside` names what else is on its GPUs."""
    least = min(each.nbytes for each in sides)
    if least <= room:
        return []
    return [
        f"no {side} mesh fits: the smallest takes {size(least)} of each GPU, and {size(room)} of"
        f" {size(gpu_bytes)} are for it{beside}: give more GPUs"
    ]


def _short_list(sides: Sequence[_Side], most: int) -> list[_Side]:
    """The cheapest; of nearly equal ones those that cut layers and pipelines least, which train and generate fastest."""
    least = min(side.cost for side in sides)

    def order(side: _Side) -> tuple[int, tuple[int, int], int]:
        return int(log(side.cost / least, _NEAR)), _cuts(side.mesh), side.nbytes

    return sorted(sides, key=order)[:most]


def _cuts(mesh: TrainMesh | GenMesh) -> tuple[int, int]:
    """In how many parts a mesh cuts the layers, and in how many stages; fewer are better."""
    return mesh.tp * mesh.pp, mesh.pp


def _advice(request: PlanRequest, topology: Topology, train: _Side, gen: _Side, *, pxn: bool) -> tuple[Advice, Plan]:
    plan = located(replace(request, train=train.mesh, gen=gen.mesh).plan(), topology)
    seconds, leaving = busy_seconds(plan), None
    if pxn and plan.spans_hosts:
        leaving = int(rail_bytes(plan).left.max())
        entering = np.bincount(topology.gpus("gen"), plan.loads.received[NIC]).max()
        seconds[NIC] = max(leaving, entering) / topology.machine.nic
    link = max(LINKS, key=seconds.__getitem__)
    reason = _reason(plan, link, leaving)
    return Advice(train.mesh, gen.mesh, seconds[link], None, train.nbytes, gen.nbytes, reason), plan


def _reason(plan: Plan, link: int, leaving: int | None) -> str:
    """What keeps the busiest link busy, in words. `leaving`: by the busiest NIC with PXN, if ranks use it."""
    name, sent, received = LINK_NAMES[link], plan.loads.sent[link], plan.loads.received[link]
    if link != NIC or leaving is None:
        leaving = int(sent.max())
    if leaving > max(received.max(), _NOTEWORTHY_RAILS * sent.max()):
        words = [f"{size(leaving)} leave by the NIC of one rail"]
    elif min(leaving, sent.max()) > received.max():
        words = [f"{size(sent.max())} leave a trainer by {name}"]
        if sent.max() > 1.1 * sent.mean():
            words.append(f"{sent.max() / sent.mean():.1f} times the mean")
    else:
        words = [f"{size(received.max())} enter by {name}"]
    copies = plan.recv_bytes.sum() / max(1, plan.bulk_bytes)
    words.append(f"{copies:.1f} copies in all" if copies >= 1.05 else "each byte once")
    near = plan.loads.received[: NVLINK + 1].sum() / max(1, plan.loads.received.sum())
    if near >= _NOTEWORTHY_NEAR:
        words.append(f"{near:.0%} from the own host")
    if plan.misc_bytes > _NOTEWORTHY_MISC * (plan.bulk_bytes + plan.misc_bytes):
        words.append(f"{size(plan.misc_bytes)} go by misc, slowly")
    return "; ".join(words)


def _assumptions(model: ModelParameters, topology: Topology, shared: bool) -> tuple[str, ...]:
    state = STATE_BYTES.get(model.dtype, STATE_BYTES["bfloat16"])
    machine = topology.machine
    return (
        f"a trainer keeps {state.replicated} + {state.divided}/d bytes for each parameter, d its replicas: Megatron's"
        f" distributed optimizer with Adam; {ACTIVATIONS:.0%} of the GPU is kept for activations",
        f"an engine keeps its weights; {KV_CACHE:.0%} of the GPU is kept for the KV cache",
        *(["trainer and engine share GPUs, and both are in memory at once"] if shared else []),
        f"{machine.name}: {size(GPU_BYTES[machine.name])} a GPU, NVLink {size(machine.nvlink)}/s and NIC"
        f" {size(machine.nic)}/s each way; the bound is its busiest link, and the first few are simulated",
        "etp, cp and vpp are 1, tp is within an NVLink domain of the trainer; how fast training and generation run is not"
        " looked at",
    )
