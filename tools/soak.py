"""Refit a tiny model thousands of times in one session, and see whether anything grows. Every fiftieth refit fails.

python tools/soak.py --out tools/results/soak.json      2,000 refits, 2 training ranks, 2 replicas (`make soak`)

Every rank notes its memory, descriptors, threads and time per refit; rank 0 also the store's keys and memory. After every
fiftieth refit a third replica comes, as another process in the same seat. It gets the weights from another replica, takes
part in two refits, and leaves.
"""

from __future__ import annotations

import argparse
import gc
import json
import multiprocessing
import os
import platform
import statistics
import sys
import threading
import time
from collections.abc import Callable, Sequence
from datetime import date
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tools"), str(ROOT / "tests")]

import torch  # noqa: E402
from faults.model import Weights, plan_of  # noqa: E402

from mcore_reshard.kernels.errors import RefitError  # noqa: E402
from mcore_reshard.kernels.options import Options  # noqa: E402
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint  # noqa: E402
from mcore_reshard.session.part import RankOfPlan  # noqa: E402
from mcore_reshard.session.store_server import serve_store  # noqa: E402

SAMPLES = 20  # of a soak
GUEST, VISIT = "gen:2", 2  # the seat of a third replica, and in how many refits it takes part
ALLOWED = {"rss_mb": 4.0, "descriptors": 0, "threads": 0, "store_keys": 0, "store_rss_mb": 4.0}  # growth that is none
SLOWER = 1.25  # the fastest refits at the end against those at the start: others show what else the machine does
_PAGE = os.sysconf("SC_PAGE_SIZE")


def rss_mb(pid: int | str) -> float:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * _PAGE / 1e6


def fails(version: int) -> bool:
    """Whether the refit of a version fails, on purpose."""
    return version % 50 == 7


def endpoint_of(seat: str, address: str, version_of: Callable[[], int]) -> tuple[Weights, Any]:
    """One rank of the session, and what it holds."""
    world, _, rank = seat.partition(":")
    number = 0 if seat == GUEST else int(rank)  # the plan has two replicas; a third one has what the first has
    weights = Weights(plan_of(1), "train" if world == "train" else "gen", number)
    part = RankOfPlan(weights.plan, weights.world, int(rank))
    options = Options(session="soak", token="a token of thirty-two characters", bucket_bytes=8192, timeout_s=60.0)

    def load_weights(tensors: Any) -> None:
        for name, tensor in tensors:
            weights.load(name, tensor)
        if seat == "gen:0" and fails(version_of()):
            raise ValueError("this refit fails, so that the next one connects anew")

    if world == "train":

        def export(names: Any) -> Any:
            return weights.export(names, 1 + version_of() % 70)

        return weights, TrainEndpoint(part, weights.tensors, store=address, export=export, options=options)
    # A replica that gives its weights gives all that a new one needs, also what came by name.
    tensors = {**weights.tensors, **weights.loaded}
    return weights, GenerationEndpoint(part, tensors, store=address, load_weights=load_weights, options=options)


def visit(address: str) -> None:
    """The third replica comes, takes part in two refits, and leaves."""
    torch.set_num_threads(1)
    weights, endpoint = endpoint_of(GUEST, address, lambda: 0)
    endpoint.prepare()
    assert weights.held(), "the new replica has no version of its own"
    for _ in range(VISIT):
        version = endpoint.refit().version
        assert weights.held() == 1 + version % 70, f"{GUEST} holds other bytes than those of version {version}"
    endpoint.close()


def receive_guest(store: Any, pipe: Any) -> None:
    """Have a third replica come, and return once it waits for a refit."""
    pipe.send("visit")

    def waits() -> bool:
        seat = store.seats.get(GUEST)
        ready = f"{seat.facts['process']} waits".encode() if seat is not None and seat.status == "here" else None
        return ready is not None and store.peek(f"ready/{GUEST}") == ready

    await_that(waits)


def await_that(holds: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60.0
    while not holds():
        assert time.monotonic() < deadline, f"{GUEST} has not come, or has not left"
        time.sleep(0.02)


def soak(seat: str, address: str, store_pid: int, refits: int, visit_every: int, pipe: Any) -> None:
    """One rank: refit, check the bytes now and then, take samples."""
    torch.set_num_threads(1)
    world, version = seat.partition(":")[0], 0
    weights, endpoint = endpoint_of(seat, address, lambda: version)
    endpoint.prepare()
    samples, seconds, visits = [], [], 0
    for version in range(1, refits + 1):
        content = 1 + version % 70
        if world == "train":
            weights.step(content)
        try:
            seconds.append(endpoint.refit(version).seconds)
            assert not fails(version)
        except (RefitError, ValueError) as error:
            if not fails(version):
                raise
            del error
        if version % (refits // SAMPLES) == 0:
            if world == "gen":
                assert weights.held() == content, f"{seat} holds other bytes than those of version {version}"
            gc.collect()
            stats = endpoint._store.stats() if seat == "train:0" else {}
            samples.append(
                {
                    "refits": version,
                    "rss_mb": round(rss_mb("self"), 1),
                    "descriptors": len(os.listdir("/proc/self/fd")),
                    "threads": threading.active_count(),
                    "median_ms": round(1e3 * statistics.median(seconds), 2),
                    "fastest_ms": round(1e3 * min(seconds), 2),
                    **(
                        {"store_keys": stats["session_keys"], "store_rss_mb": round(rss_mb(store_pid), 1)}
                        if stats
                        else {}
                    ),
                }
            )
            if seat == "train:0":
                print(json.dumps(samples[-1]), file=sys.stderr, flush=True)
            seconds.clear()
        if seat == "train:0" and version % visit_every == 0 and version + VISIT <= refits:
            receive_guest(endpoint._store, pipe)
            visits += 1
        elif seat == "train:0" and version % visit_every == VISIT and visits:
            await_that(lambda: endpoint._store.seats[GUEST].status != "here")
    endpoint.close()
    pipe.send(samples)


def growth(samples: Sequence[dict[str, Any]]) -> dict[str, float]:
    """Of each figure, from the first quarter of a soak to its last one; times as a factor."""
    quarter = len(samples) // 4
    first, last = samples[quarter : 2 * quarter], samples[-quarter:]  # the first quarter warms up

    def middle(part: Sequence[dict[str, Any]], name: str) -> float:
        return statistics.median(each[name] for each in part)

    grown = {name: round(middle(last, name) - middle(first, name), 1) for name in ALLOWED if name in samples[0]}
    return {**grown, "slower": round(middle(last, "fastest_ms") / middle(first, "fastest_ms"), 3)}


def problems(by_rank: dict[str, Sequence[dict[str, Any]]]) -> list[str]:
    """What grew by more than is allowed."""
    found = []
    for seat, samples in by_rank.items():
        grown = growth(samples)
        found += [
            f"{seat}: {name} grew by {grown[name]:g}, {limit:g} are allowed"
            for name, limit in ALLOWED.items()
            if grown.get(name, 0) > limit
        ]
        if grown["slower"] > SLOWER:
            found.append(f"{seat}: refits take {grown['slower']:g} times as long at the end, {SLOWER:g} are allowed")
    return found


def run(refits: int, visit_every: int = 50) -> dict[str, Sequence[dict[str, Any]]]:
    """Samples by seat. A third replica comes after every `visit_every` refits."""
    seats = ["train:0", "train:1", "gen:0", "gen:1"]
    plan_of(1)
    context: Any = multiprocessing.get_context("fork")
    with serve_store() as store:
        pipes = {}
        for seat in seats:
            pipe, end_of_child = context.Pipe()
            context.Process(
                target=soak, args=(seat, store.address, store.pid, refits, visit_every, end_of_child), daemon=True
            ).start()
            end_of_child.close()
            pipes[seat] = pipe
        while (said := pipes["train:0"].recv()) == "visit":
            context.Process(target=visit, args=(store.address,), daemon=True).start()
        return {"train:0": said, **{seat: pipes[seat].recv() for seat in seats[1:]}}


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--refits", type=int, default=2000)
    parser.add_argument("--out", type=Path, help="where to write the results")
    arguments = parser.parse_args(argv)
    start = time.monotonic()
    by_rank = run(arguments.refits)
    found = problems(by_rank)
    result = {
        "what": "refits of a tiny model over gloo in one session: 2 training ranks, 2 replicas, with a token;"
        " every fiftieth refit fails, and the next one connects anew; after every fiftieth a third replica comes for two",
        "date": date.today().isoformat(),
        "machine": f"{os.cpu_count()} cores, {platform.machine()}, Linux {platform.release()}",
        "versions": {"python": platform.python_version(), "torch": torch.__version__},
        "refits": arguments.refits,
        "minutes": round((time.monotonic() - start) / 60, 1),
        "growth": {seat: growth(samples) for seat, samples in by_rank.items()},
        "samples": by_rank,
        "problems": found,
    }
    if arguments.out:
        arguments.out.write_text(json.dumps(result) + "\n")
    print("\n".join(found) or f"{arguments.refits} refits, and nothing grew: {result['growth']}")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
