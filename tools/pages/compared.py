"""The tables of docs/integrations/README.md: frameworks' own weight updates beside ours, from tools/compare_frameworks.py."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

FILE = Path(__file__).resolve().parents[1] / "results" / "compare-cpu.json"
LINK = "../../tools/results/compare-cpu.json"
NAMES = {
    "sglang": "SGLang",
    "vllm": "vLLM, a whole `LLM`",
    "areal": "AReaL, with a whole `LLM` of vLLM",
    "verl": "verl, with a whole `LLM` of vLLM",
    "nemo_rl": "NeMo-RL",
}


def compared_section(file: Path = FILE) -> str:
    """A paragraph and a table for each framework."""
    runs = {run["framework"]: run for run in json.loads(file.read_text())["runs"]}
    return "\n\n".join(_framework(runs[framework]) for framework in NAMES if framework in runs)


def _framework(run: dict[str, Any]) -> str:
    versions = ", ".join(f"{name} {version}" for name, version in run["versions"].items())
    loads = [sample["load_before"] for sample in run["samples"]]
    ours = _median(run, "ours", "seconds")
    lines = [
        *textwrap.wrap(
            f"{NAMES[run['framework']]}: {run['model']}, {run['model_bytes'] / 1e6:.0f} MB in BF16, trainer"
            f" {run['train']}, engine {run['gen']}; {run['hardware']}, load {min(loads):.0f} to {max(loads):.0f}; {versions};"
            f" {run['date']} ([data]({LINK})).",
            100,
            break_long_words=False,
            break_on_hyphens=False,
        ),
        "",
        "| path | seconds | against ours | network | files or shared memory: written / handed over | memory: trainer | engine |",
        f"|{'---|' * 7}",
    ]
    for path, name in run["paths"].items():
        samples = _samples(run, path)
        seconds = _median(run, path, "seconds")
        files = "" if not samples[0].get("file_bytes", {}).get("written") else " / ".join(
            f"{median(sample['file_bytes'][kind] for sample in samples) / 1e6:,.0f} MB" for kind in ("written", "read")
        )  # fmt: skip
        shortest, longest = (each(sample["seconds"] for sample in samples) for each in (min, max))
        cells = [
            name,
            f"{seconds:.2f} ({shortest:.2f} to {longest:.2f})",
            "" if path == "ours" else f"{seconds / ours:.1f} x",
            f"{_median(run, path, 'network_bytes') / 1e6:,.0f} MB",
            files,
            *(_memory(run["kept_bytes"][path][side], [sample["peak_extra_bytes"][side] for sample in samples])
              for side in ("train", "gen")),
        ]  # fmt: skip
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def _memory(kept: Sequence[int], peaks: Sequence[Sequence[int]]) -> str:
    """Of the rank that needs most: what it keeps between updates, and what the update adds at its peak."""
    by_rank = [(median(rank_peaks), held) for held, *rank_peaks in zip(kept, *peaks, strict=True)]
    peak, held = max(by_rank, key=sum)
    return f"{max(held, 0) / 1e6:,.0f} + {peak / 1e6:,.0f} MB"


def _samples(run: dict[str, Any], path: str) -> list[dict[str, Any]]:
    return [sample for sample in run["samples"] if sample["path"] == path]


def _median(run: dict[str, Any], path: str, field: str) -> float:
    return float(median(sample[field] for sample in _samples(run, path)))
