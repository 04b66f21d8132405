"""Model engines for those trainers of verl that make a CheckpointEngineManager of their own: trainer/ppo/v1, fully_async_policy.

    VERL_USE_EXTERNAL_MODULES=mcore_reshard.integrations.verl_engines        in the environment of all processes

They hand the checkpoint engine what `get_per_tensor_param` of the model engine returns. So these engines return an iterator
that knows its engine. verl takes the engine of a vendor before that of a device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any

import torch
from verl.workers.engine import EngineRegistry


class ExportedWeights(Iterable[tuple[str, torch.Tensor]]):
    """The whole tensors that verl exports, made when someone asks for them; and the engine that has the parts."""

    def __init__(self, model_engine: Any, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self.model_engine, self._weights = model_engine, weights

    def __iter__(self) -> Iterator[tuple[str, torch.Tensor]]:
        return iter(self._weights)


class _ExportsItself:
    def get_per_tensor_param(self, *args: Any, **kwargs: Any) -> tuple[ExportedWeights, Any]:
        weights, peft_config = super().get_per_tensor_param(*args, **kwargs)  # type: ignore[misc]
        return ExportedWeights(self, weights), peft_config


with suppress(ImportError):
    from verl.workers.engine.megatron.transformer_impl import MegatronEngineWithLMHead

    @EngineRegistry.register(model_type="language_model", backend="megatron", vendor="nvidia")
    class RefitMegatronEngine(_ExportsItself, MegatronEngineWithLMHead):  # type: ignore[misc]
        """verl's Megatron engine, whose exported weights know it."""


with suppress(ImportError):
    from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

    @EngineRegistry.register(model_type="language_model", backend=["fsdp", "fsdp2"], vendor="nvidia")
    class RefitFSDPEngine(_ExportsItself, FSDPEngineWithLMHead):  # type: ignore[misc]
        """verl's FSDP engine, whose exported weights know it."""
