"""Mutants that meet tensors: what a rank binds, what it is bound to later, and rules that only golden refutes."""

from __future__ import annotations

import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import patch

import numpy as np
import torch
from helpers.deliver import deliver
from helpers.golden import differences
from helpers.handmade import allocate
from helpers.plans import Case

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.errors import BindError, StaleTensorError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.mesh import GenMesh
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World
from mcore_reshard.planner.proof.prove import prove

from .edits import moved, recut, retensor, rows, whole_of, without_groups
from .in_plans import DATA_PARALLEL, FEW_HEADS, LLAMA, MOE, NEMOTRON
from .records import Mutant, Rejection

Tensors = dict[str, torch.Tensor]

_found: list[Mutant] = []


def _first_line_with(error: Exception, word: str) -> str:
    return next((line.strip() for line in str(error).splitlines() if word in line), str(error))


# --- binding


def _bound(
    case: Case, world: World, rank: int, harm: Callable[[Schedule, Tensors], Schedule | None]
) -> Rejection | None:
    schedule = schedule_of(case.plan(), world, rank)
    tensors = allocate(schedule)
    schedule = harm(schedule, tensors) or schedule
    try:
        bind(schedule, tensors)
    except BindError as error:
        return _binding_rejection(error, f"{world}:{rank}")
    return None


def _binding_rejection(error: BindError, rank: str) -> Rejection:
    parameter = re.search(r"\(holds (\S+?)\)|first (\S+) in ", str(error))
    assert str(error).startswith(rank)
    name = next(filter(None, parameter.groups()), "") if parameter else ""
    return Rejection("binding", "BindError", name, rank, "; ".join(error.problems[-2:]))


def binds(bug: int, what: str, case: Case, world: World, rank: int = 1):  # type: ignore[no-untyped-def]
    """Register harm to a rank's tensors (by name) or schedule, which binding must refuse."""

    def register(harm: Callable[[Schedule, Tensors], Schedule | None]) -> None:
        _found.append(Mutant(bug, what, ("binding", "BindError"), partial(_bound, case, world, rank, harm)))

    return register


def _name_with(tensors: Tensors, part: str) -> str:
    return next(name for name in tensors if part in name)


@binds(4, "the trainer's o_proj became fp32 before the session", LLAMA, "train")
def _(schedule: Schedule, tensors: Tensors) -> None:
    name = _name_with(tensors, "linear_proj")
    tensors[name] = tensors[name].float()


@binds(12, "the receiver counts half of the bytes that are sent", LLAMA, "gen")
def _(schedule: Schedule, tensors: Tensors) -> Schedule:
    stages = list(schedule.stages)
    recvs = stages[1].recvs
    stages[1] = replace(stages[1], recvs=replace(recvs, nbytes=recvs.nbytes // 2))
    return replace(schedule, stages=tuple(stages))


@binds(16, "the engine keeps qkv_proj transposed", LLAMA, "gen")
def _(schedule: Schedule, tensors: Tensors) -> None:
    name = _name_with(tensors, "qkv_proj")
    tensors[name] = tensors[name].T.contiguous().T


@binds(25, "the engine packed w2 as fp8 with scales of its own", MOE, "gen")
def _(schedule: Schedule, tensors: Tensors) -> None:
    name = _name_with(tensors, "w2_weight")
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)


@binds(23, "a destination tensor has another name in the engine", NEMOTRON, "gen")
def _(schedule: Schedule, tensors: Tensors) -> None:
    tensors["mixer.D"] = tensors.pop(_name_with(tensors, "mixer.D"))


@binds(17, "a tensor lies in a layout without strides", LLAMA, "gen")
def _(schedule: Schedule, tensors: Tensors) -> None:
    name = _name_with(tensors, "o_proj")
    tensors[name] = tensors[name].to_sparse()


def _bound_by_a_wrong_plan(case: Case, planned: Callable[[], Plan], world: World, rank: int) -> Rejection | None:
    """The live tensors are those of the good plan; the schedule comes from another one, sound in itself."""
    plan = planned()
    for violation in prove(plan).violations:
        return Rejection("proof", violation.rule, violation.parameter, violation.ranks, violation.message)
    tensors = allocate(schedule_of(case.plan(), world, rank))
    try:
        bind(schedule_of(plan, world, rank), tensors)
    except BindError as error:
        return _binding_rejection(error, f"{world}:{rank}")
    return None


def half_a_head(plan: Plan) -> Plan:
    """Eight ranks share two KV heads: each gets a quarter of one, in a tensor that is smaller for it."""
    quarter = 2

    def fewer_rows(piece):  # type: ignore[no-untyped-def]
        q_rows, hidden = 8, piece.tensor.shape[1]
        tensor = replace(piece.tensor, shape=(q_rows + 2 * quarter, hidden))
        return replace(piece, tensor=tensor, view=tensor.shape)

    def change(place: int):  # type: ignore[no-untyped-def]
        return lambda c, pieces: [
            fewer_rows(moved(rows(pieces[0], c * quarter, (c + 1) * quarter), 8 + place * quarter))
        ]

    plan = recut(recut(plan, Role.K, dst=change(0)), Role.V, dst=change(1))
    return recut(plan, Role.Q, dst=lambda c, pieces: [fewer_rows(piece) for piece in pieces])


def renamed(plan: Plan) -> Plan:
    return retensor(plan, Role.O, lambda t: replace(t, name=t.name.replace("o_proj", "out_proj")), source=False)


def binds_by(bug: int, what: str, case: Case, planned: Callable[[], Plan], world: World) -> None:
    refused = partial(_bound_by_a_wrong_plan, case, planned, world, 1)
    _found.append(Mutant(bug, what, ("binding", "BindError"), refused))


DENSE_EXPERTS = replace(MOE, train="tp=2,ep=2,etp=2,dp=2")

binds_by(
    8,
    "KV heads are cut in four, where the engine replicates them",
    FEW_HEADS,
    lambda: half_a_head(FEW_HEADS.plan()),
    "gen",
)
binds_by(10, "o_proj is planned into a tensor that no engine has", LLAMA, lambda: renamed(LLAMA.plan()), "gen")
binds_by(7, "experts are planned with dense tensor parallelism", MOE, DENSE_EXPERTS.plan, "train")
binds_by(
    13, "the engine of tp=2, dp=2 is planned as tp=4", DATA_PARALLEL, replace(DATA_PARALLEL, gen="tp=4").plan, "gen"
)


# --- tensors that change after binding


def goes_stale(bug: int, what: str, harm: Callable[[str, Tensors], None]) -> None:
    def refused() -> Rejection | None:
        schedule = schedule_of(LLAMA.plan(), "gen", 2)
        tensors = allocate(schedule)
        bound = bind(schedule, tensors)
        bound.check_fresh(tensors)
        name = _name_with(tensors, "gate_up_proj")
        harm(name, tensors)
        try:
            bound.check_fresh(tensors)
        except StaleTensorError as error:
            return Rejection("binding", "StaleTensorError", name, "gen:2", _first_line_with(error, name))
        return None

    _found.append(Mutant(bug, what, ("binding", "StaleTensorError"), refused))


def _replace(change: Callable[[torch.Tensor], torch.Tensor]) -> Callable[[str, Tensors], None]:
    def harm(name: str, tensors: Tensors) -> None:
        tensors[name] = change(tensors[name])

    return harm


goes_stale(4, "an engine tensor was cast between refits", _replace(torch.Tensor.float))
goes_stale(22, "an engine tensor was rebound to a copy", _replace(torch.clone))
goes_stale(
    22, "an engine tensor was rebound to a view of other strides", _replace(lambda t: t.reshape(t.shape[::-1]).T)
)
goes_stale(22, "an engine tensor is gone", lambda name, tensors: tensors.__delitem__(name))


# --- limits


def exceeds(bug: int, what: str, bucket_bytes: int) -> None:
    def refused() -> Rejection | None:
        try:
            Options(bucket_bytes=bucket_bytes)
        except ValueError as error:
            return Rejection("limits", "ValueError", "all parameters", "gen:0", str(error))
        return None

    _found.append(Mutant(bug, what, ("limits", "ValueError"), refused))


exceeds(14, "one bucket for a whole fused model", 14 << 30)
exceeds(21, "messages of 4 GiB, counted in 32 bits", 1 << 32)
exceeds(30, "buckets smaller than one aligned element", 8)
exceeds(30, "buckets that end between aligned parts", 1000)


# --- golden


def golden_shows(
    bug: int, what: str, case: Case, planned: Callable[[], Plan], *, bug_in_place: Callable[[], Any] = nullcontext
) -> None:
    """Register a plan that is sound in itself, and that only golden can tell from the model's real layout."""

    def refused() -> Rejection | None:
        with bug_in_place():
            plan = planned()
            for violation in prove(plan).violations:
                return Rejection("proof", violation.rule, violation.parameter, violation.ranks, violation.message)
        for found in differences(case, plan):
            return Rejection("golden", "bytes", found.tensor, f"gen {found.gen_rank}", found.message)
        return None

    _found.append(Mutant(bug, what, ("golden", "bytes"), refused))


def qkv_as_sections() -> Plan:
    """linear_qkv read as [q; k; v] over all ranks, where Megatron-Core keeps [q; k; v] for every KV group."""
    plan = DATA_PARALLEL.plan()
    sizes = [(role, whole_of(plan, role).stop[0]) for role in (Role.Q, Role.K, Role.V)]
    local, first = sum(size for _, size in sizes) // plan.train.tp, 0
    for role, size in sizes:

        def change(c: int, pieces, first: int = first, size: int = size):  # type: ignore[no-untyped-def]
            low, high = max(first, c * local), min(first + size, (c + 1) * local)
            return [rows(pieces[0], low - first, high - first, at=low - c * local)] if low < high else []

        plan = recut(plan, role, src=change)
        first += size
    return plan


def left_over_layers_first(mesh: GenMesh, num_layers: int) -> tuple[int, ...]:
    """As numpy.array_split would do it; vLLM gives layers left over to the stages before the last."""
    return tuple(stage for stage, layers in enumerate(np.array_split(range(num_layers), mesh.pp)) for _ in layers)


def norms_exchanged() -> Plan:
    """Two norms of one shape, each written where the other belongs."""

    def exchanged(tensor: LocalTensor) -> LocalTensor:
        one, other = "input_layernorm", "post_attention_layernorm"
        name = tensor.name.replace(one, "*").replace(other, one).replace("*", other)
        return replace(tensor, name=name)

    plan = LLAMA.plan()
    for role in (Role.ATTENTION_NORM, Role.MLP_NORM):
        plan = retensor(plan, role, exchanged, source=False)
    return plan


UNEVEN_PIPELINE = Case("tiny-llama", "tp=2", "pp=3")

golden_shows(8, "linear_qkv is read as [q; k; v], not per KV group", DATA_PARALLEL, qkv_as_sections)
golden_shows(
    5,
    "the model does not list up_proj of non-gated experts",
    NEMOTRON,
    lambda: without_groups(NEMOTRON.plan(), Role.EXPERT_UP),
)
golden_shows(10, "the model does not list o_proj", LLAMA, lambda: without_groups(LLAMA.plan(), Role.O))
golden_shows(11, "two norms of one shape are written to each other's tensors", LLAMA, norms_exchanged)
golden_shows(23, "the model does not list mixer.D", NEMOTRON, lambda: without_groups(NEMOTRON.plan(), Role.MAMBA_D))
golden_shows(
    29,
    "four layers over three engine stages are placed 2, 1, 1, by a function that planner and proof share",
    UNEVEN_PIPELINE,
    UNEVEN_PIPELINE.new_plan,
    bug_in_place=lambda: patch.object(GenMesh, "stage_of_layers", left_over_layers_first),
)

# --- aliases


def _aliased() -> Rejection | None:
    plan = LLAMA.plan()
    schedules = [schedule_of(plan, "train", rank) for rank in range(plan.train.world)]
    trainers = [bind(schedule, allocate(schedule, seed=1)) for schedule in schedules]
    engine = schedule_of(plan, "gen", 0)
    good, aliased = allocate(engine), allocate(engine)
    one, other = (name for name in good if "layers.1." in name and "layernorm" in name)
    aliased[one] = aliased[other]
    for tensors in (good, aliased):
        try:
            deliver(trainers, bind(engine, tensors))
        except BindError as error:
            return _binding_rejection(error, "gen:0")
    for name, tensor in good.items():
        wrong = (tensor.view(torch.int16) != aliased[name].view(torch.int16)).sum().item()
        if wrong:
            return Rejection("golden", "bytes", name, "gen 0", f"{wrong} of {tensor.numel()} elements differ")
    return None


_found.append(Mutant(23, "two tensors of the engine share their storage", ("binding", "BindError"), _aliased))

TENSOR_MUTANTS: tuple[Mutant, ...] = tuple(_found)
