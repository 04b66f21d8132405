"""Run a script on links: when every message begins and ends, and what it waited for.

In exact mode each step goes to the next end of a message. Large refits take steps of at least `step_s`. What ends within
a step ends at its own time. What begins then gets its share from then on, at the rates of the step after.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from .flows import Floats, Ints, fair_rates
from .script import Script

_TOLERANCE = 1e-3  # of rates, in steps that are not exact
NOTHING = -1


class DeadlockError(RuntimeError):
    """Rounds wait for each other, and none can go on: a script that no executor's rounds should give."""


@dataclass(frozen=True, slots=True, eq=False)
class Outcome:
    """Seconds from the beginning of the refit, and causes."""

    start_s: Floats  # [messages]
    end_s: Floats
    round_start_s: Floats  # [rounds]: when the rank reached it
    cause: Ints  # [rounds]: the message whose end the rank waited for; NOTHING at the beginning
    moments_s: Floats  # [moments], ascending: rates change there alone
    moved: Floats  # [moments, kinds]: bytes of messages of each kind that have moved until then


def run_script(
    script: Script,
    first: Ints,
    second: Ints,
    bandwidth: Floats,
    *,
    step_s: float = 0.0,
    round_s: float = 0.0,
    kinds: Ints | None = None,
) -> Outcome:
    """Run a script; message m goes through links `first[m]` and `second[m]`. Every round takes `round_s` before it begins.

    What has moved is counted by `kinds` [messages], by default as one kind. Raises DeadlockError, naming the first rounds
    that wait.
    """
    kinds = np.zeros(len(script.buckets), np.int64) if kinds is None else kinds
    return _Run(script, first, second, bandwidth, step_s, round_s).outcome(_Moved(kinds))


class _Moved:
    """Bytes of each kind that have moved, at every moment where rates change."""

    def __init__(self, kinds: Ints) -> None:
        self._kinds, self._count = kinds, int(kinds.max(initial=0)) + 1
        self.moments, self.totals = [0.0], [np.zeros(self._count)]

    def add(self, messages: Ints, since: Floats, ends: Floats, rates: Floats, now: float) -> None:
        """Messages went at these rates from `since` to their ends, or until now. Some began within the last step."""
        before, kinds, until = self.moments[-1], self._kinds[messages], np.minimum(ends, now)
        early = rates * np.maximum(np.minimum(until, before) - since, 0.0)
        self.totals[-1] += np.bincount(kinds, early, self._count)
        if now > before:
            late = rates * np.maximum(until - np.maximum(since, before), 0.0)
            self.moments.append(now)
            self.totals.append(self.totals[-1] + np.bincount(kinds, late, self._count))


class _Run:
    def __init__(
        self, script: Script, first: Ints, second: Ints, bandwidth: Floats, step_s: float, round_s: float
    ) -> None:
        self._script, self._first, self._second, self._bandwidth = script, first, second, bandwidth
        self._step_s, self._round_s = step_s, round_s
        messages, rounds, runs = len(script.buckets), len(script.round_rank), len(script.window)
        self._start, self._end = np.zeros(messages), np.zeros(messages)
        self._ready = np.zeros(messages, np.int8)  # ends that have reached it, and the message before it
        is_behind = script.behind != NOTHING
        self._needed = 2 + is_behind
        self._follower = np.full(messages, NOTHING)
        self._follower[script.behind[is_behind]] = np.flatnonzero(is_behind)
        self._has_followers = bool(is_behind.any())
        self._rounds_of = np.stack([script.src_round, script.dst_round], axis=1)
        both = np.concatenate([script.src_round, script.dst_round])
        by_round = np.argsort(both, kind="stable")
        self._messages_of = by_round % max(1, messages)
        self._left = np.bincount(both, minlength=rounds)  # messages of each round that have not ended
        self._first_message = np.concatenate([[0], np.cumsum(self._left)])
        # A round waits for the one before it in its run to begin, and for the one `window` places before it to end. With a
        # window of one these are one round.
        sizes = np.diff(script.first_round)
        self._run_of = np.repeat(np.arange(runs), sizes)
        place = np.arange(rounds) - script.first_round[self._run_of]
        window = script.window[self._run_of]
        self._waits = 1 + ((place >= window) & (window > 1))  # for the round before it, or for the beginning of the run
        left_in_run = sizes[self._run_of] - place - 1
        self._next = np.where((left_in_run >= 1) & (window > 1), np.arange(rounds) + 1, NOTHING)
        self._behind = np.where(left_in_run >= window, np.arange(rounds) + window, NOTHING)
        self._round_start = np.zeros(rounds)
        self._round_end = np.zeros(rounds)
        self._last = np.full(rounds, NOTHING)  # the message of a round that ended last
        self._cause = np.full(rounds, NOTHING)
        self._rounds_left = sizes.copy()
        self._runs_left = np.array([len(after) for after in script.after], np.int64)
        self._followers: dict[int, list[int]] = {}
        for run, after in enumerate(script.after):
            for before in after:
                self._followers.setdefault(before, []).append(run)
        self._run_end = np.zeros(runs)  # so far: of the runs that it waits for, then its own
        self._run_cause = np.full(runs, NOTHING)

    def outcome(self, moved: _Moved) -> Outcome:
        script = self._script
        at_once = np.flatnonzero(self._runs_left == 0)
        self._begin(script.first_round[at_once], np.zeros(len(at_once)), np.full(len(at_once), NOTHING))
        nbytes = script.buckets.nbytes.astype(np.float64)
        active = self._beginning
        since, remaining = self._start[active], nbytes[active]
        now = 0.0
        tolerance = _TOLERANCE if self._step_s else 1e-9
        ended_messages = 0
        while len(active):
            rates = fair_rates(self._first[active], self._second[active], self._bandwidth, tolerance)
            ends = since + remaining / rates
            soonest = float(ends.min())
            now = now if soonest < now else soonest + self._step_s  # what began within the last step may end in it
            moved.add(active, since, ends, rates, now)
            is_over = ends <= now * (1 + 1e-12)
            over, going = np.flatnonzero(is_over), np.flatnonzero(~is_over)
            ended_messages += len(over)
            self._end[active[over]] = ends[over]
            self._finish(active[over])
            since = since[going]
            remaining = remaining[going] - rates[going] * np.maximum(now - since, 0.0)
            active = np.concatenate([active[going], self._beginning])
            since = np.concatenate([np.maximum(since, now), self._start[self._beginning]])
            remaining = np.concatenate([remaining, nbytes[self._beginning]])
        if ended_messages < len(script.buckets):
            raise DeadlockError(self._stuck())
        moments = np.minimum(moved.moments, self._end.max(initial=0.0))  # the last step is longer than what is left
        return Outcome(self._start, self._end, self._round_start, self._cause, moments, np.array(moved.totals))

    def _begin(self, rounds: Ints, seconds: Floats, causes: Ints) -> None:
        """Count one thing less that these rounds wait for, which happened then; those that wait for nothing begin."""
        beginning: list[Ints] = []
        while len(rounds):
            later = seconds >= self._round_start[rounds]
            self._round_start[rounds[later]] = seconds[later]
            self._cause[rounds[later]] = causes[later]
            self._waits[rounds] -= 1
            begun = rounds[self._waits[rounds] == 0]
            if not len(begun):
                break
            self._round_start[begun] += self._round_s
            beginning.append(self._reach(begun))
            follow = self._next[begun]
            known = follow != NOTHING
            rounds = follow[known]
            seconds, causes = self._round_start[begun][known], self._cause[begun][known]
        self._beginning = np.concatenate([np.zeros(0, np.int64), *beginning])

    def _reach(self, rounds: Ints) -> Ints:
        """One end has reached the messages of these rounds; returns those that wait for nothing more."""
        counts = self._first_message[rounds + 1] - self._first_message[rounds]
        steps = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
        messages = self._messages_of[np.repeat(self._first_message[rounds], counts) + steps]
        seconds = np.repeat(self._round_start[rounds], counts)
        np.maximum.at(self._start, messages, seconds)
        np.add.at(self._ready, messages, 1)
        return _distinct(messages[self._ready[messages] == self._needed[messages]])

    def _finish(self, messages: Ints) -> None:
        """These messages have ended: so may their rounds, and the runs of these."""
        messages = messages[np.argsort(self._end[messages], kind="stable")]
        touched, ends = self._rounds_of[messages].reshape(-1), np.repeat(self._end[messages], 2)
        latest = ends >= self._round_end[touched]  # of several of a round the last one stays
        self._last[touched[latest]] = np.repeat(messages, 2)[latest]
        self._round_end[touched[latest]] = ends[latest]
        np.subtract.at(self._left, touched, 1)
        over = _distinct(touched[self._left[touched] == 0])
        behind = self._behind[over]
        known = behind != NOTHING
        released = [behind[known]], [self._round_end[over][known]], [self._last[over][known]]
        for column, values in zip(released, self._finish_runs(over), strict=True):
            column.append(values)
        freed = [self._free(messages)] if self._has_followers else []
        self._begin(*(np.concatenate(column) for column in released))
        self._beginning = np.concatenate([self._beginning, *freed])

    def _free(self, messages: Ints) -> Ints:
        """The messages behind these, which have ended, on their connections; returns those that wait for nothing more."""
        followers = self._follower[messages]
        is_one = followers != NOTHING
        followers = followers[is_one]
        np.maximum.at(self._start, followers, self._end[messages[is_one]])
        self._ready[followers] += 1
        return followers[self._ready[followers] == self._needed[followers]]

    def _finish_runs(self, over: Ints) -> tuple[Ints, Floats, Ints]:
        """The first rounds of runs that may begin now, since when, and why."""
        of_round = self._run_of[over]
        np.subtract.at(self._rounds_left, of_round, 1)
        ended = deque(_distinct(of_round[self._rounds_left[of_round] == 0]).tolist())
        rounds: list[int] = []
        while ended:
            run = ended.popleft()
            rounds_of = slice(*self._script.first_round[run : run + 2].tolist())
            last = rounds_of.stop - 1 - int(self._round_end[rounds_of][::-1].argmax())
            self._run_end[run], self._run_cause[run] = self._round_end[last], self._last[last]
            for follower in self._followers.get(run, ()):
                self._note(follower, float(self._run_end[run]), int(self._run_cause[run]))
                self._runs_left[follower] -= 1
                if not self._runs_left[follower]:
                    rounds.append(int(self._script.first_round[follower]))
        begun = np.array(rounds, np.int64)
        of = self._run_of[begun]
        return begun, self._run_end[of].copy(), self._run_cause[of].copy()

    def _note(self, run: int, seconds: float, cause: int) -> None:
        if seconds >= self._run_end[run]:
            self._run_end[run], self._run_cause[run] = seconds, cause

    def _stuck(self) -> str:
        waiting = np.flatnonzero(self._left)
        ranks = [f"rank {self._script.round_rank[each]}, round {each}" for each in waiting[:4].tolist()]
        return f"{len(waiting)} rounds wait for each other: {'; '.join(ranks)}"


def _distinct(numbers: Ints) -> Ints:
    """Each number once, ascending; of a few, several times as fast as `np.unique`."""
    ordered = np.sort(numbers)
    is_new = np.ones(len(ordered), bool)
    np.not_equal(ordered[1:], ordered[:-1], out=is_new[1:])
    return ordered[is_new]
