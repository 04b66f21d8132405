"""Live refits: every training rank and every generation rank holds an endpoint, and they all refit together.

    train = TrainEndpoint(schedule, parameters, store="10.0.0.1:29600", export=bridge_export)
    train.prepare()                      # once: bind, meet the other ranks, compare plans, connect
    train.refit(version=step)            # after each optimizer step, on every rank of both worlds

A version is committed when every rank has acknowledged it. If any rank fails, all ranks raise, naming the same cause;
the session is then over, and what generation ranks hold may be a mixture of two versions.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch.distributed import TCPStore
from typing_extensions import Required, TypedDict, Unpack

from mcore_reshard import __version__
from mcore_reshard.kernels.copies.bind import BoundSchedule, WriteCounts, bind
from mcore_reshard.kernels.copies.buckets import DEFAULT_BUCKET_BYTES
from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.kernels.errors import BindError, RefitError, SessionError
from mcore_reshard.kernels.rendezvous.caller import Caller
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.meeting import Failure, Meeting, SessionFailed
from mcore_reshard.kernels.rendezvous.store import store_address
from mcore_reshard.kernels.transports.base import Transport, TransportContext
from mcore_reshard.kernels.transports.broadcast import Tree, broadcast, receive
from mcore_reshard.kernels.transports.joined import in_context_of, is_cuda
from mcore_reshard.kernels.transports.pipeline import Executor, StageReport, group_names, group_rank
from mcore_reshard.kernels.transports.registry import AUTO, resolve
from mcore_reshard.kernels.transports.rounds import DEFAULT_SCRATCH_BYTES
from mcore_reshard.planner.model.precision import FP8
from mcore_reshard.planner.plan.schedule import Schedule, World

from .agreement import (
    agreed_kv_scales,
    check_alike,
    check_kv_names,
    check_versions,
    kv_names_word,
    kv_scales_word,
)

PROTOCOL = 5  # what ranks say to each other; both worlds must speak the same
DEFAULT_TIMEOUT_S = 60.0
_EXPORT_PAIRS = "export must yield quantized pairs, see megatron_pairs.export_with_pairs"
_LOOK_S = 0.5  # between looks, while bytes move, at whether another rank has failed
_GRACE_S = 2.0  # for this rank's transport to notice that by itself

NamedTensors = Iterable[tuple[str, torch.Tensor]]
LiveTensors = Mapping[str, torch.Tensor] | Callable[[], Mapping[str, torch.Tensor]]
Export = Callable[[Sequence[str] | None], NamedTensors]
LoadWeights = Callable[[NamedTensors], Any]
SetKvScales = Callable[[Mapping[str, float]], Any]
KvScaleNames = Callable[[], Collection[str]]


class SessionOptions(TypedDict, total=False):
    """What both endpoints take besides their own. All but `ctas` and `timeout_s` are equal on all ranks of a session."""

    store: Required[TCPStore | str]  # or its "host:port"
    transport: str  # default: "auto"
    session: str  # its name on the store, default: "refit"; each name serves once
    timeout_s: float  # of every wait, default: 60
    bucket_bytes: int  # the largest message of gloo; nccl sets its own
    scratch_bytes: (
        int  # of device memory on each rank, default: 512 MiB; a bound for what nccl, and direct where it casts, stage
    )
    checksums: bool  # direct, nccl: compare what is written with what was read; gloo does in any case
    ctas: int | None  # direct: how many multiprocessors of its GPU a generation rank pulls with; None: 48


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
    """What `prepare` makes and `close` undoes."""

    meeting: Meeting
    transport: Transport
    group: GlooGroup
    bound: BoundSchedule | None  # None under golden
    executor: Executor | None
    caller: Caller  # of the executor


class _Endpoint(ABC):
    """What both worlds do alike; see TrainEndpoint and GenerationEndpoint."""

    world: World

    def __init__(
        self,
        schedule: Schedule,
        tensors: LiveTensors,
        *,
        store: TCPStore | str,
        transport: str = AUTO,
        session: str = "refit",
        timeout_s: float = DEFAULT_TIMEOUT_S,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
        checksums: bool = False,
        ctas: int | None = None,
        moves_by_name: bool,
        after_direct_writes: Callable[[], Any] | None = None,
        set_kv_scales: SetKvScales | None = None,
        kv_scale_names: KvScaleNames | None = None,
    ) -> None:
        if schedule.world != self.world:
            raise ValueError(f"a {type(self).__name__} needs the schedule of a {self.world} rank, not {schedule.world}")
        if ctas is not None and ctas < 1:
            raise ValueError(f"ctas must be at least 1, not {ctas}: it is what generation ranks pull with")
        if (set_kv_scales is None) != (kv_scale_names is None):
            raise ValueError("set_kv_scales and kv_scale_names go together: a rank is handed the scales that it names")
        self.rank = schedule.name
        self.committed_version: int | None = None
        self._schedule = schedule
        self._moves_by_name = moves_by_name
        self._after_direct_writes = after_direct_writes
        self._set_kv_scales = set_kv_scales
        self._kv_scale_names = kv_scale_names
        self._tensors = tensors
        self._store_address = store_address(store)
        self._transport = transport
        self._bucket_bytes = bucket_bytes
        self._scratch_bytes = scratch_bytes
        self._checksums = checksums
        self._ctas = ctas
        self._session = session
        self._timeout_s = timeout_s
        self._connection: _Connection | None = None
        self._ended: str | None = None  # why no refit is possible any more
        self._refits = 0

    def prepare(self, *, timeout_s: float | None = None) -> None:
        """Bind, meet all other ranks, compare what they were given, and connect. Call once, on every rank.

        `timeout_s` is how long to wait for ranks that are still starting; by default that of the endpoint. Raises
        `BindError`, `TransportUnavailable` or `SessionError`; if one rank raises, all do.
        """
        if self._connection or self._ended:
            raise SessionError(f"{self.rank}: {self._ended or 'already prepared'}")
        self._ended = "prepare() failed"
        meeting = Meeting(
            self._store_address, self._session, self.rank, group_names(self._schedule), timeout_s=self._timeout_s
        )
        with _Published(meeting, "hello"):
            transport, bound = self._bind()
        check_alike(meeting.gather("hello", self._hello(transport), timeout_s=timeout_s))
        self._connection = self._connected(meeting, transport, bound)
        with self._ends_on_error(meeting, "connected"):
            meeting.gather("connected", {})
        self._ended = None

    def refit(self, version: int, *, kv_scales: Mapping[str, float] | None = None) -> RefitReport:
        """Overlap the weights of `version` from the trainer to the engine; return once every rank has acknowledged it.

        `kv_scales`, given on training rank 0 and maybe on others too, are calibrated scales of the engine's KV cache that
        belong to this version, by checkpoint name (`model.layers.0.self_attn.attn.k_scale`); each generation rank hands
        those of its layers to `set_kv_scales`.

        All ranks of both worlds must call it with the same version, larger than the last: else all of them raise
        `VersionError`, and `KvScalesError` for scales that cannot land. Then nothing has moved and the session goes on.
        Each wait ends with an error after `timeout_s`. Training weights may change again as soon as this returns.
        """
        connection = self._ready()
        start = time.perf_counter()
        self._refits += 1
        meeting, phase = connection.meeting, f"refit-{self._refits}"
        with self._ends_on_error(meeting, f"{phase}/start"):
            before = connection.bound.check_fresh(self._live()) if connection.bound is not None else None
            words = meeting.gather(f"{phase}/start", {"version": version, **kv_scales_word(kv_scales)})
        check_versions(words, self.rank, self.committed_version)
        sent = agreed_kv_scales(words, self._schedule.name_of("train", 0))
        scales = self._own_kv_scales(meeting, f"{phase}/kv_scales", sent) if sent else {}
        stages: tuple[StageReport, ...] = ()
        exports = bool(self._schedule.misc)
        if exports:  # in collectives: no rank enters one while another's transfer has failed
            with self._ends_on_error(meeting, f"{phase}/bulk"):
                stages = self._move_bulk(connection, f"{phase}/bulk", before)
                meeting.gather(f"{phase}/bulk", {})
        with ExitStack() as afterwards, self._ends_on_error(meeting, f"{phase}/commit"):
            if not exports:
                stages = self._move_bulk(connection, f"{phase}/commit", before)
            misc_bytes = self._move_misc(connection, afterwards)
            if scales and self._set_kv_scales is not None:
                self._set_kv_scales(scales)
            meeting.gather(f"{phase}/commit", {})
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

    def close(self) -> None:
        """Free connections and scratch. Peers that still wait for this rank get an error. May be called twice.

        After a committed refit it waits, 5 s at most, until all ranks know of the commit: the process may then end, also
        the one that hosts the store; only a rank slower than that would lose the store, and raise. After a failure it
        waits, 2 s at most, for the transport to end; what one uses that does not is freed when it does. The store must
        then stay up until all ranks have raised: they read the cause there.
        """
        connection, self._connection = self._connection, None
        if connection is not None and self._ended is None:
            connection.meeting.leave()
        self._ended = self._ended or "closed"
        if connection is not None:
            connection.group.close()
            executor, caller = connection.executor, connection.caller
            if executor is not None and caller.is_busy:
                # With a run that keeps what it uses until it ends; gloo's ends with the group.
                wait([caller.start(executor.close)], _GRACE_S)
            elif executor is not None:
                executor.close()

    @abstractmethod
    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        """Export or load the whole tensors `names` (None: of the whole model). Returns their bytes.

        `afterwards` runs when the outcome has been shared with all ranks, good or bad.
        """

    def _move_bulk(self, connection: _Connection, phase: str, before: WriteCounts | None) -> tuple[StageReport, ...]:
        """Overlap what the plan moves, nothing under golden. `before` it each tensor was written so often."""
        bound, executor = connection.bound, connection.executor
        if bound is None or executor is None or before is None:
            return ()
        if self.world == "gen":
            bound.zero_padding()
        stages = _attended(connection, executor, bound, phase)
        if self.world == "train":
            bound.check_unwritten(before)
        return stages

    def _move_misc(self, connection: _Connection, afterwards: ExitStack) -> int:
        """Overlap what goes by name, under golden everything; then the engine derives what it derives. Returns the bytes."""
        names = None if connection.executor is None else self._schedule.misc  # None: all
        nbytes = 0
        if names is None or names:
            nbytes = self._move_by_name(connection.group, names, afterwards)
        if self._after_direct_writes is not None:
            self._after_direct_writes()
        return nbytes

    def _exactly(
        self, names: Sequence[str] | None, tensors: NamedTensors, verb: str
    ) -> Iterator[tuple[str, torch.Tensor]]:
        """Pass `tensors` through; raise `SessionError` unless they are `names`, each once. None: any, each once.

        Of what the engine keeps quantized, data and scales come together and in its dtypes: its loader would narrow
        unquantized weights without a word, and leave their scales as they were.
        """
        wanted = None if names is None else set(names)
        pairs = self._pairs if wanted is None else {name: self._pairs[name] for name in wanted & self._pairs.keys()}
        dtypes = dict.fromkeys(pairs, FP8) | dict(pairs.values())
        seen: set[str] = set()
        for name, tensor in tensors:
            if name in seen or (wanted is not None and name not in wanted):
                raise SessionError(f"{verb} {name} {'twice' if name in seen else 'unasked'}")
            if (dtype := dtype_name(tensor.dtype)) != dtypes.get(name, dtype):
                raise SessionError(f"{verb} {name} in {dtype}, the engine keeps it in {dtypes[name]}: {_EXPORT_PAIRS}")
            seen.add(name)
            yield name, tensor
        if missing := (wanted or set()) - seen:
            raise SessionError(
                f"{verb} {len(seen)} of {len(wanted or ())} tensors, without {', '.join(sorted(missing))}"
            )
        if alone := [weight for weight, (scales, _) in pairs.items() if (weight in seen) != (scales in seen)]:
            raise SessionError(
                f"{verb} {len(alone)} weights without scales or the other way round, first {alone[0]}: {_EXPORT_PAIRS}"
            )

    @cached_property
    def _pairs(self) -> Mapping[str, tuple[str, str]]:
        return self._schedule.pair_names()

    def _own_kv_scales(self, meeting: Meeting, phase: str, scales: Mapping[str, float]) -> dict[str, float]:
        """Those of the scales that are this rank's to set, once all ranks know that each of them is some rank's."""
        with self._ends_on_error(meeting, phase):
            names = self._kv_scale_names() if self._kv_scale_names is not None else None
            words = meeting.gather(phase, kv_names_word(scales, names) if self.world == "gen" else {})
        check_kv_names(words, scales)
        return {name: scale for name, scale in scales.items() if name in (names or ())}

    def _live(self) -> Mapping[str, torch.Tensor]:
        return self._tensors() if callable(self._tensors) else self._tensors

    def _bind(self) -> tuple[Transport, BoundSchedule | None]:
        tensors = self._live()
        held = [tensors[local.name].device.type for local in self._schedule.tensors if local.name in tensors]
        transport = resolve(self._transport, held[0] if held else "cpu")
        if (transport.connect is None or self._schedule.misc) and not self._moves_by_name:
            why = f"{len(self._schedule.misc)} parameters on the misc route" if transport.connect else transport.name
            option = "export" if self.world == "train" else "load_weights"
            raise BindError(self.rank, [f"{why}, and no function to move whole tensors by name was given: {option}="])
        if transport.connect is None:
            return transport, None
        return transport, bind(self._schedule, tensors, bucket_bytes=self._bucket_bytes)

    def _connected(self, meeting: Meeting, transport: Transport, bound: BoundSchedule | None) -> _Connection:
        schedule = self._schedule
        with _Published(meeting, "connected"):
            group = GlooGroup(
                meeting.shelf("gloo"),
                group_rank(schedule, schedule.world, schedule.rank),
                group_names(schedule),
                timeout_s=self._timeout_s,
            )
            try:
                executor = None
                if bound is not None and transport.connect is not None:
                    executor = transport.connect(
                        TransportContext(
                            store=meeting.shelf(transport.name),
                            another_store=lambda: meeting.another_shelf(transport.name),
                            group=group,
                            bound=bound,
                            timeout_s=self._timeout_s,
                            scratch_bytes=self._scratch_bytes,
                            checksums=self._checksums,
                            ctas=self._ctas,
                        ),
                    )
            except BaseException:
                group.close()
                raise
        return _Connection(meeting, transport, group, bound, executor, Caller("refit"))

    def _hello(self, transport: Transport) -> dict[str, Any]:
        return {
            "protocol": PROTOCOL,
            "digest": self._schedule.digest,
            "transport": transport.name,
            "bucket_bytes": self._bucket_bytes,
            "checksums": self._checksums,
            "train_ranks": self._schedule.train_ranks,
            "gen_ranks": self._schedule.gen_ranks,
            "package": __version__,
        }

    def _ready(self) -> _Connection:
        if self._connection is None:
            raise SessionError(f"{self.rank}: no refit is possible: {self._ended or 'prepare() was not called'}")
        return self._connection

    def _ends_on_error(self, meeting: Meeting, phase: str) -> _Published:
        """An error in here is every rank's: it is published, and the session is over."""
        return _Published(meeting, phase, self._end)

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
    whole model if None; it is called on all training ranks at once, so it may run collectives, and it must yield
    everything on training rank 0. `store` is a TCPStore or its "host:port"; `close` says how long it must stay up.
    `session` names this session on it. The other options are those of `SessionOptions`.

    On CUDA, weights must be complete on the current stream of their device when `refit` is called; a generation rank's
    current stream must be done with the old ones, or wait for its other streams. When `refit` returns, the bytes have
    landed for every stream.
    """

    world: World = "train"

    def __init__(
        self,
        schedule: Schedule,
        tensors: LiveTensors,
        *,
        export: Export | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(schedule, tensors, moves_by_name=export is not None, **options)
        self._export = export

    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        assert self._export is not None, "prepare() has checked it"
        exported = iter(self._export(names))
        # Training ranks are inside collectives of the same export: one that left it half-way would hang the others.
        afterwards.callback(_exhaust, exported)
        if self._schedule.rank == 0:
            return broadcast(group, self._tree(), self._exactly(names, exported, "export yielded"))
        _exhaust(exported)
        return 0


class GenerationEndpoint(_Endpoint):
    """A generation rank's end of a session.

    `tensors` are the parameters of the live engine by the names of `schedule.tensors`; they are written in place. One that
    nothing fills is refused.
    `load_weights(pairs)` is the engine's own loader: it gets (HF name, whole CPU tensor) pairs and must read them all.
    `after_direct_writes()` is called in each refit once all weights are there, under golden too, before it is acknowledged:
    an engine that derives tensors from its weights derives them again there. `kv_scale_names()` are the names of this rank's scales
    of the KV cache; `set_kv_scales(scales)` gets, last of all, those of them that came with the refit, and puts them where
    attention reads them. The rest is as for `TrainEndpoint`.
    """

    world: World = "gen"

    def __init__(
        self,
        schedule: Schedule,
        tensors: LiveTensors,
        *,
        load_weights: LoadWeights | None = None,
        after_direct_writes: Callable[[], Any] | None = None,
        set_kv_scales: SetKvScales | None = None,
        kv_scale_names: KvScaleNames | None = None,
        **options: Unpack[SessionOptions],
    ) -> None:
        super().__init__(
            schedule,
            tensors,
            moves_by_name=load_weights is not None,
            after_direct_writes=after_direct_writes,
            set_kv_scales=set_kv_scales,
            kv_scale_names=kv_scale_names,
            **options,
        )
        self._load_weights = load_weights

    def _move_by_name(self, group: GlooGroup, names: Sequence[str] | None, afterwards: ExitStack) -> int:
        assert self._load_weights is not None, "prepare() has checked it"
        received = 0

        def counted() -> Iterator[tuple[str, torch.Tensor]]:
            nonlocal received
            for name, tensor in self._exactly(names, receive(group, self._tree()), "there arrived"):
                received += tensor.nbytes
                yield name, tensor

        tensors = counted()
        self._load_weights(tensors)
        if unread := [name for name, _ in tensors]:
            raise SessionError(f"load_weights left {len(unread)} tensors unread, first {unread[0]}")
        return received


def _attended(connection: _Connection, executor: Executor, bound: BoundSchedule, phase: str) -> tuple[StageReport, ...]:
    """Run the executor on a thread of its own, up to the first failure of any rank, which the store tells.

    The connections tell it as well, and as a rule before, but not always: gloo leaves a sender waiting whose peer
    closes while the message is being written.
    """
    stream = torch.cuda.current_stream(bound.device) if is_cuda(bound.device) else None
    run = connection.caller.start(in_context_of(stream, executor.run))
    try:
        while not wait([run], _LOOK_S).done:
            failure = connection.meeting.failure(phase)
            if failure and not wait([run], _GRACE_S).done:
                raise SessionFailed(failure)
        return run.result()
    finally:
        del run  # it keeps its error, whose traceback would keep it in turn


def _exhaust(tensors: NamedTensors) -> None:
    for _ in tensors:
        pass


class _Published:
    """Tells the other ranks of an error in here, and raises its cause: this error, or another rank's that led to it.

    `end` is called with that. No generator: an error that another one replaces would keep itself alive, through the frames
    of contextlib.
    """

    def __init__(self, meeting: Meeting, phase: str, end: Callable[[BaseException], None] = lambda error: None) -> None:
        self._meeting, self._phase, self._end = meeting, phase, end

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        try:
            self._tell(error)
        except BaseException as cause:
            self._end(cause)
            raise
        self._end(error)

    def _tell(self, error: BaseException) -> None:
        if isinstance(error, SessionFailed):
            return  # everyone has been told
        failure = self._meeting.fail(self._phase, error)
        if failure != Failure.of(self._meeting.rank, error) and isinstance(error, RefitError):
            raise SessionFailed(failure) from error
