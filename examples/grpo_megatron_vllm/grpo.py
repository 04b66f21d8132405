"""Train a policy from scratch with GRPO: Megatron-Core learns, vLLM generates, a refit after each step.

    CUDA_VISIBLE_DEVICES=0,1 python grpo.py --engine-gpus 1,0 --out run.json     trainer on GPU 0, engine on GPU 1
    CUDA_VISIBLE_DEVICES=0 python grpo.py --out run.json                         both on one

`--refits off` leaves the engine with the first weights, and `--refits all-but-one` puts one tensor back after each refit:
the curve shows at once that the engine does not have the policy's weights. `--restart-at 60` kills the engine at that step
and starts another one.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import suppress
from multiprocessing import Pipe
from pathlib import Path
from typing import Any

import policy
import task
import torch

import mcore_reshard as mr
from mcore_reshard.session.store_server import serve_store

PROMPTS, GROUP = 32, 16
HELD_BACK = "model.layers.0.self_attn.qkv_proj.weight"
REFITS = ("on", "off", "all-but-one")
ENGINE = Path(__file__).with_name("rollout.py")


class Engine:
    """The engine's process, and calls to it. vLLM starts processes below it, which `kill` takes along."""

    def __init__(self, script: Path, folder: Path, gpu: str) -> None:
        self._pipe, theirs = Pipe()
        command = [sys.executable, str(script), str(folder), str(theirs.fileno())]
        with theirs, (folder / "engine.log").open("ab") as log:
            self._process = subprocess.Popen(
                command,
                env={**os.environ, "CUDA_VISIBLE_DEVICES": gpu},
                pass_fds=(theirs.fileno(),),
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def ask(self, method: str, *arguments: Any) -> None:
        """Begin a call; `answer` ends it."""
        self._pipe.send((method, arguments))

    def answer(self) -> Any:
        """Raises EOFError where the engine has died."""
        answer, error = self._pipe.recv()
        if error is not None:
            raise RuntimeError(f"the engine: {error}")
        return answer

    def call(self, method: str, *arguments: Any) -> Any:
        self.ask(method, *arguments)
        return self.answer()

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()


def train(arguments: argparse.Namespace) -> dict[str, Any]:
    """One run: rewards, differences of log-probabilities and seconds, step by step."""
    device = torch.device(arguments.device)
    with tempfile.TemporaryDirectory() as temporary, serve_store() as store:
        folder = Path(temporary)
        (folder / "config.json").write_text(json.dumps(policy.HF_CONFIG))
        options = {"transport": arguments.transport, "timeout_s": 120.0}

        def started() -> Engine:
            engine = Engine(arguments.engine, folder, arguments.engine_gpus)
            engine.ask("connect", store.address, options)
            return engine

        engine = started()
        try:
            model = policy.build(arguments.seed, device)
            trainer = mr.megatron.connect(
                model, None, policy.HF_CONFIG, gen="tp=1", store=store.address, options=mr.Options(**options)
            )
            engine.answer()
            learner, generator = policy.Learner(model), torch.Generator().manual_seed(arguments.seed)
            curve: dict[str, list[float]] = {"reward": [], "difference": [], "refit_s": [], "step_s": []}
            for step in range(1, arguments.steps + 1):
                begin = time.perf_counter()
                if step == arguments.restart_at:
                    engine.kill()
                    engine = started()
                    engine.answer()
                refit(arguments.refits, step, trainer, engine, curve)
                asked = task.prompts(PROMPTS, generator)
                answers, sampled = map(torch.tensor, engine.call("generate", asked.tolist(), GROUP, task.ANSWER_TOKENS))
                asked = asked.repeat_interleave(GROUP, 0)
                reward = task.rewards(asked, answers)
                batch = [tensor.to(device) for tensor in (asked, answers, sampled, reward)]
                curve["difference"].append(round(learner.step(*batch, GROUP), 4))
                curve["reward"].append(round(float(reward.mean()), 4))
                curve["step_s"].append(round(time.perf_counter() - begin, 3))
                if step % 10 == 0:
                    print(f"step {step}: reward {curve['reward'][-1]:.3f}", flush=True)
            engine.ask("close")
            trainer.close()
            return curve
        finally:
            Path(f"{arguments.out}.engine.log").write_bytes((folder / "engine.log").read_bytes())
            engine.kill()


def refit(refits: str, step: int, trainer: Any, engine: Engine, curve: dict[str, list[float]]) -> None:
    """Give the engine the policy's weights, as far as the ablation lets it. The first refit is whole in all of them."""
    if refits == "off" and step > 1:
        return
    engine.ask("refit", step)
    trainer.refit(step)
    curve["refit_s"].append(round(engine.answer(), 4))
    if refits == "all-but-one":
        engine.call("keep_tensor" if step == 1 else "put_tensor_back", HELD_BACK)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--refits", choices=REFITS, default="on")
    parser.add_argument(
        "--restart-at", type=int, metavar="STEP", help="kill the engine before this step, and start another"
    )
    parser.add_argument("--device", default="cuda:0", help="of the trainer (default: cuda:0)")
    parser.add_argument(
        "--engine-gpus", default="0", help="as in CUDA_VISIBLE_DEVICES; the engine takes the first (default: 0)"
    )
    parser.add_argument("--transport", default="auto")
    parser.add_argument(
        "--engine", type=Path, default=ENGINE, help="the script of the engine's process (default: rollout.py)"
    )
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    arguments = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(1))  # the engine ends with this process
    curve = train(arguments)
    about = {name: getattr(arguments, name) for name in ("seed", "refits", "restart_at", "steps", "transport")}
    arguments.out.write_text(json.dumps({**about, **curve}) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
