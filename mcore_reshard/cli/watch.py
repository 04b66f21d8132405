"""`mcore-reshard watch`: who is in a session, which version each rank has, and who is late. It reads alone."""

from __future__ import annotations

import argparse
import sys
import time
import warnings
from collections.abc import Iterator
from typing import Any

from rich.console import Group, RenderableType
from rich.live import Live

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store, list_sessions
from mcore_reshard.planning import InputError
from mcore_reshard.session.wait_line import some_of
from mcore_reshard.session.watch import observe

from .render import Cell, count, print_report, styled, table

_EVERY_S = 1.0
_TIMEOUT_S = 10.0
_ROWS_SHOWN = 40
_STYLES = {"here": "green", "gone": "red", "absent": "yellow"}


def run(args: argparse.Namespace) -> int:
    store = _open(args)
    with store:
        if args.once or args.json or not sys.stdout.isatty():
            session = observe(store)
            print_report(args.json, {"store": args.store, **session}, _parts(session))
            return 0
        try:
            with Live(Group(*_parts(observe(store))), auto_refresh=False) as live:
                while True:
                    time.sleep(_EVERY_S)
                    live.update(Group(*_parts(observe(store))), refresh=True)
        except KeyboardInterrupt:  # how a watch ends
            return 0


def _open(args: argparse.Namespace) -> SessionStore:
    try:
        names, number = list_sessions(args.store, _TIMEOUT_S)
    except SessionError as error:
        raise InputError([str(error)], "Give the address that trainer and engine were given as store.") from error
    session = args.session or _only_session(args.store, names, number)
    try:
        options = Options(session=session, timeout_s=_TIMEOUT_S, token_file=args.token_file)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no token: who watches cannot mend that
            return connect_store(args.store, options, watches=True)
    except SessionError as error:
        raise InputError([str(error)], _remedy(session, names, number)) from error


def _only_session(address: str, names: list[str], number: int) -> str:
    """The one session of a store. Raises InputError where there are several, or none."""
    if not number:
        raise InputError([f"the store at {address} has no session"])
    if number > 1:
        listed = ", ".join([*names, *([f"{number - len(names)} with a token"] if number > len(names) else [])])
        raise InputError([f"the store at {address} has {number} sessions: {listed}"], "Choose one with --session.")
    return names[0] if names else Options().session  # a session with a token is not listed: try the usual name


def _remedy(session: str, names: list[str], number: int) -> str:
    """What to do where a store does not let this process watch a session."""
    if number > len(names):
        return (
            "The store does not list sessions with a token: give the name as --session, and the token as --token-file"
            " or in MCORE_RESHARD_TOKEN."
        )
    return "" if session in names else f"It has {', '.join(names) or 'no session'}."


def _parts(session: dict[str, Any]) -> Iterator[RenderableType]:
    ranks = session["ranks"]
    here = sum(rank["status"] == "here" for rank in ranks)
    version = "no version yet" if session["version"] is None else f"version {session['version']}"
    attempt = session["attempt"]
    doing = (
        ""
        if attempt is None or attempt["is_over"]
        else f"; attempt {attempt['number']} to {attempt['kind']} is under way"
    )
    yield f"session {session['session']}: {here} of {count(len(ranks), 'rank')} here, {version}{doing}"
    if len(ranks) > _ROWS_SHOWN:
        ranks = sorted(ranks, key=lambda rank: rank["status"] == "here" and rank["late_seconds"] is None)
    yield table(None, "rank, status, process, >version, state, now", map(_row, ranks), _ROWS_SHOWN, "rank")
    failures = {rank["failure"] for rank in ranks if rank["failure"]}
    if failures:
        yield Group(*(styled(f"last failure: {failure}", "yellow") for failure in sorted(failures)[:3]))


def _row(rank: dict[str, Any]) -> list[Cell]:
    place = "" if rank["pid"] is None else f"{rank['pid']} on {rank['host']}"
    version = "" if rank["version"] is None else str(rank["version"])
    status = styled(rank["status"], _STYLES.get(rank["status"], ""))
    return [rank["rank"], status, place, version, _state(rank["state"]), _now(rank)]


def _state(state: dict[str, Any] | None) -> str:
    if not state:
        return ""
    if state["state"] == "mixed":
        return f"mixed({state['version']}, {state.get('next')}, {float(state.get('share', 0)):.2f})"
    return f"{state['state']}({state['version']})"


def _now(rank: dict[str, Any]) -> Cell:
    """What a rank does, in words."""
    if rank["status"] in ("gone", "left"):
        what = "has exited or was killed" if rank["status"] == "gone" else "has left"
        return f"{what}, {_seconds(max(0.0, time.time() - rank['since']))} ago"
    if rank["late_seconds"] is not None:
        what = "has not come" if rank["status"] == "absent" else rank["doing"] or "has not called refit"
        return styled(f"{what}: late, others wait {_seconds(rank['late_seconds'])}", "bold yellow")
    if rank["status"] == "absent":
        return "has not come"
    if rank["waits_for"]:
        return f"{rank['doing']}: waits for {some_of(rank['waits_for'])} ({_seconds(rank['doing_seconds'])})"
    return f"{rank['doing']} ({_seconds(rank['doing_seconds'])})" if rank["doing"] else "idle"


def _seconds(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"
