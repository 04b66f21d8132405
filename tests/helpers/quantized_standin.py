"""A parameter as Transformer Engine quantizes it, without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch


class QuantizedStandIn(torch.Tensor):
    """A tensor with the attributes of Transformer Engine's classes, and no bytes of its own."""

    def __new__(cls, shape: tuple[int, ...], **attributes: torch.Tensor | None) -> QuantizedStandIn:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        made.__dict__.update(attributes)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} would dequantize")


def ends_in_bf16(first: int, last: int) -> dict[str, Any]:
    """Megatron's fields for FP8 trainers that keep so many first and last layers in bf16."""
    counts = {"num_layers_at_start_in_bf16": first, "num_layers_at_end_in_bf16": last}
    return {"first_last_layers_bf16": True, **counts}
