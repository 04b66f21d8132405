"""Refits into vLLM engines that generate, on this machine's GPUs, judged against engines that loaded the same weights.

    python tools/validate_live.py --out tools/results/live-x1.json

It needs vLLM (a plain `pip install vllm`), Megatron-Core and Megatron-Bridge in one environment. Where Transformer Engine
is there too, it holds the trainers, and some keep their weights in FP8. Of each case:

1. Two random checkpoints are written, as Hugging Face has them; for an FP8 engine also as vLLM quantizes them, or for an
   FP8 trainer so that Transformer Engine quantizes them to the same bytes.
2. Two engines load one each, and answer five prompts greedily.
3. A third engine starts with random weights. A Megatron-Core trainer refits it with checkpoints 1, 2 and 1 again. Before
   each refit its weights are poisoned; after each it answers the same prompts. The engine's side of a refit is called through
   RefitWorker or vLLM's own weight transfer. Some cases let the engine sleep (level 2) before the last refit, or keep a
   prefix cache that is reset after each.

After every refit the CRC-32 of every tensor of every worker and all tokens must equal those of the engine that loaded the
checkpoint, and in eager mode every log-probability too, bit for bit. Answers after refit 3 must be those after refit 1.
Exit code 1 if something differs or a case failed. Results are written as they come.

`LIVE_DEVICE=cpu` rehearses on a CPU with the vLLM of tools/make_vllm_cpu.sh: everything but answers.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from concurrent.futures import as_completed
from dataclasses import fields
from datetime import date
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parent)]

from bench import machine  # noqa: E402
from bench.results import line_by_line  # noqa: E402
from live.cases import Case, cases_on  # noqa: E402
from live.launch import Launcher  # noqa: E402

PACKAGES = ("vllm", "megatron-core", "megatron-bridge", "transformer-engine", "transformers", "nccl4py", "triton")
WHAT = (
    "refits of real Megatron-Core models into vLLM engines that generate, against engines that loaded the checkpoints"
)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", nargs="+", metavar="TEXT", help="cases whose names have one of these")
    parser.add_argument("--gpus", type=int, metavar="N", help="cases of N GPUs (default: of each number that fits)")
    parser.add_argument("--jobs", type=int, default=max(1, (os.cpu_count() or 1) // 4), help="cases at a time")
    parser.add_argument("--limit-s", type=float, default=600.0, metavar="S", help="of one case (default: 600)")
    parser.add_argument("--folder", type=Path, help="for checkpoints and logs (default: a temporary one)")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        return run(arguments, arguments.folder or Path(temporary))


def run(arguments: argparse.Namespace, folder: Path) -> int:
    """Run the chosen cases; the exit code."""
    rehearsal = os.environ.get("LIVE_DEVICE") == "cpu"
    gpus = [] if rehearsal else machine.gpus()
    numbers = [arguments.gpus] if arguments.gpus else range(1, (2 if rehearsal else len(gpus)) + 1)
    fp8_trainers = rehearsal or find_spec("transformer_engine") is not None
    cases = [case for number in numbers for case in cases_on(number, fp8_trainers=fp8_trainers)]
    chosen = [case for case in cases if not arguments.only or any(text in case.name for text in arguments.only)]
    if not chosen:
        print("no case fits: see tools/live/cases.py")
        return 1
    report: dict[str, Any] = {"what": WHAT, **about(gpus), "cases": []}
    launcher = Launcher(folder, arguments.jobs, arguments.limit_s)
    for done in as_completed([launcher.start(case) for case in chosen]):
        report["cases"].append(verdict := done.result())
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(line_by_line(report, "cases"))
        print(outcome(verdict), flush=True)
    bad = [verdict for verdict in report["cases"] if verdict.get("error") or verdict["problems"]]
    print(f"{len(report['cases'])} cases, {len(bad)} bad")
    return 1 if bad else 0


def about(gpus: list[tuple[str, str]]) -> dict[str, Any]:
    """The date, the machine and what runs on it."""
    hardware = f"{len(gpus)} x {gpus[0][0]}" if gpus else "no GPU: a rehearsal, without answers"
    driver = {"driver": gpus[0][1]} if gpus else {}
    return {"date": date.today().isoformat(), "hardware": hardware, **driver, "versions": machine.versions(*PACKAGES)}


def outcome(verdict: dict[str, Any]) -> str:
    """One line of one case."""
    name = Case(**{field.name: verdict[field.name] for field in fields(Case)}).name
    if "error" in verdict:
        return f"{name}: ERROR {verdict['error']}"
    if verdict["problems"]:
        return f"{name}: DIFFERENT: {'; '.join(verdict['problems'])}"
    rows = verdict["refits"]
    logprobs = "/".join(str(row["equal_logprobs"]) for row in rows)
    milliseconds = ", ".join(f"{row['seconds'] * 1e3:.0f}" for row in rows)
    first = rows[0]
    megabytes = f"{first['bytes'] / 1e6:.0f} MB"
    return (
        f"{name}: equal: {first['tensors']} tensors, {first['answers']} answers, log-probabilities of {logprobs};"
        f" {verdict['transformer_engine']}, by {first['transport']}, {megabytes} in {milliseconds} ms;"
        f" {verdict['whole_case_s']} s"
    )


if __name__ == "__main__":
    sys.exit(main())
