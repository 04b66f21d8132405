"""The newest Megatron-Bridge and vLLM side by side: what both register, and plans from traces of both (`make test-newest`)."""

from __future__ import annotations

from pathlib import Path

import pytest
from helpers.traced_cases import NEWEST_FAMILIES, NEWEST_FULL, NEWEST_QUICK, REFUSED, arguments
from helpers.validating import OPTIONS, assert_golden
from helpers.zoo_newest import IS_NEWEST, NEWEST_MESHES

from mcore_reshard.planner.layout.mesh import TrainMesh, parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.validation.trainer.bridge_models import BUILT, NOT_IN_VLLM, UNTRIED
from mcore_reshard.validation.trainer.build import prepare

if not IS_NEWEST:
    pytest.skip("needs Megatron-Bridge 0.6: make test-newest", allow_module_level=True)

from live_refits import refit as refit_workers
from test_draft_models import generate

from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.proof.prove import prove
from mcore_reshard.planning import read_traced_request
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.errors import BuildError
from mcore_reshard.validation.offline_traces import trace_offline
from mcore_reshard.validation.runner import ValidationRequest, validate


@pytest.fixture(scope="module", autouse=True)
def both() -> None:
    prepare()  # once, so that every forked process finds both imported
    vllm_engine.prepare()


def test_every_architecture_of_the_newest_bridge_is_listed() -> None:
    from megatron.bridge.models.conversion.model_bridge import get_model_bridge

    registered = {name if isinstance(name, str) else name.__name__ for name in get_model_bridge._exact_types}
    assert registered == set(BUILT) | set(UNTRIED)
    assert len(registered) == len(BUILT) + len(UNTRIED) == 58


def test_vllm_registers_all_but_two_of_them() -> None:
    from vllm.model_executor.models.registry import ModelRegistry

    assert {*BUILT, *UNTRIED}.difference(ModelRegistry.get_supported_archs()) == set(NOT_IN_VLLM)


def test_a_built_architecture_is_that_of_its_config() -> None:
    named = {load_config(config)["architectures"][0] for config in BUILT.values()}
    assert named == BUILT.keys() - {"KimiK2ForCausalLM"}  # published as DeepseekV3ForCausalLM


_CENTERED = "decoder.layers.{layer}.self_attention.out_norm.weight: aten.sub_.Tensor at megatron/bridge/models/conversion/param_m"
_REPEATED = "decoder.layers.{layer}.self_attention.linear_qkv.weight: elements that are repeated"  # the gate of a head
# Beginnings of the reasons for which parameters go by misc.
MISC = {
    "tiny-ernie4.5-moe": [],
    "tiny-glm4.7-flash": [],
    "tiny-ling": [],
    "tiny-mimo": [],
    "tiny-mimo-v2-flash": [],
    "tiny-minimax-m2": [],
    "tiny-nemotron-3-latent-moe": ["model.layers.{layer}.mixer.A: aten.neg.default at vllm/model_executor/"],
    "tiny-qwen3.5": [_CENTERED],
    "tiny-qwen3.5-moe": [_CENTERED],
    "tiny-step3.5": [*[_REPEATED] * 4, *[_REPEATED] * 2],
}
WITHOUT_PLAN = {
    "tiny-glm5": "vLLM's CPU platform has no sparse attention",
}
MESHES = [("tp=2", "tp=2"), ("tp=2,ep=2,etp=1", "tp=2,ep=2")]
CASES = [(name, *meshes) for name in MISC for meshes in MESHES if name not in ("tiny-mimo", "tiny-qwen3.5")]
CASES += [(name, *MESHES[0]) for name in ("tiny-mimo", "tiny-qwen3.5")]


@pytest.mark.parametrize(("name", "train", "gen"), CASES)
def test_a_model_is_planned_from_traces_of_both(name: str, train: str, gen: str) -> None:
    meshes = parse_train_mesh(train), parse_gen_mesh(gen)
    plan = plan_traced(trace_offline(load_config(name), *meshes).layouts("vllm"), *meshes, model=name)
    assert prove(plan).ok
    reasons = [group.reason for group in plan.misc]
    assert len(reasons) == len(MISC[name])
    assert all(reason.startswith(start) for reason, start in zip(reasons, MISC[name], strict=True))


def test_every_tiny_model_is_planned_or_says_why_not() -> None:
    assert set(MISC) | set(WITHOUT_PLAN) == set(NEWEST_MESHES)


def refit(family: str, mesh: str) -> None:
    request = read_traced_request(family, *arguments(family, mesh))
    report = validate(ValidationRequest(request, options=OPTIONS, engine="vllm", refits=3))
    assert_golden(report)
    assert len(report.refits) == 3 and "megatron-bridge 0.6" in report.source


@pytest.mark.parametrize(("family", "mesh"), NEWEST_QUICK)
def test_refit_equals_golden(family: str, mesh: str) -> None:
    refit(family, mesh)


@pytest.mark.slow
@pytest.mark.parametrize(("family", "mesh"), sorted({*NEWEST_FULL} - {*NEWEST_QUICK}))
def test_refit_equals_golden_everywhere(family: str, mesh: str) -> None:
    if mesh in REFUSED.get(family, ()):
        with pytest.raises(BuildError):
            refit(family, mesh)
    else:
        refit(family, mesh)


def test_every_tiny_model_is_refitted() -> None:
    assert {*NEWEST_FAMILIES} == {*NEWEST_MESHES}


@pytest.mark.parametrize(("name", "tensors"), [("deepseek-v3", 18), ("glm4.7-flash", 18), ("mimo", 11)])
def test_prediction_layers_reach_the_draft_model(name: str, tensors: int, tmp_path: Path) -> None:
    """DeepSeek-V3 has rules, which give way to traces. MiMo's layer goes by misc: vLLM gives it another number."""
    fields = {"num_nextn_predict_layers": 1}
    misc, engines = refit_workers(name, TrainMesh(tp=2), GenSizes(tp=2), "tp=2", tmp_path, generate, **fields)
    assert engines == [(tensors, [], [])] * 2
    assert bool(misc[0]) == (name == "mimo")
