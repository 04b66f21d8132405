"""What the parts of a refit over NCCL share: communicators, slots, and the way to wait and to give up.

Every stream has a communicator of all ranks that exchange anything. Where ranks of both sides share GPUs, it has several,
and there may be more streams (see `shared_gpus`). Parts run one after another, so that the fullest round of any decides on
the size of a slot. Packing and unpacking have a stream each: a rank that passes bytes on packs a round while it waits for
one that it will unpack.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from itertools import chain
from threading import Thread
from typing import TYPE_CHECKING, Any, get_args

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import DeadlineError, PeerLostError, RefitError, SessionError, Waiting, first_of
from mcore_reshard.kernels.rendezvous.exchange import Failure, StoreExchange, fetch, publish, seat_of
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.kernels.transports.group_ranks import group_names, group_rank
from mcore_reshard.kernels.transports.rounds import turn_with
from mcore_reshard.planner.plan.paths import HopKind

from .communicator import NcclCommunicator, NcclError, Payload, new_unique_id
from .shared_gpus import SharedGpus, most_ctas
from .staging import (
    Division,
    HopEnd,
    Messages,
    Round,
    ScratchBudget,
    divide,
    most_buckets,
    pair_count,
    slot_bytes,
    windows_that_fit,
    with_windows,
)

if TYPE_CHECKING:
    from mcore_reshard.kernels.cuda.device_memory import PlainBuffer

    from .executor import NcclExecutor

Waits = tuple[Waiting, ...]  # what is awaited of each peer, the first due first
_WARM_BYTES = 16
_UNIQUE_ID_BYTES = 128
_STOP_S = 1e-3  # until kernels that begin see what the host wrote
_LEFT: list[torch.Tensor | None] = []  # what kernels that never ended may read; torch would give it to others


@dataclass(frozen=True, slots=True)
class Link:
    """A stream's communicators that the rank is in, by their numbers, the stream, and those of the copies beside it."""

    communicators: dict[int, NcclCommunicator]
    wire: torch.cuda.Stream
    packing: torch.cuda.Stream
    unpacking: torch.cuda.Stream


class NcclConnection:
    """A rank's side of all its parts. All ranks construct it at the same time, with as many parts and the same `budget`.

    A part has what the rank exchanges with the other world, and then what replicas send and receive of each other.
    `shared` says where ranks are that may share GPUs. A rank beside those that send may have no tensor in any part: then
    `device` says its GPU.
    """

    def __init__(
        self,
        parts: Sequence[Sequence[BoundSchedule]],
        store: StoreKeys,
        *,
        timeout_s: float,
        budget: ScratchBudget,
        shared: SharedGpus | None = None,
        device: torch.device | None = None,
    ) -> None:
        self.timeout_s = timeout_s
        self._parts = [[bound.schedule for bound in part] for part in parts]
        self.rank_name, self._schedule = parts[0][0].rank_name, parts[0][0].schedule
        devices = (bound.device for part in parts for bound in part if bound.device is not None)
        self.device = device or next(devices, torch.device("cpu"))
        self._own = group_rank(self._schedule, self._schedule.world, self._schedule.rank)
        self._exchange = StoreExchange(store, self.rank_name, group_names(self._schedule), timeout_s)
        self.budget = budget
        self.runs = 0  # of all parts
        self.closed = False
        self._closing: Thread | None = None  # after an error
        self.links: dict[int, Link] = {}  # by stream
        self.executors: Sequence[NcclExecutor] = ()  # of the parts
        # Of all parts, drawn with the links: behind which they begin, and for what the device tells the host. Other
        # transports may be at work on the caller's stream.
        self.stream: torch.cuda.Stream
        self.notes: torch.cuda.Stream
        self._first_due: Waits = ()  # of each peer
        self.stop: torch.Tensor | None = None  # of everything that is unpacked: see DeviceGather
        self.slots: dict[tuple[int, int], PlainBuffer] = {}
        self._graphs: list[tuple[torch.cuda.CUDAGraph, torch.cuda.Event]] = []
        self.ends: list[list[HopEnd]] = []  # of each part
        with self.give_up_on_error():
            self.divisions = self._divide(budget, shared)

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the slots. The kernels' tables and NCCL's own buffers come on top."""
        return sum(slot.tensor.numel() for slot in self.slots.values())

    @property
    def is_member(self) -> bool:
        """Whether the rank exchanges bytes, or others of its host do by its NIC."""
        return self._own in self.divisions[0].members

    def prepare(self, rounds: Sequence[Sequence[Round]]) -> None:
        """Allocate the slots that the rounds of the parts need, and connect all pairs of ranks that exchange bytes."""
        from mcore_reshard.kernels.cuda.device_memory import PlainBuffer

        for place, nbytes in slot_bytes([each for part in rounds for each in part]).items():
            self.slots[place] = PlainBuffer(nbytes)
        self.stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
        self._connect()

    def keep(self, graph: torch.cuda.CUDAGraph, done: torch.cuda.Event) -> None:
        """Keep a graph of messages until the end. `done` is recorded behind each launch."""
        self._graphs.append((graph, done))

    def stop_unpacking(self) -> None:
        """Leave rounds whose messages have not come as they are: an abort lets graphs go on, over stale slots."""
        if self.stop is not None:
            self.stop.fill_(1)
            time.sleep(_STOP_S)

    def settle(self, communicator: NcclCommunicator, where: Waits) -> None:
        """Wait until the last start of a communicator has been handed to the device."""
        self._wait_for(where, lambda: communicator.is_idle(where))

    def wait(self, has_happened: Callable[[], bool], where: Callable[[], Waits], poller: EventPoller) -> None:
        """Poll `has_happened`. Raises if what is awaited, `where()`, takes too long, another rank gives up, or NCCL fails."""

        def check() -> bool:
            try:
                return has_happened()
            except RefitError:
                raise
            except RuntimeError as error:
                raise NcclError(where()[0], f"the device failed: {error}") from error

        def look(waited_s: float) -> None:
            if who := self._exchange.who_gave_up():  # asked first: NCCL may only report what that does to it
                raise PeerLostError(where()[0], f"{who} gave up")
            everyone = _one_of_each((*where(), *self._first_due))  # a connection may fail that is of none of the former
            for link in self.links.values():
                for communicator in link.communicators.values():
                    communicator.is_idle(everyone)

        if not poller.until(check, look=look, progress=lambda: id(where())):
            raise self._overdue(where())

    @contextmanager
    def give_up_on_error(self) -> Iterator[None]:
        """Tell all ranks of an error, and begin to close: the error need not wait for NCCL, which takes seconds to abort."""
        try:
            yield
        except BaseException:
            self.executors = ()  # these hold the connection, too
            self._exchange.give_up()
            if not self.closed:
                self.closed = True
                self._closing = Thread(target=in_callers_context(self._release, self.device), daemon=True)
                self._closing.start()
            raise

    def close(self) -> None:
        """Abort all communicators and free scratch. May be called twice."""
        if self._closing is not None:
            self._closing.join()
        elif not self.closed:
            self.closed = True
            self._release()
        self.executors = ()

    def _release(self) -> None:
        links, self.links = self.links, {}
        graphs, self._graphs = self._graphs, []
        slots, self.slots = self.slots, {}
        # NCCL's abort stops its kernels, then waits for the device and for graphs that hold the communicator. So all are
        # aborted at the same time, and the graphs go in between.
        communicators = [each for link in links.values() for each in link.communicators.values()]
        aborts = [Thread(target=communicator.abort, daemon=True) for communicator in communicators]
        for abort in aborts:
            abort.start()
        for graph, done in graphs:
            with suppress(RuntimeError):  # a broken device has said so before
                if not EventPoller(CLOSE_S).until(done.query):
                    _LEFT.append(self.stop)
                    return  # a kernel may still use the memory, and freeing it would wait for that kernel
            graph.reset()
        for abort in aborts:
            abort.join(CLOSE_S)
        for slot in slots.values():
            slot.free()

    def _divide(self, budget: ScratchBudget, shared: SharedGpus | None) -> list[Division]:
        """Agree with all ranks on how each part divides scratch."""
        gather = self._exchange.gather
        pairs = [sum(map(pair_count, part)) for part in self._parts]
        hops = [[*dict.fromkeys(schedule.hop_kind for schedule in part[1:])] for part in self._parts]
        words = gather("word", (pairs, hops, repr(budget)), _parse_word)
        if len(budgets := sorted({budget for _, _, budget in words})) > 1:
            raise SessionError(f"the ranks have different budgets: {'; '.join(budgets)}; give all of them the same")
        members = tuple(rank for rank, (pairs, _, _) in enumerate(words) if any(pairs))
        try:
            divisions = [
                divide(budget, pairs, parts=len(self._parts), hops={*chain(*hops)}, members=members, shared=shared)
                for pairs, hops in zip(
                    zip(*(pairs for pairs, _, _ in words), strict=True),
                    zip(*(hops for _, hops, _ in words), strict=True),
                    strict=True,
                )
            ]
            train_ranks = self._schedule.train_ranks
            self.ends = [
                HopEnd.cut(part, division, train_ranks) for part, division in zip(self._parts, divisions, strict=True)
            ]
            own = [most_buckets(*part) for part in zip(self.ends, divisions, strict=True)]
            most = zip(*gather("most_buckets", own, _parse_pairs), strict=True)
            divisions = [division.with_most(of_part) for division, of_part in zip(divisions, most, strict=True)]
            self.ends = [
                HopEnd.cut(part, division, train_ranks) if division.keeps_pace else ends
                for part, division, ends in zip(self._parts, divisions, self.ends, strict=True)
            ]
            messages = [Messages.of(*part) for part in zip(self.ends, divisions, strict=True)]
            windows = [[*windows_that_fit(*part)] for part in zip(divisions, messages, strict=True)]
            fitting = gather("windows", windows, _parse_windows)
            return [with_windows(*part) for part in zip(divisions, zip(*fitting, strict=True), strict=True)]
        except ValueError as error:
            raise SessionError(str(error)) from error

    def _connect(self) -> None:
        """Join the communicators, all at the same time, and connect every pair in them."""
        me = self._own
        members = {number: ranks for number, ranks in self.divisions[0].communicators().items() if me in ranks}
        first: dict[tuple[int, int, bool], Waiting] = {}  # for the first bucket to or from each member
        streams_of: dict[tuple[int, int, bool], set[int]] = {}
        for part, division in enumerate(self.divisions):
            for end in self.ends[part]:
                of_peers: dict[int, Waiting] = {}
                for bucket in end.buckets:
                    if bucket.peer not in of_peers:
                        of_peers[bucket.peer] = bucket.waiting
                for peer, waiting in of_peers.items():
                    turn = turn_with(end.schedule, peer)
                    number = int(division.communicator_of(*end.way(peer), turn))
                    way = number, members[number].index(end.first_peer + peer), end.sends
                    first.setdefault(way, waiting)
                    streams_of.setdefault(way, set()).update(division.streams_of(turn, number))
        waits = self._first_due = _one_of_each([*first.values()]) or (self._forwards(),)
        division = self.divisions[0]
        # torch hands out 32 in turn: those of the links are others.
        self.stream, self.notes = torch.cuda.Stream(), torch.cuda.Stream()
        for stream in range(division.streams):
            # NCCL's few CTAs go first where both wait for a multiprocessor: a wire that idles is lost time.
            wire = torch.cuda.Stream(priority=-1)
            link = self.links[stream] = Link({}, wire, torch.cuda.Stream(), torch.cuda.Stream())
            for number, ranks in members.items():
                if stream in division.streams_with(number):
                    link.communicators[number] = self._join(stream, number, ranks, me, waits[0])
        for link in self.links.values():
            for communicator in link.communicators.values():
                self.settle(communicator, waits)
        warm = torch.empty(len(first), _WARM_BYTES, dtype=torch.uint8, device=self.device)
        for stream, link in self.links.items():
            for number, communicator in link.communicators.items():  # in one order on all ranks
                payloads = [
                    Payload(*way[1:], warm[row])
                    for row, way in enumerate(first)
                    if way[0] == number and stream in streams_of[way]
                ]
                communicator.start(payloads, link.wire, waits[0])
                self.settle(communicator, waits)
                self._wait_for(waits, link.wire.record_event().query)

    def _join(self, stream: int, number: int, members: Sequence[int], me: int, waiting: Waiting) -> NcclCommunicator:
        """Begin to join a communicator of a stream. The first of its members says its id."""
        store = self._exchange.store
        key = f"id/{stream}" if self.divisions[0].shared is None else f"id/{stream}/{number}"
        if me == members[0]:
            publish(store, key, new_unique_id().hex())
        owner = replace(waiting, peer=group_names(self._schedule)[members[0]])
        unique_id = fetch(store, key, owner, _parse_unique_id, timeout_s=self.timeout_s)
        ctas = most_ctas(self.divisions[0].streams)
        return NcclCommunicator(unique_id, members.index(me), len(members), waiting, most_ctas=ctas)

    def _forwards(self) -> Waiting:
        """The wait of a rank that exchanges nothing itself."""
        other = next(rank for rank in self.divisions[0].members if rank != self._own)
        return Waiting(self.rank_name, group_names(self._schedule)[other], 0, "what leaves by this GPU's NIC", False)

    def _wait_for(self, where: Waits, has_happened: Callable[[], bool]) -> None:
        self.wait(has_happened, lambda: where, EventPoller(self.timeout_s))

    def _overdue(self, where: Waits) -> DeadlineError:
        """The error for what is past its deadline. It names peers that do not wait themselves."""
        reason = f"nothing within {self.timeout_s:g} s"
        waits = [Failure.of(self.rank_name, DeadlineError(waiting, reason)) for waiting in where]
        refit = -(-self.runs // len(self._parts))  # ranks may be in different parts of it; 0: they connect
        failure = self._exchange.blame(occasion := f"refit-{refit}", waits)
        first = [waiting for waiting in where if seat_of(waiting.peer) == failure.peer]
        others = [waiting for waiting in where if seat_of(waiting.peer) != failure.peer]
        seats = [seat_of(waiting.peer) for waiting in _one_of_each(where)]
        silent = [seat for seat in seats if not self._exchange.is_stuck(occasion, seat)]
        if not first:
            reason += f", as {failure}"
        elif len(silent) > 1:
            reason += f"; it may be any of {', '.join(silent)}"
        return first_of([DeadlineError(waiting, reason) for waiting in (*first, *others)])


def _one_of_each(waits: Sequence[Waiting]) -> Waits:
    """The first for each rank: a replica has another name where it passes on."""
    first: dict[str, Waiting] = {}
    for waiting in waits:
        first.setdefault(seat_of(waiting.peer), waiting)
    return tuple(first.values())


def _parse_word(word: Any) -> tuple[list[int], list[list[HopKind]], str]:
    """(`pair_count` of each part, the hops in which the rank passes on in it, budget) of a rank."""
    pairs, hops, budget = word
    if unknown := {*chain(*hops)} - {*get_args(HopKind)}:
        raise ValueError(f"hops {sorted(map(str, unknown))}")
    return _parse_counts(pairs), [[*of_part] for of_part in hops], str(budget)


def _parse_counts(counts: Any) -> list[int]:
    return [int(each) for each in counts]


def _parse_pairs(pairs: Any) -> list[tuple[int, int]]:
    return [(int(first), int(second)) for first, second in pairs]


def _parse_windows(windows: Any) -> list[list[int]]:
    return [_parse_counts(of_part) for of_part in windows]


def _parse_unique_id(text: str) -> bytes:
    unique_id = bytes.fromhex(text)
    if len(unique_id) != _UNIQUE_ID_BYTES:
        raise ValueError(f"{len(unique_id)} bytes")
    return unique_id
