"""Run work on another thread in the CUDA context of the thread that hands it over."""

from __future__ import annotations

from collections.abc import Callable
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
