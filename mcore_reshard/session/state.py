"""What a generation rank's tensors hold: one version, or a mixture of two.

complete(3)  ->  refit of 4 fails before a byte was written   ->  intact(3)
complete(3)  ->  refit of 4 fails after half of its bytes     ->  mixed(3, 4, 0.50)  ->  next refit  ->  complete(5)
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal


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
