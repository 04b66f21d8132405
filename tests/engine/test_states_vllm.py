"""What vLLM's workers say and do while their weights are mixed, and replicas that come to a session under way."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import synthetic
import torch
from checkpoints import tiny
from live_refits import worker_of

import mcore_reshard as mr
from mcore_reshard.engines.vllm.model import local_tensors
from mcore_reshard.engines.vllm.worker import RefitWorker
from mcore_reshard.kernels.errors import MixedWeightsError, RefitError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.session.attendance import WAITS, ready_key
from mcore_reshard.session.endpoints import TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import publish_plan
from mcore_reshard.session.state import complete, mixed
from mcore_reshard.session.store_server import serve_store
from mcore_reshard.session.trace_exchange import has_refitted, session_under_way, traced_session
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config
from mcore_reshard.validation.processes import run_processes

TIMEOUT_S = 60.0


# --- a whole session ---------------------------------------------------------------------------------------------


def wait_for(file: Path) -> None:
    while not file.exists():
        time.sleep(0.05)


def wait_until_it_waits(seat: str, address: str) -> None:
    """Until a replica that has come later has called `refit`."""
    with connect_store(address, Options(timeout_s=TIMEOUT_S)) as store:
        while not (store.peek(ready_key(seat)) or b"").endswith(WAITS.encode()):
            time.sleep(0.05)


def train(plan: Plan, address: str, folder: Path) -> list[Any]:
    """Version 2 fails on the engine that is there from the start; the other one comes after version 1."""
    publish_plan(plan, address, Options(timeout_s=TIMEOUT_S))
    part = RankOfPlan(plan, "train", 0)
    tensors = synthetic.allocate(part.schedule((0,)), torch.device("cpu"))
    synthetic.fill(plan, "train", 0, tensors)
    endpoint = TrainEndpoint(part, tensors, store=address, options=Options(timeout_s=TIMEOUT_S, transport="gloo"))
    endpoint.prepare()
    replicas = []
    for version in (1, 2, 3):
        if version == 2:
            wait_until_it_waits("gen:1", address)  # else version 2 goes without it
            with pytest.raises(RefitError, match="gen:0: OSError: on fire"):
                endpoint.refit(version)
        else:
            replicas.append(endpoint.refit(version).replicas)
    endpoint.close()
    return replicas


def serve(replica: int, plan: Plan, address: str, folder: Path) -> Any:
    if replica == 1:
        wait_for(folder / "first")
    model = build_engine(folder, GenSizes(), 0)
    runner = {"execute_model": lambda scheduled: f"ran {scheduled.total_num_scheduled_tokens}"}
    worker = worker_of(engine_config(folder, GenSizes(), 0), model, **runner)
    fails = [False]

    def derive() -> None:
        if fails[0]:
            raise OSError("on fire")

    worker.refit_rank._derive_tensors = derive
    start = time.monotonic()
    name = worker.connect_refit(address, replica=replica, timeout_s=TIMEOUT_S, transport="gloo")
    assert time.monotonic() - start < TIMEOUT_S / 2
    said: list[Any] = [name]
    if replica == 0:
        said.append(worker.refit(1)["state"])
        (folder / "first").touch()
        fails[0] = True
    else:
        said.append(str(worker.refit_rank.endpoint.state))  # another replica has given it
    with pytest.raises(Exception, match="on fire") as caught:
        worker.refit(2)
    said += [str(caught.value).partition("; ")[2], worker.refit_state()]
    with pytest.raises(MixedWeightsError) as refused:
        worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=5))
    assert worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=0)) == "ran 0"
    said.append(str(refused.value))
    fails[0] = False
    said.append(worker.refit(3)["state"])
    assert worker.model_runner.execute_model(SimpleNamespace(total_num_scheduled_tokens=5)) == "ran 5"
    worker.close_refit()
    return said, synthetic.wrong_elements(plan, "gen", 0, local_tensors(model))


def run_session(index: int, plan: Plan, address: str, folder: Path) -> Any:
    return train(plan, address, folder) if index == 0 else serve(index - 1, plan, address, folder)


def test_a_mixture_is_told_and_does_not_generate_and_a_replica_joins_through_the_front_door(
    config_folder: Callable[[Any], Path],
) -> None:
    config = tiny("qwen3")
    folder, plan = config_folder(config), mr.plan(config, "tp=1", "tp=1")
    with serve_store() as store:
        replicas, (first, wrong), (second, also_wrong) = run_processes(
            3, run_session, (plan, store.address, folder), timeout_s=180.0
        )
    assert replicas == [(0,), (0, 1)] and wrong == also_wrong == {}
    for said, name in ((first, "gen:0"), (second, "gen:1")):
        held = "a mixture of versions 1 and 2 (100%)"
        assert said[:2] == [name, "complete(1)"] and said[-1] == "complete(3)"
        assert said[2] == f"{name} holds {held}, its state is mixed(1, 2, 1.00)"
        assert said[3] == {"state": "mixed", "version": 1, "next": 2, "share": 1.0}
        assert said[4].startswith(f"{name}: this engine holds {held}: refit again before it generates, or connect with")


# --- the guard ---------------------------------------------------------------------------------------------------


def guarded_worker(**attributes: Any) -> Any:
    worker: Any = RefitWorker()
    worker.vllm_config, worker.model_runner = None, SimpleNamespace(execute_model=lambda scheduled: "ran")
    rank = worker.refit_rank
    rank.endpoint = SimpleNamespace(state=mixed(3, 4, 0.52), rank_name="gen:1", close=lambda: None)
    for name, value in attributes.items():
        setattr(rank, name, value)
    rank._guard_steps()
    rank._guard_steps()
    return worker


def test_a_step_of_a_mixture_raises_its_state_unless_the_engine_may_generate() -> None:
    step = SimpleNamespace(total_num_scheduled_tokens=1)
    worker = guarded_worker()
    told = r"gen:1: this engine holds a mixture of versions 3 and 4 \(52%\): refit again .* generate_while_mixed=True"
    with pytest.raises(MixedWeightsError, match=told):
        worker.model_runner.execute_model(step)
    worker.refit_rank.endpoint.state = complete(4)
    assert worker.model_runner.execute_model(step) == "ran"
    assert guarded_worker(_mixed_may_generate=True).model_runner.execute_model(step) == "ran"


def test_a_sleeping_engine_is_not_refitted_and_one_that_lost_its_weights_takes_all_before_it_generates() -> None:
    asked: list[bool] = []
    worker: Any = RefitWorker()
    worker.vllm_config, worker.model_runner = None, SimpleNamespace()
    worker.sleep, worker.wake_up = lambda level: level, lambda tags: tags
    rank = worker.refit_rank
    rank._as_vllm_configured = nullcontext
    rank.endpoint = SimpleNamespace(
        state=complete(3), rank_name="gen:1", refit=lambda version, everything: asked.append(everything)
    )
    for _ in range(2):
        rank._sleep.watch(worker)
    for level, everything in ((1, False), (2, True), (1, False), (0, False)):
        assert worker.sleep(level=level) == level
        if level:
            with pytest.raises(SessionError, match=r"gen:1: this engine sleeps.*call wake_up first"):
                rank.refit(4)
            assert worker.wake_up(tags=["kv_cache"]) == ["kv_cache"] and rank._sleep.asleep
        worker.wake_up()
        if everything:
            with pytest.raises(MixedWeightsError, match="lost its weights in a sleep of level 2"):
                rank.refuse_mixture()
        else:
            rank.refuse_mixture()
        rank.refit(4)
        rank.refuse_mixture()
    assert asked == [False, True, False, False]


# --- vLLM's calls and answers ------------------------------------------------------------------------------------


class Workers:
    """vLLM's executor of several processes, whose workers run at once in this one."""

    def __init__(self, workers: list[Any]) -> None:
        from vllm.v1.executor.multiproc_executor import WorkerProc

        self._workers, self._status = workers, WorkerProc.ResponseStatus
        self.rpc_broadcast_mq = SimpleNamespace(enqueue=self._run)
        self._answers: list[deque[Any]] = [deque() for _ in workers]
        self.response_mqs = [
            SimpleNamespace(dequeue=lambda timeout, answers=answers: answers.popleft()) for answers in self._answers
        ]
        self.is_failed, self.futures_queue = False, deque[Any]()

    def call(self, method: str) -> list[Any]:
        from vllm.v1.executor.multiproc_executor import MultiprocExecutor

        return MultiprocExecutor.collective_rpc(self, method)  # type: ignore[arg-type]

    def _run(self, request: Any) -> None:
        for worker, answers in zip(self._workers, self._answers, strict=True):
            try:
                answers.append((self._status.SUCCESS, getattr(worker, request[0])()))
            except Exception as error:
                answers.append((self._status.FAILURE, str(error)))


def two_workers() -> list[Any]:
    workers = []
    for rank in range(2):
        worker: Any = RefitWorker()
        worker.vllm_config = SimpleNamespace(parallel_config=SimpleNamespace(rank=rank, world_size=2))
        worker.raise_plainly = lambda: (_ for _ in ()).throw(SessionError("no session"))
        worker.own_rank = lambda rank=rank: rank
        workers.append(worker)
    return workers


def test_an_error_of_all_workers_reaches_the_caller_and_leaves_answers_in_step() -> None:
    workers = Workers(two_workers())
    for _ in range(2):
        with pytest.raises(RuntimeError, match="this worker is in no session"):
            workers.call("refit")
        assert workers.call("own_rank") == [0, 1]
    plain = Workers(two_workers())
    with pytest.raises(RuntimeError, match="no session"):
        plain.call("raise_plainly")
    with pytest.raises(RuntimeError, match="no session"):  # worker 1's answer to the call before
        plain.call("own_rank")


# --- sessions under way ------------------------------------------------------------------------------------------


def test_an_engine_that_comes_later_finds_the_session_that_the_trainer_has_moved_to() -> None:
    from mcore_reshard.kernels.rendezvous.store import connect_store

    options = Options(timeout_s=10.0)
    with serve_store() as store:
        assert session_under_way(store.address, options) == options
        with connect_store(store.address, traced_session(options)) as trainer:
            trainer.take_seat("train:0", {"pid": 1})
            assert session_under_way(store.address, options) == traced_session(options)
            assert not has_refitted(store.address, traced_session(options))
            trainer.set("head", '{"kind": "refit"}')
            assert has_refitted(store.address, traced_session(options))
            assert not has_refitted(store.address, options)
            trainer.leave_seat()
            assert session_under_way(store.address, options) == options
    start = time.monotonic()
    assert session_under_way("127.0.0.1:1", options) == options
    assert time.monotonic() - start < 15
