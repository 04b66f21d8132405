"""The table of frameworks' own paths beside ours, from numbers that are known."""

from __future__ import annotations

import json
from pathlib import Path

from pages.compared import compared_section

MB = 1_000_000


def sample(path: str, seconds: float, network: int, train: list[int], gen: list[int]) -> dict[str, object]:
    peak = {"train": train, "gen": gen}
    return {
        "path": path, "seconds": seconds, "network_bytes": network, "peak_extra_bytes": peak, "load_before": 2.0
    }  # fmt: skip


def test_medians_ratios_and_the_rank_that_needs_most(tmp_path: Path) -> None:
    theirs = [sample("disk", seconds, 20 * MB, [60 * MB, 30 * MB], [5 * MB]) for seconds in (3.0, 9.0, 4.0)]
    theirs = [{**each, "file_bytes": {"written": 10 * MB, "read": 40 * MB}} for each in theirs]
    ours = [sample("ours", seconds, 11 * MB, [0, 0], [0]) for seconds in (2.0, 1.0, 2.5)]
    run = {
        "framework": "sglang", "model": "a model", "model_bytes": 10 * MB, "train": "tp=2", "gen": "tp=1",
        "hardware": "a CPU", "date": "2026-11-23", "versions": {"sglang": "1.2"},
        "paths": {"disk": "from disk", "ours": "ours"},
        "kept_bytes": {
            "disk": {"train": [1 * MB, 40 * MB], "gen": [-4096]}, "ours": {"train": [8 * MB, 9 * MB], "gen": [7 * MB]}
        },
        "samples": [*theirs, *ours],
    }  # fmt: skip
    file = tmp_path / "compare.json"
    file.write_text(json.dumps({"runs": [run]}))
    text = compared_section(file)
    assert text.splitlines()[0].startswith(
        "SGLang: a model, 10 MB in BF16, trainer tp=2, engine tp=1; a CPU, load 2 to 2;"
    )
    assert text.splitlines()[-2:] == [
        "| from disk | 4.00 (3.00 to 9.00) | 2.0 x | 20 MB | 10 MB / 40 MB | 40 + 30 MB | 0 + 5 MB |",
        "| ours | 2.00 (1.00 to 2.50) |  | 11 MB |  | 9 + 0 MB | 7 + 0 MB |",
    ]
