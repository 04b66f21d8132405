"""A live vLLM model as a destination: its tensors, its loader, its mesh, and what follows direct writes."""

from __future__ import annotations

import contextlib
import os
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from checkpoints import checkpoint, tiny
from helpers.golden import expected_tensors

from mcore_reshard.engines.vllm.model import (
    after_direct_writes,
    gen_mesh_of,
    gen_rank_of,
    kernel_layouts,
    kv_scale_names,
    load_weights,
    local_tensors,
    set_default_kv_scales,
    set_kv_scales,
)
from mcore_reshard.planner.layout.block_scales import KV_SCALES
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.engine.slices import POISON, GenSizes, StandInEngine
from mcore_reshard.validation.engine.tables import stage_layers
from mcore_reshard.validation.engine.vllm_engine import build_engine, engine_config, prepare
from mcore_reshard.validation.processes import run_processes


@contextlib.contextmanager
def gloo_groups(sizes, gen_rank):
    """The groups of real processes, whose default process group is the generation ranks."""
    import vllm.distributed.parallel_state as state

    vllm_engine.forget_groups()
    state.init_distributed_environment(sizes.world, gen_rank, backend="gloo", local_rank=gen_rank)
    state.initialize_model_parallel(sizes.tp, sizes.pp)
    yield


def load_in_a_process(gen_rank, config, folder, sizes, store):
    os.environ.update(GLOO_SOCKET_IFNAME="lo")
    dist.init_process_group("gloo", init_method=f"file://{store}", world_size=sizes.world, rank=gen_rank)
    try:
        with mock.patch.object(vllm_engine, "stand_in_groups", gloo_groups):
            model = build_engine(folder, sizes, gen_rank)
        load_weights(model, checkpoint(config, 1).items())
        expected = expected_tensors(config, checkpoint(config, 1), sizes, gen_rank)
        actual = local_tensors(model)
        return actual.keys() == expected.keys() and all(torch.equal(actual[n], expected[n]) for n in expected)
    finally:
        dist.destroy_process_group()


@pytest.mark.parametrize(
    ("name", "sizes"), [("qwen3-moe", GenSizes(tp=2, ep=2)), ("deepseek-v3", GenSizes(tp=2, pp=2))], ids=str
)
def test_real_processes_hold_what_a_stand_in_group_says(name, sizes, config_folder, tmp_path):
    config = tiny(name)
    prepare()
    arguments = (config, config_folder(config), sizes, tmp_path / "store")
    assert run_processes(sizes.world, load_in_a_process, arguments, timeout_s=120) == [True] * sizes.world


def test_parameters_start_poisoned(config_folder):
    model = build_engine(config_folder(tiny("nemotron-h")), GenSizes(tp=2), 1)
    for name, tensor in local_tensors(model).items():
        assert tensor.contiguous().view(-1).view(torch.uint8).eq(POISON).all(), name


@pytest.mark.parametrize("name", ["llama-tied", "deepseek-v3", "gpt-oss", "nemotron-h"])
def test_stand_in_engine_loads_any_subset_as_vllm_does(name, config_folder):
    config, sizes = tiny(name), GenSizes(tp=2)
    model, stand_in = build_engine(config_folder(config), sizes, 1), StandInEngine(config, sizes, 1)
    for version, every in ((1, 3), (2, -2)):
        some = sorted(checkpoint(config, version).items())[::every]
        stand_in.load_weights(some)
        load_weights(model, some)
        for tensor, actual in local_tensors(model).items():
            assert torch.equal(actual.view(torch.uint8), stand_in.tensors[tensor].view(torch.uint8)), tensor


def test_direct_writes_reach_the_absorbed_attention_weights(config_folder):
    config = tiny("deepseek-v3")
    model = build_engine(config_folder(config), GenSizes(tp=2), 1)
    names = set(local_tensors(model))
    layers = [f"model.layers.{layer}.self_attn.mla_attn.mla_attn" for layer in range(4)]
    for version in (1, 2):
        for name, tensor in expected_tensors(config, checkpoint(config, version), GenSizes(tp=2), 1).items():
            local_tensors(model)[name].copy_(tensor)
        assert after_direct_writes(model, torch.bfloat16) == layers
        assert set(local_tensors(model)) == names
        for layer in layers:
            absorbed = model.get_submodule(layer)
            key_value = absorbed.kv_b_proj.weight.view(4, 8 + 8, 16)  # heads of this rank, nope + v, kv_lora
            assert torch.equal(absorbed.W_UK_T, key_value[:, :8])
            assert torch.equal(absorbed.W_UV, key_value[:, 8:].transpose(1, 2))


def test_nothing_follows_direct_writes_into_a_dense_model(config_folder):
    assert after_direct_writes(build_engine(config_folder(tiny("qwen3")), GenSizes(), 0), torch.bfloat16) == []


def test_an_engine_whose_kernels_rearranged_parameters_is_refused_with_all_of_them(config_folder):
    from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

    model = build_engine(config_folder(tiny("qwen3-moe")), GenSizes(), 0)
    assert kernel_layouts(model) == {} and local_tensors(model)
    layers = [f"model.layers.{layer}.mlp.experts.routed_experts" for layer in (0, 2)]
    for layer in layers:
        model.get_submodule(layer).quant_method.unquantized_backend = UnquantizedMoeBackend.FLASHINFER_CUTLASS
    names = [f"{layer}.{leaf}" for layer in layers for leaf in ("w13_weight", "w2_weight")]
    reason = "the FlashInfer CUTLASS backend rearranges experts after loading"
    assert kernel_layouts(model) == dict.fromkeys(names, reason)
    for use in (lambda: local_tensors(model), lambda: load_weights(model, [])):
        with pytest.raises(RuntimeError, match="cannot write 4 parameters") as error:
            use()
        assert f"{reason}: {', '.join(names)}\nstart vLLM with moe_backend='triton'" in str(error.value)


def test_weights_that_cpu_kernels_read_from_copies_are_refused(config_folder):
    model = build_engine(config_folder(tiny("llama")), GenSizes(), 0)
    packed = model.lm_head.weight.clone()
    model.lm_head.cpu_linear = lambda x, weight, bias: torch.nn.functional.linear(x, packed, bias)
    with pytest.raises(RuntimeError, match=r"read a copy that was made after loading: lm_head\.weight\n"):
        local_tensors(model)


def test_vllms_fallback_for_a_cpu_without_kernels_reads_the_weights_themselves(config_folder, monkeypatch):
    monkeypatch.setattr("vllm._custom_ops._supports_onednn", False)
    model = build_engine(config_folder(tiny("llama")), GenSizes(), 0)
    model.lm_head.quant_method.process_weights_after_loading(model.lm_head)
    assert model.lm_head.cpu_linear is not torch.nn.functional.linear
    assert "lm_head.weight" in local_tensors(model)


@pytest.mark.parametrize("mesh", [GenMesh(), GenMesh(tp=2, pp=2), GenMesh(tp=2, dp=2, ep=4)], ids=str)
def test_mesh_and_rank_of_a_configuration(mesh, config_folder):
    folder = config_folder(tiny("qwen3-moe"))
    sizes = GenSizes(tp=mesh.tp, pp=mesh.pp, dp=mesh.dp, ep=mesh.ep)
    for gen_rank in range(mesh.world):
        config = engine_config(folder, sizes, gen_rank)
        assert (gen_mesh_of(config), gen_rank_of(config)) == (mesh, gen_rank)


@pytest.mark.parametrize(
    ("layers", "pp", "partition"), [(4, 2, None), (5, 2, None), (6, 4, None), (7, 4, None), (4, 2, "1,3")]
)
def test_stages_have_the_layers_that_vllm_gives_them(layers, pp, partition, config_folder, monkeypatch):
    from vllm.distributed.utils import get_pp_indices

    monkeypatch.delenv("VLLM_PP_LAYER_PARTITION", raising=False)
    if partition is not None:
        monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", partition)
    config = tiny("llama") | {"num_hidden_layers": layers}
    mesh = gen_mesh_of(engine_config(config_folder(config), GenSizes(pp=pp), 0))
    ends = [get_pp_indices(layers, stage, pp) for stage in range(pp)]
    assert [stop - start for start, stop in ends] == list(mesh.stage_layers(layers))
    assert [range(*end) for end in ends] == [stage_layers(layers, stage, pp, mesh.layers) for stage in range(pp)]


def test_a_partition_that_does_not_fit_the_model_is_refused(config_folder, monkeypatch):
    monkeypatch.setenv("VLLM_PP_LAYER_PARTITION", "1,2")
    with pytest.raises(MeshError, match=r"layers=1\+2 adds up to 3, the model has 4"):
        gen_mesh_of(engine_config(config_folder(tiny("llama")), GenSizes(pp=2), 0))


def test_independent_replicas_of_one_engine_have_ranks_of_their_own(config_folder):
    config = engine_config(config_folder(tiny("llama")), GenSizes(tp=2), 1)
    config.parallel_config.data_parallel_size, config.parallel_config.data_parallel_index = 3, 2
    config.parallel_config.reconfigure_for_independent_dp_rank()  # as vLLM's engine core does
    assert (gen_mesh_of(config), gen_rank_of(config)) == (GenMesh(tp=2), 5)


def test_experts_cut_over_data_parallelism_are_refused(config_folder):
    config = engine_config(config_folder(tiny("qwen3-moe")), GenSizes(tp=2), 0)
    config.parallel_config.data_parallel_size = 2
    with pytest.raises(ValueError, match=r"cuts experts by tp\*dp = 4"):
        gen_mesh_of(config)


FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}


@pytest.mark.parametrize(
    ("name", "attention", "named"),
    [
        ("llama", "model.layers.{}.self_attn.attn", "model.layers.{}.self_attn.attn"),
        ("deepseek-v3", "model.layers.{}.self_attn.mla_attn.mla_attn", "model.layers.{}.self_attn.attn"),
    ],
)
@pytest.mark.parametrize("quantized", [False, True], ids=["bf16", "fp8"])
def test_kv_scales_land_where_attention_reads_them(name, attention, named, quantized, config_folder, kv_cache_in):
    kv_cache_in("fp8")
    config = tiny(name, quantization_config=FP8) if quantized else tiny(name)
    model = build_engine(config_folder(config), GenSizes(pp=2), 1)  # layers 2 and 3
    scales = {
        f"{named.format(2)}.k_scale": 2.125,
        f"{named.format(2)}.v_scale": 2.25,
        f"{named.format(3)}.q_scale": 0.75,
    }
    set_kv_scales(model, scales)
    layer = model.get_submodule(attention.format(2))
    assert (layer._k_scale.item(), layer._k_scale_float, layer._k_scale_cpu.item()) == (2.125, 2.125, 2.125)
    assert (layer._v_scale.item(), layer._v_scale_float, layer._v_scale_cpu.item()) == (2.25, 2.25, 2.25)
    assert (layer._q_scale.item(), layer._q_scale_float) == (1.0, 1.0)
    last = model.get_submodule(attention.format(3))
    assert (last._q_scale.item(), last._q_scale_float, last._k_scale.item()) == (0.75, 0.75, 1.0)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3", "gpt-oss"])
def test_kv_scales_stay_over_refits_that_bring_none(name, config_folder, kv_cache_in):
    kv_cache_in("fp8")
    model = build_engine(config_folder(tiny(name)), GenSizes(), 0)
    load_weights(model, checkpoint(tiny(name), 1).items())
    scales = {leaf: 0.1 + number for number, leaf in enumerate(("k_scale", "v_scale", "q_scale"))}
    set_kv_scales(model, {name: scales[name.rpartition(".")[2]] for name in kv_scale_names(model)})
    after_direct_writes(model, torch.bfloat16)
    layers = [layer for layer in model.modules() if hasattr(layer, "_k_scale")]
    assert len(layers) == 4
    for layer in layers:
        for leaf, scale in scales.items():
            kept = torch.tensor(scale).item()
            assert (getattr(layer, f"_{leaf}").item(), getattr(layer, f"_{leaf}_float")) == (kept, kept)
        assert (layer._k_scale_cpu, layer._v_scale_cpu) == (layer._k_scale, layer._v_scale)


def test_an_engine_that_started_with_dummy_weights_has_kv_scales_of_one(config_folder):
    """In block FP8 the scales stay the random numbers that vLLM's dummy loader writes into all of the state dict."""
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    folder = config_folder(tiny("llama", quantization_config=FP8))
    model = build_engine(folder, GenSizes(), 0)
    config = engine_config(folder, GenSizes(), 0)
    DummyModelLoader(config.load_config).load_weights(model, config.model_config)
    scales = [
        getattr(layer, f"_{leaf}") for layer in model.modules() if hasattr(layer, "_k_scale") for leaf in KV_SCALES
    ]
    assert len(scales) == 4 * 3 and all(scale.item() != 1.0 for scale in scales)
    set_default_kv_scales(model)
    assert all(scale.item() == 1.0 for scale in scales)


def test_what_flashinfer_has_derived_of_kv_scales_it_derives_again(config_folder, kv_cache_in):
    kv_cache_in("fp8")
    model = build_engine(config_folder(tiny("llama")), GenSizes(), 0)
    attention = model.get_submodule("model.layers.0.self_attn.attn")
    attention.impl.bmm1_scale, attention.impl.bmm2_scale = 0.5, 0.25
    set_kv_scales(model, {"model.layers.0.self_attn.attn.v_scale": 2.0})
    assert (attention.impl.bmm1_scale, attention.impl.bmm2_scale) == (None, None)


@pytest.mark.parametrize("name", ["llama", "deepseek-v3"])
def test_each_pipeline_stage_names_the_kv_scales_of_its_layers(name, config_folder, kv_cache_in):
    kv_cache_in("fp8")
    folder = config_folder(tiny(name))
    for stage, layers in ((0, (0, 1)), (1, (2, 3))):
        model = build_engine(folder, GenSizes(pp=2), stage)
        names = kv_scale_names(model)
        wanted = [f"model.layers.{layer}.self_attn.attn.{leaf}_scale" for layer in layers for leaf in "kvq"]
        assert [name for name in names if ".mla_attn." not in name] == wanted
        set_kv_scales(model, dict.fromkeys(names, 0.5))
        with pytest.raises(ValueError, match="1 scales of the KV cache cannot be set"):  # of the other stage
            set_kv_scales(model, {f"model.layers.{(layers[0] + 2) % 4}.self_attn.attn.k_scale": 0.5})


@pytest.mark.parametrize(
    ("dtype", "skipped", "scaled"),
    [("auto", (), ()), ("fp8", ("1", "3"), (0, 2)), ("fp8_per_token_head", (), ()), ("fp8_e5m2", (), (0, 1, 2, 3))],
)
def test_layers_whose_cache_has_no_scale_take_none(dtype, skipped, scaled, config_folder, kv_cache_in):
    kv_cache_in(dtype, *skipped)
    model = build_engine(config_folder(tiny("llama")), GenSizes(), 0)
    wanted = [f"model.layers.{layer}.self_attn.attn.{leaf}_scale" for layer in scaled for leaf in "kvq"]
    assert kv_scale_names(model) == wanted
    with pytest.raises(ValueError, match="is no scale of an attention layer whose KV cache is quantized"):
        set_kv_scales(model, {**dict.fromkeys(wanted, 0.5), "model.layers.4.self_attn.attn.k_scale": 0.5})


def test_kv_scales_are_no_tensors_that_a_refit_fills(config_folder):
    model = build_engine(config_folder(tiny("llama", quantization_config=FP8)), GenSizes(), 0)
    attention = model.get_submodule("model.layers.0.self_attn.attn")
    assert {"k_scale", "v_scale", "q_scale", "prob_scale"} <= set(dict(attention.named_parameters()))
    assert not [name for name in local_tensors(model) if ".attn." in name]


def test_wrong_kv_scales_are_refused_before_any_is_written(config_folder, kv_cache_in):
    kv_cache_in("fp8")
    model = build_engine(config_folder(tiny("llama")), GenSizes(), 0)
    good = "model.layers.0.self_attn.attn.k_scale"
    wrong = {good: 2.0, "model.layers.1.self_attn.attn.v_scale": -1.0, "model.layers.9.self_attn.attn.k_scale": 1.0}
    beyond = {"model.layers.1.self_attn.attn.k_scale": 1e-46, "model.layers.1.self_attn.attn.q_scale": 1e39}  # float32
    with pytest.raises(ValueError, match="4 scales of the KV cache cannot be set") as error:
        set_kv_scales(model, wrong | beyond)
    assert "v_scale is -1.0, a positive float32 number is needed" in str(error.value)
    assert "model.layers.9.self_attn.attn.k_scale is no scale of an attention layer whose KV cache is" in str(
        error.value
    )
    assert model.get_submodule("model.layers.0.self_attn.attn")._k_scale.item() == 1.0


@pytest.mark.parametrize(
    ("kernel", "stays"),
    [
        ("TritonFp8BlockScaledMMKernel", True),
        ("CPUFp8BlockScaledMMKernel", False),
    ],
)
def test_block_fp8_layers_that_a_kernel_rearranged(kernel, stays, config_folder):
    from vllm.model_executor.kernels import linear

    model = build_engine(config_folder(tiny("llama", quantization_config=FP8)), GenSizes(), 0)
    layer = "model.layers.0.self_attn.o_proj"
    chosen = getattr(linear, kernel)
    model.get_submodule(layer).quant_method.fp8_linear = chosen.__new__(chosen)
    reason = f"{kernel} rearranges block FP8 after loading"
    changed = {f"{layer}.weight": reason, f"{layer}.weight_scale_inv": reason}
    assert kernel_layouts(model) == ({} if stays else changed)
