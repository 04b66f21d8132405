"""Buckets over NCCL, between hosts or within one: packed on the device, sent in rounds, unpacked on the device.

    training rank    weights --gather kernel--> slot --NCCL send-->
    generation rank                              --NCCL recv--> slot --scatter kernel--> weights

A generation rank that passes bytes on does both in one round.

The kernels run on streams beside the wire's: one round is packed or unpacked while others are on the wire (`rounds` says
why this cannot deadlock). A bucket that lies in one piece skips its copy. All rounds of a part are one CUDA graph: it is
one launch, then the host polls against the deadline. Without the graph the host spent 0.1 ms a round on NCCL's calls and
threads. A part may be queued before the one in front of it has ended: the device then goes on without the host.

NCCL registers the virtual memory that a graph sends or receives, and hangs where only one end could be registered. So
slots are plain memory, and virtual memory always takes the copy. Registered slots were no faster: 294 against 305 GB/s in
messages of 64 MiB, 292 against 299 in messages of 128 MiB (four H200s).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.copies.checks import described_tensor
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import byte_view
from mcore_reshard.kernels.cuda.digests import digest
from mcore_reshard.kernels.errors import ChecksumError, SessionError, Waiting
from mcore_reshard.kernels.rendezvous.polling import EventPoller
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.kernels.transports.base import Queued, StageClock, StageReport, merge_reports

from .communicator import Payload
from .connection import Link, NcclConnection, Waits
from .shared_gpus import SharedGpus
from .staging import DIGEST_BYTES, Round, ScratchBudget, divided_rounds

if TYPE_CHECKING:
    from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, DeviceTable

Step = Callable[["_DeviceRound", torch.cuda.Stream], None]

DEFAULT_COPY_CTAS = 32  # of 132: packing must outpace the wire, and NCCL's own kernels need room beside it


def connect_nccl(
    parts: Sequence[Sequence[BoundSchedule]],
    store: StoreKeys,
    *,
    timeout_s: float,
    budget: ScratchBudget = ScratchBudget(),  # noqa: B008
    shared: SharedGpus | None = None,
    device: torch.device | None = None,
    copy_ctas: int = DEFAULT_COPY_CTAS,
) -> list[NcclExecutor]:
    """Connect the executors of parts that run one after another; they share communicators and slots.

    All schedules of a part move together: see `NcclConnection`.

    All ranks of the session call this at the same time, with as many parts and the same `budget`.
    """
    connection = NcclConnection(parts, store, timeout_s=timeout_s, budget=budget, shared=shared, device=device)
    executors = [NcclExecutor(connection, part, number) for number, part in enumerate(parts)]
    connection.executors = executors
    with connection.give_up_on_error():
        if connection.is_member:
            with torch.cuda.device(connection.device):
                connection.prepare([executor.cut_rounds() for executor in executors])
                for executor in executors:
                    executor.prepare(copy_ctas)
    return executors


class NcclExecutor(Queued):
    """Runs the bound schedules of a part over NCCL; see `connect_nccl`.

    Weights must be complete on the current stream of their device when `queue` is called, or `run` if it was not; when `run`
    returns, every byte has landed, for all streams.
    """

    name = "nccl"

    def __init__(self, connection: NcclConnection, bounds: Sequence[BoundSchedule], number: int) -> None:
        self._connection, self._bounds = connection, bounds
        self._ends, self._division = connection.ends[number], connection.divisions[number]
        self._clocks = [StageClock(bound, end.buckets) for bound, end in zip(bounds, self._ends, strict=True)]
        self.written_bytes = 0  # all once the graph is launched; after a failure, those that may have been written
        self._refit_poller = EventPoller(connection.timeout_s, watches=True)
        self.table_bytes = 0  # device memory of what the kernels walk
        self._planned: tuple[Round, ...] = ()
        self._rounds: tuple[_DeviceRound, ...] = ()
        self._is_queued = False  # and `run` has not waited for its end
        self._scales: list[DeviceTable] = []
        self._problems: list[str] = []  # of the tables, as they were read back from the device

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the slots, which all parts share. The kernels' tables and NCCL's own buffers come on top."""
        return self._connection.scratch_bytes

    @property
    def executed(self) -> tuple[Executed, ...]:
        problems = tuple(self._problems)
        return tuple(
            Executed(bound, buckets=self._executed_buckets(end), device_problems=() if end else problems)
            for end, bound in enumerate(self._bounds)
        )

    def _executed_buckets(self, end: int) -> tuple[Bucket, ...]:
        messages = (placed for each in self._rounds for placed in each.round.placed_messages)
        return tuple(placed.executed for placed in messages if placed.end == end)

    def queue(self) -> None:
        """Begin, on the device behind the parts that have been queued before. `run` then waits for the end."""
        self.written_bytes = 0
        if self._connection.closed:
            raise SessionError(f"{self._connection.rank_name}: the nccl transport has been closed; begin a new session")
        for clock in self._clocks:
            clock.reset()
        self._is_queued = True
        if self._rounds:
            with self._giving_up_on_error():
                self._launch()

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once. After `DeadlineError`, `PeerLostError`, `NcclError` or `ChecksumError` it runs no more."""
        if not self._is_queued:
            self.queue()
        self._connection.runs += 1
        if self._rounds:
            with self._giving_up_on_error():
                self._wait()
        self._is_queued = False
        return merge_reports([clock.reports() for clock in self._clocks])

    @contextmanager
    def _giving_up_on_error(self) -> Iterator[None]:
        """On the device. After an error, tell all ranks, and unpack nothing more, also of parts that are queued."""
        with self._connection.give_up_on_error(), torch.cuda.device(self._connection.device):
            try:
                yield
            except BaseException:
                self._connection.stop_unpacking()
                for each in self._connection.executors:
                    each.count_written()
                raise

    def close(self) -> None:
        """Close all parts: abort the communicators and free scratch. May be called twice."""
        self._connection.close()
        self._rounds = ()

    def cut_rounds(self) -> tuple[Round, ...]:
        from mcore_reshard.kernels.cuda.device_memory import is_plain

        in_place = [[is_plain(tensor) for tensor in bound.tensors] for bound in self._bounds]
        self._planned = divided_rounds(self._ends, self._division, in_place=in_place)
        return self._planned

    def prepare(self, copy_ctas: int) -> None:
        """Bind the rounds to memory, once all ranks are connected."""
        from mcore_reshard.kernels.cuda.copy_kernel import device_scales
        from mcore_reshard.kernels.cuda.executed_tiles import scale_problems

        if not self._planned:
            return
        device = self._connection.device
        messages = sum(len(end.buckets) for end in self._ends)
        self._damaged = torch.zeros(messages, dtype=torch.bool, device=device)
        # Of each round, 1 if its messages have come, or if it is over. The device writes them.
        self._came, self._over = (torch.zeros(len(self._planned), dtype=torch.uint8, pin_memory=True) for _ in range(2))
        self._done = torch.cuda.Event()
        self._rounds = self._bind_rounds(copy_ctas)
        self.table_bytes = sum(copies.nbytes for each in self._rounds for copies in (*each.packs, *each.unpacks))
        for bound in self._bounds:
            scales = device_scales(bound.casts, bound.tensors, device)
            if scales is not None:
                self._scales.append(scales)
                self.table_bytes += scales.nbytes
                weight_of = partial(described_tensor, bound.schedule)
                addresses, elements = [t.data_ptr() for t in bound.tensors], [t.numel() for t in bound.tensors]
                self._problems += scale_problems(scales.read_back(), bound.casts, addresses, elements, weight_of)
        torch.cuda.synchronize(device)
        self._graph = self._capture_graph()
        self._connection.keep(self._graph, self._done)

    def _launch(self) -> None:
        self._came.zero_()
        self._over.zero_()
        stream = self._connection.stream
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for scales in self._scales:
                scales.launch(stream)
            self.written_bytes = sum(bound.nbytes for bound in self._bounds if bound.schedule.world == "gen")
            self._graph.replay()
            self._done.record()

    def _wait(self) -> None:
        over = self._over.numpy()
        stages = [each.round.stages for each in self._rounds]
        under_way = {
            stage: np.array([stage in of_round for of_round in stages]) for stage in sorted(frozenset().union(*stages))
        }
        for end, stage in under_way:
            self._clocks[end].started(stage)

        def reached() -> bool:
            done = self._done.query()
            for end, stage in [stage for stage, of_stage in under_way.items() if over[of_stage].all()]:
                self._clocks[end].finished(stage)
                del under_way[end, stage]
            return done

        self._connection.wait(reached, lambda: self._rounds[int(over.argmin())].waits, self._refit_poller)
        if self._connection.budget.checksums:
            buckets = [placed.bucket for each in self._rounds for placed in each.round.placed_messages]
            for number in torch.nonzero(self._damaged).reshape(-1).tolist():
                reason = f"bucket {buckets[number].number} arrived with other bytes than it was sent with"
                raise ChecksumError(buckets[number].waiting, reason)

    def count_written(self) -> None:
        """After a failure, `written_bytes` of a part that is queued becomes what may have been written: rounds that have
        come, and what is received in place. The part is not queued any more.

        Of each stream two rounds may be under way, as one may have come a moment ago.
        """
        was_queued, self._is_queued = self._is_queued, False
        if not was_queued or not self.written_bytes:
            return
        came = self._came.numpy() > 0
        rounds = [each.round for each in self._rounds]
        written = [placed for each, has_come in zip(rounds, came, strict=True) if has_come for placed in each.received]
        for lane in self._connection.links:
            due = [
                each
                for each, has_come in zip(rounds, came, strict=True)
                if each.stream == lane and each.received and not has_come
            ]
            written += [placed for each in due[:2] for placed in each.received if placed.tensor is not None]
        self.written_bytes = sum(placed.bucket.nbytes for placed in written)

    def _capture_graph(self) -> torch.cuda.CUDAGraph:
        """All rounds, from their packing to a note in the host's memory that they are over."""
        graph, notes = torch.cuda.CUDAGraph(), self._connection.notes
        links = self._connection.links.values()
        streams = [notes, *(each for link in links for each in (link.wire, link.packing, link.unpacking))]
        self._one = torch.ones(1, dtype=torch.uint8, device=self._connection.device)  # the graph reads it
        over: list[torch.cuda.Event] = []
        torch.cuda.synchronize(self._connection.device)
        first = self._connection.stream
        with torch.cuda.stream(first):
            graph.capture_begin(capture_error_mode="relaxed")  # NCCL adds its kernels from threads of its own
            try:
                for stream in streams:
                    stream.wait_stream(first)
                for number, each in enumerate(self._rounds):
                    over.append(self._queue(number, each, over))
                    notes.wait_event(over[-1])
                    self._note(self._over, number, notes)
                for stream in streams:
                    first.wait_stream(stream)
            except BaseException:
                with suppress(RuntimeError):
                    graph.capture_end()
                raise
            graph.capture_end()
        return graph

    def _queue(self, number: int, each: _DeviceRound, over: Sequence[torch.cuda.Event]) -> torch.cuda.Event:
        """Queue a round; `over` are the ends of those before it. Returns its own."""
        link = each.link
        steps: list[tuple[Step, torch.cuda.Stream]] = [(self._communicate, link.wire)]
        if len(each.round.received) < len(each.payloads):
            steps.insert(0, (self._pack, link.packing))
        if each.round.received:
            steps.append((partial(self._unpack, number), link.unpacking))
        before = None if each.round.after is None else over[each.round.after]
        for step, stream in steps:
            if before is not None:
                stream.wait_event(before)
            step(each, stream)
            before = stream.record_event()
        assert before is not None
        return before

    def _note(self, notes: torch.Tensor, number: int, stream: torch.cuda.Stream) -> None:
        with torch.cuda.stream(stream):
            notes[number : number + 1].copy_(self._one, non_blocking=True)

    def _pack(self, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        """Pack what is staged, and take digests before bytes leave."""
        for copies in each.packs:
            copies.launch(stream)
        if self._connection.budget.checksums:
            with torch.cuda.stream(stream):
                for payload in (payload.content for payload in each.payloads if payload.sends):
                    payload[-DIGEST_BYTES:].view(torch.int64).copy_(digest(payload[:-DIGEST_BYTES]))

    def _unpack(self, number: int, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        """Compare digests when bytes have come, and unpack what is staged."""
        self._note(self._came, number, stream)
        if self._connection.budget.checksums:
            with torch.cuda.stream(stream):
                for message, (_, sends, payload) in enumerate(each.payloads, each.first_message):
                    if not sends:
                        came_with = payload[-DIGEST_BYTES:].view(torch.int64)
                        self._damaged[message] = (digest(payload[:-DIGEST_BYTES]) != came_with).any()
        for copies in each.unpacks:
            copies.launch(stream)

    def _communicate(self, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        communicator = each.link.communicators[each.round.communicator]
        communicator.start(each.payloads, stream, each.waits[0])
        self._connection.settle(communicator, each.waits)

    def _bind_rounds(self, copy_ctas: int) -> tuple[_DeviceRound, ...]:
        rounds: list[_DeviceRound] = []
        messages = 0
        for each in self._planned:
            slot = self._connection.slots[each.stream, each.slot].tensor
            packs, unpacks = (
                [
                    self._bind_copies(each, end, slot, copy_ctas, stop)
                    for end in self._ends_with_copies(each, sends=sends)
                ]
                for sends, stop in ((True, None), (False, self._connection.stop))
            )
            payloads: list[Payload] = []
            for placed in each.placed_messages:
                tensors = self._bounds[placed.end].tensors
                memory = slot if placed.tensor is None else byte_view(tensors[placed.tensor])
                content = memory[placed.offset :][: placed.message_bytes]
                payloads.append(Payload(placed.member, placed.bucket.sends, content))
            link = self._connection.links[each.stream]
            rounds.append(_DeviceRound(each, link, payloads, packs, unpacks, messages, _waits(each)))
            messages += len(payloads)
        return tuple(rounds)

    def _ends_with_copies(self, each: Round, *, sends: bool) -> list[int]:
        return sorted({placed.end for placed in each.staged if placed.bucket.sends == sends})

    def _bind_copies(
        self, each: Round, end: int, slot: torch.Tensor, copy_ctas: int, stop: torch.Tensor | None
    ) -> DeviceGather:
        """The copies of an end in a round, on the device. Notes problems of what was read back from there."""
        from mcore_reshard.kernels.cuda.cast_tiles import cut_gather
        from mcore_reshard.kernels.cuda.copy_kernel import DeviceGather, KernelShape
        from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, names_of
        from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES

        bound = self._bounds[end]
        addresses = [tensor.data_ptr() for tensor in bound.tensors]
        bases = np.array([*addresses, slot.data_ptr()], np.uint64)
        tables = cut_gather(each.copies(end), bases, bound.casts, DEFAULT_TILE_BYTES)
        copies = DeviceGather(tables, self._connection.device, KernelShape(ctas=copy_ctas), stop)
        staged = [placed.bucket for placed in each.staged_of(end)]
        begins = [slot.data_ptr() + placed.offset for placed in each.staged_of(end)]
        reference = PlacedCopies.of_buckets(staged, addresses, begins)
        name_of = names_of(bound.schedule, reference.copies["src" if self._ends[end].sends else "dst"])
        self._problems += copies.problems(reference, bound.casts, addresses, name_of)
        return copies


@dataclass(frozen=True, slots=True)
class _DeviceRound:
    """A round bound to memory."""

    round: Round
    link: Link
    payloads: Sequence[Payload]
    packs: Sequence[DeviceGather]  # of each end that sends
    unpacks: Sequence[DeviceGather]
    first_message: int  # its number among all messages of the rank
    waits: Waits


def _waits(each: Round) -> Waits:
    first: dict[str, Waiting] = {}  # of each peer
    for placed in each.placed_messages:
        first.setdefault(placed.bucket.waiting.peer, placed.bucket.waiting)
    return tuple(first.values())
