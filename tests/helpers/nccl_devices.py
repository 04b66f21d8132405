"""Ranks of the nccl transport as CUDA and NCCL would run them, on the CPU, in any order of kernels."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.cast_arithmetic import compute_scales
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.transports.nccl.staging import (
    Division,
    HopEnd,
    PlacedMessage,
    Round,
    divided_rounds,
    slot_bytes,
)

STREAMS = range(8)

Communicators = Mapping[int, Sequence[int]]  # the group ranks in each


@dataclass
class Device:
    """A rank's streams and slots in one part: each stream in order, whenever what it waits for is done."""

    bounds: Sequence[BoundSchedule]
    found: tuple[Round, ...]
    slots: dict[tuple[int, int], NDArray[np.uint8]]
    packed: set[int] = field(default_factory=set)  # rounds
    moved: set[int] = field(default_factory=set)  # whose messages have
    over: set[int] = field(default_factory=set)
    messages: set[tuple[int, int]] = field(default_factory=set)  # (round, message) that have been sent or received

    @classmethod
    def of(cls, bounds: Sequence[BoundSchedule], division: Division, train_ranks: int) -> Device:
        ends = HopEnd.cut([bound.schedule for bound in bounds], division, train_ranks)
        found = divided_rounds(ends, division, in_place=[[True] * len(bound.tensors) for bound in bounds])
        slots = {place: np.full(nbytes, 0xEE, np.uint8) for place, nbytes in slot_bytes(found).items()}
        for bound in bounds:
            compute_scales(bound.casts, bound.tensors)
        return cls(bounds, found, slots)

    @property
    def is_done(self) -> bool:
        return len(self.over) == len(self.found)

    def under_way(self) -> dict[tuple[int, int, int], int]:
        """(stream, window, communicator) -> the round whose messages are under way there: of a stream one at a time."""
        nexts = (self._next_of(self.moved, stream) for stream in STREAMS)
        ready = (index for index in nexts if index is not None and (index in self.packed or not self._packs(index)))
        found = ((n, self.found[n]) for n in ready if self._slot_is_free(n))
        return {(each.stream, each.window, each.communicator): n for n, each in found}

    def copy(self, stream: int, *, packs: bool) -> bool:
        """Pack or unpack the next round of a stream; False if there is nothing to do yet."""
        index = self._next_of(self.packed if packs else self.over, stream)
        if index is None or not (self._slot_is_free(index) if packs else index in self.moved):
            return False
        for placed in self.found[index].staged:
            if placed.bucket.sends == packs:
                bases = [*map(byte_array, self.bounds[placed.end].tensors), self.message(index, placed)]
                run_copies(placed.bucket.copies, bases, self.bounds[placed.end].casts)
        (self.packed if packs else self.over).add(index)
        return True

    def message(self, index: int, placed: PlacedMessage) -> NDArray[np.uint8]:
        if placed.tensor is not None:
            tensor, at = byte_array(self.bounds[placed.end].tensors[placed.tensor]), placed.offset
            return tensor[at : at + placed.message_bytes]
        each = self.found[index]
        return self.slots[each.stream, each.slot][placed.offset :][: placed.message_bytes]

    def with_member(self, index: int, member: int, *, sends: bool) -> list[int]:
        """The messages of a round to or from a member, in their order: NCCL matches those of both ends in it."""
        messages = enumerate(self.found[index].placed_messages)
        return [n for n, placed in messages if placed.member == member and placed.bucket.sends == sends]

    def settle(self) -> None:
        for index in self.under_way().values():
            if all((index, number) in self.messages for number in range(len(self.found[index].placed_messages))):
                self.moved.add(index)

    def _packs(self, index: int) -> bool:
        return any(placed.bucket.sends for placed in self.found[index].placed_messages)

    def _next_of(self, done: set[int], stream: int) -> int | None:
        return next((n for n, each in enumerate(self.found) if each.stream == stream and n not in done), None)

    def _slot_is_free(self, index: int) -> bool:
        after = self.found[index].after
        return after is None or after in self.over


def exchange(devices: dict[int, Device], communicators: Communicators) -> bool:
    """Hand over every message whose group is under way at both ends; False if there is none. `devices` is by group rank."""
    found = False
    under_way = {rank: device.under_way() for rank, device in devices.items()}
    for sender, src in devices.items():
        for key, index in under_way[sender].items():
            members = communicators[key[2]]
            peers = {placed.member for placed in src.found[index].placed_messages if placed.bucket.sends}
            for member in peers:
                dst = devices.get(members[member])
                other = None if dst is None else under_way[members[member]].get(key)
                if dst is None or other is None:
                    continue
                sends = src.with_member(index, member, sends=True)
                receives = dst.with_member(other, members.index(sender), sends=False)
                for number, mirror in zip(sends, receives, strict=True):
                    if (index, number) not in src.messages:
                        sent, arriving = (
                            src.found[index].placed_messages[number],
                            dst.found[other].placed_messages[mirror],
                        )
                        dst.message(other, arriving)[:] = src.message(index, sent)
                        src.messages.add((index, number))
                        dst.messages.add((other, mirror))
                        found = True
    for device in devices.values():
        device.settle()
    return found


def run_in_any_order(
    parts: Sequence[dict[int, Device]], communicators: Communicators, rng: np.random.Generator
) -> None:
    """Run the parts of all ranks, each rank's one after another, by kernels that `rng` chooses. AssertionError: a deadlock."""
    ranks = sorted(set().union(*parts))

    def current() -> list[tuple[int, Device]]:
        return [
            (number, part[rank])
            for rank in ranks
            for number, part in [*enumerate(parts)]
            if rank in part
            and not part[rank].is_done
            and all(each[rank].is_done for each in parts[:number] if rank in each)
        ]

    while now := current():
        copies = [(device, stream, packs) for _, device in now for stream in STREAMS for packs in (True, False)]
        chosen = [copies[n] for n in rng.permutation(len(copies)) if rng.random() < 0.7]
        moved = sum(device.copy(stream, packs=packs) for device, stream, packs in chosen) > 0
        if rng.random() < 0.7:
            moved |= _exchange_parts(parts, now, communicators)
        if not moved:
            moved = sum(device.copy(stream, packs=packs) for device, stream, packs in copies) > 0
            assert moved or _exchange_parts(parts, now, communicators), "deadlock"


def _exchange_parts(
    parts: Sequence[dict[int, Device]], now: Sequence[tuple[int, Device]], communicators: Communicators
) -> bool:
    """The same among the ranks that are in one part."""
    at_work = {id(device) for _, device in now}
    found = False
    for part in parts:
        devices = {rank: device for rank, device in part.items() if id(device) in at_work}
        found |= exchange(devices, communicators)
    return found
