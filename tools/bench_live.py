"""Qwen3-30B-A3B into a live vLLM engine on another GPU: how long, whether every element is right, and what the engine's
answers feel of it.

    python tools/bench_live.py --out tools/results/live-whole-x2.json

1. The trainer's 61 GB lie on GPU 0, the engine runs on GPU 1 with CUDA graphs. Its weights are poisoned, refitted and
   compared element by element on the GPU; five more refits are timed. Once by `direct` and once by `nccl`.
2. The engine answers 64 requests at a time. Meanwhile a thread of its worker refits, by `direct` with 8 to 132 CTAs. Tokens
   per second count the steps that decode all requests. The weights that arrive are those that are there, and answers from a
   mixture of two versions are allowed (`generate_while_mixed`).

`--wait-for FILE` starts the engine beside other work, and begins once the file is there.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

TOOLS = Path(__file__).parent
sys.path[:0] = [str(TOOLS.parent), str(TOOLS)]

import validate_live  # noqa: E402
from bench import machine  # noqa: E402
from live import whole_model  # noqa: E402

from mcore_reshard.session.store_server import serve_store  # noqa: E402

MODEL, TRANSPORTS = "qwen3-30b-a3b", ("direct", "nccl")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--wait-for", type=Path, metavar="FILE")
    parser.add_argument("--train", metavar="ADDRESS", help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, metavar="FILE")
    arguments = parser.parse_args()
    if arguments.train:
        whole_model.train(arguments.model, arguments.train, TRANSPORTS)
        return 0
    if arguments.out is None:
        parser.error("--out is missing")
    with tempfile.TemporaryDirectory() as folder, serve_store() as store:
        return measure(arguments, Path(folder), store.address)


def measure(arguments: argparse.Namespace, folder: Path, store: str) -> int:
    """Both parts, written as they come; the exit code is 1 if an element was wrong."""
    gpus = machine.gpus()  # without CUDA, which the engine's process is to start
    whole_model.write_config(arguments.model, folder)
    visible = {"CUDA_VISIBLE_DEVICES": "1,0"}
    os.environ.update(
        visible, PYTHONPATH=os.pathsep.join([str(TOOLS), str(TOOLS.parent), os.environ.get("PYTHONPATH", "")])
    )
    llm = start(folder)
    while arguments.wait_for and not arguments.wait_for.exists():
        time.sleep(0.5)
    command = [sys.executable, __file__, "--model", arguments.model, "--train", store]
    with subprocess.Popen(command, env={**os.environ, "CUDA_VISIBLE_DEVICES": "0,1"}) as trainer:
        try:
            report: dict[str, Any] = {
                "model": arguments.model,
                **validate_live.about(gpus),
                "whole": [],
                "in_flight": [],
            }
            report["kernels"] = llm.collective_rpc("live_kernels")[0]
            for transport in TRANSPORTS:
                report["whole"].append(whole(llm, store, transport))
                write(report, arguments.out)
            for ctas in whole_model.CTAS:
                report["in_flight"].append(in_flight(llm, store, ctas))
                write(report, arguments.out)
            trainer.wait(60)
        finally:
            trainer.kill()
    return 1 if any(row["wrong_parameters"] for row in report["whole"]) else 0


def write(report: dict[str, Any], out: Path) -> None:
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(report, indent=1) + "\n")
    print(json.dumps(report["in_flight"][-1] if report["in_flight"] else report["whole"][-1]), flush=True)


def start(folder: Path) -> Any:
    """vLLM with CUDA graphs of the batch that is generated. Its kernels are those that read weights as they are loaded."""
    from vllm import LLM

    return LLM(
        model=str(folder),
        load_format="dummy",
        worker_extension_cls="live.whole_model.WholeModelWorker",
        skip_tokenizer_init=True,
        dtype="bfloat16",
        max_model_len=1024,
        max_num_seqs=whole_model.SEQUENCES,
        max_num_batched_tokens=2048,
        kv_cache_memory_bytes=8 << 30,
        gpu_memory_utilization=0.5,
        enable_prefix_caching=False,
        disable_log_stats=True,
        seed=0,
        moe_backend="triton",
        compilation_config={"cudagraph_capture_sizes": [whole_model.SEQUENCES]},
    )


def whole(llm: Any, store: str, transport: str) -> dict[str, Any]:
    """One session: poison, refit, compare, and refits that are timed."""
    options = whole_model.options_of(f"whole-{transport}", transport)
    llm.collective_rpc("live_poison")
    begin = time.perf_counter()
    llm.collective_rpc("connect_refit", kwargs={"store": store, "connect_timeout_s": whole_model.CONNECT_S, **options})
    prepare_s = time.perf_counter() - begin
    milliseconds, called = [], []
    for version in range(1, whole_model.REFITS + 1):
        begin = time.perf_counter()
        told = llm.collective_rpc("refit", args=(version,))[0]
        called.append((time.perf_counter() - begin) * 1e3)
        milliseconds.append(told["seconds"] * 1e3)
        if version == 1:
            wrong = llm.collective_rpc("live_wrong", args=(store, options))[0]
    llm.collective_rpc("close_refit")
    return {
        "transport": told["transport"],
        "bytes": told["nbytes"],
        "misc_bytes": told["misc_bytes"],
        "wrong_parameters": len(wrong),
        "prepare_s": round(prepare_s, 2),
        "first_ms": round(milliseconds[0], 1),
        "ms": round(statistics.median(milliseconds[1:]), 1),
        "all_ms": [round(ms, 1) for ms in milliseconds],
        "called_ms": round(statistics.median(called[1:]), 1),
    }


def in_flight(llm: Any, store: str, ctas: int) -> dict[str, Any]:
    """Tokens per second beside refits and without, with one number of CTAs."""
    from vllm import SamplingParams

    options = whole_model.options_of(f"ctas-{ctas}", "direct", ctas=ctas)
    more = {"generate_while_mixed": True, "connect_timeout_s": whole_model.CONNECT_S}
    llm.collective_rpc("connect_refit", kwargs={"store": store, **more, **options})
    llm.collective_rpc("refit", args=(1,))
    llm.collective_rpc("live_refit_in_flight", args=(whole_model.REFITS_IN_FLIGHT, whole_model.PAUSE_S))
    prompts = [{"prompt_token_ids": [(7 * place + 13 * number) % 1000 for place in range(16)]} for number in range(64)]
    sampling = SamplingParams(temperature=1.0, max_tokens=whole_model.TOKENS, ignore_eos=True, detokenize=False)
    llm.generate(prompts, sampling, use_tqdm=False)
    seen = llm.collective_rpc("live_steps")[0]
    llm.collective_rpc("close_refit")
    without, during = whole_model.speeds(seen["steps"], seen["refits"], whole_model.SEQUENCES)
    lasted = [stop - start for start, stop in seen["refits"]]
    return {
        "ctas": ctas,
        "tokens_per_s_without": round(without),
        "tokens_per_s_during": round(during),
        "refit_ms": round(statistics.median(lasted) * 1e3, 1),
        "refits": len(lasted),
    }


if __name__ == "__main__":
    sys.exit(main())
