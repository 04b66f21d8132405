"""What is kept between connections is what has not changed: exports, mappings, bound tensors."""

from __future__ import annotations

import gc
import json
from dataclasses import replace
from typing import Any
from weakref import ref

import pytest
import synthetic
import torch
from helpers.fake_memory import FakeMemory
from helpers.plans import Case

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.cuda.exported import Allocation, Export
from mcore_reshard.kernels.errors import BindError, SessionError, Waiting
from mcore_reshard.kernels.host import host
from mcore_reshard.kernels.transports.kept import Kept, Mappings
from mcore_reshard.session.part import RankOfPlan

CPU = torch.device("cpu")


class Keys(dict[str, bytes]):
    """A store in this process."""

    def set(self, key: str, value: str) -> None:
        self[key] = value.encode()

    def wait(self, keys: list[str], timeout: object) -> None:
        assert all(key in self for key in keys)

    def get(self, key: str, *_: object, writer: str = "") -> bytes:  # type: ignore[override]
        return self[key]


class Pair:
    """A source and a reader, as two connections after each other see them."""

    def __init__(self) -> None:
        self.theirs, self.ours = FakeMemory("theirs"), FakeMemory("ours")
        self.source, self.reader = Kept(self.theirs), Kept(self.ours)
        self.keys: Any = Keys()
        self.tensors = {name: torch.zeros(8) for name in ("a", "b")}

    def connect(self, process: str = "1") -> tuple[Mappings, list[int]]:
        """A connection: what the reader uses, and the serials of what it has mapped."""
        self.source.meet({"gen:0": "0"})
        self.reader.meet({"train:0": process})
        own = self.source.export(self.tensors)
        self.source.connect(self.keys, self.tensors)
        self.reader.connect(self.keys, {})
        self.source.publish(own, "train:0", self.keys)
        exported = self.reader.export_of(Waiting("gen:0", "train:0", 0, "w", False), own.digest, self.keys, 1.0)
        mappings = self.reader.mappings(CPU)
        addresses = mappings.addresses(exported, self.tensors, "train:0")
        self.source.sweep()
        self.reader.sweep()
        return mappings, [self.ours.open[address].serial for address in addresses]

    @property
    def counts(self) -> tuple[int, int, int]:
        """(exports made, exports read, allocations mapped)"""
        reader = self.reader.counts
        return self.source.counts["exports made"], reader["exports read"], reader["allocations mapped"]


def test_an_unchanged_pair_exports_reads_and_maps_once() -> None:
    pair = Pair()
    first, serials = pair.connect()
    first.close()
    second, again = pair.connect()
    assert pair.counts == (1, 1, 2) and serials == again
    second.close()
    assert len(pair.ours.open) == 2, "they stay mapped between connections"
    pair.reader.close()
    assert not pair.ours.open


def test_a_peer_that_starts_again_is_never_served_from_the_cache() -> None:
    pair = Pair()
    pair.connect()[0].close()
    pair.theirs._process = "another"  # at the same addresses
    pair.source = Kept(pair.theirs)
    _, serials = pair.connect(process="2")
    assert pair.counts == (1, 2, 4) and len(pair.ours.open) == 2
    assert serials == [each.serial for each in pair.ours.open.values()]


class Handle(str):
    """A handle that counts how often one is compared with another."""

    compared = 0

    def __eq__(self, other: object) -> bool:
        Handle.compared += 1
        return super().__eq__(other)

    __hash__ = str.__hash__


def test_mapping_many_allocations_compares_each_with_few_others() -> None:
    """A rank of DeepSeek-V3 maps some thousands: compared each with each, these took 13 s of `prepare` on an H200."""
    count = 2000
    allocations = tuple(Allocation(Handle(f"{n:0128x}"), n, 1, "gpu", n) for n in range(count))
    exported = Export(host(), "theirs", allocations, {f"{n}": (n, 0) for n in range(count)})
    Handle.compared = 0
    Pair().reader.mappings(CPU).addresses(exported, exported.tensors, "train:0")
    assert Handle.compared < 20 * count


def test_memory_of_a_peer_that_is_gone_is_unmapped() -> None:
    pair = Pair()
    pair.connect()[0].close()
    pair.reader.meet({"train:1": "1"})
    assert not pair.ours.open


def test_memory_that_is_in_use_is_unmapped_when_its_user_ends() -> None:
    pair = Pair()
    mappings, _ = pair.connect()
    pair.reader.close()
    assert len(pair.ours.open) == 2
    mappings.close()
    assert not pair.ours.open


def test_a_tensor_that_moved_is_exported_and_mapped_anew_and_its_old_memory_unmapped() -> None:
    pair = Pair()
    pair.connect()[0].close()
    before = pair.tensors["a"]  # keeps the address taken
    pair.tensors["a"] = torch.ones(8)
    assert before.data_ptr() != pair.tensors["a"].data_ptr()
    pair.connect()
    assert pair.counts == (2, 2, 3)
    exported = pair.source.export(pair.tensors).exported
    assert {*pair.ours.open.values()} == {*exported.allocations}


def test_memory_that_was_allocated_anew_at_its_address_is_mapped_anew() -> None:
    pair = Pair()
    mappings, serials = pair.connect()
    mappings.close()
    pair.theirs.allocate_anew(pair.tensors["a"])
    _, again = pair.connect()
    assert pair.counts == (2, 2, 3)
    assert again[0] not in serials and again[1] == serials[1]


def test_memory_that_a_failed_refit_may_still_read_stays_mapped_and_is_not_taken_for_what_came_after_it() -> None:
    pair = Pair()
    mappings, _ = pair.connect()
    mappings.close(is_used=True)
    pair.connect()[0].close()
    pair.theirs.allocate_anew(pair.tensors["a"])
    with pytest.raises(SessionError, match="train:0 has allocated its memory anew"):
        pair.connect()
    pair.reader.close()
    assert len(pair.ours.open) == 2


def test_an_export_that_is_not_the_one_of_its_digest_is_refused() -> None:
    pair = Pair()
    own = pair.source.export(pair.tensors)
    waiting = Waiting("gen:0", "relay:2", 0, "w", False)
    pair.source.publish(own._replace(digest="digest"), "gen:2", pair.keys)
    with pytest.raises(SessionError, match="relay:2 has published another export than it says"):
        pair.reader.export_of(waiting, "digest", pair.keys, 1.0)
    assert not pair.reader.counts["exports read"]


def test_an_export_without_serial_numbers_is_refused() -> None:
    said = json.loads(Pair().source.export({"w": torch.zeros(1)}).text)
    said["allocations"] = [each[:4] for each in said["allocations"]]
    with pytest.raises(SessionError, match="not an export of GPU memory"):
        Export.from_json(json.dumps(said))


def test_an_export_of_the_own_process_maps_nothing() -> None:
    pair = Pair()
    pair.theirs._process = "ours"
    mappings = pair.reader.mappings(CPU)
    exported = Export.from_json(pair.source.export(pair.tensors).text)
    assert mappings.addresses(exported, ["a"], "train:0") == [pair.tensors["a"].data_ptr()]
    assert not pair.ours.open


CASE = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=1,dp=3")


@pytest.mark.parametrize(("world", "rank"), [("train", 1), ("gen", 0)])
def test_a_schedule_among_other_replicas_is_bound_to_the_tensors_that_are_bound(world: str, rank: int) -> None:
    part = RankOfPlan(CASE.plan(), world, rank)  # type: ignore[arg-type]
    three, two = part.schedule((0, 1, 2)), part.schedule((0, 1))
    tensors = synthetic.allocate(three, CPU)
    bound, whole = bind(three, tensors).again(two, tensors), bind(two, tensors)
    assert bound is not None and bound.schedule is two
    assert bound.fingerprints == whole.fingerprints
    assert [each.data_ptr() for each in bound.tensors] == [each.data_ptr() for each in whole.tensors]
    assert (bound.casts, bound.stages) == (whole.casts, whole.stages)


def test_a_tensor_that_moved_is_not_taken_for_bound() -> None:
    part = RankOfPlan(CASE.plan(), "gen", 0)
    three, two = part.schedule((0, 1, 2)), part.schedule((0, 1))
    tensors = synthetic.allocate(three, CPU)
    bound = bind(three, tensors)
    name = next(iter(tensors))
    assert bound.again(two, {**tensors, name: tensors[name].clone()}) is None
    assert bound.again(replace(two, tensors=two.tensors[::-1]), tensors) is None
    with pytest.raises(BindError, match="more: nothing in the plan fills it"):
        bound.again(two, {**tensors, "more": torch.zeros(1)})
    table = two.stages[0].recvs
    damaged = replace(two, stages=(replace(two.stages[0], recvs=replace(table, offset=table.offset + (1 << 40))),))
    with pytest.raises(BindError, match="outside their tensor"):
        bound.again(damaged, tensors)


def test_what_does_not_stay_is_unmapped_when_it_is_closed() -> None:
    pair = Pair()
    pair.connect()
    slots = pair.reader.mappings(CPU, stay=False)
    slot = torch.zeros(8)
    exported = pair.theirs.export({"slot": slot})
    slots.addresses(exported, ["slot"], "train:0")
    mapped = len(pair.ours.open)
    slots.close()
    assert len(pair.ours.open) == mapped - 1, "others stay mapped"


def test_slots_at_the_address_of_old_weights_are_mapped_anew() -> None:
    pair = Pair()
    mappings, _ = pair.connect()
    mappings.close()
    old = pair.tensors["a"]
    before = pair.theirs.export({"a": old}).allocations[0].serial
    pair.theirs.allocate_anew(old)
    exported = pair.theirs.export({"slot": old})
    slots = pair.reader.mappings(CPU, stay=False)
    (address,) = slots.addresses(exported, ["slot"], "train:0")
    assert pair.ours.open[address].serial == exported.allocations[0].serial != before


def test_a_closed_cache_holds_no_tensors() -> None:
    pair = Pair()
    pair.connect()
    held = ref(pair.tensors["a"])
    pair.tensors.clear()
    pair.source.close()
    gc.collect()
    assert held() is None
