"""Refits as methods of vLLM's own workers: `LLM(..., worker_extension_cls="mcore_reshard.vllm.RefitWorker")`.

    llm.collective_rpc("connect_refit", kwargs={"store": "10.0.0.1:29600"})
    llm.collective_rpc("refit", args=(step,))
    llm.collective_rpc("close_refit")

vLLM makes the class a base of its worker (v1/worker/worker_base.py). Arguments and results are plain data.

While an engine holds a mixture of versions, a step of it raises `MixedWeightsError`, which ends vLLM's EngineCore. So pause an
engine that is asked meanwhile, and resume it once every answer of `refit` has come; see docs/guide.md.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import asdict
from functools import wraps
from typing import Any

from .rank import VllmRank


def is_last(vllm_config: Any) -> bool:
    """Whether this is its engine's last worker, which alone raises errors: so vLLM's calls and answers stay in step.

    vLLM reads the answers of workers in order and stops at the first error (`collective_rpc` in
    v1/executor/multiproc_executor.py). It would take the answers after it for those of its next call. The errors of a
    session are those of all its ranks.
    """
    parallel = vllm_config.parallel_config
    return bool(parallel.rank >= parallel.world_size - 1)


def _answers(call: Callable[..., Any]) -> Callable[..., Any]:
    """A method that vLLM calls on all workers: the last one raises an error, the others return {"error": ...}."""

    @wraps(call)
    def answer(self: RefitWorker, *args: Any, **kwargs: Any) -> Any:
        try:
            return call(self, *args, **kwargs)
        except Exception as error:
            if is_last(self.vllm_config):
                raise
            return {"error": f"{type(error).__name__}: {error}"}

    return answer


class RefitWorker:
    """A generation rank's part: connect once, refit after each step, close."""

    vllm_config: Any  # of the worker
    _refit_rank: VllmRank | None = None

    @property
    def refit_rank(self) -> VllmRank:
        """What this worker does in refits."""
        if self._refit_rank is None:
            self._refit_rank = VllmRank(self)
        return self._refit_rank

    @_answers
    def connect_refit(
        self,
        store: str,
        *,
        replica: int = 0,
        connect_timeout_s: float = 600.0,
        generate_while_mixed: bool = False,
        **options: Any,
    ) -> str:
        """Meet the trainer and all other ranks: arguments, result and errors are those of `VllmRank.connect`.

        Of an engine of several workers the last one raises; the others return {"error": ...}.
        """
        return self.refit_rank.connect(
            store,
            replica=replica,
            connect_timeout_s=connect_timeout_s,
            generate_while_mixed=generate_while_mixed,
            **options,
        )

    @_answers
    def refit(self, version: int | None = None, everything: bool = False) -> dict[str, Any]:
        """Take part in the trainer's next refit; returns the fields of `RefitReport` once it is committed.

        `version` is checked against the trainer's; None takes what comes. `everything` also asks for parameters that the
        trainer left frozen: for an engine that has lost its weights. The report has the `state` of the weights, and an error
        ends with it. Of an engine of several workers the last one raises; the others return {"error": ...}.
        """
        return asdict(self.refit_rank.refit(version, everything=everything))

    @_answers
    def refit_state(self) -> dict[str, Any]:
        """What this worker's weights hold: {"state": "complete", "version": 3}, or "mixed" with "next" and "share"."""
        return self.refit_rank.connected.state.to_json()

    def refit_metrics(self) -> dict[str, Any]:
        """What this worker has done so far, as plain data: `GenerationEndpoint.metrics`."""
        return self.refit_rank.connected.metrics()

    def write_refit_trace(self, folder: str) -> str:
        """Write this worker's last refits as a chrome trace into a folder; returns the file, as in "gen-3.json"."""
        endpoint = self.refit_rank.connected
        path = os.path.join(folder, f"{endpoint.rank_name.replace(':', '-')}.json")
        endpoint.write_trace(path)
        return path

    def close_refit(self) -> None:
        """Leave the session and free what it holds. May be called twice."""
        self.refit_rank.close()
