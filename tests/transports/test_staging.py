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
from mcore_reshard.kernels.copies.casts import CastForm, TensorCast
from mcore_reshard.kernels.copies.copy_table import COPY, joined
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.cuda.engine_rows import divided
from mcore_reshard.kernels.transports.direct.staging import SLOTS, divide_slots, new_weights, parted
from mcore_reshard.kernels.transports.rounds import in_rounds
from mcore_reshard.planner.plan.make_schedule import schedule_of as schedule_of_plan
from mcore_reshard.planner.plan.schedule import OtherEndView, Schedule


def gen_schedule(transfers: list[HandTransfer], rank: int, worlds: tuple[int, int]) -> Schedule:
    schedule = schedule_of(transfers, "gen", rank, worlds)
    return replace(schedule, view=OtherEndView(pulls_with_casts(transfers, rank)))


@pytest.mark.parametrize("scratch_bytes", [pytest.param(200, marks=pytest.mark.slow), 2_000, 20_000, 1 << 20])
@pytest.mark.parametrize(("worlds", "seed"), [((1, 1), 0), ((2, 2), 1), ((3, 2), 2), ((1, 3), 3)])
def test_rounds_bring_every_byte_to_its_place(worlds: tuple[int, int], seed: int, scratch_bytes: int) -> None:
    transfers = transfers_with_casts(np.random.default_rng(seed), worlds)
    schedules = [train_schedule(transfers, rank, worlds) for rank in range(worlds[0])]
    sources = [trainer_tensors(schedule, seed) for schedule in schedules]
    train = [bind(schedule, tensors) for schedule, tensors in zip(schedules, sources, strict=True)]
    for bound in train:
        compute_scales(bound.casts, bound.tensors)
    divided = [divide_slots(parted(schedule)[1], scratch_bytes) for schedule in schedules]
    assert all(SLOTS * plan.slot_bytes <= scratch_bytes for plan, _ in divided)

    gens = [gen_schedule(transfers, rank, worlds) for rank in range(worlds[1])]
    engines = [bind(gen, allocate(gen)) for gen in gens]
    source_rounds = [in_rounds(of_reader) for _, of_reader in divided]
    reader_rounds = [
        in_rounds(
            {
                peer: cut_buckets(parted(gen)[1].with_peers({peer}), plan.bucket_bytes)
                for peer, (plan, _) in enumerate(divided)
                if gen.rank in plan.places
            }
        )
        for gen in gens
    ]
    slots = [np.full(plan.slot_bytes, 0xDD, np.uint8) for plan, _ in divided]
    for number in range(max(map(len, source_rounds))):
        for bound, slot, (plan, _), rounds in zip(train, slots, divided, source_rounds, strict=True):
            bases = [*map(byte_array, bound.tensors), slot]
            together = rounds[number] if number < len(rounds) else ()
            tables = [bucket.copies_at(len(bases) - 1, plan.places[bucket.peer]) for bucket in together]
            run_copies(joined(tables), bases, bound.casts)
        for engine, rounds in zip(engines, reader_rounds, strict=True):
            for bucket in rounds[number] if number < len(rounds) else ():
                place = divided[bucket.peer][0].places[engine.schedule.rank]
                bases = [*map(byte_array, engine.tensors), slots[bucket.peer]]
                run_copies(bucket.copies_at(len(bases) - 1, place), bases)
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


def test_the_first_round_with_a_weight_computes_its_scales() -> None:
    form = CastForm("bfloat16", "float8_e4m3fn", (4, 4), (2, 2))
    casts = {0: TensorCast(form, 3), 1: TensorCast(form, 4), 2: TensorCast(CastForm("float32", "bfloat16"), None)}
    sources = [0, 7], [0, 1], [1, 3, 2], [0, 4]
    rounds = [np.zeros(len(each), COPY) for each in sources]
    for copies, each in zip(rounds, sources, strict=True):
        copies["src"] = each
    assert [*new_weights(rounds, casts)] == [[0], [1], [2], []]


def test_too_little_scratch_is_an_error() -> None:
    transfers = transfers_with_casts(np.random.default_rng(0), (1, 3))
    with pytest.raises(
        ValueError, match=r"95 bytes of scratch are too few for 6 buckets \(3 peers, 2 slots\): give at least 96"
    ):
        divide_slots(parted(train_schedule(transfers, 0, (1, 3)))[1], 95)


def test_a_trainer_without_casts_needs_no_slots() -> None:
    schedule = schedule_of(transfers_with_casts(np.random.default_rng(0), (1, 1)), "train", 0, (1, 1))
    plan, buckets = divide_slots(parted(schedule)[1], 1 << 20)
    assert (plan.slot_bytes, buckets) == (0, {})


def test_experts_lie_in_slots_as_the_engine_has_them() -> None:
    """Gate and up projections are cast from one tensor each expert, and read into one of all experts: in large rows."""
    case = case_of(next(each for each in WORKLOADS if each.name == "moe-bf16-fp8"), 2, layers=1)
    train, gen = (schedule_of_plan(case.plan(), world, 0) for world in ("train", "gen"))
    plan, buckets = divide_slots(parted(train)[1], 512 << 20)
    pulled = cut_buckets(parted(gen)[1].with_peers({0}), plan.bucket_bytes)
    assert [bucket.nbytes for bucket in pulled] == [bucket.nbytes for bucket in buckets[0]]
    tensors = len(gen.tensors)
    for bucket in pulled:
        copies = bucket.copies_at(tensors, 0)
        _, rows = divided(
            copies, np.zeros(tensors + 1, np.uint64), 1 << 17, np.zeros(len(copies), np.int64), 0.97, streams=1
        )
        assert rows.nbytes.mean() > 8e6
