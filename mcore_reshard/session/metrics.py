"""Metrics of ranks in Prometheus' text exposition format, version 0.0.4.

    prometheus_text(endpoint.metrics())                                  # one rank
    prometheus_text(*llm.collective_rpc("refit_metrics"))                # all workers of an engine

Source of the format: https://prometheus.io/docs/instrumenting/exposition_formats/
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

_KINDS = ("intact", "mixed", "complete")
_STATUSES = ("here", "gone", "left")


class _Family(NamedTuple):
    kind: str
    help: str


_FAMILIES = {
    "refits_committed_total": _Family("counter", "Refits that all members have acknowledged."),
    "attempts_total": _Family("counter", "Attempts to refit, retries among them."),
    "attempts_failed_total": _Family("counter", "Attempts that failed."),
    "retries_total": _Family("counter", "Attempts that a refit made by itself after a failure."),
    "epochs_connected_total": _Family("counter", "Times that this rank connected with the members of an epoch."),
    "bytes_total": _Family("counter", "Bytes that committed refits moved, by route and transport."),
    "phase_seconds_total": _Family("counter", "Time of all attempts, by phase."),
    "phase_last_seconds": _Family("gauge", "Time of the last attempt that had this phase."),
    "state": _Family("gauge", "1 for the state of this rank's weights: intact, mixed or complete."),
    "mixed_share": _Family(
        "gauge", "Of the bytes of the next version, how many may have been written; 0 unless mixed."
    ),
    "committed_version": _Family("gauge", "The last version that all members acknowledged; none before the first."),
    "replica_lag": _Family("gauge", "How many committed refits a replica has missed, as training rank 0 counts."),
    "peer_status": _Family(
        "gauge", "1 for the status of another rank: here, gone or left; from training rank 0 alone."
    ),
    "peer_since_seconds": _Family(
        "gauge", "Unix time at which another rank got its status; from training rank 0 alone."
    ),
    "peer_last_heard_seconds": _Family(
        "gauge", "Unix time at which the store last heard of another rank; from training rank 0 alone."
    ),
    "store_reconnects_total": _Family("counter", "Times that the connection to the store broke."),
}


def prometheus_text(*metrics: Mapping[str, Any]) -> str:
    """The metrics of one or several ranks. Labels: session and rank, and those that a metric's help names."""
    lines: dict[str, list[str]] = {name: [] for name in _FAMILIES}
    for each in metrics:
        common = {"session": each["session"], "rank": each["rank"]}
        for name, labels, value in _samples(each):
            said = ",".join(f'{label}="{_escaped(str(text))}"' for label, text in {**common, **labels}.items())
            lines[name].append(f"mcore_reshard_{name}{{{said}}} {_number(value)}\n")
    return "".join(
        f"# HELP mcore_reshard_{name} {family.help}\n# TYPE mcore_reshard_{name} {family.kind}\n{''.join(lines[name])}"
        for name, family in _FAMILIES.items()
        if lines[name]
    )


def _samples(metrics: Mapping[str, Any]) -> Iterator[tuple[str, dict[str, Any], float]]:
    refits, state = metrics["refits"], metrics["state"]
    yield "refits_committed_total", {}, refits["committed"]
    yield "attempts_total", {}, refits["attempts"]
    yield "attempts_failed_total", {}, refits["failed"]
    yield "retries_total", {}, refits["retries"]
    yield "epochs_connected_total", {}, metrics["epochs"]
    for route, by_transport in metrics["bytes"].items():
        for transport, count in by_transport.items():
            yield "bytes_total", {"route": route, "transport": transport}, count
    for phase, seconds in metrics["seconds"].items():
        yield "phase_seconds_total", {"phase": phase}, seconds["total"]
        yield "phase_last_seconds", {"phase": phase}, seconds["last"]
    for kind in _KINDS:
        yield "state", {"kind": kind}, kind == state["state"]
    yield "mixed_share", {}, state.get("share", 0.0)
    if metrics["committed_version"] is not None:
        yield "committed_version", {}, metrics["committed_version"]
    for replica, lag in metrics["replica_lag"].items():
        yield "replica_lag", {"replica": replica}, lag
    # From one rank alone: of n ranks, each with n peers, there would be n * n series.
    for peer, seat in metrics["peers"].items() if metrics["rank"] == "train:0" else ():
        for status in _STATUSES:
            yield "peer_status", {"peer": peer, "status": status}, status == seat["status"]
        yield "peer_since_seconds", {"peer": peer}, seat["since"]
        if seat["last_heard"] is not None:
            yield "peer_last_heard_seconds", {"peer": peer}, seat["last_heard"]
    yield "store_reconnects_total", {}, metrics["store_reconnects"]


def _escaped(text: str) -> str:
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _number(value: float) -> str:
    return repr(float(value)) if isinstance(value, float) else str(int(value))
