"""The page of `report`: one file that loads nothing, with the plan's numbers, drawn with charts that plotly accepts."""

from __future__ import annotations

import base64
import builtins
import gzip
import json
import re
from collections.abc import Callable
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from cli.conftest import plan_of as plan_of
from cli.conftest import run as run
from cli.test_bad_input import _broken
from helpers.cli import HYBRID, MOE, Run
from helpers.ranks import run_ranks, values

from mcore_reshard.cli.summary import summarize
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import load_plan
from mcore_reshard.planner.topology.topology import parse_topology
from mcore_reshard.report.charts import stage_chart
from mcore_reshard.report.measured import MeasuredError, read_measured
from mcore_reshard.report.page import chart_library, report_page
from mcore_reshard.report.pairs import block_size, in_blocks, pair_bytes
from mcore_reshard.report.text import seconds_unit, size, starred
from mcore_reshard.report.timeline import STEPS, rates
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.simulate.simulate import simulate
from mcore_reshard.simulate.simulation import ROUTES

plotly = pytest.importorskip("plotly", reason="the extra 'report' is not installed")


class Page(HTMLParser):
    """A page taken apart: attributes that load or lead somewhere, scripts by id, and the text that a reader sees."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.loads: list[str] = []
        self.scripts: dict[str, str] = {}
        self.styles = self.text = ""
        self._inside: str | None = None
        self._id = ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        names = {"src", "href", "srcset", "data", "action", "poster", "background", "xlink:href", "formaction"}
        self.loads += [f"{tag} {name}={value}" for name, value in attrs if name in names or name.startswith("on")]
        if tag in ("link", "iframe", "object", "embed", "base", "img"):
            self.loads.append(tag)
        if tag in ("script", "style"):
            self._inside, self._id = tag, dict(attrs).get("id") or ""

    def handle_endtag(self, tag: str) -> None:
        self._inside = None
        self.text += "\n"

    def handle_data(self, data: str) -> None:
        if self._inside == "script":
            self.scripts[self._id] = self.scripts.get(self._id, "") + data
        elif self._inside == "style":
            self.styles += data
        else:
            self.text += data

    def problems(self) -> list[str]:
        """Everything by which the page would need a network."""
        found = [*self.loads, *re.findall(r"@import|url\(", self.styles)]
        shown = [self.styles, self.text, *(text for name, text in self.scripts.items() if name != "library")]
        return [
            *found,
            *(match for text in shown for match in re.findall(r"https?:[^\s\"']*|\bimport\(|fetch\(", text)),
        ]

    @property
    def charts(self) -> list[dict[str, Any]]:
        return list(json.loads(self.scripts["charts"]).values())


def page_of(plan: Plan, topology: str | None = None, hosts: str = "") -> Page:
    proof = plan.prove()
    where = None if topology is None else parse_topology(topology, plan.train.world, plan.gen.world, hosts)
    simulation = None if where is None else simulate(plan, where)
    return Page(report_page(plan, proof, summarize(plan, proof), where, simulation))


def by_transfers(plan: Plan) -> np.ndarray:
    matrix = np.zeros((plan.train.world, plan.gen.world), np.int64)
    for transfer in plan.transfers():
        if transfer.src and transfer.dst and transfer.relayed_by is None:
            matrix[transfer.src.rank, transfer.dst.rank] += transfer.nbytes
    return matrix


def test_the_page_is_one_file_that_loads_nothing(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    report = run("report", plan_of(HYBRID), "-o", out, "--topology", "h200-8", "--json").json
    text = out.read_text()
    page = Page(text)
    assert page.problems() == []
    assert "default-src 'none'" in text and report["page_bytes"] == out.stat().st_size < 3e6
    library = gzip.decompress(base64.b64decode(page.scripts["library"])).decode()
    assert "plotly.js v" in library[:200]


@pytest.mark.parametrize(
    "part",
    [
        '<script src="https://example.org/a.js"></script>',
        '<link rel="stylesheet" href="x.css">',
        "<style>@import 'x'</style>",
        '<script>fetch("https://example.org")</script>',
        '<p onclick="x()">',
    ],
)
def test_a_page_that_loads_something_is_found(part: str) -> None:
    assert Page(f"<html>{part}</html>").problems() != []


def test_numbers_are_those_of_the_plan(plan_of: Callable[[list[str]], Path]) -> None:
    plan = load_plan(plan_of(HYBRID))
    page = page_of(plan, "h200-8")
    pairs = page.charts[0]["traces"][0]
    assert pairs["text"] == [[size(nbytes) for nbytes in row] for row in by_transfers(plan).tolist()]
    assert size(int(plan.recv_bytes.sum())) in page.text and plan.digest in page.text
    assert f"{plan.prove().covered_bytes:,} of {plan.prove().destination_bytes:,}" in page.text
    for entry in plan.misc:
        assert starred(plan.groups[entry.group].name_pattern) in page.text and entry.reason in page.text
    bars = [trace for chart in page.charts for trace in chart["traces"] if trace["type"] == "bar"]
    assert [size(nbytes) for nbytes in plan.send_bytes.tolist()] in [bar["text"] for bar in bars]
    assert [size(nbytes) for nbytes in plan.recv_bytes.tolist()] in [bar["text"] for bar in bars]


@pytest.mark.parametrize("topology", [None, "h200-8", "h200-8,shared"])
def test_pairs_add_up_to_what_ranks_send_and_receive(
    plan_of: Callable[[list[str]], Path], topology: str | None
) -> None:
    plan = load_plan(plan_of(MOE))
    pairs = pair_bytes(plan)
    if topology is not None:  # a simulation moves the same
        messages, simulated = simulate(plan, parse_topology(topology, 8, 4)).messages, np.zeros((8, 4), np.int64)
        np.add.at(simulated, (messages.src, messages.dst - 8), messages.nbytes)
        assert (pairs.from_trainer == simulated).all()
    assert pairs.passed_on is None
    assert (pairs.from_trainer == by_transfers(plan)).all()
    assert (pairs.from_trainer.sum(1) == plan.send_bytes).all() and (pairs.from_trainer.sum(0) == plan.recv_bytes).all()


def test_pairs_of_a_plan_that_relays_show_what_is_passed_on(plan_of: Callable[[list[str]], Path]) -> None:
    plan = load_plan(plan_of(["tiny-qwen3-moe", "--train", "tp=2", "--gen", "tp=1,dp=16"]))
    pairs = pair_bytes(plan)
    assert plan.relay and pairs.passed_on is not None
    assert (pairs.from_trainer == by_transfers(plan)).all()
    assert (pairs.passed_on.sum(1) == plan.relay_bytes).all() and plan.relay_bytes.any()
    assert ((pairs.from_trainer.sum(0) + pairs.passed_on.sum(0)) == plan.recv_bytes).all()
    assert "Passed on between generation ranks" in page_of(plan, "h200-8,gpus=18", "train=a*2,gen=a*16").text
    assert "Passed on between generation ranks" in page_of(plan, "h200-8").text  # to other hosts as well


FIGURE = re.compile(r"\d[\d,]*(?:\.\d+)? ?(?:[kMGT]?B|s|ms|us|%|times)(?!\w)")


def figures(text: str) -> set[str]:
    """Numbers with their units."""
    return {" ".join(found.split()) for found in FIGURE.findall(text)}


def all_text(page: Page) -> str:
    """What a reader sees, and what the charts say of their points."""
    return "\n".join([page.text, json.dumps(page.charts)])


LOCATED = ["--train", "tp=2", "--gen", "tp=1,dp=16", "--topology", "h200-8"]


@pytest.mark.sampled(2)
@pytest.mark.parametrize("argv", [[*MOE, "--topology", "h200-8,gpus=4"], ["tiny-qwen3-moe", *LOCATED]], ids=" ".join)
def test_every_number_that_plan_and_simulate_print_is_on_the_page(run: Run, tmp_path: Path, argv: list[str]) -> None:
    path, out, machine = tmp_path / "plan.json", tmp_path / "report.html", argv[argv.index("--topology") + 1]
    planned = run("plan", *argv, "--out", path).out
    said = planned.replace(planned[planned.index("planned in") :].splitlines()[0], "")
    said += run("simulate", path, "--topology", machine).out.partition("machine ")[2].partition("transport")[2]
    run("report", path, "-o", out)  # on the machine that the plan was made for
    page = Page(out.read_text())
    shown = figures(all_text(page))
    assert len(figures(said)) > 20 and figures(said) - shown == set()
    assert figures("it takes 0.123 s") - shown == {"0.123 s"}
    plain = run("simulate", path, "--topology", machine, "--json").json
    for step in sorted(plain["critical_path"], key=lambda step: step["start_s"] - step["end_s"])[:8]:  # the longest
        assert step["why"] in page.text
    assert f"{plain['seconds'] / plain['bound_seconds']:.2f} times the bound" in page.text
    again = run("report", path, "-o", tmp_path / "again.html", "--topology", machine, "--json").json
    assert (tmp_path / "again.html").read_text() == out.read_text()
    assert again["predicted_seconds"] == plain["seconds"] and again["digest"] == plain["digest"]


def test_the_extra_memory_of_every_rank_is_drawn_by_transport(run: Run, tmp_path: Path) -> None:
    path, out = tmp_path / "plan.json", tmp_path / "report.html"
    memory = run("plan", *MOE, "--out", path, "--json").json["memory"]
    run("report", path, "-o", out)
    page = Page(out.read_text())
    assert "Extra memory of each rank" in page.text
    shown = [
        {trace["name"]: (trace["x"], trace["text"]) for trace in chart["traces"]}
        for chart in page.charts
        if chart["traces"][0].get("name") == "direct"
    ]
    for world, of_world in zip(("train", "gen"), shown, strict=True):
        assert [*of_world] == ["direct", "nccl", "gloo"]
        for name, (ranks, sizes) in of_world.items():
            rows = memory[name][world]
            assert ranks == [f"{world}:{row['rank']}" for row in rows]
            assert sizes == [size(row["total"]) for row in rows]


def test_what_stays_on_its_rail_is_said_once_unless_plan_and_simulation_differ(plan_of: Any) -> None:
    plan = located(load_plan(plan_of(MOE)), parse_topology("h200-8", 8, 4))
    assert page_of(plan, "h200-8").text.count("stay on their rail") == 1
    elsewhere = page_of(plan, "h200-8", "train=a*4+b*4,gen=c*4")  # a plan for other hosts than are simulated
    assert elsewhere.text.count("stay on their rail") == 2


def test_each_way_of_passing_on_is_a_row_of_its_own(run: Run, tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    run("plan", "tiny-qwen3-moe", *LOCATED[:-1], "h200-8", "--out", path)
    plan = load_plan(path)
    assert plan.topology is not None and plan.later_hops
    simulation = simulate(plan, plan.topology, "gloo")  # it passes on between hosts and within them
    rows = stage_chart(plan, simulation).traces[0]["y"]
    assert len(rows) == len(set(rows)) == len(np.unique(simulation.messages.hop))
    wanted = {"relay": "passed on", "share": "passed on within a domain"}
    assert rows[1:] == [f"stage 0, {wanted[hop]}" for hop in plan.later_hops]


def test_many_ranks_are_shown_in_blocks_and_no_byte_is_lost() -> None:
    assert [block_size(ranks, 8) for ranks in (8, 128, 129, 1024, 1025, 2048)] == [1, 1, 8, 8, 16, 16]
    matrix = np.arange(1030 * 10).reshape(1030, 10)
    blocks = in_blocks(matrix, 16, 4)
    assert blocks.shape == (65, 3) and blocks.sum() == matrix.sum()
    assert blocks[64, 2] == matrix[1024:, 8:].sum()


def test_rates_over_time_keep_every_byte_and_are_zero_where_nothing_moves(plan_of: Callable[[list[str]], Path]) -> None:
    simulation = simulate(load_plan(plan_of(MOE)), parse_topology("h200-8", 8, 4))
    messages, flow = simulation.messages, simulation.flow
    shown = rates(flow, flow.stage, 2)
    moved = [int(messages.nbytes[messages.stage == stage].sum()) for stage in (0, 1)]
    assert shown.sum(1) * simulation.seconds / STEPS == pytest.approx(moved, rel=1e-6)
    late = replace(
        flow,
        moments_s=np.concatenate([[0.0], flow.moments_s + simulation.seconds]),
        moved=np.concatenate([flow.moved[:1], flow.moved]),
    )
    shown = rates(late, flow.stage, 2)
    assert not shown[:, : STEPS // 2].any() and shown[:, STEPS // 2 :].any()


@pytest.mark.parametrize(("train", "gen"), [("tp=2,ep=8,dp=4", "tp=2,dp=4"), ("tp=2,ep=4,dp=4", "tp=4,dp=2")])
def test_no_more_is_drawn_than_links_carry(plan_of: Callable[[list[str]], Path], train: str, gen: str) -> None:
    """8 of 16 NICs are on each side of the way to the engine: 8 * 50 GB/s. Spread over a message's time it was 510."""
    plan = load_plan(plan_of(["qwen3-30b-a3b", "--train", train, "--gen", gen]))
    topology = parse_topology("h200-8", 8, 8)
    simulation = simulate(located(plan, topology), topology)
    nic = rates(simulation.flow, simulation.flow.route, len(ROUTES))[ROUTES.index("NIC")]
    assert nic.sum() * simulation.seconds / STEPS == pytest.approx(simulation.route_bytes["NIC"], rel=1e-6)
    assert 0.97 * 8 * 50e9 < nic.max() <= 8 * 50e9 * (1 + 1e-9)


def test_axes_name_the_unit_of_their_numbers() -> None:
    assert [seconds_unit(most) for most in (12.0, 0.1, 0.05, 1e-5)] == [(1, "s"), (1, "s"), (1e-3, "ms"), (1e-6, "us")]
    assert 1.23 / seconds_unit(1.23)[0] == 1.23


def test_plotly_accepts_every_chart(plan_of: Callable[[list[str]], Path]) -> None:
    from plotly.graph_objects import Figure

    for topology in (None, "h200-8"):
        charts = page_of(load_plan(plan_of(HYBRID)), topology).charts
        assert len(charts) >= 4
        for chart in charts:
            traces = [{k: v for k, v in trace.items() if k not in ("color", "colorscale")} for trace in chart["traces"]]
            Figure({"data": traces, "layout": chart["layout"]})
            with pytest.raises(ValueError):
                Figure({"data": chart["traces"], "layout": {**chart["layout"], "no_such_key": 1}})


def test_a_name_cannot_break_out_of_the_page(plan_of: Callable[[list[str]], Path]) -> None:
    hostile = '</script><script src="https://example.org/x.js"></script><img onerror="x()" src=x>'
    plan = load_plan(plan_of(HYBRID))
    groups = tuple(replace(group, name_pattern=hostile + group.name_pattern) for group in plan.groups)
    misc = tuple(replace(entry, reason=hostile) for entry in plan.misc)
    page = page_of(replace(plan, model=hostile, groups=groups, misc=misc), "h200-8")
    assert page.problems() == [match for match in page.problems() if match.startswith("https://example.org")]
    assert page.loads == [] and set(page.scripts) == {"charts", "library", ""}
    assert page.text.count(hostile) > 2 * len(plan.misc)


def test_an_unsound_plan_is_drawn_with_its_violations_and_exits_with_3(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    out = tmp_path / "report.html"
    path = _broken(plan_of(MOE))
    outcome = run("report", path, "-o", out, "--topology", "h200-8")
    assert outcome.code == 3 and "the plan is not sound" in outcome.err
    text = Page(out.read_text()).text
    assert "FAILED" in text and "model.embed_tokens.weight" in text
    assert load_plan(path).digest in text, "and no plan that a session would make of it"


def test_the_page_is_of_the_plan_that_a_session_executes(run: Run, plan_of: Any, tmp_path: Path) -> None:
    path, out = plan_of(MOE), tmp_path / "report.html"
    outcome = run("report", path, "-o", out, "--topology", "h200-8")
    plan = load_plan(path)
    digest = located(plan, parse_topology("h200-8", plan.train.world, plan.gen.world)).digest
    assert digest in Page(out.read_text()).text and plan.digest not in Page(out.read_text()).text
    assert f"whatever plan it is given: this is that plan, digest {digest}" in " ".join(outcome.out.split())


def traced_refits(number: int, address: str, plan_file: str, folder: str) -> int:
    """Rank `number` of a plan, training ranks first, refits twice and writes its trace; the bytes of the last refit."""
    plan = load_plan(plan_file)
    train = number < plan.train.world
    world, rank = ("train", number) if train else ("gen", number - plan.train.world)
    schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
    endpoint = (TrainEndpoint if train else GenerationEndpoint)(
        schedule, synthetic.allocate(schedule, torch.device("cpu")), store=address, options=Options(timeout_s=30)
    )
    endpoint.prepare()
    reports = [endpoint.refit(version) for version in (1, 2)]
    endpoint.write_trace(f"{folder}/{world}-{rank}.json")
    endpoint.close()
    return int(reports[-1].nbytes)


def test_a_live_refit_stands_beside_what_was_predicted(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path, out = plan_of(["tiny-qwen3-moe", "--train", "pp=2", "--gen", "tp=1,dp=2"]), tmp_path / "report.html"
    plan = load_plan(path)
    with capsys.disabled():  # ranks want a real stderr
        said = values(run_ranks(4, traced_refits, str(path), str(tmp_path)))
    traces = [str(tmp_path / f"{world}-{rank}.json") for world in ("train", "gen") for rank in (0, 1)]
    measured = read_measured(traces, plan)
    assert measured.name == "refit 2" and measured.ranks == ("train:0", "train:1", "gen:0", "gen:1")
    assert [stage.received for stage in measured.stages] == [nbytes for _, _, nbytes in plan.stage_totals]
    assert sum(stage.sent for stage in measured.stages) == sum(said[:2]) == plan.send_bytes.sum()
    assert 0 < measured.moving_s < measured.seconds < 60 and {"bulk", "decide"} <= set(measured.phases)
    joined = tmp_path / "all.json"
    events = [event for trace in traces for event in json.loads(Path(trace).read_text())["traceEvents"]]
    joined.write_text(json.dumps({"traceEvents": events}))
    assert read_measured([str(joined)], plan) == measured
    report = run("report", path, "-o", out, "--topology", "h200-8", "--measured", *traces, "--json").json
    assert report["measured_seconds"] == measured.moving_s and report["predicted_seconds"] > 0
    page = Page(out.read_text())
    assert [trace["name"] for trace in page.charts[-1]["traces"]] == ["predicted", "measured"]
    assert all(size(stage.received) in page.text for stage in measured.stages)
    ratio = f"{report['measured_seconds'] / report['predicted_seconds']:.2f} times the predicted"
    assert f"first to last byte, {ratio}" in page.text
    bars = page.charts[-1]["traces"][1]
    unit = seconds_unit(measured.moving_s)[0]
    assert [base + width for base, width in zip(bars["base"], bars["x"], strict=True)] == pytest.approx(
        [stage.end_s / unit for stage in measured.stages], rel=1e-4
    )
    assert f"as {len(traces)} ranks saw it." in page.text and "They received" not in page.text
    run("report", path, "-o", out, "--measured", *traces[:3])
    assert "1 wrote no trace of it" in Page(out.read_text()).text
    other = plan_of(["tiny-qwen3-moe", "--train", "pp=2", "--gen", "tp=2"])  # the same ranks, another plan
    refused = run("report", other, "-o", tmp_path / "none.html", "--measured", *traces)
    assert refused.code == 2 and not (tmp_path / "none.html").exists()
    said = " ".join(refused.err.split())
    assert f"this plan, which has digest {load_plan(other).digest}" in said
    assert f"Found: digest {plan.digest} in {', '.join(traces)}. Give the plan of the session" in said


PLANNED = "0" * 64  # in spans: the digest of the plan that the test gives
SPAN = {
    "name": "refit 1", "ph": "X", "pid": 0, "tid": 0, "ts": 1.0, "dur": 2.0,
    "args": {"outcome": "committed", "plan": PLANNED},
}  # fmt: skip
STAGE = {**SPAN, "name": "stage 0", "tid": 1, "args": {"bytes": 7}}


def trace_file(path: Path, plan: Path, spans: list[Any]) -> str:
    """A trace of a session that was given this plan."""
    path.write_text(json.dumps({"traceEvents": spans}).replace(PLANNED, load_plan(plan).digest))
    return str(path)


def test_a_trace_of_another_plan_is_refused_beside_traces_of_this_one(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    path, other = plan_of(MOE), plan_of(HYBRID)
    ours = trace_file(tmp_path / "ours.json", path, [SPAN])
    theirs = trace_file(tmp_path / "theirs.json", other, [SPAN])
    old = trace_file(tmp_path / "old.json", path, [{**SPAN, "args": {"outcome": "committed"}}])
    digests = [load_plan(each).digest for each in (path, other)]
    with pytest.raises(MeasuredError) as error:
        read_measured([ours, theirs, old], load_plan(path))
    assert str(error.value).startswith(
        f"traces are not of this plan, which has digest {digests[0]}. Found: digest {digests[1]} in {theirs}; no digest (an"
        f" earlier release wrote none) in {old}. Give the plan"
    )
    # A rank that took over from a trainer with another plan has refits of both: those of this plan count.
    later = {**SPAN, "name": "refit 2", "ts": 5.0, "args": {"outcome": "committed", "plan": digests[1]}}
    both = trace_file(tmp_path / "both.json", path, [SPAN, later])
    assert read_measured([both], load_plan(path)).name == "refit 1"
    assert read_measured([both], load_plan(other)).name == "refit 2"


def test_the_plan_file_that_a_session_was_given_is_the_one_to_give_also_where_it_planned_anew(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    """A trace has the digest of what the ranks were given, whatever they made of it for their hosts."""
    path, out = plan_of(MOE), tmp_path / "report.html"
    outcome = run(
        "report", path, "-o", out, "--topology", "h200-8", "--measured", trace_file(tmp_path / "t", path, [SPAN])
    )
    assert outcome.code == 0 and "a session plans anew" in " ".join(outcome.out.split())


def test_other_bytes_than_planned_are_said(plan_of: Callable[[list[str]], Path], tmp_path: Path) -> None:
    path = plan_of(["tiny-qwen3-moe", "--train", "tp=1", "--gen", "tp=1"])
    plan = load_plan(path)
    engine = [{**span, "pid": 1_000_000} for span in (SPAN, STAGE)]
    measured = read_measured([trace_file(tmp_path / "t.json", path, [SPAN, STAGE, *engine])], plan)
    proof = plan.prove()
    page = Page(report_page(plan, proof, summarize(plan, proof), None, None, measured))
    assert f"They received 7 B, the plan says {size(plan.bulk_bytes)}: refits between other hosts" in page.text


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ("not json", "no JSON, or damaged"),
        ("[1]", "no trace"),
        (json.dumps({"traceEvents": [1]}), "no trace"),
        (json.dumps({"traceEvents": []}), "no committed refit"),
        (json.dumps({"traceEvents": [{**SPAN, "ts": "now"}]}), "a span is damaged"),
        (json.dumps({"traceEvents": [{**SPAN, "dur": float("nan")}]}), "a span is damaged"),
        (json.dumps({"traceEvents": [{**SPAN, "args": {"plan": 7}}]}), "a span is damaged"),
        (json.dumps({"traceEvents": [{**SPAN, "pid": 8}]}), "train:8 is no rank of the plan"),
        (json.dumps({"traceEvents": [{**SPAN, "pid": 1_000_004}]}), "gen:4 is no rank of the plan"),
        (json.dumps({"traceEvents": [{**SPAN, "tid": 3}]}), "stage 2 is none of the plan's 2"),
        (json.dumps({"traceEvents": [{**SPAN, "args": {"outcome": "RefitError: no"}}]}), "no committed refit"),
    ],
)
def test_a_damaged_trace_is_one_clear_error(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path, content: str, expected: str
) -> None:
    trace, out, path = tmp_path / "trace.json", tmp_path / "report.html", plan_of(MOE)
    trace.write_text(content.replace(PLANNED, load_plan(path).digest))
    outcome = run("report", path, "-o", out, "--measured", trace)
    assert outcome.code == 2 and expected in outcome.err and str(trace) in outcome.err
    assert not out.exists() and "Traceback" not in outcome.err


def test_an_undamaged_trace_is_read(plan_of: Callable[[list[str]], Path], tmp_path: Path) -> None:
    path = plan_of(MOE)
    assert read_measured([trace_file(tmp_path / "trace.json", path, [SPAN])], load_plan(path)).seconds == 2e-6
    with pytest.raises(MeasuredError, match="cannot be read"):
        read_measured([str(tmp_path / "none.json")], load_plan(path))


def test_wrong_input_is_named_all_at_once(run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path) -> None:
    outcome = run("report", plan_of(MOE), "-o", tmp_path / "none" / "r.html", "--topology", "dgx", "--measured", "none")
    assert outcome.code == 2
    assert (
        "is no directory" in outcome.err and "no machine 'dgx'" in outcome.err and "none: cannot be read" in outcome.err
    )
    outcome = run("report", plan_of(MOE), "-o", tmp_path / "r.html", "--hosts", "train=a*8,gen=a*4")
    assert outcome.code == 2 and "needs --topology for the machine" in outcome.err


@pytest.mark.parametrize(
    ("transport", "topology", "said"),
    [
        ("direct", "h200-8", "direct reaches GPUs of one NVLink domain"),
        ("nccl", "h200-8,shared", "nccl takes no GPU twice"),
    ],
)
def test_a_transport_that_cannot_move_these_bytes_is_one_clear_error(
    run: Run, plan_of: Any, tmp_path: Path, transport: str, topology: str, said: str
) -> None:
    plan, page = plan_of(["tiny-llama", "--train", "tp=2", "--gen", "tp=2"]), tmp_path / "page.html"
    outcome = run("report", plan, "-o", page, "--topology", topology, "--transport", transport)
    assert outcome.code == 2 and outcome.err.startswith(f"mcore-reshard: {said}") and not page.exists()


def test_the_page_does_not_take_the_place_of_its_plan_or_of_a_trace(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path
) -> None:
    plan = plan_of(MOE)
    trace = Path(trace_file(tmp_path / "trace.json", plan, [SPAN]))
    for out in (plan, trace):
        before = out.read_bytes()
        outcome = run("report", plan, "-o", out, "--measured", trace)
        assert outcome.code == 2 and f"{out} would be overwritten" in outcome.err and out.read_bytes() == before
    assert run("report", plan, "-o", tmp_path / "page.html", "--measured", trace).code == 0


def test_a_missing_extra_says_how_to_install_it(
    run: Run, plan_of: Callable[[list[str]], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, real = plan_of(MOE), builtins.__import__

    def without_plotly(name: str, *rest: Any, **more: Any) -> Any:
        if name.startswith("plotly"):
            raise ModuleNotFoundError("No module named 'plotly'", name="plotly")
        return real(name, *rest, **more)

    monkeypatch.setattr(builtins, "__import__", without_plotly)
    chart_library.cache_clear()
    outcome = run("report", path, "-o", tmp_path / "report.html")
    assert outcome.code == 1 and "pip install '.[report]'" in outcome.err
    assert "Traceback" not in outcome.err and not (tmp_path / "report.html").exists()
