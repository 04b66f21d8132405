"""A generation rank pulls what its training ranks would send, row by row."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plans import TINY, Case

from mcore_reshard.planner.plan.make_schedule import RankView, schedule_of
from mcore_reshard.planner.plan.schedule import LocalTensor, OtherEnd, Schedule, StridedBox, TransferTable

Row = tuple[LocalTensor, StridedBox, int, int, int, int]


def rows(described: Schedule | OtherEnd, table: TransferTable, peer: int) -> list[Row]:
    """The table's rows of one peer, in order, with the table indices resolved."""
    return [
        (
            described.tensors[table.tensor[n]],
            described.strided_boxes[table.strided_box[n]],
            int(table.offset[n]),
            int(table.nbytes[n]),
            int(table.transfer_group[n]),
            int(table.member[n]),
        )
        for n in np.flatnonzero(table.peer == peer).tolist()
    ]


@pytest.mark.parametrize("case", TINY, ids=str)
def test_sources_are_those_of_the_senders_own_schedules(case: Case) -> None:
    plan = case.plan()
    senders = [schedule_of(plan, "train", rank) for rank in range(plan.train.world)]
    for rank in range(plan.gen.world):
        receiver, other_end = schedule_of(plan, "gen", rank), RankView(plan, "gen", rank).other_end()
        assert (other_end.rank, other_end.digest) == (rank, receiver.digest)
        for index, stage in enumerate(receiver.stages):
            pulled = other_end.stages[index]
            for column in ("peer", "nbytes", "transfer_group", "member"):
                np.testing.assert_array_equal(getattr(pulled, column), getattr(stage.recvs, column))
            for sender in senders:
                sends = sender.stages[index].sends
                assert rows(other_end, pulled, sender.rank) == rows(sender, sends, rank)


def test_extents_are_equal_on_both_ends() -> None:
    plan = TINY[0].plan()
    receiver, other_end = schedule_of(plan, "gen", 1), RankView(plan, "gen", 1).other_end()
    for stage, pulled in zip(receiver.stages, other_end.stages, strict=True):
        for source, destination in zip(pulled.strided_box.tolist(), stage.recvs.strided_box.tolist(), strict=True):
            assert other_end.strided_boxes[source].extents == receiver.strided_boxes[destination].extents


def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    plan = TINY[0].plan()
    with pytest.raises(IndexError, match="gen rank 4 is outside of the 4 ranks"):
        RankView(plan, "gen", 4)
