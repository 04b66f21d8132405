"""What the proof says: violations, and how they name ranks."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from mcore_reshard.planner.plan.plan import Bundle, Plan

_SPANS_SHOWN = 8


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a plan is wrong."""

    rule: str
    parameter: str  # HF name; a pattern where a whole group is concerned
    ranks: str  # e.g. "train 0, 4 -> gen 1"
    message: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.parameter} ({self.ranks}): {self.message}"


def bundle_ranks(plan: Plan, bundle: Bundle, src_shard: int | None = None, dst_shard: int | None = None) -> str:
    """The ranks of a bundle on both ends, or of one shard of it."""
    src, dst = plan.holdings[bundle.src].ranks, plan.holdings[bundle.dst].ranks
    src = src if src_shard is None else src[src_shard : src_shard + 1]
    dst = dst if dst_shard is None else dst[dst_shard : dst_shard + 1]
    return f"train {listed(src.ravel())} -> gen {listed(dst.ravel())}"


def all_ranks(plan: Plan) -> str:
    return f"train {listed(range(plan.train.world))} -> gen {listed(range(plan.gen.world))}"


def bundle_name(plan: Plan, bundle: Bundle) -> str:
    """The first parameter of a bundle."""
    return plan.groups[bundle.group].name(bundle.layers[0].layer, bundle.experts[0])


def listed(numbers: Iterable[int]) -> str:
    """[3, 0, 1, 2, 8] -> "0-3, 8"; "none" where there are none."""
    spans: list[list[int]] = []
    for number in sorted({int(n) for n in numbers}):
        if spans and number == spans[-1][1] + 1:
            spans[-1][1] = number
        else:
            spans.append([number, number])
    shown = [f"{low}-{high}" if low < high else f"{low}" for low, high in spans[:_SPANS_SHOWN]]
    more = [f"... ({len(spans) - _SPANS_SHOWN} more)"] if len(spans) > _SPANS_SHOWN else []
    return ", ".join(shown + more) or "none"
