"""The page itself: sections in order, every text escaped, and plotly inside, so that it needs no network.

Charts are plotly's: of the libraries in Python packages it is the one with heat maps and bars that needs nothing else.
Bokeh brings tornado and pillow, Altair a renderer of 33 MB to work without a network, uPlot has no heat maps. Plotly's
script is the 4.8 MB of every page; compressed it takes 2 MB, and the browser unpacks it.
"""

from __future__ import annotations

import base64
import gzip
import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from html import escape
from pathlib import Path
from typing import Any

import numpy as np

from mcore_reshard.planner.layout.mesh import format_mesh
from mcore_reshard.planner.plan.least_time import least_time
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.proof.prove import Proof
from mcore_reshard.planner.topology.topology import Topology
from mcore_reshard.simulate.simulation import Simulation

from . import charts
from .charts import Chart
from .measured import Measured
from .memory import COLUMNS, memory_notes, memory_rows
from .pairs import pair_bytes
from .text import count, rails_text, ranges, seconds_text, size, starred

_HERE = Path(__file__).parent
_ROWS = 200  # most rows of a table
_LINKS, _STEPS = 12, 8
# The browser itself refuses whatever would be loaded.
_POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"


def report_page(
    plan: Plan,
    proof: Proof,
    summary: Mapping[str, Any],
    topology: Topology | None = None,
    simulation: Simulation | None = None,
    measured: Measured | None = None,
) -> str:
    """The page of a plan, as one HTML text. `summary` is that of `show --json`, or of `plan --json` with its memory.

    Raises ImportError, which says how to install it, where plotly is missing.
    """
    library = chart_library()
    page = _Page()
    page.head(plan, proof, summary, simulation, measured)
    page.proof(proof)
    pairs = pair_bytes(plan)
    page.section("Who sends what to whom", charts.pair_charts(pairs, topology))
    for sentence in _caveats(plan, simulation):
        page.text(sentence)
    page.stages(plan, simulation)
    page.bytes_moved(summary, simulation)
    page.section("Balance of ranks, as planned", charts.balance_charts(plan))
    page.balance(plan)
    if summary.get("memory") is not None:
        page.memory(summary["memory"])
    if measured is not None:
        page.measured(plan, measured, simulation)
    page.unplanned("Misc: whole tensors, and why", plan, plan.misc)
    page.unplanned("Excluded: not moved, and why", plan, plan.excluded)
    return page.html(f"{plan.model or 'plan'}: refit", library)


def _caveats(plan: Plan, simulation: Simulation | None) -> Iterator[str]:
    """How far the simulated refit is from the planned one."""
    if simulation is None:
        return
    if plan.topology is None:
        yield "The plan does not know where ranks live: mcore-reshard plan --topology makes one that does."
    elif plan.topology != simulation.topology:
        yield "The plan was made for another machine than the one that is shown here."


@cache
def chart_library() -> str:
    """plotly.min.js, compressed, in base64. Raises ImportError, which says how to install plotly where it is missing."""
    try:
        from plotly.offline import get_plotlyjs
    except ImportError as error:
        raise ImportError(
            "plotly is not installed, which draws the charts; from a clone of mcore-reshard: pip install '.[report]'"
        ) from error
    return base64.b64encode(gzip.compress(get_plotlyjs().encode(), mtime=0)).decode()


class _Page:
    """Parts of the body, and the charts that its script draws."""

    def __init__(self) -> None:
        self._parts: list[str] = []
        self._charts: dict[str, dict[str, Any]] = {}

    def head(
        self,
        plan: Plan,
        proof: Proof,
        summary: Mapping[str, Any],
        simulation: Simulation | None,
        measured: Measured | None,
    ) -> None:
        self._add(f"<h1>{escape(plan.model or '(unnamed)')}</h1>")
        for side, mesh, ranks in (
            ("Megatron-Core", plan.train, plan.train.world),
            (plan.engine, plan.gen, plan.gen.world),
        ):
            self._add(
                f"<p>{escape(side)}: {escape(format_mesh(mesh).replace(',', ' '))} ({escape(count(ranks, 'rank'))})</p>"
            )
        nbytes, parameters = summary["bytes"], summary["parameters"]
        covered = f"{size(proof.covered_bytes)} of {size(proof.destination_bytes)} covered"
        tiles = [
            ("moved in one refit", size(int(plan.recv_bytes.sum())), "point to point, over all generation ranks", ""),
            ("proof", "ok" if proof.ok else "FAILED", covered, "good" if proof.ok else "bad"),
        ]
        if simulation is not None:
            least_s = least_time(plan, simulation.topology).seconds
            of_bound, of_least = (simulation.seconds / each if each else 1.0 for each in (simulation.bound_s, least_s))
            times = (
                f"{of_bound:.2f} times the bound, {of_least:.2f} times the least of any plan, {seconds_text(least_s)}"
            )
            tiles.append(("predicted", seconds_text(simulation.seconds), times, ""))
        if measured is not None:
            more = f"{measured.name}: first to last byte"
            if simulation is not None and simulation.seconds:
                more += f", {measured.moving_s / simulation.seconds:.2f} times the predicted"
            tiles.append(("measured", seconds_text(measured.moving_s), more, ""))
        tiles += [
            ("bulk", size(nbytes["bulk"]), f"{count(parameters['bulk'], 'parameter')}, each once", ""),
            ("misc", size(nbytes["misc"]), f"{count(parameters['misc'], 'parameter')}, whole tensors", ""),
        ]
        self._add('<div class="tiles">' + "".join(_tile(*tile) for tile in tiles) + "</div>")
        for note in summary["notes"]:
            self._add(f'<p class="card">Note: {escape(note)}.</p>')
        self._add(f'<p class="quiet">policy {escape(plan.policy)} · digest {escape(plan.digest)}</p>')

    def proof(self, proof: Proof) -> None:
        self._add("<h2>Proof</h2>")
        verdict = (
            "Every destination byte of the bulk route arrives exactly once." if proof.ok else "The plan is not sound."
        )
        self._card(f'<p class="{"good" if proof.ok else "bad"}">{verdict}</p><p>{escape(_covered(proof))}</p>')
        rows = [(v.rule, v.parameter, " ".join(map(str, v.ranks)), v.message) for v in proof.violations]
        if rows:
            self._table(f"Violations ({len(rows)})", "rule, parameter, ranks, what is wrong", rows)

    def section(self, title: str, shown: Iterable[Chart]) -> None:
        self._add(f"<h2>{escape(title)}</h2>")
        for chart in shown:
            self._chart(chart)

    def stages(self, plan: Plan, simulation: Simulation | None) -> None:
        total = max(1, sum(nbytes for _, _, nbytes in plan.stage_totals))
        totals = [
            (stage, f"{transfers:,}", size(nbytes), f"{nbytes / total:.1%}")
            for stage, transfers, nbytes in plan.stage_totals
        ]
        if simulation is None:
            self.section("Stages", [charts.stage_bytes_chart(plan)])
        else:
            self.section("Stages", [charts.stage_chart(plan, simulation), charts.throughput_chart(simulation)])
        self._table("Stages, as planned", ">stage, >transfers, >bytes, >share", totals)
        if simulation is not None:
            rows = [
                (
                    f"{seconds_text(s.start_s)} to {seconds_text(s.end_s)}",
                    s.src,
                    s.dst,
                    s.stage,
                    s.route,
                    size(s.nbytes),
                    s.why,
                )
                for s in simulation.longest_steps(_STEPS)
            ]
            title = "Critical path: the longest steps that all else waited for"
            self._table(title, "time, from, to, >stage, over, >bytes, it could begin once", rows)
            if rows:
                self.text(f"Of the whole critical path: {simulation.busiest_on_path}.")

    def text(self, sentence: str) -> None:
        self._card(f"<p>{escape(sentence)}</p>")

    def bytes_moved(self, summary: Mapping[str, Any], simulation: Simulation | None) -> None:
        self._add("<h2>Bytes by route and link</h2>")
        received, passed_on = (
            sum(rank[key] for rank in summary["ranks"]["gen"]) for key in ("recv_bytes", "relay_bytes")
        )
        rows: list[tuple[Any, ...]] = [
            ("bulk", size(received), "received point to point, over all generation ranks"),
            ("misc", size(summary["bytes"]["misc"]), "whole tensors, each counted once"),
            ("passed on", size(passed_on), "of bulk: received from another generation rank"),
        ]
        self._table("Routes, as planned", "route, >bytes, what is counted", rows)
        planned_rails = ""
        if summary["topology"] is not None:
            links = summary["topology"]["links"]
            total = max(1, sum(link["bytes"] for link in links))
            rows = [
                (link["link"], size(link["bytes"]), f"{link['bytes'] / total:.1%}", seconds_text(link["busiest_s"]))
                for link in links
            ]
            self._table("What the bytes of bulk cross, as planned", "over, >bytes, >share, >at least", rows)
            rails = summary["topology"]["rails"]
            planned_rails = rails_text(rails["bytes"], rails["on_rail_bytes"])
            if planned_rails:
                self.text(planned_rails)
        if simulation is None:
            self._card("<p>Links of each GPU, and their bytes, need --topology.</p>")
            return
        moved = max(1, sum(simulation.route_bytes.values()))
        rows = [(route, size(nbytes), f"{nbytes / moved:.1%}") for route, nbytes in simulation.route_bytes.items()]
        self._table("What the bytes of bulk cross, as simulated", "over, >bytes, >share", rows)
        simulated_rails = rails_text(simulation.route_bytes["NIC"], simulation.on_rail_bytes)
        if simulated_rails not in ("", planned_rails):
            self.text(simulated_rails)
        self._chart(charts.link_chart(simulation))
        gpus = simulation.topology.machine.gpus
        busy = max(simulation.seconds, 1e-12)
        rows = [
            (link.kind, f"{link.host}, GPU {link.gpu % gpus}", " ".join(link.ranks), size(link.nbytes),
             seconds_text(link.seconds), f"{link.seconds / busy:.0%}")
            for link in simulation.links[:_LINKS]
        ]  # fmt: skip
        self._table("Busiest links", "link, of, ranks, >bytes, >at full bandwidth, >busy", rows)

    def balance(self, plan: Plan) -> None:
        rows: list[tuple[Any, ...]] = []
        loads = [
            ("train, send", plan.send_bytes),
            ("gen, receive", plan.recv_bytes),
            ("gen, pass on", plan.relay_bytes),
        ]
        for name, load in loads:
            if load.any():
                mean, most = float(load.mean()), int(load.max())
                as_busy = int(np.count_nonzero(load == most)) - 1
                busiest = f"{name.partition(',')[0]}:{int(load.argmax())}" + (f" and {as_busy} more" if as_busy else "")
                sizes = (size(int(load.min())), size(mean), size(most), f"{most / mean:.2f}")
                rows.append((name, len(load), *sizes, busiest))
        self._table("Load per rank", "world, >ranks, >least, >mean, >most, >most / mean, busiest", rows)

    def memory(self, memory: Mapping[str, Any]) -> None:
        self.section("Extra memory of each rank", charts.memory_charts(memory))
        self._table("The most on any rank", COLUMNS, [*memory_rows(memory)])
        self.text(f"Beside the model; slots of gloo are in the host's memory. {'; '.join(memory_notes(memory))}.")

    def measured(self, plan: Plan, measured: Measured, simulation: Simulation | None) -> None:
        self.section("Predicted and measured", [charts.measured_chart(measured, simulation)] if measured.stages else [])
        ranks = count(len(measured.ranks), "rank")
        missing = plan.train.world + plan.gen.world - len(measured.ranks)
        self._card(
            f"<p>{escape(measured.name)}, as {escape(ranks)} saw it"
            + (f"; {missing} wrote no trace of it, so sums are too low" if missing else "")
            + f". The slowest took {seconds_text(measured.seconds)}, all phases. Times are those of the hosts' clocks.</p>"
        )
        received = sum(stage.received for stage in measured.stages)
        if not missing and received != int(plan.recv_bytes.sum()):
            self.text(
                f"They received {size(received)}, the plan says {size(int(plan.recv_bytes.sum()))}: refits between other"
                " hosts, to fewer replicas, or without frozen parameters move other bytes."
            )
        known = {stage.pp_stage: stage for stage in measured.stages}
        spans = charts.stage_spans(simulation) if simulation is not None else {}
        rows = []
        for number, _, nbytes in plan.stage_totals:
            stage, span = known.get(number), spans.get(number)
            rows.append(
                (
                    number,
                    size(nbytes),
                    size(stage.received) if stage else "-",
                    seconds_text(span[1] - span[0]) if span else "-",
                    seconds_text(stage.end_s - stage.start_s) if stage else "-",
                )
            )
        columns = ">stage, >bytes planned, >bytes received, >predicted, >measured"
        self._table("Stages", columns, rows)
        phases = [(name, seconds_text(mid), seconds_text(most)) for name, (mid, most) in measured.phases.items()]
        self._table("Phases, over the ranks; a phase may lie in another", "phase, >median, >most", phases)

    def unplanned(self, title: str, plan: Plan, entries: Sequence[UnplannedGroup]) -> None:
        if not entries:
            return
        self._add(f"<h2>{escape(title)}</h2>")
        groups = [(plan.groups[entry.group], entry.reason) for entry in entries]
        rows = [
            (
                starred(group.name_pattern),
                ranges(group.layers) or "-",
                group.count,
                size(group.nbytes * group.count),
                why,
            )
            for group, why in groups
        ]
        self._table("", "parameter, layers, >count, >bytes, reason", rows)

    def html(self, title: str, library: str) -> str:
        css, script = (_HERE / "page.css").read_text(), (_HERE / "page.js").read_text()
        return (
            '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
            f'<meta http-equiv="Content-Security-Policy" content="{_POLICY}">\n'
            '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
            f"<title>{escape(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
            + "\n".join(self._parts)
            + f'\n</main>\n<script type="application/json" id="charts">{_script_json(self._charts)}</script>\n'
            f'<script type="text/plain" id="library">{library}</script>\n<script>\n{script}</script>\n</body>\n</html>\n'
        )

    def _add(self, part: str) -> None:
        self._parts.append(part)

    def _card(self, inner: str) -> None:
        self._add(f'<div class="card">{inner}</div>')

    def _chart(self, chart: Chart) -> None:
        name = f"chart-{len(self._charts)}"
        self._charts[name] = {"traces": chart.traces, "layout": chart.layout, "height": chart.height}
        text = f'<p class="quiet">{escape(chart.text)}</p>' if chart.text else ""
        area = f'<div class="chart" id="{name}" style="min-height: {chart.height}px"></div>'
        self._card(f"<h3>{escape(chart.title)}</h3>{text}{area}")

    def _table(self, title: str, columns: str, rows: Sequence[Sequence[Any]]) -> None:
        """A table; columns whose names begin with > are numbers."""
        names = columns.split(", ")
        numeric = [' class="number"' if name.startswith(">") else "" for name in names]
        head = "".join(f"<th{kind}>{escape(name.lstrip('>'))}</th>" for name, kind in zip(names, numeric, strict=True))
        body = "".join(f"<tr>{cells}</tr>" for cells in _cells(rows[:_ROWS], numeric))
        more = f'<p class="quiet">and {len(rows) - _ROWS:,} more</p>' if len(rows) > _ROWS else ""
        heading = f"<h3>{escape(title)}</h3>" if title else ""
        self._card(
            f'{heading}<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>{more}'
        )


def _cells(rows: Iterable[Sequence[Any]], numeric: Sequence[str]) -> Iterator[str]:
    for row in rows:
        yield "".join(f"<td{kind}>{escape(str(cell))}</td>" for cell, kind in zip(row, numeric, strict=True))


def _tile(name: str, value: str, text: str, kind: str) -> str:
    return (
        f'<div class="card tile"><span class="quiet">{escape(name)}</span><b class="{kind}">{escape(value)}</b>'
        f'<span class="quiet">{escape(text)}</span></div>'
    )


def _covered(proof: Proof) -> str:
    return f"{proof.covered_bytes:,} of {proof.destination_bytes:,} destination bytes covered"


def _script_json(value: Any) -> str:
    """JSON that no text in it can break out of a script element with."""
    text = json.dumps(value, separators=(",", ":"), allow_nan=False)
    return text.replace("&", "\\u0026").replace("<", "\\u003c").replace(">", "\\u003e")
