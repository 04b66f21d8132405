"""Collectives of the training world for agreement, over torch's default process group."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch

from mcore_reshard.kernels.errors import SessionError

_T = TypeVar("_T")


def own_rank() -> int:
    """This process's rank in the training world; 0 where no process group is initialized."""
    return torch.distributed.get_rank() if torch.distributed.is_initialized() else 0


def gather_from_all(value: _T, group: Any = None) -> list[_T]:
    """The `value` of every training rank, or of a group's, in rank order. Collective."""
    if not torch.distributed.is_initialized():
        return [value]
    values: list[_T] = [value] * torch.distributed.get_world_size(group)
    torch.distributed.all_gather_object(values, value, group=group)
    return values


def run_on_all_ranks(step: Callable[[], _T]) -> _T:
    """Run `step` on every training rank and return this rank's result. Collective.

    If it raises on a rank, all ranks raise. The failing rank raises its own error, the others SessionError with the cause.
    """
    result, failure = None, None
    try:
        result = step()
    except Exception as error:
        failure = error
    causes = gather_from_all(None if failure is None else f"{type(failure).__name__}: {failure}")
    if failure is not None:
        raise failure
    for rank, cause in enumerate(causes):
        if cause is not None:
            raise SessionError(f"train:{rank}: {cause}")
    return result  # type: ignore[return-value]
