"""The plan of a session lies on its store: one training rank publishes it, and every other rank proves it anew."""

from __future__ import annotations

from typing import Any

from torch.distributed import DistNetworkError, DistStoreError

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
_ANEW = "start it anew, and connect all ranks again"


def publish_plan(plan: Plan, store: Any, options: Options = Options()) -> None:  # noqa: B008
    """Put the plan on the session's store, as JSON, for `fetch_plan`. Training rank 0 does this, before it prepares.

    A plan that lies there already under this digest stays. Raises `SessionError`, also where a live trainer has published
    another one.
    """
    address = store_address(store)
    with connect_store(address, options) as held:
        try:
            if (newest := held.peek(_NEWEST)) is not None and newest != plan.digest.encode():
                require_no_other_trainer(held)
            if not is_traced(plan):  # else their traces have made it
                ask_no_traces(address, options)
            _put(held, plan)
        except DistNetworkError as error:
            raise SessionError(f"the plan was not published, lost {error}; {_ANEW}") from error


def publish_again(plan: Plan, held: SessionStore) -> None:
    """Put the plan on a store that started anew, so that replicas can still join."""
    if not held.check([_key(plan.digest)]):
        _put(held, plan)


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
            asked = held.get(_NEWEST).decode(errors="replace") if digest is None else digest
            content = held.get(_key(asked))
        except DistNetworkError as error:
            raise SessionError(f"no plan was read, lost {error}; {_ANEW}") from error
        except DistStoreError as error:
            raise SessionError(f"the store has no plan {asked[:40]!r}, which is the newest; {_ANEW}") from error
    plan = _parse(content, asked, session)
    require_proof(plan)
    return plan


def _put(held: SessionStore, plan: Plan) -> None:
    text = dump_plan(plan)
    if held.compare_set(_key(plan.digest), "", text) != text.encode():
        _parse(held.get(_key(plan.digest)), plan.digest, held.session)
    held.set(_NEWEST, plan.digest)


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
