"""Casts on the direct transport, both ends: a source casts into slots, a reader pulls out of them.

Events order casts and pulls on the GPUs. A signal over the CPU only says that an event has been recorded; it travels
while earlier rounds are under way. So `rounds(run)` returns before the last bytes have landed. Work that is queued on
`stream` afterwards runs after them.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass
from functools import partial
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.copy_table import joined
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.cuda.cast_tiles import cut_rounds
from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape
from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, computed_problems, names_of, tile_problems
from mcore_reshard.kernels.cuda.ipc import Export, export, export_event, open_event, withdraw_event
from mcore_reshard.kernels.cuda.streams import forked
from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES
from mcore_reshard.kernels.errors import ChecksumError, SessionError
from mcore_reshard.kernels.options import ALIGNMENT
from mcore_reshard.kernels.transports.kept import Mappings
from mcore_reshard.kernels.transports.rounds import in_rounds
from mcore_reshard.planner.plan.schedule import Schedule

from .peer_signals import PeerSignals
from .pull import DirectOptions, Pull
from .staging import SLOTS, SlotPlan, by_turn, divide_slots
from .turns import whole_number

_PREFIX = "slots/"  # of the keys under which ranks publish their slots and events

# All of an H100 or H200: readers wait for the first round as soon as they have queued everything else.
_FASTEST = KernelShape(ctas=528, threads=256)
# While others read its memory, a GPU that casts as fast as it can slows them. On two H100s, 10 GB of bfloat16 took 32.7 ms
# with 528 CTAs, 30.3 with 132, 29.4 with 88, 29.7 with 66 and 31.5 with 44; the same bytes without casts took 29.2.
_CALM = KernelShape(ctas=88, threads=256)


def _casting_shape(device: torch.device, *, shares_gpu: bool, first: bool) -> KernelShape:
    """How a round is cast. Readers may wait for the first of all. Ranks of one GPU take turns on it, so each is to end soon."""
    is_hopper = torch.cuda.get_device_capability(device)[0] == 9  # of others it has not been measured
    return _CALM if is_hopper and not shares_gpu and not first else _FASTEST


@dataclass(frozen=True, slots=True)
class _Casting:
    """A round of a source."""

    peers: tuple[int, ...]
    of_reader: int  # how many rounds these readers had before
    gather: DeviceGather


@dataclass(frozen=True, slots=True)
class _Pulling:
    """A round of a reader."""

    of_reader: int  # how many rounds its sources had before, that were for this reader
    slots: Mapping[int, int]  # by source
    buckets: tuple[Bucket, ...]  # one for each source
    source: NDArray[np.int64]  # of each copy
    copies: Pull


class SlotSource:
    """A training rank that casts. `schedule` is the part of the bound schedule that is cast."""

    def __init__(self, bound: BoundSchedule, schedule: Schedule, signals: PeerSignals, scratch_bytes: int) -> None:
        self._signals = signals
        self._rounds: list[_Casting] = []
        self.problems: list[str] = []  # of the tables, as they were read back from the device
        self.buckets: tuple[Bucket, ...] = ()  # all that it casts
        self._cast: list[torch.cuda.Event] = []  # by slot: has happened when the last cast into it is done
        self._taken: dict[int, list[torch.cuda.Event]] = {}  # by reader and slot: when the reader has last read it
        self.scratch_bytes = self.table_bytes = 0
        self.stream: torch.cuda.Stream | None = None
        self.began: float | None = None  # when the last run's first pull was queued, by `time.monotonic`
        if not schedule.peers:
            return
        device = bound.device
        assert device is not None, "there are transfers, so there are tensors"
        parse = partial(_parse_reader, device, schedule.rank, schedule.train_ranks)
        readers = {peer: signals.fetch(peer, parse, prefix=_PREFIX) for peer in sorted(schedule.peers)}
        try:
            plan, rounds = divide_slots(schedule, scratch_bytes, {peer: turn for peer, (_, turn, _) in readers.items()})
        except ValueError as error:
            raise SessionError(f"{bound.rank_name}: {error}") from error
        self.stream = torch.cuda.Stream(device)
        self._slots = [torch.empty(plan.slot_bytes, dtype=torch.uint8, device=device) for _ in range(SLOTS)]
        self.scratch_bytes = sum(slot.nbytes for slot in self._slots)
        self._cast = [torch.cuda.Event(interprocess=True) for _ in range(SLOTS)]
        word = {
            "bucket_bytes": plan.bucket_bytes,
            "places": plan.places,
            "first_slots": {peer: first % SLOTS for peer, first in plan.first.items()},
            "slots": export({str(number): slot for number, slot in enumerate(self._slots)}).to_json(),
            "events": [export_event(event, device) for event in self._cast],
        }
        signals.publish(word, prefix=_PREFIX)
        self._taken = {peer: events for peer, (events, _, _) in readers.items()}
        shares_gpu = gpu_of(device) in {gpu for _, _, gpu in readers.values()}
        self._rounds = self._bind_rounds(bound, plan, rounds, shares_gpu)
        self.buckets = tuple(bucket for together in rounds for bucket in together)
        self.table_bytes = sum(each.gather.nbytes for each in self._rounds)

    @property
    def readers(self) -> Set[int]:
        """Ranks that pull out of its slots."""
        return self._taken.keys()

    def rounds(self, run: int) -> None:
        """Queue all casts. Returns once all readers have queued all pulls. What was queued for the weights has been done."""
        assert self.stream is not None, "nothing is cast"
        self.began = None
        for number, each in enumerate(self._rounds):
            slot = number % SLOTS
            if number >= SLOTS:
                self._hear_taken(run, number - SLOTS)
                for peer in self._rounds[number - SLOTS].peers:
                    self.stream.wait_event(self._taken[peer][slot])
            each.gather.launch(self.stream)
            self._cast[slot].record(self.stream)
            self._signals.tell(run, each.of_reader, each.peers)
        for number in range(max(0, len(self._rounds) - SLOTS), len(self._rounds)):
            self._hear_taken(run, number)

    def _hear_taken(self, run: int, number: int) -> None:
        self._signals.hear(run, self._rounds[number].of_reader, self._rounds[number].peers)
        self.began = self.began or time.monotonic()

    def close(self) -> None:
        for event in self._cast:
            withdraw_event(event)
        self._taken.clear()

    def _bind_rounds(
        self, bound: BoundSchedule, plan: SlotPlan, packed: Sequence[tuple[Bucket, ...]], shares_gpu: bool
    ) -> list[_Casting]:
        device = self._slots[0].device
        own = [tensor.data_ptr() for tensor in bound.tensors]
        elements = [tensor.numel() for tensor in bound.tensors]
        addresses = np.array(own + [slot.data_ptr() for slot in self._slots], np.uint64)
        tables = [
            joined([bucket.copies_at(len(own) + number % SLOTS, plan.places[bucket.peer]) for bucket in together])
            for number, together in enumerate(packed)
        ]
        cut = cut_rounds(tables, addresses, bound.casts, DEFAULT_TILE_BYTES, elements)
        rounds = []
        for number, (together, of_round) in enumerate(zip(packed, cut, strict=True)):
            shape = _casting_shape(device, shares_gpu=shares_gpu, first=number == 0)
            gather = DeviceGather(of_round, device, shape)
            slot = self._slots[number % SLOTS].data_ptr()
            placed = PlacedCopies.of_buckets(together, own, [slot + plan.places[each.peer] for each in together])
            name_of = names_of(bound.schedule, placed.copies["src"])
            self.problems += gather.problems(placed, bound.casts, own, name_of)
            peers = tuple(bucket.peer for bucket in together)
            rounds.append(_Casting(peers, number - plan.first[peers[0]], gather))
        if not self.problems:
            self.problems = computed_problems(bound, tables, (each.gather.computed() for each in rounds))
        return rounds


class SlotReader:
    """A generation rank that pulls out of its sources' slots, on `stream`. `schedule` is the part that is cast.

    `by_engine`: in which turn a copy engine helps with each source; {} where it does not, and all are read at once.
    """

    def __init__(
        self,
        bound: BoundSchedule,
        schedule: Schedule,
        signals: PeerSignals,
        mappings: Mappings,
        stream: torch.cuda.Stream,
        engine_stream: torch.cuda.Stream,
        options: DirectOptions,
        by_engine: Mapping[int, int],
    ) -> None:
        self._signals = signals
        self._stream = stream
        self.problems: list[str] = []  # of the tables, as they were read back from the device
        self._rounds: list[_Pulling] = []
        self._slot_streams: list[torch.cuda.Stream] = []
        self._taken: dict[int, list[torch.cuda.Event]] = {}  # as its sources have them
        self._cast: dict[int, list[torch.cuda.Event]] = {}
        self.table_bytes = 0
        self.shares_gpu = False  # with a source
        sources = sorted(schedule.peers)
        if not sources:
            return
        device = stream.device
        turns = {peer: by_engine.get(peer, 0) for peer in sources}
        self._taken = {peer: [torch.cuda.Event(interprocess=True) for _ in range(SLOTS)] for peer in sources}
        word = {
            "events": {
                peer: [export_event(event, device) for event in of_peer] for peer, of_peer in self._taken.items()
            },
            "turns": turns,
            "gpu": gpu_of(device),
        }
        signals.publish(word, prefix=_PREFIX)
        addresses = [tensor.data_ptr() for tensor in bound.tensors]
        own = len(addresses)
        buckets: dict[int, tuple[Bucket, ...]] = {}  # by source
        theirs: dict[int, _SourceSlots] = {}
        slots: dict[int, list[int]] = {}
        for peer in sources:
            of_source = theirs[peer] = signals.fetch(peer, partial(_parse_slots, device, schedule.rank), prefix=_PREFIX)
            self._cast[peer] = of_source.events
            owner = schedule.name_of("train", peer)
            buckets[peer] = cut_buckets(schedule.with_peers({peer}), of_source.bucket_bytes)
            end = of_source.place + max((bucket.nbytes for bucket in buckets[peer]), default=0)
            room = min(of_source.exported.bytes_from(str(slot)) for slot in range(SLOTS))
            if end > room:  # the GPU would read beyond
                raise SessionError(f"{owner} exports slots of {room} bytes, {end} are read")
            slots[peer] = mappings.addresses(of_source.exported, map(str, range(SLOTS)), owner)
            addresses += slots[peer]
        bases = np.array(addresses, np.uint64)
        gpus = {block.gpu for of_source in theirs.values() for block in of_source.exported.allocations}
        self.shares_gpu = gpu_of(device) in gpus
        # The copy engine goes on with the next round while the kernel ends one; two kernels at once would be slower.
        self._slot_streams = [torch.cuda.Stream(device) if by_engine else stream for _ in range(SLOTS)]
        of_turns = [in_rounds({peer: buckets[peer] for peer in peers}) for peers in by_turn(turns)]
        for number, together in chain.from_iterable(map(enumerate, of_turns)):  # from 0 on in each turn
            slot_of = {bucket.peer: (theirs[bucket.peer].first_slot + number) % SLOTS for bucket in together}
            source = np.repeat([bucket.peer for bucket in together], [len(bucket.copies) for bucket in together])
            tables = [
                bucket.copies_at(own + sources.index(peer) * SLOTS + slot, theirs[peer].place)
                for bucket, (peer, slot) in zip(together, slot_of.items(), strict=True)
            ]
            # Tile by tile: readers drift apart from round to round. If they read one source after the other, two of them
            # would end up at the same source all the time.
            copies = Pull(
                joined(tables), bases, device, options.shape or KernelShape(), options,
                peer=source, by_engine=dict.fromkeys(by_engine, 0), first=schedule.rank, together=1,
                engine_streams=[engine_stream],
            )  # fmt: skip
            self._rounds.append(_Pulling(number, slot_of, together, source, copies))
            begins = [slots[peer][slot] + theirs[peer].place for peer, slot in slot_of.items()]
            placed = PlacedCopies.of_buckets(together, addresses[:own], begins)
            name_of = names_of(bound.schedule, placed.copies["dst"])
            self.problems += tile_problems(copies.read_back(), placed, name_of)
            self.table_bytes += copies.nbytes

    @property
    def buckets(self) -> tuple[Bucket, ...]:
        """All that it pulls."""
        return tuple(bucket for each in self._rounds for bucket in each.buckets)

    @property
    def sources(self) -> Collection[int]:
        """Ranks out of whose slots it pulls."""
        return self._cast.keys()

    def rounds(self, run: int) -> None:
        """Queue all pulls, after what is queued on the stream. Returns when they are queued."""
        with forked(self._stream, self._slot_streams):
            for number, each in enumerate(self._rounds):
                stream = self._slot_streams[number % SLOTS]
                self._signals.hear(run, each.of_reader, each.slots)
                for peer, slot in each.slots.items():
                    stream.wait_event(self._cast[peer][slot])
                each.copies.launch(stream)
                for peer, slot in each.slots.items():
                    self._taken[peer][slot].record(stream)
                self._signals.tell(run, each.of_reader, each.slots)

    def check_sums(self) -> None:
        """Raise `ChecksumError` for bytes that were written otherwise than read; all pulls must have ended."""
        for each in self._rounds:
            for source in each.source[each.copies.damaged()].tolist():
                waiting = next(bucket.waiting for bucket in each.buckets if bucket.peer == source)
                raise ChecksumError(waiting, "other bytes were written than were read")

    def close(self) -> None:
        for events in self._taken.values():
            for event in events:
                withdraw_event(event)
        self._cast.clear()


class _SourceSlots(NamedTuple):
    """What a reader knows of a source's slots."""

    bucket_bytes: int
    place: int  # where a slot has this rank's bucket
    first_slot: int  # that has its first one
    exported: Export
    events: list[torch.cuda.Event]  # by slot


def _parse_slots(device: torch.device, rank: int, said: Any) -> _SourceSlots:
    bucket_bytes, place = (whole_number(each, 1 << 60) for each in (said["bucket_bytes"], said["places"][str(rank)]))
    if not bucket_bytes or bucket_bytes % ALIGNMENT or place % ALIGNMENT:
        raise ValueError(f"buckets of {bucket_bytes} bytes from {place} on")
    first_slot = whole_number(said["first_slots"][str(rank)], SLOTS)
    exported = Export.from_json(said["slots"])
    return _SourceSlots(bucket_bytes, place, first_slot, exported, _parse_events(device, said["events"]))


def _parse_reader(device: torch.device, rank: int, ranks: int, said: Any) -> tuple[list[torch.cuda.Event], int, str]:
    """(events, the turn in which it reads this one of so many ranks, GPU) of a reader."""
    turn = whole_number(said["turns"][str(rank)], ranks)
    return _parse_events(device, said["events"][str(rank)]), turn, str(said["gpu"])


def _parse_events(device: torch.device, texts: Any) -> list[torch.cuda.Event]:
    if not isinstance(texts, list) or len(texts) != SLOTS:
        raise ValueError(f"{texts!r} in place of {SLOTS} events")
    return [open_event(text, device) for text in texts]
