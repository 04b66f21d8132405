"""What a live run measured: the last committed refit in the traces that its ranks wrote.

`RefitTrainer.write_trace` and `write_refit_trace` of the engine write one file a rank; files may also be joined.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import Any

from mcore_reshard.planner.plan.plan import Plan

_GEN_PROCESSES = 1_000_000  # as mcore_reshard/session/trace_events.py numbers processes
_MAX_BYTES = 512 << 20
_FILES_NAMED = 8  # in an error


class MeasuredError(ValueError):
    """A file is no trace of this plan's session; the message says which file, and what is wrong."""


@dataclass(frozen=True, slots=True)
class MeasuredStage:
    """One stage over all ranks that said when they moved it. Times count from the first byte of any stage."""

    pp_stage: int
    start_s: float
    end_s: float
    sent: int  # bytes that training ranks sent
    received: int  # bytes that generation ranks received


@dataclass(frozen=True, slots=True)
class Measured:
    """One committed refit, as its ranks saw it."""

    name: str  # "refit 7"
    ranks: tuple[str, ...]  # that wrote a trace with this refit
    seconds: float  # of the slowest rank, all phases
    stages: tuple[MeasuredStage, ...]
    phases: Mapping[str, tuple[float, float]]  # seconds: median and most over the ranks

    @property
    def moving_s(self) -> float:
        """From the first byte of the first stage to the last byte of the last one."""
        return max((stage.end_s for stage in self.stages), default=0.0)


def read_measured(paths: Sequence[str], plan: Plan) -> Measured:
    """The last refit by this plan that is committed in every trace which has one. Raises MeasuredError."""
    by_path = {path: [*_events_of(path)] for path in paths}
    _require_plan(by_path, plan.digest)
    events: dict[int, list[dict[str, Any]]] = defaultdict(list)
    for path, of_path in by_path.items():
        for event in of_path:
            _check_place(path, event, plan)
            events[event["pid"]].append(event)
    refits = {process: _committed(of_rank, plan.digest) for process, of_rank in events.items()}
    numbers = [set(of_rank) for of_rank in refits.values() if of_rank]
    common = set.intersection(*numbers) if numbers else set()
    if not common:
        raise MeasuredError(f"{paths[0]}: no committed refit is in the traces of all ranks: write them after a refit")
    name = max(common, key=lambda each: (int(each.split()[1]), each))
    chosen = {process: of_rank[name] for process, of_rank in refits.items() if name in of_rank}
    within = {process: [*_inside(events[process], refit)] for process, refit in chosen.items()}
    return Measured(
        name=name,
        ranks=tuple(_rank_name(process) for process in sorted(chosen)),
        seconds=max(refit["dur"] for refit in chosen.values()) / 1e6,
        stages=_stages(within),
        phases=_phases(within),
    )


def _events_of(path: str) -> Iterable[dict[str, Any]]:
    """The spans of a trace file."""
    file = Path(path)
    try:
        if file.stat().st_size > _MAX_BYTES:
            raise MeasuredError(f"{path}: more than {_MAX_BYTES >> 20} MiB, which no trace of a session has")
        value = json.loads(file.read_bytes())
    except OSError as error:
        raise MeasuredError(f"{path}: cannot be read: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise MeasuredError(f"{path}: no JSON, or damaged: {error}") from error
    events = value.get("traceEvents") if isinstance(value, dict) else None
    if not isinstance(events, list) or not all(isinstance(event, dict) for event in events):
        raise MeasuredError(f"{path}: no trace: `trainer.write_trace(path)` writes one, an object with traceEvents")
    spans = [event for event in events if event.get("ph") == "X"]
    for span in spans:
        _check(path, span)
    return spans


def _require_plan(by_path: Mapping[str, Iterable[dict[str, Any]]], digest: str) -> None:
    """Raise MeasuredError where a rank has committed refits, and none of them by the plan with this digest."""
    others: dict[str, dict[str, None]] = defaultdict(dict)  # files by the digest in them
    for path, events in by_path.items():
        plans: dict[int, list[str]] = defaultdict(list)
        for event in filter(_is_committed, events):
            plans[event["pid"]].append(event["args"].get("plan", ""))
        for of_rank in plans.values():
            if digest not in of_rank:
                others[of_rank[-1]][path] = None
    if others:
        found = "; ".join(f"{_digest_text(other)} in {_files_text([*files])}" for other, files in others.items())
        raise MeasuredError(
            f"traces are not of this plan, which has digest {digest}. Found: {found}. Give the plan of the session that"
            " wrote them: `trainer.plan.save(path)` writes it"
        )


def _digest_text(digest: str) -> str:
    return f"digest {digest[:64]}" if digest else "no digest (an earlier release wrote none)"


def _files_text(paths: Sequence[str]) -> str:
    more = len(paths) - _FILES_NAMED
    return ", ".join(paths[:_FILES_NAMED]) + (f" and {more} more" if more > 0 else "")


def _check(path: str, event: Mapping[str, Any]) -> None:
    """Raise MeasuredError for a span that `write_trace` would not write."""
    times: list[Any] = [event.get("ts"), event.get("dur")]
    arguments = event.get("args")
    if (
        type(event.get("pid")) is not int
        or type(event.get("tid")) is not int
        or not isinstance(event.get("name"), str)
        or not isinstance(arguments, dict)
        or not all(type(t) in (int, float) and 0 <= t < 1e18 for t in times)
        or type(arguments.get("bytes", 0)) is not int
        or not isinstance(arguments.get("plan", ""), str)
    ):
        raise MeasuredError(f"{path}: a span is damaged: {str(event)[:200]}")


def _check_place(path: str, event: Mapping[str, Any], plan: Plan) -> None:
    """Raise MeasuredError for a rank or a stage that the plan has not: of replicas that joined later, for one."""
    process, row = event["pid"], event["tid"]
    train_ranks, gen_ranks, stages = plan.train.world, plan.gen.world, plan.train.pp
    rank, ranks = (process % _GEN_PROCESSES, gen_ranks) if process >= _GEN_PROCESSES else (process, train_ranks)
    if not (0 <= rank < ranks and process < 2 * _GEN_PROCESSES):
        raise MeasuredError(
            f"{path}: {_rank_name(process)} is no rank of the plan, which has {train_ranks} training and"
            f" {gen_ranks} generation ranks: give the plan of that session"
        )
    if not 0 <= row <= stages:
        raise MeasuredError(f"{path}: stage {row - 1} is none of the plan's {stages}: give the plan of that session")


def _committed(events: Iterable[dict[str, Any]], digest: str) -> dict[str, dict[str, Any]]:
    """Committed refits of one rank by this plan, by name; a version that was refitted twice counts with its last time."""
    by_plan = [event for event in events if _is_committed(event) and event["args"].get("plan") == digest]
    return {event["name"]: event for event in sorted(by_plan, key=lambda event: float(event["ts"]))}


def _is_committed(event: Mapping[str, Any]) -> bool:
    """Whether this is the span of a committed refit."""
    return (
        event["tid"] == 0
        and event["args"].get("outcome") == "committed"
        and event["name"].startswith("refit ")
        and event["name"][6:].isdecimal()
        and len(event["name"]) < 30
    )


def _inside(events: Iterable[dict[str, Any]], refit: Mapping[str, Any]) -> Iterable[dict[str, Any]]:
    """The phases and stages of one refit."""
    start, end = refit["ts"], refit["ts"] + refit["dur"]
    slack = 2.0  # microseconds; Unix times in microseconds are exact to a quarter as floats
    for event in events:
        if event is not refit and start - slack <= event["ts"] and event["ts"] + event["dur"] <= end + slack:
            yield event


def _stages(within: Mapping[int, Sequence[Mapping[str, Any]]]) -> tuple[MeasuredStage, ...]:
    by_stage: dict[int, list[tuple[int, Mapping[str, Any]]]] = defaultdict(list)
    for process, events in within.items():
        for event in events:
            if event["tid"]:
                by_stage[event["tid"] - 1].append((process, event))
    zero = min((event["ts"] for spans in by_stage.values() for _, event in spans), default=0.0)
    return tuple(
        MeasuredStage(
            stage,
            min(event["ts"] - zero for _, event in spans) / 1e6,
            max(event["ts"] - zero + event["dur"] for _, event in spans) / 1e6,
            sum(event["args"].get("bytes", 0) for process, event in spans if process < _GEN_PROCESSES),
            sum(event["args"].get("bytes", 0) for process, event in spans if process >= _GEN_PROCESSES),
        )
        for stage, spans in sorted(by_stage.items())
    )


def _phases(within: Mapping[int, Sequence[Mapping[str, Any]]]) -> dict[str, tuple[float, float]]:
    seconds: dict[str, list[float]] = {}
    for events in within.values():
        of_rank: dict[str, float] = defaultdict(float)
        for event in events:
            if event["tid"] == 0:
                of_rank[event["name"]] += event["dur"] / 1e6
        for name, total in of_rank.items():
            seconds.setdefault(name, []).append(total)
    return {name: (median(values), max(values)) for name, values in seconds.items()}


def _rank_name(process: int) -> str:
    return f"gen:{process - _GEN_PROCESSES}" if process >= _GEN_PROCESSES else f"train:{process}"
