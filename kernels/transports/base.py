"""The interface of transports: the record of one, its input when a session connects, and its reports."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.host import is_importable
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.planner.plan.schedule import Schedule

from .group_ranks import group_names, group_rank
from .kept import Kept
from .nccl.shared_gpus import SharedGpus

C = TypeVar("C")

_MODULES = {"nccl4py": "nccl", "cuda-core": "cuda.core", "cuda-bindings": "cuda.bindings"}


@dataclass(frozen=True, slots=True)
class TransportContext:
    """The input of a transport when it connects, which all ranks of the session do at the same time."""

    store: StoreKeys  # the transport's own keys; a FailFastStore in a session, as every store made over it should be
    group: GlooGroup  # every rank, for CPU messages
    bound: BoundSchedule
    options: Options
    kept: Kept | None = None  # of the rank, from its connections before; None: executors keep nothing
    shared: SharedGpus | None = None  # where ranks are, if some of both sides may share a GPU


@dataclass(frozen=True, slots=True)
class Transport:
    """A way to move a schedule's bytes. Golden has no `connect`: it moves whole tensors, by name."""

    name: str
    devices: frozenset[str]  # torch device types of the tensors it can move
    reach: str  # how far apart ranks may be
    unavailable_reason: Callable[[], str | None]  # why it cannot run on this machine; None: it can
    connect: Callable[[TransportContext], Executor] | None


class Executor(Protocol):
    """Runs a bound schedule, as often as its weights change."""

    @property
    def name(self) -> str:
        """The transports that it moves bytes by, as in "direct+nccl"."""

    @property
    def scratch_bytes(self) -> int: ...

    @property
    def written_bytes(self) -> int:
        """Bytes of the rank's own tensors that the last run may have written, at most; 0 before it wrote the first one."""

    @property
    def executed(self) -> tuple[Executed, ...]:
        """The host's copy of all tables that `run` walks, so that both ends of each pair can compare them."""

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once; return when all are in place. A session calls it on a thread of its own."""

    def close(self) -> None:
        """Free scratch and connections of its own; the session's group is not its own."""


class Queued(ABC):
    """Of an executor of a part that may begin, on the device, behind parts that have not ended."""

    @abstractmethod
    def queue(self) -> None:
        """Begin; do not wait. `run` then waits for the end."""


@dataclass(frozen=True, slots=True)
class StageReport:
    """Bytes of one rank in one stage, and the time from its first message's start to its last one's end."""

    pp_stage: int
    transfers: int
    buckets: int
    nbytes: int
    seconds: float
    start: float = 0.0  # time.perf_counter() of this process; 0: unknown


class StageClock:
    """First start and last end of each stage; stages overlap, so these do not add up to the whole."""

    def __init__(self, bound: BoundSchedule, buckets: Sequence[Bucket]) -> None:
        self._stages = bound.stages
        self._buckets = Counter(bucket.stage for bucket in buckets)
        self.reset()

    def reset(self) -> None:
        self._starts: dict[int, float] = {}
        self._ends: dict[int, float] = {}

    def started(self, stage: int) -> None:
        self._starts.setdefault(stage, time.perf_counter())

    def finished(self, stage: int) -> None:
        self._ends[stage] = time.perf_counter()

    def reports(self) -> tuple[StageReport, ...]:
        starts = self._starts
        seconds = {index: end - starts[index] for index, end in self._ends.items()}
        times = [(seconds.get(index, 0.0), starts.get(index, 0.0)) for index in range(len(self._stages))]
        return tuple(
            StageReport(stage.pp_stage, stage.transfers, self._buckets[index], stage.nbytes, *times[index])
            for index, stage in enumerate(self._stages)
        )


def merge_reports(reports: Sequence[tuple[StageReport, ...]]) -> tuple[StageReport, ...]:
    """The sums of several executors by stage. They run at the same time, so the slowest one's seconds count."""
    return tuple(
        StageReport(
            stage[0].pp_stage,
            sum(part.transfers for part in stage),
            sum(part.buckets for part in stage),
            sum(part.nbytes for part in stage),
            max(part.seconds for part in stage),
            min((part.start for part in stage if part.start), default=0.0),
        )
        for stage in zip(*reports, strict=True)
    )


def connect_all(executors: Iterable[Executor]) -> list[Executor]:
    """The executors, each of which connects when it is asked for. If one fails, those before it are closed."""
    connected: list[Executor] = []
    try:
        for executor in executors:
            connected.append(executor)
    except BaseException:
        close_all(connected)
        raise
    return connected


def connect_together(connects: Sequence[Callable[[], C]], device: torch.device | None) -> list[C]:
    """What these make at the same time, each on a thread of its own. If one fails, its error; the others are closed."""
    threads = ThreadPoolExecutor(len(connects), thread_name_prefix="relay")
    made = [threads.submit(in_callers_context(connect, device)) for connect in connects]
    threads.shutdown(wait=False)
    ended, _ = wait(made, return_when=FIRST_EXCEPTION)
    failures = [error for each in ended if (error := each.exception()) is not None]
    if failures:  # at once: the other one may wait for its deadline
        for each in made:
            each.add_done_callback(_close)
        raise failures[0]
    return [each.result() for each in made]


def _close(made: Future[Any]) -> None:
    if made.exception() is None:
        made.result().close()


def close_all(parts: Sequence[Any]) -> None:
    """Close all parts, also where one raises."""
    with ExitStack() as closing:
        for part in parts:
            closing.callback(part.close)


def connect_group(store: StoreKeys, schedule: Schedule, timeout_s: float) -> GlooGroup:
    """This rank's end of a group of all ranks of the session. Blocks until every rank has connected."""
    rank = group_rank(schedule, schedule.world, schedule.rank)
    return GlooGroup(store, rank, group_names(schedule), timeout_s=timeout_s)


def gpu_unavailable_reason(*packages: str) -> str | None:
    """Why a transport that needs these packages cannot move tensors on this machine's GPUs; None: it can."""
    if not torch.cuda.is_available():
        return "there is no CUDA device"
    missing = " and ".join(package for package in packages if not is_importable(_MODULES[package]))
    return f"{missing} not installed; from a clone of mcore-reshard: pip install '.[gpu]'" if missing else None
