"""A whole model of full size into a live engine on another GPU, and refits while the engine generates.

The trainer's tensors are those of the plan, without a model around them: first with content that the engine can check
(tools/synthetic.py), then with random weights of usual sizes, from which an engine generates as from any others.
"""

from __future__ import annotations

import json
import threading
import time
from itertools import pairwise
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.engines.vllm.model import local_tensors
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planning import plan as make_plan
from mcore_reshard.planning import read_request
from mcore_reshard.session.endpoints import TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan

from .worker import LiveWorker

REFITS = 6  # of the checked session
CTAS = (8, 16, 32, 48, 64, 96, 132)
REFITS_IN_FLIGHT, PAUSE_S = 3, 0.2  # for each number of CTAs, and between two of them
SEQUENCES, TOKENS = 64, 320  # generated meanwhile
TIMEOUT_S, CONNECT_S = 120.0, 600.0


def options_of(session: str, transport: str, **more: Any) -> dict[str, Any]:
    """The fields of `Options` of one session; every session of a store has a name of its own."""
    return {"session": session, "transport": transport, "timeout_s": TIMEOUT_S, **more}


def plan_of(model: str) -> Plan:
    """One trainer rank to one engine rank, proven."""
    made = make_plan(model, "tp=1", "tp=1")
    assert made.prove(), "the plan has no proof"
    return made


def write_config(model: str, folder: Path) -> None:
    """The folder that vLLM starts from; prompts are short, so its caches may be."""
    config = {**read_request(model, "tp=1", "tp=1").config, "max_position_embeddings": 4096}
    (folder / "config.json").write_text(json.dumps(config))


def train(model: str, store: str, transports: tuple[str, ...]) -> None:
    """The trainer's part of all sessions, in the order of the engine's."""
    import synthetic

    torch.cuda.set_device(0)
    plan = plan_of(model)
    tensors = synthetic.allocate(schedule_of(plan, "train", 0), torch.device("cuda", 0))
    synthetic.fill(plan, "train", 0, tensors)
    torch.cuda.empty_cache()
    print(f"{sum(t.nbytes for t in tensors.values()) / 1e9:.1f} GB in {len(tensors)} tensors", flush=True)
    for transport in transports:
        _refit(plan, tensors, store, options_of(f"whole-{transport}", transport), REFITS)
    for name, tensor in tensors.items():
        if tensor.dim() > 1:
            tensor.normal_(0.0, 0.02)
        else:
            tensor.fill_(0.0 if "bias" in name else 1.0)
    for ctas in CTAS:
        _refit(plan, tensors, store, options_of(f"ctas-{ctas}", "direct"), 1 + REFITS_IN_FLIGHT)


def _refit(plan: Plan, tensors: dict[str, torch.Tensor], store: str, fields: dict[str, Any], count: int) -> None:
    options = Options(**fields)
    publish_plan(plan, store, options)
    endpoint = TrainEndpoint(RankOfPlan(plan, "train", 0), tensors, store=store, options=options)
    endpoint.prepare(timeout_s=CONNECT_S)
    for version in range(1, count + 1):
        endpoint.refit(version)
    endpoint.close()


class WholeModelWorker(LiveWorker):
    """`LLM(..., worker_extension_cls="live.whole_model.WholeModelWorker")`."""

    def live_wrong(self, store: str, options: dict[str, Any]) -> dict[str, int]:
        """How many elements of each parameter are not what the trainer has; {} where all are right."""
        import synthetic

        plan = fetch_plan(store, Options(**options))
        return synthetic.wrong_elements(plan, "gen", 0, local_tensors(self.get_model()))

    def live_refit_in_flight(self, count: int, pause_s: float) -> None:
        """Refit `count` times on a thread, while the engine goes on with its steps. `live_steps` waits for it."""
        step, steps = self.model_runner.execute_model, []
        refits: list[tuple[float, float]] = []

        def timed(*arguments: Any, **named: Any) -> Any:
            steps.append((time.perf_counter(), getattr(arguments[0], "total_num_scheduled_tokens", 0)))
            return step(*arguments, **named)

        def refit_all() -> None:
            torch.cuda.set_device(self.device)
            while sum(1 for _, tokens in list(steps) if tokens == SEQUENCES) < 40:
                time.sleep(0.01)
            for _ in range(count):
                time.sleep(pause_s)
                begin = time.perf_counter()
                self.refit()
                refits.append((begin, time.perf_counter()))

        self.model_runner.execute_model = timed
        thread = threading.Thread(target=refit_all, name="refit in flight", daemon=True)
        self._in_flight = (step, steps, refits, thread)
        thread.start()

    def live_steps(self) -> dict[str, Any]:
        """The steps, as (seconds, tokens), and the refits, as (begin, end), on one clock."""
        step, steps, refits, thread = self._in_flight
        thread.join(TIMEOUT_S)
        self.model_runner.execute_model = step
        return {"steps": steps, "refits": refits}


def speeds(steps: list[tuple[float, int]], refits: list[tuple[float, float]], batch: int) -> tuple[float, float]:
    """Tokens per second (outside of refits, during refits) of steps that decode the whole batch.

    A step lasts until the next one begins. One that lies only partly in a refit counts to each side by its share.
    Raises ValueError where no refit, or nothing else, fell into such steps.
    """
    whole = [(begin, end) for (begin, tokens), (end, _) in pairwise(steps) if tokens == batch]
    inside_s = inside = outside_s = outside = 0.0
    for begin, end in whole:
        covered = sum(max(0.0, min(end, stop) - max(begin, start)) for start, stop in refits)
        share = covered / (end - begin)
        inside_s, outside_s = inside_s + covered, outside_s + (end - begin) - covered
        inside, outside = inside + share, outside + 1 - share
    if not inside_s or not outside_s:
        raise ValueError("the engine did not generate both beside refits and without: change TOKENS")
    return batch * outside / outside_s, batch * inside / inside_s
