"""NeMo-RL's synchronizer, mixins and worker extension around real models: what it says is synchronized is golden's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.processes import run_processes

CHECKOUT = os.environ.get("MCORE_RESHARD_NEMO_RL", "")
if not Path(CHECKOUT, "nemo_rl").is_dir():
    pytest.skip("set MCORE_RESHARD_NEMO_RL to a checkout of NVIDIA-NeMo/RL", allow_module_level=True)
if missing := [name for name in ("ray", "vllm", "megatron.bridge", "uvicorn", "pynvml") if find_spec(name) is None]:
    pytest.skip(f"NeMo-RL's parts need {', '.join(missing)}: see docs/integrations/nemo_rl.md", allow_module_level=True)

HERE = Path(__file__).parent
COMPILED = Path(tempfile.gettempdir(), "mcore-reshard-compiled")  # eight processes import the same large packages
STEPS, LIMIT_S = 2, 380
ENVIRONMENT = {
    "VLLM_TARGET_DEVICE": "cpu", "VLLM_CPU_KVCACHE_SPACE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_LOGGING_LEVEL": "ERROR", "RAY_AUTH_MODE": "disabled",
    "VLLM_ALLOW_INSECURE_SERIALIZATION": "1", "OMP_NUM_THREADS": "1", "RAY_DEDUP_LOGS": "0",
    "RAY_raylet_start_wait_time_s": "120",
    "PYTHONPYCACHEPREFIX": str(COMPILED), "PYTHONDONTWRITEBYTECODE": "",
}  # fmt: skip


def loaded_by_vllm(rank: int, folder: Path, tp: int, step: int) -> dict[str, torch.Tensor]:
    """What the loader of a vLLM rank makes of Megatron-Bridge's export, in a process of its own."""
    from mcore_reshard.engines.vllm.model import load_weights, local_tensors
    from mcore_reshard.validation.engine.vllm_engine import build_engine

    model = build_engine(folder / "checkpoint", GenSizes(tp=tp), rank)
    load_weights(model, load_file(folder / f"golden{step}.safetensors").items())
    return {name: tensor.clone() for name, tensor in local_tensors(model).items()}


@pytest.mark.parametrize(
    ("engines", "tp", "release"), [(1, 2, False), pytest.param(2, 1, True, marks=pytest.mark.slow)]
)
def test_what_nemo_rl_synchronizes_is_golden(tmp_path: Path, engines: int, tp: int, release: bool) -> None:
    """One engine of two ranks, which the policy then leaves; and two engines that meet anew for every refit."""
    tiny.write_checkpoint(load_config("tiny-qwen3"), tmp_path / "checkpoint", 1)
    paths = [HERE.parents[1], HERE.parent, HERE, HERE.parent / "engine", CHECKOUT]
    environment = {
        **os.environ,
        **ENVIRONMENT,
        "PYTHONPATH": os.pathsep.join(map(str, paths)),
        "RELEASE": str(+release),
    }
    command = [sys.executable, str(HERE / "nemo_rl_parts.py"), str(tmp_path), *map(str, (engines, tp, STEPS))]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    assert ran.returncode == 0, ran.stdout[-3000:] + ran.stderr[-6000:]
    seen = json.loads((tmp_path / "seen.json").read_text())
    assert seen["synchronizer"] == "CheckpointEngineWeightSynchronizer"
    if release:
        assert seen["stale"] == [False] * STEPS
    else:
        assert seen["stale"] == [*[False] * STEPS, True]
        assert "this policy rank is in no session" in seen["error"]
    for step in range(1, STEPS + 1):
        for rank, expected in enumerate(run_processes(tp, loaded_by_vllm, (tmp_path, tp, step), timeout_s=200)):
            for engine in range(engines):
                arrived = load_file(tmp_path / f"engine{engine}-{step}-{rank}.safetensors")
                assert arrived.keys() == expected.keys()
                assert [name for name, tensor in expected.items() if not tensor.equal(arrived[name])] == []
