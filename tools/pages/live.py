"""What live vLLM engines showed: the verdicts on refits, a whole model, a loop that learns."""

from __future__ import annotations

import json
import statistics
import textwrap
from pathlib import Path
from typing import Any

from .svg import Drawing

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINKS = "../tools/results"
MODEL_NAMES = {"qwen3": "Qwen3", "qwen3-moe": "Qwen3-MoE", "deepseek-v3": "DeepSeek-V3 (MLA)", "gpt-oss": "gpt-oss"}
ARMS = {
    "on": ("a refit after each step", "blue"),
    "all-but-one": ("one tensor held back", "orange"),
    "off": ("no refits after the first", "gray"),
}


def live_section(folder: Path = RESULTS) -> str:
    """A table of the verdicts of every machine."""
    return "\n\n".join(_live_table(file) for file in sorted(folder.glob("live-x[0-9]*.json")))


def _live_table(file: Path) -> str:
    data = json.loads(file.read_text())
    judged = [case for case in data["cases"] if "error" not in case]
    refits = [row for case in judged for row in case["refits"]]
    equal = sum(not case["problems"] for case in judged)
    tensors = sum(row["tensors"] for row in refits)
    wrong = sum(row["wrong_tensors"] for row in refits)
    lines = [
        _wrapped(
            f"{_about(data, file)}: {equal} of {len(data['cases'])} sessions equal, {len(refits)} refits,"
            f" {tensors:,} tensors compared, {wrong} with a wrong byte."
        ),
        "",
        "| model | engine | place | transport | mode | refits | tokens | log-probabilities | |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    for case in sorted(data["cases"], key=_order):
        cells = [
            MODEL_NAMES[case["model"]],
            case["gen_dtype"].upper(),
            case["place"],
            f"`{case['transport']}`",
            case["mode"],
        ]
        if "error" in case:
            lines.append(f"| {' | '.join(cells)} | | | | failed: {case['error'][:80]} |")
            continue
        rows = case["refits"]
        asked = sum(row["answers"] for row in rows)
        cells += [str(len(rows))]
        cells += [f"{sum(row[part] for row in rows)} of {asked}" for part in ("equal_tokens", "equal_logprobs")]
        lines.append(f"| {' | '.join(cells)} | {'; '.join(case['problems']) or 'equal'} |")
    return "\n".join(lines)


def _order(case: dict[str, Any]) -> tuple[Any, ...]:
    models = list(MODEL_NAMES)
    return (
        case["place"] != "one GPU",
        case["place"],
        case["gen_dtype"] != "bf16",
        models.index(case["model"]),
        case["mode"],
    )


def whole_section(folder: Path = RESULTS) -> str:
    """The whole model into a live engine on another GPU, by transport."""
    parts = []
    for file in sorted(folder.glob("live-whole-x*.json")):
        data = json.loads(file.read_text())
        parts += [
            _wrapped(f"{data['model']}, {_about(data, file)}:"),
            "",
            "| transport | GB | wrong parameters | a refit | GB/s | around the call | first refit | prepare |",
            "|---|---|---|---|---|---|---|---|",
        ]
        for row in data["whole"]:
            gigabytes = row["bytes"] / 1e9
            parts.append(
                f"| `{row['transport']}` | {gigabytes:.2f} | {row['wrong_parameters']} | {row['ms']:.1f} ms |"
                f" {gigabytes / row['ms'] * 1e3:.0f} | {row['called_ms']:.1f} ms | {row['first_ms']:.0f} ms |"
                f" {row['prepare_s']:.1f} s |"
            )
    return "\n".join(parts)


def whole_headline(folder: Path = RESULTS) -> str:
    """The README's row: the whole model into a live engine."""
    (file,) = sorted(folder.glob("live-whole-x*.json"))
    data = json.loads(file.read_text())
    row = min((row for row in data["whole"] if not row["wrong_parameters"]), key=lambda row: row["ms"])
    return (
        f"| **{row['ms'] / 1e3:.2f} s** | to refit the whole of Qwen3-30B-A3B, {row['bytes'] / 1e9:.0f} GB, into a live vLLM"
        f" engine on another H200, by `{row['transport']}`; every element was right ([data](tools/results/{file.name})) |"
    )


def grpo_section(folder: Path = RESULTS) -> str:
    """How the runs of the example ended."""
    file = folder / "grpo-x2.json"
    data = json.loads(file.read_text())
    steps = len(next(run["reward"] for run in data["runs"] if "reward" in run))
    lines = [
        _wrapped(
            f"{_about(data, file)}. {steps} steps, 5 seeds; the end is the mean of the last {data['last']} steps. Fixed"
            f" beforehand: at least {data['learned']} with refits, and {data['margin']} less than that seed without."
            f" {_verdict(data)}."
        ),
        "",
        "| refits | place | reward at the end, by seed | log-probabilities differ by | a refit |",
        "|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for run in data["runs"]:
        groups.setdefault((run["refits"], run["place"], bool(run.get("restart_at"))), []).append(run)
    for (refits, place, restarted), runs in groups.items():
        done = [run for run in runs if "reward" in run]
        ends = ", ".join(f"{statistics.mean(run['reward'][-data['last'] :]):.2f}" for run in done)
        differ = max((statistics.mean(run["difference"][-data["last"] :]) for run in done), default=0.0)
        seconds = statistics.median([s for run in done for s in run["refit_s"][1:]] or [0.0])
        name = ARMS[refits][0] + (f", engine killed at step {runs[0]['restart_at']}" if restarted else "")
        told = f"{seconds * 1e3:.0f} ms" if seconds else ""
        lines.append(f"| {name} | {place} | {ends} | {differ:.3f} | {told} |")
    return "\n".join(lines)


def _verdict(data: dict[str, Any]) -> str:
    """How many runs are where they must be, by arm."""
    with_refits = [run for run in data["runs"] if run["refits"] == "on"]
    learned = sum(statistics.mean(run["reward"][-data["last"] :]) >= data["learned"] for run in with_refits)
    without = len(data["runs"]) - len(with_refits)
    late = len(data["problems"]) - (len(with_refits) - learned)
    return (
        f"{learned} of {len(with_refits)} runs with refits got there in these steps, {without - late} of {without} runs"
        " without are that far below"
    )


def grpo_chart() -> str:
    """Reward against steps: a line for each seed of each arm."""
    data = json.loads((RESULTS / "grpo-x2.json").read_text())
    steps = max(len(run["reward"]) for run in data["runs"] if "reward" in run)
    drawing = Drawing(880, 360, "Reward of a policy that learns from scratch, with refits and without")
    drawing.text(16, 24, f"Share of right tokens in vLLM's answers, {data['hardware']}, 5 seeds", size=15)
    left, right, top, bottom = 60, 620, 50, 310
    for share in (0.0, 0.25, 0.5, 0.75, 1.0):
        y = bottom - (bottom - top) * share
        drawing.line([(left, y), (right, y)], "grid")
        drawing.text(left - 8, y + 4, f"{share:g}", "faint", "end", 12)
    for step in range(0, steps + 1, 50):
        drawing.text(left + (right - left) * step / steps, bottom + 18, str(step), "faint", "middle", 12)
    drawing.text((left + right) / 2, bottom + 36, "steps", "faint", "middle", 12)
    for number, (refits, (label, color)) in enumerate(ARMS.items()):
        for run in data["runs"]:
            if run["refits"] == refits and "reward" in run:
                smooth = [statistics.mean(run["reward"][max(0, i - 4) : i + 1]) for i in range(len(run["reward"]))]
                dashes = "5 3" if run.get("restart_at") else ""
                points = [
                    (left + (right - left) * (i + 1) / steps, bottom - (bottom - top) * reward)
                    for i, reward in enumerate(smooth)
                ]
                drawing.line(points, "limit" if color == "gray" else f"{color}-line", 1.5, dashes)
        y = 64 + 22 * number
        drawing.line([(right + 18, y), (right + 34, y)], "limit" if color == "gray" else f"{color}-line", 2)
        drawing.text(right + 40, y + 4, label, size=12)
    drawing.line([(right + 18, 130), (right + 34, 130)], "blue-line", 2, "5 3")
    drawing.text(right + 40, 134, "the engine killed half-way", size=12)
    return drawing.render()


def _about(data: dict[str, Any], file: Path) -> str:
    named = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    driver = f", driver {data['driver']}" if "driver" in data else ""
    return f"{data['hardware']}{driver}, {named}, {data['date']} ([data]({LINKS}/{file.name}))"


def _wrapped(text: str) -> str:
    return textwrap.fill(text, 100, break_long_words=False, break_on_hyphens=False)
