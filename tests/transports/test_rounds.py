"""Rounds of the nccl transport, without a device: ranks agree, scratch is bounded, nothing deadlocks, bytes arrive."""

from __future__ import annotations

from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from helpers.handmade import allocate, expected, random_transfers, raw_bytes, schedule_of
from helpers.nccl_devices import Device, run_in_any_order
from helpers.nccl_parts import joined_parts, schedules_of, share
from helpers.plans import TWO_LAYERS, Case
from helpers.tiles import run_tiles
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.buckets import places_in_tensors
from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.cuda.digests import digest
from mcore_reshard.kernels.cuda.tiles import cut_tiles
from mcore_reshard.kernels.options import ALIGNMENT, MAX_BUCKET_BYTES
from mcore_reshard.kernels.transports.nccl.staging import (
    Division,
    HopEnd,
    Messages,
    Round,
    ScratchBudget,
    divide,
    divide_windows,
    divided_rounds,
    pair_count,
    slot_bytes,
    windows_that_fit,
    with_windows,
)
from mcore_reshard.kernels.transports.rounds import phase_of
from mcore_reshard.planner.plan.paths import HopKind
from mcore_reshard.planner.plan.schedule import Schedule
from mcore_reshard.session.replica_copy import _schedule as copy_schedule
from mcore_reshard.session.replica_copy import list_tensors

Worlds = tuple[int, int]
CASES: list[tuple[Worlds, int, ScratchBudget]] = [
    ((1, 1), 0, ScratchBudget(192, 1, 2)),
    ((2, 2), 1, ScratchBudget(768, 2, 2)),
    ((3, 1), 2, ScratchBudget(2048, 3, 2)),
    ((1, 3), 3, ScratchBudget(1024, 1, 3)),
    ((4, 3), 4, ScratchBudget(4096, 2, 4)),
    ((4, 3), 5, ScratchBudget(2048, 2, 2, checksums=True)),
    ((4, 4), 6, ScratchBudget(8192, 2, 2)),  # pairs keep to a stream
]


def session(
    transfers: list[Any], worlds: Worlds, budget: ScratchBudget, seed: int
) -> tuple[list[BoundSchedule], Division]:
    """Every rank's bound schedule, and how all divide their scratch."""
    members = [("train", rank) for rank in range(worlds[0])] + [("gen", rank) for rank in range(worlds[1])]
    schedules = [schedule_of(transfers, world, rank, worlds) for world, rank in members]  # type: ignore[arg-type]
    tensors = [allocate(each, seed=seed if each.world == "train" else None) for each in schedules]
    bound_schedules = [bind(schedule, held) for schedule, held in zip(schedules, tensors, strict=True)]
    return bound_schedules, division_of(schedules, budget)


def division_of(schedules: list[Schedule], budget: ScratchBudget) -> Division:
    """As all ranks agree on it."""
    ranks = [[schedule] for schedule in schedules]
    return divide_windows(divide(budget, list(map(pair_count, schedules))), ranks, schedules[0].train_ranks)[0]


def rounds(bound: BoundSchedule, division: Division, *, in_place: list[bool] | None = None) -> tuple[Round, ...]:
    ends = HopEnd.cut([bound.schedule], division, bound.schedule.train_ranks)
    return divided_rounds(ends, division, in_place=[in_place or [True] * len(bound.tensors)])


def transfers_of(seed: int, worlds: Worlds) -> list[Any]:
    return random_transfers(np.random.default_rng(seed), worlds, parameters=25, stages=3)


@pytest.mark.parametrize(("worlds", "seed", "budget"), CASES)
def test_both_ends_of_every_message_agree_on_its_round_and_size(
    worlds: Worlds, seed: int, budget: ScratchBudget
) -> None:
    bound_schedules, division = session(transfers_of(seed, worlds), worlds, budget, seed)
    ends: dict[bool, set[tuple[int, ...]]] = {True: set(), False: set()}
    for rank, bound in enumerate(bound_schedules):
        found = rounds(bound, division)
        assert [(each.window, each.stream) for each in found] == sorted({(each.window, each.stream) for each in found})
        for each in found:
            assert each.stream < budget.streams
            in_turn: dict[int, int] = {}  # messages to or from each peer in the round
            for placed in each.placed_messages:
                peer = division.members[placed.member]
                in_turn[peer] = in_turn.get(peer, 0) + 1
                way = (rank, peer) if bound.schedule.world == "train" else (peer, rank)
                place = each.window, each.stream, *way, in_turn[peer], placed.bucket.stage, placed.bucket.number
                ends[bound.schedule.world == "train"].add((*place, placed.message_bytes))
    assert ends[True] == ends[False]
    assert ends[True]
    assert division.keeps_streams == (worlds == (4, 4)) or budget.streams == 1


@pytest.mark.parametrize(("worlds", "seed", "budget"), CASES)
def test_scratch_is_bounded_and_slots_are_reused_in_turn(worlds: Worlds, seed: int, budget: ScratchBudget) -> None:
    bound_schedules, division = session(transfers_of(seed, worlds), worlds, budget, seed)
    for bound in bound_schedules:
        found = rounds(bound, division)
        assert sum(slot_bytes(found).values()) <= budget.scratch_bytes
        for index, each in enumerate(found):
            earlier = [n for n in range(index) if (found[n].stream, found[n].slot) == (each.stream, each.slot)]
            assert each.after == (earlier[-1] if earlier else None)
            ends = 0
            for placed in each.staged:
                assert placed.offset >= ends and placed.offset % ALIGNMENT == 0
                ends = placed.offset + placed.message_bytes
            assert all(placed.tensor is None for placed in each.placed_messages) or not budget.checksums


def test_scratch_grows_with_nothing_and_messages_shrink_with_peers_to_a_part_of_a_slot() -> None:
    mebi = 1 << 20
    assert divide(ScratchBudget(512 * mebi, 2, 2), [4, 1, 1]).bucket_bytes == 32 * mebi
    few = divide(ScratchBudget(512 * mebi, 2, 2), [2, 2, 0, 2, 2])
    assert few.bucket_bytes == 64 * mebi
    assert few.members == (0, 1, 3, 4)
    assert not few.keeps_streams and few.streams_of(5, 0) == (0, 1)
    assert divide(ScratchBudget(1 << 40, 1, 2), [1, 1]).bucket_bytes == 1 << 30
    many = divide(ScratchBudget(512 * mebi, 2, 2), [47, 8, 0, 16])
    assert many.bucket_bytes == 8 * mebi
    assert 18.2 * mebi < divide(ScratchBudget(512 * mebi, 2, 2), [48, 8]).bucket_bytes < 128 * mebi / 7
    sharing = divide(ScratchBudget(512 * mebi, 2, 2), [48, 8], hops=("share",))
    assert 10.6 * mebi < sharing.bucket_bytes < 128 * mebi / 12
    joined = divide(ScratchBudget(512 * mebi, 2, 2), [1000, 1000], hops=("relay",))
    assert 2.6 * mebi < joined.bucket_bytes < 128 * mebi / 48
    assert many.keeps_streams and many.streams_of(5, 0) == (0,)
    assert divide(ScratchBudget(512 * mebi, 2, 2, checksums=True), [16, 16]).bucket_bytes == 8 * mebi - 16


def sent(counts: list[int], nbytes: int) -> Messages:
    """The messages of one sender: `counts` are those to receiver 0, 1, ..."""
    rows = [(number, count, turn, nbytes) for turn, count in enumerate(counts) for number in range(count)]
    number, count, turn, sizes = np.array(rows, np.int64).T
    return Messages(number, count, turn, phase_of(turn), sizes)


def test_there_are_as_many_windows_as_a_pair_has_buckets_or_half_as_many_if_these_are_few_and_fit() -> None:
    even, long = sent([5, 5, 5], 64), sent([40, 40, 40], 64)
    large, roomy, tight = (
        divide(ScratchBudget(slot * 4), [3, 1, 1, 1]).with_most([(5, 0)]) for slot in (1000, 192, 128)
    )
    assert next(windows_that_fit(large, even)) == 4  # so that both streams have rounds
    assert next(windows_that_fit(large.with_most([(31, 0), (7, 0)]), long)) == 15
    assert next(windows_that_fit(large.with_most([(40, 0), (7, 0)]), long)) == 40
    assert next(windows_that_fit(roomy, even)) == 5
    assert np.array_equal(even.windows(5), even.number)  # round k: the k-th bucket of every pair
    fitting = [*windows_that_fit(tight, even)]
    assert min(fitting) > 5 and 5 not in fitting
    for windows in fitting:
        assert np.bincount(even.windows(windows)).max() <= 2
    with pytest.raises(ValueError, match=r"no rounds fit into 512 bytes of scratch: give more"):
        with_windows(tight, [[6, 7], [8]])
    assert with_windows(tight, [[7, 6, 9], [9, 7]]).windows == 7


def test_ranks_with_many_peers_fill_their_slots_in_few_windows() -> None:
    """Eight pairs, four on each stream, and a slot of sixteen messages: four of each pair fit."""
    many = divide(ScratchBudget(64 * 16 * 4), [8] * 9)
    assert many.keeps_streams and many.bucket_bytes == 128
    assert next(windows_that_fit(many.with_most([(40, 0)]), sent([40] * 8, 64))) == 10
    assert next(windows_that_fit(many.with_most([(8, 0)]), sent([8] * 8, 16))) == 1


@pytest.mark.parametrize("stride", [1, 2, 4, 8])
def test_the_pairs_of_every_second_or_fourth_turn_are_on_both_streams(stride: int) -> None:
    division = divide(ScratchBudget(), [16] * 4)
    assert division.keeps_streams
    turns = stride * np.arange(16)
    streams = division.stream_of(0, turns, 0)
    assert np.bincount(streams).tolist() == [8, 8]
    assert [division.streams_of(turn, 0) for turn in turns.tolist()] == [(stream,) for stream in streams.tolist()]


def test_a_pair_with_few_buckets_is_spread_over_the_windows_of_one_with_many() -> None:
    messages = sent([100, 4, 1], 64)
    windows = messages.windows(100)
    assert np.array_equal(windows[:100], np.arange(100))
    assert np.array_equal(np.diff(windows[100:104]), [25, 25, 25]) and 0 < windows[104] < 100


def test_too_little_scratch_and_too_few_slots_are_errors() -> None:
    with pytest.raises(
        ValueError, match=r"100 bytes of scratch are too few for 16 .* peers, 2 slots\): give at least 256"
    ):
        divide(ScratchBudget(100, 1, 2), [8])
    with pytest.raises(ValueError, match="one stream of two slots is needed"):
        ScratchBudget(slots=1)


def copies_of(*rows: tuple[int, int, int, int]) -> NDArray[np.void]:
    """(tensor, offset in it, offset in the bucket, row bytes) of a sender."""
    one, none = (1, 1, 1), (0, 0, 0)
    return np.array([(src, -1, at, place, one, none, none, size) for src, at, place, size in rows], COPY)


def test_a_bucket_is_one_run_only_where_its_bytes_are_neighbors_in_one_tensor() -> None:
    strided = copies_of((3, 64, 0, 32))
    strided["extents"][0, 2] = 2
    buckets = [
        copies_of((3, 32, 0, 100)),
        copies_of((3, 64, 0, 32), (3, 96, 32, 48)),
        copies_of((3, 64, 0, 32), (3, 112, 32, 48)),  # a gap in the tensor
        copies_of((3, 64, 0, 30), (3, 96, 32, 48)),  # padding in the bucket
        copies_of((3, 64, 0, 32), (4, 96, 32, 48)),
        strided,
    ]
    first = np.cumsum([0, *map(len, buckets[:-1])])
    places = places_in_tensors(np.concatenate(buckets), first, sends=True)
    assert places == [(3, 32), (3, 64), None, None, None, None]


def check_delivered(transfers: list[Any], bound_schedules: list[BoundSchedule], worlds: Worlds) -> None:
    """Every element of every generation rank is what `expected` says, or still poisoned."""
    sources = [
        dict(zip([t.name for t in p.schedule.tensors], p.tensors, strict=True)) for p in bound_schedules[: worlds[0]]
    ]
    for bound in bound_schedules[worlds[0] :]:
        want = expected(transfers, bound.schedule, sources)
        for local, tensor in zip(bound.schedule.tensors, bound.tensors, strict=True):
            assert raw_bytes(tensor) == raw_bytes(want[local.name]), local.name


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", range(3))
@pytest.mark.parametrize(("worlds", "seed", "budget"), CASES)
def test_no_order_of_kernels_deadlocks_and_every_byte_arrives(
    worlds: Worlds, seed: int, budget: ScratchBudget, order: int
) -> None:
    transfers = transfers_of(seed, worlds)
    bound_schedules, division = session(transfers, worlds, budget, seed)
    devices = {rank: Device.of([bound], division, worlds[0]) for rank, bound in enumerate(bound_schedules)}
    run_in_any_order([devices], division.communicators(), np.random.default_rng(order))
    check_delivered(transfers, bound_schedules, worlds)


def recorded(case: Case) -> str:
    """A digest of the rounds of all ranks, where every byte comes from the trainer."""
    schedules = [each.view.unrelayed() if each.relayed and each.view else each for each in schedules_of(case.plan())]
    division = division_of(schedules, ScratchBudget(16 << 10))
    found = sha256()
    for schedule in schedules:
        ends = HopEnd.cut([schedule], division, schedule.train_ranks)
        for each in divided_rounds(ends, division, in_place=[[True] * len(schedule.tensors)]):
            rows = [
                (
                    placed.member,
                    placed.message_bytes,
                    placed.tensor,
                    placed.offset,
                    placed.bucket.stage,
                    placed.bucket.number,
                )
                for placed in each.placed_messages
            ]
            found.update(repr((each.window, each.stream, each.slot, each.after, rows)).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("case", "digest"),
    [
        (Case("tiny-qwen3-moe", "tp=2,ep=2,pp=2", "tp=2"), "4b4da7eb504a5395"),
        (Case("tiny-llama", "tp=4,dp=2", "tp=2,dp=4"), "1905ff9652ee3cf2"),
        (Case("tiny-deepseek-v3", "tp=2,ep=4,dp=2,pp=2", "tp=4"), "f62a6dcad4e9d0e6"),
    ],
    ids=str,
)
def test_rounds_without_relays_stay(case: Case, digest: str) -> None:
    """Those of a plan that passes nothing on, as recorded. If ranks of two releases could differ, PROTOCOL must."""
    assert recorded(case) == digest


RELAYED = [
    Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=3", changes=TWO_LAYERS, machine="h200-8,gpus=2"),
    Case("tiny-qwen3", "tp=1", "dp=4", machine="h200-8,gpus=1"),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("order", range(2))
@pytest.mark.parametrize(
    "budget",
    [
        pytest.param(ScratchBudget(256 << 10), id="2 streams"),
        pytest.param(ScratchBudget(24 << 10), id="no pace"),
        pytest.param(ScratchBudget(400 << 10, 3, 2), id="3 streams", marks=pytest.mark.slow),
    ],
)
@pytest.mark.parametrize("transport", ["auto", "nccl"])
@pytest.mark.parametrize("case", RELAYED, ids=str)
def test_no_order_of_kernels_deadlocks_where_replicas_pass_on_what_came_before(
    case: Case, transport: str, budget: ScratchBudget, order: int
) -> None:
    plan = case.plan()
    parts, communicators, tensors = joined_parts(case, budget, transport=transport)
    assert len(parts) == plan.waves + (len(plan.later_hops) if transport == "nccl" else 1)
    both = [
        {placed.bucket.sends for placed in each.placed_messages}
        for part in parts
        for device in part.values()
        for each in device.found
    ]
    assert {True, False} in both
    assert all(
        sum(slot.size for slot in device.slots.values()) <= budget.scratch_bytes
        for part in parts
        for device in part.values()
    )
    run_in_any_order(parts, communicators, np.random.default_rng(order))
    if transport == "auto":
        share(plan, tensors)
    for rank in range(plan.gen.world):
        assert synthetic.wrong_elements(plan, "gen", rank, tensors[plan.train.world + rank]) == {}


def test_replicas_that_pass_on_what_has_not_landed_are_seen() -> None:
    """The check above fails for ranks that send waves before they have landed."""
    case = RELAYED[1]
    plan = case.plan()
    parts, communicators, tensors = joined_parts(case, ScratchBudget(64 << 10))
    run_in_any_order(parts[::-1], communicators, np.random.default_rng(0))
    wrong = [
        synthetic.wrong_elements(plan, "gen", rank, tensors[plan.train.world + rank]) for rank in range(plan.gen.world)
    ]
    assert all(wrong)


def test_a_copy_between_two_replicas_is_a_session_without_a_trainer() -> None:
    """Its schedules are between replicas, and those of the session itself: the copy of a replica that joins."""
    source = {"a": torch.arange(5000, dtype=torch.int32), "b": torch.arange(77, dtype=torch.int16)}
    bound = []
    for sends in (True, False):
        tensors = source if sends else {name: torch.zeros_like(tensor) for name, tensor in source.items()}
        listed, views = list_tensors("gen:0", tensors)
        bound.append(bind(copy_schedule((0, 1), listed, views, sends=sends), views))
    budget = ScratchBudget(8 << 10, checksums=True)
    division, _ = divide_windows(divide(budget, [1, 1]), [[each.schedule] for each in bound], 1)
    devices = {rank: Device.of([each], division, 1) for rank, each in enumerate(bound)}
    run_in_any_order([devices], division.communicators(), np.random.default_rng(0))
    assert all(torch.equal(*pair) for pair in zip(bound[0].tensors, bound[1].tensors, strict=True))


def test_pairs_keep_pace_with_the_one_that_has_the_most_buckets() -> None:
    unknown = divide(ScratchBudget(), [16, 16], hops=("relay",))
    division = unknown.with_most([(9, 75), (10, 0)])
    assert not division.keeps_streams
    assert division.most == (10, 80) and (division.pace("train"), division.pace("relay")) == (10, 80)
    direct = divide(ScratchBudget(), [16, 16]).with_most([(9, 0), (10, 0)])
    assert direct.most == (10, 0) and direct.pace("train") == 0


@pytest.mark.parametrize(
    ("most", "paces"),
    [((20, 128), (20, 140)), ((80, 9), (80, 80)), ((80, 90), (80, 160)), ((0, 9), (0, 9)), ((3, 0), (3, 0))],
)
def test_replicas_have_a_multiple_of_the_trainers_pace(most: tuple[int, int], paces: tuple[int, int]) -> None:
    assert divide(ScratchBudget(), [16, 16], hops=("relay",)).with_most([most]).most == paces


def test_every_window_has_as_much_of_every_pair_that_keeps_the_pace() -> None:
    """16 pairs of the trainer with 18 buckets, one of a replica with 128: 64 windows would have 3 to 6 of the former."""
    division = divide(ScratchBudget(), [16] * 24, hops=("relay",)).with_most([(18, 128)])
    counts = [division.pace("train")] * 16 + [division.pace("relay")]
    assert counts[-1] % counts[0] == 0
    number, count = (
        np.concatenate(each) for each in ([*map(np.arange, counts)], [np.full(each, each) for each in counts])
    )
    turn = np.repeat(np.arange(17), counts)
    phase = np.concatenate([division.phase_of(np.full(each, at), 0, 0) for at, each in enumerate(counts)])
    messages = Messages(number, count, turn, phase, np.full(len(number), 6 << 20))
    windows = next(windows_that_fit(division, messages))
    assert windows % counts[0] == 0
    filled = np.bincount(messages.windows(windows) * 17 + turn, minlength=windows * 17).reshape(windows, 17)
    of_trainer, of_replica = filled[:, :16].sum(axis=1), filled[:, 16]
    assert np.ptp(of_trainer) <= 2 and np.ptp(of_replica) <= 1, "unless windows are as many, or a multiple"


def test_many_windows_are_halved_where_all_pairs_have_two_buckets_in_each() -> None:
    division = divide(ScratchBudget(), [26] * 128, hops=("relay",)).with_most([(80, 9)])
    tried = [*windows_that_fit(division, Messages(*(np.ones(1, np.int64),) * 5))]
    assert {20, 40, 80, 160} <= {*tried} and 10 not in tried and all(80 % each == 0 or each % 80 == 0 for each in tried)


@pytest.mark.parametrize(
    ("peers", "parts", "hops", "bucket_mib", "paced"),
    [
        (64, 4, (), 18.2, True),
        (64, 16, (), 2.6, True),
        (47, 16, (), 8.0, False),
        (128, 16, (), 18.2, True),
        (64, 4, ("share",), 10.6, False),
        (64, 16, ("share",), 2.6, True),
        (8, 4, ("share",), 16.0, True),
        (8, 16, ("share",), 2.6, True),
        (8, 4, ("relay",), 16.0, True),
    ],
)
def test_messages_are_finer_where_ranks_relay_and_where_many_parts_have_many_peers(
    peers: int, parts: int, hops: tuple[HopKind, ...], bucket_mib: float, paced: bool
) -> None:
    division = divide(ScratchBudget(), [peers] * 2, parts=parts, hops=hops)
    assert int(division.bucket_bytes / 2**20 * 10) / 10 == bucket_mib
    assert division.keeps_pace == paced and not (paced and division.keeps_streams)


def test_scratch_for_few_peers_is_enough_where_it_is_small() -> None:
    """48 places for one peer's messages would need 3,072 bytes."""
    assert divide(ScratchBudget(512), [5] * 3, parts=16, hops=("share", "relay")).bucket_bytes == 16


def test_both_streams_have_rounds_where_pairs_have_one_bucket() -> None:
    division = divide(ScratchBudget(), [8] * 4, hops=("relay",)).with_most([(1, 1)])
    assert next(windows_that_fit(division, Messages(*(np.ones(1, np.int64),) * 5))) == 2


def test_pairs_keep_no_pace_where_messages_are_tiny() -> None:
    """Alignment takes too much of them; and counts that are not known yet differ from those of a part without bytes."""
    divisions = [divide(ScratchBudget(nbytes), [48, 48], hops=("relay",)) for nbytes in (4000, 100_000, 400_000)]
    assert [division.keeps_pace for division in divisions] == [False, False, True]
    assert divisions[-1].most is None and divisions[-1].with_most([(0, 0)]).most == (0, 0)


def test_replicas_that_exchange_with_all_others_do_so_evenly() -> None:
    """128 ranks of 16 hosts: each has 15 peers, of which no two have their moments close to each other."""
    division = divide(ScratchBudget(), [30] * 128, hops=("relay",))
    turn = np.arange(8, 128, 8)
    phases = np.sort(division.phase_of(turn, 0, np.full(15, 128)))
    assert np.allclose(np.diff(phases), 1 / 16)
    number = np.tile(np.arange(75), 15)
    messages = Messages(number, np.full(75 * 15, 75), np.repeat(turn, 75), np.repeat(phases, 75), number)
    in_window = np.bincount(messages.windows(100))
    assert in_window.max() - in_window.min() <= 1


def untouched(schedule: Schedule) -> dict[str, torch.Tensor]:
    """Tensors that nothing is written to: the system backs them with no memory, whatever the size of the model."""
    return {t.name: torch.empty(t.shape, dtype=getattr(torch, t.dtype)) for t in schedule.tensors}


PLANS = [
    Case("tiny-qwen3-moe", "tp=2,ep=2,pp=2", "tp=2"),
    Case("tiny-llama", "tp=2,cp=2,pp=2,layers=3+1", "tp=2,dp=2"),
    Case("tiny-deepseek-v3", "tp=2,ep=2", "tp=2,pp=2"),
    Case("tiny-nemotron-h", "tp=1,ep=2,dp=2", "tp=2"),
    Case("qwen3-30b-a3b", "tp=1,ep=2,dp=2", "tp=2", changes=(("num_hidden_layers", 2),)),
]
ODD_BUDGETS = [
    ScratchBudget(40_001),
    ScratchBudget((1 << 20) - 1, streams=1, slots=3),
    ScratchBudget(1_234_567, streams=3, slots=2, checksums=True),
    ScratchBudget(),
]
LARGE_BUDGETS = [ScratchBudget(), ScratchBudget(100_000_001, streams=3, checksums=True)]


def program_bytes(schedules: list[Schedule]) -> int:
    return sum(int(stage.recvs.nbytes.sum()) for schedule in schedules for stage in schedule.stages)


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_every_rank_of_a_plan_keeps_to_its_scratch_whatever_the_budget(case: Case) -> None:
    schedules = schedules_of(case.plan())
    tensors = [untouched(schedule) for schedule in schedules]
    large = program_bytes(schedules) > 1 << 30  # where the small budgets make tens of thousands of rounds
    for budget in LARGE_BUDGETS if large else ODD_BUDGETS:
        division = division_of(schedules, budget)
        for in_place in (True, False):
            used = []
            for schedule, held in zip(schedules, tensors, strict=True):
                bound = bind(schedule, held)
                found = rounds(bound, division, in_place=[in_place] * len(bound.tensors))
                used.append(sum(slot_bytes(found).values()))
                assert sum(placed.bucket.nbytes for each in found for placed in each.placed_messages) >= bound.nbytes
                assert in_place or all(placed.tensor is None for each in found for placed in each.placed_messages)
            assert 0 < max(used) <= budget.scratch_bytes, (budget, used)


@pytest.mark.parametrize("case", PLANS, ids=str)
def test_a_budget_too_small_for_a_plan_is_refused_with_what_it_needs(case: Case) -> None:
    schedules = schedules_of(case.plan())
    pairs = list(map(pair_count, schedules))
    for budget in ODD_BUDGETS:
        with pytest.raises(ValueError, match=r"^7 bytes of scratch are too few for .*: give at least \d+$") as caught:
            divide(replace(budget, scratch_bytes=7), pairs)
        least = int(str(caught.value).split()[-1])
        assert divide(replace(budget, scratch_bytes=least), pairs).bucket_bytes == ALIGNMENT
        with pytest.raises(ValueError, match="too few"):
            divide(replace(budget, scratch_bytes=least - 1), pairs)


def test_a_digest_changes_with_any_bit_and_any_two_words_that_change_places() -> None:
    generator = torch.Generator().manual_seed(3)
    for nbytes in (8, 80, 4096 * 8, 4096 * 8 * 3 + 24):
        body = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, generator=generator)
        whole = digest(body)
        assert torch.equal(whole, digest(body.clone()))
        for at in torch.randint(0, nbytes, (20,), generator=generator).tolist():
            flipped = body.clone()
            flipped[at] ^= 1 << at % 8
            assert digest(flipped)[0] != whole[0]
        words = body.view(torch.int64)
        for a, b in torch.randint(0, len(words), (20, 2), generator=generator).tolist():
            swapped = words.clone()
            swapped[[a, b]] = swapped[[b, a]]
            assert torch.equal(digest(swapped.view(torch.uint8)), whole) == (a == b)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("worlds", "seed", "budget"), CASES)
def test_the_tables_that_the_gpu_walks_move_the_same_bytes(worlds: Worlds, seed: int, budget: ScratchBudget) -> None:
    transfers = transfers_of(seed, worlds)
    bound_schedules, division = session(transfers, worlds, budget, seed)
    on_the_wire: dict[tuple[int, ...], NDArray[np.uint8]] = {}
    for rank, bound in enumerate(bound_schedules):  # training ranks come first
        device = Device.of([bound], division, worlds[0])
        for index, each in enumerate(device.found):
            slot = device.slots[each.stream, each.slot]
            bases = [*(tensor.data_ptr() for tensor in bound.tensors), slot.ctypes.data]
            tiles = cut_tiles(each.copies(0), np.array(bases, np.uint64), 64)
            peers = [(placed, division.members[placed.member]) for placed in each.placed_messages]
            if bound.schedule.world == "train":
                run_tiles(tiles)
                for placed, peer in peers:
                    key = placed.bucket.stage, placed.bucket.number, rank, peer
                    on_the_wire[key] = device.message(index, placed).copy()
            else:
                for placed, peer in peers:
                    key = placed.bucket.stage, placed.bucket.number, peer, rank
                    device.message(index, placed)[:] = on_the_wire.pop(key)
                run_tiles(tiles)
    assert not on_the_wire
    check_delivered(transfers, bound_schedules, worlds)


# Of their own: plans of cases are kept, and these have more waves than others would find in them.
_FIVE_LAYERS = (("num_hidden_layers", 5),)
MANY_WAVES = [
    Case("tiny-qwen3", "tp=2,pp=2,layers=3+2", "tp=2,dp=4", changes=_FIVE_LAYERS, machine="h200-8,gpus=4"),
    Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=1,dp=6", changes=_FIVE_LAYERS, machine="h200-8,gpus=2"),
]


@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("transport", ["auto", "nccl"])
@pytest.mark.parametrize("case", MANY_WAVES, ids=str)
def test_in_many_waves_every_pair_has_one_message_in_each_window(
    case: Case, transport: str, checksums: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All windows of a part are then equally full, and every element arrives."""
    monkeypatch.setattr("mcore_reshard.planner.plan.plan.waves_for", lambda *_, **__: 16)
    divisions: list[Division] = []
    cut = Division.with_most

    def noted(self: Division, most: Any) -> Division:
        divisions.append(cut(self, most))
        return divisions[-1]

    monkeypatch.setattr(Division, "with_most", noted)
    plan, budget = case.plan(), ScratchBudget(512 << 10, checksums=checksums)
    assert plan.waves == 16 and plan.later_hops == ("relay", "share")
    parts, communicators, tensors = joined_parts(case, budget, transport=transport)
    even = [number for number, division in enumerate(divisions) if division.is_even]
    assert len(even) >= 15
    for number in even:
        for device in parts[number].values():
            windows: dict[tuple[int, int, int], list[int]] = {}
            for each in device.found:
                for placed in each.placed_messages:
                    windows.setdefault((placed.end, placed.bucket.stage, placed.bucket.peer), []).append(each.window)
            assert all(len({*found}) == len(found) for found in windows.values())
            assert sum(slot_bytes(device.found).values()) <= budget.scratch_bytes
    run_in_any_order(parts, communicators, np.random.default_rng(0))
    if transport == "auto":
        share(plan, tensors)
    ranks = range(plan.gen.world)
    assert [synthetic.wrong_elements(plan, "gen", rank, tensors[plan.train.world + rank]) for rank in ranks] == [
        {} for _ in ranks
    ]


def test_windows_have_room_for_what_alignment_takes_where_scratch_is_small() -> None:
    """One pair, whose transfers are cut into segments of few bytes, of which none is a multiple of 16."""
    division = divide(ScratchBudget(384 << 10), [1, 1], parts=16, hops=("relay",))
    _, segment_bytes = division.cut_sizes("train")
    nbytes = 40 * division.slot_bytes
    windows = int(division.windows_needed(nbytes, 1))
    padded = nbytes + ALIGNMENT * (nbytes // (segment_bytes // 2 + 1))
    assert division.is_even and padded / windows + segment_bytes <= division.slot_bytes


def test_no_bucket_is_larger_than_any_may_be() -> None:
    division = divide(ScratchBudget(8 << 30), [1, 1], parts=16, hops=("relay",))
    assert division.is_even and 3.9e9 / int(division.windows_needed(3_900_000_000, 1)) <= MAX_BUCKET_BYTES
