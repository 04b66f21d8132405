"""What simulations are worth: refits between shaped hosts, predicted and measured; simulated time against the bound."""

from __future__ import annotations

import json
from pathlib import Path
from statistics import median

from .text import wrapped

RESULTS = Path(__file__).resolve().parents[1] / "results"
LINKS = "../tools/results"


def shaped_section() -> str:
    """A row for each refit between network namespaces: measured beside predicted."""
    data = json.loads((RESULTS / "shaped-hosts.json").read_text())
    rate = data["nic_bytes_per_s"] / 1e6
    excess = max(
        counted / planned - 1
        for row in data["rows"] for link in row["links"]
        for planned, counted in zip(link["planned"], link["counted"], strict=True)
        if planned > 1e6
    )  # fmt: skip
    refits = len(data["rows"][0]["seconds"])
    busy = max(row["others"] for row in data["rows"])
    lines = [
        wrapped(
            f"{data['cpu']}, Linux {data['kernel']}, Python {data['python']}, torch {data['torch']}, {data['date']};"
            f" NICs of {rate:.0f} MB/s, medians of {refits} refits (`python tools/shaped_hosts.py`,"
            f" [data]({LINKS}/shaped-hosts.json)). Other processes took up to {busy:.0%} of the cores. Every link"
            f" carried what the plan says, and up to {excess:.1%} more for headers:"
        ),
        "",
        "| refit | trainer -> engine | hosts | hops | measured | predicted | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        measured = median(row["seconds"])
        off = "calibrates" if row["calibrates"] else f"{row['predicted'] / measured - 1:+.0%}"
        lines.append(
            f"| {row['case']} | `{row['train']}` -> `{row['gen']}` | {row['hosts']} | {', '.join(row['hops'])} |"
            f" {measured:.2f} s | {row['predicted']:.2f} s | {off} |"
        )
    return "\n".join(lines)


def gpus_section() -> str:
    """A row for each refit on the GPUs of one host: measured beside predicted."""
    data = json.loads((RESULTS / "predicted-gpus.json").read_text())
    speeds = "; ".join(
        f"{kind}: " + ", ".join(f"{name} {speed:.0f}" for name, speed in of_kind.items())
        for kind, of_kind in data["gb_per_s"].items()
    )
    dates = sorted({row["date"] for row in data["rows"]})
    lines = [
        wrapped(
            f"Measured {' to '.join(dict.fromkeys([dates[0], dates[-1]]))} (`python tools/predict_gpus.py`,"
            f" [data]({LINKS}/predicted-gpus.json)). Calibrated GB/s of {speeds}."
        ),
        "",
        "| refit | by | trainer -> engine | GPUs | measured | predicted | off |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        count, _, model = row["hardware"].partition(" x ")
        gpus = f"{count} x {model.removeprefix('NVIDIA ').partition(' ')[0]}"
        shared = {*row["gpus"]["train"]} & {*row["gpus"]["gen"]}
        predicted, off = "-", "not simulated"
        if "ratio" in row:
            predicted = f"{row['predicted_ms']:.1f} ms"
            off = "calibrates" if row["calibrates"] else f"{row['ratio'] - 1:+.0%}"
        lines.append(
            f"| {row['workload']} | {row['method']} | `{row['train']}` -> `{row['gen']}` |"
            f" {gpus}{', shared' if shared else ''} | {row['measured_ms']:.1f} ms | {predicted} | {off} |"
        )
    return "\n".join(lines)


def carriers_section() -> str:
    """Refits in which ranks carry for others, and the same without, in units of the bound."""
    data = json.loads((RESULTS / "host-bounds.json").read_text())
    lines = ["| simulated, of the least time | without | with | carriers | for |", "|---|---|---|---|---|"]
    for row in data["carriers"]:
        ratios = (f"{row[name]['auto']:.2f}" for name in ("without", "with"))
        ranks = row["with"]["carriers"], row["with"]["carried_ranks"]
        lines.append(f"| {row['name']} | {' | '.join(ratios)} | {ranks[0]} ranks | {ranks[1]} |")
    return "\n".join(lines)


def untuned_section() -> str:
    """Refits that nobody tuned for, in units of the least time."""
    data = json.loads((RESULTS / "host-bounds.json").read_text())
    transports = ("auto", "gloo", "nccl")
    lines = [
        f"| refit | trainer -> engine | plan's busiest link | {' | '.join(f'`{name}`' for name in transports)} |",
        f"|{'---|' * 6}",
    ]
    for row in data["untuned"]:
        ratios = " | ".join(f"{row[name]:.2f}" for name in ("links", *transports))
        lines.append(f"| {row['name']} | `{row['train']}` -> `{row['gen']}` | {ratios} |")
    return "\n".join(lines)


def host_bounds_section() -> str:
    """A row for each refit between hosts: the plan's links and the simulated rounds, in units of the bound; and rails."""
    data = json.loads((RESULTS / "host-bounds.json").read_text())
    lines = [
        wrapped(
            f"Hosts of `{data['machine']}`, {data['date']} (`python tools/host_bounds.py`,"
            f" [data]({LINKS}/host-bounds.json)):"
        ),
        "",
        "| refit | bound | plan's busiest link | rounds of `auto` | of `gloo` | of `nccl` | on its rail |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in data["rows"]:
        bound = max(row["bound_seconds"].values())
        ratios = [row["links"], *(row[name]["ratio"] for name in ("auto", "gloo", "nccl") if name in row)]
        shown = " | ".join([f"{ratio:.2f}" for ratio in ratios] + ["-"] * (4 - len(ratios)))
        rails = "-" if row["rail_share"] is None else f"{row['rail_share']:.1%}"
        lines.append(f"| {row['name']} | {bound * 1e3:.0f} ms | {shown} | {rails} |")
    return "\n".join(lines)
