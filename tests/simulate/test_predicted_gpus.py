"""Refits measured on the GPUs of one host: one workload calibrates the simulation, which predicts all others."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import predict_gpus
import pytest

from mcore_reshard.planner.topology.topology import MACHINES

RESULTS = Path(predict_gpus.__file__).parent / "results"
RECORDED = json.loads((RESULTS / "predicted-gpus.json").read_text())
ONE_GPU = "1 x NVIDIA H200"
TWO_GPUS = "2 x NVIDIA H200"


def file_of(folder: Path, rows: list[dict[str, Any]], hardware: str = TWO_GPUS, shared: str = "") -> Path:
    """A file as bench_refit writes it, of small models: `rows` have workload, method and ms."""
    one = hardware.startswith("1 x") or not shared
    mesh = (
        {"train": "tp=1", "gen": "tp=1", "ranks": "1 -> 1"}
        if one
        else {"train": "dp=2", "gen": "tp=2", "ranks": "2 -> 2"}
    )
    dtypes = {"moe-bf16-fp8": "bf16 -> fp8"}
    workloads = {
        row["workload"]: {
            "what": "", "model": "tiny-llama", "layers": "all", **mesh,
            "dtypes": dtypes.get(row["workload"], "bf16 -> bf16"),
        }
        for row in rows
    }  # fmt: skip
    file = folder / f"{len([*folder.iterdir()])}.json"
    header = {"date": "2026-01-01", "hardware": hardware, "workloads": workloads}
    file.write_text(json.dumps({**header, **({"shared": shared} if shared else {}), "rows": rows}))
    return file


def row(workload: str, ms: float, method: str = "direct") -> dict[str, Any]:
    return {"workload": workload, "method": method, "ms": ms}


def test_recorded_refits_took_about_as_long_as_predicted() -> None:
    assert predict_gpus.far_off(RECORDED["rows"]) == []
    assert sum("ratio" in each and not each["calibrates"] for each in RECORDED["rows"]) > 10


def test_a_prediction_that_is_far_off_is_named() -> None:
    wrong = [{**each, "ratio": 1.2} for each in RECORDED["rows"] if "ratio" in each][:1]
    assert predict_gpus.far_off(wrong) == [f"{wrong[0]['file']}: {wrong[0]['workload']} by {wrong[0]['method']}: +20%"]


@pytest.mark.long
def test_recorded_predictions_are_those_of_today() -> None:
    files = [RESULTS / name for name in dict.fromkeys(each["file"] for each in RECORDED["rows"])]
    assert json.loads(json.dumps(predict_gpus.compare(files))) == RECORDED, "run tools/predict_gpus.py anew"


def test_one_workload_calibrates_and_the_others_are_predicted(tmp_path: Path) -> None:
    apart = file_of(
        tmp_path, [row("moe-ep-tp", 2.0), row("dense-tp-tp", 4.0), row("dense-tp-tp", 9.0, "direct:ctas=32")]
    )
    rows = predict_gpus.compare([apart])["rows"]
    assert [each["calibrates"] for each in rows] == [True, False]
    assert [each["ratio"] for each in rows] == pytest.approx([1.0, 0.5], rel=1e-3)


def test_half_of_the_bytes_come_from_the_own_gpu_meanwhile(tmp_path: Path) -> None:
    """Memory is far faster than NVLink here, so that only what crosses NVLink counts."""
    apart, one = (
        file_of(tmp_path, [row("moe-ep-tp", 2.0)]),
        file_of(tmp_path, [row("moe-ep-tp", 0.02)], ONE_GPU, "both sides"),
    )
    shared = file_of(tmp_path, [row("dense-dp-tp", 0.5)], shared="every GPU has a rank of both sides")
    *_, last = predict_gpus.compare([apart, one, shared])["rows"]
    assert last["gpus"] == {"train": (0, 1), "gen": (0, 1)}
    assert 0.2 < last["predicted_ms"] < 1.1  # each rank wants half of the model, and some of it from the other GPU


def test_without_a_refit_on_one_gpu_its_memory_is_the_presets(tmp_path: Path) -> None:
    for kind in ("H100", "H200"):
        file = file_of(tmp_path, [row("dense-tp-tp", 1.0)], f"1 x NVIDIA {kind}", "both sides")
        machines, used = predict_gpus.calibrated(predict_gpus.rows_of(file), "moe-ep-tp")
        assert (machines["direct"], used) == (MACHINES[f"{kind.lower()}-8"], [])


def test_casts_over_nccl_are_left_out_with_the_reason(tmp_path: Path) -> None:
    rows = [row("moe-ep-tp", 2.0, "nccl"), row("moe-bf16-fp8", 1.0, "nccl")]
    *_, last = predict_gpus.compare([file_of(tmp_path, rows)])["rows"]
    assert "all scales" in last["not_predicted"] and "ratio" not in last


@pytest.mark.parametrize(
    ("rows", "hardware", "shared", "missing"),
    [
        ([("dense-tp-tp", "direct")], TWO_GPUS, "", "measure moe-ep-tp by direct on GPUs that no ranks share"),
        ([("moe-ep-tp", "direct"), ("dense-tp-tp", "nccl")], TWO_GPUS, "", "measure moe-ep-tp by nccl"),
        ([("dense-tp-tp", "direct")], "3 processes", "", "says no number of GPUs"),
    ],
)  # fmt: skip
def test_what_is_missing_is_said(
    tmp_path: Path, rows: list[tuple[str, str]], hardware: str, shared: str, missing: str
) -> None:
    file = file_of(tmp_path, [row(workload, 1.0, method) for workload, method in rows], hardware, shared)
    with pytest.raises(predict_gpus.RowsError, match=missing):
        predict_gpus.compare([file])
