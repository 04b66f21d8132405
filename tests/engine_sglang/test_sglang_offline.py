"""Plans for SGLang that one machine makes without weights."""

from __future__ import annotations

from pathlib import Path

import pytest

from mcore_reshard.cli import main as cli
from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.proof.prove import prove
from mcore_reshard.validation.offline_traces import trace_offline
from mcore_reshard.validation.trainer.build import prepare


@pytest.fixture(scope="module", autouse=True)
def megatron(sglang: None) -> None:
    prepare()  # once, so that every forked world finds it imported


@pytest.mark.parametrize(
    ("name", "train", "gen"),
    [
        ("tiny-qwen3", "tp=2", "tp=2"),
        ("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,ep=2"),
        ("tiny-deepseek-v3", "tp=2,pp=2", "tp=2"),
        pytest.param("qwen3-30b-a3b", "tp=2,pp=2,ep=4,dp=2", "tp=4", marks=pytest.mark.slow),
    ],
)
def test_a_model_is_planned_from_traces_without_weights(name: str, train: str, gen: str) -> None:
    meshes = parse_train_mesh(train), parse_gen_mesh(gen)
    layouts = trace_offline(load_config(name), *meshes, engine="sglang").layouts("sglang")
    plan = plan_traced(layouts, *meshes, model=name)
    assert plan.engine == "sglang" and prove(plan).ok
    assert plan.misc == () and plan.excluded == ()


def test_the_command_line_plans_for_sglang(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "plan.json"
    meshes = ["--train", "tp=2,ep=2", "--gen", "tp=2", "--engine", "sglang", "--traced"]
    assert cli.main(["plan", "tiny-qwen3-moe", *meshes, "--out", str(path)]) == 0
    capsys.readouterr()
    assert cli.main(["explain", str(path), "model.layers.1.mlp.experts.2.up_proj.weight[3,5]"]) == 0
    assert "w13_weight" in capsys.readouterr().out
