"""The result of a validation: for each engine tensor, how many elements differ from golden, and the first of them."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch


@dataclass(frozen=True, slots=True)
class Mismatch:
    """The first element that differs; values as Python numbers, None if not finite; bits in hexadecimal."""

    index: tuple[int, ...]
    got: float | None
    expected: float | None
    got_bits: str
    expected_bits: str


@dataclass(frozen=True, slots=True)
class ParameterResult:
    """One tensor of one generation rank against golden."""

    name: str
    gen_rank: int
    route: str  # "bulk", "misc" or "bulk+misc"
    nbytes: int
    mismatches: int  # elements
    first: Mismatch | None = None
    problem: str = ""  # shape or dtype differ, or one side lacks the tensor


@dataclass(frozen=True, slots=True)
class RefitResult:
    """One refit. `seconds` is the slowest rank's; `change` says what was done to the weights before."""

    version: int
    change: str
    seconds: float
    bulk_bytes: int
    misc_bytes: int
    parameters: tuple[ParameterResult, ...]

    @property
    def wrong(self) -> tuple[ParameterResult, ...]:
        return tuple(p for p in self.parameters if p.mismatches or p.problem)


@dataclass(frozen=True, slots=True)
class ValidationReport:
    """All refits of one validation. `engine` and `source` say which libraries held the tensors of either side."""

    model: str
    train: str
    gen: str
    policy: str
    transport: str
    engine: str
    source: str  # versions, and the stand-in if one was used
    precision: str  # the dtypes of both sides and which of them quantizes; empty where neither does
    digest: str
    refits: tuple[RefitResult, ...]

    @property
    def ok(self) -> bool:
        return bool(self.refits) and not any(refit.wrong for refit in self.refits)

    @property
    def parameters(self) -> tuple[ParameterResult, ...]:
        return tuple(parameter for refit in self.refits for parameter in refit.parameters)

    def as_dict(self) -> dict[str, Any]:
        return {"ok": self.ok, **asdict(self)}


def compare(
    name: str, gen_rank: int, route: str, refitted: torch.Tensor | None, expected: torch.Tensor | None
) -> ParameterResult:
    """Compare two tensors bit for bit: NaNs are equal when their bits are."""
    present = expected if refitted is None else refitted
    assert present is not None
    result = partial(ParameterResult, name, gen_rank, route, present.nbytes)
    if refitted is None or expected is None:
        return result(0, problem=f"{'the engine' if refitted is None else 'golden'} has no such tensor")
    if refitted.shape != expected.shape or refitted.dtype != expected.dtype:
        problem = f"is {tuple(refitted.shape)} {refitted.dtype}, golden {tuple(expected.shape)} {expected.dtype}"
        return result(0, problem=problem)
    refitted_bytes, expected_bytes = _bytes(refitted), _bytes(expected)
    wrong = (refitted_bytes != expected_bytes).any(-1).nonzero()
    if not len(wrong):
        return result(0)
    index = tuple(wrong[0].tolist())
    values = _finite(refitted[index]), _finite(expected[index])
    return result(len(wrong), Mismatch(index, *values, _hex(refitted_bytes[index]), _hex(expected_bytes[index])))


def _finite(element: torch.Tensor) -> float | None:
    """As a number that JSON can hold."""
    value = float(element)
    return value if math.isfinite(value) else None


def _hex(element: torch.Tensor) -> str:
    return bytes(element.flip(0).tolist()).hex()


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """uint8 [*shape, bytes of an element], the lowest byte first."""
    flat = tensor.detach().cpu().reshape(-1)
    return flat.view(torch.uint8).reshape(*tensor.shape, tensor.element_size())
