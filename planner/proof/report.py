"""Violations of a plan, and how they name ranks."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator
from dataclasses import dataclass

from mcore_reshard.planner.plan.plan import Plan, TransferGroup

_SPANS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a plan is wrong."""

    rule: str
    parameter: str  # HF name; a pattern where a whole group is concerned
    ranks: str  # e.g. "train 0, 4 -> gen 1"
    message: str

    @classmethod
    def of_group(
        cls, plan: Plan, transfers: TransferGroup, rule: str, message: str,
        src_part: int | None = None, dst_part: int | None = None,
    ) -> Violation:  # fmt: skip
        return cls(rule, name_of(plan, transfers), ranks_of(plan, transfers, src_part, dst_part), message)

    @classmethod
    def of_all(cls, plan: Plan, parameter: str, rule: str, message: str) -> Violation:
        ranks = f"train {listed(range(plan.train.world))} -> gen {listed(range(plan.gen.world))}"
        return cls(rule, parameter, ranks, message)

    def __str__(self) -> str:
        return f"[{self.rule}] {self.parameter} ({self.ranks}): {self.message}"


def ranks_of(plan: Plan, transfers: TransferGroup, src_part: int | None = None, dst_part: int | None = None) -> str:
    """The ranks of a transfer group on both ends, or of one part of it."""
    src, dst = plan.rank_grids[transfers.src], plan.rank_grids[transfers.dst]
    src = src if src_part is None else src[src_part : src_part + 1]
    dst = dst if dst_part is None else dst[dst_part : dst_part + 1]
    return f"train {listed(src.ravel())} -> gen {listed(dst.ravel())}"


def name_of(plan: Plan, transfers: TransferGroup) -> str:
    """The first parameter of a transfer group."""
    return plan.groups[transfers.group].name(transfers.layers[0].layer, transfers.experts[0])


def distinct(plan: Plan, use_of: Callable[[TransferGroup], Hashable]) -> Iterator[TransferGroup]:
    """The first transfer group of each use: its outcome holds for all others of that use."""
    seen: set[Hashable] = set()
    for transfers in plan.transfer_groups:
        if (use := use_of(transfers)) not in seen:
            seen.add(use)
            yield transfers


def listed(numbers: Iterable[int]) -> str:
    """[3, 0, 1, 2, 8] -> "0-3, 8"; "none" where there are none."""
    spans: list[list[int]] = []  # first and last number of each
    for number in sorted({int(number) for number in numbers}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [f"{first}-{last}" if first < last else f"{first}" for first, last in spans[:_SPANS_SHOWN]]
    more = [f"... ({len(spans) - _SPANS_SHOWN} more)"] if len(spans) > _SPANS_SHOWN else []
    return ", ".join(shown + more) or "none"
