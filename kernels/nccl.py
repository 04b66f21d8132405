"""Buckets over NCCL, between hosts or within one: packed on the device, sent in rounds, unpacked on the device.

    training rank    weights --gather kernel--> slot --NCCL send-->
    generation rank                              --NCCL recv--> slot --scatter kernel--> weights

Every stage has a communicator and keeps to one of a few streams; the kernels run on streams beside them, so that one
round is packed or unpacked while another is on the wire (`rounds` says why this cannot deadlock). A bucket that lies in
one piece skips its copy. Nothing here blocks: the host queues a window of rounds and polls against the deadline.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import torch
from torch.distributed import Store

from .board import Board
from .cast_tiles import scale_blocks
from .digests import digest
from .errors import ChecksumError, DeadlineError, PeerLostError, RefitError, SessionError, Waiting
from .nccl_communicator import NcclCommunicator, NcclError, NcclMessage, new_unique_id
from .pipeline import StageClock, StageReport, group_names, group_rank, other_world
from .program import Program, bind
from .rounds import (
    DIGEST_BYTES,
    Division,
    Passage,
    Round,
    ScratchBudget,
    divide,
    peers_by_stage,
    round_copies,
    rounds,
    slot_bytes,
)
from .tensors import byte_view

if TYPE_CHECKING:
    from .device_casts import DeviceGather, DeviceScales

DEFAULT_COPY_CTAS = 32  # of 132: packing must outpace the wire, and NCCL's own kernels need room beside it
_TILE_BYTES = 128 << 10
_WINDOW = 32  # rounds queued ahead: the device's queues are finite, and a full one would block the host
_SPIN_S = 0.001  # NCCL hands a group to the device within this; sleeping meanwhile would cost more
_POLL_S = 0.0005
_LOOK_S = 0.2  # how often to ask, while waiting, whether NCCL or another rank has failed
_WARM_BYTES = 16
_DRAIN_S = 5.0


class NcclExecutor:
    """Runs a program over NCCL. All ranks of the session construct it at the same time, with the same `budget`.

    The program is bound again with the bucket size that scratch allows. Weights must be complete on the current stream
    of their device when `run` is called; when it returns, every byte has landed, for all streams.
    """

    name = "nccl"

    def __init__(
        self,
        program: Program,
        store: Store,
        *,
        timeout_s: float,
        budget: ScratchBudget = ScratchBudget(),  # noqa: B008
        copy_ctas: int = DEFAULT_COPY_CTAS,
    ) -> None:
        schedule = program.schedule
        self._timeout_s = timeout_s
        self._board = Board(
            store, group_rank(schedule, schedule.world, schedule.rank), group_names(schedule), timeout_s=timeout_s
        )
        self._device = program.device or torch.device("cpu")
        self._sends = schedule.world == "train"
        self._runs = 0
        self._closed = False
        self._links: dict[int, _Link] = {}
        self._rounds: tuple[_DeviceRound, ...] = ()
        self._slots: dict[tuple[int, int], torch.Tensor] = {}
        self._scales: DeviceScales | None = None
        try:
            division = self._agreed(program, budget)
            self._program = bind(
                schedule,
                program.by_name,
                bucket_bytes=division.bucket_bytes,
            )
            planned = rounds(self._program, division)
            if not planned:
                return
            with torch.cuda.device(self._device):
                self._slots = {place: self._empty(nbytes) for place, nbytes in slot_bytes(planned).items()}
                buckets = sum(len(each.passages) for each in planned)
                self._damaged = torch.zeros(buckets, dtype=torch.bool, device=self._device)
                self._links = self._connected(division, planned)
                self._rounds = self._bound(planned, division, copy_ctas)
                self._scales = _scales(self._program, self._device)
                self._ready = torch.cuda.Event()
                torch.cuda.synchronize(self._device)
        except BaseException:
            self._board.give_up()
            self.close()
            raise

    @property
    def scratch_bytes(self) -> int:
        """Device memory of the slots. The kernels' tables (about a thousandth of the bytes moved) and NCCL's own
        buffers come on top."""
        return sum(slot.numel() for slot in self._slots.values())

    @property
    def table_bytes(self) -> int:
        """Device memory of the kernels' tables."""
        return sum(each.copies.nbytes for each in self._rounds if each.copies is not None)

    @property
    def bucket_bytes(self) -> int:
        """The largest message, as all ranks agreed."""
        return self._program.bucket_bytes

    @property
    def round_count(self) -> int:
        return len(self._rounds)

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once. Returns when all bytes sent have left, or all bytes received are in place.

        Raises `DeadlineError`, `PeerLostError`, `NcclError` or `ChecksumError`; the executor is then closed.
        """
        if self._closed:
            raise SessionError(f"{self._program.rank}: the nccl transport has been closed")
        self._runs += 1
        clock = StageClock(len(self._program.stages))
        with self._gives_up_on_error():
            if self._rounds:
                with torch.cuda.device(self._device):
                    self._run(clock)
        return clock.reports(self._program)

    def close(self) -> None:
        """Abort all communicators and free scratch. May be called twice."""
        self._closed = True
        links, self._links = self._links, {}
        for link in links.values():
            link.communicator.abort()
        self._drain(links.values())
        self._rounds = ()
        self._slots = {}

    def _run(self, clock: StageClock) -> None:
        if self._scales is not None:
            self._scales.launch(torch.cuda.current_stream(self._device))
        self._ready.record()
        for link in self._links.values():
            link.wire.wait_event(self._ready)
            link.side.wait_event(self._ready)
        under_way: deque[_DeviceRound] = deque()
        for each in self._rounds:
            if len(under_way) == _WINDOW:
                self._finish(under_way.popleft(), clock)
            clock.started(each.round.stage)
            self._queue(each)
            under_way.append(each)
        while under_way:
            self._finish(under_way.popleft(), clock)
        self._check_digests()

    def _queue(self, each: _DeviceRound) -> None:
        link = self._links[each.round.stage]
        pack_or_unpack, exchange = (self._copy, link.side), (self._exchange, link.wire)
        (first, before), (second, behind) = (pack_or_unpack, exchange) if self._sends else (exchange, pack_or_unpack)
        if each.round.after is not None:
            before.wait_event(self._rounds[each.round.after].over)
        first(each, before)
        each.half.record(before)
        behind.wait_event(each.half)
        second(each, behind)
        each.over.record(behind)

    def _copy(self, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        """Pack or unpack what is staged; digests are taken of what is about to leave or has just come."""
        if self._sends and each.copies is not None:
            each.copies.launch(stream)
        if each.checked:
            with torch.cuda.stream(stream):
                for number, message in zip(each.checked, each.messages, strict=True):
                    body, end = message.payload[:-DIGEST_BYTES], message.payload[-DIGEST_BYTES:].view(torch.int64)
                    if self._sends:
                        end.copy_(digest(body))
                    else:
                        self._damaged[number] = (digest(body) != end).any()
        if not self._sends and each.copies is not None:
            each.copies.launch(stream)

    def _exchange(self, each: _DeviceRound, stream: torch.cuda.Stream) -> None:
        communicator = self._links[each.round.stage].communicator
        waiting = each.round.passages[0].step.waiting
        communicator.start(each.messages, stream, waiting)
        self._until(lambda: communicator.is_idle(waiting), communicator, each.round, _SPIN_S)

    def _finish(self, each: _DeviceRound, clock: StageClock) -> None:
        self._until(each.over.query, self._links[each.round.stage].communicator, each.round)
        clock.finished(each.round.stage)

    def _check_digests(self) -> None:
        passages = [passage for each in self._rounds for passage in each.round.passages]
        for number in torch.nonzero(self._damaged).reshape(-1).tolist():
            step = passages[number].step
            raise ChecksumError(step.waiting, f"bucket {step.number} arrived with other bytes than it was sent with")

    def _until(
        self, reached: Callable[[], bool], communicator: NcclCommunicator, where: Round, spin_s: float = 0.0
    ) -> None:
        """Poll until `reached`. Raises if that takes too long, NCCL fails, or another rank has given up."""
        start = time.monotonic()
        look = start + _LOOK_S
        waiting = where.passages[0].step.waiting
        while not _on_device(reached, waiting):
            now = time.monotonic()
            if now > look:
                look = now + _LOOK_S
                communicator.is_idle(waiting)
                if who := self._board.who_gave_up():
                    raise PeerLostError(waiting, f"{who} gave up")
            if now > start + self._timeout_s:
                raise self._overdue(where)
            time.sleep(0.0 if now < start + spin_s else _POLL_S)

    def _overdue(self, where: Round) -> DeadlineError:
        """The error that names, of the peers in a round, one that does not wait itself."""
        schedule = self._program.schedule
        by_peer = {
            group_rank(schedule, other_world(schedule.world), passage.step.lane.peer): passage.step.waiting
            for passage in where.passages
        }
        silent = self._board.silent(f"run-{self._runs}", list(by_peer))
        waiting = by_peer[silent[0]] if silent else where.passages[0].step.waiting
        return DeadlineError(waiting, f"nothing within {self._timeout_s:g} s")

    @contextmanager
    def _gives_up_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self._board.give_up()
            self.close()
            raise

    def _agreed(self, program: Program, budget: ScratchBudget) -> Division:
        word = {"peers": sorted(peers_by_stage(program).items()), "budget": repr(budget)}
        words = self._board.gather("word", word)
        if len(budgets := sorted({said["budget"] for said in words})) > 1:
            raise SessionError(f"the ranks have different budgets: {'; '.join(budgets)}")
        try:
            return divide(budget, [dict(said["peers"]) for said in words])
        except ValueError as error:
            raise SessionError(str(error)) from error

    def _connected(self, division: Division, planned: Sequence[Round]) -> dict[int, _Link]:
        """Join the communicators of the rank's stages, all at the same time, and connect every pair in them."""
        schedule = self._program.schedule
        me = group_rank(schedule, schedule.world, schedule.rank)
        first_rounds = {each.stage: each for each in reversed(planned)}
        # NCCL's few CTAs go first where both wait for a multiprocessor: a wire that idles is lost time.
        pairs = {each.stream: (torch.cuda.Stream(priority=-1), torch.cuda.Stream()) for each in planned}
        links = self._links  # filled here, so that `close` aborts what an error leaves behind
        for stage, first in sorted(first_rounds.items()):
            members = division.members[stage]
            if me == members[0]:
                self._board.publish(f"id/{stage}", new_unique_id())
            communicator = NcclCommunicator(
                self._board.read(f"id/{stage}"), members.index(me), len(members), first.passages[0].step.waiting
            )
            links[stage] = _Link(communicator, *pairs[first.stream])
        for stage, first in sorted(first_rounds.items()):
            self._settle(links[stage], first)
        warm = self._empty(_WARM_BYTES * max(len(each.passages) for each in planned))
        for stage, first in sorted(first_rounds.items()):
            messages = [
                NcclMessage(warm[number * _WARM_BYTES :][:_WARM_BYTES], passage.member, self._sends)
                for number, passage in enumerate(first.passages)
            ]
            links[stage].communicator.start(messages, links[stage].wire, first.passages[0].step.waiting)
            self._settle(links[stage], first)
            connected = torch.cuda.Event()
            connected.record(links[stage].wire)
            self._until(connected.query, links[stage].communicator, first)
        return links

    def _settle(self, link: _Link, where: Round) -> None:
        waiting = where.passages[0].step.waiting
        self._until(lambda: link.communicator.is_idle(waiting), link.communicator, where)

    def _bound(self, planned: Sequence[Round], division: Division, copy_ctas: int) -> tuple[_DeviceRound, ...]:
        from .device_casts import DeviceGather
        from .device_copies import KernelShape

        addresses = [tensor.data_ptr() for tensor in self._program.tensors]
        bound: list[_DeviceRound] = []
        numbered = 0
        for each in planned:
            slot = self._slots[each.stream, each.slot]
            table = round_copies(each)
            copies = None
            if len(table):
                bases = np.array([*addresses, slot.data_ptr()], np.uint64)
                shape = KernelShape(ctas=copy_ctas)
                copies = DeviceGather(table, bases, self._program.casts, self._device, shape, _TILE_BYTES)
            messages = tuple(
                NcclMessage(self._payload(passage, slot), passage.member, self._sends) for passage in each.passages
            )
            checked = range(numbered, numbered + len(messages)) if division.checksums else range(0)
            numbered += len(messages)
            bound.append(_DeviceRound(each, messages, copies, checked, torch.cuda.Event(), torch.cuda.Event()))
        return tuple(bound)

    def _payload(self, passage: Passage, slot: torch.Tensor) -> torch.Tensor:
        if passage.run is None:
            return slot[passage.slot_offset :][: passage.message_bytes]
        return byte_view(self._program.tensors[passage.run.tensor])[passage.run.offset :][: passage.message_bytes]

    def _empty(self, nbytes: int) -> torch.Tensor:
        return torch.empty(nbytes, dtype=torch.uint8, device=self._device)

    def _drain(self, links: Iterable[_Link]) -> None:
        """Wait a moment for what is queued: it reads and writes the scratch that is about to be freed."""
        deadline = time.monotonic() + _DRAIN_S
        with suppress(RuntimeError):  # a broken device has said so before
            for link in links:
                for stream in (link.wire, link.side):
                    while not stream.query() and time.monotonic() < deadline:
                        time.sleep(_POLL_S)


@dataclass(frozen=True, slots=True)
class _Link:
    """A stage's communicator, the stream of its messages, and that of the copies beside it."""

    communicator: NcclCommunicator
    wire: torch.cuda.Stream
    side: torch.cuda.Stream


@dataclass(frozen=True, slots=True)
class _DeviceRound:
    """A round bound to memory. `half` marks the end of its first part (packed, arrived), `over` that of its second."""

    round: Round
    messages: tuple[NcclMessage, ...]
    copies: DeviceGather | None
    checked: range  # numbers of the messages whose digests are compared
    half: torch.cuda.Event
    over: torch.cuda.Event


def _scales(program: Program, device: torch.device) -> DeviceScales | None:
    """What computes the scales of the program's casts."""
    from .device_casts import DeviceScales

    blocks = scale_blocks(program.casts, program.tensors)
    return DeviceScales(blocks, device) if len(blocks) else None


def _on_device(reached: Callable[[], bool], waiting: Waiting) -> bool:
    """`reached()`; a device that has failed raises `NcclError` too."""
    try:
        return reached()
    except RefitError:
        raise
    except RuntimeError as error:
        raise NcclError(waiting, f"the device failed: {error}") from error
