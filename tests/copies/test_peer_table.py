"""The pull table, run on the CPU, does what sending and receiving would have done."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from helpers.handmade import raw_bytes
from helpers.plans import TINY, Case
from helpers.simulate import execute, numbered_tensors

from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.planner.plan.make_schedule import relays_of, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import OtherEndView, Schedule, TransferTable

CASES = [TINY[n] for n in (0, 2, 9, 11, 13, 17, 19)]


def filled(schedule: Schedule, arrays: dict[str, np.ndarray]) -> dict[str, torch.Tensor]:  # type: ignore[type-arg]
    """Tensors of the schedule's dtypes that tell elements apart by the low bytes of their number."""
    tensors = {}
    for local in schedule.tensors:
        itemsize = getattr(torch, local.dtype).itemsize
        raw = arrays[local.name].astype(np.int64).view(np.uint8).reshape(-1, 8)[:, :itemsize].copy()
        tensors[local.name] = torch.from_numpy(raw.reshape(-1)).view(getattr(torch, local.dtype)).reshape(local.shape)
    return tensors


@pytest.mark.parametrize("case", CASES, ids=str)
def test_every_element_is_pulled_to_its_place(case: Case) -> None:
    plan = case.plan()
    sources, wanted = numbered_tensors(plan, "train"), numbered_tensors(plan, "gen")
    arrived, faults = execute(plan, sources, wanted)
    assert not faults
    train = [
        filled(schedule_of(plan, "train", rank), {local.name: a for (r, local), a in sources.items() if r == rank})
        for rank in range(plan.train.world)
    ]
    schedules = [schedule_of(plan, "gen", rank) for rank in range(plan.gen.world)]
    wants = [
        filled(schedule, {local.name: a for (r, local), a in arrived.items() if r == schedule.rank})
        for schedule in schedules
    ]
    own = [{n: torch.full_like(t.view(torch.uint8), 0xFF).view(t.dtype) for n, t in want.items()} for want in wants]
    for schedule in schedules:
        pull(schedule, own[schedule.rank], train)
    for rank in range(plan.gen.world if plan.relay else 0):
        pull(relays_of(plan, rank)[0].receives, own[rank], own)
    for held_here, want in zip(own, wants, strict=True):
        assert {n: raw_bytes(t) for n, t in held_here.items()} == {n: raw_bytes(t) for n, t in want.items()}


def pull(schedule: Schedule, own: dict[str, torch.Tensor], sources: list[dict[str, torch.Tensor]]) -> None:
    """Pull on the CPU, as the kernel of a generation rank does."""
    assert schedule.view is not None
    table = peer_table(schedule)
    bases = [byte_array(own[local.name]) for local in schedule.tensors]
    bases += [byte_array(sources[source.rank][source.tensor]) for source in table.theirs]
    run_copies(table.copies, bases)


def test_columns_name_peer_stage_and_parameter() -> None:
    plan = TINY[0].plan()
    schedule = schedule_of(plan, "gen", 1)
    assert schedule.view is not None
    table = peer_table(schedule)
    first_source = len(schedule.tensors)
    for row in range(len(table.copies)):
        source = table.theirs[int(table.copies["src"][row]) - first_source]
        assert source.rank == table.peer[row]
        assert (
            plan.transfer_groups[int(table.transfer_group[row])].pp_stage
            == schedule.stages[int(table.stage[row])].pp_stage
        )
    assert {*table.stage.tolist()} == {0, 1}


def tampered(plan: Plan) -> Schedule:
    """A schedule whose pulls expect one transfer more of another peer."""
    schedule = schedule_of(plan, "gen", 0)
    assert schedule.view is not None
    other_end = schedule.view.other_end()
    table = other_end.stages[0]
    columns = {name: getattr(table, name) for name in TransferTable.__slots__}
    columns["peer"] = columns["peer"].copy()
    columns["peer"][0] += 1
    wrong = replace(other_end, stages=(TransferTable(**columns), *other_end.stages[1:]))
    return replace(schedule, view=OtherEndView(wrong))


def test_pulls_of_other_transfers_are_refused() -> None:
    plan = TINY[0].plan()
    schedule = tampered(plan)
    assert schedule.view is not None
    with pytest.raises(BindError, match="stage 0: the other ends are not those of the transfers received"):
        peer_table(schedule)
    with pytest.raises(BindError, match="the other ends are those of rank 0 in plan"):
        peer_table(replace(schedule_of(plan, "gen", 1), view=schedule.view))


def test_a_rank_that_pulls_nothing_has_an_empty_table() -> None:
    schedule = schedule_of(TINY[0].plan(), "gen", 0)
    assert schedule.view is not None
    table = peer_table(replace(schedule, stages=(), view=OtherEndView(replace(schedule.view.other_end(), stages=()))))
    assert [len(column) for column in (table.copies, table.theirs, table.peer, table.stage)] == [0, 0, 0, 0]
