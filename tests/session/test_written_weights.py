"""Weights that change while a refit reads them, in sessions of real processes: no rank commits."""

from __future__ import annotations

import threading
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from helpers.gpu import needs_gpus
from helpers.handmade import End, HandTransfer, allocate, other_end_of, schedule_of
from helpers.ranks import Outcome, run_ranks, values

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.base import StageReport
from mcore_reshard.planner.plan.schedule import OtherEndView
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

WORLDS = (2, 1)
ELEMENTS = 1 << 20
NAMES = ("qkv", "fc1", "fc2")
TRANSFERS = [
    HandTransfer(
        rank,
        f"model.{rank}.{name}",
        "float32",
        (ELEMENTS,),
        End(rank, name, (ELEMENTS,), (0,), (0,)),
        End(0, f"{rank}.{name}", (ELEMENTS,), (0,), (0,)),
    )
    for rank in range(WORLDS[0])
    for name in NAMES
]


def flat_buffer(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    """Parameters whose `.data` points into one buffer, as in Megatron's DDP. Each counts writes for itself."""
    flat = torch.cat([tensor.reshape(-1) for tensor in tensors.values()])
    for number, name in enumerate(tensors):
        tensors[name] = torch.nn.Parameter(tensors[name])
        tensors[name].data = flat[number * ELEMENTS :][:ELEMENTS]
    return flat


class Writer:
    """A thread that writes a buffer, a little each time, until it is told to stop."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer
        self._started, self._stop = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True)

    def _write(self) -> None:
        while not self._stop.wait(0.002):
            self._buffer.add_(1)
            self._started.set()

    def __enter__(self) -> None:
        self._thread.start()
        self._started.wait()

    def __exit__(self, *error: object) -> None:
        self._stop.set()
        self._thread.join()


class WritesInAPull:
    """Where a GPU reads faster than a thread can be relied on to write: each pull begins with a write of the buffer."""

    def __init__(self, buffer: torch.Tensor) -> None:
        self._buffer = buffer

    def __enter__(self) -> None:
        from mcore_reshard.kernels.transports.direct.executor import DirectExecutor

        pull = DirectExecutor.run

        def write_and_pull(executor: DirectExecutor) -> tuple[StageReport, ...]:
            self._buffer.add_(1)
            return pull(executor)

        self._patch = mock.patch.object(DirectExecutor, "run", write_and_pull)
        self._patch.start()

    def __exit__(self, *error: object) -> None:
        self._patch.stop()


def refit_while_writing(rank: int, address: str, checks: str, device: str = "cpu") -> Any:
    world = "train" if rank < WORLDS[0] else "gen"
    schedule = schedule_of(TRANSFERS, world, rank if world == "train" else 0, WORLDS)  # type: ignore[arg-type]
    if world == "gen":
        schedule = replace(schedule, view=OtherEndView(other_end_of(TRANSFERS, 0)))
    tensors = {name: tensor.to(device) for name, tensor in allocate(schedule, seed=1).items()}
    kind = TrainEndpoint if world == "train" else GenerationEndpoint
    flat = flat_buffer(tensors) if world == "train" else torch.zeros(1)
    options = Options(bucket_bytes=64 << 10, timeout_s=20.0, source_checks=checks)
    endpoint = kind(schedule, tensors, store=address, options=options)
    endpoint.prepare()
    endpoint.refit(1)
    with (WritesInAPull if flat.is_cuda else Writer)(flat if rank == 0 else torch.zeros(1)):
        try:
            endpoint.refit(2)
        except Exception as error:
            return type(error).__name__, str(error), endpoint.committed_version
    return None


@pytest.mark.parametrize("checks", ["sampled", "full"])
def test_no_rank_commits_weights_that_a_thread_writes_meanwhile(checks: str) -> None:
    found = values(run_ranks(sum(WORLDS), refit_while_writing, checks))
    assert [committed for _, _, committed in found] == [1, 1, 1]
    assert found[0][0] == "TornWeightsError"
    for _, message, _ in found:
        assert "train:0: weights were written while they were read: " in message
        assert "change weights only after refit() has returned" in message


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("checks", ["sampled", "full"])
def test_no_rank_commits_weights_that_a_gpu_writes_meanwhile(checks: str) -> None:
    outcomes = run_ranks(sum(WORLDS), refit_while_writing, checks, "cuda", method="spawn", timeout_s=60)
    for kind, message, committed in values(outcomes):
        assert "train:0: weights were written while they were read: " in message and committed == 1, kind


def test_without_checks_such_a_refit_commits() -> None:
    """Torch does not count these writes, and nothing else finds them."""
    outcomes: list[Outcome] = run_ranks(sum(WORLDS), refit_while_writing, "off")
    assert values(outcomes) == [None, None, None]
