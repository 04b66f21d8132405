"""Judges what the processes of a cell saw. Pure: `judge` takes an `Observed` and starts nothing."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from .cell import Observed, live_replicas, takes_part
from .matrix import DEADLINE_S, PAUSES_S, STORE, Cell
from .model import plan_of
from .rank import RECOVERED, Step

KNOWN_S = 3.0  # for all to know that a process has died, or has said why it failed
OVERDUE_S = DEADLINE_S + 4.0  # for all to know what only the deadline can show
STORE_S = 3 * DEADLINE_S + 1.0  # for all to know that the store is lost: they ask each other, then the store once more
_SLACK_S = 1.0  # of a busy machine
_TOLD_AT_ONCE = ("kill", "interrupt", "exception")

# What a cell may get wrong: the title of each count, which must be 0.
PROBLEMS = {
    "hung": "hung",
    "left": "left processes",
    "torn": "torn commits",
    "unreported": "unreported mixtures",
    "wrong": "wrong bytes reported as success",
    "unnamed": "unnamed culprits",
    "late": "told too late",
    "stuck": "not recovered",
    "paused": "sessions ended by a pause",
    "broken": "processes that broke",
    "alarm": "mixtures reported where there is none",
    "missed": "faults that never came",
}


@dataclass
class Verdict:
    """What is wrong with a cell, by the keys of PROBLEMS; and its times."""

    problems: dict[str, list[str]] = field(default_factory=dict)
    committed: bool = False  # whether the refit that met the fault was committed
    known_s: float | None = None  # until the last survivor knew of the fault
    recovered_s: float | None = None  # until the session had recovered

    @property
    def ok(self) -> bool:
        return not self.problems


def judge(seen: Observed) -> Verdict:
    verdict = Verdict()
    found = {
        "hung": iter(seen.hung),
        "left": iter(seen.left),
        "broken": iter(seen.broken),
        "missed": iter(() if seen.fault_s is not None else ("the cell's phase was never reached",)),
        "torn": _torn(seen),
        "unreported": _false_states(seen, is_alarm=False),
        "alarm": _false_states(seen, is_alarm=True),
        "wrong": _wrong(seen),
        "unnamed": _unnamed(seen),
        "late": _late(seen),
        "stuck": _stuck(seen),
        "paused": _paused(seen),
    }
    verdict.problems = {kind: problems for kind, each in found.items() if (problems := [*each])}
    verdict.committed = any(step.version is not None for _, step in _of(seen, "fault"))
    if seen.fault_s is not None:
        knew = [step.end_s - max(seen.fault_s, step.start_s) for _, step in _survivors(seen) if step.error]
        verdict.known_s = round(max(knew), 2) if knew else None
        recovered = [step.end_s - seen.fault_s for _, step in _of(seen, "recovery")]
        verdict.recovered_s = round(max(recovered), 2) if recovered else None
    return verdict


def _of(seen: Observed, name: str) -> Iterator[tuple[str, Step]]:
    for process, steps in seen.steps.items():
        yield from ((process, step) for step in steps if step.name == name)


def _survivors(seen: Observed) -> Iterator[tuple[str, Step]]:
    return ((process, step) for process, step in _of(seen, "fault") if process != seen.cell.victim)


def _torn(seen: Observed) -> Iterator[str]:
    """Members of a refit that some rank has committed, and they have not, though they live."""
    for name in ("set up", "fault"):
        steps = dict(_of(seen, name))
        reported = {(step.version, step.replicas) for step in steps.values() if step.version is not None}
        for version, replicas in ((v, replicas) for v, replicas in reported if v < RECOVERED):
            for process, step in steps.items():
                is_member = process.startswith("train:") or _replica(seen.cell, process) in replicas
                was_there = step.end_s > _began_s(seen)
                if is_member and was_there and _went_on(seen, process) and (step.committed or 0) < version:
                    yield f"{process} has not committed version {version}, which others have: {step.error}"


def _began_s(seen: Observed) -> float:
    """Before which the refit that met the fault cannot have begun: not while training rank 0, which begins it, is frozen.

    A rank whose own call has ended before, at its deadline, takes part in it with its next call.
    """
    cell = seen.cell
    froze = cell.victim == "train:0" and cell.phase == "between refits" and cell.fault in PAUSES_S
    return seen.fault_s + PAUSES_S[cell.fault] if froze and seen.fault_s is not None else 0.0


def _went_on(seen: Observed, process: str) -> bool:
    """Whether a process took part in the others' refit: one that closes, or was interrupted before its call, does not."""
    return not (process == seen.cell.victim and seen.cell.phase in ("closing", "between refits"))


def _false_states(seen: Observed, *, is_alarm: bool) -> Iterator[str]:
    # In a relay on GPUs, nccl receives small buckets in place, and direct pushes along a chain: something may have come.
    lands_unseen = bool(plan_of(*seen.cell.ranks).later_hops) and seen.cell.transport in ("nccl", "direct")
    for process, steps in seen.steps.items():
        for step in steps:
            if step.state is None or not process.startswith("gen:"):
                continue
            kind, version, arriving, share = step.state
            if not is_alarm and step.version is not None and kind != "complete":
                yield f"{process} after {step.name}: {_state(step)}, and it has committed version {step.version}"
            if kind == "mixed" and not is_alarm and not (arriving is not None and 0 < share <= 1):
                yield f"{process} after {step.name}: {_state(step)}, which is no mixture of two versions"
            if kind == "mixed":
                holds_old = step.held == (version or 0)
                holds_new = step.held is not None and step.held == arriving and share < 1.0
                if is_alarm and (holds_old or holds_new) and not lands_unseen:
                    yield f"{process} after {step.name}: {_state(step)}, and it holds all of version {step.held}"
            elif not is_alarm and step.held != (version or 0):
                yield f"{process} after {step.name}: {_state(step)}, and it holds {_held(step)}"


def _wrong(seen: Observed) -> Iterator[str]:
    for process, steps in seen.steps.items():
        for step in steps:
            if process.startswith("gen:") and step.version is not None and step.held != step.version:
                yield f"{process} after {step.name}: version {step.version} was reported, and it holds {_held(step)}"


def _unnamed(seen: Observed) -> Iterator[str]:
    """Errors of survivors that do not say who is to blame: the victim's seat, or the address of the store.

    A replica that passes on has a name of its own for that: relay:0 is gen:0.
    """
    culprits = (
        {seen.address} if seen.cell.victim == STORE else {seen.cell.victim, seen.cell.victim.replace("gen:", "relay:")}
    )
    for process, step in _survivors(seen):
        # Some training ranks may recover, with RECOVERED, before others have begun the version that met the fault.
        met_recovery = step.kind == "VersionError" and f"{RECOVERED} on " in (step.error or "")
        is_named = any(culprit in (step.error or "") for culprit in culprits)
        if step.error is not None and not is_named and not met_recovery:
            yield f"{process} was told {step.kind}: {step.error:.200}"


def _late(seen: Observed) -> Iterator[str]:
    if seen.fault_s is None:
        return
    limit_s = KNOWN_S if seen.cell.fault in _TOLD_AT_ONCE else STORE_S if seen.cell.victim == STORE else OVERDUE_S
    for process, step in _survivors(seen):
        seconds = step.end_s - max(seen.fault_s, step.start_s)
        if step.error is not None and seconds > limit_s:
            yield f"{process} knew after {seconds:.1f} s, not {limit_s:g} s: {step.error:.100}"
    yield from _woke_late(seen)


def _woke_late(seen: Observed) -> Iterator[str]:
    """A rank that was frozen for longer than the deadline learns within one deadline what has happened meanwhile."""
    if seen.cell.fault != "freeze, long" or seen.fault_s is None:
        return
    for process, step in _of(seen, "fault"):
        seconds = step.end_s - seen.fault_s - PAUSES_S["freeze, long"]
        if process == seen.cell.victim and seconds > DEADLINE_S + _SLACK_S:
            yield f"{process} knew {seconds:.1f} s after it woke: {(step.error or '')[:100]}"


def _stuck(seen: Observed) -> Iterator[str]:
    """Processes that should have recovered, and have not, or hold other bytes than they committed."""
    for process, steps in seen.steps.items():
        seat = process.removesuffix(" anew")
        ends = process == seen.cell.victim and (seen.cell.fault == "kill" or seen.cell.phase == "closing")
        if ends or not takes_part(seen.cell, seat):
            continue
        last = next((step for step in reversed(steps) if step.name == "recovery"), None)
        if last is None or last.error is not None:
            yield f"{process}: {'it never came so far' if last is None else f'{last.kind}: {last.error:.200}'}"
        elif not set(live_replicas(seen.cell)) <= set(last.replicas):
            yield f"{process} went on with replicas {list(last.replicas)} alone"


def _paused(seen: Observed) -> Iterator[str]:
    if seen.cell.is_pause and seen.cell.phase != "closing":  # there a rank leaves, and the others hear so
        for process, step in _of(seen, "fault"):
            if step.error is not None:
                yield f"{process} was told {step.kind}: {step.error:.200}"


def _replica(cell: Cell, process: str) -> int:
    return int(process.removesuffix(" anew").partition(":")[2]) // cell.replica_ranks


def _state(step: Step) -> str:
    assert step.state is not None
    kind, version, arriving, share = step.state
    return f"{kind}({version}, {arriving}, {share:.2f})" if kind == "mixed" else f"{kind}({version})"


def _held(step: Step) -> str:
    return "no single version" if step.held is None else f"version {step.held}"
