"""Parts of schedules: together they are the whole, on both ends and for those who read their sources themselves."""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import pytest
from helpers.plans import TINY, Case

from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.schedule import TransferTable


def rows(table: TransferTable) -> list[tuple[int, ...]]:
    return [*zip(*(getattr(table, column.name).tolist() for column in fields(TransferTable)), strict=True)]


@pytest.mark.parametrize("case", TINY[:6], ids=str)
def test_two_parts_make_up_the_whole_in_order(case: Case) -> None:
    plan = case.plan()
    for world, size in (("train", plan.train.world), ("gen", plan.gen.world)):
        whole = schedule_of(plan, world, size - 1)  # type: ignore[arg-type]
        near = {peer for peer in whole.peers if peer % 2}
        parts = whole.with_peers(near), whole.with_peers(whole.peers - near)
        assert parts[0].peers == near
        for index, stage in enumerate(whole.stages):
            for name in ("sends", "recvs"):
                want = rows(getattr(stage, name))
                got = [rows(getattr(part.stages[index], name)) for part in parts]
                assert sorted(got[0] + got[1]) == sorted(want)
                assert got[0] == [row for row in want if row[0] in near]
        assert all(
            (part.tensors, part.padding, part.misc) == (whole.tensors, whole.padding, whole.misc) for part in parts
        )


def test_pulls_keep_going_row_by_row_with_what_is_received() -> None:
    plan = TINY[0].plan()
    part = schedule_of(plan, "gen", 0).with_peers({0, 3})
    assert part.view is not None
    for stage, table in zip(part.stages, part.view.other_end().stages, strict=True):
        for column in ("peer", "nbytes", "transfer_group", "member"):
            assert np.array_equal(getattr(stage.recvs, column), getattr(table, column))
    assert sum(len(table) for table in part.view.other_end().stages) > 0
