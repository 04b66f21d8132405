"""One attempt to refit: bytes move, all members acknowledge the version, and `state` says what this rank holds then."""

from __future__ import annotations

import time
from abc import abstractmethod
from collections.abc import Callable, Collection, Mapping, Sequence
from concurrent.futures import Future, wait
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

import torch

from mcore_reshard.kernels.cuda.streams import in_callers_context
from mcore_reshard.kernels.rendezvous.polling import (
    CASTING_SHARE,
    HEAD_START_S,
    LOOK_S,
    NOTICE_S,
    DeadlineThread,
    short_turns,
)
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed
from mcore_reshard.kernels.transports.base import StageReport

from .agreement import agreed_kv_scales, check_kv_names, parse_word
from .attempts import Call, next_version
from .connection import Connection, Program
from .gc_pause import gc_paused
from .leader import Leader
from .member import Member
from .published import Published
from .report import RefitReport
from .staged import STAGED, StagedTensors
from .state import complete, intact, mixed
from .write_watch import WriteWatch

SetKvScales = Callable[[Mapping[str, float]], Any]
KvScaleNames = Callable[[], Collection[str]]


@dataclass
class Attempt:
    """What one refit has reached on this rank."""

    call: Call
    version: int
    start: float
    written_by_name: int = 0  # bytes
    share_by_name: float = 0.0  # of the tensors that move by name
    kept: list[tuple[str, torch.Tensor]] | None = None  # staged: tensors that move by name, until all have everything
    kept_bytes: int = 0
    committed: bool = False


class Refitter(Member):
    """A member that refits: one attempt, from the call to the outcome."""

    _before_reads: Callable[[], Any] | None = None  # on training ranks
    _set_kv_scales: SetKvScales | None = None  # this and the next one: on generation ranks
    _kv_scale_names: KvScaleNames | None = None

    @abstractmethod
    def _move_by_name(
        self, connection: Connection, names: Sequence[str] | None, attempt: Attempt, afterwards: ExitStack
    ) -> int:
        """Export or load the tensors `names`, or all if None; returns their bytes. `afterwards` runs after the outcome.

        In a staged session, a generation rank keeps them until `_copy_in`.
        """

    @abstractmethod
    def _copy_in(self, staged: StagedTensors, program: Program, attempt: Attempt) -> None:
        """Put everything that a staged refit has brought where the engine reads it."""

    def _attempt(self, call: Call, start: float, attempts: int, in_background: bool) -> Future[RefitReport]:
        if any(said.get("in_background") for said in call.words.values()):
            self._retries = 0  # of this refit: the trainer's weights may have changed by the time that it fails
        version = next_version(call.words, self.rank_name)
        connection = self._connect(call)
        attempt = Attempt(call, version, start)
        self._bulk_began = False
        rendezvous = self._rendezvous(f"a/{call.attempt}", call)
        wants_all = any(said.get("everything", True) for said in call.words.values())
        program = connection.programs[0 if wants_all else -1]
        all_scales = agreed_kv_scales(call.words, "train:0")
        own_scales = self._own_kv_scales(rendezvous, "kv_scales", all_scales) if all_scales else {}
        names, fail = program.names, partial(self._fail_attempt, connection, program, attempt)
        moves_by_name = names is None or bool(names)
        if names:  # exports are collectives: no rank may enter one while another's transfer has failed
            with gc_paused(), Published(rendezvous, "bulk", fail):
                with self._record.phase("bulk"):
                    stages = self._move_bulk(connection, program, rendezvous, "bulk")
                with self._record.phase("agree"):
                    rendezvous.gather("bulk", {})
        is_staged = self._options.commit == STAGED
        arrived = STAGED if is_staged else "commit"
        vote = partial(rendezvous.decide, "commit", connection.group.settle, partial(self._commit, attempt))
        decide = self._record.timed("decide", vote)
        afterwards = ExitStack()
        with afterwards:
            if not moves_by_name:
                afterwards.enter_context(gc_paused())
            with Published(rendezvous, arrived, fail):
                if not names:
                    with self._record.phase("bulk"):
                        stages = self._move_bulk(connection, program, rendezvous, arrived)
                misc_bytes = 0
                if moves_by_name:
                    with self._record.phase("misc"):
                        misc_bytes = self._move_by_name(connection, names, attempt, afterwards)
                if is_staged and not in_background:
                    with self._record.phase("agree"):
                        rendezvous.gather(STAGED, {})
            with Published(rendezvous, "commit", fail):
                if self._staged is not None:
                    with self._record.phase("copy_in"):
                        self._copy_in(self._staged, program, attempt)
                with self._record.phase("derive"):
                    if self._after_direct_writes is not None:
                        self._after_direct_writes()
                    if own_scales and self._set_kv_scales is not None:
                        self._set_kv_scales(own_scales)
                if not in_background:
                    decide()

        def report() -> RefitReport:
            nbytes = sum(stage.nbytes for stage in stages)
            moved_by = (program.executor or connection.transport).name
            seconds = time.perf_counter() - start
            state, replicas = str(self._state), call.replicas
            report = RefitReport(
                version, moved_by, program.moved, nbytes, misc_bytes, seconds, stages, state, replicas, attempts
            )
            by_name = "golden" if names is None else "gloo"
            self._record.committed(report, self._part.plan_digest, connection.epoch, by_name)
            return report

        outcome: Future[RefitReport] = Future()
        if not in_background:
            outcome.set_result(report())
            return outcome

        def await_outcome() -> RefitReport:
            if is_staged:
                with Published(rendezvous, STAGED, fail):
                    rendezvous.gather(STAGED, {})
            with Published(rendezvous, "commit", fail):
                decide()
            return report()

        device = None if program.bound is None else program.bound.device
        self._pending = DeadlineThread("outcome").start(in_callers_context(await_outcome, device))
        return self._pending

    def _commit(self, attempt: Attempt) -> None:
        """All members have acknowledged the version."""
        attempt.committed = True
        self.committed_version = attempt.version
        self._failure = None
        if isinstance(self._attendance, Leader):
            self._attendance.committed(attempt.call.replicas)
        self._set_state(complete(attempt.version))

    def _fail_attempt(self, connection: Connection, program: Program, attempt: Attempt, error: BaseException) -> None:
        """Note what a failed attempt has left, and that its connection is of no use any more.

        Transfers end with the connection: what is under way when this rank fails may write until then.
        """
        if not attempt.committed and self.world == "gen":
            try:
                self._disconnect(failed=True)
            finally:
                may_write = connection.is_moving and self._staged is None
                share = 1.0 if may_write else self._written_share(program, attempt)
                if share > 0:
                    self._set_state(mixed(self.committed_version, attempt.version, max(share, self._state.share)))
                elif self._state.kind != "mixed":  # else it stays the mixture that it was
                    self._set_state(intact(self.committed_version))
        self._fail(error)

    def _written_share(self, program: Program, attempt: Attempt) -> float:
        """Of the bytes that this refit moves to this rank, how many may have been written by now."""
        if self._staged is not None:
            in_bulk = 0 if program.bound is None else self._staged.bytes_of(program.bound)
            written = self._staged.copied_bytes + attempt.written_by_name
            return written / (in_bulk + attempt.kept_bytes) if written else 0.0
        if program.bound is None or program.executor is None:
            return 1.0 if attempt.written_by_name else 0.0
        total = program.bound.nbytes  # that come from the trainer
        written = program.executor.written_bytes if self._bulk_began else 0  # else those of the last refit
        if written and not total:  # other replicas pass everything on
            return 1.0
        written = min(written, total)
        if attempt.share_by_name:
            written += attempt.written_by_name
            total += int(attempt.written_by_name / attempt.share_by_name)
        elif program.names:
            return written / total * 0.999 if total else 0.0  # something is left to load
        return written / total if total else 0.0

    def _move_bulk(
        self, connection: Connection, program: Program, rendezvous: Rendezvous, phase: str
    ) -> tuple[StageReport, ...]:
        """Run a program's transfers, on a thread; none under golden.

        The wait ends once the store reports the failure of any rank: gloo may leave a sender waiting for a lost peer.
        """
        bound, executor, whole = program.bound, program.executor, connection.programs[0].bound
        if bound is None or executor is None or whole is None or program.checks is None:
            return ()
        if self._staged is not None:
            self._staged.begin(bound)
        if self._before_reads is not None:
            with self._record.phase("derive"):
                self._before_reads()
        seen = self._writes
        fastest_s = connection.fastest_s.get(program.moved, 0.0)
        read = seen.tensors if self.world == "train" else ()
        watch = WriteWatch(whole, read, is_summed=program.checks.tiles > 0, fastest_s=fastest_s)
        self._bulk_began = True
        stale: list[Exception] = []
        start = time.perf_counter()
        run = connection.thread.start(in_callers_context(program.checks.around(executor.run), bound.device))
        try:
            with short_turns():
                if self.world == "train":
                    wait([run], HEAD_START_S)
                    watch.begin()
                    wait([run], min(LOOK_S, CASTING_SHARE * fastest_s) if bound.casts else 0.0)
                    stale = self._stale_tensors()
                while not wait([run], min(LOOK_S, watch.due_in_s())).done:
                    watch.look()
                    if (failure := rendezvous.failure(phase)) is None:
                        continue
                    # A process that is gone has been so for longer than a transport takes to notice.
                    if not wait([run], 0 if failure.error == "PeerGone" else NOTICE_S).done:
                        raise SessionFailed(failure)
                stages = run.result()
        finally:
            del run  # it keeps its error, whose traceback would keep it in turn
        took_s = time.perf_counter() - start
        connection.fastest_s[program.moved] = min(fastest_s or took_s, took_s)
        if self.world == "gen":
            bound.zero_padding()
            return stages
        if stale:
            raise stale.pop()
        watch.end()
        if self._writes is not seen:  # the model has other tensors since
            whole.check_unwritten(self._writes)
        return stages

    @cached_property
    def _pairs(self) -> Mapping[str, tuple[str, str]]:
        return self._part.schedule(self._connection.replicas if self._connection else (0,)).pair_names()

    def _own_kv_scales(self, rendezvous: Rendezvous, phase: str, scales: Mapping[str, float]) -> dict[str, float]:
        """This rank's part of `scales`. Collective: it raises unless each of them belongs to some generation rank."""
        with Published(rendezvous, phase, self._fail):
            names = None if self._kv_scale_names is None else self._kv_scale_names()
            lacks = None if names is None else [number for number, name in enumerate(scales) if name not in names]
            words = rendezvous.gather(phase, {"lacks": lacks} if self.world == "gen" else {}, parse=parse_word)
        check_kv_names(words, scales)
        return {name: scale for name, scale in scales.items() if name in (names or ())}
