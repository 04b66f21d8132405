"""What the parts of a refit over NCCL share: communicators, slots, and the way to wait and to give up.

Every stream has a communicator of all ranks that exchange anything. Parts run one after another, so that the fullest round
of any decides on the size of a slot.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from threading import Thread
from typing import TYPE_CHECKING, Any

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import DeadlineError, PeerLostError, RefitError, SessionError, Waiting, first_of
from mcore_reshard.kernels.rendezvous.exchange import Failure, StoreExchange, fetch, publish
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.kernels.transports.group_ranks import group_names, group_rank, peer_group_rank
from mcore_reshard.kernels.transports.rounds import turn_with

from .communicator import NcclCommunicator, NcclError, new_unique_id
from .staging import (
    Division,
    Messages,
    Round,
    ScratchBudget,
    divide,
    pair_count,
    slot_bytes,
    windows_that_fit,
    with_windows,
)

if TYPE_CHECKING:
    from mcore_reshard.kernels.cuda.device_memory import PlainBuffer

Waits = tuple[Waiting, ...]  # what is awaited of each peer, the first due first
_WARM_BYTES = 16
_UNIQUE_ID_BYTES = 128


@dataclass(frozen=True, slots=True)
class Link:
    """A communicator, the stream of its messages, and that of the copies beside it."""

    communicator: NcclCommunicator
    wire: torch.cuda.Stream
    side: torch.cuda.Stream


class NcclConnection:
    """A rank's end of all its parts. All ranks construct it at the same time, with as many parts and the same `budget`."""

    def __init__(
        self, parts: Sequence[BoundSchedule], store: StoreKeys, *, timeout_s: float, budget: ScratchBudget
    ) -> None:
        self.timeout_s = timeout_s
        self._schedules = [part.schedule for part in parts]
        self.rank_name, schedule = parts[0].rank_name, self._schedules[0]
        self.sends = schedule.world == "train"
        self.device = parts[0].device or torch.device("cpu")
        self._exchange = StoreExchange(store, self.rank_name, group_names(schedule), timeout_s)
        self.budget = budget
        self.runs = 0  # of all parts
        self.closed = False
        self._closing: Thread | None = None  # after an error
        self.links: dict[int, Link] = {}  # by stream
        self.slots: dict[tuple[int, int], PlainBuffer] = {}
        self._graphs: list[tuple[torch.cuda.CUDAGraph, torch.cuda.Event]] = []
        self.buckets: list[tuple[Bucket, ...]] = []  # of each part
        with self.give_up_on_error():
            self.divisions = self._divide(budget)

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the slots. The kernels' tables and NCCL's own buffers come on top."""
        return sum(slot.tensor.numel() for slot in self.slots.values())

    def prepare(self, rounds: Sequence[Sequence[Round]]) -> None:
        """Allocate the slots that the rounds of the parts need, and connect all pairs of ranks that exchange bytes."""
        from mcore_reshard.kernels.cuda.device_memory import PlainBuffer

        for place, nbytes in slot_bytes([each for part in rounds for each in part]).items():
            self.slots[place] = PlainBuffer(nbytes)
        self._connect()

    def keep(self, graph: torch.cuda.CUDAGraph, done: torch.cuda.Event) -> None:
        """Keep a graph of messages until the end. `done` is recorded behind each launch."""
        self._graphs.append((graph, done))

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
            for link in self.links.values():
                link.communicator.is_idle(where())

        if not poller.until(check, look=look, progress=lambda: id(where())):
            raise self._overdue(where())

    @contextmanager
    def give_up_on_error(self) -> Iterator[None]:
        """Tell all ranks of an error, and begin to close: the error need not wait for NCCL, which takes seconds to abort."""
        try:
            yield
        except BaseException:
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

    def _release(self) -> None:
        links, self.links = self.links, {}
        graphs, self._graphs = self._graphs, []
        slots, self.slots = self.slots, {}
        # NCCL's abort stops its kernels, then waits for the device and for graphs that hold the communicator. So all are
        # aborted at the same time, and the graphs go in between.
        aborts = [Thread(target=link.communicator.abort, daemon=True) for link in links.values()]
        for abort in aborts:
            abort.start()
        for graph, done in graphs:
            with suppress(RuntimeError):  # a broken device has said so before
                if not EventPoller(CLOSE_S).until(done.query):
                    return  # a kernel may still use the memory, and freeing it would wait for that kernel
            graph.reset()
        for abort in aborts:
            abort.join(CLOSE_S)
        for slot in slots.values():
            slot.free()

    def _divide(self, budget: ScratchBudget) -> list[Division]:
        """Agree with all ranks on how each part divides scratch."""
        gather, schedules = self._exchange.gather, self._schedules
        words = gather("word", ([*map(pair_count, schedules)], repr(budget)), _parse_word)
        if len(budgets := sorted({budget for _, budget in words})) > 1:
            raise SessionError(f"the ranks have different budgets: {'; '.join(budgets)}; give all of them the same")
        members = tuple(rank for rank, (pairs, _) in enumerate(words) if any(pairs))
        try:
            divided = [divide(budget, pairs) for pairs in zip(*(pairs for pairs, _ in words), strict=True)]
            divisions = [replace(division, members=members) for division in divided]
            parts = zip(schedules, divisions, strict=True)
            self.buckets = [cut_buckets(schedule, division.bucket_bytes) for schedule, division in parts]
            cut = zip(schedules, self.buckets, divisions, strict=True)
            messages = [Messages.of(*part) for part in cut]
            most = [
                *zip(*gather("most_buckets", [each.most_of_a_pair for each in messages], _parse_counts), strict=True)
            ]
            own = zip(divisions, messages, map(max, most), strict=True)
            fitting = gather("windows", [windows_that_fit(*part) for part in own], _parse_windows)
            return [with_windows(*part) for part in zip(divisions, zip(*fitting, strict=True), strict=True)]
        except ValueError as error:
            raise SessionError(str(error)) from error

    def _connect(self) -> None:
        """Join the communicators, all at the same time, and connect every pair in them."""
        schedule, members = self._schedules[0], self.divisions[0].members
        me = group_rank(schedule, schedule.world, schedule.rank)
        peers: dict[int, Waiting] = {}  # for the first bucket of each
        streams_of: dict[int, set[int]] = {}
        for division, buckets in zip(self.divisions, self.buckets, strict=True):
            for bucket in buckets:
                peers.setdefault(bucket.peer, bucket.waiting)
                streams = streams_of.setdefault(bucket.peer, set())
                streams.update(division.streams_of(turn_with(schedule, bucket.peer)))
        waits = tuple(peers.values())
        # NCCL's few CTAs go first where both wait for a multiprocessor: a wire that idles is lost time.
        for stream in range(self.budget.streams):
            key, wire, side = f"id/{stream}", torch.cuda.Stream(priority=-1), torch.cuda.Stream()
            if me == members[0]:
                publish(self._exchange.store, key, new_unique_id().hex())
            owner = replace(waits[0], peer=group_names(schedule)[members[0]])
            unique_id = fetch(self._exchange.store, key, owner, _parse_unique_id, timeout_s=self.timeout_s)
            communicator = NcclCommunicator(unique_id, members.index(me), len(members), waits[0])
            self.links[stream] = Link(communicator, wire, side)
        for link in self.links.values():
            self.settle(link.communicator, waits)
        warm = torch.empty(len(peers), _WARM_BYTES, dtype=torch.uint8, device=self.device)
        for stream, link in self.links.items():
            payloads = [
                (members.index(peer_group_rank(schedule, peer)), warm[number])
                for number, peer in enumerate(peers)
                if stream in streams_of[peer]
            ]
            link.communicator.start(payloads, link.wire, waits[0], sends=self.sends)
            self.settle(link.communicator, waits)
            self._wait_for(waits, link.wire.record_event().query)

    def _wait_for(self, where: Waits, has_happened: Callable[[], bool]) -> None:
        self.wait(has_happened, lambda: where, EventPoller(self.timeout_s))

    def _overdue(self, where: Waits) -> DeadlineError:
        """The error for what is past its deadline. It names a peer that does not wait itself."""
        reason = f"nothing within {self.timeout_s:g} s"
        waits = [Failure.of(self.rank_name, DeadlineError(waiting, reason)) for waiting in where]
        failure = self._exchange.blame(f"run-{self.runs}", waits)
        first = [waiting for waiting in where if waiting.peer == failure.peer]
        others = [waiting for waiting in where if waiting.peer != failure.peer]
        if not first:
            reason += f", as {failure}"
        return first_of([DeadlineError(waiting, reason) for waiting in (*first, *others)])


def _parse_word(word: Any) -> tuple[list[int], str]:
    """(`pair_count` of each part, budget) of a rank."""
    pairs, budget = word
    return _parse_counts(pairs), str(budget)


def _parse_counts(counts: Any) -> list[int]:
    return [int(each) for each in counts]


def _parse_windows(windows: Any) -> list[list[int]]:
    return [_parse_counts(of_part) for of_part in windows]


def _parse_unique_id(text: str) -> bytes:
    unique_id = bytes.fromhex(text)
    if len(unique_id) != _UNIQUE_ID_BYTES:
        raise ValueError(f"{len(unique_id)} bytes")
    return unique_id
