"""Speculative decoding with the model's own prediction layers: real trainers with them, vLLM's real draft models, every byte."""

from __future__ import annotations

import json
import warnings
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from checkpoints import tiny
from helpers.assembled import hf_tensors, wrong_tensors
from live_refits import Tensors, refill, refit, refits, same_bytes, shapes_by_rules, worker_of

from mcore_reshard.engines.vllm.draft import PREFIX, draft_of, load_both, own_tensors, trace_draft
from mcore_reshard.engines.vllm.model import local_tensors
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.engine.vllm_engine import build_engine_with_draft
from mcore_reshard.validation.tiny import checkpoint_shapes, payload


def generate(rank: int, sizes: GenSizes, folder: Path, address: str) -> tuple[int, list[str], list[str]]:
    """How many tensors of the draft were compared, which of all differ from what the loaders make of golden; and warnings."""
    model, proposer = build_engine_with_draft(folder / "1", sizes, rank)
    draft = proposer.model

    def tensors() -> Tensors:
        return local_tensors(model) | own_tensors(draft, model)

    def load(golden: Tensors) -> Tensors:
        model.load_weights(iter(golden.items()))  # type: ignore[operator]
        if worker.refit_rank._draft is not None:
            draft.load_weights(iter(golden.items()))
        return tensors()

    worker = worker_of(proposer.vllm_config, model, drafter=proposer)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        differing = [*refits(worker, tensors, folder, address, load)]
    warned = [str(warning.message) for warning in caught if "draft" in str(warning.message)]
    return sum(name.startswith(PREFIX) for name in tensors()), differing, warned


_MTP = {"num_nextn_predict_layers": 1}
# case -> meshes, changed fields of the tiny config, and how many tensors of the draft each engine rank has
CASES = {
    "glm4-moe": (TrainMesh(tp=2), GenSizes(tp=2), "tp=2", {}, 17),
    "glm4-moe over stages": (TrainMesh(pp=2, layers=(2, 1)), GenSizes(tp=2), "tp=2", {}, 17),
    "glm4-moe over experts": (TrainMesh(ep=2, dp=2), GenSizes(tp=2, ep=2), "tp=2,ep=2", {}, 17),
    "qwen3-next": (TrainMesh(tp=2), GenSizes(tp=2), "tp=2", _MTP, 16),
    "qwen3-next over experts": (TrainMesh(tp=2, ep=2), GenSizes(tp=2), "tp=2", _MTP, 16),
}
_QUICK = "glm4-moe"


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * (case != _QUICK)) for case in CASES])
def test_draft_models_get_the_trainers_prediction_layers(case: str, tmp_path: Path) -> None:
    mesh, sizes, gen, fields, count = CASES[case]
    _, engines = refit(case.partition(" ")[0], mesh, sizes, gen, tmp_path, generate, **fields)
    assert engines == [(count, [], [])] * sizes.world


def test_a_draft_model_whose_layers_the_trainer_lacks_stays_and_says_so(tmp_path: Path) -> None:
    """Megatron-Bridge 0.3 builds DeepSeek-V3 without prediction layers; its rules give way to traces all the same."""
    misc, engines = refit(
        "deepseek-v3", TrainMesh(tp=2), GenSizes(), "tp=1", tmp_path, generate, num_hidden_layers=2, **_MTP
    )
    assert misc == [[], []]
    ((count, wrong, warned),) = engines
    assert count == 18 and wrong == []
    (said,) = warned
    assert said.startswith("refits leave the draft model of this engine as it is: the trainer sends none of its layers")


@pytest.mark.parametrize("sizes", [GenSizes(tp=2), GenSizes(tp=2, ep=2)], ids=str)
def test_traces_of_deepseeks_draft_model_say_what_its_loader_does(sizes: GenSizes, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("deepseek-v3", **_MTP)))
    data = dict(payload(shapes_by_rules(tiny("deepseek-v3", **_MTP)), 1))
    model, proposer = build_engine_with_draft(tmp_path, sizes, 1)
    draft = proposer.model
    trace = trace_draft(draft, model, hf_tensors(data))
    assert trace is not None and not [tensor.tensor.name for tensor in trace.tensors if tensor.computed]
    draft.load_weights(iter(data.items()))
    assert wrong_tensors(trace, data, own_tensors(draft, model)) == []
    without = {name: tensor for name, tensor in hf_tensors(data).items() if ".layers.4." not in name}
    assert trace_draft(draft, model, without) is None


def test_parameters_that_both_models_share_are_the_main_models(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(tiny("glm4-moe")))
    model, proposer = build_engine_with_draft(tmp_path, GenSizes(), 0)
    of_draft = dict(proposer.model.named_parameters())
    own = own_tensors(proposer.model, model)
    assert {name.removeprefix(PREFIX) for name in own} < of_draft.keys()
    left = {name for name in of_draft if PREFIX + name not in own}
    assert left == {"model.embed_tokens.weight", "model.layers.3.shared_head.head.weight"}


@pytest.mark.parametrize(
    ("method", "model", "ours", "said"),
    [
        ("mtp", "target", True, ""),
        ("mtp", "another", False, "the method 'mtp' has a checkpoint of its own"),
        ("eagle3", "another", False, "the method 'eagle3' has a checkpoint of its own"),
    ],
)
def test_only_prediction_layers_of_the_model_itself_are_the_trainers(
    method: str, model: str, ours: bool, said: str
) -> None:
    draft = torch.nn.Linear(1, 1)
    speculative = SimpleNamespace(method=method, draft_model_config=SimpleNamespace(model=model))
    config = SimpleNamespace(speculative_config=speculative, model_config=SimpleNamespace(model="target"))
    for runner in (
        SimpleNamespace(get_draft_model=lambda: draft),
        SimpleNamespace(drafter=SimpleNamespace(model=draft)),
    ):
        found, reason = draft_of(runner, config)
        assert (found is draft) == ours and said in reason
    assert draft_of(SimpleNamespace(drafter=SimpleNamespace()), config) == (None, "")  # n-grams have no model


def test_whole_tensors_reach_both_models(tmp_path: Path) -> None:
    """The misc route: the draft's loader gets its own tensors, and none that are not its own."""
    (tmp_path / "config.json").write_text(json.dumps(tiny("glm4-moe")))
    model, proposer = build_engine_with_draft(tmp_path, GenSizes(), 0)
    data, draft = dict(payload(checkpoint_shapes(tiny("glm4-moe")), 1)), proposer.model
    load_both(model, draft, {name for name in data if ".layers.3." in name}, iter(data.items()))
    arrived = {name: tensor.clone() for name, tensor in own_tensors(draft, model).items()}
    refill(own_tensors(draft, model))
    draft.load_weights(iter(data.items()))
    assert arrived and not [name for name, t in own_tensors(draft, model).items() if not same_bytes(t, arrived[name])]
