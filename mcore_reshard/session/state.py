"""What a generation rank's tensors hold: one version, or a mixture of two.

complete(3)  ->  refit of 4 fails before a byte was written   ->  intact(3)
complete(3)  ->  refit of 4 fails after half of its bytes     ->  mixed(3, 4, 0.50)  ->  next refit  ->  complete(5)
"""

from __future__ import annotations

from contextlib import suppress
from dataclasses import dataclass
from typing import Any, Literal

from mcore_reshard.kernels.errors import KvScalesError, VersionError


@dataclass(frozen=True, slots=True)
class WeightState:
    """The state of one generation rank's tensors. Version None: what the engine loaded when it started."""

    kind: Literal["intact", "mixed", "complete"]
    version: int | None  # the last version that all ranks acknowledged
    next: int | None = None  # mixed: the version that was arriving
    share: float = 0.0  # mixed: of the bytes of `next`, how many may have been written; above 0, at most 1

    @property
    def may_generate(self) -> bool:
        """Whether every byte is of `version`."""
        return self.kind != "mixed"

    def to_json(self) -> dict[str, Any]:
        mixed = {"next": self.next, "share": self.share} if self.kind == "mixed" else {}
        return {"state": self.kind, "version": self.version, **mixed}

    def describe(self) -> str:
        """In words: "version 3", or "a mixture of versions 3 and 4 (52%)"."""
        version = "the weights that it started with" if self.version is None else f"version {self.version}"
        if self.kind != "mixed":
            return version
        first = version if self.version is None else f"versions {self.version}"
        return f"a mixture of {first} and {self.next} ({self.share:.0%})"

    def __str__(self) -> str:
        if self.kind == "mixed":
            return f"mixed({self.version}, {self.next}, {self.share:.2f})"
        return f"{self.kind}({self.version})"


def intact(version: int | None) -> WeightState:
    """No byte has changed since `version` was complete."""
    return WeightState("intact", version)


def mixed(version: int | None, arriving: int | None, share: float) -> WeightState:
    """Some bytes are of `version`, others of `arriving`; with a share of 1 all are, and not every rank has said so."""
    return WeightState("mixed", version, arriving, share)


def complete(version: int | None) -> WeightState:
    """All bytes are of `version`, which all ranks have acknowledged."""
    return WeightState("complete", version)


def name_state(error: BaseException, state: WeightState, rank_name: str) -> None:
    """Make an error of a refit end with the state of the rank that raises it, and carry it as `weight_state`.

    An engine's front end gets no more than the message of a worker's error. A refusal, after which nothing has moved, says
    it only where the weights are mixed.
    """
    with suppress(AttributeError):
        error.weight_state = state  # type: ignore[attr-defined]
    if isinstance(error, (VersionError, KvScalesError)) and state.may_generate:
        return
    told = f"; {rank_name} holds {state.describe()}, its state is {state}"
    if len(error.args) == 1 and str(error) == error.args[0]:
        error.args = (error.args[0] + told,)
    else:
        error.add_note(told.removeprefix("; "))
