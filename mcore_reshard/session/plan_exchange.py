"""The plan of a session lies on its store: one training rank publishes it, and every other rank proves it anew."""

from __future__ import annotations

import time
from typing import Any

from torch.distributed import DistNetworkError

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.address import store_address
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import dump_plan, parse_plan
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.planner.proof.traced import is_traced

from .one_trainer import require_no_other_trainer
from .trace_exchange import ask_no_traces

_NEWEST = "plan/newest"  # the digest of the plan that was published last
_AGAIN_S = 0.1
_ANEW = "start it anew, and connect all ranks again"


def publish_plan(plan: Plan, store: Any, options: Options = Options()) -> None:  # noqa: B008
    """Put the plan on the session's store, as JSON, for `fetch_plan`. Training rank 0 does this, before it prepares.

    A plan that lies there already under this digest stays. Raises `SessionError`, also where a live trainer has published
    another one, or another job publishes one at this moment.
    """
    address = store_address(store)
    with connect_store(address, options) as held:
        try:
            newest = held.peek(_NEWEST)
            if newest not in (None, plan.digest.encode()):
                require_no_other_trainer(held)
            if not is_traced(plan):  # else their traces have made it
                ask_no_traces(address, options)
            _put(held, plan)
            _announce(held, plan.digest, "" if newest is None else newest.decode(errors="replace"))
        except DistNetworkError as error:
            raise SessionError(f"the plan was not published, lost {error}; {_ANEW}") from error


def publish_again(plan: Plan, held: SessionStore) -> None:
    """Put the plan on a store that started anew, so that replicas can still join. The leader of the session calls it."""
    if not held.check([_key(plan.digest)]):
        _put(held, plan)
        held.set(_NEWEST, plan.digest)


def keep_newest(plan: Plan, held: SessionStore) -> None:
    """Have the plan of a session's leader be the newest one, and no other stay. The leader calls it once it has its seat.

    job A   publishes                    sits down    finds B's plan the newest: A's is the newest again
    job B              publishes                          its seat is taken: it ends with an error
    """
    newest = held.peek(_NEWEST)
    if newest != plan.digest.encode():  # or none: the store has started anew since the plan was published
        _put(held, plan)
        held.set(_NEWEST, plan.digest)
    if newest is not None and (earlier := {*held.keys("plan/")} - {_NEWEST, _key(plan.digest)}):
        held.delete_soon([], sorted(earlier))


def fetch_plan(
    store: Any,
    options: Options = Options(),  # noqa: B008
    *,
    timeout_s: float | None = None,
    digest: str | None = None,
) -> Plan:
    """The plan that a training rank published last, or that of `digest`, checked against its digest and proven again.

    Raises `SessionError` when no store answers within `timeout_s` (by default that of the options), none appears within it,
    or a malformed one is there, and `ProofError`.
    """
    session, timeout_s = options.session, options.timeout_s if timeout_s is None else timeout_s
    with connect_store(store_address(store), options, timeout_s=timeout_s) as held:
        try:
            if not held.wait_any([_NEWEST], timeout_s):
                raise SessionError(
                    f"no training rank published a plan for session {session!r} within {timeout_s:g} s: connect the trainer"
                )
            asked, content = _read(held, digest, time.monotonic() + min(timeout_s, held.timeout_s))
        except DistNetworkError as error:
            raise SessionError(f"no plan was read, lost {error}; {_ANEW}") from error
    plan = _parse(content, asked, session)
    require_proof(plan)
    return plan


def _read(held: SessionStore, digest: str | None, deadline: float) -> tuple[str, bytes]:
    """The digest and the text of a plan, by default the newest one. A trainer may replace it between both reads."""
    while True:
        asked = held.get(_NEWEST).decode(errors="replace") if digest is None else digest
        if (content := held.peek(_key(asked))) is not None:
            return asked, content
        if time.monotonic() > deadline:
            raise SessionError(f"the store has no plan {asked[:40]!r}, which is the newest; {_ANEW}")
        time.sleep(_AGAIN_S)


def _put(held: SessionStore, plan: Plan) -> None:
    text = dump_plan(plan)
    if held.compare_set(_key(plan.digest), "", text) != text.encode():
        _parse(held.get(_key(plan.digest)), plan.digest, held.session)


def _announce(held: SessionStore, digest: str, before: str) -> None:
    """Make a plan the newest one in place of `before`, unless another job has published one since, or leads the session."""
    stands = held.compare_set(_NEWEST, before, digest)
    if stands != digest.encode():
        raise SessionError(
            f"another job has published a plan for session {held.session!r} at the same time. Its plan stays; give every job"
            " a session name of its own"
        )
    if before not in ("", digest):
        try:
            require_no_other_trainer(held)  # one that sits down later makes its own plan the newest
        except SessionError:
            held.compare_set(_NEWEST, digest, before)
            raise


def _key(digest: str) -> str:
    return f"plan/{digest}"


def _parse(content: bytes, digest: str, session: str) -> Plan:
    remedy = "one training rank publishes it, and nothing else may write there"
    try:
        plan = parse_plan(content.decode(), f"the plan published for session {session!r}")
        if plan.digest != digest:
            raise ValueError(f"it has the digest {plan.digest}")
    except ValueError as error:
        raise SessionError(f"the value of {_key(digest)!r} on the store is malformed: {error}; {remedy}") from error
    return plan
