"""The benchmark of a change of replicas runs on a CPU, and says what was kept."""

from __future__ import annotations

import json
from pathlib import Path

import bench_replicas as bench


def test_a_change_of_replicas_is_measured_with_and_without_what_is_kept(tmp_path: Path) -> None:
    out = tmp_path / "replicas.json"
    arguments = ["--device", "cpu", "--transport", "gloo", "--model", "tiny-qwen3-moe", "--parts", "1", "--narrow", "1"]
    assert bench.main([*arguments, "--timeout-s", "30", "--out", str(out)]) == 0
    kept, anew = json.loads(out.read_text())["sessions"]
    for session in (kept, anew):
        assert [refit["what"] for refit in session["refits"]] == [*bench.REFITS.values()]
        assert all(refit["refit_s"] > 0 for refit in session["refits"])
    bound = [[refit["counts"]["train"]["tensors bound"] for refit in each["refits"]] for each in (kept, anew)]
    assert len({*bound[0]}) == 1, "bound once"
    assert bound[1][0] < bound[1][2] < bound[1][3], "bound again for each change"
