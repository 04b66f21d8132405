"""Live refits: every training rank and every generation rank holds an endpoint, and they all refit together.

    train = TrainEndpoint(schedule, parameters, store="10.0.0.1:29600", export=bridge_export)
    train.prepare()                      # once: bind, meet the other ranks, compare plans, connect
    train.refit(version=step)            # after each optimizer step, on every rank of both worlds

A version is committed when every rank has acknowledged it. If any rank fails, all ranks raise the same cause. The
session is then over, and generation ranks may hold a mixture of two versions.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch
from torch.distributed import TCPStore

from mcore_reshard.kernels.copies.bind import BoundSchedule, WriteCounts, bind
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import BindError, RefitError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.polling import LOOK_S, NOTICE_S, DeadlineThread
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed
from mcore_reshard.kernels.rendezvous.store import store_address
from mcore_reshard.kernels.transports.base import (
    Executor,
    StageReport,
    Transport,
    TransportContext,
    close_all,
    connect_all,
    connect_group,
    group_names,
)
from mcore_reshard.kernels.transports.broadcast import Tree, broadcast, receive
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.planner.plan.schedule import Schedule, World

from .agreement import agreed_kv_scales, check_alike, check_kv_names, check_versions, kv_scales_word, parse_word
from .whole_tensors import NamedTensors, check_stream, exhaust

PROTOCOL = 7  # version of the words that ranks exchange; both worlds must have the same
EVERYTHING, TRAINABLE = "everything", "trainable parameters"  # what a refit moves, as reports say it
_CLOSED = "closed"

LiveTensors = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
Export = Callable[[Sequence[str] | None], NamedTensors]
SetKvScales = Callable[[Mapping[str, float]], Any]
KvScaleNames = Callable[[], Collection[str]]


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What one rank did in one committed refit."""

    version: int
    transport: str  # one or several, as in "direct+nccl"
    moved: str  # EVERYTHING, or TRAINABLE
    nbytes: int  # moved by the plan, sent or received by this rank
    misc_bytes: int  # of whole tensors exported and loaded by name: the misc route, or everything under golden
    seconds: float  # from the call to the commit
    stages: tuple[StageReport, ...]


@dataclass(frozen=True, slots=True)
class _Program:
    """What one kind of refit moves, and by what. Golden moves all tensors by name: it has neither."""

    moved: str
    names: Sequence[str] | None  # of what moves by name; None: everything
    bound: BoundSchedule | None = None
    executor: Executor | None = None


@dataclass(frozen=True, slots=True)
class _Connection:
    """Everything that `prepare` opens and `close` frees."""

    rendezvous: Rendezvous
    transport: Transport
    group: GlooGroup
    programs: Sequence[_Program]  # of everything; then, if parameters are frozen, of the others
    thread: DeadlineThread  # executors run on it

    @property
    def executors(self) -> list[Executor]:
        return [program.executor for program in self.programs if program.executor is not None]


class _Endpoint(ABC):
    """One rank's end of a session: the part that TrainEndpoint and GenerationEndpoint share."""

    world: World
    by_name: str  # the argument with the function that moves whole tensors by name
    _moves_by_name: bool  # whether that function was given
    _before_reads: Callable[[], Any] | None = None  # on training ranks
    _after_direct_writes: Callable[[], Any] | None = None  # this and the next two: on generation ranks
    _set_kv_scales: SetKvScales | None = None
    _kv_scale_names: KvScaleNames | None = None

    def __init__(
        self,
        schedule: Schedule,
        tensors: LiveTensors,
        store: TCPStore | str,
        options: Options,
        check_layout: Callable[[], None] | None,
    ) -> None:
        if schedule.world != self.world:
            raise ValueError(f"{type(self).__name__} needs the schedule of a {self.world} rank, not of {schedule.name}")
        self.rank_name = schedule.name
        self.committed_version: int | None = None
        self._schedule = schedule
        self._tensors = tensors
        self._store_address = store_address(store)
        self._options = options
        self._check_layout = check_layout
        self._connection: _Connection | None = None
        self._ended: str | None = None  # why no refit is possible any more
        self._refits = 0

    def prepare(self, *, timeout_s: float | None = None) -> None:
        """Bind, meet all other ranks, compare plans and options, and connect. Call once, on every rank.

        `timeout_s` (by default that of the options) limits the wait for ranks that are still starting.
        Raises `BindError`, `TransportUnavailable` or `SessionError`; if one rank raises, all do.
        """
        if self._connection or self._ended:
            reason = self._ended or "already prepared"
            raise SessionError(f"{self.rank_name}: {reason}; call prepare() once, on a new endpoint")
        self._ended = "prepare() failed"
        session, limit_s, members = self._options.session, self._options.timeout_s, group_names(self._schedule)
        rendezvous = Rendezvous(self._store_address, session, self.rank_name, members, timeout_s=limit_s)
        with _Published(rendezvous, "hello", self._end):
            if self._check_layout is not None:
                self._check_layout()
            transport, bound = self._bind()
        hello = {
            "protocol": PROTOCOL,
            "digest": self._schedule.digest,
            "transport": transport.name,
            "bucket_bytes": self._options.bucket_bytes,
            "checksums": self._options.checksums,
            "train_ranks": self._schedule.train_ranks,
            "gen_ranks": self._schedule.gen_ranks,
        }
        check_alike(rendezvous.gather("hello", hello, parse=parse_word, timeout_s=timeout_s))
        with _Published(rendezvous, "connected", self._end):
            self._connection = self._connect(rendezvous, transport, bound)
            rendezvous.gather("connected", {})
        self._ended = None

    def refit(
        self, version: int, *, kv_scales: Mapping[str, float] | None = None, everything: bool = False
    ) -> RefitReport:
        """Move the weights of `version` from the trainer to the engine; return once every rank has acknowledged it.

        If the plan has frozen parameters, the first refit of a session moves them too, and later ones leave them out.
        `everything`, given on any rank, moves them again: for an engine that has lost its weights.

        `kv_scales` are calibrated scales of the engine's KV cache, by checkpoint name, as in
        `model.layers.0.self_attn.attn.k_scale`. Give them on training rank 0; other ranks may be given the same.

        All ranks of both worlds must call it with one version, larger than the last; else all of them raise
        `VersionError`. They raise `KvScalesError` for scales that no rank can take. After these two errors nothing has
        moved, and the session goes on. Each wait ends with an error after `timeout_s`. Training weights may change again as
        soon as this returns.
        """
        connection = self._connection
        if connection is None:
            raise SessionError(f"{self.rank_name}: no refit is possible: {self._ended or 'call prepare() first'}")
        start = time.perf_counter()
        self._refits += 1
        rendezvous, phase = connection.rendezvous, f"refit-{self._refits}"
        with _Published(rendezvous, f"{phase}/start", self._end):
            bound = connection.programs[0].bound
            writes = bound.check_fresh(self._live_tensors()) if bound is not None else None
            wants_all = everything or self.committed_version is None
            word = {"version": version, "everything": wants_all, **kv_scales_word(kv_scales)}
            words = rendezvous.gather(f"{phase}/start", word, parse=parse_word)
        check_versions(words, self.rank_name, self.committed_version)
        program = connection.programs[0 if any(said.get("everything", True) for said in words.values()) else -1]
        all_scales = agreed_kv_scales(words, self._schedule.name_of("train", 0))
        own_scales = self._own_kv_scales(rendezvous, f"{phase}/kv_scales", all_scales) if all_scales else {}
        names = program.names
        if names:  # exports are collectives: no rank may enter one while another's transfer has failed
            with _Published(rendezvous, f"{phase}/bulk", self._end):
                stages = self._move_bulk(connection, program, f"{phase}/bulk", writes)
                rendezvous.gather(f"{phase}/bulk", {})
        with ExitStack() as afterwards, _Published(rendezvous, f"{phase}/commit", self._end):
            if not names:
                stages = self._move_bulk(connection, program, f"{phase}/commit", writes)
            misc_bytes = self._move_by_name(connection.group, names, afterwards) if names is None or names else 0
            if self._after_direct_writes is not None:
                self._after_direct_writes()
            if own_scales and self._set_kv_scales is not None:
                self._set_kv_scales(own_scales)
            rendezvous.gather(f"{phase}/commit", {})
        self.committed_version = version
        nbytes = sum(stage.nbytes for stage in stages)
        moved_by = (program.executor or connection.transport).name
        seconds = time.perf_counter() - start
        return RefitReport(version, moved_by, program.moved, nbytes, misc_bytes, seconds, stages)

    @property
    def scratch_bytes(self) -> int:
        """Memory that the transport holds besides the model."""
        executors = self._connection.executors if self._connection else []
        return sum(executor.scratch_bytes for executor in executors)

    @property
    def failure(self) -> str | None:
        """Why the session ended, if an error ended it."""
        return None if self._ended in {None, _CLOSED} else self._ended

    def close(self) -> None:
        """Free connections and scratch. Peers that still wait for this rank get an error. May be called twice.

        After a committed refit it waits, 5 s at most, until all ranks know of the commit. A process that hosts the store
        may then end; a slower rank raises. After a failure it waits 1 s at most for the transport to end. The store must
        then stay up until all ranks have raised: they read the cause there.
        """
        connection, self._connection = self._connection, None
        if connection is not None and self._ended is None:
            connection.rendezvous.leave()
        self._ended = self._ended or _CLOSED
        if connection is None:
            return
        connection.group.close()
        if connection.thread.is_busy:  # a run keeps what it uses until it ends; gloo's ends with the group
            wait([connection.thread.start(partial(close_all, connection.executors))], NOTICE_S)
        else:
            close_all(connection.executors)

    @abstractmethod
    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        """Export or load the tensors `names`, or all if None; returns their bytes. `afterwards` runs after the outcome."""

    def _move_bulk(
        self, connection: _Connection, program: _Program, phase: str, writes: WriteCounts | None
    ) -> tuple[StageReport, ...]:
        """Run a program's transfers, on a thread; none under golden. `writes` counts the earlier writes to each tensor.

        The wait ends once the store reports the failure of any rank: gloo may leave a sender waiting for a lost peer.
        """
        bound, executor, whole = program.bound, program.executor, connection.programs[0].bound
        if bound is None or executor is None or whole is None or writes is None:
            return ()
        if self.world == "gen":
            bound.zero_padding()
        if self._before_reads is not None:
            self._before_reads()
            writes = WriteCounts.of(writes.tensors)
        run = connection.thread.start(in_callers_context(executor.run, bound.device))
        try:
            while not wait([run], LOOK_S).done:
                failure = connection.rendezvous.failure(phase)
                if failure and not wait([run], NOTICE_S).done:
                    raise SessionFailed(failure)
            stages = run.result()
        finally:
            del run  # it keeps its error, whose traceback would keep it in turn
        if self.world == "train":
            whole.check_unwritten(writes)
        return stages

    @cached_property
    def _pairs(self) -> Mapping[str, tuple[str, str]]:
        return self._schedule.pair_names()

    def _own_kv_scales(self, rendezvous: Rendezvous, phase: str, scales: Mapping[str, float]) -> dict[str, float]:
        """This rank's part of `scales`. Collective: it raises unless each of them belongs to some generation rank."""
        with _Published(rendezvous, phase, self._end):
            names = None if self._kv_scale_names is None else self._kv_scale_names()
            lacks = None if names is None else [number for number, name in enumerate(scales) if name not in names]
            words = rendezvous.gather(phase, {"lacks": lacks} if self.world == "gen" else {}, parse=parse_word)
        check_kv_names(words, scales)
        return {name: scale for name, scale in scales.items() if name in (names or ())}

    def _live_tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors

    def _bind(self) -> tuple[Transport, BoundSchedule | None]:
        tensors, schedule = self._live_tensors(), self._schedule
        devices = [tensors[local.name].device.type for local in schedule.tensors if local.name in tensors]
        transport = resolve(self._options.transport, devices[0] if devices else "cpu")
        if (transport.connect is None or schedule.misc) and not self._moves_by_name:
            route = f"{len(schedule.misc)} parameters on the misc route" if transport.connect else transport.name
            missing = f"{route}, and no function to move whole tensors by name was given: {self.by_name}="
            raise BindError(self.rank_name, [missing])
        return transport, bind(schedule, tensors) if transport.connect else None

    def _connect(self, rendezvous: Rendezvous, transport: Transport, bound: BoundSchedule | None) -> _Connection:
        group = connect_group(rendezvous.store_for("gloo"), self._schedule, self._options.timeout_s)
        if bound is None or transport.connect is None:
            return _Connection(rendezvous, transport, group, [_Program(EVERYTHING, None)], DeadlineThread("refit"))
        bound_by_name = {transport.name: bound}
        try:
            if self._schedule.later is not None:
                bound_by_name[f"{transport.name}-later"] = bound.part(self._schedule.later)
            contexts = [
                TransportContext(
                    rendezvous.store_for(name),
                    partial(rendezvous.store_for, name, connect=True),
                    group,
                    part,
                    self._options,
                )
                for name, part in bound_by_name.items()
            ]
            executors = connect_all(map(transport.connect, contexts))
        except BaseException:
            group.close()
            raise
        programs = [
            _Program(moved, part.schedule.misc, part, executor)
            for moved, part, executor in zip((EVERYTHING, TRAINABLE), bound_by_name.values(), executors, strict=False)
        ]
        return _Connection(rendezvous, transport, group, programs, DeadlineThread("refit"))

    def _end(self, error: BaseException) -> None:
        self._ended = f"the session ended with: {error}"
        self.close()

    def _tree(self) -> Tree:
        """Training rank 0 is the root; generation ranks follow."""
        names = group_names(self._schedule)
        ranks = (0, *range(self._schedule.train_ranks, len(names)))
        position = self._schedule.rank + 1 if self.world == "gen" else 0
        return Tree(position, ranks, tuple(names[rank] for rank in ranks))


class TrainEndpoint(_Endpoint):
    """A training rank's end of a session.

    - `tensors`: the rank's parameters by the names of `schedule.tensors`, or a function that returns them, for a model
      that may replace its parameters.
    - `export(names)` yields (HF name, whole tensor) for each of `names`, or for the whole model if None. All training
      ranks call it together, so it may run collectives. It must yield everything on training rank 0.
    - `store`: a TCPStore or its "host:port"; `close` says how long it must stay up.
    - `before_reads()` derives some of `tensors` from others. Each refit calls it once all ranks have begun, but not under
      golden, which exports. All training ranks call it together, so it may run collectives.
    - `check_layout()` raises where the rank keeps its tensors otherwise than the plan says; `prepare` calls it.
    - `rank_name` is as in "train:0"; `committed_version` the last version that all ranks acknowledged, None before it.

    On CUDA, weights must be complete on the current stream of their device when `refit` is called. A generation rank's
    current stream must be done with the old weights, or wait for the streams that use them. When `refit` returns, all
    streams see the new bytes.
    """

    world: World = "train"
    by_name = "export"

    def __init__(
        self,
        schedule: Schedule,
        tensors: LiveTensors,
        *,
        store: TCPStore | str,
        export: Export | None = None,
        before_reads: Callable[[], Any] | None = None,
        check_layout: Callable[[], None] | None = None,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        super().__init__(schedule, tensors, store, options, check_layout)
        self._export = export
        self._before_reads = before_reads
        self._moves_by_name = export is not None

    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        assert self._export is not None, "prepare() has checked it"
        exported = iter(self._export(names))
        # An export runs collectives: a rank that left it half-way would hang the others.
        afterwards.callback(exhaust, exported)
        if self._schedule.rank == 0:
            return broadcast(group, self._tree(), check_stream(names, exported, self._pairs, "export yielded"))
        exhaust(exported)
        return 0


class GenerationEndpoint(_Endpoint):
    """A generation rank's end of a session.

    - `tensors`: the live engine's parameters by the names of `schedule.tensors`, written in place. A parameter that
      nothing in the plan fills is refused.
    - `load_weights(pairs)`: the engine's own loader. It gets (HF name, whole CPU tensor) pairs and must read them all.
    - `after_direct_writes()` derives tensors from new weights. Each refit calls it once all weights are there, under
      golden too.
    - `kv_scale_names()`: the names of this rank's scales of the KV cache. `set_kv_scales(scales)` puts scales of these
      names where attention reads them. A refit that brings scales calls it last.

    The rest is as for `TrainEndpoint`.
    """

    world: World = "gen"
    by_name = "load_weights"

    def __init__(
        self,
        schedule: Schedule,
        tensors: LiveTensors,
        *,
        store: TCPStore | str,
        load_weights: Callable[[NamedTensors], Any] | None = None,
        after_direct_writes: Callable[[], Any] | None = None,
        set_kv_scales: SetKvScales | None = None,
        kv_scale_names: KvScaleNames | None = None,
        check_layout: Callable[[], None] | None = None,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        if (set_kv_scales is None) != (kv_scale_names is None):
            raise ValueError("give set_kv_scales and kv_scale_names together: a rank gets the scales that it names")
        super().__init__(schedule, tensors, store, options, check_layout)
        self._load_weights = load_weights
        self._moves_by_name = load_weights is not None
        self._after_direct_writes = after_direct_writes
        self._set_kv_scales = set_kv_scales
        self._kv_scale_names = kv_scale_names

    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        assert self._load_weights is not None, "prepare() has checked it"
        received = 0

        def count_bytes() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal received
            for name, tensor in check_stream(names, receive(group, self._tree()), self._pairs, "there arrived"):
                received += tensor.nbytes
                yield name, tensor

        tensors = count_bytes()
        self._load_weights(tensors)
        if unread := [name for name, _ in tensors]:
            left = f"load_weights left {len(unread)} tensors unread, first {unread[0]}"
            raise SessionError(f"{self.rank_name}: {left}; it must read them all")
        return received


class _Published:
    """Publish an error raised inside, then raise its cause: this error, or an earlier one of another rank.

    `end` is called with the cause. A class, not @contextmanager: contextlib's frames would keep a replaced exception,
    and the tensors in its traceback, alive.
    """

    def __init__(self, rendezvous: Rendezvous, phase: str, end: Callable[[BaseException], None]) -> None:
        self._rendezvous, self._phase, self._end = rendezvous, phase, end

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        try:
            if not isinstance(error, SessionFailed):  # this one came from the store: every rank knows its cause
                failure = self._rendezvous.fail(self._phase, error)
                if failure != Failure.of(self._rendezvous.rank_name, error) and isinstance(error, RefitError):
                    raise SessionFailed(failure) from error
        except BaseException as cause:
            self._end(cause)
            raise
        self._end(error)
