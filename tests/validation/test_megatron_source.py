"""The training side on real Megatron-Core models: what Megatron-Bridge loads it exports, bit for bit, on every mesh."""

from __future__ import annotations

import math
import sys
import types
from collections.abc import Callable, Collection
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from helpers.quantized_standin import QuantizedStandIn, ends_in_bf16
from helpers.trainers import Check, mesh_label, round_trip, run_trainers, same_bytes

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.trainers.megatron.model import local_tensors, precisions_of, require, train_mesh_of, unwrapped
from mcore_reshard.trainers.megatron.plan_refit import _agree_on_precision, plan_refit
from mcore_reshard.validation import tiny
from mcore_reshard.validation.trainer import build as trainer_module
from mcore_reshard.validation.trainer import te_standin, te_standin_modules
from mcore_reshard.validation.trainer.build import Trainer, build_trainer, prepare

if find_spec("megatron") is None or find_spec("megatron.bridge") is None:
    pytest.skip("needs the extra `megatron`", allow_module_level=True)


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    prepare()  # once, so that every forked world finds it imported


@pytest.fixture
def in_world(tmp_path: Path) -> Callable[..., list[Any]]:
    """Run a check on every rank of a trainer of one tiny model, and return what each rank returned."""

    def run(config: dict[str, Any], mesh: TrainMesh, check: Check, *args: Any, **build: Any) -> list[Any]:
        return run_trainers(tmp_path, config, mesh, check, *args, **build)

    return run


TP2, TP4, TP2_PP2 = TrainMesh(tp=2), TrainMesh(tp=4), TrainMesh(tp=2, pp=2)
EP4, TP2_EP4 = TrainMesh(dp=4, ep=4), TrainMesh(tp=2, dp=2, ep=4)
TP2_EP2_ETP2 = TrainMesh(tp=2, dp=2, ep=2, etp=2)
CP2, CP2_EP2 = TrainMesh(cp=2), TrainMesh(cp=2, dp=2, ep=2)
PP2_VPP2, UNEVEN = TrainMesh(pp=2, vpp=2), TrainMesh(pp=2, layers=(3, 1))

ROUND_TRIPS = [
    ("llama", TP4, {}),
    ("llama", UNEVEN, {}),
    ("llama", TP4, {"num_key_value_heads": 1}),
    ("llama_tied", TP2, {}),
    ("qwen2", PP2_VPP2, {}),
    ("qwen3", TP2_PP2, {}),
    ("qwen3", CP2, {}),
    ("qwen3", TrainMesh(pp=2, vpp=2, layers=(1, 2, 1, 0)), {}),
    ("qwen3", TrainMesh(pp=4, layers=(0, 2, 2, 0)), {}),
    ("qwen3_moe", EP4, {}),
    ("qwen3_moe", TP2_EP2_ETP2, {}),
    ("qwen3_moe", CP2_EP2, {}),
    ("deepseek_v3", PP2_VPP2, {}),
    ("kimi_k2", TP2_EP4, {}),
    ("nemotron_h", TP2_EP4, {}),
    ("nemotron_h", TrainMesh(pp=2, layers=(5, 3)), {}),
    ("gpt_oss", TP2_EP4, {}),
]
MORE = [
    ("llama", TP2_PP2, {}),
    ("llama", TP4, {"num_key_value_heads": 2}),
    ("llama_tied", TP2_PP2, {}),
    ("llama_tied", PP2_VPP2, {}),
    ("qwen2", TP2, {}),
    ("qwen3_moe", TP2_EP4, {}),
    ("qwen3_moe", TrainMesh(tp=2, cp=2, ep=4), {}),
    ("qwen3_moe", TrainMesh(pp=2, dp=2, ep=2), {}),
    ("deepseek_v3", TP2, {}),
    ("deepseek_v3", TP2_EP2_ETP2, {}),
    ("kimi_k2", EP4, {}),
    ("nemotron_h", TP4, {}),
    ("gpt_oss", TP2, {}),
]


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("family", "mesh", "overrides"),
    [*ROUND_TRIPS, *(pytest.param(*case, marks=pytest.mark.slow) for case in MORE)],
    ids=mesh_label,
)
def test_export_gives_back_the_checkpoint(in_world, family: str, mesh: TrainMesh, overrides: dict[str, Any]) -> None:
    assert in_world(tiny.tiny_config(family, **overrides), mesh, round_trip) == [[]] * mesh.world


@pytest.mark.parametrize("mesh", [TP2, TP2_EP2_ETP2], ids=mesh_label)
def test_experts_as_modules_of_their_own_are_exported_too(in_world, mesh: TrainMesh) -> None:
    def check(trainer: Trainer, folder: Path) -> list[str]:
        grouped = [name for name in trainer.tensors if ".experts.linear_fc" in name]
        return grouped + round_trip(trainer, folder)

    assert in_world(tiny.tiny_config("qwen3_moe"), mesh, check, grouped_experts=False) == [[]] * mesh.world


@pytest.mark.parametrize("mesh", [TrainMesh(), TP2], ids=mesh_label)
def test_mla_without_low_rank_queries(in_world, mesh: TrainMesh) -> None:
    import megatron.core

    if tuple(map(int, megatron.core.__version__.split(".")[:2])) >= (0, 17):
        pytest.skip("Megatron-Bridge has no mapping for the norm that newer Megatron-Core fuses into linear_q_proj")
    assert in_world(tiny.tiny_config("deepseek_v3_nolora"), mesh, round_trip) == [[]] * mesh.world


def test_local_tensors_have_the_names_and_shapes_of_the_rank(in_world) -> None:
    def check(trainer: Trainer, folder: Path) -> dict[str, tuple[int, ...]]:
        return {name: tuple(tensor.shape) for name, tensor in trainer.tensors.items()}

    first, second, *_ = in_world(tiny.tiny_config("deepseek_v3"), TrainMesh(tp=2, dp=2, ep=4), check)
    layer = "vp0.decoder.layers.1."
    assert first == second
    assert first["vp0.embedding.word_embeddings.weight"] == (128, 64)
    assert first["vp0.decoder.layers.0.mlp.linear_fc1.weight"] == (96, 64)
    assert first[layer + "self_attention.linear_q_down_proj.weight"] == (32, 64)
    assert first[layer + "mlp.experts.linear_fc1.weight1"] == (64, 64)
    assert layer + "mlp.experts.linear_fc1.weight2" not in first
    assert first[layer + "mlp.shared_experts.linear_fc1.weight"] == (32, 64)
    assert first[layer + "mlp.router.expert_bias"] == (8,)


def test_local_tensors_are_the_models_own_memory() -> None:
    class Wrapper(torch.nn.Module):
        def __init__(self, module: torch.nn.Module) -> None:
            super().__init__()
            self.module = module

    linear, norm = torch.nn.Linear(2, 3, bias=False), torch.nn.BatchNorm1d(3, affine=False)
    norm.register_buffer("scratch", torch.zeros(1), persistent=False)
    model = torch.nn.Sequential(linear, norm)
    tensors = local_tensors([Wrapper(Wrapper(model)), model])
    persistent = ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert list(tensors) == [f"vp{chunk}.{name}" for chunk in (0, 1) for name in ["0.weight", *persistent]]
    assert tensors["vp1.0.weight"] is linear.weight


@pytest.mark.parametrize(
    ("attributes", "scales", "precision"),
    [
        ({"_rowwise_data": (256, 512), "_rowwise_scale_inv": (2, 4)}, "._rowwise_scale_inv", "fp8"),
        ({"_data": (256, 512), "_scale_inv": (1,)}, "._scale_inv", "fp8"),
        ({"_rowwise_data": (256, 512), "_rowwise_scale_inv": (256, 16)}, "._rowwise_scale_inv", "mxfp8"),
    ],
)
def test_quantized_parameters_are_data_and_scales(
    attributes: dict[str, tuple[int, ...]], scales: str, precision: str
) -> None:
    held = {name: torch.zeros(shape, dtype=torch.uint8) for name, shape in attributes.items()}
    leaf = scales.removeprefix(".")
    if precision == "fp8":
        held[leaf] = held[leaf].float()
    model = torch.nn.Module()
    model._parameters["weight"] = QuantizedStandIn((256, 512), **held)  # type: ignore[assignment]
    tensors = local_tensors([model])
    assert list(tensors) == ["vp0.weight", "vp0.weight" + scales]
    data = held.get("_rowwise_data", held.get("_data"))
    assert data is not None
    assert (tensors["vp0.weight"].dtype, tensors["vp0.weight"].data_ptr()) == (torch.float8_e4m3fn, data.data_ptr())
    assert tensors["vp0.weight" + scales].data_ptr() == held[leaf].data_ptr()
    assert precisions_of(tensors).keys() == {precision}


def test_a_quantized_parameter_without_rows_is_refused() -> None:
    model = torch.nn.Module()
    model._parameters["weight"] = QuantizedStandIn((8, 8), _rowwise_data=None, _rowwise_scale_inv=None)  # type: ignore[assignment]
    with pytest.raises(ValueError, match=r"vp0\.weight is quantized and keeps no row-wise data"):
        local_tensors([model])


def _planned(trainer: Trainer, folder: Path, config: dict[str, Any], gen_dtype: str | None, widened: str) -> Any:
    """The plan of a model of which modules whose names end in `widened` were made float32, bound to it."""
    for chunk in trainer.model_chunks:
        for name, module in chunk.named_modules():
            if name.endswith(widened):
                module.float()
    try:
        plan = plan_refit(config, trainer.model_chunks, GenMesh(tp=2), gen_dtype=gen_dtype)
    except ValueError as error:
        return str(error)
    bind(schedule_of(plan, "train", dist.get_rank()), trainer.tensors)
    return {(cast.src, cast.dst) for cast in plan.casts}, len(plan.misc)


@pytest.mark.parametrize(
    ("dtype", "gen_dtype", "casts"),
    [("bfloat16", None, {("float32", "bfloat16")}), ("bfloat16", "fp32", set()), ("float32", None, set())],
)
def test_a_trainer_in_float32_is_planned_as_one(in_world, dtype: str, gen_dtype: str | None, casts: set) -> None:
    config = tiny.tiny_config("qwen3_moe") | {"torch_dtype": dtype}
    assert in_world(config, TrainMesh(pp=2), _planned, config, gen_dtype, "") == [(casts, 0)] * 2


def _planned_error(trainer: Trainer, _: Path, config: dict[str, Any], change: Callable[[Trainer], None]) -> str:
    change(trainer)
    with pytest.raises(ValueError) as error:
        plan_refit(config, trainer.model_chunks, GenMesh(tp=2))
    return str(error.value)


def _wrap_for_lora(trainer: Trainer) -> None:
    """Megatron-Bridge's own wrapper around one linear of the last stage, as LoRA.transform leaves it."""
    from megatron.bridge.peft.lora_layers import LoRALinear

    if dist.get_rank() == dist.get_world_size() - 1:
        mlp = unwrapped(trainer.model_chunks[0]).decoder.layers[0].mlp
        mlp.linear_fc2 = LoRALinear(mlp.linear_fc2, torch.nn.Linear(8, 8, bias=False))


def test_a_model_with_lora_adapters_is_refused_on_every_rank_with_the_cause(in_world) -> None:
    config = tiny.tiny_config("qwen3")
    told = in_world(config, TrainMesh(pp=2), _planned_error, config, _wrap_for_lora)
    assert len(set(told)) == 1
    assert "the model has adapters (LoRA), as in vp0.decoder.layers.0.mlp.linear_fc2.to_wrap.weight" in told[0]
    assert "Connect by mr.megatron.connect, which merges them" in told[0]


def _planned_in_another_order(trainer: Trainer, folder: Path, config: dict[str, Any]) -> str:
    from megatron.core import parallel_state

    initialize = parallel_state.initialize_model_parallel

    def initialize_with_data_outermost(**sizes: Any) -> None:
        initialize(
            **sizes, order="tp-cp-ep-pp-dp"
        )  # as Megatron-Bridge's use_tp_pp_dp_mapping (training/initialize.py)

    with mock.patch.object(parallel_state, "initialize_model_parallel", initialize_with_data_outermost):
        trainer = build_trainer(folder / "1", TrainMesh(pp=2, dp=2))
    return _planned_error(trainer, folder, config, lambda _: None)


def test_another_order_of_ranks_is_refused_on_every_rank_with_the_cause(in_world) -> None:
    config = tiny.tiny_config("qwen3")
    told = in_world(config, TrainMesh(pp=2, dp=2), _planned_in_another_order, config)
    assert len(set(told)) == 1
    assert "Megatron-Core has rank 1 at pp=1 dp=0, a plan has it at pp=0 dp=1" in told[0]
    assert "use_tp_pp_dp_mapping=False" in told[0]


def test_a_trainer_in_two_dtypes_is_refused_on_every_rank_with_both(in_world) -> None:
    config = tiny.tiny_config("qwen3_moe")
    told = in_world(config, TrainMesh(pp=2), _planned, config, None, "output_layer")  # the last stage's
    assert len(set(told)) == 1
    assert "vp0.embedding.word_embeddings.weight in bfloat16, vp0.output_layer.weight in float32; hold all" in told[0]


@pytest.mark.parametrize("found", [{"fp8": "a", "float32": "b"}, {"fp8": "a", "mxfp8": "b"}, {"float16": "a"}])
def test_precisions_that_no_plan_can_say_are_refused(found: dict[str, str]) -> None:
    with pytest.raises(
        ValueError, match=", ".join(f"{found[precision]} in {precision}" for precision in sorted(found))
    ):
        _agree_on_precision(found, "bfloat16")


@pytest.mark.parametrize(
    ("found", "precision"),
    [({"fp8": "a", "bfloat16": "b"}, "fp8"), ({"mxfp8": "a"}, "mxfp8"), ({"bfloat16": "a"}, None)],
)
def test_quantized_parameters_leave_the_others_in_the_dtype_of_the_config(found, precision: str | None) -> None:
    assert _agree_on_precision(found, "bfloat16") == precision


def _planned_in_fp8(trainer: Trainer, folder: Path, config: dict[str, Any], unlike: tuple[int, ...]) -> Any:
    """(layers quantized on the way, layers in FP8 on both sides) of the plan's bulk route, bound to the model.

    `unlike` are layers of which one linear weight is made what the others are not.
    """
    for layer in (layer for chunk in trainer.model_chunks for layer in unwrapped(chunk).decoder.layers):
        if layer.layer_number - 1 in unlike:
            linear = layer.self_attention.linear_proj
            weight, quantized = linear.weight.data, hasattr(linear.weight, "_rowwise_data")
            other = weight.dequantize() if quantized else te_standin_modules.Float8BlockwiseQTensor.of(weight, (8, 8))
            linear.weight = torch.nn.Parameter(other)
    try:
        plan = plan_refit(config, trainer.model_chunks, GenMesh(), gen_dtype="fp8")
    except ValueError as error:
        return str(error)
    bind(schedule_of(plan, "train", dist.get_rank()), trainer.tensors)
    cast, moved = (
        {entry.group for entry in plan.casts},
        {transfers.group for transfers in plan.transfer_groups},
    )
    bulk = [pair.weight for pair in plan.pairs if pair.weight in moved]
    layers = [
        {layer for group in bulk if (group in cast) is on for layer in plan.groups[group].layers}
        for on in (True, False)
    ]
    return sorted(layers[0]), sorted(layers[1])


def _in_fp8(family: str) -> dict[str, Any]:
    # Megatron wants rows of in_proj by the 16 in FP8.
    changes = {"mamba_num_heads": 16} if family == "nemotron_h" else {}
    config = tiny.tiny_config(family, **changes)
    routers = [f"{gate.format(n)}.gate" for n in range(config["num_hidden_layers"])
               for gate in ("model.layers.{}.mlp", "backbone.layers.{}.mixer")]  # fmt: skip
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}
    return config | {"quantization_config": stated | {"modules_to_not_convert": routers}}


@pytest.mark.parametrize(
    ("family", "mesh", "kept", "cast"),
    [
        ("llama", TrainMesh(), (1, 1), [0, 3]),
        ("llama", TrainMesh(pp=2, layers=(3, 1)), (2, 1), [0, 1, 3]),
        ("qwen3", TrainMesh(pp=2, vpp=2, layers=(1, 2, 1, 0)), (1, 2), [0, 2, 3]),
        ("qwen3_moe", TrainMesh(tp=2, pp=2, ep=2), (0, 1), [3]),
        ("qwen3_moe", TrainMesh(dp=2, ep=2), (3, 0), [0, 1, 2]),
        ("deepseek_v3", TrainMesh(pp=2), (2, 1), [0, 1, 3]),
        ("nemotron_h", TrainMesh(pp=2, layers=(5, 3)), (2, 3), [0, 1, 5, 6, 7]),
    ],
    ids=mesh_label,
)
def test_layers_that_an_fp8_trainer_keeps_in_bf16_are_planned_so(
    in_world, monkeypatch, family: str, mesh: TrainMesh, kept: tuple[int, int], cast: list[int]
) -> None:
    monkeypatch.setattr(trainer_module, "_FP8", trainer_module._FP8 | ends_in_bf16(*kept))
    config = _in_fp8(family)
    # a plan leaves multi-token-prediction layers out, whatever holds them; Megatron-Bridge builds none
    planned = config | ({"num_nextn_predict_layers": 1} if family == "deepseek_v3" else {})
    found = in_world(config, mesh, _planned_in_fp8, planned, (), fp8_block=(8, 8))
    layers = range(config["num_hidden_layers"])
    assert found == [(cast, [layer for layer in layers if layer not in cast])] * mesh.world


def test_layers_of_which_a_part_is_quantized_are_refused_on_every_rank(in_world, monkeypatch) -> None:
    monkeypatch.setattr(trainer_module, "_FP8", trainer_module._FP8 | ends_in_bf16(1, 1))
    config = _in_fp8("llama")
    mesh = TrainMesh(pp=2)
    told = in_world(config, mesh, _planned_in_fp8, config, (0, 2), fp8_block=(8, 8))
    qkv, proj = (f"vp0.decoder.layers.0.self_attention.linear_{part}.weight" for part in ("qkv", "proj"))
    assert len(set(told)) == 1
    assert f"in part: of layer 0 {proj} is, {qkv} is not; of layer 2 {qkv} is, {proj} is not; quantize all" in told[0]


def _layers_held(trainer: Trainer, folder: Path) -> tuple[TrainMesh, list[str]]:
    tensors = trainer.tensors
    norm = ".self_attention.linear_qkv.layer_norm_weight"
    held = [name.removesuffix(norm) for name in tensors if name.endswith(norm)]
    return train_mesh_of(trainer.model_chunks), held + [name for name in tensors if ".layers." not in name]


def test_an_uneven_pipeline_holds_what_it_was_given(in_world) -> None:
    (mesh, first), (_, last) = in_world(tiny.tiny_config("qwen3"), UNEVEN, _layers_held)
    assert mesh == TrainMesh(pp=2, layers=(3, 1))
    assert first == [
        "vp0.decoder.layers.0",
        "vp0.decoder.layers.1",
        "vp0.decoder.layers.2",
        "vp0.embedding.word_embeddings.weight",
    ]
    assert last == ["vp0.decoder.layers.0", "vp0.decoder.final_layernorm.weight", "vp0.output_layer.weight"]


def test_interleaved_chunks_hold_what_they_were_given(in_world) -> None:
    uneven = TrainMesh(pp=2, vpp=2, dp=2, layers=(1, 2, 1, 0))
    results = in_world(tiny.tiny_config("qwen3"), uneven, _layers_held)
    assert results[0][0] == uneven
    assert [held for _, held in results] == [
        ["vp0.decoder.layers.0", "vp1.decoder.layers.0", "vp0.embedding.word_embeddings.weight"],
        ["vp0.decoder.layers.0", "vp1.decoder.layers.0", "vp0.embedding.word_embeddings.weight"],
        [
            "vp0.decoder.layers.0",
            "vp0.decoder.layers.1",
            "vp1.decoder.final_layernorm.weight",
            "vp1.output_layer.weight",
        ],
        [
            "vp0.decoder.layers.0",
            "vp0.decoder.layers.1",
            "vp1.decoder.final_layernorm.weight",
            "vp1.output_layer.weight",
        ],
    ]


def test_a_live_mesh_reads_as_it_was_built(in_world) -> None:
    def check(trainer: Trainer, folder: Path) -> TrainMesh:
        return train_mesh_of(trainer.model_chunks)

    for mesh in (TrainMesh(tp=2, cp=2, ep=4, layers=(4,)), TrainMesh(tp=2, dp=2, ep=2, etp=2, layers=(4,))):
        assert in_world(tiny.tiny_config("qwen3_moe"), mesh, check) == [mesh] * 4


def _exported_names(trainer: Trainer, folder: Path, names: Collection[str]) -> tuple[list[str], bool]:
    from safetensors.torch import load_file

    expected = load_file(folder / "1" / "model.safetensors")
    exported = {name: tensor.clone() for name, tensor in trainer.export(names)}
    return sorted(exported), all(same_bytes(tensor, expected[name]) for name, tensor in exported.items())


def test_export_can_be_restricted_to_some_names(in_world) -> None:
    names = {
        "model.layers.3.mlp.experts.6.gate_proj.weight",  # known only to the last expert-parallel rank
        "model.layers.0.self_attn.k_proj.weight",  # one of three in a fused tensor
        "lm_head.weight",
    }
    assert in_world(tiny.tiny_config("qwen3_moe"), TP2_EP4, _exported_names, names) == [(sorted(names), True)] * 4


def test_restricted_export_of_experts_that_share_one_tensor(in_world) -> None:
    names = {"model.layers.2.mlp.experts.down_proj_bias", "model.layers.1.mlp.experts.gate_up_proj"}
    assert in_world(tiny.tiny_config("gpt_oss"), TrainMesh(dp=2, ep=2), _exported_names, names) == (
        [(sorted(names), True)] * 2
    )


def test_a_name_that_nobody_exports_is_an_error_on_every_rank(in_world) -> None:
    def check(trainer: Trainer, folder: Path) -> str:
        with pytest.raises(KeyError) as error:
            list(trainer.export({"lm_head.weight", "model.layers.9.mlp.gate.bias"}))
        return str(error.value)

    messages = in_world(tiny.tiny_config("qwen3_moe"), TrainMesh(dp=2, ep=2), check)
    assert set(messages) == {"'Megatron-Bridge has no conversion task for model.layers.9.mlp.gate.bias'"}


@pytest.mark.parametrize("mesh", [TP2_PP2, PP2_VPP2], ids=mesh_label)
def test_the_last_stage_holds_a_copy_of_a_tied_embedding(in_world, mesh: TrainMesh) -> None:
    def check(trainer: Trainer, folder: Path) -> list[float]:
        trainer.load(folder / "2")
        trainer.load(folder / "1")  # in whose payload the embedding is not zero
        trainer.step()
        held = [tensor for name, tensor in trainer.tensors.items() if "word_embed" in name or "output_layer" in name]
        return [tensor.double().sum().item() for tensor in held]

    sums = in_world(tiny.tiny_config("llama_tied"), mesh, check)
    stages = sums[: mesh.tp], sums[mesh.tp :]
    assert stages[0] == stages[1]
    assert all(len(held) == 1 and held[0] > 0 for held in sums)


@pytest.mark.parametrize(
    ("mesh", "multiple", "rows"),
    [(TrainMesh(), 16, 256), (TP2, 8, 128), (TP4, None, 64), (TP2, None, 125)],
    ids=mesh_label,
)
def test_a_padded_vocabulary_is_exported_without_its_padding(
    in_world, mesh: TrainMesh, multiple: int | None, rows: int
) -> None:
    def check(trainer: Trainer, folder: Path) -> tuple[list[str], int, float]:
        weight = trainer.tensors["vp0.output_layer.weight"]
        padding = weight[max(0, 250 - dist.get_rank() * rows) :] if dist.get_rank() == mesh.tp - 1 else weight[:0]
        return round_trip(trainer, folder), weight.shape[0], padding.abs().sum().item()

    config = tiny.tiny_config("llama", vocab_size=250)
    assert in_world(config, mesh, check, vocab_multiple=multiple) == [([], rows, 0.0)] * mesh.world


def test_a_step_halves_every_weight_in_place_and_keeps_replicas_equal(in_world) -> None:
    def check(trainer: Trainer, folder: Path) -> tuple[list[str], dict[str, float]]:
        before = {name: tensor.clone() for name, tensor in trainer.tensors.items()}
        trainer.step()
        after = trainer.tensors
        wrong = [name for name, tensor in after.items() if not torch.equal(tensor, before[name] * 0.5)]
        return wrong, {name: tensor.double().sum().item() for name, tensor in after.items()}

    results = in_world(tiny.tiny_config("deepseek_v3"), CP2_EP2, check)
    assert [wrong for wrong, _ in results] == [[]] * 4
    assert results[0][1] == results[2][1] != results[1][1] == results[3][1]


def test_a_world_of_another_size_than_the_mesh_is_refused(in_world) -> None:
    def check(trainer: Trainer, folder: Path) -> None:
        with pytest.raises(ValueError, match="the mesh has 4 ranks and the world 2"):
            build_trainer(folder / "1", TP4)

    in_world(tiny.tiny_config("llama"), TP2, check)


@pytest.mark.parametrize("family", tiny.TINY)
def test_two_payload_versions_identify_every_element(family: str) -> None:
    shapes = tiny.checkpoint_shapes(tiny.TINY[family])
    first, second = (dict(tiny.payload(shapes, version)) for version in (1, 2))
    pairs = torch.cat([_pattern(first[name]) * 2**16 + _pattern(second[name]) for name in shapes])
    assert pairs.unique().numel() == sum(math.prod(shape) for shape in shapes.values())
    assert all(tensor.isfinite().all() for version in (1, 2, 3) for _, tensor in tiny.payload(shapes, version))


def _pattern(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(torch.bfloat16).view(torch.int16).flatten().to(torch.int64)


def test_casting_a_float32_payload_keeps_its_identity_and_loses_its_bytes() -> None:
    shapes = tiny.checkpoint_shapes(tiny.TINY["nemotron_h"])
    for version in (1, 2, 3):
        tensors = {name: tensor for name, tensor in tiny.payload(shapes, version) if tensor.dtype == torch.float32}
        assert {name.rpartition(".")[2] for name in tensors} == {"A_log", "D", "e_score_correction_bias"}
        for tensor in tensors.values():
            cast = tensor.to(torch.bfloat16)
            assert not (cast.float() == tensor).any()
            assert torch.equal(cast.view(torch.int16).to(torch.int32), tensor.view(torch.int32) >> 16)


def test_a_misspelled_override_is_an_error() -> None:
    assert tiny.tiny_config("qwen3", vocab_size=250)["vocab_size"] == 250
    with pytest.raises(KeyError, match="qwen3 has no config field num_kv_heads"):
        tiny.tiny_config("qwen3", num_kv_heads=2)


def test_the_stand_in_gives_way_to_the_real_transformer_engine_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    real = types.ModuleType("transformer_engine")
    monkeypatch.setitem(sys.modules, "transformer_engine", real)
    te_standin.install(on_cuda=True)
    assert te_standin.is_real() and sys.modules["transformer_engine"] is real


def test_the_stand_in_comes_before_megatron(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "transformer_engine", raising=False)
    monkeypatch.setitem(sys.modules, "megatron.core", types.ModuleType("megatron.core"))
    with pytest.raises(RuntimeError, match=r"before megatron\.core is imported"):
        te_standin.install()


def test_without_megatron_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "megatron.bridge", None)
    with pytest.raises(ImportError, match=r"from a clone of mcore-reshard: pip install '\.\[megatron\]'"):
        require("megatron.bridge")
