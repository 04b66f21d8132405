"""What the front doors of all trainers share: a connected training rank, its store, and how ranks meet the engine."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from mcore_reshard.kernels.errors import RefitError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.address import split_address
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planning import InputError, RefitRequest
from mcore_reshard.session.endpoints import RefitHandle, RefitReport, TrainEndpoint
from mcore_reshard.session.plan_exchange import publish_plan
from mcore_reshard.session.store_server import ServedStore, start_store_if_absent
from mcore_reshard.session.trace_exchange import needs_traces, traced_session

from .world import gather_from_all, own_rank, run_on_all_ranks


class SessionServer:
    """The session's store, on training rank 0 unless another one answers: it serves from `start` until `stop`."""

    def __init__(self, address: str, timeout_s: float) -> None:
        self._address, self._timeout_s = address, timeout_s
        self._store: ServedStore | None = None

    def start(self) -> None:
        if own_rank() == 0 and self._store is None:
            self._store = start_store_if_absent(self._address, self._timeout_s)

    @property
    def serves(self) -> bool:
        return self._store is not None

    def stop(self) -> None:
        store, self._store = self._store, None
        if store is not None:
            store.close()


class RefitTrainer:
    """One training rank, connected: `connect` makes it. Use it as a context manager, or call `close`."""

    def __init__(self, plan: Plan, endpoint: TrainEndpoint, server: SessionServer) -> None:
        self.plan = plan
        self._endpoint = endpoint
        self._server = server

    def refit(
        self,
        step: int,
        kv_scales: Mapping[str, float] | None = None,
        *,
        everything: bool = False,
        rollback: bool = False,
    ) -> RefitReport:
        """Move the current weights into the engine; return once all members of both worlds have acknowledged them.

        Arguments and errors are those of `TrainEndpoint.refit`; `step` is the version. With Megatron's
        `overlap_param_gather`, force the gather of the parameters first. After an error call it again: the next refit
        connects anew, without replicas that are gone.
        """
        return self._endpoint.refit(step, kv_scales=kv_scales, everything=everything, rollback=rollback)

    def refit_async(
        self,
        step: int,
        kv_scales: Mapping[str, float] | None = None,
        *,
        everything: bool = False,
        rollback: bool = False,
    ) -> RefitHandle:
        """As `refit`, but return once this rank's weights have been read, and may change. The handle has the outcome."""
        return self._endpoint.refit_async(step, kv_scales=kv_scales, everything=everything, rollback=rollback)

    def metrics(self) -> dict[str, Any]:
        """What this rank has done so far, as plain data: `TrainEndpoint.metrics`."""
        return self._endpoint.metrics()

    def write_trace(self, path: str | os.PathLike[str]) -> None:
        """Write this rank's last refits as a chrome trace, for Perfetto. Raises OSError."""
        self._endpoint.write_trace(path)

    def close(self) -> None:
        """Leave the session. May be called twice.

        A store that `connect` started ends once nobody is connected any more.
        """
        self._endpoint.close()
        self._server.stop()

    def __enter__(self) -> RefitTrainer:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def meet_engines(
    plan_and_bind: Callable[[Options], RefitTrainer],
    server: SessionServer,
    address: str,
    connect_timeout_s: float,
    options: Options,
    plan_from_traces: Callable[[Options], RefitTrainer] | None = None,
) -> RefitTrainer:
    """Plan and bind on every training rank, publish the plan, and meet the engine's ranks. Collective.

    Where an engine wants a plan from traces, the ranks meet again with `plan_from_traces`. If one rank raises, all do, and
    the store that `server` started stops.
    """

    def publish() -> None:
        server.start()
        if own_rank() == 0:
            publish_plan(trainer.plan, address, options)

    try:
        trainer = run_on_all_ranks(lambda: plan_and_bind(options))
        try:
            run_on_all_ranks(publish)
            trainer._endpoint.prepare(timeout_s=connect_timeout_s)
            return trainer
        except BaseException as error:
            again = plan_from_traces is not None and isinstance(error, RefitError) and needs_traces(error)
            if not again:
                trainer.close()
                raise
    except BaseException:
        server.stop()
        raise
    assert plan_from_traces is not None
    return meet_engines(plan_from_traces, server, address, connect_timeout_s, traced_session(options))


def agree_on_model(request: RefitRequest) -> str:
    """The model's name, as training rank 0 has it. Raises RefitError on all ranks if they were given different families."""
    given = gather_from_all((request.model, str(request.config.get("model_type"))))
    families = list(dict.fromkeys(family for _, family in given))
    if len(families) > 1:
        first_of = {family: rank for rank, (_, family) in reversed([*enumerate(given)])}
        named = ", ".join(f"{family} on train:{first_of[family]}" for family in families)
        raise RefitError(f"connect() was given configs of different models: {named}; give all ranks the same hf_config")
    return given[0][0]


def session_problems(address: Any, timeout_s: Any, options: Any) -> list[str]:
    """What is wrong with these arguments of a front door."""
    problems: list[str] = []
    with collect_problems(problems):
        split_address(str(address))
    if not isinstance(options, Options):
        problems.append(f"options is a {type(options).__name__}: give mr.Options(...)")
    if not isinstance(timeout_s, int | float) or not timeout_s > 0:
        problems.append(f"connect_timeout_s must be a number of seconds above 0, not {timeout_s!r}")
    return problems


@contextmanager
def collect_problems(problems: list[str]) -> Iterator[None]:
    """Add what goes wrong within to `problems`."""
    try:
        yield
    except InputError as error:
        problems += filter(None, (*error.problems, error.remedy))
    except (ValueError, SessionError) as error:
        problems.append(str(error))
