"""What a trace of SGLang's loader says is what the loader does, to the last byte."""

from __future__ import annotations

import contextlib
import functools
import operator
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.assembled import assembled, differences, hf_tensors
from safetensors.torch import load_file

from mcore_reshard.engines.sglang.model import after_direct_writes, kernel_layouts, load_weights, local_tensors
from mcore_reshard.engines.sglang.trace import trace_loading
from mcore_reshard.tracing.recorder import TraceError
from mcore_reshard.validation.engine import sglang_engine
from mcore_reshard.validation.engine.sglang_engine import build_engine
from mcore_reshard.validation.engine.slices import GenSizes
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import tiny_config, write_checkpoint

TP2, TP4, PP2 = GenSizes(tp=2), GenSizes(tp=4), GenSizes(tp=2, pp=2)
EP2, EP4 = GenSizes(tp=2, ep=2), GenSizes(tp=2, dp=2, ep=4)
DENSE = (TP2, TP4, PP2, GenSizes(pp=2, layers=(1, 3)))
EXPERTS = (TP2, TP4, PP2, EP2, EP4, GenSizes(tp=2, pp=2, dp=2, ep=4))
FAMILIES: dict[str, tuple[GenSizes, ...]] = {
    "qwen3": DENSE,
    "llama": DENSE,
    "llama_tied": DENSE,
    "qwen3_moe": EXPERTS,
    "deepseek_v3": EXPERTS,
    "deepseek_v3_nolora": (TP2, EP2),
    "kimi_k2": (TP2, EP2),
    "qwen2": (TP2, TP4),
    "gpt_oss": (TP2, TP4, PP2),  # SGLang's loader does not cut its experts for expert parallelism
}
CASES = [(family, sizes) for family, meshes in FAMILIES.items() for sizes in meshes]


def label(value: Any) -> str:
    if not isinstance(value, GenSizes):
        return str(value)
    return ",".join(f"{axis}{getattr(value, axis)}" for axis in ("tp", "pp", "dp", "ep") if getattr(value, axis) > 1)


def check(folder: Path, config: dict[str, Any], sizes: GenSizes) -> int:
    """Compares every rank's tensors, assembled from its trace, with those that SGLang's loader fills; bytes compared."""
    compared = 0
    for version in (1, 2):
        checkpoint = write_checkpoint(config, folder, version)
        for gen_rank in range(sizes.world):
            trace = trace_loading(build_engine(folder, sizes, gen_rank, device="meta"), hf_tensors(checkpoint))
            model = build_engine(folder, sizes, gen_rank)
            load_weights(model, checkpoint.items())
            loaded = local_tensors(model)
            assert differences(assembled(trace, checkpoint), loaded) == [], f"gen:{gen_rank}"
            compared += sum(tensor.numel() * tensor.element_size() for tensor in loaded.values())
    return compared


@pytest.mark.parametrize(("family", "sizes"), CASES, ids=label)
def test_a_trace_gives_every_byte_that_the_loader_puts_there(tmp_path: Path, family: str, sizes: GenSizes) -> None:
    assert check(tmp_path, tiny_config(family), sizes) > 2 * 100_000


def test_replicated_kv_heads_and_a_padded_vocabulary(tmp_path: Path) -> None:
    config = tiny_config("qwen3", num_key_value_heads=2, vocab_size=130)
    assert check(tmp_path, config, TP4) > 0


def test_the_shared_expert_of_deepseek_v3_is_one_more_routed_expert_without_expert_parallelism(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3", n_routed_experts=256)
    assert check(tmp_path, config, TP2) > 0
    whole, spread = (local_tensors(build_engine(tmp_path, sizes, 0, device="meta")) for sizes in (TP2, EP2))
    experts = next(name for name in whole if name.endswith("w13_weight"))
    assert (len(whole[experts]), len(spread[experts])) == (257, 128)
    assert {"shared_experts" in " ".join(names) for names in (whole, spread)} == {False, True}


def test_a_damaged_trace_is_found(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tiny_config("qwen3"), tmp_path, 1)
    trace = trace_loading(build_engine(tmp_path, TP2, 1, device="meta"), hf_tensors(checkpoint))
    model = build_engine(tmp_path, TP2, 1)
    load_weights(model, checkpoint.items())
    for number, tensor in enumerate(trace.tensors):
        (name, copy), *others = tensor.copies
        shifted = replace(copy, src_offset=copy.src_offset + (1 if copy.src_offset == 0 else -1))
        shorter = replace(shifted, extents=(copy.extents[0] - 1, *copy.extents[1:]))
        damaged = list(trace.tensors)
        damaged[number] = replace(tensor, copies=((name, shorter), *others))
        found = assembled(replace(trace, tensors=tuple(damaged)), checkpoint)
        assert differences(found, local_tensors(model)) == [tensor.tensor.name]


def test_a_live_model_is_traced_and_not_written(tmp_path: Path) -> None:
    checkpoint = write_checkpoint(tiny_config("deepseek_v3"), tmp_path, 1)
    model = build_engine(tmp_path, EP2, 1)
    load_weights(model, checkpoint.items())
    before = {name: tensor.clone() for name, tensor in local_tensors(model).items()}
    derived = [layer.self_attn.w_kc.clone() for layer in model.model.layers]
    trace = trace_loading(model, hf_tensors(write_checkpoint(tiny_config("deepseek_v3"), tmp_path, 2)))
    assert differences(before, local_tensors(model)) == []
    assert all(torch.equal(layer.self_attn.w_kc, kept) for layer, kept in zip(model.model.layers, derived, strict=True))
    assert differences(assembled(trace, checkpoint), before) == []


def test_a_loader_that_raises_says_at_which_tensor(tmp_path: Path) -> None:
    checkpoint = hf_tensors(write_checkpoint(tiny_config("qwen3"), tmp_path, 1))
    checkpoint["model.layers.1.mlp.up_proj.weight"] = replace(
        checkpoint["model.layers.1.mlp.up_proj.weight"], shape=(7, 9)
    )
    with pytest.raises(TraceError, match=r"SGLang's loader .* at model.layers.1.mlp.up_proj.weight: "):
        trace_loading(build_engine(tmp_path, TP2, 0, device="meta"), checkpoint)


def test_direct_writes_then_derive_what_attention_reads(tmp_path: Path) -> None:
    config = tiny_config("deepseek_v3")
    first, second = (write_checkpoint(config, tmp_path, version) for version in (1, 2))
    model, expected = build_engine(tmp_path, TP2, 1), build_engine(tmp_path, TP2, 1)
    load_weights(expected, second.items())
    load_weights(model, first.items())
    addresses = [layer.self_attn.w_kc.data_ptr() for layer in model.model.layers]
    for name, tensor in assembled(trace_loading(model, hf_tensors(second)), second).items():
        local_tensors(model)[name].copy_(tensor)
    after_direct_writes(model)
    for layer, wanted in zip(model.model.layers, expected.model.layers, strict=True):
        for name in ("w_kc", "w_vc"):
            assert torch.equal(getattr(layer.self_attn, name), getattr(wanted.self_attn, name))
    assert [layer.self_attn.w_kc.data_ptr() for layer in model.model.layers] == addresses


@pytest.mark.parametrize(
    ("attribute", "value", "reason"),
    [
        ("quant_method.w13_swiglu_interleaved", True, "interleaved after loading"),
        ("quant_method.use_flashinfer_trtllm_moe", True, "flashinfer_trtllm backend permutes"),
        ("quant_method._aiter_runner", object(), "AITER backend shuffles"),
        ("use_intel_amx_backend", True, "packed for AMX"),
        ("quant_method", torch.nn.Identity(), "Identity is not known to leave parameters as they were loaded"),
        ("_derived_weight_cache_error", "copies are stale", "copies are stale"),
    ],
)
def test_parameters_that_kernels_read_in_another_layout_are_refused_by_name(
    tmp_path: Path, attribute: str, value: object, reason: str
) -> None:
    write_checkpoint(tiny_config("qwen3_moe"), tmp_path, 1)
    model = build_engine(tmp_path, TP2, 0)
    assert kernel_layouts(model) == {}
    holder, _, leaf = f"model.layers.1.mlp.experts.{attribute}".rpartition(".")
    setattr(operator.attrgetter(holder)(model), leaf, value)
    for refused in (local_tensors, functools.partial(load_weights, named_tensors=[])):
        with pytest.raises(RuntimeError, match=rf"(?s)2 parameters .*{reason}.*layers\.1\.mlp\.experts\.w13_weight"):
            refused(model)


@pytest.mark.parametrize("sizes", [TP2, EP2, EP4, PP2], ids=label)
def test_one_process_plays_the_ranks_that_sglang_makes_over_gloo(tmp_path: Path, sizes: GenSizes) -> None:
    checkpoint = write_checkpoint(tiny_config("qwen3_moe"), tmp_path, 1)
    real = run_processes(sizes.world, load_over_gloo, (tmp_path, sizes), timeout_s=120)
    for gen_rank, tensors in enumerate(real):
        model = build_engine(tmp_path, sizes, gen_rank)
        load_weights(model, checkpoint.items())
        assert differences(tensors, local_tensors(model)) == []


def load_over_gloo(gen_rank: int, folder: Path, sizes: GenSizes) -> dict[str, torch.Tensor]:
    """The tensors of a rank whose groups SGLang has made itself, with communication."""
    sglang_engine.stand_in_groups = functools.partial(real_groups, folder / "store")  # this process alone
    model = sglang_engine.build_engine(folder, sizes, gen_rank)
    assert dist.get_world_size() == sizes.world
    load_weights(model, load_file(folder / "model.safetensors").items())
    return {name: tensor.clone() for name, tensor in local_tensors(model).items()}


@contextlib.contextmanager
def real_groups(store: Path, world: int, rank: int) -> Iterator[None]:
    import sglang.srt.distributed.parallel_state as state

    sglang_engine.forget_groups()  # of the process that this one is forked from
    state.init_distributed_environment(world, rank, f"file://{store}", local_rank=rank, backend="gloo")
    state.initialize_model_parallel()
    yield
    dist.barrier()
