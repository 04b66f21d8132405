"""Mutants and what becomes of them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Rejection:
    """The refusal of a mutant: by which layer (a key of LAYERS) and rule, and whom the message names."""

    layer: str
    rule: str
    parameter: str
    ranks: str
    message: str


@dataclass(frozen=True)
class Mutant:
    """One bug of a class, put in on purpose. `expected` is (layer, rule); `refused` gives None if it got through.

    `shows` gives what would arrive wrong if nothing refused a plan; where every element would arrive, `harm` says what
    the bug leads to.
    """

    bug: int
    what: str
    expected: tuple[str, str]
    refused: Callable[[], Rejection | None]
    shows: Callable[[], list[str]] | None = None
    harm: str = ""

    def __str__(self) -> str:
        return f"#{self.bug} {self.what}"
