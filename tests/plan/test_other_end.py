"""Each rank knows where its bytes lie at their other ends: row by row what the peers' own schedules say."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plans import QUANTIZED, TINY, Case

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


@pytest.mark.parametrize("case", [*TINY, *QUANTIZED], ids=str)
def test_other_ends_are_those_of_the_peers_own_schedules(case: Case) -> None:
    plan = case.plan()
    senders = [schedule_of(plan, "train", rank) for rank in range(plan.train.world)]
    receivers = [schedule_of(plan, "gen", rank) for rank in range(plan.gen.world)]
    for own, others in ((senders, receivers), (receivers, senders)):
        for schedule in own:
            assert schedule.view is not None
            other_end = schedule.view.other_end()
            assert (other_end.rank, other_end.digest) == (schedule.rank, schedule.digest)
            for index, (table, there) in enumerate(zip(schedule.tables, other_end.stages, strict=True)):
                for column in ("peer", "nbytes", "transfer_group", "member"):
                    np.testing.assert_array_equal(getattr(there, column), getattr(table, column))
                for other in others:
                    assert rows(other_end, there, other.rank) == rows(other, other.tables[index], schedule.rank)


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_both_ends_know_which_scales_are_computed(case: Case) -> None:
    plan = case.plan()
    senders = [schedule_of(plan, "train", rank) for rank in range(plan.train.world)]
    computed = 0
    for receiver in (schedule_of(plan, "gen", rank) for rank in range(plan.gen.world)):
        assert receiver.view is not None
        other_end = receiver.view.other_end()
        for index, there in enumerate(other_end.stages):
            for sender in senders:
                sends = sender.tables[index].rows(sender.tables[index].peer == receiver.rank)
                sent = np.isin(sends.tensor, sender.computed)
                received = np.isin(there.transfer_group[there.peer == sender.rank], [*other_end.computed])
                assert sent.tolist() == received.tolist()
                computed += int(sent.sum())
    assert bool(computed) == any(schedule.computed for schedule in senders)


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
