"""The engine's process: vLLM generates, and takes new weights when the trainer says so.

    python rollout.py FOLDER PIPE     FOLDER has config.json; PIPE is the number of an open pipe to the trainer

The trainer sends (method, arguments) and gets (answer, error). `serve` knows nothing of vLLM, so that a test can serve
another engine.
"""

from __future__ import annotations

import os
import sys
from multiprocessing.connection import Connection
from typing import Any

import torch

from mcore_reshard.vllm import RefitWorker

MAX_ANSWERS = 512  # at a time


class Worker(RefitWorker):
    """The package's worker extension. The ablation also puts one tensor back after each refit."""

    get_model: Any  # of vLLM's worker
    _kept: torch.Tensor

    def keep_tensor(self, name: str) -> None:
        self._kept = self.get_model().get_parameter(name).detach().clone()

    def put_tensor_back(self, name: str) -> None:
        self.get_model().get_parameter(name).detach().copy_(self._kept)


class VllmEngine:
    """vLLM, started with random weights: the first refit brings the policy's."""

    def __init__(self, folder: str) -> None:
        from vllm import LLM

        self._llm = LLM(
            model=folder, load_format="dummy", worker_extension_cls="rollout.Worker", skip_tokenizer_init=True,
            dtype="bfloat16", max_model_len=64, max_num_seqs=MAX_ANSWERS, max_num_batched_tokens=16 * MAX_ANSWERS,
            kv_cache_memory_bytes=256 << 20, gpu_memory_utilization=0.05, enforce_eager=True, disable_log_stats=True,
            enable_prefix_caching=False,  # else call llm.reset_prefix_cache() after each refit
        )  # fmt: skip

    def connect(self, store: str, options: dict[str, Any]) -> None:
        self._llm.collective_rpc("connect_refit", kwargs={"store": store, **options})

    def refit(self, version: int) -> float:
        """Seconds of the refit."""
        return float(self._llm.collective_rpc("refit", args=(version,))[0]["seconds"])

    def keep_tensor(self, name: str) -> None:
        self._llm.collective_rpc("keep_tensor", args=(name,))

    def put_tensor_back(self, name: str) -> None:
        self._llm.collective_rpc("put_tensor_back", args=(name,))

    def generate(self, prompts: list[list[int]], group: int, tokens: int) -> tuple[list[list[int]], list[list[float]]]:
        """`group` sampled answers to each prompt, one after the other, and the log-probability of each token."""
        from vllm import SamplingParams

        sampling = SamplingParams(
            n=group, temperature=1.0, max_tokens=tokens, logprobs=0, ignore_eos=True, detokenize=False
        )
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        answers, logprobs = [], []
        for request in self._llm.generate(asked, sampling, use_tqdm=False):
            for output in request.outputs:
                answer = [int(token) for token in output.token_ids]
                answers.append(answer)
                logprobs.append(
                    [float(step[token].logprob) for token, step in zip(answer, output.logprobs, strict=True)]
                )
        return answers, logprobs

    def close(self) -> None:
        self._llm.collective_rpc("close_refit")


def serve(engine: Any, pipe: int) -> None:
    """Do what the trainer asks, until it goes or asks to close."""
    with Connection(pipe) as trainer:
        while True:
            try:
                method, arguments = trainer.recv()
            except EOFError:
                return
            try:
                trainer.send((getattr(engine, method)(*arguments), None))
            except Exception as error:
                trainer.send((None, f"{type(error).__name__}: {error}"))
            if method == "close":
                return


if __name__ == "__main__":
    here = os.path.dirname(os.path.abspath(__file__))
    os.environ["PYTHONPATH"] = os.pathsep.join([here, os.environ.get("PYTHONPATH", "")])  # vLLM's processes import this
    serve(VllmEngine(sys.argv[1]), int(sys.argv[2]))
