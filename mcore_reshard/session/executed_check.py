"""The last check before a session may move bytes: both ends of every pair will execute the same."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.box_sums import PRIME
from mcore_reshard.kernels.copies.executed import ExecutedTables, first_difference, named_difference
from mcore_reshard.kernels.errors import BindError, SessionError
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous
from mcore_reshard.kernels.transports.base import Executor

Digests = dict[str, dict[str, str]]


class ConnectedProgram(Protocol):
    """A kind of refit, bound and connected. Golden has neither."""

    @property
    def bound(self) -> BoundSchedule | None: ...

    @property
    def executor(self) -> Executor | None: ...


def agree_on_executed(rendezvous: Rendezvous, programs: Sequence[ConnectedProgram]) -> None:
    """Compare with all ranks what each will execute: the phase "connected" and, after a difference, two more.

    A word has one number, since all ranks read all words. Only ranks that differ say more.

    Raises `BindError` for tables that do not fit this rank's own layout, and the same `SessionError` on all ranks where
    two of them differ. Nothing has moved then.
    """
    connected = [(each.bound, each.executor.executed) for each in programs if each.bound and each.executor]
    tables = ExecutedTables(connected)
    if tables.problems:
        raise BindError(rendezvous.rank_name, tables.problems)
    balances = rendezvous.gather("connected", {"balance": f"{tables.balance:x}"}, parse=_parse_balance)
    if sum(word["balance"] for word in balances.values()) % PRIME == 0:
        return
    said = rendezvous.gather("differs", {"executed": tables.digests}, parse=_parse_digests)
    pair = first_difference({rank: word["executed"] for rank, word in said.items()})
    if pair is None:
        return
    own = tables.details(pair) if pair in tables.digests else None
    told = rendezvous.gather("compared", {"details": own}, parse=_parse_details)
    details = [word["details"] for word in told.values() if word["details"] is not None]
    raise SessionError(
        f"{named_difference(pair, details)}; a schedule or a table is damaged on one of the two. Nothing has moved:"
        " begin a new session"
    )


def _parse_balance(word: Any) -> dict[str, Any]:
    return {"balance": int(word["balance"], 16)}


def _parse_digests(word: Any) -> dict[str, Any]:
    return {"executed": _texts(word["executed"])}


def _parse_details(word: Any) -> dict[str, Any]:
    details = word["details"]
    return {"details": None if details is None else {str(int(stage)): _texts(each) for stage, each in details.items()}}


def _texts(said: Any) -> dict[str, str]:
    if not isinstance(said, dict) or not all(isinstance(text, str) for text in said.values()):
        raise TypeError(f"digests are {said!r:.40}")
    return said
