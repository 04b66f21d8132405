"""The charts of the page, as plain data for plotly: traces and layout. Colors come from the page, which knows the theme.

Colors are names of the page's palette: "heat" is a scale, "c0", "c1", ... are series.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.plan.paths import HopKind
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology
from mcore_reshard.simulate.simulation import LINKS, ROUTES, Simulation

from .measured import Measured
from .memory import memory_totals
from .pairs import PairBytes, block_size, in_blocks
from .text import bytes_unit, count, seconds_text, seconds_unit, size
from .timeline import STEPS, rates

_GAPS = 64  # rows or columns up to which cells of a heat map stand apart
_BARS = 128  # ranks up to which each has a bar; more are a stepped line
_USUAL_HOST = 8  # GPUs, where no topology says otherwise
_HOPS: dict[HopKind, str] = {"relay": "passed on", "share": "passed on within a domain"}


@dataclass(frozen=True, slots=True)
class Chart:
    """One chart: plotly's traces and layout, a title, a sentence on how to read it, and its height in pixels."""

    title: str
    text: str
    traces: list[dict[str, Any]]
    layout: dict[str, Any]
    height: int = 320


def pair_charts(pairs: PairBytes, topology: Topology | None) -> Iterator[Chart]:
    """Heat maps: sender by receiver, in ranks or in blocks of them."""
    host = topology.machine.gpus if topology is not None else _USUAL_HOST
    yield _heat_map("From the trainer", pairs.from_trainer, ("train", "gen"), host)
    if pairs.passed_on is not None:
        yield _heat_map("Passed on between generation ranks", pairs.passed_on, ("gen", "gen"), host)


def stage_chart(plan: Plan, simulation: Simulation) -> Chart:
    """A Gantt chart: when the bytes of each stage move, and how fast."""
    flow, stages = simulation.flow, plan.train.pp
    row = flow.hop.astype(np.int64) * stages + flow.stage
    used = np.unique(row).tolist()
    speeds = rates(flow, np.searchsorted(used, row), len(used))
    hops = ["", *(f", {_HOPS[hop]}" for hop in plan.later_hops)]
    names = [f"stage {number % stages}{hops[number // stages]}" for number in used]
    text = "Each row is a pipeline stage of the trainer. Color says how many bytes a second move."
    if simulation.merged > 1:
        text += f" Every {simulation.merged} messages between two ranks were simulated as one."
    times, time_unit = _step_times(simulation.seconds)
    hover = [[f"{size(speed)}/s" for speed in row] for row in speeds.tolist()]
    template = f"%{{y}}, %{{x:.4g}} {time_unit}: %{{text}}<extra></extra>"
    return Chart(
        "Stages over time",
        text,
        [{**_heat(times, names, speeds, hover, template, "/s"), "ygap": 3}],
        {"xaxis": {"title": {"text": time_unit}}, "yaxis": {"autorange": "reversed", "type": "category"}},
        height=_rows_height(len(names)),
    )


def throughput_chart(simulation: Simulation) -> Chart:
    """Bytes a second over time by route."""
    speeds = rates(simulation.flow, simulation.flow.route, len(ROUTES))
    times, time_unit = _step_times(simulation.seconds)
    scale, unit = bytes_unit(float(speeds.max(initial=0.0)))
    traces = [
        {
            "type": "scatter", "mode": "lines", "name": route, "x": times, "y": _rounded(speed / scale), "stackgroup": "all",
            "color": f"c{number}", "hovertemplate": f"%{{y:.4g}} {unit}/s",
        }
        for number, (route, speed) in enumerate(zip(ROUTES, speeds, strict=True))
        if speed.any()
    ]  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": time_unit}},
        "yaxis": {"title": {"text": f"{unit}/s"}, "rangemode": "tozero"},
        "hovermode": "x unified",
        "showlegend": True,
    }
    text = "All ranks together, by what the bytes cross. Routes are stacked: the upper edge is their sum."
    return Chart("Bytes a second", text, traces, layout, height=260)


def stage_bytes_chart(plan: Plan) -> Chart:
    """Bytes of each stage: what there is to say where no topology gives times."""
    stages, _, nbytes = zip(*plan.stage_totals, strict=True) if plan.stage_totals else ((), (), ())
    scale, unit = bytes_unit(max(nbytes, default=0))
    trace = _bars([f"stage {stage}" for stage in stages], list(nbytes), scale, "c0")
    layout = {"yaxis": {"title": {"text": unit}}, "xaxis": {"type": "category"}}
    text = "What the ranks of each pipeline stage send. Times need --topology."
    return Chart("Bytes by stage", text, [trace], layout, height=260)


def link_chart(simulation: Simulation) -> Chart:
    """How long each link of each GPU needs at full bandwidth, beside the predicted time."""
    topology = simulation.topology
    gpus = topology.machine.gpus
    numbers = sorted({link.gpu for link in simulation.links})
    places = {gpu: number for number, gpu in enumerate(numbers)}
    scale, unit = seconds_unit(max((link.seconds for link in simulation.links), default=0.0))
    traces: list[dict[str, Any]] = []
    for number, kind in enumerate(LINKS):
        links = [link for link in simulation.links if link.kind == kind]
        if not links:
            continue
        seconds: list[float | None] = [None] * len(numbers)  # None: a gap, where the link carries nothing
        hover = [""] * len(numbers)
        for link in links:
            seconds[places[link.gpu]] = float(f"{link.seconds / scale:.5g}")
            hover[places[link.gpu]] = (
                f"{link.host}, GPU {link.gpu % gpus} ({' '.join(link.ranks)})<br>{kind}: {size(link.nbytes)},"
                f" {seconds_text(link.seconds)}"
            )
        traces.append(
            {
                "type": "scatter", "mode": "lines", "line": {"shape": "hvh", "width": 1.5}, "name": kind, "color": f"c{number}",
                "x": list(range(len(numbers))), "y": seconds, "text": hover,
                "hovertemplate": "%{text}<extra></extra>",
            }
        )  # fmt: skip
    by_host: dict[int, int] = {}
    for gpu, place in places.items():
        by_host.setdefault(gpu // gpus, place)
    hosts = list(by_host.items())[:: max(1, len(by_host) // 12)]
    layout = {
        "xaxis": {
            "title": {"text": "GPUs, host by host"},
            "tickvals": [place for _, place in hosts],
            "ticktext": [topology.hosts[host] for host, _ in hosts],
        },
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
        "showlegend": True,
    }
    text = "Time that each GPU's links need for their bytes at full bandwidth. No refit by this plan is faster than the slowest."
    return Chart("Load of every link", text, traces, layout)


def balance_charts(plan: Plan) -> Iterator[Chart]:
    """Bytes of every rank, sent and received."""
    yield _loads("Sent by training ranks", "train", [("sent", plan.send_bytes)])
    loads = [("received", plan.recv_bytes)]
    if plan.relay_bytes.any():
        loads.append(("passed on", plan.relay_bytes))
    yield _loads("Received by generation ranks", "gen", loads)


def memory_charts(memory: Mapping[str, Any]) -> Iterator[Chart]:
    """Bytes of every rank that a session takes beside the model, by transport."""
    for world, ranks in (("train", "training"), ("gen", "generation")):
        totals = [(name, np.array(nbytes, np.int64)) for name, nbytes in memory_totals(memory, world)]
        yield _loads(f"Beside the model on {ranks} ranks", world, totals)


def measured_chart(measured: Measured, simulation: Simulation | None) -> Chart:
    """First start and last end of each stage: measured, beside predicted."""
    spans: list[tuple[str, str, dict[int, tuple[float, float]]]] = [
        ("measured", "c1", {stage.pp_stage: (stage.start_s, stage.end_s) for stage in measured.stages})
    ]
    if simulation is not None:
        spans.insert(0, ("predicted", "c0", stage_spans(simulation)))
    stages = sorted({stage for _, _, known in spans for stage in known})
    scale, unit = seconds_unit(max((end for _, _, known in spans for _, end in known.values()), default=0.0))
    traces = []
    for name, color, known in spans:
        shown = np.array([known[stage] for stage in stages if stage in known]).reshape(-1, 2) / scale
        traces.append(
            {
                "type": "bar", "orientation": "h", "name": name, "color": color,
                "y": [f"stage {stage}" for stage in stages if stage in known],
                "base": _rounded(shown[:, 0]), "x": _rounded(shown[:, 1] - shown[:, 0]),
                "hovertemplate": f"%{{y}}: from %{{base:.4g}} {unit} on, %{{x:.4g}} {unit}",
            }
        )  # fmt: skip
    layout = {
        "xaxis": {"title": {"text": f"{unit} from the first byte"}},
        "yaxis": {"autorange": "reversed", "type": "category"},
        "barmode": "group",
        "showlegend": True,
    }
    text = "From the first byte of a stage to its last one, over all ranks."
    return Chart("Stages, predicted and measured", text, traces, layout, height=_rows_height(2 * len(stages)))


def stage_spans(simulation: Simulation) -> dict[int, tuple[float, float]]:
    """First start and last end of each stage, over all hops."""
    messages = simulation.messages
    return {
        stage: (
            float(messages.start_s[messages.stage == stage].min()),
            float(messages.end_s[messages.stage == stage].max()),
        )
        for stage in np.unique(messages.stage).tolist()
    }


def _heat_map(title: str, matrix: NDArray[np.int64], worlds: tuple[str, str], host: int) -> Chart:
    rows, columns = (block_size(ranks, host) for ranks in matrix.shape)
    summed = in_blocks(matrix, rows, columns)
    names = [
        _block_names(world, ranks, size)
        for world, ranks, size in zip(worlds, matrix.shape, (rows, columns), strict=True)
    ]
    hover = [[size(nbytes) for nbytes in row] for row in summed.tolist()]
    trace = _heat(names[1], names[0], summed.astype(np.float64), hover, "%{y} to %{x}: %{text}<extra></extra>", "")
    text = "Rows send, columns receive. Pairs that exchange nothing are blank."
    blocks = [
        f"{count(size, 'rank')} of {world}" for world, size in zip(worlds, (rows, columns), strict=True) if size > 1
    ]
    if blocks:
        text += f" A cell is the sum over {' and '.join(dict.fromkeys(blocks))}."
    used = int(np.count_nonzero(matrix))
    text += f" {used:,} of {matrix.size:,} pairs of ranks exchange bytes, {size(int(matrix.sum()))} in all."
    if max(len(side) for side in names) <= _GAPS:
        trace |= {"xgap": 1, "ygap": 1}
    layout = {
        "yaxis": {"autorange": "reversed", "type": "category"},
        "xaxis": {"type": "category", "nticks": 12, "tickangle": 0},
    }
    return Chart(title, text, [trace], layout, height=min(760, max(260, 120 + 14 * len(names[0]))))


def _block_names(world: str, ranks: int, size: int) -> list[str]:
    if size == 1:
        return [f"{world}:{rank}" for rank in range(ranks)]
    return [f"{world}:{first}-{min(first + size, ranks) - 1}" for first in range(0, ranks, size)]


def _heat(
    x: Sequence[Any],
    y: Sequence[Any],
    z: NDArray[np.float64],
    hover: list[list[str]],
    template: str,
    per: str,
) -> dict[str, Any]:
    """Bytes `z`, or bytes per what `per` says, as colors; zeros are blank."""
    most = float(z.max(initial=0.0))
    scale, unit = bytes_unit(most)
    shown = [[float(f"{value / scale:.4g}") if value else None for value in values] for values in z.tolist()]
    return {
        "type": "heatmap", "x": list(x), "y": list(y), "z": shown, "text": hover, "hovertemplate": template,
        "zmin": 0, "zmax": most / scale or 1.0, "colorscale": "heat", "colorbar": {"title": {"text": unit + per}, "thickness": 12},
        "hoverongaps": False,
    }  # fmt: skip


def _loads(title: str, world: str, loads: list[tuple[str, NDArray[np.int64]]]) -> Chart:
    traces = []
    scale, unit = bytes_unit(max(float(load.max(initial=0)) for _, load in loads))
    for number, (name, load) in enumerate(loads):
        ranks = list(range(len(load)))
        if len(ranks) <= _BARS:
            traces.append(
                {**_bars([f"{world}:{rank}" for rank in ranks], load.tolist(), scale, f"c{number}"), "name": name}
            )
        else:
            traces.append(
                {
                    "type": "scatter", "mode": "lines", "line": {"shape": "hvh", "width": 1}, "fill": "tozeroy", "x": ranks,
                    "y": _rounded(load / scale), "text": [size(nbytes) for nbytes in load.tolist()], "name": name,
                    "color": f"c{number}", "hovertemplate": f"{world}:%{{x}}: %{{text}}",
                }
            )  # fmt: skip
    layout = {"yaxis": {"title": {"text": unit}, "rangemode": "tozero"}, "showlegend": len(loads) > 1}
    return Chart(title, "", traces, layout, height=240)


def _bars(names: list[str], nbytes: list[int], scale: float, color: str) -> dict[str, Any]:
    hover = [size(number) for number in nbytes]
    heights = [number / scale for number in nbytes]
    return {
        "type": "bar", "x": names, "y": heights, "text": hover, "textposition": "none",
        "hovertemplate": "%{x}: %{text}<extra></extra>", "color": color,
    }  # fmt: skip


def _step_times(seconds: float) -> tuple[list[float], str]:
    """The middle of each step, and its unit."""
    scale, unit = seconds_unit(seconds)
    return _rounded((np.arange(STEPS) + 0.5) * seconds / STEPS / scale), unit


def _rounded(values: NDArray[np.float64]) -> list[float]:
    return [float(f"{value:.5g}") for value in values.tolist()]


def _rows_height(rows: int) -> int:
    return min(900, 130 + 24 * max(2, rows))
