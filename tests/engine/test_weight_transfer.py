"""vLLM's weight transfer through its own worker: its methods call our engine, which real trainers refit."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from helpers.validating import assert_golden, run_validation
from test_vllm_worker import vllm_worker_unextended, worker_of  # noqa: F401

from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.session.endpoints import RefitReport
from mcore_reshard.validation import ranks
from mcore_reshard.validation.engine.slices import poison


def generate_by_weight_transfer(rank: int, job: ranks.Job, store: str) -> ranks.Results:
    """As `ranks._generate`, by the calls of vLLM's worker to its weight transfer engine."""
    from vllm.config import WeightTransferConfig
    from vllm.distributed.weight_transfer import WeightTransferEngineFactory

    from mcore_reshard.integrations.vllm_plugin import BACKEND, register

    register()
    register()
    loaded, sizes = ranks._VllmEngine(job, rank), ranks.gen_sizes(job.plan.gen)
    worker = worker_of(job.engine_folder, sizes, rank).worker
    worker.model_runner = SimpleNamespace(get_model=lambda: loaded._model, reset_lora_state=lambda: None)
    worker.weight_transfer_engine = WeightTransferEngineFactory.create_engine(
        WeightTransferConfig(backend=BACKEND), worker.vllm_config, torch.device("cpu"), loaded._model
    )
    is_last = rank % (sizes.tp * sizes.pp) == sizes.tp * sizes.pp - 1
    tell_wrong_use(worker, is_last)
    replica = 0 if sizes.ep > 1 else rank // (sizes.tp * sizes.pp)
    options = {"transport": job.request.options.transport}
    worker.init_weight_transfer_engine({"store": store, "replica": replica, "options": options})
    reports, results = [], []
    for version in range(1, job.request.refits + 1):
        for tensor in loaded.tensors.values():
            poison(tensor)
        refuse_to_sleep_through(worker, version, is_last)
        worker.start_weight_update()
        worker.update_weights({"version": version})
        worker.finish_weight_update()
        refit: RefitReport = worker.weight_transfer_engine.last_report
        reports.append(refit)
        results.append(ranks._compare_with_golden(job, rank, version, loaded, loaded.loaded))
    for _ in range(2):  # vLLM 0.26's worker has no method for it
        getattr(worker, "shutdown_weight_transfer_engine", worker.weight_transfer_engine.shutdown)()
    return reports, results


def raises_on_last(call: Any, is_last: bool, error: type[Exception], told: str) -> None:
    """Of an engine of several workers the last one alone raises, so that vLLM's calls and answers stay in step."""
    if is_last:
        with pytest.raises(error, match=told):
            call()
    else:
        call()


def tell_wrong_use(worker: Any, is_last: bool) -> None:
    from mcore_reshard.kernels.errors import SessionError

    wrong = {"stor": "a:1", "replica": -1, "options": {"transport": "rdma", "bucket": 1}}
    told = r"(?s)store must be.*replica must be.*no field 'bucket'.*transport must be one of.*no 'stor'"
    raises_on_last(lambda: worker.init_weight_transfer_engine(wrong), is_last, ValueError, told)
    for _ in range(2):  # an update that failed is over on all workers
        worker.start_weight_update()
        told = "in no session: call init_weight_transfer_engine first"
        raises_on_last(lambda: worker.update_weights({"version": 1}), is_last, SessionError, told)
    with pytest.raises(RuntimeError, match="start_weight_update must be called before"):
        worker.update_weights({"version": 1})
    with pytest.raises(RuntimeError, match="does not support draft model weight updates"):
        worker.start_draft_weight_update()


def refuse_to_sleep_through(worker: Any, version: int, is_last: bool) -> None:
    """The watch stands before vLLM's own methods, which need a GPU; here it is asked alone."""
    from mcore_reshard.kernels.errors import SessionError

    watch = worker.weight_transfer_engine._rank._sleep
    assert not watch.asleep and not watch.lost
    watch.asleep, watch.lost = True, version > 1
    worker.start_weight_update()
    raises_on_last(lambda: worker.update_weights({"version": version}), is_last, SessionError, "this engine sleeps")
    watch.asleep = False


@pytest.mark.parametrize(
    ("family", "train", "gen"),
    [
        ("qwen3", "tp=2", "tp=2"),
        ("qwen3-moe", "tp=1", "tp=1,dp=2"),
        ("nemotron-h", "tp=2", "pp=2"),
        ("deepseek-v3", "pp=2", "tp=2,dp=2,ep=4"),
    ],
)
def test_refits_by_vllms_weight_transfer_equal_golden(
    family: str, train: str, gen: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ranks, "_generate", generate_by_weight_transfer)
    report = run_validation(load_config(f"tiny-{family}"), train, gen, engine="vllm")
    assert_golden(report)
