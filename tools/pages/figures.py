"""The figures of README.md and docs/, each drawn from data: where the rows of fused QKV go, and what was measured.

`FIGURES` has a function for every file under docs/figures whose data is there.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from math import log10
from pathlib import Path
from typing import Any

from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan

from .live import grpo_chart, in_flight_chart, in_flight_rows
from .svg import Drawing

RESULTS = Path(__file__).resolve().parents[1] / "results"
GAP = 14  # between the strips of two ranks
HEAD_COLORS = {"q": "blue", "k": "orange", "v": "green"}


@dataclass(frozen=True, slots=True)
class HeadMove:
    """Whole heads of one projection that go from rows of a trainer's fused tensor to rows of an engine's."""

    kind: str  # q, k or v
    first_head: int
    heads: int
    src: int  # rank, and the first of its rows, counted in heads
    src_row: int
    dst: int
    dst_row: int


def head_moves(heads: int, kv_heads: int, train_tp: int, gen_tp: int) -> list[HeadMove]:
    """The moves that the planner makes of layer 0's fused QKV, for tiny-qwen3 with so many heads."""
    config = {**load_config("tiny-qwen3"), "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    plan = make_plan(parameters_from_config(config), TrainMesh(tp=train_tp), GenMesh(tp=gen_tp))
    head_dim = config["head_dim"]
    return [
        HeadMove(
            kind=kind,
            first_head=transfer.region.start[0] // head_dim,
            heads=transfer.region.extents[0] // head_dim,
            src=transfer.src.rank,
            src_row=transfer.src.index[0] // head_dim,
            dst=transfer.dst.rank,
            dst_row=transfer.dst.index[0] // head_dim,
        )
        for kind in HEAD_COLORS
        for transfer in plan.transfers(f"model.layers.0.self_attn.{kind}_proj.weight")
        if transfer.region and transfer.src and transfer.dst
    ]


def qkv_figure(heads: int, kv_heads: int, train_tp: int = 2, gen_tp: int = 4) -> str:
    """Rows of fused QKV on both sides, a cell a head, and a ribbon for every transfer."""
    moves = head_moves(heads, kv_heads, train_tp, gen_tp)
    title = f"Fused QKV of {heads} query and {kv_heads} KV heads, from TP{train_tp} to TP{gen_tp}"
    width, top, bottom, height = 880, 62, 182, 28
    drawing = Drawing(width, 258, title)
    train_cells = max(move.src_row + move.heads for move in moves)
    gen_cells = max(move.dst_row + move.heads for move in moves)
    cell = (width - 32 - GAP * (gen_tp - 1)) / max(train_tp * train_cells, gen_tp * gen_cells)
    train_x = _strips(width, train_tp, train_cells * cell)
    gen_x = _strips(width, gen_tp, gen_cells * cell)
    for move in moves:
        above, below = train_x[move.src] + move.src_row * cell, gen_x[move.dst] + move.dst_row * cell
        span = move.heads * cell
        drawing.ribbon((above, above + span, top + height), (below, below + span, bottom), HEAD_COLORS[move.kind])
    for x, row, y, move in [
        *((train_x[move.src], move.src_row, top, move) for move in moves),
        *((gen_x[move.dst], move.dst_row, bottom, move) for move in moves),
    ]:
        for head in range(move.heads):
            left = x + (row + head) * cell
            drawing.box(left + 0.5, y, cell - 1, height, HEAD_COLORS[move.kind], 3)
            drawing.text(left + cell / 2, y + 18.5, f"{move.kind}{move.first_head + head}", "page", "middle", 12)
    drawing.text(train_x[0], 22, "Megatron-Core, linear_qkv.weight: for each KV head its query heads, then k, then v")
    drawing.text(gen_x[0], 248, "vLLM, qkv_proj.weight: query heads, then keys, then values")
    for rank, x in enumerate(train_x):
        drawing.text(x, top - 8, f"train:{rank}", "faint", size=12)
    for rank, x in enumerate(gen_x):
        drawing.text(x, bottom + height + 15, f"gen:{rank}", "faint", size=12)
    return drawing.render()


def _strips(width: int, ranks: int, strip: float) -> list[float]:
    """Where the strip of each rank begins, all of them centered."""
    start = (width - ranks * strip - GAP * (ranks - 1)) / 2
    return [start + rank * (strip + GAP) for rank in range(ranks)]


CHARTED = ("moe-ep-tp", "moe-experts", "moe-replicas", "dense-tp-tp")
METHODS = {
    "direct": ("direct", "blue"),
    "nccl": ("nccl", "green"),
    "nemo-rl": ("NeMo-RL, point to point", "gray"),
    "nemo-rl-golden": ("NeMo-RL, broadcast", "gray"),
    "isend-irecv": ("a message for each region", "gray"),
    "megatron-core": ("Megatron-Core resharding", "gray"),
}


def refit_chart() -> str:
    """Milliseconds of a refit by method; a dashed line is the time at the limit of the copy engines."""
    data = json.loads((RESULTS / "refit-x4.json").read_text())
    panels = [(name, _charted_rows(data["rows"], name)) for name in CHARTED]
    bar, row_height, panel_gap, left, right = 15, 20, 46, 200, 70
    height = 62 + sum(len(rows) * row_height + panel_gap for _, rows in panels)
    drawing = Drawing(880, height, f"Time of a refit by method, {data['hardware']}")
    drawing.text(16, 24, f"Time of a refit, {data['hardware']}, 2 training ranks to 2 engine ranks", size=15)
    drawing.line([(16, 42), (40, 42)], "limit", 1.5, "4 3")
    drawing.text(
        46,
        46,
        "the same bytes at the rate of the copy engines; each group of bars has a scale of its own",
        "faint",
        size=12,
    )
    y = 66
    for name, rows in panels:
        workload = data["workloads"][name]
        limit_ms = _limit_ms(rows)
        scale = (880 - left - right) / max(row["ms"] for row in rows)
        drawing.text(16, y + 10, f"{workload['model']}: {workload['what']}, {workload['train']} -> {workload['gen']}")
        y += 20
        for row in rows:
            label, color = METHODS[row["method"]]
            drawing.text(left - 8, y + 12, label, "ink", "end", 12)
            drawing.box(left, y, row["ms"] * scale, bar, color, 2)
            drawing.text(left + row["ms"] * scale + 6, y + 12, f"{row['ms']:.1f} ms", "faint", size=12)
            y += row_height
        limit_x = left + limit_ms * scale
        drawing.line([(limit_x, y - len(rows) * row_height - 4), (limit_x, y - 1)], "limit", 1.5, "4 3")
        y += panel_gap - 20
    return drawing.render()


def _charted_rows(rows: list[dict[str, Any]], workload: str) -> list[dict[str, Any]]:
    return [row for row in rows if row["workload"] == workload and row["method"] in METHODS and "skipped" not in row]


def _limit_ms(rows: list[dict[str, Any]]) -> float:
    row = next(row for row in rows if row.get("share_of") == "copy-engine")
    return float(row["ms"] * row["share"])


SERIES = {
    "plan": ("plan", "blue"),
    "proof": ("proof", "orange"),
    "gen_schedule": ("schedule of one engine rank", "green"),
}


def planning_chart() -> str:
    """Seconds against training ranks, both on log scales; meshes without expert parallelism in the engine."""
    data = json.loads((RESULTS / "planner.json").read_text())
    cases = sorted((case for case in data["cases"] if "ep=" not in case["gen"]), key=lambda case: case["train_ranks"])
    ranks = [case["train_ranks"] for case in cases]
    drawing = Drawing(880, 360, "Time to plan and prove DeepSeek-V3 against the number of ranks")
    drawing.text(16, 24, "Time to plan and prove DeepSeek-V3, one thread of one CPU", size=15)
    left, right, top, bottom = 80, 640, 50, 310

    def x_of(count: int) -> float:
        return left + (right - left) * log10(count / ranks[0]) / log10(ranks[-1] / ranks[0])

    def y_of(seconds: float) -> float:
        return bottom - (bottom - top) * (log10(seconds) + 2) / 2  # 10 ms at the bottom, 1 s at the top

    for seconds in (0.01, 0.03, 0.1, 0.3, 1.0):
        drawing.line([(left, y_of(seconds)), (right, y_of(seconds))], "grid")
        drawing.text(left - 8, y_of(seconds) + 4, f"{seconds:g} s", "faint", "end", 12)
    for case in cases:
        drawing.text(x_of(case["train_ranks"]), bottom + 18, f"{case['train_ranks']:,}", "faint", "middle", 12)
        drawing.text(x_of(case["train_ranks"]), bottom + 34, f"to {case['gen_ranks']:,}", "faint", "middle", 12)
    for number, (name, (label, color)) in enumerate(SERIES.items()):
        points = [(x_of(case["train_ranks"]), y_of(case["seconds"][name])) for case in cases]
        drawing.line(points, f"{color}-line", 2)
        for point in points:
            drawing.dot(*point, color)
        drawing.dot(right + 26, 64 + 22 * number, color)
        drawing.text(right + 38, 68 + 22 * number, label)
    drawing.text(right + 38, bottom + 18, "training ranks", "faint", size=12)
    drawing.text(right + 38, bottom + 34, "engine ranks", "faint", size=12)
    return drawing.render()


FIGURES: dict[str, Callable[[], str]] = {
    "qkv.svg": lambda: qkv_figure(16, 8),
    "qkv-replicated.svg": lambda: qkv_figure(8, 2),
    "refit.svg": refit_chart,
    "planning.svg": planning_chart,
    "grpo.svg": grpo_chart,
}
if in_flight_rows(RESULTS / "live-whole-x2.json"):
    FIGURES["in-flight.svg"] = in_flight_chart
