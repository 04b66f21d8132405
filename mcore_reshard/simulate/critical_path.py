"""The critical path of a simulated refit: from its last message back, each time to what it waited for last."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from .events import NOTHING, Outcome
from .flows import Ints
from .script import Script
from .simulation import ROUTES, Step


def critical_path(script: Script, outcome: Outcome, route: Ints, names: tuple[str, ...]) -> tuple[Step, ...]:
    """The steps in order of time; `route` [messages] indexes ROUTES, `names` [ranks]."""
    buckets = script.buckets
    path: list[int] = []
    waited: list[int] = []  # for each message, the rank that was late
    message = int(np.argmax(outcome.end_s)) if len(buckets) else NOTHING
    while message != NOTHING:
        ends = int(script.src_round[message]), int(script.dst_round[message])
        late = max(ends, key=lambda end: float(outcome.round_start_s[end]))
        path.append(message)
        waited.append(int(script.round_rank[late]))
        before = int(script.behind[message])
        is_behind = before != NOTHING and outcome.end_s[before] > outcome.round_start_s[late]
        message = before if is_behind else int(outcome.cause[late])
    path.reverse()
    waited.reverse()
    steps: list[Step] = []
    for number, each in enumerate(path):
        src, dst = names[buckets.src[each]], names[buckets.dst[each]]
        place = src, dst, int(buckets.stage[each]), ROUTES[route[each]]
        last = steps[-1] if steps else None
        if last is not None and (last.src, last.dst, last.stage, last.route) == place:
            nbytes = last.nbytes + int(buckets.nbytes[each])
            steps[-1] = replace(last, end_s=float(outcome.end_s[each]), messages=last.messages + 1, nbytes=nbytes)
            continue
        why = _why(script, names, path[number - 1], waited[number]) if number else "the refit had begun"
        start_s, end_s = float(outcome.start_s[each]), float(outcome.end_s[each])
        steps.append(Step(start_s, end_s, *place, messages=1, nbytes=int(buckets.nbytes[each]), why=why))
    return tuple(steps)


def _why(script: Script, names: tuple[str, ...], before: int, rank: int) -> str:
    """What a rank had to be done with: its message `before`."""
    buckets = script.buckets
    verb, other = ("received from", buckets.src) if buckets.dst[before] == rank else ("sent to", buckets.dst)
    return f"{names[rank]} had {verb} {names[other[before]]}, stage {int(buckets.stage[before])}"
