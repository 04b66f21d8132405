"""A live model's config against its plan: fields that change what bytes mean, on real Megatron-Core models.

Gate and up that take turns are compared with what Megatron-Core's forward computes from such weights, because
Megatron-Bridge's export does not undo the turns.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.deliver import deliver
from helpers.quantized_standin import QuantizedStandIn
from helpers.trainers import mesh_label, run_trainers, same_bytes

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.megatron import MegatronBuild
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.trace_check import checkpoint_of, trace_faults
from mcore_reshard.trainers.megatron.connect import _choose_export
from mcore_reshard.trainers.megatron.model import local_tensors, unwrapped
from mcore_reshard.trainers.megatron.plan_refit import plan_refit
from mcore_reshard.trainers.megatron.plan_traced_refit import plan_traced_refit
from mcore_reshard.trainers.megatron.trace import trace_live
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine
from mcore_reshard.validation.trainer import build as trainer_module
from mcore_reshard.validation.trainer.build import Trainer, prepare

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)

Tensors = Mapping[str, torch.Tensor]
GEN = GenSizes(tp=2)


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    prepare()  # once, so that every forked world finds it imported


@pytest.fixture
def in_world(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a check on every rank of a trainer of one tiny model, and return what each rank returned."""
    return lambda config, mesh, check, *args: run_trainers(tmp_path, config, mesh, check, *args)


def _config_of(trainer: Trainer) -> Any:
    return unwrapped(trainer.model_chunks[0]).config


def _planned_error(trainer: Trainer, config: Mapping[str, Any], gen_dtype: str | None = None) -> str:
    """What `plan_refit` raises; empty where it plans."""
    try:
        plan_refit(config, trainer.model_chunks, GenMesh(tp=2), gen_dtype=gen_dtype)
    except ValueError as error:
        return str(error)
    return ""


# --- fields that must be those of the HF config


def _errors_by_field(trainer: Trainer, _: Path, config: Mapping[str, Any], fields: Mapping[str, Any]) -> dict[str, str]:
    """The error of each field, set alone on the last rank; under "" that of the model as it was built."""
    live, last = _config_of(trainer), dist.get_rank() == dist.get_world_size() - 1
    errors = {"": _planned_error(trainer, config)}
    for field, wrong in fields.items():
        holder = unwrapped(trainer.model_chunks[0]) if field.startswith("share_") else live
        built = getattr(holder, field)
        setattr(holder, field, wrong if last else built)
        errors[field] = _planned_error(trainer, config)
        setattr(holder, field, built)
    return errors


_EVERYWHERE = {
    "rotary_interleaved": True,
    "layernorm_zero_centered_gamma": True,
    "normalization": "LayerNorm",
    "attention_output_gate": True,
    "share_embeddings_and_output_weights": True,
    "num_attention_heads": 4,
}
_LATENT = dict.fromkeys(("q_lora_rank", "kv_lora_rank", "qk_head_dim", "qk_pos_emb_head_dim", "v_head_dim"), 4)
_MAMBA = dict.fromkeys(("mamba_num_heads", "mamba_head_dim", "mamba_num_groups", "mamba_state_dim"), 3)


@pytest.mark.parametrize(
    ("family", "fields"),
    [
        ("llama", _EVERYWHERE | {"num_query_groups": 2, "kv_channels": 16}),
        ("deepseek_v3", _EVERYWHERE | _LATENT),
        ("nemotron_h", _EVERYWHERE | _MAMBA | {"num_query_groups": 1, "kv_channels": 4}),
    ],
)
def test_a_field_that_differs_on_one_rank_is_named_on_every_rank(in_world, family: str, fields: dict) -> None:
    config = tiny.tiny_config(family)
    first, last = in_world(config, TrainMesh(pp=2), _errors_by_field, config, fields)
    assert first == last
    assert first.pop("") == ""
    for field, message in first.items():
        assert f"  {field} is {fields[field]}, planned is " in message
        assert "build the model from the HF config that the engine has" in message
        assert len(message.splitlines()) == 3, "no other field is named"


@pytest.mark.parametrize("family", tiny.TINY)
def test_models_as_megatron_bridge_builds_them_are_planned(in_world, family: str) -> None:
    import megatron.core

    if family == "deepseek_v3_nolora" and tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 17):
        pytest.skip("Megatron-Bridge has no mapping for the norm that newer Megatron-Core fuses into linear_q_proj")
    config = tiny.TINY[family]
    assert in_world(config, TrainMesh(), _errors_by_field, config, {}) == [{"": ""}]


def _all_at_once(trainer: Trainer, _: Path, config: Mapping[str, Any]) -> str:
    live = _config_of(trainer)
    live.rotary_interleaved = dist.get_rank() == 0
    live.layernorm_zero_centered_gamma = True
    live.moe_shared_expert_glu_interleave_size = 8
    mlp = unwrapped(trainer.model_chunks[0]).decoder.layers[0].mlp
    mlp.__class__ = type("TEFusedMLPWithGroupedLinear", (type(mlp),), {})  # megatron-core 0.19's
    return _planned_error(trainer, config)


def test_all_fields_are_named_at_once(in_world) -> None:
    config = tiny.tiny_config("deepseek_v3")
    first, second = in_world(config, TrainMesh(tp=2), _all_at_once, config)
    assert first == second
    assert [line.split(" ")[2] for line in first.splitlines()[1:-1]] == [
        "rotary_interleaved",
        "layernorm_zero_centered_gamma",
        "moe_shared_expert_glu_interleave_size",
        "use_grouped_gemm_for_dense_mlp",
    ]
    assert "ignores it, Megatron-Bridge's checkpoints follow it; set both or neither" in first


def _traced_errors(trainer: Trainer, _: Path, fields: Mapping[str, Any]) -> dict[str, str]:
    """As `_errors_by_field`, for a model that is planned from traces."""
    config, errors = _config_of(trainer), {}
    for field, wrong in fields.items():
        built = getattr(config, field)
        setattr(config, field, wrong if dist.get_rank() == 0 else built)
        with pytest.raises(ValueError) as told:
            plan_traced_refit("gemma2", trainer.bridge, trainer.model_chunks, GenMesh(), lambda _: pytest.fail("asked"))
        errors[field] = str(told.value)
        setattr(config, field, built)
    return errors


def test_a_model_without_rules_is_held_against_what_megatron_bridge_builds(in_world) -> None:
    fields = {
        "num_query_groups": 8,
        "kv_channels": 4,
        "layernorm_zero_centered_gamma": False,
        "rotary_interleaved": True,
    }
    first, second = in_world(load_config("tiny-gemma2"), TrainMesh(tp=2), _traced_errors, fields)
    assert first == second
    for field, message in first.items():
        assert f"  {field} is {fields[field]}, planned is " in message
        assert len(message.splitlines()) == 3, "no other field is named"


_FEWER_HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16}


@pytest.mark.parametrize(
    ("family", "built", "named"),
    [
        (
            "llama",
            _FEWER_HEADS,
            ["num_attention_heads is 4, planned is 8", "num_query_groups is 2", "kv_channels is 16"],
        ),
        (
            "llama_tied",
            {"tie_word_embeddings": False},
            ["share_embeddings_and_output_weights is False, planned is True"],
        ),
    ],
)
def test_a_model_of_the_same_names_and_shapes_from_another_config(
    in_world, family: str, built: dict, named: list
) -> None:
    """Binding alone finds nothing: every tensor that the plan reads is there, in its shape."""
    config = tiny.tiny_config(family)

    def check(trainer: Trainer, _: Path) -> str:
        model_parameters, build = parameters_from_config(config), MegatronBuild()
        bind(schedule_of(make_plan(model_parameters, TrainMesh(), GenMesh(), build=build), "train", 0), trainer.tensors)
        return _planned_error(trainer, config)

    (message,) = in_world(tiny.tiny_config(family, **built), TrainMesh(), check)
    assert all(part in message for part in named)
    assert len(message.splitlines()) == 2 + len(named)


@pytest.mark.parametrize("field", ["layernorm_zero_centered_gamma", "rotary_interleaved"])
def test_a_model_that_megatron_built_with_the_field(in_world, monkeypatch, field: str) -> None:
    fields = trainer_module._provider_fields
    monkeypatch.setattr(trainer_module, "_provider_fields", lambda *args: fields(*args) | {field: True})
    config = tiny.tiny_config("qwen3")
    told = in_world(config, TrainMesh(tp=2), lambda trainer, _: _planned_error(trainer, config))
    assert len(set(told)) == 1
    assert f"{field} is True, planned is False" in told[0]


# --- gate and up that take turns


def _remove_turns(activations: torch.Tensor, rows: int) -> torch.Tensor:
    """Activations of fc1, (tokens, 2 I), as [gate, up]; as in megatron-core 0.19.2, TEGroupedMLP._remove_glu_interleaving."""
    from megatron.core.transformer.moe.experts import TEGroupedMLP

    if hasattr(TEGroupedMLP, "_remove_glu_interleaving"):
        return TEGroupedMLP._remove_glu_interleaving(activations, rows)
    tokens, width = activations.shape
    turns = activations.reshape(tokens, width // (2 * rows), 2, rows)
    return turns.transpose(1, 2).reshape(tokens, width)


def _let_take_turns(weight: torch.Tensor, rows: int) -> None:
    """[gate; up] -> blocks of rows in turns, in place: what Megatron-Bridge does where it loads a training checkpoint."""
    gate, up = weight.detach().clone().chunk(2)
    with torch.no_grad():
        weight.copy_(
            torch.cat([block for both in zip(gate.split(rows), up.split(rows), strict=True) for block in both])
        )


def _fc1(trainer: Trainer, module: str) -> Iterator[tuple[str, torch.Tensor]]:
    return ((name, tensor) for name, tensor in trainer.tensors.items() if f".mlp.{module}.linear_fc1." in name)


def _mlp_of_checkpoint(checkpoint: Tensors, prefix: str) -> tuple[torch.Tensor, ...]:
    """Gate and up [I, H] and down [H, I]; gpt-oss keeps all experts in one tensor, transposed, gate and up alternating."""
    module, _, expert = prefix.rpartition(".")
    if f"{module}.gate_up_proj" in checkpoint:
        both, down = (checkpoint[f"{module}.{leaf}"][int(expert)] for leaf in ("gate_up_proj", "down_proj"))
        return both[:, ::2].T, both[:, 1::2].T, down.T
    gate, up, down = (checkpoint[f"{prefix}.{leaf}_proj.weight"] for leaf in ("gate", "up", "down"))
    return gate, up, down


def _forward_is_the_checkpoints(trainer: Trainer, folder: Path, experts: int, shared: int) -> list[bool]:
    """Whether experts compute with the checkpoint's weights: this rank's first of the last layer, and the shared one.

    Tokens that are the unit vectors make fc1's activations its own weights, so Megatron-Core's forward shows which rows it
    takes for gate and which for up. Both must belong to this rank's columns of fc2.
    """
    from megatron.core import parallel_state
    from safetensors.torch import load_file

    checkpoint, held = load_file(folder / "1" / "model.safetensors"), trainer.tensors
    layers = unwrapped(trainer.model_chunks[0]).decoder.layers
    local, prefix = f"vp0.decoder.layers.{len(layers) - 1}.mlp.", f"model.layers.{len(layers) - 1}.mlp."
    first = parallel_state.get_expert_model_parallel_rank() * layers[-1].mlp.num_local_experts
    etp, tp = parallel_state.get_expert_tensor_parallel_rank(), parallel_state.get_tensor_model_parallel_rank()
    cases = [
        (f"{local}experts.linear_fc{{}}.weight0", f"{prefix}experts.{first}", experts, etp),
        (f"{local}shared_experts.linear_fc{{}}.weight", f"{prefix}shared_experts", shared, tp),
    ]
    agreeing = []
    for name, hf, rows, rank in cases:
        if rows:
            gate, up = _remove_turns(held[name.format(1)].T, rows).T.chunk(2)
            of_rank = slice(rank * len(gate), (rank + 1) * len(gate))
            wanted_gate, wanted_up, down = _mlp_of_checkpoint(checkpoint, hf)
            assert held[name.format(2)].equal(down[:, of_rank])
            agreeing.append(gate.equal(wanted_gate[of_rank]) and up.equal(wanted_up[of_rank]))
    return agreeing


def _in_turns(trainer: Trainer, folder: Path, config: Mapping[str, Any], experts: int, shared: int) -> Any:
    """A trainer whose gate and up take turns: whether forward is right before and after, its plan, this rank's tensors,
    and those in which a trace differs from the plan, with the fields and without them."""
    live = _config_of(trainer)
    live.moe_mlp_glu_interleave_size = experts or None
    live.moe_shared_expert_glu_interleave_size = shared or None
    live.use_grouped_gemm_for_shared_expert = bool(shared)
    agreeing = [_forward_is_the_checkpoints(trainer, folder, experts, shared)]
    for module, rows in (("experts", experts), ("shared_experts", shared)):
        for _, tensor in _fc1(trainer, module) if rows else ():
            _let_take_turns(tensor, rows)
    agreeing += [_forward_is_the_checkpoints(trainer, folder, experts, shared)]
    plan = plan_refit(config, trainer.model_chunks, GenMesh(tp=GEN.tp))
    faults = _trace_faults(trainer, plan)
    live.moe_mlp_glu_interleave_size = live.moe_shared_expert_glu_interleave_size = None
    blind = _trace_faults(trainer, plan)
    return agreeing, plan, {name: tensor.detach() for name, tensor in trainer.tensors.items()}, (faults, blind)


def _trace_faults(trainer: Trainer, plan: Plan) -> list[str]:
    """The tensors of this rank in which Megatron-Bridge's import, traced, puts something else than the plan says."""
    trace = trace_live(trainer.bridge, trainer.model_chunks, checkpoint_of(plan))
    return [fault.partition(":")[0] for fault in trace_faults(plan, "train", dist.get_rank(), trace)]


def _wrong_tensors(plan: Plan, held: list[Tensors], config: Mapping[str, Any], checkpoint: Tensors) -> list[str]:
    """The engine's tensors that differ from what its loader makes of the checkpoint, after a refit by this plan."""
    trainers = [bind(schedule_of(plan, "train", rank), tensors) for rank, tensors in enumerate(held)]
    wrong = []
    for rank in range(plan.gen.world):
        engine, golden = StandInEngine(config, GEN, rank), StandInEngine(config, GEN, rank)
        golden.load_weights(checkpoint.items())
        engine.load_weights((name, checkpoint[name]) for name in plan.misc_names)
        deliver(trainers, bind(schedule_of(plan, "gen", rank), engine.tensors))
        wrong += [name for name, tensor in engine.tensors.items() if not same_bytes(tensor, golden.tensors[name])]
    return sorted(set(wrong))


@pytest.mark.parametrize(
    ("family", "mesh", "experts", "shared"),
    [
        ("qwen3_moe", TrainMesh(dp=2, ep=2), 8, 0),
        ("qwen3_moe", TrainMesh(tp=2, dp=2, ep=2, etp=2), 4, 0),
        ("deepseek_v3", TrainMesh(tp=2, ep=2), 16, 8),
        ("deepseek_v3", TrainMesh(tp=2), 0, 4),
        ("gpt_oss", TrainMesh(dp=2, ep=2), 8, 0),
    ],
    ids=mesh_label,
)
def test_gate_and_up_that_take_turns_arrive_as_the_engine_wants_them(
    in_world, tmp_path: Path, family: str, mesh: TrainMesh, experts: int, shared: int
) -> None:
    from safetensors.torch import load_file

    config = tiny.tiny_config(family)
    results = in_world(config, mesh, _in_turns, config, experts, shared)
    for agreeing, _, tensors, (faults, blind) in results:
        count = bool(experts) + bool(shared)
        assert agreeing == [[False] * count, [True] * count]  # of [gate; up], then of turns
        reach = [module for module, rows in (("experts", experts), ("shared_experts", shared)) if rows]
        in_turns = {name for name in tensors for module in reach if f".mlp.{module}.linear_fc1." in name}
        assert (faults, set(blind)) == ([], in_turns)  # with the fields, and without them
    plan, held = results[0][1], [tensors for _, _, tensors, _ in results]
    assert {other.digest for _, other, _, _ in results} == {plan.digest}
    checkpoint = load_file(tmp_path / "1" / "model.safetensors")
    assert _wrong_tensors(plan, held, config, checkpoint) == []

    blind = make_plan(parameters_from_config(config), plan.train, plan.gen)  # reads the same tensors as [gate; up]
    layers = range(1 if family == "deepseek_v3" else 0, config["num_hidden_layers"])
    suffix = {"experts": ".w13_", "shared": ".shared_experts.gate_up_proj."}
    wrong = _wrong_tensors(blind, held, config, checkpoint)
    for kind, rows in (("experts", experts), ("shared", shared)):
        assert {name.split(".")[2] for name in wrong if suffix[kind] in name} == (
            {*map(str, layers)} if rows else set()
        )
    assert all(any(part in name for part in suffix.values()) for name in wrong)


def _refusals(trainer: Trainer, _: Path, config: Mapping[str, Any]) -> dict[str, str]:
    """What each use of Megatron-Bridge's export, and each field that fits nothing, is told."""
    live, chunks = _config_of(trainer), trainer.model_chunks
    said: dict[str, str] = {}

    def attempt(case: str, act: Callable[[], Any]) -> None:
        try:
            act()
            said[case] = ""
        except ValueError as error:
            said[case] = f"{type(error).__name__}: {error}"

    live.moe_mlp_glu_interleave_size = 8
    plan = plan_refit(config, chunks, GenMesh())
    attempt("export", lambda: list(trainer.export_unquantized()))
    attempt("export of others", lambda: list(trainer.export({"lm_head.weight"})))
    attempt("golden", lambda: _choose_export(plan, trainer.bridge, chunks, Options(transport="golden")))
    attempt("bulk", lambda: _choose_export(plan, trainer.bridge, chunks, Options(transport="gloo")))
    attempt("misc", lambda: plan_refit(config, chunks, GenMesh(), gen_dtype="fp8"))
    live.moe_mlp_glu_interleave_size = 5
    attempt("indivisible", lambda: plan_refit(config, chunks, GenMesh()))
    live.moe_mlp_glu_interleave_size = 8 if dist.get_rank() else None
    attempt("one rank", lambda: plan_refit(config, chunks, GenMesh()))
    live.moe_mlp_glu_interleave_size, live.gated_linear_unit = 8, False  # as squared ReLU: nothing to take turns
    attempt("ungated", lambda: list(trainer.export_unquantized()))
    return said


def test_megatron_bridge_is_not_asked_for_gate_and_up_that_take_turns(in_world) -> None:
    config = tiny.tiny_config("qwen3_moe")
    first, second = in_world(config, TrainMesh(pp=2), _refusals, config)
    told = "gate and up take turns every 8 rows (moe_mlp_glu_interleave_size, moe_shared_expert_glu_interleave_size)"
    for said in (first, second):
        assert all(f"ValueError: in {prefix}" in said[case] and told in said[case] for case, prefix in
                   (("export", "decoder.layers.0.mlp.experts.linear_fc1"), ("golden", "vp0.decoder.layers.0.")))  # fmt: skip
        assert (said["export of others"], said["bulk"], said["ungated"]) == ("", "", "")
        assert "cannot go by bulk:\n  model.layers.{layer}.mlp.experts.{expert}.gate_proj.weight: " in said["misc"]
        assert (
            "32 expert rows on each etp rank cannot be divided by moe_mlp_glu_interleave_size = 5"
            in said["indivisible"]
        )
        assert "interleaved rows of gate and up [(0, 0), (8, 0)]; build it from one config" in said["one rank"]


def test_experts_that_megatron_core_never_lets_take_turns() -> None:
    model_parameters = parameters_from_config(tiny.tiny_config("qwen3_moe"))
    build = MegatronBuild(experts="sequential", alternating_experts=8)
    with pytest.raises(
        MeshError, match="moe_mlp_glu_interleave_size = 8: of Megatron-Core's experts TEGroupedMLP alone"
    ):
        make_plan(model_parameters, TrainMesh(), GenMesh(), build=build)
    dense = parameters_from_config(tiny.tiny_config("llama"))
    assert make_plan(dense, TrainMesh(), GenMesh(), build=replace(build, experts="grouped")).prove()


def test_swizzled_scales_are_refused() -> None:
    held = {"_rowwise_data": torch.zeros(256, 512, dtype=torch.uint8), "_with_gemm_swizzled_scales": True}
    model = torch.nn.Module()
    scales = torch.zeros(256, 16, dtype=torch.uint8)
    model._parameters["weight"] = QuantizedStandIn((256, 512), _rowwise_scale_inv=scales, **held)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"vp0\.weight keeps its scales in the order of a matrix product"):
        local_tensors([model])
