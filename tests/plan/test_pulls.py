"""What a generation rank pulls is what its training ranks would send, row by row."""

from __future__ import annotations

import numpy as np
import pytest
from helpers.plans import TINY, Case

from mcore_reshard.planner.plan.make_schedule import pulls_of, schedule_of
from mcore_reshard.planner.plan.schedule import Geometry, LocalTensor, Pulls, Schedule, TransferTable

Row = tuple[LocalTensor, Geometry, int, int, int, int]


def rows(described: Schedule | Pulls, table: TransferTable, peer: int) -> list[Row]:
    """The table's rows of one peer, in order, with the table indices resolved."""
    return [
        (
            described.tensors[table.tensor[n]],
            described.geometries[table.geometry[n]],
            int(table.offset[n]),
            int(table.nbytes[n]),
            int(table.bundle[n]),
            int(table.member[n]),
        )
        for n in np.flatnonzero(table.peer == peer).tolist()
    ]


@pytest.mark.parametrize("case", TINY, ids=str)
def test_sources_are_those_of_the_senders_own_schedules(case: Case) -> None:
    plan = case.plan()
    senders = [schedule_of(plan, "train", rank) for rank in range(plan.train.world)]
    for rank in range(plan.gen.world):
        receiver, pulls = schedule_of(plan, "gen", rank), pulls_of(plan, rank)
        assert (pulls.rank, pulls.digest) == (rank, receiver.digest)
        for index, stage in enumerate(receiver.stages):
            pulled = pulls.stages[index]
            for column in ("peer", "nbytes", "bundle", "member"):
                np.testing.assert_array_equal(getattr(pulled, column), getattr(stage.recvs, column))
            for sender in senders:
                sends = sender.stages[index].sends
                assert rows(pulls, pulled, sender.rank) == rows(sender, sends, rank)


def test_extents_are_equal_on_both_ends() -> None:
    plan = TINY[0].plan()
    receiver, pulls = schedule_of(plan, "gen", 1), pulls_of(plan, 1)
    for stage, pulled in zip(receiver.stages, pulls.stages, strict=True):
        for source, destination in zip(pulled.geometry.tolist(), stage.recvs.geometry.tolist(), strict=True):
            assert pulls.geometries[source].extents == receiver.geometries[destination].extents


def test_a_rank_outside_of_the_mesh_is_refused() -> None:
    plan = TINY[0].plan()
    with pytest.raises(IndexError, match="gen rank 4 is outside of the 4 ranks"):
        pulls_of(plan, 4)
