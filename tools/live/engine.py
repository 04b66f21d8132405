"""The engines of a case: those that load a checkpoint, and the one that starts with random weights and is refitted."""

from __future__ import annotations

import os
import time
from pathlib import Path
from typing import Any

from .cases import VOCABULARY, Case
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
    llm = _start(case, engine_folder(root, case, 1), load_format="dummy")
    before, refits = _answers(llm), []
    options = {"transport": "gloo" if _on_cpu() else case.transport, "timeout_s": TIMEOUT_S}
    llm.collective_rpc("connect_refit", kwargs={"store": store, "connect_timeout_s": CONNECT_S, **options})
    for version in range(1, len(VERSIONS) + 1):
        llm.collective_rpc("live_poison")
        reports = llm.collective_rpc("refit", args=(version,))
        told = {name: reports[0][name] for name in ("transport", "nbytes", "misc_bytes", "seconds")}
        refits.append({"sums": _sums(llm), "answers": _answers(llm), **told})
    kernels = llm.collective_rpc("live_kernels")[0]
    llm.collective_rpc("close_refit")
    return {"kernels": kernels, "before": before, "refits": refits}


def _start(case: Case, folder: Path, **more: Any) -> Any:
    from vllm import LLM

    begin = time.perf_counter()
    if _on_cpu():  # vLLM's CPU kernels are not built: eager, with a fixed cache, it starts without a forward
        more |= {"worker_cls": "kernel_free_worker.CPUWorker", "enforce_eager": True}
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
        answers.append({"tokens": tokens, "logprobs": [float(step[token].logprob) for token, step in chosen]})
    return answers


def _on_cpu() -> bool:
    return os.environ.get("LIVE_DEVICE") == "cpu"
