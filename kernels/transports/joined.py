"""One refit by several transports at once, each for the pairs of ranks that it reaches.

`planner.subset.with_peers` gives the part of a schedule that goes by each; both ends of a pair must choose alike.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from functools import partial
from typing import TypeVar

import torch

from mcore_reshard.kernels.errors import first_of

from .pipeline import Executor, StageReport

T = TypeVar("T")


class JoinedExecutor:
    """Runs executors of disjoint pairs side by side, the first in the caller's thread. They must share no group.

    `device` is that of the tensors: every part starts after what is queued on the caller's current stream there.
    """

    def __init__(self, parts: Sequence[Executor], device: torch.device | None) -> None:
        self._parts = tuple(parts)
        self.name = "+".join(dict.fromkeys(part.name for part in parts))
        self._device = device
        self._threads = ThreadPoolExecutor(max(1, len(self._parts) - 1), thread_name_prefix="refit")

    @property
    def scratch_bytes(self) -> int:
        return sum(part.scratch_bytes for part in self._parts)

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once, by all transports. Raises the first failure, once all parts have ended."""
        stream = torch.cuda.current_stream(self._device) if is_cuda(self._device) else None
        failures: list[BaseException] = []
        others = [
            self._threads.submit(in_context_of(stream, partial(_reports, part, failures))) for part in self._parts[1:]
        ]
        found = [_reports(part, failures) for part in self._parts[:1]]
        found += [other.result() for other in others]
        if failures:
            raise first_of(failures)
        return merged(found)

    def close(self) -> None:
        """Close all parts. May be called twice."""
        with ExitStack() as closing:
            closing.callback(self._threads.shutdown, wait=False)
            for part in self._parts:
                closing.callback(part.close)


def _reports(part: Executor, failures: list[BaseException]) -> tuple[StageReport, ...]:
    """What a part moved; its failure goes to `failures`, which so has those of all parts in their order."""
    try:
        return part.run()
    except BaseException as error:
        failures.append(error)
        return ()


def merged(reports: Sequence[tuple[StageReport, ...]]) -> tuple[StageReport, ...]:
    """What several parts moved in each stage; they move at the same time, so the longest says how long it took."""
    return tuple(
        StageReport(
            stage[0].pp_stage,
            sum(part.transfers for part in stage),
            sum(part.buckets for part in stage),
            sum(part.nbytes for part in stage),
            max(part.seconds for part in stage),
        )
        for stage in zip(*reports, strict=True)
    )


def is_cuda(device: torch.device | None) -> bool:
    return device is not None and device.type == "cuda"


def in_context_of(stream: torch.cuda.Stream | None, work: Callable[[], T]) -> Callable[[], T]:
    """`work` for another thread, with this stream, its device and the caller's inference mode: these belong to threads."""
    inference = torch.is_inference_mode_enabled()

    def there() -> T:
        with torch.inference_mode(inference):
            if stream is None:
                return work()
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                stream.query()  # any call of the runtime: it gives a new thread its context, the driver's functions do not
                return work()

    return there
