"""What one rank has done in its session, and when: the source of metrics, traces, log lines, and of what `watch` shows.

    record.enters(store)                        # from then on the rank's news are on the store, under seen/<seat>
    with record.attempt("refit", 1), record.phase("bulk"):
        ...
    record.committed(report, plan.digest, epoch, "gloo")

Phases may lie in each other. Each counts its own time alone, so that the seconds of all phases add up.
"""

from __future__ import annotations

import json
import logging
import os
import time
from collections import Counter, defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from mcore_reshard.kernels.events import log_event
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.transports.base import StageReport

from .attempts import World
from .state import WeightState, intact

SEEN = "seen"  # the keys of ranks' news
TRACED_ATTEMPTS = 256  # that a trace shows: the last ones
CAUSE_CHARACTERS = 300  # of a failure, as news and log lines give it


@dataclass
class Attempt:
    """One try to prepare or to refit. Times are those of time.perf_counter()."""

    kind: str  # prepare or refit
    number: int  # 1, or more after automatic retries
    start: float
    end: float | None = None  # None: under way
    version: int | None = None
    outcome: str = ""  # committed, or the cause of a failure
    plan: str = ""  # of a committed refit: the digest of the plan that the rank was given
    phases: list[tuple[str, float, float]] = field(default_factory=list)
    stages: Sequence[StageReport] = ()


class Record:
    """Counts, times and the last attempts of one rank. Recording costs microseconds, and memory for TRACED_ATTEMPTS."""

    def __init__(self, session: str, rank_name: str, world: World) -> None:
        self.session, self.rank_name, self.world = session, rank_name, world
        self.state: WeightState = intact(None)
        self.counts: Counter[str] = Counter()  # attempts, committed, failed, retries, epochs
        self.nbytes: Counter[tuple[str, str]] = Counter()  # by route and transport
        self.seconds: dict[str, float] = defaultdict(float)  # by phase, of all attempts
        self.last_seconds: dict[str, float] = {}  # by phase, of the last attempt that had it
        self.attempts: deque[Attempt] = deque(maxlen=TRACED_ATTEMPTS)
        self.clock_offset = time.time() - time.perf_counter()  # from perf_counter() to time.time()
        self._failure: str | None = None
        self._store: SessionStore | None = None
        self._open: list[_Phase] = []
        self._own_seconds: dict[str, float] = defaultdict(float)  # of the attempt under way
        self._statuses: dict[str, str] = {}  # of seats, as log lines last said

    # --- what the endpoint tells ------------------------------------------------------------------------------------

    def enters(self, store: SessionStore) -> None:
        """The rank has taken its seat."""
        self._store = store
        self._log("session_joined", store=store.address, pid=os.getpid())
        self._note_seats()
        store.on_seats(self._note_seats)
        self._publish()

    def leaves(self) -> None:
        """The rank closes."""
        if self._store is not None:
            self._store = None
            self._log("session_left", version=self.committed_version)

    def attempt(self, kind: str, number: int = 1) -> _Attempting:
        """Around an attempt, on the thread that refits. An error that leaves it is its failure."""
        return _Attempting(self, kind, number)

    def phase(self, name: str) -> _Phase:
        """Around a part of an attempt: bind, meet, connect, catch_up, bulk, agree, misc, copy_in, derive or decide."""
        return _Phase(self, name)

    def timed(self, name: str, function: Callable[[], None]) -> Callable[[], None]:
        """`function`, as a phase."""

        def run() -> None:
            with self.phase(name):
                function()

        return run

    def connected(self, epoch: str, members: int, replicas: Sequence[int], transport: str, start: float) -> None:
        self.counts["epochs"] += 1
        replica_list, seconds = ",".join(map(str, replicas)), time.perf_counter() - start
        said: dict[str, Any] = {"epoch": epoch, "members": members, "replicas": replica_list, "transport": transport}
        self._log("epoch_connected", **said, seconds=seconds)

    def committed(self, report: Any, plan: str, epoch: str, misc_transport: str) -> None:
        """A refit has succeeded; `report` is its RefitReport, `plan` the digest of the plan that the rank was given."""
        self.counts["committed"] += 1
        if report.nbytes:
            self.nbytes["bulk", report.transport] += report.nbytes
        if report.misc_bytes:
            self.nbytes["misc", misc_transport] += report.misc_bytes
        self._failure = None
        if (attempt := self._end("committed")) is not None:
            attempt.version, attempt.stages, attempt.plan = report.version, report.stages, plan
        self._publish()
        said = {"version": report.version, "epoch": epoch, "transport": report.transport, "attempts": report.attempts}
        moved = {"seconds": report.seconds, "bytes": report.nbytes, "misc_bytes": report.misc_bytes}
        self._log("refit_committed", **said, **moved)

    def failed(self, error: BaseException) -> None:
        """The attempt under way has failed. Says so once, however often it is told."""
        cause = f"{error}"[:CAUSE_CHARACTERS]
        if (attempt := self._end(f"{type(error).__name__}: {cause}")) is None:
            return
        self._failure = cause
        if attempt.kind == "refit":
            self.counts["failed"] += 1
        self._publish()
        assert attempt.end is not None
        said = {"kind": attempt.kind, "attempt": attempt.number, "seconds": attempt.end - attempt.start}
        cause_said = {"error": type(error).__name__, "cause": cause, "state": str(self.state)}
        self._log("attempt_failed", logging.WARNING, version=self.committed_version, **said, **cause_said)

    # --- what is read -----------------------------------------------------------------------------------------------

    @property
    def committed_version(self) -> int | None:
        """The last version that all members acknowledged, or that this rank took from another replica."""
        return self.state.version

    @property
    def under_way(self) -> Attempt | None:
        attempt = self.attempts[-1] if self.attempts else None
        return attempt if attempt is not None and attempt.end is None else None

    def metrics(self, lags: Mapping[int, int] | None = None) -> dict[str, Any]:
        """Everything that was counted, as plain data; `lags` of replicas, where the rank knows them."""
        store = self._store
        heard = store.last_heard() if store is not None else {}
        nbytes: dict[str, dict[str, int]] = {"bulk": {}, "misc": {}}
        for (route, transport), count in self.nbytes.items():
            nbytes[route][transport] = count
        return {
            "session": self.session,
            "rank": self.rank_name,
            "refits": {name: self.counts[name] for name in ("committed", "failed", "retries", "attempts")},
            "epochs": self.counts["epochs"],
            "bytes": nbytes,
            "seconds": {
                name: {"last": self.last_seconds.get(name, 0.0), "total": total} for name, total in self.seconds.items()
            },
            "state": self.state.to_json(),
            "committed_version": self.committed_version,
            "replica_lag": dict(lags or {}),
            "peers": {
                name: {"status": seat.status, "since": seat.since, "last_heard": heard.get(name)}
                for name, seat in (store.seats if store is not None else {}).items()
                if name != self.rank_name
            },
            "store_reconnects": store.reconnects if store is not None else 0,
        }

    # --- inside -----------------------------------------------------------------------------------------------------

    def _end(self, outcome: str) -> Attempt | None:
        """The attempt that was under way, ended now; None if there is none."""
        if (attempt := self.under_way) is None:
            return None
        attempt.end, attempt.outcome = time.perf_counter(), outcome
        return attempt

    def _begin(self, kind: str, number: int) -> None:
        self._open.clear()
        self._own_seconds.clear()
        self.attempts.append(Attempt(kind, number, time.perf_counter()))
        if kind == "refit":
            self.counts["attempts"] += 1
            self.counts["retries"] += number > 1
        self._publish()

    def _note_phase(self, phase: _Phase, end: float) -> None:
        took = end - phase.start
        own = took - phase.inner
        if self._open and self._open[-1] is phase:
            self._open.pop()
        if self._open:
            self._open[-1].inner += took
        self._own_seconds[phase.name] += own
        self.seconds[phase.name] += own
        self.last_seconds[phase.name] = self._own_seconds[phase.name]
        if self.attempts:
            self.attempts[-1].phases.append((phase.name, phase.start, end))

    def _publish(self) -> None:
        """Let `watch` see what this rank does and holds. Nobody waits for it, and its loss is no failure."""
        if self._store is None:
            return
        attempt = self.under_way
        news = {
            **self.state.to_json(),
            "committed": self.committed_version,
            "doing": attempt.kind if attempt is not None else None,
            "since": None if attempt is None else attempt.start + self.clock_offset,
            "failure": self._failure,
            "world": [self.world.train_ranks, self.world.replica_ranks, self.world.replicas],
        }
        with suppress(Exception):
            self._store.set_soon({f"{SEEN}/{self.rank_name}": json.dumps(news)})

    def _note_seats(self) -> None:
        """Log which seats have changed. Joins and farewells are the business of training rank 0: n ranks make n lines."""
        if (store := self._store) is None:
            return
        for name, seat in store.seats.items():
            if self._statuses.get(name) == seat.status or name == self.rank_name:
                continue
            self._statuses[name] = seat.status
            level = logging.INFO if self.rank_name == "train:0" else logging.DEBUG
            place = {"host": seat.facts.get("host"), "pid": seat.facts.get("pid")}
            event = {"here": "peer_joined", "gone": "peer_gone", "left": "peer_left"}.get(seat.status, "peer_changed")
            self._log(event, logging.WARNING if seat.status == "gone" else level, peer=name, **place)

    def _log(self, event: str, level: int = logging.INFO, **fields: Any) -> None:
        log_event(event, level, rank=self.rank_name, session=self.session, **fields)


# Classes, not @contextmanager: contextlib's frames would keep a replaced exception, and the tensors in its traceback, alive.
class _Attempting:
    def __init__(self, record: Record, kind: str, number: int) -> None:
        self._record, self._kind, self._number = record, kind, number

    def __enter__(self) -> None:
        self._record._begin(self._kind, self._number)

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is not None:
            self._record.failed(error)
        elif self._kind == "prepare":
            self._record._end("prepared")
            self._record._publish()


class _Phase:
    def __init__(self, record: Record, name: str) -> None:
        self._record, self.name = record, name
        self.start = self.inner = 0.0  # inner: seconds of phases in this one

    def __enter__(self) -> None:
        self.start = time.perf_counter()
        self._record._open.append(self)

    def __exit__(self, *_: object) -> None:
        self._record._note_phase(self, time.perf_counter())
