"""What a session shows of itself: metrics, log lines and traces of real refits."""

from __future__ import annotations

import json
import logging
import re
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from helpers.ranks import run_ranks, store_of, store_process, values
from helpers.remote import hold_interpreter
from session.test_refit_session import Trainer, seat

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.rendezvous import store_connection
from mcore_reshard.session.attempts import World
from mcore_reshard.session.metrics import prometheus_text
from mcore_reshard.session.record import TRACED_ATTEMPTS, Record
from mcore_reshard.session.trace_events import write_trace
from mcore_reshard.session.wait_line import WaitLine, waiting_text

PHASES = {"bind", "meet", "connect", "bulk", "agree", "misc", "derive", "decide"}


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[logging.LogRecord] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.records.append(record)


def observed_refits(rank: int, address: str, folder: str) -> dict[str, Any]:
    """Three good refits and one that train:1 fails, of two training ranks and two of the engine."""
    lines = Lines()
    log = logging.getLogger("mcore_reshard")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    me = seat(rank, address, (2, 2), session="seen")
    me.endpoint.prepare()
    reports = []
    for version in (1, 2, 3, 4):
        if isinstance(me, Trainer):
            me.step(version)
        if version == 3 and rank == 1:
            me.endpoint._export, export = lambda names: iter([]), me.endpoint._export  # type: ignore[union-attr]
            me.endpoint._before_reads = broken
        try:
            reports.append(me.endpoint.refit(version))
        except RefitError:
            assert version == 3
        except ZeroDivisionError:
            assert (version, rank) == (3, 1)
        if version == 3 and rank == 1:
            me.endpoint._export, me.endpoint._before_reads = export, None  # type: ignore[union-attr]
    path = Path(folder) / f"{rank}.json"
    me.endpoint.write_trace(path)
    metrics = me.endpoint.metrics()
    me.endpoint.close()
    said = [(line.getMessage(), line.__dict__) for line in lines.records]
    fields = [{key: value for key, value in each.items() if isinstance(value, int | float | str)} for _, each in said]
    return {
        "metrics": metrics,
        "reports": reports,
        "lines": [text for text, _ in said],
        "fields": fields,
        "trace": path,
    }


def broken() -> None:
    raise ZeroDivisionError("a trainer's own error")


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> list[dict[str, Any]]:
    return values(run_ranks(4, observed_refits, str(tmp_path_factory.mktemp("traces")), timeout_s=60))


def test_metrics_add_up(observed: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(observed):
        metrics, reports = seen["metrics"], seen["reports"]
        assert json.loads(json.dumps(metrics))["rank"] == ("train:0", "train:1", "gen:0", "gen:1")[rank]
        assert metrics["refits"] == {"committed": 3, "failed": 1, "retries": 0, "attempts": 4}
        assert (metrics["epochs"], metrics["committed_version"]) == (2, 4)
        assert sum(metrics["bytes"]["bulk"].values()) == sum(report.nbytes for report in reports)
        assert sum(metrics["bytes"]["misc"].values()) == sum(report.misc_bytes for report in reports)
        assert set(metrics["seconds"]) == PHASES
        in_refits = sum(metrics["seconds"][phase]["total"] for phase in PHASES - {"bind"})
        assert in_refits > 0.8 * sum(report.seconds for report in reports)
        assert all(0 <= each["last"] <= each["total"] for each in metrics["seconds"].values())
        assert metrics["state"]["state"] in ({"complete"} if rank > 1 else {"complete", "intact"})
        assert len(metrics["peers"]) == 3 and metrics["rank"] not in metrics["peers"]
        assert all(peer["since"] <= peer["last_heard"] < time.time() for peer in metrics["peers"].values())
        assert all(time.time() - peer["since"] < 120 for peer in metrics["peers"].values())
    assert [seen["metrics"]["replica_lag"] for seen in observed][1:] == [{}, {}, {}]
    assert set(observed[0]["metrics"]["replica_lag"].values()) == {0}


def test_prometheus_text_keeps_the_rules_of_its_format(observed: list[dict[str, Any]]) -> None:
    all_metrics = [seen["metrics"] for seen in observed]
    samples = parse_prometheus(prometheus_text(*all_metrics))

    def of_gen_1(name: str, **labels: str) -> float:
        return samples[(name, *sorted({"session": "seen", "rank": "gen:1", **labels}.items()))]

    assert of_gen_1("mcore_reshard_refits_committed_total") == 3
    assert of_gen_1("mcore_reshard_committed_version") == 4
    moved = all_metrics[3]["bytes"]["bulk"]["gloo"]
    assert of_gen_1("mcore_reshard_bytes_total", route="bulk", transport="gloo") == moved
    states = {kind: of_gen_1("mcore_reshard_state", kind=kind) for kind in ("intact", "mixed", "complete")}
    for name in ("mcore_reshard_peer_since_seconds", "mcore_reshard_peer_last_heard_seconds"):
        peers = {key[1:] for key in samples if key[0] == name}
        assert sorted(dict(labels)["peer"] for labels in peers) == ["gen:0", "gen:1", "train:1"]
        assert {dict(labels)["rank"] for labels in peers} == {"train:0"}
    assert states == {"intact": 0, "mixed": 0, "complete": 1}


def test_labels_are_escaped() -> None:
    record = Record('a "b" \\ c\nd', "gen:0", World(1, 1, 1))
    samples = parse_prometheus(prometheus_text(record.metrics()))
    assert {label for key in samples for label in key[1:] if label[0] == "session"} == {("session", 'a "b" \\ c\nd')}


@pytest.mark.parametrize(
    "damage",
    [
        ("# TYPE", "# TIPE"),
        ("_total{", "_total{{"),
        (" 0\n", " zero\n"),
        ('session="s"', "session=s"),
        ("# HELP", "\n# HELP"),
    ],
)
def test_the_parser_of_this_test_refuses_damage(damage: tuple[str, str]) -> None:
    text = prometheus_text(Record("s", "gen:0", World(1, 1, 1)).metrics())
    parse_prometheus(text)
    with pytest.raises(AssertionError):
        parse_prometheus(text.replace(*damage))


def test_log_lines_say_what_happened_and_never_a_secret(observed: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(observed):
        events = [fields["event"] for fields in seen["fields"]]
        assert events.count("refit_committed") == 3 and events.count("attempt_failed") == 1
        assert events.count("epoch_connected") == 2 and events.count("session_joined") == 1
        assert events.count("session_left") == 1
        assert events.count("peer_joined") == (3 if rank == 0 else 0)
        (failed,) = [fields for fields in seen["fields"] if fields["event"] == "attempt_failed"]
        assert "a trainer's own error" in failed["cause"] and failed["session"] == "seen"
        for text, fields in zip(seen["lines"], seen["fields"], strict=True):
            pairs = dict(re.findall(r'(\w+)=("(?:[^"\\]|\\.)*"|\S+)', text))
            assert pairs["event"] == fields["event"] and pairs["rank"] == fields["rank"]
            assert "\n" not in text
    committed = [fields for fields in observed[2]["fields"] if fields["event"] == "refit_committed"]
    assert [(each["version"], each["bytes"]) for each in committed] == [
        (report.version, report.nbytes) for report in observed[2]["reports"]
    ]


def test_a_trace_nests(observed: list[dict[str, Any]]) -> None:
    for rank, seen in enumerate(observed):
        trace = json.loads(Path(seen["trace"]).read_text())
        events = trace["traceEvents"]
        (process,) = {event["pid"] for event in events}
        assert process == (0, 1, 1_000_000, 1_000_001)[rank]
        assert {event["ph"] for event in events} == {"M", "X"}
        spans = [event for event in events if event["ph"] == "X"]
        for row in {span["tid"] for span in spans}:
            require_nested([span for span in spans if span["tid"] == row])
        attempts = [span for span in spans if span["name"] == span["cat"] or span["name"].startswith("refit ")]
        assert [span["name"] for span in attempts] == ["prepare", "refit 1", "refit 2", "refit", "refit 4"]
        assert "a trainer's own error" in attempts[3]["args"]["outcome"]
        bulk = [span for span in spans if span["name"] == "bulk"]
        stages = [span for span in spans if span["name"].startswith("stage ")]
        assert stages and sum(stage["args"]["bytes"] for stage in stages) == sum(r.nbytes for r in seen["reports"])
        assert all(any(within(stage, each) for each in bulk) for stage in stages)
        assert all(abs(span["ts"] / 1e6 - time.time()) < 120 for span in spans)
    refits = [json.loads(Path(seen["trace"]).read_text())["traceEvents"] for seen in observed]
    starts = [next(span["ts"] for span in events if span["name"] == "refit 2") for events in refits]
    ends = [next(span["ts"] + span["dur"] for span in events if span["name"] == "refit 2") for events in refits]
    assert max(starts) < min(ends), "the ranks' spans of one refit do not overlap"


def idle_then_hold_interpreter(rank: int, address: str) -> list[float]:
    """Of gen:0, which idles for two seconds, then holds the interpreter's lock: its last signs of life."""
    store_connection.BEAT_S = 0.2
    with store_of(address) as store:
        store.take_seat(f"gen:{rank}", {})
        store.add("here", 1)
        while store.add("here", 0) < 2:
            time.sleep(0.01)
        if rank == 0:
            time.sleep(2.0)
            hold_interpreter(4)
            return []
        found = []
        for _ in range(3):
            time.sleep(1.5)
            found.append(store.last_heard()["gen:0"])
        return [at - found[0] for at in found[1:]] + [time.time() - found[0]]


def test_a_rank_that_idles_gives_signs_of_life_and_one_that_holds_the_interpreter_none() -> None:
    _, (in_idle, in_hold, now) = values(run_ranks(2, idle_then_hold_interpreter))
    assert 0.1 < in_idle < 1.4, "it beats while it idles, and no more once it holds the lock"
    assert in_hold == in_idle and now > 2.5


def test_signs_of_life_are_what_was_last_known_while_the_store_is_frozen() -> None:
    with store_process() as server, store_of(server.address) as store:
        store.take_seat("gen:0", {})
        known = store.last_heard()
        server.freeze()
        start = time.monotonic()
        assert store.last_heard() == known
        assert time.monotonic() - start < 2.0
        server.thaw()
        assert store.last_heard()["gen:0"] > known["gen:0"] and not store.needs_reopening


def refit_in_background(rank: int, address: str, path: str) -> dict[str, Any]:
    me = seat(rank, address, (1, 1))
    me.endpoint.prepare()
    report = me.endpoint.refit_async(1).wait() if isinstance(me, Trainer) else me.endpoint.refit(1)
    me.endpoint.write_trace(f"{path}/{rank}.json")
    return {"nbytes": report.nbytes, **me.endpoint.metrics()}


def test_a_refit_in_the_background_is_counted_once_its_outcome_is_known(tmp_path: Path) -> None:
    for rank, metrics in enumerate(values(run_ranks(2, refit_in_background, str(tmp_path)))):
        assert metrics["refits"] == {"committed": 1, "failed": 0, "retries": 0, "attempts": 1}
        assert metrics["bytes"]["bulk"] == {"gloo": metrics["nbytes"]} and metrics["committed_version"] == 1
        spans = [
            event for event in json.loads((tmp_path / f"{rank}.json").read_text())["traceEvents"] if "dur" in event
        ]
        require_nested([span for span in spans if span["tid"] == 0])
        assert {"refit 1", "decide"} <= {span["name"] for span in spans}


def test_a_span_that_crosses_another_is_found() -> None:
    with pytest.raises(AssertionError):
        require_nested([{"ts": 0.0, "dur": 10.0}, {"ts": 5.0, "dur": 10.0}])


def test_a_trace_of_many_refits_stays_small(tmp_path: Path) -> None:
    record = Record("s", "train:0", World(1, 1, 1))
    for number in range(1000):
        with record.attempt("refit"):
            with record.phase("bulk"), record.phase("derive"):
                pass
            record.failed(RefitError(str(number)))
    write_trace(tmp_path / "t.json", record)
    assert len(json.loads((tmp_path / "t.json").read_text())["traceEvents"]) == 2 + 3 * TRACED_ATTEMPTS


def test_recording_costs_microseconds() -> None:
    record = Record("s", "train:0", World(1, 1, 1))
    start = time.perf_counter()
    for _ in range(1000):
        with record.attempt("refit"):
            for phase in PHASES:
                with record.phase(phase):
                    pass
            record._end("committed")
    assert (time.perf_counter() - start) / 1000 < 500e-6  # about 30 on an idle core


def test_a_phase_in_another_counts_once() -> None:
    record = Record("s", "train:0", World(1, 1, 1))
    with record.attempt("prepare"), record.phase("meet"):
        time.sleep(0.02)
        with record.phase("connect"):
            time.sleep(0.05)
    assert 0.02 <= record.seconds["meet"] < 0.05 <= record.seconds["connect"]


SILENT = """
import logging, sys
import mcore_reshard
from mcore_reshard.kernels.events import log_event
log_event("attempt_failed", logging.WARNING, rank="gen:0", cause="a = b")
logging.getLogger("mcore_reshard").warning("anything")
if len(sys.argv) > 1:
    logging.basicConfig(level=logging.INFO)
    log_event("attempt_failed", logging.WARNING, rank="gen:0", cause="a = b")
"""


def test_logging_is_silent_until_a_program_turns_it_on() -> None:
    for arguments, said in (
        ([], ""),
        (["on"], 'WARNING:mcore_reshard:event=attempt_failed rank=gen:0 cause="a = b"\n'),
    ):
        ran = subprocess.run([sys.executable, "-c", SILENT, *arguments], capture_output=True, text=True, check=True)
        assert (ran.stdout, ran.stderr) == ("", said)


def test_a_long_prepare_says_for_whom_it_waits_on_a_terminal_alone(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    missing = ["gen:3", "gen:4", "gen:5", "gen:6"]
    assert waiting_text("train:0", missing, 12.3) == "train:0 waits for gen:3, gen:4 and 2 more (12 s)"
    assert waiting_text("train:0", ["gen:3"], 3) == "train:0 waits for gen:3 (3 s)"
    monkeypatch.setattr("mcore_reshard.session.wait_line._QUIET_S", 0.01)
    with WaitLine("train:0", lambda: missing):
        time.sleep(0.1)
    assert capsys.readouterr().err == ""
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    for rank, shown in (("train:0", True), ("train:1", False)):
        with WaitLine(rank, lambda: missing):
            time.sleep(0.1)
        err = capsys.readouterr().err
        assert ("train:0 waits for gen:3, gen:4 and 2 more" in err) == shown
        assert err.endswith("\r\x1b[K") or not shown


# --- checkers ------------------------------------------------------------------------------------------------------

_NAME = r"[a-zA-Z_:][a-zA-Z0-9_:]*"
_LABEL = r'[a-zA-Z_][a-zA-Z0-9_]*="(?:[^"\\\n]|\\["\\n])*"'
_PLAIN = {"\\n": "\n", '\\"': '"', "\\\\": "\\"}
_SAMPLE = re.compile(rf"({_NAME})\{{({_LABEL}(?:,{_LABEL})*)\}} (\S+)")


def parse_prometheus(text: str) -> dict[tuple[Any, ...], float]:
    """{(name, *sorted labels): value}. Fails where the text breaks a rule of the exposition format."""
    samples: dict[tuple[Any, ...], float] = {}
    assert text.endswith("\n")
    family, seen = "", set()
    lines: Iterator[str] = iter(text.splitlines())
    for line in lines:
        if line.startswith("#"):
            help_of = re.fullmatch(rf"# HELP ({_NAME}) \S.*", line)
            assert help_of, line
            family = help_of[1]
            assert family not in seen, f"{family} comes twice"
            seen.add(family)
            type_of = re.fullmatch(rf"# TYPE ({_NAME}) (counter|gauge)", next(lines))
            assert type_of and type_of[1] == family
            assert (type_of[2] == "counter") == family.endswith("_total")
            continue
        sample = _SAMPLE.fullmatch(line)
        assert sample and sample[1] == family, line
        pairs = re.findall(r'([a-zA-Z_]\w*)="((?:[^"\\]|\\.)*)"', sample[2])
        labels = [(name, re.sub(r"\\.", lambda found: _PLAIN[found[0]], value)) for name, value in pairs]
        assert len(dict(labels)) == len(labels)
        try:
            value = float(sample[3])
        except ValueError:
            raise AssertionError(line) from None
        key = (sample[1], *sorted(labels))
        assert key not in samples, f"{key} comes twice"
        samples[key] = value
    return samples


def within(inner: dict[str, Any], outer: dict[str, Any]) -> bool:
    slack_us = 0.5  # of float microseconds since 1970
    return (
        outer["ts"] - slack_us <= inner["ts"]
        and inner["ts"] + inner["dur"] <= outer["ts"] + outer["dur"] + slack_us
    )  # fmt: skip


def require_nested(spans: list[dict[str, Any]]) -> None:
    """Fail unless of any two spans one lies in the other, or they lie apart."""
    around: list[dict[str, Any]] = []
    for span in sorted(spans, key=lambda each: (each["ts"], -each["dur"])):
        while around and around[-1]["ts"] + around[-1]["dur"] <= span["ts"] + 0.5:
            around.pop()
        assert not around or within(span, around[-1]), (span, around[-1])
        around.append(span)
