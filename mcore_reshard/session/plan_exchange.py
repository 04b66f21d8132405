"""Hand the plan to every rank: one training rank publishes it on the session's store, generation ranks fetch it."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed import DistNetworkError, DistStoreError, TCPStore

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.store import FailFastStore, connect_store, store_address
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import dump_plan, parse_plan
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.planner.proof.traced import is_traced

from .trace_exchange import ask_no_traces

_PLAN = "plan"
_ANEW = "start it anew, and connect all ranks again"


def publish_plan(plan: Plan, store: TCPStore | str, *, session: str = "refit", timeout_s: float = 60.0) -> None:
    """Put the plan on the session's store, as JSON, for `fetch_plan`. One rank does this. Raises `SessionError`."""
    plan_store = _plan_store(store, session, timeout_s)
    if not is_traced(plan):  # else their traces have made it
        ask_no_traces(store_address(store), session, timeout_s)
    try:
        plan_store.set(_PLAN, dump_plan(plan))
        plan_store.check([_PLAN])  # A frozen store accepts a `set` too: only an answer shows that it has the plan.
    except DistNetworkError as error:
        raise SessionError(f"the plan was not published, lost {error}; {_ANEW}") from error


def fetch_plan(store: TCPStore | str, *, session: str = "refit", timeout_s: float = 60.0) -> Plan:
    """The plan that a training rank published, checked against its digest and proven again.

    Raises `SessionError` when none appears within `timeout_s` or a malformed one is there, and `ProofError`.
    """
    plan_store = _plan_store(store, session, timeout_s)
    try:
        plan_store.wait([_PLAN], timedelta(seconds=timeout_s))
        content = plan_store.get(_PLAN)
    except DistNetworkError as error:
        raise SessionError(f"no plan was read, lost {error}; {_ANEW}") from error
    except DistStoreError as error:
        raise SessionError(
            f"no training rank published a plan for session {session!r} within {timeout_s:g} s: connect the trainer"
        ) from error
    try:
        plan = parse_plan(content.decode(), f"the plan published for session {session!r}")
    except ValueError as error:
        remedy = "one training rank publishes it, and nothing else may write there"
        raise SessionError(f"the value of {_PLAN!r} on the store is malformed: {error}; {remedy}") from error
    require_proof(plan)
    return plan


def _plan_store(store: TCPStore | str, session: str, timeout_s: float) -> FailFastStore:
    return FailFastStore(f"mcore-reshard/{session}/plan", connect_store(store_address(store), timeout_s))
