"""Replicas die, leave and join between refits, and in them. Every committed version is bit-correct on every live replica."""

from __future__ import annotations

import json
import multiprocessing
import os
import random
import signal
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.plans import TWO_LAYERS, Case
from helpers.ranks import StoreProcess, store_process
from helpers.remote import weights

from mcore_reshard.kernels.errors import RefitError, SessionClosed
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan

CASE = Case("tiny-llama", "tp=2", "tp=1,dp=4", changes=TWO_LAYERS)
OPTIONS = Options(timeout_s=30.0)
LIMIT_S = 90.0  # for a refit or a join, on a busy machine


def weights_of(world: World, rank: int, version: int) -> dict[str, torch.Tensor]:
    return weights(CASE.plan(), world, rank, version)


def write(file: Path, value: Any) -> None:
    file.with_suffix(".new").write_text(json.dumps(value))
    file.with_suffix(".new").rename(file)


def train(rank: int, address: str, folder: Path, refits: int, pause_s: float) -> None:
    """Refit again and again; a refit that fails is made up for by the next one."""
    tensors = weights_of("train", rank, 0)
    endpoint = TrainEndpoint(RankOfPlan(CASE.plan(), "train", rank), lambda: tensors, store=address, options=OPTIONS)
    endpoint.prepare()
    failed, version, longest_s = [], 0, 0.0
    while version < refits:
        version += 1
        for name, tensor in weights_of("train", rank, version).items():
            tensors[name].copy_(tensor)
        start = time.monotonic()
        try:
            endpoint.refit(version)
        except RefitError as error:
            failed.append((version, str(error)))
        longest_s = max(longest_s, time.monotonic() - start)
        write(folder / f"train{rank}", {"version": version, "failed": failed, "longest_s": longest_s, "over": False})
        time.sleep(pause_s)
    endpoint.close()
    write(folder / f"train{rank}", {"version": version, "failed": failed, "longest_s": longest_s, "over": True})


def generate(replica: int, address: str, folder: Path, number: int, leave_after: int) -> None:
    """Take part until the trainer leaves; check every byte after each refit, and after joining."""
    tensors = {name: torch.zeros_like(tensor) for name, tensor in weights_of("gen", replica, 0).items()}
    endpoint = GenerationEndpoint(
        RankOfPlan(CASE.plan(), "gen", replica), lambda: tensors, store=address, options=OPTIONS
    )
    endpoint.prepare()
    seen: list[int] = []
    joined = endpoint.committed_version

    def check() -> None:
        state = endpoint.state
        if state.kind != "mixed" and state.version is not None:
            for name, expected in weights_of("gen", replica, state.version).items():
                assert torch.equal(tensors[name].view(torch.uint8), expected.view(torch.uint8)), (state, name)

    def report(error: str = "") -> None:
        write(folder / f"gen{number}", {"replica": replica, "seen": seen, "joined": joined, "error": error})

    check()
    report()
    try:
        while len(seen) < leave_after:
            try:
                seen.append(endpoint.refit().version)
            except SessionClosed:
                break
            except RefitError:
                time.sleep(0.01)
            check()
            report()
    except BaseException as error:
        report(f"{type(error).__name__}: {error}")
        raise
    endpoint.close()


class Processes:
    """Processes of a trainer and of replicas that come and go."""

    def __init__(self, store: StoreProcess, folder: Path) -> None:
        self.store, self.folder = store, folder
        for world, rank in (("train", 0), ("train", 1), ("gen", 0)):
            weights_of(world, rank, 0)  # once, for all that are forked from here
        self._context: Any = multiprocessing.get_context("fork")
        self.replicas: dict[int, tuple[int, Any]] = {}  # by replica: its number, its process
        self.trainer: list[Any] = []
        self.started = 0

    def start_trainer(self, refits: int, pause_s: float) -> None:
        for rank in range(2):
            self.trainer.append(self._start(train, rank, refits, pause_s))

    def start_replica(self, replica: int, leave_after: int = 1 << 30) -> int:
        number, self.started = self.started, self.started + 1
        self.replicas[replica] = number, self._start(generate, replica, number, leave_after)
        return number

    def kill(self, replica: int) -> None:
        _, process = self.replicas.pop(replica)
        os.kill(process.pid, signal.SIGKILL)
        process.join()

    def said(self, name: str) -> dict[str, Any]:
        file = self.folder / name
        return json.loads(file.read_text()) if file.exists() else {}

    def wait(self, condition: Any, what: str, limit_s: float = LIMIT_S) -> None:
        deadline = time.monotonic() + limit_s
        while not condition():
            assert time.monotonic() < deadline, f"{what} did not happen within {limit_s:g} s: {self.all_said()}"
            assert not any(self.said(f"gen{number}").get("error") for number in range(self.started)), self.all_said()
            time.sleep(0.02)

    def all_said(self) -> dict[str, Any]:
        return {file.name: json.loads(file.read_text()) for file in sorted(self.folder.glob("*[0-9]"))}

    def close(self) -> None:
        for process in [*self.trainer, *(process for _, process in self.replicas.values())]:
            process.kill()
            process.join()

    def _start(self, target: Any, rank: int, *args: Any) -> Any:
        process = self._context.Process(target=_run, args=(target, rank, self.store.address, self.folder, *args))
        process.start()
        return process


def _run(target: Any, *args: Any) -> None:
    torch.set_num_threads(1)
    try:
        target(*args)
    finally:
        os._exit(0)


def elastic(folder: Path, refits: int, seed: int, pause_s: float) -> dict[str, Any]:
    """Kill and add replicas in random order while a trainer refits; the end of all."""
    draw = random.Random(seed)
    with store_process() as store:
        world = Processes(store, folder)
        try:
            for replica in range(4):
                world.start_replica(replica)
            world.start_trainer(refits, pause_s)
            events = kills = 0

            def trainer_is_at(version: int) -> bool:
                return world.said("train0").get("version", 0) >= version or world.said("train0").get("over", False)

            world.wait(lambda: trainer_is_at(1), "the first refit")
            while not world.said("train0")["over"]:
                version = world.said("train0")["version"]
                time.sleep(draw.random() * 0.3)
                if len(world.replicas) > 2 and draw.random() < 0.5:
                    world.kill(draw.choice(sorted(world.replicas)))
                    kills += 1
                elif len(world.replicas) < 5:
                    world.start_replica(draw.choice([r for r in range(6) if r not in world.replicas]))
                events += 1
                world.wait(lambda before=version: trainer_is_at(before + 3), "three more refits")
            ended = [process for _, process in world.replicas.values()]
            world.wait(lambda: not any(process.is_alive() for process in ended + world.trainer), "the end")
            return {"events": events, "kills": kills, **world.all_said()}
        finally:
            world.close()


def test_replicas_are_killed_and_added_while_the_trainer_goes_on(tmp_path: Path) -> None:
    ends = elastic(tmp_path, refits=12, seed=2, pause_s=0.02)
    _check(ends, 12)


@pytest.mark.slow
def test_two_hundred_refits_while_replicas_come_and_go(tmp_path: Path) -> None:
    ends = elastic(tmp_path, refits=200, seed=2, pause_s=0.02)
    _check(ends, 200)


def _check(ends: dict[str, Any], refits: int) -> None:
    trainer = ends["train0"]
    assert trainer["version"] == refits and ends["events"] >= refits // 10
    failed = [version for version, _ in trainer["failed"]]
    assert len(failed) <= ends["kills"], (
        f"a death costs the others one refit at most, a start none: {trainer['failed']}"
    )
    assert not any({version, version + 1, version + 2} <= {*failed} for version in failed), failed
    committed = set(range(1, refits + 1)) - set(failed)
    for name, said in ends.items():
        if name.startswith("gen"):
            assert not said["error"], said
            assert set(said["seen"]) <= committed, f"{name} took a version that the trainer says has failed"


@pytest.mark.parametrize(("kills", "is_fine"), [(2, True), (1, False)])
def test_a_start_that_costs_a_refit_is_found(kills: int, is_fine: bool) -> None:
    told = [(2, "gen:1 has exited"), (6, "gen:3 did not come")]
    ends = {"events": 3, "kills": kills, "train0": {"version": 8, "failed": told}}
    if is_fine:
        _check(ends, 8)
        return
    with pytest.raises(AssertionError, match="a start none"):
        _check(ends, 8)


def test_a_new_replica_has_the_current_version_at_once(tmp_path: Path) -> None:
    with store_process() as store:
        world = Processes(store, tmp_path)
        try:
            for replica in range(4):
                world.start_replica(replica)
            world.start_trainer(3, pause_s=20.0)  # a long step: no refit brings the newcomer anything
            world.wait(lambda: world.said("train0").get("version") == 1, "the first refit")
            number = world.start_replica(4)
            world.wait(lambda: bool(world.said(f"gen{number}")), "the join", limit_s=15.0)
            assert world.said(f"gen{number}")["joined"] == 1
            assert world.said("train0")["version"] == 1, "the trainer went on with its step"
        finally:
            world.close()
