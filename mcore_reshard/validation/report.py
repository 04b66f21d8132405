"""What a validation found: per engine tensor, how many elements differ from golden and where the first one is."""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
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
    """All refits of one validation. `engine` says what held the destination tensors."""

    model: str
    train: str
    gen: str
    policy: str
    transport: str
    engine: str
    source: str  # what held the source tensors: library versions, and the stand-in if one was used
    precision: str  # what the sides hold and which of them quantizes; empty where neither does
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
    name: str, gen_rank: int, route: str, got: torch.Tensor | None, expected: torch.Tensor | None
) -> ParameterResult:
    """Compare two tensors bit for bit: NaNs are equal when their bits are."""
    held = got if got is not None else expected
    assert held is not None
    nbytes = held.numel() * held.element_size()
    if got is None or expected is None:
        problem = "golden has no such tensor" if expected is None else "the engine has no such tensor"
    elif got.shape != expected.shape or got.dtype != expected.dtype:
        problem = f"is {tuple(got.shape)} {got.dtype}, golden {tuple(expected.shape)} {expected.dtype}"
    else:
        problem = ""
    if problem or got is None or expected is None:
        return ParameterResult(name, gen_rank, route, nbytes, 0, problem=problem)
    got, expected = got.detach().cpu(), expected.detach().cpu()
    mine, golden = _bits(got), _bits(expected)
    wrong = (mine != golden).nonzero()
    if not len(wrong):
        return ParameterResult(name, gen_rank, route, nbytes, 0)
    at = tuple(wrong[0].tolist())
    width = 2 * got.element_size()
    mask = 16**width - 1
    first = Mismatch(
        at,
        _finite(got[at]),
        _finite(expected[at]),
        f"{int(mine[at]) & mask:0{width}x}",
        f"{int(golden[at]) & mask:0{width}x}",
    )
    return ParameterResult(name, gen_rank, route, nbytes, len(wrong), first)


def _finite(element: torch.Tensor) -> float | None:
    """As a number that JSON can hold."""
    value = float(element)
    return value if math.isfinite(value) else None


_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


def _bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.contiguous().view(_WORDS[tensor.element_size()])
