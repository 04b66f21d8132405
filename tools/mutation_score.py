"""Attack the proof and what follows it, and report the score: every known bug class, put in on purpose.

Three attacks: mutants written for the known bug classes; random damage to single fields; random wrong layouts that the
whole plan follows. A mutant counts as found only by the layer and rule that it was written for. Damage that the proof
accepts must be refused when bound, or be shown by simulation to change nothing. Results go to
tools/results/mutation_score.json; the exit status is 1 if anything got through. Needs what the tests need.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

from mcore_reshard import __version__

ROOT = Path(__file__).resolve().parent.parent
RESULTS = Path(__file__).parent / "results" / "mutation_score.json"

sys.path.insert(0, str(ROOT / "tests"))

from attack import single_field  # noqa: E402
from attack.mutants import BUGS, LAYERS, MUTANTS, NOTES  # noqa: E402
from attack.verdicts import EQUIVALENT, Verdict, attack  # noqa: E402
from attack.wrong_layouts import wrong_layouts  # noqa: E402
from helpers.plans import QUANTIZED, TINY  # noqa: E402


@dataclass(frozen=True)
class ClassScore:
    """One bug class: how many mutants, and what refused them ("layer: rule")."""

    bug: int
    title: str
    mutants: int
    refused: int
    by: dict[str, int]
    note: str

    @property
    def row(self) -> tuple[str, ...]:
        by = ", ".join(f"{rule} x{count}" if count > 1 else rule for rule, count in self.by.items())
        return f"#{self.bug}", self.title, f"{self.refused}/{self.mutants}", by


def bug_classes() -> Iterator[ClassScore]:
    for bug, title in BUGS.items():
        mutants_of_bug = [mutant for mutant in MUTANTS if mutant.bug == bug]
        by: Counter[str] = Counter()
        for mutant in mutants_of_bug:
            rejection = mutant.refused()
            if rejection is not None and (rejection.layer, rejection.rule) == mutant.expected:
                by[f"{rejection.layer}: {rejection.rule}"] += 1
            else:
                print(f"got through: {mutant}, expected {mutant.expected}, got {rejection}", file=sys.stderr)
        yield ClassScore(bug, title, len(mutants_of_bug), by.total(), dict(by), NOTES.get(bug, ""))


def random_attack(mutants: Callable[..., Any], seed: int, count: int) -> dict[str, Any]:
    """Damage each tiny plan `count` times: how many mutants each layer refused, and which got through."""
    verdicts: list[Verdict] = []
    for number, case in enumerate(TINY + QUANTIZED):
        verdicts += attack(case, mutants, seed + number, count)
    missed = [v for v in verdicts if v.by == "missed" or (v.by == "equivalent" and v.field not in EQUIVALENT)]
    for verdict in missed:
        print(f"got through: {verdict}", file=sys.stderr)
    equivalent = Counter(v.field for v in verdicts if v.by == "equivalent")
    bound = Counter(v.field for v in verdicts if v.by == "BindError")
    return {
        "plans": len(TINY + QUANTIZED),
        "mutants": len(verdicts),
        "refused_by_proof": len(verdicts)
        - equivalent.total()
        - bound.total()
        - sum(v.by == "missed" for v in verdicts),
        "refused_by_binding": dict(bound),
        "equivalent": {field: {"mutants": n, "because": EQUIVALENT.get(field, "")} for field, n in equivalent.items()},
        "missed": len(missed),
    }


def print_table(rows: Iterable[tuple[str, ...]]) -> None:
    rows = list(rows)
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    for row in rows:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--random", type=int, default=400, metavar="N", help="random mutants of each plan and attack")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS)
    arguments = parser.parse_args()
    started = time.perf_counter()
    classes = list(bug_classes())
    layers = Counter(layer for score in classes for rule, n in score.by.items() for layer in [rule.split(":")[0]] * n)
    total, refused = sum(score.mutants for score in classes), sum(score.refused for score in classes)
    damage = {
        "single_field": random_attack(single_field.mutants, arguments.seed, arguments.random),
        "wrong_layouts": random_attack(wrong_layouts, arguments.seed, arguments.random),
    }
    print_table([("class", "bug", "refused", "by (layer: rule)"), *(score.row for score in classes)])
    shown = layers["golden"] + layers["watch"]
    print(
        f"\n{refused} of {total} mutants of {len(classes)} bug classes found: {refused - shown} refused, {shown} shown"
    )
    for layer, meaning in LAYERS.items():
        print(f"  {layer:9} {layers[layer]:3}  {meaning}")
    for bug, note in NOTES.items():
        print(f"  #{bug}: {note}")
    for name, outcome in damage.items():
        bound = sum(outcome["refused_by_binding"].values())
        equivalent = sum(entry["mutants"] for entry in outcome["equivalent"].values())
        print(
            f"{name}: {outcome['mutants']} random mutants of {outcome['plans']} plans: {outcome['refused_by_proof']} refused by"
            f" the proof, {bound} when bound, {equivalent} change nothing, {outcome['missed']} got through"
        )
    arguments.out.parent.mkdir(exist_ok=True)
    report = {
        "date": date.today().isoformat(),
        "version": __version__,
        "seconds": round(time.perf_counter() - started, 1),
        "seed": arguments.seed,
        "classes": len(classes),
        "mutants": total,
        "found": refused,
        "refused_by_the_product": refused - shown,
        "shown_by_validation_or_tests": shown,
        "layers": {layer: layers[layer] for layer in LAYERS},
        "by_class": [vars(score) for score in classes],
        "random": damage,
    }
    arguments.out.write_text(json.dumps(report, indent=1) + "\n")
    return int(refused < total or any(outcome["missed"] for outcome in damage.values()))


if __name__ == "__main__":
    raise SystemExit(main())
