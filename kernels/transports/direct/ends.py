"""Both ends of the direct transport: a source, whose memory others read, and a reader.

Each pair of ranks orders its reads by signals of 24 bytes, over CPU connections of their own, and by one IPC event:

    source    READY: all that it had queued is done                        returns when the events have happened
    reader                                           launches its kernel, records its event, STARTED          DONE

So no reader reads a source before it is ready, and the source may be overwritten as soon as its `run` returns. The source
waits for DONE only if a pull takes long: when a reader dies its connection closes, but its event never happens.

Weights that are cast on the way, and their scales, are pushed by the source, while everything else is pulled. Where GPUs would
read each other, everything is pushed, and the reader says no more than READY (see `pushes` and `what_is_pushed`). Where it dies
after that, its sources notice in the next run:

    reader    READY: it may be written                           pulls the rest      returns when the event has happened
    source                                pushes, records its event, READY                    DONE

Readers that a copy engine helps with all their sources pull what is cast out of slots at the source instead (see `slots`). So do
those whose memory nobody can map. They do so after everything else: the first slots are filled meanwhile. When all casts are done
the source says CAST, since the event of a source that dies never happens. On a GPU that both share, readers pull everything else
last, after CAST: work that waits on the GPU takes turns there from those who cast.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.cuda.copy_kernel import KernelShape, own_gpu_shape
from mcore_reshard.kernels.cuda.device_memory import is_plain
from mcore_reshard.kernels.cuda.engine_rows import ENGINE_STREAMS
from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, tile_problems
from mcore_reshard.kernels.cuda.ipc import export_event, open_event, withdraw_event
from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.rendezvous.polling import CLOSE_S, EventPoller
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.planner.model.precision import FP8
from mcore_reshard.planner.plan.schedule import Schedule

from .event_wait import EventWait
from .peer_signals import PeerSignals, Signal
from .pull import DirectOptions, Pull, check_sums, engine_helps, parameter_of
from .pushes import Pushes, Target
from .shared_memory import addresses_of, fetch_exports, share_memory
from .slots import SlotReader, SlotSource
from .staging import PUSHED_PARTS, PushedPart, divided_by_way, parted, what_is_pushed, with_other_end
from .turns import engine_turns, may_use_engine, publish_readers

# Of the keys under which readers say what sources push to them, and where.
_PUSHED, _TARGETS = "pushed/", "targets/"


class Source:
    """A training rank: others read its memory, and it waits until they have. It pushes what is not read."""

    written_bytes = 0

    def __init__(
        self, bound: BoundSchedule, signals: PeerSignals, scratch_bytes: int, options: DirectOptions, kept: Kept
    ) -> None:
        self._device = bound.device or torch.device("cuda", torch.cuda.current_device())
        self._signals = signals
        self._settling = EventWait(signals, "what was queued before the refit")
        self._casting = EventWait(signals, "the casts")
        self._reading = EventWait(signals, "the pull")
        self._not_done: int | None = None  # the run whose DONE has not been received yet
        share_memory(signals, kept, bound.by_name)
        publish_readers(signals)
        plain, cast = parted(bound.schedule)
        said = {peer: signals.fetch(peer, _parse_pushed, prefix=_PUSHED) for peer in signals.peers}
        parse = partial(open_event, device=self._device)
        # Of those who pull; happened: the last pull has ended.
        self._read = {peer: signals.fetch(peer, parse) for peer, pushed_to in said.items() if pushed_to != "all"}
        pulled, slotted, pushed = divided_by_way(plain, cast, said)
        self._slots = SlotSource(bound, slotted, signals, scratch_bytes)
        problems = tuple(self._slots.problems)
        executed = Executed(bound, buckets=self._slots.buckets, exposed=pulled, device_problems=problems)
        self.executed: tuple[Executed, ...] = (executed,)
        self.bound = (bound,)
        self.scratch_bytes, self.table_bytes = self._slots.scratch_bytes, self._slots.table_bytes
        self._pushes: Pushes | None = None
        if pushed[0].peers | pushed[1].peers:
            with ExitStack() as opened:
                opened.callback(self._slots.close)
                self._pushes = Pushes.at_once(bound, pushed, signals, kept, options, prefix=_TARGETS)
                opened.pop_all()
            self.executed += self._pushes.executed
            self.table_bytes += self._pushes.table_bytes

    def run(self, run: int) -> None:
        self._hear_done()  # of the run before: it came long ago
        settled = torch.cuda.current_stream(self._device).record_event()
        if self._pushes is not None:
            self._pushes.prepare(settled)
        self._settling.wait(dict.fromkeys(self._signals.peers, settled))
        if self._pushes is not None:  # now, as a GPU that is idle does at once what is queued
            self._pushes.begin(run)
            self._pushes.launch([0])
        self._signals.tell(run, Signal.READY)
        if self._slots.stream is not None:
            readers = self._slots.readers
            self._slots.rounds(run)
            self._casting.wait(dict.fromkeys(readers, self._slots.stream.record_event()), self._slots.began)
            self._signals.tell(run, Signal.CAST, readers)
        if self._pushes is not None:
            self._pushes.end()
            self._signals.tell_last(run, Signal.DONE, self._pushes.peers)
        self._signals.hear(run, Signal.STARTED, self._read)
        self._not_done = run
        self._reading.wait(self._read, self._slots.began, when_late=self._hear_done)

    def _hear_done(self) -> None:
        run, self._not_done = self._not_done, None
        if run is not None:
            self._signals.hear(run, Signal.DONE, self._read)

    def end_writes(self) -> None:
        """Returns once this rank writes no more, and has unmapped what it wrote."""
        if self._pushes is not None:
            self._pushes.close()

    def close(self) -> None:
        self._read.clear()
        self._slots.close()


class Reader:
    """A generation rank: its kernels, and the mappings that they read."""

    scratch_bytes = 0
    written_bytes = 0  # all, once something is queued: the GPU does not say how far it is

    def __init__(self, bound: BoundSchedule, signals: PeerSignals, options: DirectOptions, kept: Kept) -> None:
        schedule = with_other_end(bound.schedule)
        self._bound = bound
        self._signals = signals
        self._pulling = EventWait(signals, "the pull")
        device = self._device = bound.device or torch.device("cuda", torch.cuda.current_device())
        # torch hands out 32 streams in turn, so that these differ.
        self._stream, *engine_streams = (torch.cuda.Stream(device) for _ in range(1 + ENGINE_STREAMS))
        self._pulled = torch.cuda.Event(interprocess=True)
        self._mappings, self._slot_mappings = kept.mappings(device), kept.mappings(device, stay=False)
        if not all(map(is_plain, bound.tensors)):  # in virtual memory a row may go through several allocations
            options = replace(options, engine_share=0.0)
        self._target: Target | None = None
        try:
            exports = fetch_exports(signals, kept, signals.peers)
            gpus = {rank: {block.gpu for block in exported.allocations} for rank, exported in exports.items()}
            plain, cast = parted(schedule)
            own, sources = gpu_of(device), {gpu for of_rank in gpus.values() for gpu in of_rank}
            is_mutual = own in sources and len(sources) > 1
            may_push = (is_mutual or bool(cast.peers)) and _may_be_written(bound, cast, options, kept)
            helps = engine_helps(schedule, options) and not (is_mutual and may_push)
            by_engine = engine_turns(schedule, gpus, own, signals, helps=helps)
            helps_with_all = by_engine.keys() == gpus.keys()
            pushed = what_is_pushed(is_mutual=is_mutual, by_engine=helps_with_all) if may_push else "nothing"
            signals.publish(pushed, prefix=_PUSHED)
            self._pulls = pushed != "all"
            if self._pulls:
                signals.publish(export_event(self._pulled, device))
            parts = {"all": [plain, cast], "casts": [cast], "nothing": []}[pushed]
            if parts:
                self._target = Target(bound, parts, signals, kept, prefix=_TARGETS)
                cast = cast.with_peers(())
            if pushed == "all":
                plain = plain.with_peers(())
            self._table = peer_table(plain)
            self._slots = SlotReader(
                bound, cast, signals, self._slot_mappings, self._stream, engine_streams[0], options,
                by_engine if helps_with_all else {},
            )  # fmt: skip
            addresses = addresses_of(self._table, bound, exports, self._mappings)
            # Tile by tile in a relay: two replicas that meet at a source for long are both slow. Also with a source on
            # the reader's own GPU: its tiles are copied while the links are busy.
            own_gpu = sources == {own}
            by_tile = schedule.relayed or schedule.between_replicas or own in sources
            shape = options.shape or (own_gpu_shape(device) if own_gpu else KernelShape())
            if schedule.relayed:  # half the CTAs on the first hop: its loads hold up the second hop's
                shape = replace(shape, ctas=-(-shape.ctas // 2))
            if self._target is not None:
                self._target.fetch_events()
            self._copies = Pull(
                self._table.copies, addresses, device, shape, options,
                peer=self._table.peer, by_engine=by_engine, first=schedule.rank,
                together=1 if by_tile else None, own_gpu=own_gpu, engine_streams=engine_streams,
            )  # fmt: skip
        except BaseException:
            withdraw_event(self._pulled)
            self._mappings.close()
            self._slot_mappings.close()
            raise
        self.table_bytes = self._copies.nbytes + self._slots.table_bytes
        placed, name_of = PlacedCopies.of(self._table.copies, addresses), partial(parameter_of, bound, self._table)
        problems = tile_problems(self._copies.read_back(), placed, name_of) + self._slots.problems
        executed = Executed(bound, buckets=self._slots.buckets, reaches=self._table, device_problems=tuple(problems))
        self.executed: tuple[Executed, ...] = (executed,)
        self.bound = (bound,)
        if self._target is not None:
            self.executed += self._target.executed

    def run(self, run: int) -> None:
        self._begin(run)
        if self._pulls:
            self._pull(run)
        if self._target is not None:
            self._target.await_pushed(self._began)
        if self._pulls:
            self._signals.tell_last(run, Signal.DONE)
            check_sums(self._bound, self._table, self._copies.damaged(), self._signals)
            self._slots.check_sums()

    def _begin(self, run: int) -> None:
        """Let sources push what they push. Returns when everything else may be pulled."""
        self.written_bytes = 0
        if self._pulls:
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
            self._copies.fork(self._stream)
        if self._target is not None:
            if self._pulls:  # of the run before: until then a source says READY to nobody, and does nothing for others
                self._target.hear_done()
            self._target.settle()
            self._target.await_settled()
            self.written_bytes = self._bound.nbytes
            self._target.admit(run)
            self._target.hear_done()  # else now: others begin to push meanwhile
            self._target.hear(run, Signal.READY, self._signals.peers)
        else:
            self._signals.hear(run, Signal.READY)
        self.written_bytes = self._bound.nbytes
        self._began = time.monotonic()

    def _pull(self, run: int) -> None:
        """Pull what is not pushed, and wait until it has landed."""
        if self._slots.shares_gpu:
            self._slots.rounds(run)
            self._signals.hear(run, Signal.CAST, self._slots.sources)
            self._copies.launch(self._stream)
        else:
            self._copies.launch_forked(self._stream)
            self._slots.rounds(run)
        self._pulled.record(self._stream)
        self._signals.tell(run, Signal.STARTED)
        if not self._slots.shares_gpu:  # heard only now; a source that has died is named at once
            self._signals.hear(run, Signal.CAST, self._slots.sources)
        self._pulling.wait(dict.fromkeys(self._signals.peers, self._pulled), self._began)

    def end_writes(self) -> None:
        """Returns once this rank is written no more."""
        if self._target is not None:
            self._target.close()

    def close(self) -> None:
        """Unmap the sources. A source that died while it cast leaves a wait on the GPU: its memory then stays mapped."""
        withdraw_event(self._pulled)
        self._slots.close()
        is_used = not EventPoller(CLOSE_S).until(self._stream.query)
        for mappings in (self._mappings, self._slot_mappings):
            mappings.close(is_used=is_used)


def _may_be_written(bound: BoundSchedule, cast: Schedule, options: DirectOptions, kept: Kept) -> bool:
    """Whether training ranks may write straight into a rank's memory.

    Not where replicas pass weights on, nor with checksums. Nor where they cannot: vLLM's sleep mode, for one, has the weights in
    memory that no other process can map.
    """
    if not may_use_engine(bound.schedule, checksums=options.checksums) or not _has_rows(cast):
        return False
    try:
        kept.export(bound.by_name)
    except TransportUnavailable:
        return False
    return True


def _has_rows(cast: Schedule) -> bool:
    """Whether the elements of each row lie together here, as casts in blocks need; no engine that we know has others."""
    in_blocks = [number for number, local in enumerate(cast.tensors) if local.dtype == FP8]
    used = [np.unique(table.strided_box[np.isin(table.tensor, in_blocks)]).tolist() for table in cast.tables]
    return all(cast.strided_boxes[box].strides[-1:] in ((), (1,)) for boxes in used for box in boxes)


def _parse_pushed(said: Any) -> PushedPart:
    if said not in PUSHED_PARTS:
        raise ValueError(f"none of {', '.join(PUSHED_PARTS)}")
    return PUSHED_PARTS[PUSHED_PARTS.index(said)]
