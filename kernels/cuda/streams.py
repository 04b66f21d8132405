"""Work on other threads, in the CUDA context of the thread that hands it over, and on several streams."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeVar

import torch

T = TypeVar("T")


def in_callers_context(work: Callable[[], T], device: torch.device | None) -> Callable[[], T]:
    """`work` for another thread, with torch's state of this thread: inference mode, and the stream on `device`, a GPU."""
    inference = torch.is_inference_mode_enabled()
    stream = torch.cuda.current_stream(device) if device is not None and device.type == "cuda" else None

    def in_other_thread() -> T:
        with torch.inference_mode(inference):
            if stream is None:
                return work()
            with torch.cuda.device(stream.device), torch.cuda.stream(stream):
                stream.query()  # any call of the runtime: it gives a new thread its context, the driver's functions do not
                return work()

    return in_other_thread


def fork(stream: torch.cuda.Stream, others: Iterable[torch.cuda.Stream]) -> None:
    """What is queued on `others` later is done after all that is on `stream` now."""
    for each in others:
        each.wait_stream(stream)


@contextmanager
def forked(stream: torch.cuda.Stream, others: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """What is queued on `others` meanwhile is done after all that is on `stream`, and before what comes there later."""
    fork(stream, others)
    with joined(stream, others):
        yield


@contextmanager
def joined(stream: torch.cuda.Stream, others: Iterable[torch.cuda.Stream]) -> Iterator[None]:
    """What is queued on `others` meanwhile is done before what comes on `stream` later."""
    try:
        yield
    finally:
        for each in others:
            stream.wait_stream(each)
