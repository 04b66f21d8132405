"""The engines of a case: those that load a checkpoint, and the one that starts with random weights and is refitted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .cases import PREFIX_CACHE, REFIT_WORKER, SLEEP, VOCABULARY, WEIGHT_TRANSFER, Case
from .checkpoints import VERSIONS, engine_folder
from .trainer import CONNECT_S, TIMEOUT_S

PROMPTS = [[(7 * place + 13 * number) % VOCABULARY for place in range(5 + 9 * number)] for number in range(5)]
ANSWER_TOKENS = 24
Answers = list[dict[str, Any]]


def load(case: Case, checkpoint: int, root: Path) -> dict[str, Any]:
    """What an engine that loaded a checkpoint holds and answers."""
    llm = _start(case, engine_folder(root, case, checkpoint))
    return {"sums": _sums(llm), "answers": _answers(llm), "again": _answers(llm)}


def refit(case: Case, root: Path, store: str) -> dict[str, Any]:
    """What an engine holds and answers after each refit. Its weights are poisoned before each."""
    llm = _start(case, engine_folder(root, case, 1), load_format="dummy", **case.refitted_options)
    before, refits = _answers(llm), []
    _connect(llm, case, store)
    for version in range(1, len(VERSIONS) + 1):
        if case.feature == SLEEP and version == len(VERSIONS):
            llm.sleep(level=2)
            llm.wake_up()
        llm.collective_rpc("live_poison")
        report = _refit(llm, case, version)
        told = {name: report[name] for name in ("transport", "nbytes", "misc_bytes", "seconds")}
        if case.feature == PREFIX_CACHE and not llm.reset_prefix_cache():
            raise RuntimeError("vLLM did not reset its prefix cache")
        refits.append({"sums": _sums(llm), "answers": _answers(llm), **told})
        if case.feature == PREFIX_CACHE:
            refits[-1]["from_cache"] = _answers(llm)
    kernels = llm.collective_rpc("live_kernels")[0]
    llm.collective_rpc("live_close")
    return {"kernels": kernels, "before": before, "refits": refits}


def _connect(llm: Any, case: Case, store: str) -> None:
    options = {"transport": "gloo" if _on_cpu() else case.transport, "timeout_s": TIMEOUT_S}
    info = {"store": store, "connect_timeout_s": CONNECT_S}
    if case.door == WEIGHT_TRANSFER:
        llm.init_weight_transfer_engine({"init_info": {**info, "options": options}})
    else:
        llm.collective_rpc("connect_refit", kwargs={**info, **options})


def _refit(llm: Any, case: Case, version: int) -> dict[str, Any]:
    """The report of the first worker."""
    if case.door == REFIT_WORKER:
        return dict(llm.collective_rpc("refit", args=(version,))[0])
    llm.start_weight_update()
    llm.update_weights({"update_info": {"version": version}})
    llm.finish_weight_update()
    return dict(llm.collective_rpc("live_report")[0])


def _start(case: Case, folder: Path, **more: Any) -> Any:
    from vllm import LLM

    begin = time.perf_counter()
    if _on_cpu():  # vLLM's CPU kernels are not built: eager, with a fixed cache, it starts without a forward
        more |= {"worker_cls": "kernel_free_worker.CPUWorker", "enforce_eager": True, "enable_sleep_mode": False}
    llm = LLM(model=str(folder), worker_extension_cls="live.worker.LiveWorker", **{**case.engine_options, **more})
    print(f"up in {time.perf_counter() - begin:.0f} s", flush=True)
    return llm


def _sums(llm: Any) -> dict[str, int]:
    """Of all workers, as in {"0:lm_head.weight": 3735928559}."""
    by_rank = llm.collective_rpc("live_sums")
    return {f"{rank}:{name}": value for rank, sums in enumerate(by_rank) for name, value in sums.items()}


def _answers(llm: Any) -> Answers:
    """Greedy, one request after the other: batches, and with them kernels, are then the same in every engine."""
    if _on_cpu():
        return []
    from vllm import SamplingParams

    sampling = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS, logprobs=3, ignore_eos=True, detokenize=False)
    answers = []
    for prompt in PROMPTS:
        (answer,) = llm.generate([{"prompt_token_ids": prompt}], sampling, use_tqdm=False)
        tokens = [int(token) for token in answer.outputs[0].token_ids]
        chosen = zip(tokens, answer.outputs[0].logprobs, strict=True)
        logprobs = [float(step[token].logprob) for token, step in chosen]
        answers.append({"tokens": tokens, "logprobs": logprobs, "cached_tokens": answer.num_cached_tokens or 0})
    return answers


def _on_cpu() -> bool:
    return os.environ.get("LIVE_DEVICE") == "cpu"
