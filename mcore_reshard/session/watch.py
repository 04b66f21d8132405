"""Who is in a session, which version each rank has, and who is late: read off the store, without a seat.

A rank is late while others wait for it. Each rank says when it begins and ends a refit (record.py); the keys of the attempt
under way say how far each one has come.

    gen:0   ...word...connected......bulk            has said "bulk": waits
    gen:1   ...word...connected                      late
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

from torch.distributed import DistError

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.exchange import parse_stored
from mcore_reshard.kernels.rendezvous.store import SessionStore
from mcore_reshard.kernels.rendezvous.store_opening import Seat

from .attempts import HEAD, Call, Head, World
from .record import CAUSE_CHARACTERS, SEEN
from .staged import STAGED

LATE_S = 1.0  # that others have waited, before a rank counts as late
# What ranks say in an attempt, in this order; not every attempt has all of these.
_MILESTONES = ("word", "hello", "connected", "kv_scales", "bulk", STAGED, "commit")
_IDLE, _BEGUN = -2, -1  # in place of a milestone's number


@dataclass(frozen=True, slots=True)
class _News:
    """What a rank said of itself last."""

    committed: int | None
    state: Mapping[str, Any]
    doing: str | None  # prepare, refit or nothing
    since: float | None  # time.time() of its host
    failure: str | None
    world: World

    @classmethod
    def from_json(cls, said: Any) -> _News:
        numbers = [int(number) for number in said["world"]]
        if len(numbers) != 3 or not 0 < numbers[0] * numbers[1] * numbers[2] <= 1 << 20:
            raise ValueError("no world")
        state = {name: said[name] for name in ("state", "version", "next", "share") if name in said}
        if state["state"] not in ("intact", "mixed", "complete"):
            raise ValueError("no state")
        float(state.get("share", 0.0))
        since = None if said["since"] is None else float(said["since"])
        doing = None if said["doing"] is None or since is None else str(said["doing"])
        failure = None if said["failure"] is None else str(said["failure"])[:CAUSE_CHARACTERS]
        committed = None if said["committed"] is None else int(said["committed"])
        return cls(committed, state, doing, since, failure, World(*numbers))


@dataclass(frozen=True, slots=True)
class _Progress:
    """The attempt that the leader began last."""

    head: Head | None
    reached: Mapping[str, int]  # by seat: the number of its last milestone
    members: tuple[str, ...] | None  # None: not called yet
    is_over: bool


def observe(store: SessionStore) -> dict[str, Any]:
    """The session now, as plain data. Raises SessionError where the store is lost, or the session has ended."""
    try:
        news, progress = _read_news(store), _read_progress(store)
    except DistError as error:
        raise SessionError(f"the session can no longer be watched: {error}") from error
    return describe(store.session, store.seats, news, progress, time.time(), store.last_heard())


def describe(
    session: str,
    seats: Mapping[str, Seat],
    news: Mapping[str, _News],
    progress: _Progress,
    now: float,
    heard: Mapping[str, float] = MappingProxyType({}),
) -> dict[str, Any]:
    """One row for each rank that has come, or should have."""
    here = [name for name, seat in seats.items() if seat.status == "here"]
    doing = {name: news[name] for name in here if name in news and news[name].doing is not None}
    names = sorted({*seats, *_planned(news)}, key=_seat_order)
    late, waiting, waited_s = _late(here, names, doing, progress, now)
    ranks = []
    for name in names:
        seat, said = seats.get(name), news.get(name)
        is_busy = name in doing
        ranks.append(
            {
                "rank": name,
                "status": "absent" if seat is None else seat.status,
                "since": None if seat is None else seat.since,
                "last_heard": heard.get(name),
                "host": None if seat is None else seat.facts.get("host"),
                "pid": None if seat is None else seat.facts.get("pid"),
                "version": None if said is None else said.committed,
                "state": None if said is None else dict(said.state),
                "doing": doing[name].doing if is_busy else None,
                "doing_seconds": max(0.0, now - (doing[name].since or now)) if is_busy else None,
                "late_seconds": waited_s if name in late else None,
                "waits_for": late if name in waiting else [],
                "failure": None if said is None else said.failure,
            }
        )
    versions = [said.committed for said in news.values() if said.committed is not None]
    head = progress.head
    attempt = None
    if head is not None:
        attempt = {"number": head.number, "kind": head.kind, "leader": head.leader, "is_over": progress.is_over}
    return {"session": session, "version": max(versions, default=None), "attempt": attempt, "ranks": ranks}


def _late(
    here: Iterable[str], names: Iterable[str], doing: Mapping[str, _News], progress: _Progress, now: float
) -> tuple[list[str], list[str], float]:
    """(ranks for which others wait, ranks that wait, for how many seconds)."""
    if not doing:
        return [], [], 0.0
    reached = {name: _BEGUN if name in doing else _IDLE for name in here}
    if not progress.is_over:
        reached.update({name: number for name, number in progress.reached.items() if name in reached})
    if any(said.doing == "prepare" for said in doing.values()):
        reached.update({name: _IDLE for name in names if name not in reached})  # prepare waits for all that are planned
    if progress.members is not None and not progress.is_over:
        reached = {name: number for name, number in reached.items() if name in progress.members}
    furthest = max(reached.values(), default=_IDLE)
    waiting = [name for name, number in reached.items() if number == furthest and name in doing]
    waited_s = max((now - (doing[name].since or now) for name in waiting), default=0.0)
    late = sorted((name for name, number in reached.items() if number < furthest), key=_seat_order)
    if waited_s < LATE_S or not late:
        return [], [], 0.0
    return late, waiting, waited_s


def _read_news(store: SessionStore) -> dict[str, _News]:
    keys = store.keys(f"{SEEN}/")
    seats = [key.removeprefix(f"{SEEN}/") for key in keys]
    news = {}
    for seat, key, content in zip(seats, keys, store.multi_get(keys, writers=seats), strict=True):
        with suppress(SessionError):  # malformed news of one rank do not hide the others
            news[seat] = parse_stored(key, content, _News.from_json, written_by=seat)
    return news


def _read_progress(store: SessionStore) -> _Progress:
    if not store.check([HEAD]):
        return _Progress(None, {}, None, True)
    head = parse_stored(HEAD, store.get(HEAD), Head.from_json)
    attempt = f"a/{head.attempt}/"
    keys, members = store.keys(attempt), None
    said = {key.removeprefix(attempt) for key in keys}
    is_over = not said.isdisjoint({"commit/outcome", "failed"})
    if "call" in said:
        call = parse_stored("call", store.get(f"{attempt}call"), dict)
        if "failure" in call:
            is_over = True
        else:
            members = parse_stored("call", store.get(f"{attempt}call"), Call.from_json).members
    epoch = f"e/{head.attempt}/"
    connecting = {key.removeprefix(epoch) for key in store.keys(epoch)}
    is_over = is_over or "failed" in connecting or (head.kind == "connect" and "connected/outcome" in connecting)
    reached: dict[str, int] = {}
    for key in said | connecting:
        milestone, _, name = key.partition("/")
        if milestone in _MILESTONES and ":" in name:
            reached[name] = max(reached.get(name, 0), _MILESTONES.index(milestone))
    return _Progress(head, reached, members, is_over)


def _planned(news: Mapping[str, _News]) -> tuple[str, ...]:
    """All seats of the plan, as training rank 0 knows it, or else another rank."""
    said = news.get("train:0") or next(iter(news.values()), None)
    return () if said is None else said.world.members(range(said.world.replicas))


def _seat_order(name: str) -> tuple[bool, int, str]:
    world, _, rank = name.partition(":")
    return world != "train", int(rank) if rank.isdigit() else 0, name
