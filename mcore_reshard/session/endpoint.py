"""What a rank's end of a session offers on either side: prepare, refit, state, metrics, close."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from typing import Any

from mcore_reshard.kernels.errors import RefitError, SessionError, StoreRestarted
from mcore_reshard.kernels.rendezvous.rendezvous import cause_of

from .agreement import kv_scales_word, version_word
from .attempts import CONNECT
from .attendance import PREPARED
from .leader import Leader
from .member import CLOSED
from .refitter import Refitter
from .report import RefitReport
from .state import WeightState, name_state
from .trace_events import write_trace
from .wait_line import WaitLine

# Failures of a machine or a network, after which another try may succeed; others need somebody to mend something.
# After the loss of the store ranks may know different outcomes: each rank's caller decides.
_PASSING = {
    "ChecksumError",
    "ConnectError",
    "DeadlineError",
    "NcclError",
    "PeerGone",
    "PeerLostError",
    "TransferError",
}


class Endpoint(Refitter):
    """What both endpoints of a session offer."""

    def prepare(self, *, timeout_s: float | None = None) -> None:
        """Bind, meet all other ranks, compare plans and options, and connect. Call once, on every rank.

        A replica that comes to a session under way binds, and takes part from its next `refit` on.

        `timeout_s` (by default that of the options) limits the wait for ranks that are still starting.
        Raises `BindError`, `TransportUnavailable` or `SessionError`; if one rank raises, all do.
        """
        if self._store or self._ended:
            reason = self._ended or "already prepared"
            raise SessionError(f"{self.rank_name}: {reason}; call prepare() once, on a new endpoint")
        self._ended = "prepare() failed"
        timeout_s = self._options.timeout_s if timeout_s is None else timeout_s
        try:
            with self._record.attempt("prepare"), WaitLine(self.rank_name, self._absent):
                self._enter()
                self._bind_first()
                attendance = self._attendance
                if isinstance(attendance, Leader):
                    with self._record.phase("meet"):
                        call = attendance.call(attendance.begin(CONNECT), self._word, timeout_s, self._epoch)
                    self._connect(call)
                    attendance.committed(call.replicas)
                else:
                    assert attendance is not None
                    with self._record.phase("meet"):
                        head = attendance.await_head(timeout_s, "session")
                        while (self.world == "train" or head.kind == CONNECT) and attendance.is_stale(
                            head, self._part.plan_digest
                        ):
                            attendance.forget(head)
                            head = attendance.await_head(timeout_s, "session")
                    self._follow_connect(attendance, head, timeout_s)
                    with attendance.store_is_up():
                        self._welcome_newcomers()
                    with suppress(StoreRestarted):  # the next refit opens the store again
                        attendance.say_ready(PREPARED)
        except BaseException as error:
            self._end(error)
            raise
        self._ended = None

    def refit(
        self,
        version: int | None = None,
        *,
        kv_scales: Mapping[str, float] | None = None,
        everything: bool = False,
        rollback: bool = False,
    ) -> RefitReport:
        """Move the weights of `version` from the trainer to the engine; return once every member has acknowledged it.

        If the plan has frozen parameters, the first refit of a session moves them too, and later ones leave them out.
        `everything`, given on any rank, moves them again: for an engine that has lost its weights.

        `kv_scales` are calibrated scales of the engine's KV cache, by checkpoint name, as in
        `model.layers.0.self_attn.attn.k_scale`. Give them on training rank 0; other ranks may be given the same.

        All ranks of both worlds must call it with one version, larger than the last; ranks of the engine may leave it
        out, and take what comes. `rollback` on the trainer allows a version that is not larger, after a restart from an
        older checkpoint. Else all ranks raise `VersionError`. They raise `KvScalesError` for scales that no rank can take.
        After these two errors nothing has moved. Each wait ends with an error after `timeout_s`. Training weights may change
        again as soon as this returns.

        After any other error `state` says what the engine holds. The next refit repairs it; `retries` of the options makes
        this call try again by itself, where a machine or the network failed.
        """
        return self._refit(version, kv_scales, everything, rollback, in_background=False).result()

    def _refit(
        self,
        version: int | None,
        kv_scales: Mapping[str, float] | None,
        everything: bool,
        rollback: bool,
        in_background: bool,
    ) -> Future[RefitReport]:
        if self._attendance is None:
            raise SessionError(f"{self.rank_name}: no refit is possible: {self._ended or 'call prepare() first'}")
        self.await_outcome()
        word = {**version_word(version), "everything": bool(everything), "rollback": bool(rollback)}
        word |= {**kv_scales_word(kv_scales), "in_background": in_background}
        start = time.perf_counter()
        attempts = 1
        while True:
            self._retries = self._options.retries
            try:
                with self._record.attempt("refit", attempts):
                    with self._record.phase("meet"):  # not in turn: it may offer its weights while it waits
                        call = self._called(word)
                    with self._turn:
                        return self._attempt(call, start, attempts, in_background)
            except Exception as error:
                if attempts > self._retries or not isinstance(error, RefitError) or not self._may_pass(error):
                    if self.world == "gen":
                        name_state(error, self._state, self.rank_name)
                    raise
                attempts += 1

    def _may_pass(self, error: RefitError) -> bool:
        """Whether another attempt may succeed without anybody's help.

        All members know the same cause, so all of them try again, or none. A replica that has lost a rank is no member
        of the next attempt.
        """
        cause = cause_of(self.rank_name, error)
        if cause.error == "PeerGone" and cause.peer in self._part.seats.needed_by(self.rank_name):
            return False  # until somebody starts it again
        return cause.error in _PASSING

    @property
    def state(self) -> WeightState:
        """What this rank's tensors hold. A training rank's are its own: always intact, or complete."""
        return self._state

    @property
    def scratch_bytes(self) -> int:
        """Memory that the session holds besides the model: of the transport, and of staged tensors."""
        staged = self._staged.nbytes if self._staged is not None else 0
        return staged + (self._connection.scratch_bytes if self._connection else 0)

    @property
    def failure(self) -> str | None:
        """Why the last attempt failed, if it did."""
        return self._failure if self._ended in {None, CLOSED} else self._ended

    def metrics(self) -> dict[str, Any]:
        """What this rank has done so far, as plain data; `prometheus_text` of session/metrics.py makes text of it.

        Counts of refits, attempts and epochs; bytes by route and transport; seconds by phase; the weights' state; the
        status of all other ranks, the Unix time of its last change, and when the store last heard of each; on training
        rank 0 the lag of each replica. It asks the store, and waits 0.2 s at most.
        """
        attendance = self._attendance
        return self._record.metrics(attendance.lags if isinstance(attendance, Leader) else None)

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's last attempts, TRACED_ATTEMPTS at most, as a chrome trace. Raises OSError."""
        write_trace(path, self._record)
