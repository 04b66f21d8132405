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
from functools import cached_property
from typing import Any

import torch
from torch.distributed import TCPStore

from mcore_reshard import __version__
from mcore_reshard.kernels.copies.bind import BoundSchedule, WriteCounts, bind
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.errors import BindError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.deadline_thread import DeadlineThread
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.polling import LOOK_S, NOTICE_S
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed
from mcore_reshard.kernels.rendezvous.store import store_address
from mcore_reshard.kernels.transports.base import (
    Executor,
    StageReport,
    Transport,
    TransportContext,
    group_names,
    group_rank,
)
from mcore_reshard.kernels.transports.broadcast import Tree, broadcast, receive
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.planner.plan.schedule import Schedule, World

from .agreement import (
    agreed_kv_scales,
    check_alike,
    check_kv_names,
    check_versions,
    kv_names_word,
    kv_scales_word,
    parse_word,
)
from .published import Published
from .whole_tensors import NamedTensors, exactly, exhaust

PROTOCOL = 6  # of the ranks' words to each other; both worlds must speak the same
_CLOSED = "closed"

LiveTensors = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
Export = Callable[[Sequence[str] | None], NamedTensors]
LoadWeights = Callable[[NamedTensors], Any]
SetKvScales = Callable[[Mapping[str, float]], Any]
KvScaleNames = Callable[[], Collection[str]]


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What one rank did in one committed refit."""

    version: int
    transport: str  # what moved it, as in "direct+nccl"
    nbytes: int  # moved by the plan, sent or received by this rank
    misc_bytes: int  # whole tensors exported and loaded by name: the misc route, or everything under golden
    seconds: float  # from the call to the commit
    stages: tuple[StageReport, ...]


@dataclass(frozen=True, slots=True)
class _Connection:
    """`prepare` makes it and `close` undoes it."""

    rendezvous: Rendezvous
    transport: Transport
    group: GlooGroup
    bound: BoundSchedule | None  # None under golden
    executor: Executor | None
    caller: DeadlineThread  # the executor runs on its thread


class _Endpoint(ABC):
    """What both worlds do alike; see TrainEndpoint and GenerationEndpoint."""

    world: World
    by_name: str  # the argument with the function that moves whole tensors by name

    def __init__(self, schedule: Schedule, tensors: LiveTensors, store: TCPStore | str, options: Options) -> None:
        if schedule.world != self.world:
            raise ValueError(f"a {type(self).__name__} needs the schedule of a {self.world} rank, not {schedule.world}")
        self.rank_name = schedule.name
        self.committed_version: int | None = None
        self._schedule = schedule
        self._tensors = tensors
        self._store_address = store_address(store)
        self._options = options
        self._connection: _Connection | None = None
        self._ended: str | None = None  # why no refit is possible any more
        self._refits = 0

    def prepare(self, *, timeout_s: float | None = None) -> None:
        """Bind, meet all other ranks, compare what they were given, and connect. Call once, on every rank.

        `timeout_s` is how long to wait for ranks that are still starting; by default that of the options. Raises
        `BindError`, `TransportUnavailable` or `SessionError`; if one rank raises, all do.
        """
        if self._connection or self._ended:
            raise SessionError(f"{self.rank_name}: {self._ended or 'already prepared'}")
        self._ended = "prepare() failed"
        options, members = self._options, group_names(self._schedule)
        rendezvous = Rendezvous(
            self._store_address, options.session, self.rank_name, members, timeout_s=options.timeout_s
        )
        with Published(rendezvous, "hello"):
            transport, bound = self._bind()
        check_alike(rendezvous.gather("hello", self._hello(transport), parse=parse_word, timeout_s=timeout_s))
        self._connection = self._connect(rendezvous, transport, bound)
        with self._ends_on_error(rendezvous, "connected"):
            rendezvous.gather("connected", {})
        self._ended = None

    def refit(self, version: int, *, kv_scales: Mapping[str, float] | None = None) -> RefitReport:
        """Move the weights of `version` from the trainer to the engine; return once every rank has acknowledged it.

        `kv_scales` are calibrated scales of the engine's KV cache that belong to this version, by checkpoint name
        (`model.layers.0.self_attn.attn.k_scale`). Give them on training rank 0; other ranks may be given the same. Each
        generation rank hands those of its layers to `set_kv_scales`.

        All ranks of both worlds must call it with the same version, larger than the last: else all of them raise
        `VersionError`. Scales that no rank can take raise `KvScalesError`. After these two nothing has moved and the
        session goes on. Each wait ends with an error after `timeout_s`. Training weights may change again as soon as
        this returns.
        """
        connection = self._connected()
        start = time.perf_counter()
        self._refits += 1
        rendezvous, phase = connection.rendezvous, f"refit-{self._refits}"
        with self._ends_on_error(rendezvous, f"{phase}/start"):
            writes = connection.bound.check_fresh(self._live_tensors()) if connection.bound is not None else None
            word = {"version": version, **kv_scales_word(kv_scales)}
            words = rendezvous.gather(f"{phase}/start", word, parse=parse_word)
        check_versions(words, self.rank_name, self.committed_version)
        all_scales = agreed_kv_scales(words, self._schedule.name_of("train", 0))
        own_scales = self._own_kv_scales(rendezvous, f"{phase}/kv_scales", all_scales) if all_scales else {}
        stages: tuple[StageReport, ...] = ()
        exports = bool(self._schedule.misc)
        if exports:  # in collectives: no rank enters one while another's transfer has failed
            with self._ends_on_error(rendezvous, f"{phase}/bulk"):
                stages = self._move_bulk(connection, f"{phase}/bulk", writes)
                rendezvous.gather(f"{phase}/bulk", {})
        with ExitStack() as afterwards, self._ends_on_error(rendezvous, f"{phase}/commit"):
            if not exports:
                stages = self._move_bulk(connection, f"{phase}/commit", writes)
            misc_bytes = self._move_misc(connection, afterwards)
            self._finish_weights(own_scales)
            rendezvous.gather(f"{phase}/commit", {})
        self.committed_version = version
        nbytes = sum(stage.nbytes for stage in stages)
        seconds = time.perf_counter() - start
        moved_by = connection.executor.name if connection.executor else connection.transport.name
        return RefitReport(version, moved_by, nbytes, misc_bytes, seconds, stages)

    @property
    def scratch_bytes(self) -> int:
        """Memory that the transport holds besides the model, bound tensors excluded."""
        executor = self._connection.executor if self._connection else None
        return executor.scratch_bytes if executor else 0

    @property
    def failure(self) -> str | None:
        """Why the session ended, if an error ended it."""
        return None if self._ended in {None, _CLOSED} else self._ended

    def close(self) -> None:
        """Free connections and scratch. Peers that still wait for this rank get an error. May be called twice.

        After a committed refit it waits, 5 s at most, until all ranks know of the commit. The process may then end, also
        the one that hosts the store; a rank slower than that loses the store, and raises. After a failure it waits, 1 s
        at most, for the transport to end. A transport that does not end in time is freed when it does. The store must
        then stay up until all ranks have raised: they read the cause there.
        """
        connection, self._connection = self._connection, None
        if connection is not None and self._ended is None:
            connection.rendezvous.leave()
        self._ended = self._ended or _CLOSED
        if connection is None:
            return
        connection.group.close()
        executor, caller = connection.executor, connection.caller
        if executor is not None and caller.is_busy:
            # A run keeps what it uses until it ends; gloo's ends with the group.
            wait([caller.start(executor.close)], NOTICE_S)
        elif executor is not None:
            executor.close()

    @property
    @abstractmethod
    def _moves_by_name(self) -> bool:
        """Whether a function to move whole tensors by name was given."""

    @abstractmethod
    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        """Export or load the whole tensors `names` (None: of the whole model). Returns their bytes.

        `afterwards` runs when the outcome has been shared with all ranks, good or bad.
        """

    @abstractmethod
    def _kv_names(self) -> Collection[str] | None:
        """The names of this rank's scales of the KV cache; None on a rank that takes none."""

    @abstractmethod
    def _finish_weights(self, kv_scales: Mapping[str, float]) -> None:
        """Derive what follows from new weights, then set the scales of the KV cache."""

    def _move_bulk(self, connection: _Connection, phase: str, writes: WriteCounts | None) -> tuple[StageReport, ...]:
        """Move what the plan moves; nothing under golden. `writes` counts how often each tensor was written before."""
        bound, executor = connection.bound, connection.executor
        if bound is None or executor is None or writes is None:
            return ()
        if self.world == "gen":
            bound.zero_padding()
        stages = _run_attended(connection, executor, bound, phase)
        if self.world == "train":
            bound.check_unwritten(writes)
        return stages

    def _move_misc(self, connection: _Connection, afterwards: ExitStack) -> int:
        """Move what goes by name, under golden everything. Returns the bytes."""
        names = None if connection.executor is None else self._schedule.misc
        return self._move_by_name(connection.group, names, afterwards) if names is None or names else 0

    @cached_property
    def _pairs(self) -> Mapping[str, tuple[str, str]]:
        return self._schedule.pair_names()

    def _own_kv_scales(self, rendezvous: Rendezvous, phase: str, scales: Mapping[str, float]) -> dict[str, float]:
        """The scales that this rank is to set, once all ranks know that each of `scales` belongs to some rank."""
        with self._ends_on_error(rendezvous, phase):
            names = self._kv_names()
            word = kv_names_word(scales, names) if self.world == "gen" else {}
            words = rendezvous.gather(phase, word, parse=parse_word)
        check_kv_names(words, scales)
        return {name: scale for name, scale in scales.items() if name in (names or ())}

    def _live_tensors(self) -> Mapping[str, torch.Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors

    def _bind(self) -> tuple[Transport, BoundSchedule | None]:
        tensors, schedule = self._live_tensors(), self._schedule
        devices = [tensors[local.name].device.type for local in schedule.tensors if local.name in tensors]
        transport = resolve(self._options.transport, devices[0] if devices else "cpu")
        if (transport.connect is None or schedule.misc) and not self._moves_by_name:
            why = f"{len(schedule.misc)} parameters on the misc route" if transport.connect else transport.name
            raise BindError(
                self.rank_name, [f"{why}, and no function to move whole tensors by name was given: {self.by_name}="]
            )
        if transport.connect is None:
            return transport, None
        return transport, bind(schedule, tensors)

    def _connect(self, rendezvous: Rendezvous, transport: Transport, bound: BoundSchedule | None) -> _Connection:
        schedule = self._schedule
        with Published(rendezvous, "connected"):
            group = GlooGroup(
                rendezvous.store_for("gloo"),
                group_rank(schedule, schedule.world, schedule.rank),
                group_names(schedule),
                timeout_s=self._options.timeout_s,
            )
            try:
                executor = None
                if bound is not None and transport.connect is not None:
                    executor = transport.connect(
                        TransportContext(
                            store=rendezvous.store_for(transport.name),
                            another_store=lambda: rendezvous.another_store_for(transport.name),
                            group=group,
                            bound=bound,
                            options=self._options,
                        ),
                    )
            except BaseException:
                group.close()
                raise
        return _Connection(rendezvous, transport, group, bound, executor, DeadlineThread("refit"))

    def _hello(self, transport: Transport) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "digest": self._schedule.digest,
            "transport": transport.name,
            "bucket_bytes": self._options.bucket_bytes,
            "checksums": self._options.checksums,
            "train_ranks": self._schedule.train_ranks,
            "gen_ranks": self._schedule.gen_ranks,
            "package": __version__,
        }

    def _connected(self) -> _Connection:
        if self._connection is None:
            raise SessionError(f"{self.rank_name}: no refit is possible: {self._ended or 'prepare() was not called'}")
        return self._connection

    def _ends_on_error(self, rendezvous: Rendezvous, phase: str) -> Published:
        """An error in here is published, and the session is over."""
        return Published(rendezvous, phase, self._end)

    def _end(self, error: BaseException) -> None:
        self._ended = f"the session ended with: {error}"
        self.close()

    def _tree(self) -> Tree:
        """Training rank 0 is the root; generation ranks follow."""
        schedule = self._schedule
        gen = range(schedule.gen_ranks)
        return Tree(
            position=schedule.rank + 1 if schedule.world == "gen" else 0,
            ranks=(0, *(group_rank(schedule, "gen", rank) for rank in gen)),
            names=(schedule.name_of("train", 0), *(schedule.name_of("gen", rank) for rank in gen)),
        )


class TrainEndpoint(_Endpoint):
    """A training rank's end of a session.

    `tensors` are the rank's parameters by the names of `schedule.tensors`; give a function that returns them if the
    model may replace its parameters. `export(names)` yields (HF name, whole tensor) for each of `names`, or for the
    whole model if None. It is called on all training ranks at once, so it may run collectives, and it must yield
    everything on training rank 0. `store` is a TCPStore or its "host:port"; `close` says how long it must stay up.

    On CUDA, weights must be complete on the current stream of their device when `refit` is called; a generation rank's
    current stream must be done with the old ones, or wait for its other streams. When `refit` returns, the bytes have
    landed for every stream.
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
        options: Options = Options(),  # noqa: B008
    ) -> None:
        super().__init__(schedule, tensors, store, options)
        self._export = export

    @property
    def _moves_by_name(self) -> bool:
        return self._export is not None

    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        assert self._export is not None, "prepare() has checked it"
        exported = iter(self._export(names))
        # Training ranks are inside collectives of the same export: one that left it half-way would hang the others.
        afterwards.callback(exhaust, exported)
        if self._schedule.rank == 0:
            return broadcast(group, self._tree(), exactly(names, exported, self._pairs, "export yielded"))
        exhaust(exported)
        return 0

    def _kv_names(self) -> None:
        return None

    def _finish_weights(self, kv_scales: Mapping[str, float]) -> None:
        pass


class GenerationEndpoint(_Endpoint):
    """A generation rank's end of a session.

    `tensors` are the parameters of the live engine by the names of `schedule.tensors`; they are written in place. One
    that nothing fills is refused.
    `load_weights(pairs)` is the engine's own loader: it gets (HF name, whole CPU tensor) pairs and must read them all.
    `after_direct_writes()` is called in each refit once all weights are there, under golden too, before it is
    acknowledged: an engine that derives tensors from its weights derives them again there.
    `kv_scale_names()` are the names of this rank's scales of the KV cache. `set_kv_scales(scales)` is called last of
    all, with those of them that came with the refit, and puts them where attention reads them.
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
        load_weights: LoadWeights | None = None,
        after_direct_writes: Callable[[], Any] | None = None,
        set_kv_scales: SetKvScales | None = None,
        kv_scale_names: KvScaleNames | None = None,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        if (set_kv_scales is None) != (kv_scale_names is None):
            raise ValueError("give set_kv_scales and kv_scale_names together: a rank gets the scales that it names")
        super().__init__(schedule, tensors, store, options)
        self._load_weights = load_weights
        self._after_direct_writes = after_direct_writes
        self._set_kv_scales = set_kv_scales
        self._kv_scale_names = kv_scale_names

    @property
    def _moves_by_name(self) -> bool:
        return self._load_weights is not None

    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        assert self._load_weights is not None, "prepare() has checked it"
        received = 0

        def count_bytes() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal received
            for name, tensor in exactly(names, receive(group, self._tree()), self._pairs, "there arrived"):
                received += tensor.nbytes
                yield name, tensor

        tensors = count_bytes()
        self._load_weights(tensors)
        if unread := [name for name, _ in tensors]:
            raise SessionError(f"load_weights left {len(unread)} tensors unread, first {unread[0]}")
        return received

    def _kv_names(self) -> Collection[str] | None:
        return None if self._kv_scale_names is None else self._kv_scale_names()

    def _finish_weights(self, kv_scales: Mapping[str, float]) -> None:
        if self._after_direct_writes is not None:
            self._after_direct_writes()
        if kv_scales and self._set_kv_scales is not None:
            self._set_kv_scales(kv_scales)


def _run_attended(
    connection: _Connection, executor: Executor, bound: BoundSchedule, phase: str
) -> tuple[StageReport, ...]:
    """Run the executor on its own thread, and stop waiting for it once the store tells of any rank's failure.

    Connections tell it too, mostly sooner, but not always: gloo leaves a sender waiting whose peer closes while the
    message is being written.
    """
    run = connection.caller.start(in_callers_context(executor.run, bound.device))
    try:
        while not wait([run], LOOK_S).done:
            failure = connection.rendezvous.failure(phase)
            if failure and not wait([run], NOTICE_S).done:
                raise SessionFailed(failure)
        return run.result()
    finally:
        del run  # it keeps its error, whose traceback would keep it in turn
