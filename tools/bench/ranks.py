"""One process of the benchmark: it holds the workload's tensors and takes every method through the same steps.

Prepared afresh over poisoned destinations, called once, compared bit for bit with what the formula says, called again
and again. All processes of a launch do the same at the same time; rank 0 writes the rows.
"""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import synthetic
import torch

from mcore_reshard.kernels.errors import Waiting
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World
from mcore_reshard.session.store_server import serve_store

from .methods import Method, Prepared, Unavailable
from .results import ResultFile, row_of, skipped
from .workloads import Case

_ROOM_BYTES = 16 << 30  # that methods and their checks may take beside a rank's tensors


@dataclass(frozen=True, slots=True)
class Launch:
    """The work of the processes of one launch."""

    case: Case
    methods: tuple[Method, ...]
    device: str  # "cuda" or "cpu"
    gpus: int
    colocated: bool  # each side has all GPUs, else its own where there are enough
    repeats: int
    timeout_s: float  # of each method
    out: Path
    folder: Path  # empty; where ranks find each other
    nemo_rl: Path | None

    @property
    def ranks(self) -> int:
        return self.case.train_ranks + self.case.gen_ranks

    def world_rank(self, number: int) -> tuple[World, int]:
        """Which side a process is on, and its rank there: training ranks come first."""
        first = self.case.train_ranks
        return ("train", number) if number < first else ("gen", number - first)

    def gpu_of(self, number: int) -> int:
        """The GPU of a process. Where there are too few, neighbors share one; colocated, each side has all."""
        if self.colocated:
            return self.world_rank(number)[1] % self.gpus
        return number * min(self.gpus, self.ranks) // self.ranks


class Rank:
    """One process, as methods see it."""

    def __init__(self, number: int, launch: Launch) -> None:
        self.number, self.launch, self.case = number, launch, launch.case
        self.ranks, self.timeout_s = launch.ranks, launch.timeout_s
        self.world, self.rank = launch.world_rank(number)
        self.on_cuda = launch.device == "cuda"
        self.device = torch.device("cpu")
        if self.on_cuda:
            gpu = launch.gpu_of(number)
            if self.case.isolated:  # CUDA reads it when it is first used: now
                os.environ["CUDA_VISIBLE_DEVICES"], gpu = str(gpu), 0
            self.device = torch.device("cuda", gpu)
            torch.cuda.set_device(self.device)
        self._root = self._met(launch.folder / "port")
        self.address = self._root.address
        self._method_key = "bench"
        self.store: StoreKeys = self._root.under(self._method_key)
        self.names = [f"rank {each}" for each in range(self.ranks)]
        self._group = GlooGroup(self._root.under("bench/words"), number, self.names, timeout_s=self.timeout_s)
        self._words = 0
        self._results = ResultFile(launch.out)

    @cached_property
    def plan(self) -> Plan:
        return self.case.plan()

    @cached_property
    def schedule(self) -> Schedule:
        return schedule_of(self.plan, self.world, self.rank)

    @cached_property
    def tensors(self) -> Mapping[str, torch.Tensor]:
        """This rank's tensors: those of the plan, by its names. Training ranks' are filled."""
        return self._allocated(filled=self.world == "train")

    @cached_property
    def _wanted(self) -> Mapping[str, torch.Tensor] | None:
        """A generation rank's tensors as they must be, if its GPU has room for them: to compute them takes seconds."""
        needed = self.received_bytes + _ROOM_BYTES
        room = torch.cuda.mem_get_info(self.device)[0] if self.on_cuda else 0
        return self._allocated(filled=True) if room > needed else None

    def _allocated(self, *, filled: bool) -> Mapping[str, torch.Tensor]:
        tensors = synthetic.allocate(self.schedule, self.device)
        if filled:
            synthetic.fill(self.plan, self.world, self.rank, tensors)
        self._zero_padding(tensors)
        self.settle(release=True)
        return tensors

    def run(self) -> None:
        for method in self.launch.methods:
            # A peer that hangs in C cannot be interrupted; this ends the process, and with it the launch.
            faulthandler.dump_traceback_later(self.timeout_s, exit=True)
            self._measure(method)
            faulthandler.cancel_dump_traceback_later()
        self.gather({})  # rank 0 hosts the store: it leaves last
        if self.number:
            self._root.set(f"left/{self.number}", "")
        else:
            self._root.wait([f"left/{number}" for number in range(1, self.ranks)])

    def _met(self, file: Path) -> SessionStore:
        """The store of all ranks, started by rank 0, which writes down where it listens."""
        if self.number == 0:
            self._served = serve_store()
            partial = file.with_suffix(".partial")
            partial.write_text(self._served.address)
            partial.replace(file)
        deadline = time.monotonic() + self.timeout_s
        while not file.exists():
            if time.monotonic() > deadline:
                raise SystemExit(f"rank 0 did not start within {self.timeout_s:g} s")
            time.sleep(0.01)
        return connect_store(file.read_text(), Options(session="bench", timeout_s=self.timeout_s))

    def _measure(self, method: Method) -> None:
        self._method_key = f"bench/{method.text}"
        self.store = self._root.under(self._method_key)
        if method.kind.holds:
            self._hold()
        self.settle(release=True)
        self.barrier()
        free, allocated = self._memory()
        start = time.perf_counter()
        try:
            prepared = method.prepare(self)
        except Unavailable as reason:
            self._add(skipped(self.case.name, method.text, str(reason)))
            return
        self.settle()
        prepare_s = time.perf_counter() - start - prepared.building_s
        runs = [self._timed(prepared.run)]
        free_after, peak = self._memory()
        wrong = self._check(method, prepared)
        repeats = self.launch.repeats if method.kind.repeats is None else method.kind.repeats
        runs += [self._timed(prepared.run) for _ in range(repeats)]
        facts = prepared.facts()
        self.barrier()
        prepared.close()
        weights = prepared.weight_bytes if self.on_cuda else 0
        told = self.gather(
            {
                "spans": [span for *span, _, _ in runs],
                "cpu_ms": [cpu for *_, cpu, _ in runs],
                "thread_ms": [thread for *_, thread in runs],
                "prepare_s": prepare_s,
                "nbytes": self.received_bytes if prepared.nbytes is None else prepared.nbytes,
                "extra_bytes": free - free_after - weights,
                "allocated_bytes": peak - allocated - weights,
                "wrong_elements": wrong,
                "facts": facts,
            }
        )
        self._add(row_of(self.case.name, method.text, told))

    def _check(self, method: Method, prepared: Prepared) -> int:
        """Wrong elements of all ranks: none, or this is the end of the launch."""
        wrong = self.wrong_elements() if prepared.wrong is None else prepared.wrong()
        self.settle(release=True)
        counts = [word["wrong"] for word in self.gather({"wrong": wrong})]
        if any(counts):
            raise SystemExit(f"after {method.text} elements are wrong; by rank, training ranks first: {counts}")
        return sum(counts)

    def _hold(self) -> None:
        """Have the weights in place and destinations poisoned, so that none of that counts as time or memory."""
        assert self.tensors, "a rank without weights"
        self.barrier()  # all ranks of a GPU have theirs
        if self.world == "gen":
            _ = self._wanted  # now, not while memory is measured
            for tensor in self.tensors.values():
                tensor.view(torch.uint8).fill_(synthetic.POISON)
            self._zero_padding(self.tensors)

    @property
    def received_bytes(self) -> int:
        if self.world == "train":
            return 0
        return sum(tensor.nbytes for tensor in self.tensors.values())

    def wrong_elements(self) -> int:
        """How many elements of this rank's destination tensors are not what they should be; padding must be zero."""
        if self.world == "train":
            return 0
        if (wanted := self._wanted) is not None:
            return sum(differing(self.tensors[name], right) for name, right in wanted.items())
        padding = sum((part != 0).sum() for part in self._padding(self.tensors))
        return sum(synthetic.wrong_elements(self.plan, "gen", self.rank, self.tensors).values()) + int(padding)

    def barrier(self) -> None:
        """All ranks leave within tens of microseconds: over CPU messages, through rank 0."""
        word = torch.zeros(1, dtype=torch.uint8)
        waiting = Waiting(f"rank {self.number}", "the others", None, "barrier", False)
        if self.number:
            self._group.send(word, 0, waiting).wait()
            self._group.recv(word, 0, waiting).wait()
            return
        for way in (self._group.recv, self._group.send):
            for message in [way(torch.zeros_like(word), peer, waiting) for peer in range(1, self.ranks)]:
                message.wait()

    def gather(self, word: dict[str, Any]) -> list[dict[str, Any]]:
        """The words of all ranks, on every rank."""
        self._words += 1
        self._root.set(f"word/{self._words}/{self.number}", json.dumps(word))
        return [json.loads(self._root.get(f"word/{self._words}/{other}")) for other in range(self.ranks)]

    def settle(self, *, release: bool = False) -> None:
        """Wait for the device; with `release`, give cached memory back to it."""
        if self.on_cuda:
            torch.cuda.synchronize()
            if release:
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def _zero_padding(self, tensors: Mapping[str, torch.Tensor]) -> None:
        """As sessions do, in what no parameter fills."""
        for part in self._padding(tensors):
            part.zero_()

    def _padding(self, tensors: Mapping[str, torch.Tensor]) -> Iterator[torch.Tensor]:
        for index, offset, strided_box in self.schedule.padding:
            flat = synthetic.bits(tensors[self.schedule.tensors[index].name]).reshape(-1)
            yield flat.as_strided(strided_box.extents, strided_box.strides, flat.storage_offset() + offset)

    def _timed(self, run: Callable[[], Any]) -> tuple[float, float, float, float]:
        """(start and end in seconds of the clock that all processes share, CPU ms of the process, of this thread)."""
        self.barrier()
        cpu, thread, start = time.process_time(), time.thread_time(), time.perf_counter()
        run()
        self.settle()
        end = time.perf_counter()
        return start, end, 1e3 * (time.process_time() - cpu), 1e3 * (time.thread_time() - thread)

    def _memory(self) -> tuple[int, int]:
        """(free bytes of the device, peak of what torch has allocated)."""
        return (torch.cuda.mem_get_info()[0], torch.cuda.max_memory_allocated()) if self.on_cuda else (0, 0)

    def _add(self, row: dict[str, Any]) -> None:
        if self.number == 0:
            print(json.dumps(row), file=sys.stderr, flush=True)
            self._results.add(row)


def differing(one: torch.Tensor, other: torch.Tensor) -> int:
    """Elements of two tensors of one dtype and shape whose bits differ."""
    return int((synthetic.bits(one) != synthetic.bits(other)).sum())


def run_rank(number: int, launch: Launch) -> None:
    Rank(number, launch).run()
