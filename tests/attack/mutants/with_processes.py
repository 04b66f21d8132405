"""Mutants of live sessions: real processes, real endpoints, one of which misbehaves."""

from __future__ import annotations

import gc
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

import numpy as np
import torch
from helpers.gloo import connecting
from helpers.handmade import allocate
from helpers.plans import Case
from helpers.ranks import Outcome, run_ranks
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.gloo import DEFAULT_SLOTS, GlooExecutor
from mcore_reshard.kernels.transports.group_ranks import peer_group_rank
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.session.endpoints import GenerationEndpoint, RefitReport, TrainEndpoint

from .edits import sealed, transfer_groups_of, without_transfers
from .records import Mutant, Rejection

CASE = Case("tiny-llama", "tp=2", "tp=1")  # two training ranks, one generation rank
WORLDS = (2, 1)
BUCKET_BYTES = 8192
TIMEOUT_S = 4.0

_found: list[Mutant] = []


@cache
def with_misc() -> Plan:
    """The plan with lm_head on the misc route."""
    plan = CASE.plan()
    (group,) = {plan.transfer_groups[i].group for i in transfer_groups_of(plan, Role.LM_HEAD)}
    return sealed(
        replace(
            without_transfers(plan, transfer_groups_of(plan, Role.LM_HEAD)),
            misc=(UnplannedGroup(group, "a test"),),
        )
    )


@dataclass
class Rank:
    """One rank of a session, with everything that a mutant may change before it starts."""

    train: bool
    number: int
    plan: Plan = field(default_factory=CASE.plan)
    executor: Callable[..., GlooExecutor] = GlooExecutor
    bucket_bytes: int = BUCKET_BYTES
    versions: Sequence[int] = (1, 2)
    before_refit: Callable[[Rank, int], None] = lambda rank, version: None
    after_refit: Callable[[Rank, int], None] = lambda rank, version: None
    after_writes: Callable[[], None] = lambda: None
    export: Callable[[Sequence[str] | None], Iterator[tuple[str, torch.Tensor]]] | None = None
    load_weights: Callable[[Any], None] = lambda tensors: [None for _ in tensors]  # type: ignore[assignment, return-value]
    tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    watched: list[Any] = field(default_factory=list)

    def run(self, address: str) -> list[Any]:
        """Prepare and refit; what `before_refit` left in `watched`."""
        world: Any = "train" if self.train else "gen"
        schedule = schedule_of(self.plan, world, self.number)
        self.tensors = allocate(schedule, seed=1) if self.train else allocate(schedule)
        gloo = registry.resolve("gloo", "cpu")
        registry.register(replace(gloo, name="gloo-mutant", connect=connecting(self.executor)))
        common: dict[str, Any] = {
            "store": address,
            "options": Options(transport="gloo-mutant", bucket_bytes=self.bucket_bytes, timeout_s=TIMEOUT_S),
        }
        endpoint: Any
        if self.train:
            endpoint = TrainEndpoint(schedule, lambda: self.tensors, export=self.export or self._export, **common)
        else:
            endpoint = GenerationEndpoint(
                schedule, lambda: self.tensors, load_weights=self.load_weights,
                after_direct_writes=self.after_writes, **common,
            )  # fmt: skip
        endpoint.prepare()
        for version in self.versions:
            self.before_refit(self, version)
            committed = endpoint.committed_version
            try:
                report: RefitReport = endpoint.refit(version)
            except BaseException:
                assert endpoint.committed_version == committed, "a failed refit is reported as committed"
                raise
            assert report.version == endpoint.committed_version == version
            self.after_refit(self, version)
        self.before_refit(self, 0)
        endpoint.close()
        return self.watched

    def _export(self, names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        for name in names or ():
            yield name, torch.zeros(4, 4)


def outcomes_of(change: Callable[[Rank], None]) -> list[Outcome]:
    def run(number: int, address: str) -> list[Any]:
        train = number < WORLDS[0]
        rank = Rank(train, number if train else number - WORLDS[0])
        change(rank)
        return rank.run(address)

    return run_ranks(sum(WORLDS), run, timeout_s=20.0)


def session(bug: int, what: str, layer: str, rule: str):  # type: ignore[no-untyped-def]
    """Register a change to ranks; every rank must then raise, at least one of them `rule`."""

    def register(change: Callable[[Rank], None]) -> None:
        def refused() -> Rejection | None:
            outcomes = outcomes_of(change)
            if any(outcome.kind is None for outcome in outcomes):
                return None  # a rank believes that all went well
            first = next((outcome for outcome in outcomes if outcome.kind == rule), outcomes[0])
            message = " ".join(str(first.error).split())
            told = " ".join(str(outcome.error) for outcome in outcomes)  # the others are told whose error it was
            return Rejection(layer, str(first.kind), _parameter(message), _ranks(message) or _ranks(told), message)

        _found.append(Mutant(bug, what, (layer, rule), refused))

    return register


def _parameter(message: str) -> str:
    words = [word.strip(",:;()") for word in message.split()]
    return next((word for word in words if word.startswith(("model.", "lm_head", "vp0."))), "all parameters")


def _ranks(message: str) -> str:
    words = [word.strip(",:;()") for word in message.split()]
    return ", ".join(dict.fromkeys(word for word in words if word.startswith(("train:", "gen:"))))


def _raise(error: Exception) -> Callable[..., Any]:
    def harm(*_: Any) -> None:
        raise error

    return harm


# --- what ranks were given


@session(2, "the receiver packs by another order of the plan", "session", "SessionError")
def _(rank: Rank) -> None:
    if not rank.train:
        rank.plan = sealed(replace(rank.plan, transfer_groups=rank.plan.transfer_groups[::-1]))


@session(11, "trainer and engine route by different policies", "session", "SessionError")
def _(rank: Rank) -> None:
    if not rank.train:
        rank.plan = with_misc()


@session(19, "one training rank works from the plan of an earlier run", "session", "SessionError")
def _(rank: Rank) -> None:
    if rank.train and rank.number == 1:
        rank.plan = replace(CASE, train="tp=2,dp=1", changes=(("intermediate_size", 64),)).plan()


@session(19, "one training rank believes in its cache and does not come", "session", "SessionFailed")
def _(rank: Rank) -> None:
    if rank.train and rank.number == 1:
        rank.before_refit = _raise(LookupError("the plan is cached, this rank does not come"))


@session(30, "buckets of other sizes on the two sides", "session", "SessionError")
def _(rank: Rank) -> None:
    rank.bucket_bytes = 4096 if rank.train else 8192


# --- what the wire does


class Misnumbered(GlooExecutor):
    """Sends its second bucket under the number of its first."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        super()._pack(bucket, message)
        if self._buckets.index(bucket) == 1:
            message[12:16] = 0


class Reversed(GlooExecutor):
    """Takes the last bucket first, and waits for it before any other."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self._buckets: tuple[Bucket, ...] = self._buckets[::-1]

    def _start(self, bucket: Bucket, slot: torch.Tensor) -> Any:
        """Into all of the slot: gloo ends a process whose buffer is too small for a message."""
        return self._group.recv(slot, peer_group_rank(self._bound.schedule, bucket.peer), bucket.waiting)


class Hasty(GlooExecutor):
    """Unpacks while the bucket may still be arriving."""

    def _finish(self, bucket: Bucket, slot: torch.Tensor, message: Any) -> None:
        slot.zero_()
        self._unpack(bucket, slot[: 16 + bucket.nbytes].numpy())
        super()._finish(bucket, slot, message)


class Overwriting(GlooExecutor):
    """Packs the next bucket into the memory of the one in flight."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        super()._pack(bucket, message)
        if self._buckets.index(bucket) == 1:
            message[16:] = ~message[16:]


@session(2, "a bucket is sent in the place of another", "transport", "ChecksumError")
def _(rank: Rank) -> None:
    rank.executor = Misnumbered if rank.train and rank.number == 0 else GlooExecutor


@session(20, "the engine waits for the last bucket first", "transport", "ChecksumError")
def _(rank: Rank) -> None:
    rank.executor = GlooExecutor if rank.train else Reversed


@session(27, "a bucket is unpacked before it has arrived", "transport", "ChecksumError")
def _(rank: Rank) -> None:
    rank.executor = GlooExecutor if rank.train else Hasty


@session(27, "a bucket is overwritten after its checksum was taken", "transport", "ChecksumError")
def _(rank: Rank) -> None:
    rank.executor = Overwriting if rank.train and rank.number == 1 else GlooExecutor


# --- what a refit is told


@session(24, "the engine fails to derive its weights after they were written", "session", "RuntimeError")
def _(rank: Rank) -> None:
    rank.after_writes = _raise(RuntimeError("gen:0: model.layers.0: process_weights_after_loading failed"))


@session(24, "a training rank dies when all its bytes are sent", "session", "SessionFailed")
def _(rank: Rank) -> None:
    class Dying(GlooExecutor):
        def run(self) -> Any:
            super().run()
            os._exit(1)

    rank.executor = Dying if rank.train and rank.number == 1 else GlooExecutor


@session(24, "the engine's loader returns early", "session", "SessionError")
def _(rank: Rank) -> None:
    rank.plan = with_misc()
    rank.load_weights = lambda tensors: None


@session(26, "the export leaves out a parameter of the misc route", "session", "SessionError")
def _(rank: Rank) -> None:
    rank.plan = with_misc()
    rank.export = lambda names: iter(())


@session(28, "the trainer is one version ahead of the engine", "session", "VersionError")
def _(rank: Rank) -> None:
    rank.versions = (2,) if rank.train else (1,)


@session(28, "a version is refitted again with other weights", "session", "VersionError")
def _(rank: Rank) -> None:
    rank.versions = (3, 3)


class Training(GlooExecutor):
    """Steps the optimizer while buckets are still being packed."""

    def _pack(self, bucket: Bucket, message: NDArray[np.uint8]) -> None:
        super()._pack(bucket, message)
        if self._buckets.index(bucket) == 1:
            for tensor in self._bound.tensors:
                tensor.view(torch.int16).add_(1)


@session(28, "the trainer steps its optimizer during a refit", "session", "TornWeightsError")
def _(rank: Rank) -> None:
    rank.executor = Training if rank.train and rank.number == 0 else GlooExecutor


@session(22, "an engine tensor is rebound between refits", "session", "StaleTensorError")
def _(rank: Rank) -> None:
    def rebind(rank: Rank, version: int) -> None:
        if version == 2 and not rank.train:
            name = next(name for name in rank.tensors if "qkv_proj" in name)
            rank.tensors[name] = rank.tensors[name].clone()

    rank.before_refit = rebind


# --- several refits, watched


def watched(bug: int, what: str, rule: str, watch: Callable[[Rank], None], harm: Callable[[Rank], None]) -> None:
    """Register a harm that no rank refuses: `watch` leaves in `Rank.watched` why the session is not as it should be."""

    def refused() -> Rejection | None:
        def change(rank: Rank) -> None:
            rank.versions = (1, 2, 3)
            harm(rank)
            watch(rank)

        for number, outcome in enumerate(outcomes_of(change)):
            if outcome.kind is not None:
                return Rejection("session", outcome.kind, "", f"{number}", str(outcome.error))
            if outcome.value:
                where = f"train:{number}" if number < WORLDS[0] else f"gen:{number - WORLDS[0]}"
                return Rejection("watch", rule, "all parameters", where, outcome.value[0])
        return None

    _found.append(Mutant(bug, what, ("watch", rule), refused))


def live_bytes() -> int:
    """Bytes of all tensors that are alive, each storage counted once."""
    gc.collect()
    storages = {}
    for held in gc.get_objects():
        if issubclass(type(held), torch.Tensor):
            storages[held.untyped_storage().data_ptr()] = held.untyped_storage().nbytes()
    return sum(storages.values())


def watch_memory(rank: Rank) -> None:
    """Live tensors are the same before every refit but the first."""
    gc.freeze()  # what the process was started with is not counted
    sizes: list[int] = []
    also = rank.before_refit

    def measure(rank: Rank, version: int) -> None:
        also(rank, version)
        if version != 1:
            sizes.append(live_bytes())
            if sizes[-1] > sizes[0]:
                rank.watched.append(f"{sizes[-1] - sizes[0]} bytes more alive after {len(sizes)} refits than after one")

    rank.before_refit = measure


def watch_scratch(rank: Rank) -> None:
    """Scratch is a few buckets, however large the model."""
    made, bound = rank.executor, DEFAULT_SLOTS * (BUCKET_BYTES + 64)

    def measured(*args: Any, **options: Any) -> GlooExecutor:
        executor = made(*args, **options)
        if executor.scratch_bytes > bound:
            rank.watched.append(f"{executor.scratch_bytes} bytes of scratch, the bound is {bound}")
        return executor

    rank.executor = measured


def watch_planning(rank: Rank) -> None:
    """From the first refit on, nothing is planned, scheduled or bound."""
    also = rank.before_refit
    plans = {"make_plan", "prove", "schedule_of", "bind", "cut_buckets"}

    def profile(frame: Any, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_name in plans:
            rank.watched.append(f"{frame.f_code.co_name} was called after the first refit began")

    def measure(rank: Rank, version: int) -> None:
        if version == 1:
            sys.setprofile(profile)
        if version == 0:
            sys.setprofile(None)
        also(rank, version)

    rank.before_refit = measure


class OneSlotEach(GlooExecutor):
    """Holds every bucket of the model at once."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options, slots=1 << 20)


def keep_clones(rank: Rank) -> None:
    kept: list[torch.Tensor] = []

    def clone(rank: Rank, version: int) -> None:
        kept.extend(tensor.clone() for tensor in rank.tensors.values())

    rank.before_refit = clone if not rank.train else rank.before_refit


def plan_again(rank: Rank) -> None:
    def again(rank: Rank, version: int) -> None:
        if version == 3 and rank.train:
            schedule_of(CASE.new_plan(), "train", rank.number)

    rank.before_refit = again


def hold_all(rank: Rank) -> None:
    rank.executor = OneSlotEach


WATCHES: tuple[Callable[[Rank], None], ...] = (watch_memory, watch_scratch, watch_planning)

watched(14, "the executor holds a slot for every bucket of the model", "scratch", watch_scratch, hold_all)
watched(15, "the engine keeps clones of what was written", "memory", watch_memory, keep_clones)
watched(31, "the trainer plans again in its third refit", "planning", watch_planning, plan_again)

SESSION_MUTANTS: tuple[Mutant, ...] = tuple(_found)
