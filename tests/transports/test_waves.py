"""The waves of a chain of replicas: nothing is passed on before it has landed, and waves are of about equal size."""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import pytest
from helpers.plans import Case
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.copy_table import End
from mcore_reshard.kernels.copies.peer_table import PeerTable, joined_transfers, peer_table
from mcore_reshard.kernels.transports.direct.staging import parted
from mcore_reshard.kernels.transports.direct.waves import (
    MOST_WAVES,
    parse_waves,
    passing_waves,
    told_waves,
    waves_for,
    waves_of,
)
from mcore_reshard.kernels.transports.peer_access import _pairs_to_read
from mcore_reshard.planner.plan.make_schedule import has_chain, schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Chain, World

ONE_TO_THREE = Case("tiny-qwen3", "tp=1", "dp=3")
TWO_TO_FOUR = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2")
ALL_CAST = Case("tiny-qwen3-moe-fp8", "tp=1", "dp=2", dtypes=("bf16", "fp8"), block=(128, 128))
SOME_CAST = Case(
    "tiny-qwen3", "tp=2", "tp=1,dp=4", dtypes=("bf16", "fp8"), block=(8, 8), kept=("model.layers.1.mlp.down_proj",)
)
CASES = [ONE_TO_THREE, TWO_TO_FOUR, ALL_CAST, SOME_CAST]
WAVES = 7

Ints = NDArray[np.int64]
Bytes = tuple[str, int, int]  # tensor, first byte, end


def chain_of(plan: Plan, world: World, rank: int) -> Chain:
    view = schedule_of(plan, world, rank).view
    assert view is not None
    chain = view.chain()
    assert chain is not None
    return chain


def touched(table: PeerTable, names: list[str], here: End) -> list[list[Bytes]]:
    """The bytes of tensors of these names that each copy reads or writes, row by row."""
    found = []
    for copy in table.copies:
        rows = [
            int(copy[f"{here}_offset"] + np.dot(place, copy[f"{here}_strides"]))
            for place in np.ndindex(*copy["extents"])
        ]
        tensor, nbytes = names[copy[here]], int(copy["row_bytes"])
        found.append([(tensor, row, row + nbytes) for row in rows])
    return found


def passed_and_landed(plan: Plan) -> tuple[Ints, Ints]:
    """(the wave of each transfer that gen:0 passes on, the wave in which the last of its bytes is pushed to gen:0)."""
    chain = chain_of(plan, "gen", 0)
    assert chain.among_replicas is not None
    sends, parts = chain.among_replicas.sends, parted(chain.from_trainer)
    landed = {local.name: np.full(8 * prod(local.shape), WAVES) for local in sends.tensors}  # of each byte: the wave
    for rank in sorted(chain.from_trainer.peers):
        pushed = parted(chain_of(plan, "train", rank).from_trainer)
        for part, wave in zip(pushed, waves_of(pushed, {0: WAVES, 1: WAVES}), strict=True):
            table = peer_table(part)
            names = [*(local.name for local in part.tensors), *(each.tensor for each in table.theirs)]
            for transfer, peer, rows in zip(table.transfer, table.peer, touched(table, names, "dst"), strict=True):
                for tensor, start, end in rows if peer == 0 else ():
                    landed[tensor][start:end] = wave[transfer]
    passing = passing_waves(parts, waves_of(parts, dict.fromkeys(chain.from_trainer.peers, WAVES)), sends)
    table, last = peer_table(sends), np.zeros_like(passing)
    names = [local.name for local in sends.tensors]
    for transfer, rows in zip(table.transfer.tolist(), touched(table, names, "src"), strict=True):
        last[transfer] = max(last[transfer], *(landed[tensor][start:end].max() for tensor, start, end in rows))
    return passing, last


@pytest.mark.parametrize("case", CASES, ids=str)
def test_everything_is_passed_on_as_soon_as_it_has_landed_and_not_before(case: Case) -> None:
    passing, landed = passed_and_landed(case.plan())
    assert len(passing) and np.array_equal(passing, landed)
    assert len(np.unique(passing)) > 1


@pytest.mark.parametrize("case", CASES, ids=str)
def test_a_replica_passes_on_in_the_order_in_which_the_next_one_gets(case: Case) -> None:
    plan = case.plan()
    step = plan.gen.tp * plan.gen.pp
    for rank in range(plan.gen.world - step):
        before, behind = (chain_of(plan, "gen", each).among_replicas for each in (rank, rank + step))
        assert before is not None and behind is not None
        sent, got = (joined_transfers(end.tables) for end in (before.sends, behind.receives))
        for column in ("nbytes", "transfer_group", "member", "offset"):
            assert np.array_equal(getattr(sent, column), getattr(got, column))


def test_some_are_cast_by_two_trainers() -> None:
    assert len(parted(chain_of(SOME_CAST.plan(), "gen", 0).from_trainer)[1].peers) == 2


def test_where_experts_are_parallel_over_all_ranks_there_is_no_chain() -> None:
    plan = Case("tiny-qwen3-moe", "tp=1", "tp=2,dp=2,ep=4").plan()
    view = schedule_of(plan, "gen", 0).view
    assert plan.later_hops and view is not None and view.chain() is None


@pytest.mark.parametrize(
    ("train", "gen", "hosts"),
    [
        ("dp=2", "dp=4", "train=a*1+b*1,gen=a*2@1+b*2@1"),
        ("dp=4", "dp=6", "train=a*2+b*2,gen=a*3@2+b*3@2"),
        ("dp=2", "dp=3", "train=a*1+b*1,gen=a*2@1+b*1@1"),
        ("tp=1", "dp=4", "train=a*1,gen=a*2@1+b*2"),
    ],
)
def test_between_hosts_there_is_no_chain(train: str, gen: str, hosts: str) -> None:
    """Its pairs would count among those that pass on within hosts."""
    plan = Case("tiny-qwen3", train, gen, machine="h200-8,gpus=8", hosts=hosts).plan()
    assert len(plan.later_hops) == 1 and not has_chain(plan)
    domains = plan.topology.domains("gen")  # type: ignore[union-attr]
    for rank in range(plan.gen.world):
        pairs = [pair for pair in _pairs_to_read(schedule_of(plan, "gen", rank)) if pair.hop]
        assert all(domains[pair.src] == domains[rank] for pair in pairs)


def test_a_plan_some_of_which_the_first_replica_holds_alone_has_no_chain() -> None:
    plan = ONE_TO_THREE.plan()
    assert has_chain(plan)
    first = replace(plan.transfer_groups[0], dst=len(plan.rank_grids))
    alone = replace(
        plan,
        rank_grids=(*plan.rank_grids, np.array([[0]], np.int32)),
        transfer_groups=(first, *plan.transfer_groups[1:]),
    )
    assert not has_chain(alone)


def test_waves_are_of_about_equal_size() -> None:
    chain = chain_of(Case("qwen3-30b-a3b", "tp=1", "dp=3").plan(), "gen", 0)
    parts = parted(chain.from_trainer)
    waves = waves_of(parts, {0: 32})
    assert chain.among_replicas is not None
    sends = chain.among_replicas.sends
    for transfers, wave in ((parts[0], waves[0]), (sends, passing_waves(parts, waves, sends))):
        nbytes = np.bincount(wave, joined_transfers(transfers.tables).nbytes, minlength=32)
        assert (abs(nbytes - nbytes.mean()) < 0.02 * nbytes.mean()).all()


@pytest.mark.parametrize(
    ("nbytes", "waves"), [(0, 1), (1_650_000, 1), (600_000_000, 19), (61_000_000_000, 192), (1 << 40, MOST_WAVES)]
)
def test_the_number_of_waves_goes_with_the_root_of_the_bytes(nbytes: int, waves: int) -> None:
    assert waves_for(nbytes) == waves


@pytest.mark.parametrize("wave", [[], [0], [3, 3, 0, 1, 1], [2] * 9])
def test_waves_are_read_as_they_are_told(wave: list[int]) -> None:
    assert parse_waves(told_waves(np.array(wave, np.int64)), len(wave), 4).tolist() == wave


@pytest.mark.parametrize("said", [[[0, 2]], [[0, 4]], [[4, 3]], [[-1, 3]], [[0, 4], [1, -1]], "ab", [[0]], {"0": 3}])
def test_waves_of_other_transfers_or_of_no_wave_are_refused(said: object) -> None:
    with pytest.raises((ValueError, TypeError)):
        parse_waves(said, 3, 4)
