"""`watch` beside real sessions: it shows late and dead ranks, and what it needs to see them."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout, suppress
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
from helpers.cli import Outcome
from helpers.ranks import run_ranks, store_process
from session.test_refit_session import Engine, Trainer, seat

from mcore_reshard.cli import main as cli
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.kernels.rendezvous.store_opening import Seat
from mcore_reshard.session.attempts import Head, World
from mcore_reshard.session.watch import _News, _Progress, describe, observe

TOKEN = "a token of some length"


def watch(*arguments: str) -> Outcome:
    out, err = io.StringIO(), io.StringIO()
    with redirect_stdout(out), redirect_stderr(err):
        code = cli.main(["watch", *arguments])
    return Outcome(code, out.getvalue(), err.getvalue())


# --- a session with a late rank, which then dies ----------------------------------------------------------------------


def watched(rank: int, address: str) -> Any:
    """Ranks 0 to 2: a trainer and two ranks of the engine, the last of which comes late and is killed. Rank 3 watches."""
    control = connect_store(address, Options(session="control", timeout_s=60))
    if rank == 3:
        return watcher(address, control)
    me = seat(rank, address, (1, 2), session="watched", timeout_s=30.0)
    me.endpoint.prepare()
    if isinstance(me, Trainer):
        me.step(7)
    me.endpoint.refit(7)
    control.set(f"refitted/{rank}", "")
    control.wait(["killed" if rank == 2 else "second refit"])
    if rank == 2:
        os.kill(os.getpid(), signal.SIGKILL)
    Thread(target=refit_in_vain, args=(me,), daemon=True).start()
    control.wait(["seen"])
    return None


def refit_in_vain(me: Trainer | Engine) -> None:
    with suppress(RefitError):
        me.endpoint.refit(8)


def watcher(address: str, control: SessionStore) -> dict[str, Any]:
    control.wait([f"refitted/{rank}" for rank in range(3)])
    with connect_store(address, Options(session="watched", timeout_s=30), watches=True) as store:
        seen: dict[str, Any] = {"idle": until(store, lambda ranks: not any(rank["doing"] for rank in ranks.values()))}
        control.set("second refit", "")
        seen["late"] = until(store, lambda ranks: ranks["gen:1"]["late_seconds"] is not None)
        seen["late text"] = watch(address, "--session", "watched").out
        seen["late json"] = json.loads(watch(address, "--session", "watched", "--json").out)
        control.set("killed", "")
        start = time.monotonic()
        seen["gone"] = until(store, lambda ranks: ranks["gen:1"]["status"] == "gone")
        seen["seconds to see it"] = time.monotonic() - start
        seen["gone text"] = watch(address, "--session", "watched", "--once").out
        seen["two sessions"] = watch(address)
    control.set("seen", "")
    return seen


def until(store: SessionStore, holds: Callable[[dict[str, Any]], bool]) -> dict[str, Any]:
    deadline = time.monotonic() + 20
    while True:
        ranks = {rank["rank"]: rank for rank in observe(store)["ranks"]}
        if holds(ranks) or time.monotonic() > deadline:
            return ranks
        time.sleep(0.1)


def test_watch_shows_a_late_rank_and_a_dead_one() -> None:
    *others, outcome = run_ranks(4, watched, timeout_s=90)
    assert outcome.kind is None, outcome.error
    assert others[2].died and [other.kind for other in others[:2]] == [None, None]
    seen = outcome.value
    assert {(rank["status"], rank["version"], rank["late_seconds"]) for rank in seen["idle"].values()} == {
        ("here", 7, None)
    }
    assert [rank["state"]["state"] for rank in seen["idle"].values()][1:] == ["complete", "complete"]
    for late in (seen["late"], {rank["rank"]: rank for rank in seen["late json"]["ranks"]}):
        assert late["gen:1"]["late_seconds"] >= 1 and late["gen:1"]["doing"] is None
        for name in ("train:0", "gen:0"):
            assert (late[name]["doing"], late[name]["waits_for"], late[name]["late_seconds"]) == (
                "refit",
                ["gen:1"],
                None,
            )
    lines = seen["late text"].splitlines()
    assert lines[0].startswith("session watched: 3 of 3 ranks here, version 7; attempt ")
    (row,) = [line for line in lines if line.startswith("gen:1")]
    assert re.fullmatch(
        r"gen:1 +here +\d+ on \S+ +7 +complete\(7\) +has not called refit: late, others wait \d+ s", row
    )
    (row,) = [line for line in lines if line.startswith("gen:0")]
    assert re.search(r"refit: waits for gen:1 \(\d+ s\)$", row)
    assert seen["gone"]["gen:1"]["status"] == "gone" and seen["seconds to see it"] < 3
    (row,) = [line for line in seen["gone text"].splitlines() if line.startswith("gen:1")]
    assert re.search(r"gone .* has exited or was killed, \d+ s ago$", row)
    assert seen["two sessions"].code == 2
    assert "has 2 sessions: control, watched" in seen["two sessions"].err
    assert "Choose one with --session." in seen["two sessions"].err


# --- what it needs ----------------------------------------------------------------------------------------------------


def test_watch_needs_a_session_and_its_token(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with store_process() as server:
        nothing = watch(server.address)
        assert (nothing.code, nothing.out) == (2, "")
        assert f"the store at {server.address} has no session" in nothing.err
        options = Options(token=TOKEN, timeout_s=10)
        with connect_store(server.address, options) as rank:
            rank.take_seat("train:0", {"pid": 7, "host": "node\x1b[31m"})
            refused = watch(server.address)
            assert refused.code == 2 and "begun with a token: give this process the token too" in refused.err
            assert "the token as --token-file or in MCORE_RESHARD_TOKEN" in refused.err
            unlisted = watch(server.address, "--session", "run-7")
            assert "this store has no session 'run-7'" in unlisted.err and "give the name as --session" in unlisted.err
            (tmp_path / "token").write_text(TOKEN)
            from_file = watch(server.address, "--token-file", str(tmp_path / "token"))
            monkeypatch.setenv("MCORE_RESHARD_TOKEN", TOKEN)
            for allowed in (from_file, watch(server.address, "--session", "refit")):
                assert (allowed.code, allowed.err) == (0, "")
                assert "session refit: 1 of 1 rank here, no version yet" in allowed.out
                assert "7 on node\\x1b[31m" in allowed.out and TOKEN not in allowed.out
            assert [*rank.seats] == ["train:0"] and rank.keys() == []


def test_watch_shows_the_others_where_a_rank_says_nonsense_of_itself() -> None:
    news = {"state": "complete", "version": 3, "committed": 3, "doing": None, "since": None, "world": [1, 1, 2]}
    with store_process() as server, connect_store(server.address, Options(timeout_s=10)) as rank:
        for number, wrong in enumerate([{}, {"committed": "x"}, {"committed": [1]}, {"failure": "\x1b[2J" * 10**5}]):
            rank.take_seat(f"gen:{number}", {"pid": 7})
            rank.set(f"seen/gen:{number}", json.dumps({**news, "failure": None, **wrong}))
        seen = watch(server.address)
        assert (seen.code, seen.err) == (0, "") and "4 of 5 ranks here, version 3" in seen.out
        assert len(seen.out) < 4000 and "\x1b" not in seen.out
        assert json.loads(watch(server.address, "--json").out)["version"] == 3


def test_watch_says_what_to_do_without_a_store_and_without_the_session() -> None:
    with store_process() as server, connect_store(server.address, Options(session="run-7", timeout_s=10)):
        other = watch(server.address, "--session", "no such")
        assert other.code == 2 and "this store has no session 'no such'\nIt has run-7." in other.err
    wrong = watch("127.0.0.1:1")
    assert wrong.code == 2 and "no store answers at 127.0.0.1:1: nothing listens there\nGive the address" in wrong.err
    assert "token" not in wrong.err


def test_watch_goes_on_on_a_terminal_until_it_is_interrupted() -> None:
    with store_process() as server, connect_store(server.address, Options(timeout_s=10)) as rank:
        rank.take_seat("train:0", {"pid": 7, "host": "node"})
        reader, writer = pty.openpty()
        command = [sys.executable, "-m", "mcore_reshard", "watch", server.address]
        with subprocess.Popen(
            command, stdout=writer, stderr=subprocess.PIPE, env={**os.environ, "TERM": "xterm"}
        ) as run:
            os.close(writer)
            text = b""
            try:
                while b"train:1" not in text:
                    text += os.read(reader, 1 << 16)
                    if b"train:0" in text and "train:1" not in rank.seats:
                        with connect_store(server.address, Options(timeout_s=10)) as other:
                            other.take_seat("train:1", {})
                run.send_signal(signal.SIGINT)
                assert run.wait(20) == 0
            finally:
                run.kill()  # else an error here would wait for it
            assert run.stderr is not None and run.stderr.read() == b""
        os.close(reader)


# --- who is late, from what was said ----------------------------------------------------------------------------------

WORLD = World(1, 1, 2)
MILESTONES = {"word": 0, "bulk": 4, "commit": 6}


def session_of(
    doing: dict[str, float], reached: dict[str, str], *, gone: tuple[str, ...] = (), over: bool = False
) -> dict[str, Any]:
    """{rank: (late_seconds, waits_for)} at time 100."""
    names = ("train:0", "gen:0", "gen:1")
    seats = {name: Seat(name, "gone" if name in gone else "here", {}, 0.0) for name in names}
    state = {"state": "complete", "version": 1}
    news = {name: _News(1, state, "refit" if name in doing else None, doing.get(name), None, WORLD) for name in names}
    numbers = {name: MILESTONES[milestone] for name, milestone in reached.items()}
    progress = _Progress(Head("p", 1, "refit", ""), numbers, names if reached else None, over)
    ranks = describe("s", seats, news, progress, 100.0)["ranks"]
    return {rank["rank"]: (rank["late_seconds"], rank["waits_for"]) for rank in ranks}


@pytest.mark.parametrize(
    ("doing", "reached", "over", "late"),
    [
        ({}, {}, False, {}),
        ({"gen:0": 90.0}, {}, True, {"train:0": 10.0, "gen:1": 10.0}),  # the trainer has not begun
        ({"gen:0": 99.5}, {}, True, {}),  # not long enough
        ({"train:0": 95.0, "gen:0": 90.0}, {"train:0": "word", "gen:0": "word"}, False, {"gen:1": 10.0}),
        (
            dict.fromkeys(("train:0", "gen:0", "gen:1"), 98.0),
            {"train:0": "commit", "gen:0": "bulk", "gen:1": "commit"},
            False,
            {"gen:0": 2.0},
        ),
        (
            dict.fromkeys(("train:0", "gen:0", "gen:1"), 98.0),
            dict.fromkeys(("train:0", "gen:0", "gen:1"), "word"),
            False,
            {},
        ),
    ],
)
def test_a_rank_is_late_while_others_wait_for_it(
    doing: dict[str, float], reached: dict[str, str], over: bool, late: dict[str, float]
) -> None:
    ranks = session_of(doing, reached, over=over)
    assert {name: seconds for name, (seconds, _) in ranks.items() if seconds is not None} == late
    for name, (_, waits_for) in ranks.items():
        assert not waits_for or (name not in late and waits_for == [each for each in ranks if each in late])
    assert any(waits_for for _, waits_for in ranks.values()) == bool(late)


def test_a_dead_rank_is_not_late() -> None:
    ranks = session_of({"train:0": 90.0, "gen:0": 90.0}, {"train:0": "word", "gen:0": "word"}, gone=("gen:1",))
    assert ranks["gen:1"] == (None, [])
