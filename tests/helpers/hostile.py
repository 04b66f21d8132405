"""Hostile inputs, each tried in a process of its own: what it cost, and what it was answered.

costs = tried({"deep": "parse_plan('[' * 100000)"}, setup="from mcore_reshard... import parse_plan")
costs["deep"]      # Cost(answer="PlanFileError: ...", cpu_s=0.01, grown_mb=0.4)
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping
from typing import NamedTuple

CPU_S, GROWN_MB = 1.0, 100.0  # what an input may cost that is refused


class Cost(NamedTuple):
    answer: str  # the error's class and message; or what the expression gave
    cpu_s: float
    grown_mb: float  # peak memory above that of the process before

    @property
    def is_bounded(self) -> bool:
        return self.cpu_s < CPU_S and self.grown_mb < GROWN_MB and len(self.answer) < 3000


# A fork for each: its peak begins at the size of its parent, which has imported everything and tried nothing.
_TRY_ALL = """
import json, os, resource, sys, time
said = json.load(sys.stdin)
exec(said["setup"], globals())
for name, expression in said["expressions"].items():
    sys.stdout.flush()
    if os.fork():
        os.wait()
        continue
    resource.setrlimit(resource.RLIMIT_CPU, (20, 20))
    resource.setrlimit(resource.RLIMIT_AS, (8 << 30, 8 << 30))
    before, start = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    try:
        answer = f"gave {eval(expression, globals())!s:.200}"
    except BaseException as error:
        answer = f"{type(error).__name__}: {error}"
    cpu, peak = time.process_time() - start, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    print(json.dumps([name, [answer, cpu, (peak - before) / 1024]]), flush=True)
    os._exit(0)
"""


def tried(expressions: Mapping[str, str], setup: str) -> dict[str, Cost]:
    """The cost of each expression. One that is killed costs infinitely much."""
    said = json.dumps({"setup": setup, "expressions": dict(expressions)})
    done = subprocess.run([sys.executable, "-c", _TRY_ALL], input=said, text=True, capture_output=True, timeout=300)
    assert done.returncode == 0, done.stderr
    costs = {name: Cost("killed", float("inf"), float("inf")) for name in expressions}
    return costs | {name: Cost(*cost) for name, cost in map(json.loads, done.stdout.splitlines())}
