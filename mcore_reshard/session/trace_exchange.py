"""Traces between the two worlds: engines tell the trainer what their loaders do, before there is a plan.

A model without layout rules is planned from traces. The trainer names the tensors that it will send; every generation
rank runs its loader on meta tensors of these names and publishes the result. Where rules make the plan, nothing is asked,
and each rank holds its own trace against the plan. An engine that holds more than rules know ends that session with
`TracesNeeded`; all ranks then meet again in `traced_session`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from datetime import timedelta
from uuid import uuid4

from torch.distributed import DistNetworkError, DistStoreError

from mcore_reshard.kernels.errors import LayoutError, RefitError, SessionError, TracesNeeded
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.rendezvous import SessionFailed
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys, StoreView
from mcore_reshard.planner.bounded_json import MAX_WORD_BYTES, parse_json
from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames
from mcore_reshard.planner.layout.trace_file import (
    dump_checkpoint,
    dump_trace,
    parse_checkpoint,
    parse_trace,
    require_known,
)
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.plan.trace_check import trace_faults

from .attempts import HEAD, REFIT

CONNECT_AGAIN = "connect them again, in vLLM by connect_refit() on all workers"
_TRACES = "traces"  # the part of the store with what is here
_REQUEST = "request"  # what training rank 0 asks of engines: a checkpoint, or nothing
_SHOWN = 5
_LOOK_S = 5.0  # limit for a look at the store; where it has no such session it says so at once
_ANEW = "start it anew, and connect all ranks again"


def collect_traces(
    checkpoint: Mapping[str, HfTensor],
    ranks: int,
    address: str,
    options: Options,
    connect_timeout_s: float,
) -> list[CondensedTrace]:
    """The trace of every generation rank, of the loading of `checkpoint`. Training rank 0 calls it.

    Raises SessionError for ranks that publish none within `connect_timeout_s`, and for those whose loader cannot be traced.
    """
    with connect_store(address, options) as held:
        return _collect(held.under(_TRACES), checkpoint, ranks, connect_timeout_s)


def _collect(
    store: StoreView, checkpoint: Mapping[str, HfTensor], ranks: int, connect_timeout_s: float
) -> list[CondensedTrace]:
    names = ParameterNames(checkpoint)
    number = uuid4().hex  # an earlier session of this name may have left traces
    _ask(store, {"number": number, "checkpoint": dump_checkpoint(checkpoint)})
    keys = [f"{number}/{rank}" for rank in range(ranks)]
    try:
        store.wait(keys, timedelta(seconds=connect_timeout_s))
        answers = [
            parse_json(store.get(key), f"the answer of gen:{rank}", max_bytes=MAX_WORD_BYTES)
            for rank, key in enumerate(keys)
        ]
        failed = [f"gen:{rank}: {answer['error']:.2000}" for rank, answer in enumerate(answers) if "error" in answer]
    except DistNetworkError as error:
        raise SessionError(f"no traces of the engine were read, lost {error}; {_ANEW}") from error
    except DistStoreError as error:
        silent = [f"gen:{rank}" for rank, key in enumerate(keys) if not store.check([key])]
        here = [name for name in silent if (seat := store.seats.get(name)) is not None and seat.status == "here"]
        remedy = f"start the engine and connect its ranks{_still_here(here)}"
        raise SessionError(
            f"{', '.join(silent)} did not say within {connect_timeout_s:g} s how they load this model, which has no layout"
            f" rules: {remedy}"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise SessionError(f"a generation rank's answer on the store is malformed: {error}") from error
    if failed:
        raise SessionError("\n  ".join(("the engine's loader cannot be traced:", *failed[:_SHOWN])))
    try:
        traces = [parse_trace(answer["trace"], f"the trace of gen:{rank}") for rank, answer in enumerate(answers)]
        for rank, trace in enumerate(traces):
            require_known(trace, names, f"the trace of gen:{rank}")
        return traces
    except (KeyError, TypeError, ValueError) as error:
        raise SessionError(f"a generation rank's trace on the store is malformed: {error}") from error


def _ask(store: StoreView, request: Mapping[str, str]) -> None:
    """Ask engines for traces, or for none. Answers to earlier requests are of no use any more."""
    if earlier := [key for key in store.keys("") if key != _REQUEST]:
        store.delete_soon([], earlier)
    store.set(_REQUEST, json.dumps(request))


def _still_here(engines: Sequence[str]) -> str:
    """What to do about engines that were connected with an earlier trainer, and answer no request by themselves."""
    if not engines:
        return ""
    return f"; {', '.join(engines)} are connected since an earlier trainer: {CONNECT_AGAIN}"


def awaits_trace(store: StoreKeys, rank_name: str) -> bool:
    """Whether a trainer waits for a trace of this generation rank: one that started again, of a model without rules."""
    traces = store.under(_TRACES)
    if (content := traces.peek(_REQUEST)) is None:
        return False
    number = parse_json(content, "the request", max_bytes=MAX_WORD_BYTES).get("number")
    return number is not None and not traces.check([f"{number}/{rank_name.partition(':')[2]}"])


def ask_no_traces(address: str, options: Options) -> None:
    """Tell engines that the plan needs no traces of theirs. Training rank 0 calls it before it publishes the plan."""
    with connect_store(address, options) as held:
        _ask(held.under(_TRACES), {})


def answer_request(
    rank: int,
    trace: Callable[[Mapping[str, HfTensor]], CondensedTrace],
    address: str,
    options: Options,
    connect_timeout_s: float,
) -> None:
    """Publish this generation rank's trace if the trainer wants it. An error of `trace` is published, then raised.

    Raises SessionError where no store answers within `connect_timeout_s`, or no trainer says within it what it wants. An
    engine may be there long before the trainer, which starts the store.
    """
    with connect_store(address, options, timeout_s=connect_timeout_s) as held:
        _answer(held.under(_TRACES), rank, trace, options.session, connect_timeout_s)


def _answer(
    store: StoreView,
    rank: int,
    trace: Callable[[Mapping[str, HfTensor]], CondensedTrace],
    session: str,
    connect_timeout_s: float,
) -> None:
    try:
        store.wait([_REQUEST], timedelta(seconds=connect_timeout_s))
        request = parse_json(store.get(_REQUEST), "the request", max_bytes=MAX_WORD_BYTES)
        if not request:
            return
        checkpoint, number = parse_checkpoint(request["checkpoint"]), str(request["number"])
    except DistNetworkError as error:
        raise SessionError(f"the trainer's request was not read, lost {error}; {_ANEW}") from error
    except DistStoreError as error:
        raise SessionError(
            f"no training rank published a plan for session {session!r} within {connect_timeout_s:g} s: connect the trainer"
        ) from error
    except (KeyError, TypeError, ValueError) as error:
        raise SessionError(f"the trainer's request on the store is malformed: {error}") from error
    try:
        answer = {"trace": dump_trace(trace(checkpoint))}
    except Exception as error:
        store.set(f"{number}/{rank}", json.dumps({"error": f"{type(error).__name__}: {error}"}))
        raise
    store.set(f"{number}/{rank}", json.dumps(answer))


def needs_traces(error: RefitError) -> bool:
    """Whether a session ended because an engine wants a plan from traces. Every rank of it can tell."""
    return isinstance(error, TracesNeeded) or (
        isinstance(error, SessionFailed) and error.failure.error == TracesNeeded.__name__
    )


def traced_session(options: Options) -> Options:
    """The options of the session in which ranks meet again."""
    return replace(options, session=f"{options.session}/traced")


def session_under_way(address: str, options: Options) -> Options:
    """The options of the session that the trainer is in by now: `traced_session` if it has moved there, else `options`.

    An engine that comes later would wait in the other one, which has been deserted.
    """
    moved = traced_session(options)
    with (
        suppress(SessionError, DistNetworkError),
        connect_store(address, moved, timeout_s=_LOOK_S, watches=True) as held,
    ):
        trainer = held.seats.get("train:0")
        if trainer is not None and trainer.status == "here":
            return moved
    return options


def has_refitted(address: str, options: Options) -> bool:
    """Whether a session's trainer has begun a refit: its plan stays, whatever an engine that comes later may need."""
    with suppress(SessionError, DistNetworkError), connect_store(address, options, watches=True) as held:
        return held.check([HEAD]) and json.loads(held.get(HEAD)).get("kind") == REFIT
    return False


def require_planned_layout(plan: Plan, world: World, rank: int, trace: RankTrace, loader: str) -> None:
    """Raise LayoutError where a rank's loader keeps tensors otherwise than the plan says. `loader` is its name and version."""
    faults = trace_faults(plan, world, rank, trace)
    if not faults:
        return
    more = [f"and {len(faults) - _SHOWN} more"] if len(faults) > _SHOWN else []
    raise LayoutError(
        "\n  ".join(
            (
                f"{world}:{rank}: {loader} keeps {len(faults)} tensors otherwise than the plan's rules:",
                *faults[:_SHOWN],
                *more,
            )
        )
        + "\ntake a version that docs/support.md names, or a release of mcore-reshard that knows this one"
    )
