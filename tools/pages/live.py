"""What live vLLM engines showed: the verdicts on refits, a whole model, a loop that learns."""

from __future__ import annotations

import json
import statistics
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

from live.cases import REFIT_WORKER, TRITON, Case, cases_on

from .svg import Drawing
from .text import wrapped

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINKS = "../tools/results"
IN_FLIGHT = "figures/in-flight.svg"
STAND_IN = "stand-in"
MODEL_NAMES = {"qwen3": "Qwen3", "qwen3-moe": "Qwen3-MoE", "deepseek-v3": "DeepSeek-V3 (MLA)", "gpt-oss": "gpt-oss"}
ARMS = {
    "on": ("a refit after each step", "blue"),
    "all-but-one": ("one tensor held back", "orange"),
    "off": ("no refits after the first", "gray"),
}


def live_section(folder: Path = RESULTS) -> str:
    """A table of the verdicts of every machine, and which cases were never judged."""
    files = sorted(folder.glob("live-x[0-9]*.json"))
    cases = [case for file in files for case in json.loads(file.read_text())["cases"]]
    return "\n\n".join([*(_live_table(file) for file in files), *_not_run(cases)])


def _not_run(cases: list[dict[str, Any]]) -> list[str]:
    """The cases of tools/live/cases.py that have no verdict among `cases`."""
    names = {field.name for field in fields(Case)}
    judged = {Case(**{name: case[name] for name in names & case.keys()}) for case in cases if "error" not in case}
    missing = [case for gpus in (1, 2) for case in cases_on(gpus) if case not in judged]
    lines = [f"- {', '.join(_cells(asdict(case)))}" for case in sorted(missing, key=lambda case: _order(asdict(case)))]
    return ["\n".join(["Not run:", "", *lines])] if missing else []


def _cells(case: dict[str, Any]) -> list[str]:
    """How a table names a case. Sessions before 2026-11-24 had BF16 trainers alone."""
    trainer, engine = case.get("train_dtype", "bf16").upper(), case["gen_dtype"].upper()
    door = ", ".join(filter(None, (case.get("door", REFIT_WORKER), case.get("feature", ""))))
    if (backend := case.get("fp8_backend", TRITON)) != TRITON:
        engine += f" ({backend})"
    model, transport = MODEL_NAMES[case["model"]], f"`{case['transport']}`"
    return [model, f"{trainer} -> {engine}", case["place"], transport, case["mode"], door]


def _live_table(file: Path) -> str:
    data = json.loads(file.read_text())
    judged = [case for case in data["cases"] if "error" not in case]
    refits = [row for case in judged for row in case["refits"]]
    equal = sum(not case["problems"] for case in judged)
    tensors = sum(row["tensors"] for row in refits)
    wrong = sum(row["wrong_tensors"] for row in refits)
    lines = [
        wrapped(
            f"{_about(data, file)}: {equal} of {len(data['cases'])} sessions equal, {len(refits)} refits,"
            f" {tensors:,} tensors compared, {wrong} with a wrong byte."
        ),
        "",
        "| model | trainer -> engine | place | transport | mode | door | Transformer Engine | refits | tokens"
        " | log-probabilities | |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for case in sorted(data["cases"], key=_order):
        cells = _cells(case)
        if "error" in case:
            lines.append(f"| {' | '.join(cells)} | | | | | failed: {case['error'][:80]} |")
            continue
        cells.append(case.get("transformer_engine", STAND_IN).removeprefix("transformer-engine "))
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
        case.get("train_dtype", "bf16") != "bf16",
        models.index(case["model"]),
        case["mode"],
        case["transport"],
        case.get("fp8_backend", TRITON),
        case.get("door", REFIT_WORKER),
        case.get("feature", ""),
    )


def whole_section(folder: Path = RESULTS) -> str:
    """The whole model into a live engine on another GPU, by transport."""
    parts = []
    for file in sorted(folder.glob("live-whole-x*.json")):
        data = json.loads(file.read_text())
        parts += [
            wrapped(f"{data['model']}, {_about(data, file)}:"),
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
        measured = {row["transport"] for row in data["whole"]}
        if missing := [f"`{transport}`" for transport in ("direct", "nccl") if transport not in measured]:
            parts += ["", f"Not measured: the same by {' and '.join(missing)}. The tool does it."]
    return "\n".join(parts)


def in_flight_section(folder: Path = RESULTS) -> str:
    """What an engine's answers feel of refits, by the number of CTAs: a figure and a table."""
    files = [file for file in sorted(folder.glob("live-whole-x*.json")) if in_flight_rows(file)]
    if not files:
        return "Tokens per second while an engine is refitted: not measured. The tool does it."
    parts = [f"![Tokens per second of an engine during refits and without]({IN_FLIGHT})"]
    for file in files:
        data = json.loads(file.read_text())
        parts += [
            "",
            wrapped(f"{data['model']}, {_about(data, file)}:"),
            "",
            "| CTAs | tokens/s without a refit | during one | share | a refit | refits |",
            "|---|---|---|---|---|---|",
        ]
        for row in in_flight_rows(file):
            without, during = row["tokens_per_s_without"], row["tokens_per_s_during"]
            parts.append(
                f"| {row['ctas']} | {without:,} | {during:,} | {during / without:.0%} | {row['refit_ms']:.1f} ms |"
                f" {row['refits']} |"
            )
        for day in sorted({row["date"] for row in in_flight_rows(file) if "date" in row}):
            earlier = ", ".join(str(row["ctas"]) for row in in_flight_rows(file) if row.get("date") == day)
            parts.append(f"\nRows of {earlier} CTAs: measured on {day}, the same hardware.")
    return "\n".join(parts)


def in_flight_rows(file: Path) -> list[dict[str, Any]]:
    """Rows of a file of tools/bench_live.py, by the number of CTAs."""
    return sorted(json.loads(file.read_text())["in_flight"], key=lambda row: row["ctas"])


def in_flight_chart(file: Path = RESULTS / "live-whole-x2.json") -> str:
    """Tokens per second against CTAs, during refits and without, with the time of a refit below each."""
    data, rows = json.loads(file.read_text()), in_flight_rows(file)
    drawing = Drawing(880, 340, "Tokens per second of a vLLM engine during refits and without, by the number of CTAs")
    drawing.text(16, 24, f"Tokens per second of {data['model']} while weights arrive, {data['hardware']}", size=15)
    left, right, top, bottom = 80, 640, 50, 270
    largest = max(max(row["tokens_per_s_without"], row["tokens_per_s_during"]) for row in rows)
    most = rows[-1]["ctas"]
    for quarter in range(5):
        y = bottom - (bottom - top) * quarter / 4
        drawing.line([(left, y), (right, y)], "grid")
        drawing.text(left - 8, y + 4, f"{largest * quarter / 4:,.0f}", "faint", "end", 12)
    for row in rows:
        x = left + (right - left) * row["ctas"] / most
        drawing.text(x, bottom + 18, str(row["ctas"]), "faint", "middle", 12)
        drawing.text(x, bottom + 36, f"{row['refit_ms']:.0f}", "faint", "middle", 12)
    drawing.text(right + 30, bottom + 18, "CTAs of a refit", "faint", size=12)
    drawing.text(right + 30, bottom + 36, "ms of a refit", "faint", size=12)
    for number, (part, label, color) in enumerate(
        (("tokens_per_s_without", "without a refit", "gray"), ("tokens_per_s_during", "during one", "blue"))
    ):
        points = [
            (left + (right - left) * row["ctas"] / most, bottom - (bottom - top) * row[part] / largest) for row in rows
        ]
        drawing.line(points, "limit" if color == "gray" else f"{color}-line", 2)
        for point in points:
            drawing.dot(*point, color)
        drawing.dot(right + 36, 64 + 22 * number, color)
        drawing.text(right + 46, 68 + 22 * number, label, size=12)
    return drawing.render()


def whole_headline(folder: Path = RESULTS) -> str:
    """The README's row: the whole model into a live engine."""
    (file,) = sorted(folder.glob("live-whole-x*.json"))
    data = json.loads(file.read_text())
    row = min((row for row in data["whole"] if not row["wrong_parameters"]), key=lambda row: row["ms"])
    return (
        f"| **{row['ms'] / 1e3:.2f} s** | to refit the whole of Qwen3-30B-A3B, {row['bytes'] / 1e9:.0f} GB, into a live vLLM"
        f" engine on another {_gpu(data)}, by `{row['transport']}`; every element was right ([data](tools/results/{file.name})) |"
    )


def grpo_section(folder: Path = RESULTS) -> str:
    """How the runs of the example ended."""
    file = folder / "grpo-x2.json"
    data = json.loads(file.read_text())
    steps = len(next(run["reward"] for run in data["runs"] if "reward" in run))
    lines = [
        wrapped(
            f"{_about(data, file)}. {steps} steps, 5 seeds; the end is the mean of the last {data['last']} steps. Fixed"
            f" beforehand: at least {data['learned']} with refits, and {data['margin']} less than that seed without."
            f" {_verdict(data)}."
        ),
        "",
        "| refits | place | reward at the end, by seed | log-probabilities differ by, at the end, by seed | a refit |",
        "|---|---|---|---|---|",
    ]
    groups: dict[tuple[str, str, bool], list[dict[str, Any]]] = {}
    for run in data["runs"]:
        groups.setdefault((run["refits"], run["place"], bool(run.get("restart_at"))), []).append(run)
    for (refits, place, restarted), runs in groups.items():
        done = [run for run in runs if "reward" in run]
        ends = ", ".join(f"{statistics.mean(run['reward'][-data['last'] :]):.2f}" for run in done)
        differ = ", ".join(f"{statistics.mean(run['difference'][-data['last'] :]):.3f}" for run in done)
        seconds = statistics.median([s for run in done for s in run["refit_s"][1:]] or [0.0])
        name = ARMS[refits][0] + (f", engine killed at step {runs[0]['restart_at']}" if restarted else "")
        told = f"{seconds * 1e3:.0f} ms" if seconds else ""
        lines.append(f"| {name} | {place} | {ends} | {differ} | {told} |")
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


def _gpu(data: dict[str, Any]) -> str:
    """ "2 x NVIDIA H200" -> "H200"."""
    return str(data["hardware"]).rpartition(" x ")[2].removeprefix("NVIDIA ")


def _about(data: dict[str, Any], file: Path) -> str:
    named = ", ".join(f"{name} {version}" for name, version in data["versions"].items())
    driver = f", driver {data['driver']}" if "driver" in data else ""
    return f"{data['hardware']}{driver}, {named}, {data['date']} ([data]({LINKS}/{file.name}))"
