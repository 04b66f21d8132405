"""Buckets over NCCL, between hosts or within one: packed on the device, sent in rounds, unpacked on the device.

    training rank    weights --gather kernel--> slot --NCCL send-->
    generation rank                              --NCCL recv--> slot --scatter kernel--> weights

Every stream has a communicator of all ranks. The kernels run on streams beside them: one round is packed or unpacked
while others are on the wire (`rounds` says why this cannot deadlock). A bucket that lies in one piece skips its
copy. All rounds are one CUDA graph: a refit is one launch, then the host polls against the deadline. Without the graph
the host spent 0.1 ms a round on NCCL's calls and threads.

NCCL registers the virtual memory that a graph sends or receives, and hangs where only one end could be registered. So
slots are plain memory, and virtual memory always takes the copy. Registered slots were no faster: 294 against 305 GB/s in
messages of 64 MiB, 292 against 299 in messages of 128 MiB (four H200s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from functools import partial
from threading import Thread
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.checks import described_tensor
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import byte_view
from mcore_reshard.kernels.cuda.digests import digest
from mcore_reshard.kernels.errors import ChecksumError, DeadlineError, PeerLostError, RefitError, SessionError, Waiting
from mcore_reshard.kernels.rendezvous.exchange import Failure, StoreExchange, fetch, publish
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.kernels.transports.base import StageClock, StageReport
from mcore_reshard.kernels.transports.group_ranks import group_names, group_rank, peer_group_rank
from mcore_reshard.kernels.transports.rounds import turn_with

from .communicator import NcclCommunicator, NcclError, new_unique_id
from .staging import (
    DIGEST_BYTES,
    Division,
    Messages,
    Round,
    ScratchBudget,
    divide,
    divided_rounds,
    pair_count,
    slot_bytes,
    windows_that_fit,
    with_windows,
)

if TYPE_CHECKING:
    from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, DeviceTable
    from mcore_reshard.kernels.cuda.device_memory import PlainBuffer

Payload = tuple[int, torch.Tensor]  # the peer's rank in the communicators, and a contiguous tensor uint8 [nbytes]
Waits = tuple[Waiting, ...]  # what is awaited from each peer

DEFAULT_COPY_CTAS = 32  # of 132: packing must outpace the wire, and NCCL's own kernels need room beside it
_WARM_BYTES = 16
_UNIQUE_ID_BYTES = 128


class NcclExecutor:
    """Runs a bound schedule over NCCL. All ranks of the session construct it at the same time, with the same `budget`.

    Weights must be complete on the current stream of their device when `run` is called; when it returns, every byte has
    landed, for all streams.
    """

    name = "nccl"

    def __init__(
        self,
        bound: BoundSchedule,
        store: StoreKeys,
        *,
        timeout_s: float,
        budget: ScratchBudget = ScratchBudget(),  # noqa: B008
        copy_ctas: int = DEFAULT_COPY_CTAS,
    ) -> None:
        self._timeout_s = timeout_s
        self._exchange = StoreExchange(store, bound.rank_name, group_names(bound.schedule), timeout_s)
        self._bound = bound
        self._device = bound.device or torch.device("cpu")
        self._sends = bound.schedule.world == "train"
        self._runs = 0
        self.written_bytes = 0  # all, once the graph is launched: messages may land in place
        self._refit_poller = EventPoller(timeout_s, watches=True)
        self._closed = False
        self.table_bytes = 0  # device memory of what the kernels walk
        self._links: dict[int, _Link] = {}  # by stream
        self._rounds: tuple[_DeviceRound, ...] = ()
        self._slots: dict[tuple[int, int], PlainBuffer] = {}
        self._scales: DeviceTable | None = None
        self._problems: list[str] = []  # of the tables, as they were read back from the device
        self._graph: torch.cuda.CUDAGraph | None = None
        with self._give_up_on_error():
            self._division, buckets = self._divide(budget)
            self._clock = StageClock(bound, buckets)
            if buckets:
                with torch.cuda.device(self._device):
                    self._prepare(buckets, copy_ctas)

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the slots. The kernels' tables and NCCL's own buffers come on top."""
        return sum(slot.tensor.numel() for slot in self._slots.values())

    @property
    def executed(self) -> tuple[Executed, ...]:
        messages = (placed for each in self._rounds for placed in each.round.placed_messages)
        buckets = tuple(placed.executed for placed in messages)
        return (Executed(self._bound, buckets=buckets, device_problems=tuple(self._problems)),)

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once. After `DeadlineError`, `PeerLostError`, `NcclError` or `ChecksumError` it is closed."""
        if self._closed:
            raise SessionError(f"{self._bound.rank_name}: the nccl transport has been closed; begin a new session")
        self._runs += 1
        self.written_bytes = 0
        self._clock.reset()
        if self._rounds:
            with self._give_up_on_error(), torch.cuda.device(self._device):
                self._run()
        return self._clock.reports()

    def close(self) -> None:
        """Abort all communicators and free scratch. May be called twice."""
        self._closed = True
        links, self._links = self._links, {}
        graph, self._graph = self._graph, None
        slots, self._slots = self._slots, {}
        self._rounds = ()
        # NCCL's abort stops its kernels, then waits for the device and for graphs that hold the communicator. So all are
        # aborted at the same time, and the graph goes in between.
        aborts = [Thread(target=link.communicator.abort, daemon=True) for link in links.values()]
        for abort in aborts:
            abort.start()
        if graph is not None:
            with suppress(RuntimeError):  # a broken device has said so before
                if not EventPoller(CLOSE_S).until(self._done.query):
                    return  # a kernel may still use the memory, and freeing it would wait for that kernel
            graph.reset()
        for abort in aborts:
            abort.join(CLOSE_S)
        for slot in slots.values():
            slot.free()

    def _prepare(self, buckets: Sequence[Bucket], copy_ctas: int) -> None:
        from mcore_reshard.kernels.cuda.copy_kernel import device_scales
        from mcore_reshard.kernels.cuda.device_memory import PlainBuffer, is_plain
        from mcore_reshard.kernels.cuda.executed_tiles import scale_problems

        in_place = [is_plain(tensor) for tensor in self._bound.tensors]
        planned = divided_rounds(self._bound.schedule, buckets, self._division, in_place=in_place)
        for place, nbytes in slot_bytes(planned).items():
            self._slots[place] = PlainBuffer(nbytes)
        self._damaged = torch.zeros(len(buckets), dtype=torch.bool, device=self._device)
        self._over = torch.zeros(len(planned), dtype=torch.uint8, pin_memory=True)  # 1: the round is; the device writes
        self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()
        self._connect(buckets)
        self._rounds = self._bind_rounds(planned, copy_ctas)
        self.table_bytes = sum(each.copies.nbytes for each in self._rounds)
        self._scales = device_scales(self._bound.casts, self._bound.tensors, self._device)
        if self._scales is not None:
            self.table_bytes += self._scales.nbytes
            weight_of = partial(described_tensor, self._bound.schedule)
            table = self._scales.read_back()
            self._problems += scale_problems(table, self._bound.casts, self._bound.tensors, weight_of)
        torch.cuda.synchronize(self._device)
        self._graph = self._capture_graph()

    def _run(self) -> None:
        assert self._graph is not None
        over = self._over.zero_().numpy()
        stages = [each.round.stages for each in self._rounds]
        under_way = {
            stage: np.array([stage in of_round for of_round in stages]) for stage in sorted(frozenset().union(*stages))
        }
        for stage in under_way:
            self._clock.started(stage)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):  # of its own: other transports may be at work on the caller's
            if self._scales is not None:
                self._scales.launch(self._stream)
            self.written_bytes = 0 if self._sends else self._bound.nbytes
            self._graph.replay()
            self._done.record()

        def reached() -> bool:
            done = self._done.query()
            for stage in [stage for stage, of_stage in under_way.items() if over[of_stage].all()]:
                self._clock.finished(stage)
                del under_way[stage]
            return done

        self._wait(reached, lambda: self._rounds[int(over.argmin())].waits, self._refit_poller)
        if self._division.budget.checksums:
            buckets = [placed.bucket for each in self._rounds for placed in each.round.placed_messages]
            for number in torch.nonzero(self._damaged).reshape(-1).tolist():
                reason = f"bucket {buckets[number].number} arrived with other bytes than it was sent with"
                raise ChecksumError(buckets[number].waiting, reason)

    def _capture_graph(self) -> torch.cuda.CUDAGraph:
        """All rounds, from their packing to a note in the host's memory that they are over."""
        graph, notes = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        streams = list(dict.fromkeys(stream for link in self._links.values() for stream in (link.wire, link.side)))
        streams.append(notes)
        self._one = torch.ones(1, dtype=torch.uint8, device=self._device)  # the graph reads it
        over: list[torch.cuda.Event] = []
        torch.cuda.synchronize(self._device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="relaxed")  # NCCL adds its kernels from threads of its own
            try:
                for stream in streams:
                    stream.wait_stream(self._stream)
                for number, each in enumerate(self._rounds):
                    over.append(self._queue(each, over))
                    notes.wait_event(over[-1])
                    with torch.cuda.stream(notes):
                        self._over[number : number + 1].copy_(self._one, non_blocking=True)
                for stream in streams:
                    self._stream.wait_stream(stream)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _queue(self, each: _DeviceRound, over: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        """Queue a round; `over` are the ends of those before it. Returns its own."""
        pack_or_unpack, exchange = (self._copy, each.link.side), (self._communicate, each.link.wire)
        (first, before), (second, behind) = (pack_or_unpack, exchange) if self._sends else (exchange, pack_or_unpack)
        if each.round.after is not None:
            before.wait_event(over[each.round.after])
        first(each, before)
        behind.wait_event(before.record_event())
        second(each, behind)
        return behind.record_event()

    def _copy(self, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        """Pack or unpack the staged buckets. Digests are taken before bytes leave, and when they have come."""
        if self._sends:
            each.copies.launch(stream)
        if self._division.budget.checksums:
            with torch.cuda.stream(stream):
                for number, (_, payload) in enumerate(each.payloads, each.first_message):
                    body, end = payload[:-DIGEST_BYTES], payload[-DIGEST_BYTES:].view(torch.int64)
                    if self._sends:
                        end.copy_(digest(body))
                    else:
                        self._damaged[number] = (digest(body) != end).any()
        if not self._sends:
            each.copies.launch(stream)

    def _communicate(self, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        each.link.communicator.start(each.payloads, stream, each.waits[0], sends=self._sends)
        self._settle(each.link.communicator, each.waits)

    def _wait(self, has_happened: Callable[[], bool], where: Callable[[], Waits], poller: EventPoller) -> None:
        """Poll `has_happened`. Raises if what is awaited, `where()`, takes too long, another rank gives up, or NCCL fails."""

        def check() -> bool:
            try:
                return has_happened()
            except RefitError:
                raise
            except RuntimeError as error:
                raise NcclError(where()[0], f"the device failed: {error}") from error

        def look(waited_s: float) -> None:
            waiting = where()[0]
            if who := self._exchange.who_gave_up():  # asked first: NCCL may only report what that does to it
                raise PeerLostError(waiting, f"{who} gave up")
            for link in self._links.values():
                link.communicator.is_idle(waiting)

        if not poller.until(check, look=look, progress=lambda: id(where())):
            raise self._overdue(where())

    def _wait_for(self, where: Waits, has_happened: Callable[[], bool]) -> None:
        self._wait(has_happened, lambda: where, EventPoller(self._timeout_s))

    def _overdue(self, where: Waits) -> DeadlineError:
        """The error for what is past its deadline. It names a peer that does not wait itself."""
        reason = f"nothing within {self._timeout_s:g} s"
        errors = {waiting.peer: DeadlineError(waiting, reason) for waiting in where}
        waits = [Failure.of(self._bound.rank_name, error) for error in errors.values()]
        culprit = self._exchange.blame(f"run-{self._runs}", waits).peer
        return errors.get(culprit or "", next(iter(errors.values())))

    @contextmanager
    def _give_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._exchange.give_up()
            self.close()
            raise

    def _divide(self, budget: ScratchBudget) -> tuple[Division, tuple[Bucket, ...]]:
        """Agree with all ranks on how scratch is divided. Returns that, and this rank's buckets."""
        schedule, gather = self._bound.schedule, self._exchange.gather
        words = gather("word", (pair_count(schedule), repr(budget)), _parse_word)
        if len(budgets := sorted({budget for _, budget in words})) > 1:
            raise SessionError(f"the ranks have different budgets: {'; '.join(budgets)}; give all of them the same")
        try:
            division = divide(budget, [pairs for pairs, _ in words])
            buckets = cut_buckets(schedule, division.bucket_bytes)
            messages = Messages.of(schedule, buckets, division)
            most_buckets = max(gather("most_buckets", int(messages.count.max(initial=1)), int))
            fitting = gather("windows", windows_that_fit(division, messages, most_buckets), _parse_windows)
            return with_windows(division, fitting), buckets
        except ValueError as error:
            raise SessionError(str(error)) from error

    def _connect(self, buckets: Sequence[Bucket]) -> None:
        """Join the communicators, all at the same time, and connect every pair in them."""
        schedule, division = self._bound.schedule, self._division
        me = group_rank(schedule, schedule.world, schedule.rank)
        members = division.members
        peers = {bucket.peer: bucket.waiting for bucket in reversed(buckets)}  # for the first bucket of each
        # NCCL's few CTAs go first where both wait for a multiprocessor: a wire that idles is lost time.
        streams = {
            stream: (torch.cuda.Stream(priority=-1), torch.cuda.Stream()) for stream in range(division.budget.streams)
        }
        waits = tuple(peers.values())
        for stream, (wire, side) in streams.items():
            key = f"id/{stream}"
            if me == members[0]:
                publish(self._exchange.store, key, new_unique_id().hex())
            owner = replace(waits[0], peer=group_names(schedule)[members[0]])
            unique_id = fetch(self._exchange.store, key, owner, _parse_unique_id, timeout_s=self._timeout_s)
            communicator = NcclCommunicator(unique_id, members.index(me), len(members), waits[0])
            self._links[stream] = _Link(communicator, wire, side)
        for link in self._links.values():
            self._settle(link.communicator, waits)
        warm = torch.empty(len(peers), _WARM_BYTES, dtype=torch.uint8, device=self._device)
        for stream, link in self._links.items():
            payloads = [
                (members.index(peer_group_rank(schedule, peer)), warm[number])
                for number, peer in enumerate(peers)
                if stream in division.streams_of(turn_with(schedule, peer))
            ]
            link.communicator.start(payloads, link.wire, waits[0], sends=self._sends)
            self._settle(link.communicator, waits)
            self._wait_for(waits, link.wire.record_event().query)

    def _settle(self, communicator: NcclCommunicator, where: Waits) -> None:
        self._wait_for(where, lambda: communicator.is_idle(where[0]))

    def _bind_rounds(self, planned: Sequence[Round], copy_ctas: int) -> tuple[_DeviceRound, ...]:
        from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape
        from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, names_of

        addresses = [tensor.data_ptr() for tensor in self._bound.tensors]
        shape = KernelShape(ctas=copy_ctas)
        rounds: list[_DeviceRound] = []
        messages = 0
        for each in planned:
            slot = self._slots[each.stream, each.slot].tensor
            bases = np.array([*addresses, slot.data_ptr()], np.uint64)
            copies = DeviceGather(each.copies, bases, self._bound.casts, self._device, shape)
            staged = [placed.bucket for placed in each.staged]
            begins = [slot.data_ptr() + placed.offset for placed in each.staged]
            reference = PlacedCopies.of_buckets(staged, addresses, begins)
            name_of = names_of(self._bound.schedule, reference.copies["src" if self._sends else "dst"])
            self._problems += copies.problems(reference, self._bound.casts, addresses, name_of)
            payloads: list[Payload] = []
            for placed in each.placed_messages:
                memory = slot if placed.tensor is None else byte_view(self._bound.tensors[placed.tensor])
                payloads.append((placed.member, memory[placed.offset :][: placed.message_bytes]))
            rounds.append(_DeviceRound(each, self._links[each.stream], payloads, copies, messages, _waits(each)))
            messages += len(payloads)
        return tuple(rounds)


@dataclass(frozen=True, slots=True)
class _Link:
    """A communicator, the stream of its messages, and that of the copies beside it."""

    communicator: NcclCommunicator
    wire: torch.cuda.Stream
    side: torch.cuda.Stream


@dataclass(frozen=True, slots=True)
class _DeviceRound:
    """A round bound to memory."""

    round: Round
    link: _Link
    payloads: Sequence[Payload]
    copies: DeviceGather
    first_message: int  # its number among all messages of the rank
    waits: Waits


def _waits(each: Round) -> Waits:
    return tuple(placed.bucket.waiting for placed in each.placed_messages)


def _parse_word(word: Any) -> tuple[int, str]:
    """(`pair_count`, budget) of a rank."""
    pairs, budget = word
    return int(pairs), str(budget)


def _parse_windows(windows: Any) -> list[int]:
    return [int(each) for each in windows]


def _parse_unique_id(text: str) -> bytes:
    unique_id = bytes.fromhex(text)
    if len(unique_id) != _UNIQUE_ID_BYTES:
        raise ValueError(f"{len(unique_id)} bytes")
    return unique_id
