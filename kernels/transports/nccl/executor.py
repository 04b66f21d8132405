"""Buckets over NCCL, between hosts or within one: packed on the device, sent in rounds, unpacked on the device.

    training rank    weights --gather kernel--> slot --NCCL send-->
    generation rank                              --NCCL recv--> slot --scatter kernel--> weights

The kernels run on streams beside the wire's: one round is packed or unpacked while others are on the wire (`rounds` says
why this cannot deadlock). A bucket that lies in one piece skips its copy. All rounds of a part are one CUDA graph: it is
one launch, then the host polls against the deadline. Without the graph the host spent 0.1 ms a round on NCCL's calls and
threads.

NCCL registers the virtual memory that a graph sends or receives, and hangs where only one end could be registered. So
slots are plain memory, and virtual memory always takes the copy. Registered slots were no faster: 294 against 305 GB/s in
messages of 64 MiB, 292 against 299 in messages of 128 MiB (four H200s).
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.checks import described_tensor
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import byte_view
from mcore_reshard.kernels.cuda.digests import digest
from mcore_reshard.kernels.errors import ChecksumError, SessionError, Waiting
from mcore_reshard.kernels.rendezvous.polling import NOTICE_S, EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.kernels.transports.base import StageClock, StageReport

from .connection import Link, NcclConnection, Waits
from .staging import DIGEST_BYTES, Round, ScratchBudget, divided_rounds

if TYPE_CHECKING:
    from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, DeviceTable

Payload = tuple[int, torch.Tensor]  # the peer's rank in the communicators, and a contiguous tensor uint8 [nbytes]

DEFAULT_COPY_CTAS = 32  # of 132: packing must outpace the wire, and NCCL's own kernels need room beside it


def connect_nccl(
    parts: Sequence[BoundSchedule],
    store: StoreKeys,
    *,
    timeout_s: float,
    budget: ScratchBudget = ScratchBudget(),  # noqa: B008
    copy_ctas: int = DEFAULT_COPY_CTAS,
) -> list[NcclExecutor]:
    """Connect the executors of parts that run one after another; they share communicators and slots.

    All ranks of the session call this at the same time, with as many parts and the same `budget`.
    """
    connection = NcclConnection(parts, store, timeout_s=timeout_s, budget=budget)
    executors = [NcclExecutor(connection, part, number) for number, part in enumerate(parts)]
    with connection.give_up_on_error():
        if any(connection.buckets):
            with torch.cuda.device(connection.device):
                connection.prepare([executor.cut_rounds() for executor in executors])
                for executor in executors:
                    executor.prepare(copy_ctas)
    return executors


class NcclExecutor:
    """Runs a bound schedule over NCCL; see `connect_nccl`.

    Weights must be complete on the current stream of their device when `run` is called; when it returns, every byte has
    landed, for all streams.
    """

    name = "nccl"

    def __init__(self, connection: NcclConnection, bound: BoundSchedule, number: int) -> None:
        self._connection, self._bound, self._sends = connection, bound, connection.sends
        self._buckets, self._division = connection.buckets[number], connection.divisions[number]
        self._clock = StageClock(bound, self._buckets)
        self.written_bytes = 0  # all once the graph is launched; after a failure, those that may have been written
        self._refit_poller = EventPoller(connection.timeout_s, watches=True)
        self.table_bytes = 0  # device memory of what the kernels walk
        self._planned: tuple[Round, ...] = ()
        self._rounds: tuple[_DeviceRound, ...] = ()
        self._scales: DeviceTable | None = None
        self._problems: list[str] = []  # of the tables, as they were read back from the device

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the slots, which all parts share. The kernels' tables and NCCL's own buffers come on top."""
        return self._connection.scratch_bytes

    @property
    def executed(self) -> tuple[Executed, ...]:
        messages = (placed for each in self._rounds for placed in each.round.placed_messages)
        buckets = tuple(placed.executed for placed in messages)
        return (Executed(self._bound, buckets=buckets, device_problems=tuple(self._problems)),)

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once. After `DeadlineError`, `PeerLostError`, `NcclError` or `ChecksumError` it runs no more."""
        if self._connection.closed:
            raise SessionError(f"{self._bound.rank_name}: the nccl transport has been closed; begin a new session")
        self._connection.runs += 1
        self.written_bytes = 0
        self._clock.reset()
        if self._rounds:
            with self._connection.give_up_on_error(), torch.cuda.device(self._connection.device):
                try:
                    self._run()
                except BaseException:
                    self._stop_unpacking()
                    raise
        return self._clock.reports()

    def close(self) -> None:
        """Close all parts: abort the communicators and free scratch. May be called twice."""
        self._connection.close()
        self._rounds = ()

    def cut_rounds(self) -> tuple[Round, ...]:
        from mcore_reshard.kernels.cuda.device_memory import is_plain

        in_place = [is_plain(tensor) for tensor in self._bound.tensors]
        self._planned = divided_rounds(self._bound.schedule, self._buckets, self._division, in_place=in_place)
        return self._planned

    def prepare(self, copy_ctas: int) -> None:
        """Bind the rounds to memory, once all ranks are connected."""
        from mcore_reshard.kernels.cuda.copy_kernel import device_scales
        from mcore_reshard.kernels.cuda.executed_tiles import scale_problems

        if not self._planned:
            return
        device = self._connection.device
        self._damaged = torch.zeros(len(self._buckets), dtype=torch.bool, device=device)
        # Of each round, 1 if its messages have come, or if it is over. The device writes them.
        self._came, self._over = (torch.zeros(len(self._planned), dtype=torch.uint8, pin_memory=True) for _ in range(2))
        self._stream, self._done = torch.cuda.Stream(), torch.cuda.Event()
        self._rounds = self._bind_rounds(copy_ctas)
        self.table_bytes = sum(each.copies.nbytes for each in self._rounds)
        self._scales = device_scales(self._bound.casts, self._bound.tensors, device)
        if self._scales is not None:
            self.table_bytes += self._scales.nbytes
            weight_of = partial(described_tensor, self._bound.schedule)
            table = self._scales.read_back()
            self._problems += scale_problems(table, self._bound.casts, self._bound.tensors, weight_of)
        torch.cuda.synchronize(device)
        self._graph = self._capture_graph()
        self._connection.keep(self._graph, self._done)

    def _run(self) -> None:
        self._came.zero_()
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

        self._connection.wait(reached, lambda: self._rounds[int(over.argmin())].waits, self._refit_poller)
        if self._connection.budget.checksums:
            buckets = [placed.bucket for each in self._rounds for placed in each.round.placed_messages]
            for number in torch.nonzero(self._damaged).reshape(-1).tolist():
                reason = f"bucket {buckets[number].number} arrived with other bytes than it was sent with"
                raise ChecksumError(buckets[number].waiting, reason)

    def _stop_unpacking(self) -> None:
        """Leave rounds whose messages have not come as they are: an abort lets the graph go on, over stale slots.

        `written_bytes` becomes what may have been written: rounds that have come, and what is received in place. Of each
        stream two rounds may be under way, as one may have come a moment ago.
        """
        if not self.written_bytes:
            return
        try:
            stream = torch.cuda.Stream()
            for each in self._rounds:
                each.copies.empty(stream)
            if not EventPoller(NOTICE_S).until(stream.record_event().query):
                return
        except RuntimeError:  # the device is broken
            return
        came = self._came.numpy() > 0
        written = sum(each.round.nbytes for each, has_come in zip(self._rounds, came, strict=True) if has_come)
        for lane in self._connection.links:
            due = [n for n, each in enumerate(self._rounds) if each.round.stream == lane and not came[n]]
            written += sum(self._rounds[number].round.in_place_bytes for number in due[:2])
        self.written_bytes = written

    def _capture_graph(self) -> torch.cuda.CUDAGraph:
        """All rounds, from their packing to a note in the host's memory that they are over."""
        graph, notes = torch.cuda.CUDAGraph(), torch.cuda.Stream()
        streams = list(
            dict.fromkeys(stream for link in self._connection.links.values() for stream in (link.wire, link.side))
        )
        streams.append(notes)
        self._one = torch.ones(1, dtype=torch.uint8, device=self._connection.device)  # the graph reads it
        over: list[torch.cuda.Event] = []
        torch.cuda.synchronize(self._connection.device)
        with torch.cuda.stream(self._stream):
            graph.capture_begin(capture_error_mode="relaxed")  # NCCL adds its kernels from threads of its own
            try:
                for stream in streams:
                    stream.wait_stream(self._stream)
                for number, each in enumerate(self._rounds):
                    over.append(self._queue(number, each, over))
                    notes.wait_event(over[-1])
                    self._note(self._over, number, notes)
                for stream in streams:
                    self._stream.wait_stream(stream)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _queue(self, number: int, each: _DeviceRound, over: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        """Queue a round; `over` are the ends of those before it. Returns its own."""
        pack_or_unpack, exchange = (self._copy, each.link.side), (self._communicate, each.link.wire)
        (first, before), (second, behind) = (pack_or_unpack, exchange) if self._sends else (exchange, pack_or_unpack)
        if each.round.after is not None:
            before.wait_event(over[each.round.after])
        first(each, before)
        behind.wait_event(before.record_event())
        if not self._sends:
            self._note(self._came, number, behind)
        second(each, behind)
        return behind.record_event()

    def _note(self, notes: torch.Tensor, number: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            notes[number : number + 1].copy_(self._one, non_blocking=True)

    def _copy(self, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        """Pack or unpack the staged buckets. Digests are taken before bytes leave, and when they have come."""
        if self._sends:
            each.copies.launch(stream)
        if self._connection.budget.checksums:
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
        self._connection.settle(each.link.communicator, each.waits)

    def _bind_rounds(self, copy_ctas: int) -> tuple[_DeviceRound, ...]:
        from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape
        from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, names_of

        addresses = [tensor.data_ptr() for tensor in self._bound.tensors]
        shape = KernelShape(ctas=copy_ctas)
        rounds: list[_DeviceRound] = []
        messages = 0
        for each in self._planned:
            slot = self._connection.slots[each.stream, each.slot].tensor
            bases = np.array([*addresses, slot.data_ptr()], np.uint64)
            copies = DeviceGather(each.copies, bases, self._bound.casts, self._connection.device, shape)
            staged = [placed.bucket for placed in each.staged]
            begins = [slot.data_ptr() + placed.offset for placed in each.staged]
            reference = PlacedCopies.of_buckets(staged, addresses, begins)
            name_of = names_of(self._bound.schedule, reference.copies["src" if self._sends else "dst"])
            self._problems += copies.problems(reference, self._bound.casts, addresses, name_of)
            payloads: list[Payload] = []
            for placed in each.placed_messages:
                memory = slot if placed.tensor is None else byte_view(self._bound.tensors[placed.tensor])
                payloads.append((placed.member, memory[placed.offset :][: placed.message_bytes]))
            rounds.append(
                _DeviceRound(each, self._connection.links[each.stream], payloads, copies, messages, _waits(each))
            )
            messages += len(payloads)
        return tuple(rounds)


@dataclass(frozen=True, slots=True)
class _DeviceRound:
    """A round bound to memory."""

    round: Round
    link: Link
    payloads: Sequence[Payload]
    copies: DeviceGather
    first_message: int  # its number among all messages of the rank
    waits: Waits


def _waits(each: Round) -> Waits:
    first: dict[str, Waiting] = {}  # of each peer
    for placed in each.placed_messages:
        first.setdefault(placed.bucket.waiting.peer, placed.bucket.waiting)
    return tuple(first.values())
