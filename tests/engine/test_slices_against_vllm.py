"""The oracle of engine slices says, byte for byte, what vLLM's own `load_weights` leaves on every rank."""

from __future__ import annotations

import pytest
import torch
from checkpoints import checkpoint, fp8_checkpoint, tiny
from helpers.golden import expected_tensors
from helpers.validation_cases import REFINED_COLUMNS, REFINED_EXPERTS, UNLOADABLE_EXPERTS, in_blocks

from mcore_reshard.engines.vllm.model import after_direct_writes, load_weights, loaded_tensors, local_tensors
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine
from mcore_reshard.validation.engine.vllm_engine import build_engine

DENSE = ("llama", "llama-tied", "qwen2", "qwen3")
EXPERTS = ("qwen3-moe", "deepseek-v3", "moonlight", "kimi-k2", "nemotron-h", "gpt-oss")
HEADS_OF_8 = ("deepseek-v3", "moonlight", "kimi-k2")

CASES = [
    *((name, {}, GenSizes(tp=tp)) for name in DENSE + EXPERTS for tp in (1, 2, 4)),
    *((name, {}, GenSizes(tp=8)) for name in (*DENSE, "qwen3-moe", *HEADS_OF_8)),  # 4 KV heads on 8 ranks, or MLA
    *((name, {}, GenSizes(pp=2)) for name in DENSE + EXPERTS),
    *((name, {}, GenSizes(tp=2, pp=2)) for name in DENSE + EXPERTS),
    *((name, {}, GenSizes(tp=2, dp=2)) for name in DENSE + EXPERTS),
    *((name, {}, sizes) for name in EXPERTS for sizes in (GenSizes(tp=2, ep=2), GenSizes(tp=4, ep=4))),
    *((name, {}, sizes) for name in EXPERTS for sizes in (GenSizes(dp=2, ep=2), GenSizes(tp=2, dp=2, ep=4))),
    *((name, {}, GenSizes(tp=2, pp=2, dp=2, ep=4)) for name in EXPERTS),
    *((name, {"vocab_size": 250}, GenSizes(tp=tp)) for name in DENSE + EXPERTS for tp in (1, 4)),
    *((name, {"vocab_size": 130}, GenSizes(tp=2, pp=2)) for name in DENSE + EXPERTS),  # one rank is mostly padding
    *(
        (name, {"num_key_value_heads": kv_heads}, GenSizes(tp=4))
        for name in ("llama", "qwen2", "qwen3", "qwen3-moe", "nemotron-h")
        for kv_heads in (1, 2)
    ),
    ("llama", {"attention_bias": True}, GenSizes(tp=2)),
    ("llama", {"num_hidden_layers": 5}, GenSizes(pp=2)),
    ("qwen3", {"num_hidden_layers": 6}, GenSizes(pp=4)),
    ("qwen3", {"num_hidden_layers": 6}, GenSizes(pp=4, layers=(2, 1, 2, 1))),  # VLLM_PP_LAYER_PARTITION
    ("gpt-oss", {"num_hidden_layers": 4}, GenSizes(tp=2, pp=2, layers=(1, 3))),
    ("qwen3", {"head_dim": 16}, GenSizes(tp=4)),
    ("qwen3", {"tie_word_embeddings": True}, GenSizes(tp=2, pp=2)),
    ("qwen3-moe", {"num_experts": 10}, GenSizes(tp=4, ep=4)),
    ("qwen3-moe", {"num_experts": 7}, GenSizes(tp=2, dp=2, ep=4)),
    ("qwen3-moe", {"tie_word_embeddings": True}, GenSizes(pp=2)),
    ("qwen3-moe", {"decoder_sparse_step": 2}, GenSizes(tp=2, ep=2)),
    ("qwen3-moe", {"mlp_only_layers": [0, 2]}, GenSizes(tp=2, pp=2)),
    ("deepseek-v3", {"n_shared_experts": 2, "first_k_dense_replace": 2}, GenSizes(tp=2)),
    ("deepseek-v3", {"n_routed_experts": 10}, GenSizes(tp=4, ep=4)),
    ("deepseek-v3", {"num_hidden_layers": 5}, GenSizes(tp=2, pp=2)),
    ("nemotron-h", {"n_routed_experts": 10}, GenSizes(tp=4, ep=4)),
    ("nemotron-h", {"n_groups": 1}, GenSizes(tp=2)),  # one group of B and C, whole on both ranks
    ("nemotron-h", {"n_groups": 1}, GenSizes(tp=4)),
    ("nemotron-h", {"hybrid_override_pattern": "ME*-E", "num_hidden_layers": 5}, GenSizes(tp=2, pp=2)),
]


def case_id(case: object) -> str:
    if isinstance(case, GenSizes):
        return f"tp{case.tp}-pp{case.pp}-dp{case.dp}-ep{case.ep}" + "".join(f"-{count}" for count in case.layers)
    return "-".join(f"{key}={value}" for key, value in case.items()) if isinstance(case, dict) else str(case)


def differences(expected: dict[str, torch.Tensor], actual: dict[str, torch.Tensor]) -> list[str]:
    """The differences, byte for byte: names, shapes, dtypes, and the first coordinate with both values."""
    found = [f"{name}: only one side has it" for name in sorted(expected.keys() ^ actual.keys())]
    for name in sorted(expected.keys() & actual.keys()):
        want, have = expected[name], actual[name]
        if (want.shape, want.dtype) != (have.shape, have.dtype):
            found.append(f"{name}: {tuple(want.shape)} {want.dtype} and {tuple(have.shape)} {have.dtype}")
            continue
        bits = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[want.dtype.itemsize]
        unequal = (want.contiguous().view(bits) != have.contiguous().view(bits)).nonzero()
        if len(unequal):
            at = tuple(unequal[0].tolist())
            found.append(f"{name}{list(at)}: {want[at].item()} and {have[at].item()}, {len(unequal)} elements in all")
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "changes", "sizes"), CASES, ids=case_id)
def test_oracle_equals_vllm(name, changes, sizes, config_folder):
    config = tiny(name, **changes)
    folder = config_folder(config)
    versions = [checkpoint(config, version) for version in (1, 2)]  # the two together identify every element
    for gen_rank in range(sizes.world):
        model = build_engine(folder, sizes, gen_rank)
        for tensors in versions:
            load_weights(model, ((tensor_name, tensor.clone()) for tensor_name, tensor in tensors.items()))
            assert not differences(expected_tensors(config, tensors, sizes, gen_rank), local_tensors(model))


IN_BLOCKS = [
    *(("qwen3-moe", block, changes, GenSizes(tp=4)) for block, changes in REFINED_EXPERTS),
    ("qwen3-moe", *REFINED_COLUMNS, GenSizes(tp=2)),
    *(("llama", (8, 8), {}, GenSizes(tp=tp)) for tp in (1, 2, 4)),
    ("llama", (16, 8), {}, GenSizes(tp=2, pp=2)),
    ("qwen2", (8, 16), {}, GenSizes(tp=2, dp=2)),
    ("qwen3-fp8", (128, 128), {}, GenSizes(tp=2)),
    ("qwen3-moe", (8, 8), {}, GenSizes(tp=4)),
    ("qwen3-moe", (8, 8), {}, GenSizes(tp=2, dp=2, ep=4)),
    ("qwen3-moe-fp8", (128, 128), {}, GenSizes(tp=2, pp=2)),
    ("deepseek-v3", (8, 8), {}, GenSizes(tp=2)),
    ("deepseek-v3", (8, 8), {}, GenSizes(tp=2, ep=2)),
    ("deepseek-v3-fp8", (128, 128), {}, GenSizes(tp=2)),
    ("kimi-k2", (8, 8), {}, GenSizes(tp=4)),
]


@pytest.mark.parametrize(("name", "block", "changes", "sizes"), IN_BLOCKS, ids=case_id)
def test_oracle_equals_vllm_in_block_fp8(name, block, changes, sizes, config_folder):
    config = in_blocks(name, block, **changes)
    folder = config_folder(config)
    versions = [fp8_checkpoint(config, block, version) for version in (1, 2)]
    for gen_rank in range(sizes.world):
        model = build_engine(folder, sizes, gen_rank)
        for tensors in versions:
            load_weights(model, ((tensor_name, tensor.clone()) for tensor_name, tensor in tensors.items()))
            assert not differences(expected_tensors(config, tensors, sizes, gen_rank), loaded_tensors(model))


@pytest.mark.parametrize(("block", "changes"), REFINED_EXPERTS, ids=str)
def test_refits_write_the_same_tensors_and_scales_are_repeated_alike(block, changes, config_folder):
    config = in_blocks("qwen3-moe", block, **changes)
    for gen_rank in range(4):
        model = build_engine(config_folder(config), GenSizes(tp=4), gen_rank)
        stand_in = StandInEngine(config, GenSizes(tp=4), gen_rank)
        tensors = local_tensors(model)
        assert {name: (t.shape, t.dtype) for name, t in stand_in.tensors.items()} == {
            name: (t.shape, t.dtype) for name, t in tensors.items()
        }
        for number, name in enumerate(sorted(name for name in tensors if name.endswith(".blocks"))):
            written = torch.rand(tensors[name].shape, generator=torch.Generator().manual_seed(number))
            for engine in (tensors, stand_in.tensors):
                engine[name].copy_(written)
        after_direct_writes(model, torch.bfloat16)
        stand_in.after_direct_writes()
        scales = {
            name: t
            for name, t in loaded_tensors(model).items()
            if name.endswith(("w13_weight_scale_inv", "w2_weight_scale_inv"))
        }
        assert len(scales) == 8
        assert not differences({name: stand_in.loaded[name] for name in scales}, scales)


def test_linear_layers_cut_inside_of_blocks_are_refused_by_both(config_folder):
    config = in_blocks("llama", (8, 32))  # o_proj has 16 columns on each rank
    with pytest.raises(ValueError, match="not divisible"):
        build_engine(config_folder(config), GenSizes(tp=4), 0)
    with pytest.raises(ValueError, match=r"o_proj\.weight holds 16 of 64 rows or columns: not whole blocks of 32"):
        expected_tensors(config, {}, GenSizes(tp=4), 0)


def test_experts_that_are_not_whole_blocks_are_refused_by_both(config_folder):
    block, changes = UNLOADABLE_EXPERTS
    config = in_blocks("qwen3-moe", block, **changes)
    model = build_engine(config_folder(config), GenSizes(), 0)
    with pytest.raises(RuntimeError, match=r"size of tensor a \(3\) must match the size of tensor b \(4\)"):
        load_weights(model, [("model.layers.0.mlp.experts.0.down_proj.weight_scale_inv", torch.ones(2, 2))])
    with pytest.raises(ValueError, match=r"experts of 96 by 128 are not whole blocks of \(64, 64\)"):
        expected_tensors(config, {}, GenSizes(), 0)


def test_mtp_layers_and_rotary_tables_are_dropped(config_folder):
    config = tiny("deepseek-v3", num_nextn_predict_layers=1)
    dropped = {
        "model.layers.4.eh_proj.weight": torch.ones(64, 128),
        "model.layers.4.self_attn.q_a_proj.weight": torch.ones(32, 64),
        "model.layers.0.self_attn.rotary_emb.inv_freq": torch.ones(4),
    }
    model = build_engine(config_folder(config), GenSizes(), 0)
    tensors = checkpoint(config, 1) | dropped
    load_weights(model, tensors.items())
    assert not differences(expected_tensors(config, tensors, GenSizes(), 0), local_tensors(model))


def test_lm_head_of_a_tied_model_is_dropped(config_folder):
    config = tiny("llama-tied")
    tensors = checkpoint(config, 1) | {"lm_head.weight": torch.ones(config["vocab_size"], 64, dtype=torch.bfloat16)}
    model = build_engine(config_folder(config), GenSizes(), 0)
    load_weights(model, tensors.items())
    assert not differences(expected_tensors(config, tensors, GenSizes(), 0), local_tensors(model))


REFUSED = [
    ("llama", {}, GenSizes(tp=16)),  # 8 heads
    ("qwen3", {"num_key_value_heads": 4, "num_attention_heads": 12}, GenSizes(tp=3)),
    ("qwen3-moe", {"moe_intermediate_size": 36}, GenSizes(tp=8)),
    ("deepseek-v3", {}, GenSizes(tp=16)),
    ("gpt-oss", {}, GenSizes(tp=8)),  # 4 KV heads
    ("gpt-oss", {"intermediate_size": 34}, GenSizes(tp=2, pp=2)),
    ("nemotron-h", {}, GenSizes(tp=8)),  # 4 groups
    ("nemotron-h", {"hybrid_override_pattern": "M*ME-", "num_hidden_layers": 5}, GenSizes(pp=2)),
    ("qwen3-moe", {"mlp_only_layers": [0, 1]}, GenSizes(pp=2)),
]


@pytest.mark.parametrize(("name", "changes", "sizes"), REFUSED, ids=case_id)
def test_sizes_that_vllm_refuses_are_refused(name, changes, sizes, config_folder):
    config = tiny(name, **changes)
    with pytest.raises((AssertionError, ValueError, ZeroDivisionError, RuntimeError)):
        build_engine(config_folder(config), sizes, 0)
    with pytest.raises(ValueError, match=r"cannot be cut|does not repeat|wants"):
        expected_tensors(config, checkpoint(config, 1), sizes, 0)


class TestTheComparisonCanFail:
    def test_one_flipped_bit(self, config_folder):
        config = tiny("qwen3-moe")
        model = build_engine(config_folder(config), GenSizes(tp=2), 1)
        load_weights(model, checkpoint(config, 1).items())
        actual = local_tensors(model)
        name = "model.layers.2.mlp.experts.routed_experts.w13_weight"
        actual[name].view(torch.uint8).view(-1)[(5 * 32 + 17) * 128 + 2 * 9] ^= 1
        (found,) = differences(expected_tensors(config, checkpoint(config, 1), GenSizes(tp=2), 1), actual)
        assert found.startswith(f"{name}[5, 17, 9]: ")

    def test_gate_and_up_swapped(self, config_folder):
        config = tiny("llama")
        model = build_engine(config_folder(config), GenSizes(tp=2), 0)
        swap = {"gate_proj": "up_proj", "up_proj": "gate_proj"}
        renamed = {}
        for name, tensor in checkpoint(config, 1).items():
            projection = name.split(".")[-2]
            renamed[name.replace(projection, swap.get(projection, projection))] = tensor
        load_weights(model, renamed.items())
        found = differences(expected_tensors(config, checkpoint(config, 1), GenSizes(tp=2), 0), local_tensors(model))
        assert [line.partition("[")[0] for line in found] == [
            f"model.layers.{layer}.mlp.gate_up_proj.weight" for layer in range(4)
        ]

    def test_a_tensor_that_was_not_loaded(self, config_folder):
        config = tiny("nemotron-h")
        model = build_engine(config_folder(config), GenSizes(tp=2), 0)
        tensors = checkpoint(config, 1)
        del tensors["backbone.layers.2.mixer.D"]
        load_weights(model, tensors.items())
        (found,) = differences(expected_tensors(config, checkpoint(config, 1), GenSizes(tp=2), 0), local_tensors(model))
        assert found.startswith("model.layers.2.mixer.D[0]: ")
