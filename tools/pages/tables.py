"""The tables of README.md and docs/ that are made from data files, and from the list of validated cases.

`SECTIONS` has a function for every marked section; `docs.py` writes what it returns between the marks.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from statistics import mean
from typing import Any

from . import compared, live, prepared, reliability, simulated
from .text import noted, wrapped

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "tools" / "results"
LINKS = "../tools/results"  # as pages in docs/ name the data files


def numbers_section() -> str:
    """Four figures for the README."""
    refit = json.loads((RESULTS / "refit-x4.json").read_text())
    direct = next(row for row in refit["rows"] if (row["workload"], row["method"]) == ("moe-ep-tp", "direct"))
    session = next(
        row for row in refit["rows"] if (row["workload"], row["method"]) == ("moe-ep-tp", "session:transport=direct")
    )
    gigabytes = direct["gb_per_receiver"] * 2
    planner = json.loads((RESULTS / "planner.json").read_text())
    case = next(c for c in planner["cases"] if c["train_ranks"] == 256 and "ep=" not in c["gen"])
    seconds = case["seconds"]["plan"] + case["seconds"]["proof"]
    attack = json.loads((RESULTS / "mutation_score.json").read_text())
    here = "tools/results"
    return "\n".join(
        [
            "| | |",
            "|---|---|",
            live.whole_headline(),
            f"| **{direct['ms']:.0f} ms** | to move Qwen3-30B-A3B, {gigabytes:.0f} GB, from 2 H200s to 2 H200s by `direct`,"
            f" which reads GPU memory: {direct['share']:.0%} of the copy engines' rate. A whole `refit()` took"
            f" {session['ms']:.0f} ms ([data]({here}/refit-x4.json)) |",
            f"| **{seconds:.2f} s** | planning and proof of DeepSeek-V3, {case['train_ranks']} to {case['gen_ranks']}"
            f" ranks, {case['transfers'] / 1e6:.1f} million transfers ([data]({here}/planner.json)) |",
            f"| **{attack['found']} of {attack['mutants']}** | bugs put in on purpose, of {attack['classes']} classes,"
            f" were found ([data]({here}/mutation_score.json)) |",
        ]
    )


def planner_section() -> str:
    data = json.loads((RESULTS / "planner.json").read_text())
    lines = [
        wrapped(
            f"DeepSeek-V3, every HF parameter: {data['what']}. {data['cpu']}, Python {data['python']}, numpy"
            f" {data['numpy']}, {data['date']} (`make bench`, [data]({LINKS}/planner.json))."
        ),
        "",
        "| ranks | transfers | transfer groups | plan | proof | one rank's schedule (train / gen) | peak memory | plan file |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for case in sorted(data["cases"], key=lambda c: (c["train_ranks"], c["transfers"])):
        seconds = case["seconds"]
        gen_ep = ", gen EP" if "ep=" in case["gen"] else ""
        lines.append(
            f"| {case['train_ranks']:,} -> {case['gen_ranks']:,}{gen_ep} | {case['transfers']:,} | {case['transfer_groups']:,} |"
            f" {seconds['plan']:.2f} s | {seconds['proof']:.2f} s |"
            f" {seconds['train_schedule']:.2f} / {seconds['gen_schedule']:.2f} s |"
            f" {case['peak_rss_mb']:.0f} MB | {case['plan_file_bytes'] / 1e3:.0f} kB |"
        )
    return "\n".join(lines)


def support_section() -> str:
    """A row for each mesh that is validated, a column for each family."""
    from helpers import validation_cases as cases  # of the tests

    families = list(cases.FAMILIES)
    lines = ["| mesh | " + " | ".join(families) + " |", "|---|" + "---|" * len(families)]
    for name, (train, gen, overrides, _) in cases.MESHES.items():
        changed = "".join(f", {_CHANGED[field]}: {value}" for field, value in overrides.items())
        marks = [cases.standing(family, name) for family in families]
        lines.append(f"| `{train}` -> `{gen}`{changed} | " + " | ".join(marks) + " |")
    return "\n".join(lines)


# Fields of a config that cases change, in the words of the table.
_CHANGED = {"num_key_value_heads": "KV heads", "vocab_size": "vocabulary"}


def attack_section() -> str:
    data = json.loads((RESULTS / "mutation_score.json").read_text())
    return wrapped(
        f"The attack ({data['date']}, [data]({LINKS}/mutation_score.json), `python tools/mutation_score.py`):"
        f" {data['found']} of {data['mutants']} mutants of {data['classes']} bug classes are found. The product refuses"
        f" {data['refused_by_the_product']} before or while bytes move. Only golden or tests can show the other"
        f" {data['shown_by_validation_or_tests']}, and they do."
    )


_NCCL_ROUNDS = "2026-11-23"  # since when nccl sends all stages at once


def gpu_section(folder: Path = RESULTS) -> str:
    """Every run of tools/bench_refit.py: what was measured on, all rows, and what was not measured and why."""
    parts = []
    for file in _runs(folder):
        data = json.loads(file.read_text())
        named = _versions(data)
        driver = f", driver {data['driver']}" if "driver" in data else ""
        named += "".join(f", {name}={value}" for name, value in data["environment"].items() if name != "NCCL_VERSION")
        parts.append(wrapped(f"{data['hardware']}{driver}, {named}, {data['date']} ([data]({LINKS}/{file.name})):"))
        parts.append(_measured_table(data))
        if data["date"] < _NCCL_ROUNDS and any(row["method"].startswith("nccl") for row in data["rows"]):
            parts.append(wrapped(f"Rows of `nccl` are from before the rounds of today ({_NCCL_ROUNDS})."))
        if "note" in data:
            parts.append(wrapped(noted(data).strip()))
        if lines := _not_measured(data):
            parts.append("\n".join(["Not measured:", "", *lines]))
    return "\n\n".join(parts)


def shared_section(folder: Path = RESULTS) -> str:
    """Runs of tools/bench_refit.py in which ranks share GPUs; nothing where there are none."""
    runs = [(file, json.loads(file.read_text())) for file in sorted(folder.glob("refit-[a-z]*-x*.json"))]
    if not runs:
        return ""
    first = runs[0][1]
    dtypes = {name: workload["dtypes"] for name, workload in first["workloads"].items()}
    dates = [data["date"] for _, data in runs]
    lines = [
        wrapped(
            f"Driver {first['driver']}, {_versions(first)}, from {min(dates)} to {max(dates)}"
            " (`python tools/bench_refit.py --colocated`, or `--ranks 4` on two GPUs):"
        ),
        "",
        f"| GPUs | ranks | processes on a GPU | method | {' | '.join(name.upper() for name in dtypes.values())} | data |",
        f"|{'---|' * (len(dtypes) + 5)}",
    ]
    for file, data in runs:
        by_mps = any(name.startswith("CUDA_MPS_") for name in data["environment"])
        runs_on = "at the same time (MPS)" if by_mps else "in turns"
        for method in dict.fromkeys(row["method"] for row in data["rows"]):
            by_workload = {
                row["workload"]: row for row in data["rows"] if row["method"] == method and "skipped" not in row
            }
            cells = [f"{by_workload[name]['ms']:.1f} ms" if name in by_workload else "" for name in dtypes]
            link = f"[data]({LINKS}/{file.name})"
            lines.append(
                f"| {data['hardware']} | {data['shared']} | {runs_on} | `{method}` | {' | '.join(cells)} | {link} |"
            )
    for _, data in runs:
        if "note" in data:
            lines += ["", wrapped(f"{data['hardware']}, {data['shared']}: data {data['note']}.")]
    return "\n".join(lines)


def one_gpu_section() -> str:
    """Refits within one GPU, by how many CTAs pull."""
    data = json.loads((RESULTS / "one-gpu-x1.json").read_text())
    (workload,) = data["workloads"].values()
    limit = next(row for row in data["rows"] if row["method"] == "copy-engine")["gb_per_s_per_receiver"]
    lines = [
        wrapped(
            f"{workload['model']}, {workload['layers']} layers, BF16, {data['hardware']}, driver {data['driver']},"
            f" {_versions(data)}, {data['date']} ([data]({LINKS}/one-gpu-x1.json)):"
        ),
        "",
        "| method | ms | GB/s | of the copy engine |",
        "|---|---|---|---|",
    ]
    for row in data["rows"]:
        reached = row["gb_per_s_per_receiver"]
        share = "" if reached == limit else f"{reached / limit:.2f}"
        lines.append(f"| `{row['method']}` | {row['ms']:.1f} | {reached:,.0f} | {share} |")
    return "\n".join(lines)


def apart_section() -> str:
    """Refits between processes that see one GPU each, beside those that see all; and over sockets alone."""
    data = json.loads((RESULTS / "isolated-x2.json").read_text())
    ms = {(row["workload"], row["method"]): row["ms"] for row in data["rows"]}
    lines = [
        wrapped(
            f"{data['hardware']}, driver {data['driver']}, {_versions(data)}, {data['date']}"
            f" (`python tools/bench_refit.py --isolated`, [data]({LINKS}/isolated-x2.json)):"
        ),
        "",
        "| weights | method | all GPUs visible | one to each process |",
        "|---|---|---|---|",
    ]
    for (workload, method), seen in ms.items():
        if alone := ms.get((f"{workload}, isolated", method)):
            model = data["workloads"][workload]["model"]
            lines.append(f"| {model} | `{method}` | {seen:.1f} ms | {alone:.1f} ms |")
    data = json.loads((RESULTS / "sockets-x2.json").read_text())
    (row,) = (row for row in data["rows"] if row["method"] == "nccl")
    (model,) = {each["model"] for each in data["workloads"].values()}
    settings = " and ".join(f"`{name}=1`" for name, value in data["environment"].items() if value == "1")
    lines += [
        "",
        wrapped(
            f"With {settings} the same GPUs exchange bytes by sockets alone, as two hosts do:"
            f" {model} takes {row['ms'] / 1e3:.2f} s over `nccl`, {row['gb_per_s_per_receiver']:.1f} GB/s, byte-exact"
            f" ({data['date']}, [data]({LINKS}/sockets-x2.json))."
        ),
    ]
    return "\n".join(lines)


def links_section(folder: Path = RESULTS) -> str:
    return _links_table(folder / "links-x4.json")


def _links_table(file: Path) -> str:
    data = json.loads(file.read_text())
    lines = [
        wrapped(
            f"{data['what']}, {data['hardware']}, driver {data['driver']}, torch {data['versions']['torch']},"
            f" {data['date']} (`python tools/bench_links.py`, [data]({LINKS}/{file.name})).{noted(data)}"
        ),
        "",
        "| GPUs | copy engines | pushing | our kernel, one source after another | in turns of a tile | pushing |"
        " two kernels that pull | one that pulls, one that pushes |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        two = [
            ", ".join(f"{rate:.0f} ({ctas})" for ctas, rate in row.get(way, {}).items())
            for way in ("two_pulls", "pull_and_push")
        ]
        rates = [row.get(way) for way in ("copy_engine", "engine_push", "pull", "pull_by_tile", "push_by_tile")]
        cells = [row["pattern"], *("" if rate is None else f"{rate:.0f}" for rate in rates), *two]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def puts_section() -> str:
    """A table of each kind of GPU."""
    return "\n\n".join(map(_puts_table, sorted(RESULTS.glob("puts-x2*.json"), reverse=True)))


def _puts_table(file: Path) -> str:
    """A row for each way and size of message: by each library, and what the receiver keeps of matrix products."""
    data = json.loads(file.read_text())
    lines = [
        wrapped(
            f"{data['hardware']}, {data['date']}: GB/s from one to the other, and of its speed in matrix products, what the"
            f" receiver keeps meanwhile (`python tools/bench_puts.py`, [data]({LINKS}/{file.name})):"
        ),
        "",
        "| by | messages | GB/s | matrix products |",
        "|---|---|---|---|",
    ]
    *_, copied = (row for row in data["rows"] if row["method"] == "copy engine")
    for row in data["rows"]:
        by = row["method"] if row is copied else f"{row['method']}, {row['library']}"
        size = "-" if row["message_mib"] is None else f"{row['message_mib']} MiB"
        if row["method"] != "copy engine" or row is copied:  # the last one
            lines.append(f"| {by} | {size} | {row['gb_per_s']:.0f} | {min(1.0, row['matmuls']):.0%} |")
    return "\n".join(lines)


def kernels_section(folder: Path = RESULTS) -> str:
    """The results of tools/bench_kernels.py; nothing where it was not run."""
    file = folder / "kernels-x2.json"
    if not file.exists():
        return ""
    data = json.loads(file.read_text())
    cases = list(data["cases"])
    tried = [
        (row["method"], row["case"], attempt) for row in data["rows"] for attempt in row["tried"] if "ms" in attempt
    ]

    def best(method: str, case: str, most_ctas: int) -> dict[str, Any] | None:
        fitting = [
            attempt
            for row_method, row_case, attempt in tried
            if row_method.startswith(method) and row_case == case and attempt["config"].get("ctas", 0) <= most_ctas
        ]
        return min(fitting, key=lambda attempt: attempt["ms"], default=None)

    lines = [
        wrapped(
            f"{data['what']}, {data['hardware']}, driver {data['driver']}, {_versions(data)}, {data['date']}"
            f" (`python tools/bench_kernels.py`, [data]({LINKS}/{file.name})).{noted(data)} Each figure is the best of"
            " several configurations. The first launch is that of a small table in a fresh process, compiling included."
        ),
        "",
        "Columns:",
        "",
        *(wrapped(f"- {name}: {case['what']}", "  ") for name, case in data["cases"].items()),
        "",
        f"| method | {' | '.join(cases)} | launches | first launch |",
        f"|{'---|' * (len(cases) + 3)}",
    ]
    for label, method, most_ctas in (
        ("copy engine", "copy engine", 0),
        ("ours, 48 CTAs", "ours", 48),
        ("ours, 132 CTAs", "ours", 132),
        ("Triton, 48 CTAs", "Triton", 48),
        ("Triton, up to 264 CTAs", "Triton", 264),
        ("bulk copies (TMA), up to 132 CTAs", "bulk", 132),
    ):
        attempts = [best(method, case, most_ctas) for case in cases]
        rates = " | ".join(f"{attempt['gb_per_s']:.0f}" if attempt else "" for attempt in attempts)
        launches = sorted({attempt["launches"] for attempt in attempts if attempt})
        firsts = [s for name, s in data["first_launch_s"].items() if name.startswith(method) and not isinstance(s, str)]
        first = f"{min(firsts):.2f} s" if firsts else ""
        lines.append(f"| {label} | {rates} | {' to '.join(map(str, launches))} | {first} |")
    if failed := [row for row in data["rows"] if "error" in row]:
        lines += ["", "Not measured:", ""]
        lines += [wrapped(f"- {row['method']}, {row['case']}: {row['error']}.", "  ") for row in failed]
    return "\n".join(lines)


def profile_section(folder: Path = RESULTS) -> str:
    """The results of tools/profile_kernels.py; nothing where it was not run."""
    file = folder / "profile-x1.json"
    if not file.exists():
        return ""
    data = json.loads(file.read_text())
    lines = [
        wrapped(
            f"{data['model']}, {data['hardware']}, driver {data['driver']}, {_versions(data)}, {data['date']}"
            f" (`python tools/profile_kernels.py`, [data]({LINKS}/{file.name}))."
        ),
        "",
        "| kernel | CTAs | reads | writes | ms | TB/s of memory | memory is busy | multiprocessors are | warps wait for |",
        f"|{'---|' * 9}",
    ]
    for row in data["rows"]:
        terabytes = (row["dram_read_mb"] + row["dram_written_mb"]) / row["us"]
        stalls = ", ".join(f"{_STALLS.get(name, name)} {share:.0%}" for name, share in row["stalled_on"].items())
        lines.append(
            f"| `{row['kernel']}` | {row['ctas']} | {row['dram_read_mb'] / 1e3:.1f} GB | {row['dram_written_mb'] / 1e3:.1f} GB"
            f" | {row['us'] / 1e3:.2f} | {terabytes:.2f} | {row['dram_percent']:.0f}% | {row['sm_percent']:.0f}% | {stalls} |"
        )
    return "\n".join(lines)


_STALLS = {  # ncu's names of what warps wait for
    "long_scoreboard": "memory",
    "short_scoreboard": "shared memory",
    "barrier": "other warps",
    "wait": "a fixed latency",
    "selected": "nothing",
}


def source_checks_section(folder: Path = RESULTS) -> str:
    """The runs of tools/bench_source_checks.py: what the checks cost a pull, and passes over other samples."""
    parts = []
    for file in sorted(folder.glob("source-checks-x*.json")):
        data = json.loads(file.read_text())
        off = {row["workload"]: row["ms"] for row in data["rows"] if row["checks"] == "off"}
        lines = [
            wrapped(
                f"{data['hardware']}, driver {data['driver']}, {_versions(data)}, {data['date']}"
                f" (`python tools/bench_source_checks.py`, [data]({LINKS}/{file.name})). Medians of {data['repeats']} pulls,"
                " from one rank to one rank."
            ),
            "",
            "| weights | GB in tensors | pull without checks | checks | pull | cost | both passes alone | tiles | memory |",
            f"|{'---|' * 9}",
        ]
        for row in data["rows"]:
            if row["checks"] == "off":
                continue
            weights, ms = data["workloads"][row["workload"]], off[row["workload"]]
            size = f"{weights['gb']:.1f} in {weights['tensors']:,}"
            cells = [weights["what"], size, f"{ms:.1f} ms"] if row["checks"] == "sampled" else ["", "", ""]
            cells += [f"`{row['checks']}`", f"{row['ms']:.1f} ms", f"{row['cost']:.1%}", f"{row['passes_ms']:.2f} ms"]
            lines.append(f"| {' | '.join(cells)} | {row['tiles']:,} | {row['memory_mb']:.0f} MB |")
        shares = sorted({each["share"] for each in data["sweep"]})
        lines += [
            "",
            "Both passes over other samples of the first weights, in ms; 0% is one tile of each tensor:",
            "",
            f"| tile | {' | '.join(f'{share:.0%}' for share in shares)} |",
            f"|{'---|' * (len(shares) + 1)}",
        ]
        for tile in sorted({each["tile_bytes"] for each in data["sweep"]}):
            by_share = {each["share"]: each["passes_ms"] for each in data["sweep"] if each["tile_bytes"] == tile}
            lines.append(f"| {tile >> 10} KiB | {' | '.join(f'{by_share[share]:.2f}' for share in shares)} |")
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def session_cost_section(file: Path = RESULTS / "session-cost-x2.json") -> str:
    """Whole refits by two revisions, launched in turns on one machine: one column a launch."""
    data = json.loads(file.read_text())
    sessions = [row for row in data["rows"] if row["method"] == "session"]
    what = {"none": "before, no checks", "off": "now, `source_checks='off'`", "sampled": "now, `sampled`"}
    means = {kind: mean(row["ms"] for row in sessions if row["source_checks"] == kind) for kind in what}
    lines = [
        wrapped(
            f"Qwen3-30B-A3B, 61 GB in 12,627 tensors, one H200 to another. {data['hardware']}, driver {data['driver']},"
            f" {_versions(data)}, {data['date']} ([data]({LINKS}/{file.name})). Medians of {data['repeats']} refits a launch."
        ),
        "",
        "| revision | checks | launches | mean | against before |",
        f"|{'---|' * 5}",
    ]
    for kind, title in what.items():
        launches = [row for row in sessions if row["source_checks"] == kind]
        when, _, checks = title.partition(", ")
        times = ", ".join(f"{row['ms']:.1f}" for row in launches)
        change = f"{means[kind] / means['none'] - 1:+.1%}" if kind != "none" else ""
        lines.append(
            f"| `{launches[0]['revision']}`, {when} | {checks} | {times} ms | {means[kind]:.1f} ms | {change} |"
        )
    return "\n".join(lines)


def _versions(data: dict[str, Any]) -> str:
    return ", ".join(f"{name} {version}" for name, version in data["versions"].items())


def goals_section(folder: Path = RESULTS) -> str:
    """The goals of every run; one that a run did not measure is named below its table if another did."""
    runs = [json.loads(file.read_text()) for file in _runs(folder)]
    by_run = [_goals(data["rows"]) for data in runs]
    measured = {verdict.figure for verdicts in by_run for verdict in verdicts if verdict.reached is not None}
    parts = []
    for data, verdicts in zip(runs, by_run, strict=True):
        ranks = next(iter(data["workloads"].values()))["ranks"]
        lines = [f"| on {data['hardware']}, {ranks} | goal | measured | |", "|---|---|---|---|"]
        missing = [verdict.figure for verdict in verdicts if verdict.reached is None and verdict.figure in measured]
        lines += [_goal_row(verdict.figure, verdict) for verdict in verdicts if verdict.figure not in missing]
        if missing:
            lines += ["", wrapped(f"Not measured in this run: {'; '.join(missing)}.")]
        parts.append("\n".join(lines))
    return "\n\n".join([*parts, *_other_goals(folder)])


def _other_goals(folder: Path) -> list[str]:
    """A table of the goals that are not of one run of bench_refit alone, each with the hardware and day of its run."""
    from bench.goals import live_session, mutual_reads, one_gpu, one_to_three, prepares

    data = {file.stem: json.loads(file.read_text()) for file in sorted(folder.glob("*.json"))}
    found = []
    if (run := data.get("live-whole-x2")) and (refits := data.get("refit-x2")):
        limit = next(row for row in refits["rows"] if row["method"] == "copy-engine")
        on = f"{refits['hardware']}, {refits['date']}"
        found += [(run, live_session(row, limit, on)) for row in run["whole"] if row["transport"] == "direct"]
    if run := data.get("prepare-x1"):
        found += [(run, verdict) for verdict in prepares(run)]
    if links := data.get("links-x4"):
        for run in (data[file.stem] for file in _runs(folder)):
            on = links["hardware"] if links["hardware"] != run["hardware"] else ""
            rows = [row for row in run["rows"] if row["workload"] == "moe-one-to-many" and "skipped" not in row]
            found += [(run, one_to_three(row, links["rows"], on)) for row in rows]
        if run := data.get("refit-colocated-x2"):
            on = links["hardware"] if links["hardware"] != run["hardware"] else ""
            rows = [row for row in run["rows"] if (row["workload"], row["method"]) == ("moe-ep-tp", "direct")]
            found += [(run, mutual_reads(row, links["rows"], on)) for row in rows]
    if run := data.get("one-gpu-x1"):
        found.append((run, one_gpu(run["rows"])))
    lines = ["| on the hardware named | goal | measured | |", "|---|---|---|---|"]
    lines += [_goal_row(f"{verdict.figure} ({run['hardware']}, {run['date']})", verdict) for run, verdict in found]
    return ["\n".join(lines)] if found else []


def _goal_row(figure: str, verdict: Any) -> str:
    mark = {True: "reached", False: "**not reached**", None: ""}[verdict.reached]
    return f"| {figure} | {verdict.goal} | {verdict.measured} | {mark} |"


def _runs(folder: Path) -> list[Path]:
    """The files of tools/bench_refit.py, of the most GPUs first: refit-x4.json, refit-x2.json, refit-x2-h100.json."""

    def gpus_and_kind(file: Path) -> tuple[int, str]:
        count, _, kind = file.stem.removeprefix("refit-x").partition("-")
        return -int(count), kind

    return sorted(folder.glob("refit-x*.json"), key=gpus_and_kind)


def _goals(rows: list[dict[str, Any]]) -> list[Any]:
    from bench.goals import verdicts

    return verdicts(rows)


def _measured_table(data: dict[str, Any]) -> str:
    lines = [
        "| weights | ranks | method | ms | GB/s per receiver | share of the limit | first call | prepare |"
        " extra memory | host CPU |",
        "|---|---|---|---|---|---|---|---|---|---|",
    ]
    for name, workload in data["workloads"].items():
        what = f"{workload['model']}: {workload['what']}, {workload['train']} -> {workload['gen']}"
        for row in data["rows"]:
            if row["workload"] != name or "skipped" in row:
                continue
            share = f"{row['share']:.3f} of {row['share_of']}" if "share" in row else ""
            ms = f"{row['ms']:,.1f}" if row["ms"] < 1000 else f"{row['ms']:,.0f}"
            first = f"{row['first_ms']:,.0f} ms" if "first_ms" in row else "-"
            lines.append(
                f"| {what} | {workload['ranks']} | `{row['method']}` | {ms} | {row['gb_per_s_per_receiver']:.3g} |"
                f" {share} | {first} | {row['prepare_s']:.1f} s | {row['extra_memory_mb']:,.0f} MB |"
                f" {row['host_cpu_ms']:,.1f} ms |"
            )
            what, workload = "", {**workload, "ranks": ""}
    return "\n".join(lines)


def _not_measured(data: dict[str, Any]) -> list[str]:
    """A line for each reason, with the methods and workloads that it kept from running."""
    reasons: dict[tuple[str, str], list[str]] = {}
    for row in data["rows"]:
        if "skipped" in row:
            workload = data["workloads"][row["workload"]]
            what = f"{workload['model']}: {workload['what']}"
            reasons.setdefault((row["method"], row["skipped"]), []).append(what)
    return [
        wrapped(f"- `{method}`, {'; '.join(names)}: {reason}.", "  ") for (method, reason), names in reasons.items()
    ]


def gpu_validation_section() -> str:
    from helpers import validation_cases as cases

    lines = []
    for file in sorted(RESULTS.glob("validate-x*.json")):
        data = json.loads(file.read_text())
        gpus = int(data["hardware"].split(" ")[0])
        compared = [case for case in data["cases"] if "refused" not in case]
        refused: dict[str, list[str]] = {}
        for case in data["cases"]:
            if "refused" in case:
                refused.setdefault(case["refused"].rpartition(": ")[2], []).append(case["family"])
        counts = []
        not_run = -len(data["cases"])
        for transport in sorted({case["transport"] for case in data["cases"]}):
            done = sum(case["transport"] == transport for case in compared)
            fitting = len(cases.on_gpus(gpus, shared=transport == "direct"))
            not_run += fitting
            counts.append(f"`{transport}` {done} of {fitting}")
        sentences = [
            f"- On {data['hardware']} ({data['source']}; torch"
            f" {data['versions']['torch']}, NCCL {data['versions']['nccl']}, {data['date']},"
            f" [data]({LINKS}/{file.name})).{noted(data)} Cases compared of those that fit: {', '.join(counts)}."
            f" They are {sum(case.get('tensors', 0) for case in compared):,} tensors,"
            f" {sum(case.get('wrong', 1) for case in compared)} with a wrong byte.",
            *(
                f"Besides, {len(families)} cases ({', '.join(sorted(set(families)))}) are refused because of"
                f" Megatron-Bridge: {why}."
                for why, families in sorted(refused.items())
            ),
            *(["The others were not run."] if not_run else []),
        ]
        lines.append(wrapped(" ".join(sentences), "  "))
    return "\n".join(lines)


def coverage_section(folder: Path = RESULTS) -> str:
    """The runs of tools/cover_traced.py: a table of families, meshes and precision each, then what does not go by bulk."""
    files = (folder / name for name in ("coverage.json", "coverage-newest.json"))
    return "\n\n".join(_coverage(file) for file in files if file.exists())


def _coverage(file: Path) -> str:
    from helpers.traced_cases import MESHES  # of the tests

    data = json.loads(file.read_text())
    cases = data["cases"]
    refits = [case for case in cases if case["mesh"]]
    compared = [case for case in refits if "refits" in case]
    dates = sorted({case["date"] for case in cases})
    parts = [
        wrapped(
            f"{_versions(data)}; {' to '.join(dict.fromkeys((dates[0], dates[-1])))}, [data]({LINKS}/{file.name})."
            f" {len(compared)} cases, three refits each: {sum(case['tensors'] for case in compared):,} tensors compared,"
            f" {sum(case['wrong'] for case in compared)} with a wrong byte."
        ),
        "\n".join(_refits_table(refits, list(MESHES))),
    ]
    for route, text in (("misc", "By misc"), ("excluded", "Excluded")):
        if found := _unplanned(compared, route):
            parts += [f"{text}:", "\n".join(found)]
    if refused := [case for case in refits if "refused" in case]:
        meshes: dict[tuple[str, str], list[str]] = {}
        for case in refused:  # in the words of an upstream, which do not depend on the mesh
            reason, *tensors = re.sub(r" at \S+=\S+, or not load it", "", case["refused"]).rstrip(".").splitlines()
            if tensors:  # by rank
                reason += f" {tensors[0].partition(':')[2].partition(': ')[2]}" + ", and more" * (len(tensors) > 1)
            meshes.setdefault((reason, _family(case["model"])), []).append(case["mesh"])
        lines = _by_reason((why, f"{family} ({', '.join(found)})") for (why, family), found in meshes.items())
        parts += ["Refused:", "\n".join(lines)]
    if drawn := data["random"]:
        refitted = [case for case in drawn if "refits" in case]
        parts.append(
            wrapped(
                f"Random tiny models, those with rules too (`tests/helpers/random_cases.py`): {len(refitted)} of"
                f" {len({case['model'] for case in refitted})} families on random meshes, two refits each:"
                f" {sum(case['tensors'] for case in refitted):,} tensors compared,"
                f" {sum(case['wrong'] for case in refitted)} with a wrong byte. {len(drawn) - len(refitted)} more were refused;"
                " the data has the reasons."
            )
        )
    if published := [case for case in cases if not case["mesh"]]:
        parts += ["Published configs, planned and proven, not built:", "\n".join(_published_table(published))]
        if found := _unplanned([case for case in published if "refused" not in case], "misc"):
            parts += ["By misc:", "\n".join(found)]
    return "\n\n".join(parts)


def _refits_table(cases: list[dict[str, Any]], meshes: list[str]) -> Iterator[str]:
    yield f"| family | precision | {' | '.join(meshes)} | bytes by bulk |"
    yield f"|{'---|' * (len(meshes) + 3)}"
    rows: dict[tuple[str, str], dict[str, dict[str, Any]]] = {}
    for case in cases:
        rows.setdefault((case["model"], case["precision"]), {})[case["mesh"]] = case
    for (model, precision), by_mesh in rows.items():
        shares = sorted({_bulk_share(case) for case in by_mesh.values() if "refits" in case})
        share = " to ".join(dict.fromkeys(_percent(share) for share in (shares[:1] + shares[-1:])))
        verdicts = [_verdict(by_mesh.get(mesh)) for mesh in meshes]
        yield f"| {_family(model)} | {precision} | {' | '.join(verdicts)} | {share} |"


def _published_table(cases: list[dict[str, Any]]) -> Iterator[str]:
    yield "| model | meshes | GB | bytes by bulk |"
    yield "|---|---|---|---|"
    for case in cases:
        share = "failed" if "error" in case else case.get("refused") or _percent(_bulk_share(case))
        gigabytes = f"{case['bytes'] / 1e9:,.1f}" if "bytes" in case else ""
        yield f"| {case['model']} | `{case['train']}` -> `{case['gen']}` | {gigabytes} | {share} |"


def _family(config: str) -> str:
    return config.removeprefix("tiny-")


def _bulk_share(case: dict[str, Any]) -> float:
    """Of the bytes that travel, each parameter counted once."""
    misc, excluded = (sum(entry["bytes"] for entry in case[route]) for route in ("misc", "excluded"))
    return float(1 - misc / (case["bytes"] - excluded))


def _percent(share: float) -> str:
    """Rounded down, so that only all is 100%."""
    return f"{int(share * 1e4) / 100:g}%"


def _verdict(case: dict[str, Any] | None) -> str:
    if case is None:
        return ""
    if "refused" in case:
        return "*n*"
    return "failed" if "error" in case else f"**{case['wrong']} wrong**" if case["wrong"] else "="


def _unplanned(cases: Iterable[dict[str, Any]], route: str) -> list[str]:
    """A line for each reason, with the families and parameters that have it."""
    parameters: dict[tuple[str, str], dict[str, None]] = {}
    for case in cases:
        for entry in case[route]:
            found = parameters.setdefault((entry["reason"], _family(case["model"])), {})
            found.update(dict.fromkeys(f"`{name}`" for name in entry["parameters"]))
    entries = []
    for (reason, family), all_names in parameters.items():
        names = [*all_names][:2] if len(all_names) > 3 else [*all_names]
        more = f" and {len(all_names) - len(names)} more" if len(all_names) > len(names) else ""
        entries.append((reason, f"{family} ({', '.join(names)}{more})"))
    return _by_reason(entries)


def _by_reason(entries: Iterable[tuple[str, str]]) -> list[str]:
    """A line for each reason, with all that have it in front."""
    named: dict[str, list[str]] = {}
    for reason, name in entries:
        named.setdefault(reason, []).append(name)
    return [wrapped(f"- {', '.join(names)}: {reason}.", "  ") for reason, names in named.items()]


def json_keys_section() -> str:
    """The keys that --json prints, with those of nested objects in brackets; lists have one entry's."""
    frozen = json.loads((ROOT / "tests" / "cli" / "frozen.json").read_text())["json"]
    commands: dict[str, dict[str, set[str]]] = {}
    for case, paths in frozen.items():
        keys = commands.setdefault(case if case.startswith("show") else case.split()[0], {})
        for path in paths:
            key, _, nested = path.partition(".")
            keys.setdefault(key.removesuffix("[]"), set()).update({nested.split(".")[0].removesuffix("[]")} - {""})
    lines = ["| command | keys |", "|---|---|"]
    for command, keys in commands.items():
        cells = [
            f"`{key}`" + (f" ({', '.join(sorted(below))})" if below else "") for key, below in sorted(keys.items())
        ]
        lines.append(f"| `{command}` | {', '.join(cells)} |")
    return "\n".join(lines)


SECTIONS: dict[str, Callable[[], str]] = {
    "numbers": numbers_section,
    "planner": planner_section,
    "gpu": gpu_section,
    "goals": goals_section,
    "shared": shared_section,
    "one-gpu": one_gpu_section,
    "apart": apart_section,
    "links": links_section,
    "puts": puts_section,
    "kernels": kernels_section,
    "profile": profile_section,
    "source-checks": source_checks_section,
    "session-cost": session_cost_section,
    "prepare": prepared.prepare_section,
    "support": support_section,
    "json-keys": json_keys_section,
    "gpu-validation": gpu_validation_section,
    "attack": attack_section,
    "coverage": coverage_section,
    "faults": reliability.faults_section,
    "soak": reliability.soak_section,
    "live": live.live_section,
    "whole": live.whole_section,
    "in-flight": live.in_flight_section,
    "grpo": live.grpo_section,
    "shaped": simulated.shaped_section,
    "predicted-gpus": simulated.gpus_section,
    "host-bounds": simulated.host_bounds_section,
    "carriers": simulated.carriers_section,
    "untuned": simulated.untuned_section,
    "compared": compared.compared_section,
}
