"""A parameter as Transformer Engine quantises it, without Transformer Engine."""

from __future__ import annotations

from typing import Any

import torch


class QuantisedStandIn(torch.Tensor):
    """The attributes of its tensor classes, and no bytes of its own."""

    def __new__(cls, shape: tuple[int, ...], **attributes: torch.Tensor | None) -> QuantisedStandIn:
        made = torch.Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        made.__dict__.update(attributes)
        return made

    @classmethod
    def __torch_dispatch__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        raise AssertionError(f"{function} would dequantise")
