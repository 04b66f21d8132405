"""Casts of the direct transport, on CPU: both ends divide slots alike, and rounds bring every byte to its place."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from bench.workloads import WORKLOADS, case_of
from helpers.casting import expected_bytes, pulls_with_casts, train_schedule, trainer_tensors, transfers_with_casts
from helpers.handmade import HandTransfer, allocate, raw_bytes, schedule_of

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales
from mcore_reshard.kernels.copies.copy_table import joined
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.cuda.engine_rows import divided
from mcore_reshard.kernels.transports.direct.staging import SLOTS, divide_slots, parted
from mcore_reshard.planner.plan.make_schedule import schedule_of as schedule_of_plan
from mcore_reshard.planner.plan.schedule import OtherEndView, Schedule


def gen_schedule(transfers: list[HandTransfer], rank: int, worlds: tuple[int, int]) -> Schedule:
    schedule = schedule_of(transfers, "gen", rank, worlds)
    return replace(schedule, view=OtherEndView(pulls_with_casts(transfers, rank)))


@pytest.mark.parametrize("scratch_bytes", [pytest.param(200, marks=pytest.mark.slow), 2_000, 20_000, 1 << 20])
@pytest.mark.parametrize("in_turns", [False, True], ids=["at once", "in turns"])
@pytest.mark.parametrize(("worlds", "seed"), [((1, 1), 0), ((2, 2), 1), ((3, 2), 2), ((1, 3), 3)])
def test_rounds_bring_every_byte_to_its_place(
    worlds: tuple[int, int], seed: int, in_turns: bool, scratch_bytes: int
) -> None:
    """Slots hold what was cast into them for the reader that reads them next."""
    transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
    schedules = [train_schedule(transfers, rank, worlds) for rank in range(worlds[0])]
    sources = [trainer_tensors(schedule, seed) for schedule in schedules]
    train = [bind(schedule, tensors) for schedule, tensors in zip(schedules, sources, strict=True)]
    for bound in train:
        compute_scales(bound.casts, bound.tensors)
    readers = range(worlds[1])
    turns = [{reader: (reader + rank) % worlds[1] * in_turns for reader in readers} for rank in range(worlds[0])]
    divided = [
        divide_slots(parted(schedule)[1], scratch_bytes, of_source)
        for schedule, of_source in zip(schedules, turns, strict=True)
    ]
    assert all(SLOTS * plan.slot_bytes <= scratch_bytes for plan, _ in divided)

    gens = [gen_schedule(transfers, rank, worlds) for rank in range(worlds[1])]
    engines = [bind(gen, allocate(gen)) for gen in gens]
    pulled = {
        (rank, gen.rank): cut_buckets(parted(gen)[1].with_peers({rank}), plan.bucket_bytes)
        for gen in gens
        for rank, (plan, _) in enumerate(divided)
    }
    slots = [np.full((SLOTS, plan.slot_bytes), 0xDD, np.uint8) for plan, _ in divided]
    for rank, (bound, (plan, rounds)) in enumerate(zip(train, divided, strict=True)):
        for number, together in enumerate(rounds):
            slot = slots[rank][number % SLOTS]
            bases = [*map(byte_array, bound.tensors), slot]
            run_copies(
                joined([bucket.copies_at(len(bases) - 1, plan.places[bucket.peer]) for bucket in together]),
                bases,
                bound.casts,
            )
            for bucket in together:
                reader = engines[bucket.peer]
                own = pulled[rank, bucket.peer][number - plan.first[bucket.peer]]
                bases = [*map(byte_array, reader.tensors), slot]
                run_copies(own.copies_at(len(bases) - 1, plan.places[bucket.peer]), bases)
        assert {*plan.first} == {*plan.places} == {bucket.peer for together in rounds for bucket in together}
    for engine in engines:
        plain, _ = parted(engine.schedule)
        assert plain.view is not None
        table = peer_table(plain)
        theirs = [byte_array(train[source.rank].by_name[source.tensor]) for source in table.theirs]
        run_copies(table.copies, [*map(byte_array, engine.tensors), *theirs])
        held_now = {name: raw_bytes(tensor) for name, tensor in engine.by_name.items()}
        assert held_now == expected_bytes(transfers, engine.schedule, sources)


def test_rows_are_parted_alike_at_both_ends() -> None:
    transfers = transfers_with_casts(np.random.default_rng(5), (1, 1))
    train, gen = train_schedule(transfers, 0, (1, 1)), gen_schedule(transfers, 0, (1, 1))
    for ours, theirs in zip(parted(train), parted(gen), strict=True):
        for stage, other in zip(ours.stages, theirs.stages, strict=True):
            np.testing.assert_array_equal(stage.sends.transfer_group, other.recvs.transfer_group)
            np.testing.assert_array_equal(stage.sends.member, other.recvs.member)
            np.testing.assert_array_equal(stage.sends.nbytes, other.recvs.nbytes)
    plain, cast = parted(train)
    scaled = {"square", "ragged", "odd", "experts", "small blocks", "odd blocks"}
    for stage in cast.stages:
        names = [train.tensors[number].name for number in stage.sends.tensor.tolist()]
        assert {*names} <= {*scaled, *(f"{name}.scales" for name in scaled), "master", "bias"}
        assert [name.endswith(".scales") for name in names] == sorted(name.endswith(".scales") for name in names)
    computed = {train.tensors[number].name for number in train.computed}
    assert computed and not computed & {train.tensors[n].name for each in plain.tables for n in each.tensor.tolist()}
    assert sum(len(stage.sends) for part in (plain, cast) for stage in part.stages) == len(transfers)


def test_too_little_scratch_is_an_error() -> None:
    transfers = transfers_with_casts(np.random.default_rng(0), (1, 3))
    with pytest.raises(
        ValueError, match=r"95 bytes of scratch are too few for 6 buckets \(3 peers, 2 slots\): give at least 96"
    ):
        divide_slots(parted(train_schedule(transfers, 0, (1, 3)))[1], 95, dict.fromkeys(range(3), 0))


def test_a_trainer_without_casts_needs_no_slots() -> None:
    schedule = schedule_of(transfers_with_casts(np.random.default_rng(0), (1, 1)), "train", 0, (1, 1))
    plan, rounds = divide_slots(parted(schedule)[1], 1 << 20, {})
    assert (plan.slot_bytes, rounds) == (0, [])


def test_who_is_read_in_turns_casts_for_one_reader_after_the_other() -> None:
    transfers = transfers_with_casts(np.random.default_rng(1), (1, 3))
    _, cast = parted(train_schedule(transfers, 0, (1, 3)))
    plan, rounds = divide_slots(cast, 20_000, {0: 1, 1: 0, 2: 1})
    peers = [tuple(bucket.peer for bucket in together) for together in rounds]
    assert {peers.index((1,)), peers.index((0, 2))} == {*plan.first.values()} == {0, plan.first[0]}
    assert plan.first == {1: 0, 0: plan.first[0], 2: plan.first[0]} and plan.first[0] == peers.count((1,)) > 1
    assert plan.places[1] == plan.places[0] == 0 < plan.places[2]
    alone, _ = divide_slots(cast, 20_000, {0: 2, 1: 0, 2: 1})
    assert alone.bucket_bytes == pytest.approx(2 * plan.bucket_bytes, abs=64)
    assert {*alone.places.values()} == {0}


def test_experts_lie_in_slots_as_the_engine_has_them() -> None:
    """Gate and up projections are cast from one tensor each expert, and read into one of all experts: in large rows."""
    case = case_of(next(each for each in WORKLOADS if each.name == "moe-bf16-fp8"), 2, layers=1)
    train, gen = (schedule_of_plan(case.plan(), world, 0) for world in ("train", "gen"))
    plan, rounds = divide_slots(parted(train)[1], 512 << 20, {0: 0})
    pulled = cut_buckets(parted(gen)[1].with_peers({0}), plan.bucket_bytes)
    assert [bucket.nbytes for bucket in pulled] == [bucket.nbytes for (bucket,) in rounds]
    tensors = len(gen.tensors)
    for bucket in pulled:
        copies = bucket.copies_at(tensors, 0)
        _, rows = divided(
            copies, np.zeros(tensors + 1, np.uint64), 1 << 17, np.zeros(len(copies), np.int64), 0.97, streams=1
        )
        assert rows.nbytes.mean() > 8e6
