"""Ranks of a session in processes of their own, which do what a test tells them, one order at a time."""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import multiprocessing
import os
import re
import signal
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

import synthetic
import torch
from helpers.plans import Case

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import replica_ranks
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan

LIMIT_S = 60.0  # for one order, on a busy machine


@dataclass(frozen=True)
class Answer:
    """What a rank says after an order."""

    error: str | None  # "SessionError: ..."
    version: int | None  # of the report
    state: str  # as in "complete(3)"
    held: int | None  # the version that all bytes of an engine's rank are of; None: of no single one
    seconds: float
    replicas: tuple[int, ...] = ()  # of the report
    attempts: int = 0  # to refit, of this rank so far
    kept: dict[str, int] | None = None  # what the rank has made, and found kept
    opened: tuple[tuple[str, str], ...] = ()  # owners and handles of all memory it has ever mapped, over a fake memory
    mapped: int = 0  # allocations that are mapped now


class Remote:
    """A rank's process."""

    def __init__(self, target: Callable[..., None], *args: Any) -> None:
        context: Any = multiprocessing.get_context("fork")
        self._pipe, end_of_child = context.Pipe()
        self.process = context.Process(target=_serve, args=(end_of_child, target, *args), daemon=True)
        self.process.start()
        end_of_child.close()

    def tell(self, order: str, **arguments: Any) -> Remote:
        self._pipe.send((order, arguments))
        return self

    def answer(self, limit_s: float = LIMIT_S) -> Answer:
        if not self._pipe.poll(limit_s):
            for process in multiprocessing.active_children():
                os.kill(process.pid or 0, signal.SIGUSR1)  # each writes to stderr what it waits for
            time.sleep(1.0)
            raise AssertionError(f"no answer within {limit_s:g} s from process {self.process.pid}")
        answer: Answer = self._pipe.recv()
        return answer

    def has_answered(self, within_s: float = 0.0) -> bool:
        return bool(self._pipe.poll(within_s))

    def freeze(self) -> None:
        os.kill(self.process.pid, signal.SIGSTOP)

    def thaw(self) -> None:
        os.kill(self.process.pid, signal.SIGCONT)

    def kill(self) -> None:
        self.process.kill()
        self.process.join()


class Ranks:
    """Remote ranks by name, all of which end with the test."""

    def __init__(self, address: str, options: Options) -> None:
        self.address, self.options = address, options
        self.all: list[Remote] = []

    def train(self, case: Case, *, patch: Callable[[], None] | None = None) -> list[Remote]:
        """All ranks of a trainer that has just started."""
        ranks = range(case.plan().train.world)
        for rank in ranks:
            weights(case.plan(), "train", rank, 0)
        return [self._start(train, case, rank, patch) for rank in ranks]

    def gen(self, case: Case, rank: int, *, adopts: bool = True, patch: Callable[[], None] | None = None) -> Remote:
        weights(case.plan(), "gen", rank, 0)
        return self._start(generate, case, rank, adopts, patch)

    def _start(self, target: Callable[..., None], *args: Any) -> Remote:
        remote = Remote(target, self.address, self.options, *args)
        self.all.append(remote)
        return remote

    def __enter__(self) -> Ranks:
        return self

    def __exit__(self, *_: object) -> None:
        for remote in self.all:
            remote.kill()


def tell(remotes: Sequence[Remote], order: str, **arguments: Any) -> list[Answer]:
    """Give an order to several ranks, and wait for all answers."""
    for remote in remotes:
        remote.tell(order, **arguments)
    return [remote.answer() for remote in remotes]


_CONTENTS: dict[tuple[str, World, int], dict[str, torch.Tensor]] = {}  # of plans' ranks; forked processes inherit them


def weights(plan: Plan, world: World, rank: int, version: int) -> dict[str, torch.Tensor]:
    """What a rank holds of a version: a function of parameter and position alone, so it is the same on every mesh."""
    seat = rank if world == "train" else rank % replica_ranks(plan.gen)
    key = plan.digest, world, seat
    if key not in _CONTENTS:
        replicas = plan.gen.world // replica_ranks(plan.gen)
        schedule = RankOfPlan(plan, world, seat).schedule(range(replicas if world == "train" else 1))
        assert not schedule.padding and not schedule.misc
        _CONTENTS[key] = synthetic.allocate(schedule, torch.device("cpu"))
        synthetic.fill(plan, world, seat, _CONTENTS[key])
    tensors = {name: tensor.clone() for name, tensor in _CONTENTS[key].items()}
    for tensor in tensors.values():
        tensor.view(torch.uint8).bitwise_xor_(version % 251)
    return tensors


def train(address: str, options: Options, case: Case, rank: int, patch: Callable[[], None] | None) -> Any:
    if patch is not None:
        patch()
    plan = case.plan()
    if rank == 0:
        publish_plan(plan, address, options)
    tensors = weights(plan, "train", rank, 0)
    endpoint = TrainEndpoint(RankOfPlan(plan, "train", rank), lambda: tensors, store=address, options=options)

    def refit(version: int, **arguments: Any) -> Any:
        for name, tensor in weights(plan, "train", rank, version).items():
            tensors[name].copy_(tensor)
        return endpoint.refit(version, **arguments)

    return endpoint, {"refit": refit, "hold_interpreter": hold_interpreter}, lambda: None


def hold_interpreter(seconds: int) -> None:
    """Keep the interpreter's lock, as an extension does that computes without releasing it. No thread of Python runs."""
    ctypes.PyDLL(None).sleep(seconds)


def generate(
    address: str, options: Options, case: Case, rank: int, adopts: bool, patch: Callable[[], None] | None
) -> Any:
    if patch is not None:
        patch()
    plan = fetch_plan(address, options)
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights(plan, "gen", rank, 0).items()}
    own_mesh = plan.gen.tp, plan.gen.pp

    def adopt(newer: Plan) -> RankOfPlan:
        if (newer.gen.tp, newer.gen.pp) != own_mesh:
            raise ValueError(f"this engine has tp={own_mesh[0]}, and the new plan tp={newer.gen.tp}")
        return RankOfPlan(newer, "gen", rank)

    endpoint = GenerationEndpoint(
        RankOfPlan(plan, "gen", rank),
        lambda: tensors,
        store=address,
        options=options,
        adopt_plan=adopt if adopts else None,
    )

    def refit_on() -> Any:
        """Refit, and again where the trainer was found to have died: as an engine does while a trainer restarts."""
        while True:
            try:
                return endpoint.refit()
            except SessionError as error:
                if not re.search(r"train:\d+ \(process|has taken its place", str(error)):
                    raise

    base = weights(plan, "gen", rank, 0)

    def held() -> int | None:
        versions = [_bytes(tensors[name]) ^ _bytes(base[name]) for name in tensors]
        first = int(versions[0].reshape(-1)[0])
        return first if all(bool((each == first).all()) for each in versions) else None

    return endpoint, {"refit_on": refit_on, "look": lambda: None}, held


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(torch.uint8)


def _serve(pipe: Any, target: Callable[..., Any], *args: Any) -> None:
    torch.set_num_threads(1)
    faulthandler.register(signal.SIGUSR1, file=sys.__stderr__)
    logging.getLogger().handlers = [logging.NullHandler()]  # a thread of the parent may have held the lock of its own
    endpoint, orders, held = target(*args)
    with suppress(EOFError):
        while True:
            order, arguments = pipe.recv()
            start, error, report = time.monotonic(), None, None
            try:
                report = orders.get(order, getattr(endpoint, order, None))(**arguments)
            except (Exception, KeyboardInterrupt) as raised:
                error = f"{type(raised).__name__}: {raised}"
            seconds = time.monotonic() - start
            replicas = tuple(getattr(report, "replicas", ()))
            version = getattr(report, "version", None)
            attempts = endpoint.metrics()["refits"]["attempts"]
            kept = endpoint._kept
            opened, mapped = tuple(getattr(kept._memory, "opened", ())), len(getattr(kept._memory, "open", ()))
            answer = Answer(error, version, str(endpoint.state), held(), seconds, replicas, attempts)
            pipe.send(replace(answer, kept=dict(kept.counts), opened=opened, mapped=mapped))
    os._exit(0)
