"""Run an engine's own `load_weights` on a meta twin of its model, with meta tensors of the checkpoint."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch

from mcore_reshard.planner.layout.traces import HfTensor

from .recorder import Recorder, TraceError
from .twin import meta_twin


def record_loading(
    model: torch.nn.Module,
    checkpoint: Mapping[str, HfTensor],
    title: str,
    afterwards: Callable[[torch.nn.Module], None] = lambda _: None,
) -> tuple[Recorder, torch.nn.Module]:
    """What `model.load_weights` did: the recorder to read it from, and the twin it was done to.

    `afterwards` is what the engine does to the loaded twin; it is recorded too.

    The model may be live or on the meta device; it is not written. The engine's parallel state must be that of the model's
    rank. Raises TraceError where the loader raises; `title` is the engine in the message.
    """
    twin = meta_twin(model)
    live = [tensor for tensor in (*model.parameters(), *model.buffers()) if not tensor.is_meta]
    recorder = Recorder(live)
    sources = {name: recorder.source(name, tensor) for name, tensor in checkpoint.items()}
    loading = ""

    def weights() -> Iterator[tuple[str, torch.Tensor]]:
        nonlocal loading
        for name, tensor in sources.items():
            loading = name
            yield name, tensor

    try:
        with torch.no_grad(), recorder:
            twin.load_weights(weights())  # type: ignore[operator]
            loading = "what follows the loading"
            afterwards(twin)
    except Exception as error:
        raise TraceError(f"{title}'s loader cannot be traced at {loading}: {type(error).__name__}: {error}") from error
    return recorder, twin
