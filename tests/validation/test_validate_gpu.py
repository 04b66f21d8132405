"""Golden against real with transports for GPUs: real Megatron-Core models, of real Transformer Engine where installed.

The cases run several at a time in one process beside the tests, since ranks are forked and CUDA does not survive that.
Each family and each mesh that fits the GPUs comes at least once for each transport. `make validate-gpu` runs them all.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from helpers.gpu import has_transformer_engine, needs_gpus

pytest.importorskip("megatron", reason="needs the megatron extra")

import validate_gpus
from validate_gpus import TRANSPORTS, cases_on

from mcore_reshard.kernels.transports.registry import transports

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

GPUS = torch.cuda.device_count()
CASES = [(transport, *case) for transport in TRANSPORTS for case in cases_on(GPUS, transport, few=True)]


@pytest.fixture(scope="module")
def outcomes(tmp_path_factory):
    if missing := [
        str(each.unavailable_reason()) for each in transports() if each.name in TRANSPORTS and each.unavailable_reason()
    ]:
        pytest.skip("; ".join(missing))
    out = tmp_path_factory.mktemp("validate") / "outcomes.json"
    command = [sys.executable, str(Path(validate_gpus.__file__)), "--few", "--refits", "2", "--out", str(out)]
    paths = [str(Path(__file__).parents[2]), *filter(None, [os.environ.get("PYTHONPATH")])]  # a plain checkout will do
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    ran = subprocess.run(command, capture_output=True, text=True, timeout=1800, env=environment)
    assert out.exists(), ran.stderr[-2000:]
    report = json.loads(out.read_text())
    told = ({**case, "source": report["source"]} for case in report["cases"])
    return {(case["transport"], case["family"], case["mesh"]): case for case in told}


@pytest.mark.parametrize(("transport", "family", "mesh"), CASES)
def test_refit_on_gpus_equals_golden(outcomes, transport, family, mesh):
    case = outcomes[transport, family, mesh]
    if "refused" in case:
        pytest.skip(case["refused"])
    assert case.get("error") is None, case["error"]
    assert (case["wrong"], case["refits"]) == (0, 2), case.get("first_wrong")
    assert case["tensors"] > 0
    assert ("stand-in" not in case["source"]) == has_transformer_engine(), case["source"]


@pytest.mark.parametrize("transport", [
    "direct", "auto", pytest.param("nccl", marks=needs_gpus(2)),
])  # fmt: skip
def test_the_command_line_validates_on_gpus(transport):
    command = [sys.executable, "-m", "mcore_reshard", "validate", "tiny-qwen3-moe", "--train", "tp=1", "--gen", "tp=1"]
    ran = subprocess.run([*command, "--transport", transport, "--json"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 0, ran.stderr[-2000:]
    report = json.loads(ran.stdout)
    assert report["ok"] and len(report["refits"]) == 3
    if transport != "auto":
        assert report["transport"] == transport


def test_more_ranks_than_gpus_are_refused_for_nccl():
    train = f"dp={GPUS}"
    command = [sys.executable, "-m", "mcore_reshard", "validate", "tiny-llama", "--train", train, "--gen", "tp=1"]
    ran = subprocess.run([*command, "--transport", "nccl"], capture_output=True, text=True, timeout=300)
    assert ran.returncode == 2
    assert f"NCCL needs a GPU for each rank: {GPUS + 1} ranks, {GPUS} here" in ran.stderr
