"""The oracle of engine slices on tensors small enough to write down; tests/engine compares it with vLLM itself."""

from __future__ import annotations

import math

import pytest
import torch
from helpers.golden import expected_tensors

from mcore_reshard.planner.model.configs import builtin_names, load_config
from mcore_reshard.validation.engine.slices import POISON, GenSizes, StandInEngine
from mcore_reshard.validation.engine.tables import stage_layers
from mcore_reshard.validation.tiny import checkpoint_shapes, payload

# 4 query heads and 2 KV heads of size 1, hidden 2, one layer
LLAMA = {
    "model_type": "llama",
    "vocab_size": 3,
    "hidden_size": 2,
    "intermediate_size": 4,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 1,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
}
MOE = LLAMA | {
    "model_type": "qwen3_moe",
    "num_experts": 3,
    "moe_intermediate_size": 2,
    "decoder_sparse_step": 1,
}
MAMBA = {
    "model_type": "nemotron_h",
    "vocab_size": 2,
    "hidden_size": 1,
    "hybrid_override_pattern": "M",
    "mamba_num_heads": 2,
    "mamba_head_dim": 1,
    "n_groups": 2,
    "ssm_state_size": 1,
    "conv_kernel": 1,
    "use_conv_bias": False,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}


def numbered(config, **tensors):
    """A checkpoint of `config`: `tensors` by the end of their name, zeros elsewhere."""
    checkpoint = {}
    for name, shape in StandInEngine(config, GenSizes(), 0).checkpoint_shapes.items():
        found = [value for end, value in tensors.items() if f".{name}".removesuffix(".weight").endswith(f".{end}")]
        checkpoint[name] = torch.tensor(found[0]) if found else torch.zeros(shape)
    return checkpoint


def expected(config, sizes, gen_rank, name, **tensors):
    return expected_tensors(config, numbered(config, **tensors), sizes, gen_rank)[name].tolist()


class TestDense:
    @staticmethod
    def qkv(tp, gen_rank):
        q, k, v = [[1.0, 1], [2, 2], [3, 3], [4, 4]], [[5.0, 5], [6, 6]], [[7.0, 7], [8, 8]]
        name = "model.layers.0.self_attn.qkv_proj.weight"
        rows = expected(LLAMA, GenSizes(tp=tp), gen_rank, name, q_proj=q, k_proj=k, v_proj=v)
        return [row[0] for row in rows]

    def test_qkv_is_cut_by_heads(self):
        assert self.qkv(tp=1, gen_rank=0) == [1, 2, 3, 4, 5, 6, 7, 8]
        assert self.qkv(tp=2, gen_rank=1) == [3, 4, 6, 8]

    def test_kv_heads_repeat_on_neighboring_ranks(self):
        assert [self.qkv(tp=4, gen_rank=rank) for rank in range(4)] == [[1, 5, 7], [2, 5, 7], [3, 6, 8], [4, 6, 8]]

    def test_gate_and_up_are_cut_each(self):
        gate, up = [[1.0, 0], [2, 0], [3, 0], [4, 0]], [[5.0, 0], [6, 0], [7, 0], [8, 0]]
        name = "model.layers.0.mlp.gate_up_proj.weight"
        rows = expected(LLAMA, GenSizes(tp=2), 1, name, gate_proj=gate, up_proj=up)
        assert [row[0] for row in rows] == [3, 4, 7, 8]

    def test_down_is_cut_by_columns(self):
        down = [[1.0, 2, 3, 4], [5, 6, 7, 8]]
        assert expected(LLAMA, GenSizes(tp=2), 1, "model.layers.0.mlp.down_proj.weight", down_proj=down) == [
            [3, 4],
            [7, 8],
        ]

    def test_vocabulary_is_padded_to_64_with_zeros(self):
        head = [[1.0, 2], [3, 4], [5, 6]]
        assert expected(LLAMA, GenSizes(tp=1), 0, "lm_head.weight", lm_head=head) == head + [[0, 0]] * 61
        assert expected(LLAMA, GenSizes(tp=2), 1, "lm_head.weight", lm_head=head) == [[0, 0]] * 32


class TestExperts:
    @staticmethod
    def w13(sizes, gen_rank):
        projections = {
            f"experts.{expert}.{projection}_proj": [[10.0 * expert + place, 0], [10.0 * expert + place + 1, 0]]
            for expert in range(3)
            for projection, place in (("gate", 1), ("up", 3))
        }
        name = "model.layers.0.mlp.experts.routed_experts.w13_weight"
        stacked = expected(MOE, sizes, gen_rank, name, **projections)
        return [[row[0] for row in expert] for expert in stacked]

    def test_cut_by_tp(self):
        assert self.w13(GenSizes(tp=2), 0) == [[1, 3], [11, 13], [21, 23]]
        assert self.w13(GenSizes(tp=2), 1) == [[2, 4], [12, 14], [22, 24]]

    def test_expert_parallel_ranks_hold_whole_experts_and_the_first_hold_more(self):
        assert self.w13(GenSizes(tp=2, ep=2), 0) == [[1, 2, 3, 4], [11, 12, 13, 14]]
        assert self.w13(GenSizes(tp=2, ep=2), 1) == [[21, 22, 23, 24]]

    def test_expert_parallel_ranks_run_over_dp_then_tp(self):
        config = MOE | {"num_hidden_layers": 2}
        name = "model.layers.1.mlp.experts.routed_experts.w13_weight"
        sizes = GenSizes(tp=1, pp=2, dp=3, ep=3)
        down = {f"layers.1.mlp.experts.{expert}.gate_proj": [[expert + 1.0, 0]] * 2 for expert in range(3)}
        held = [expected(config, sizes, rank, name, **down)[0][0][0] for rank in (1, 3, 5)]
        assert held == [1, 2, 3]


class TestMamba:
    def test_every_section_is_cut_on_its_own(self):
        z, x, b, c, dt = [[1.0], [2]], [[3.0], [4]], [[5.0], [6]], [[7.0], [8]], [[9.0], [10]]
        name = "model.layers.0.mixer.in_proj.weight"
        projection = z + x + b + c + dt
        assert expected(MAMBA, GenSizes(tp=2), 1, name, in_proj=projection) == [[2], [4], [6], [8], [10]]

    def test_a_single_group_is_whole_on_every_rank(self):
        one_group = MAMBA | {"n_groups": 1}
        projection = [[float(row)] for row in range(1, 9)]  # z 1 2, x 3 4, B 5, C 6, dt 7 8
        name = "model.layers.0.mixer.in_proj.weight"
        assert expected(one_group, GenSizes(tp=2), 1, name, in_proj=projection) == [[2], [4], [5], [6], [8]]

    def test_a_is_minus_exp_of_a_log_in_float32(self):
        tensors = expected_tensors(MAMBA, numbered(MAMBA, A_log=[0.0, math.log(3.0)]), GenSizes(tp=2), 1)
        assert tensors["model.layers.0.mixer.A"].dtype == torch.float32
        assert tensors["model.layers.0.mixer.A"].item() == pytest.approx(-3.0)


@pytest.mark.parametrize(
    ("layers", "pp", "counts"), [(4, 2, [2, 2]), (5, 2, [3, 2]), (6, 4, [1, 2, 2, 1]), (7, 4, [2, 2, 2, 1])]
)
def test_layers_left_over_go_before_the_last_stage(layers, pp, counts):
    stages = [stage_layers(layers, stage, pp) for stage in range(pp)]
    assert [len(stage) for stage in stages] == counts
    assert [layer for stage in stages for layer in stage] == list(range(layers))


def test_a_partition_says_how_many_layers_each_stage_has():
    assert [stage_layers(5, stage, 2, (1, 4)) for stage in range(2)] == [range(1), range(1, 5)]
    for partition in ((1, 3), (1, 2, 2)):
        with pytest.raises(ValueError, match="is not one of 5 layers on 2 stages"):
            stage_layers(5, 0, 2, partition)


def tiny_checkpoint(config, version=1):
    return dict(payload(checkpoint_shapes(config), version))


def element_numbers(tensors, tensors_of_version_2):
    """Which elements of the model these are: the payload's two low digits, in the upper half of a float32."""
    digits = [
        (tensor.view(torch.int32) >> 16) if tensor.dtype == torch.float32 else tensor.view(torch.int16).int()
        for tensor in (tensors, tensors_of_version_2)
    ]
    return set((digits[0] + 0x7F80 * digits[1]).flatten().tolist())


# those in FP8 hold what others hold, rounded; the tables of FP8 are compared with vLLM's loaders in tests/engine
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", [name for name in builtin_names() if name.startswith("tiny-") and "-fp8" not in name])
@pytest.mark.parametrize("sizes", [GenSizes(tp=2, pp=2), GenSizes(tp=4)], ids=str)
def test_ranks_together_hold_every_element_of_the_checkpoint(name, sizes):
    config = load_config(name)
    versions = [tiny_checkpoint(config, version) for version in (1, 2)]
    held = set()
    for gen_rank in range(sizes.world):
        first, second = (expected_tensors(config, tensors, sizes, gen_rank) for tensors in versions)
        for tensor in first:
            if not tensor.endswith("mixer.A"):
                held |= element_numbers(first[tensor], second[tensor])
    sizes_of = {tensor: math.prod(shape) for tensor, shape in checkpoint_shapes(config).items()}
    values_changed = sum(elements for tensor, elements in sizes_of.items() if tensor.endswith("A_log"))
    assert held <= set(range(sum(sizes_of.values())))
    assert len(held) == sum(sizes_of.values()) - values_changed


class TestBlockFp8:
    """LLAMA with matrices in blocks of 1 by 2: q_proj [4, 2] has scales [4, 1], down_proj [2, 4] scales [2, 2]."""

    config = LLAMA | {"quantization_config": {"quant_method": "fp8", "weight_block_size": [1, 2]}}

    def test_scales_are_fused_and_cut_as_their_weights(self):
        scales = {"q_proj.weight_scale_inv": [[0.0], [1], [2], [3]], "k_proj.weight_scale_inv": [[4.0], [5]],
                  "v_proj.weight_scale_inv": [[6.0], [7]], "down_proj.weight_scale_inv": [[0.0, 1], [2, 3]]}  # fmt: skip
        prefix = "model.layers.0."
        held = expected_tensors(self.config, numbered(self.config, **scales), GenSizes(tp=2), 1)
        assert held[f"{prefix}self_attn.qkv_proj.weight_scale_inv"].tolist() == [[2], [3], [5], [7]]
        assert held[f"{prefix}mlp.down_proj.weight_scale_inv"].tolist() == [[1], [3]]
        assert held[f"{prefix}mlp.down_proj.weight"].dtype is torch.float8_e4m3fn
        assert held["lm_head.weight"].dtype is torch.float32

    @pytest.mark.parametrize("field", ["modules_to_not_convert", "ignored_layers"])
    @pytest.mark.parametrize(("listed", "tensor"), [("mlp.down_proj", "mlp.down_proj"),
        ("mlp.gate_up_proj", "mlp.gate_up_proj"), ("self_attn.qkv_proj", "self_attn.qkv_proj")])  # fmt: skip
    def test_listed_modules_stay(self, field, listed, tensor):
        kept = {**self.config["quantization_config"], field: [f"model.layers.0.{listed}"]}
        tensors = StandInEngine(self.config | {"quantization_config": kept}, GenSizes(), 0).loaded
        assert tensors[f"model.layers.0.{tensor}.weight"].dtype is torch.float32
        assert f"model.layers.0.{tensor}.weight_scale_inv" not in tensors

    @pytest.mark.parametrize("listed", ["mlp.experts", "mlp.experts.3.up_proj"])
    def test_experts_stay_if_they_or_one_of_them_are_listed(self, listed):
        config = load_config("tiny-qwen3-moe-fp8")
        kept = {**config["quantization_config"], "modules_to_not_convert": [f"model.layers.1.{listed}"]}
        tensors = StandInEngine(config | {"quantization_config": kept}, GenSizes(), 0).loaded
        scaled = {name.split(".")[2] for name in tensors if name.endswith("w13_weight_scale_inv")}
        assert scaled == {"0"}

    def test_a_cut_through_a_block_is_refused(self):
        wide = {"quant_method": "fp8", "weight_block_size": [1, 4]}
        with pytest.raises(ValueError, match="holds 2 of 4 rows or columns: not whole blocks of 4"):
            StandInEngine(self.config | {"quantization_config": wide}, GenSizes(tp=2), 0)


class TestStandInEngine:
    config = load_config("tiny-qwen3-moe")

    def test_tensors_start_poisoned(self):
        for name, tensor in StandInEngine(self.config, GenSizes(tp=2), 1).loaded.items():
            assert tensor.view(torch.uint8).eq(POISON).all(), name

    def test_loading_in_parts_equals_loading_at_once(self):
        tensors = tiny_checkpoint(self.config)
        names = sorted(tensors)
        engine = StandInEngine(self.config, GenSizes(tp=2), 1)
        for part in (names[::2], names[1::2]):
            engine.load_weights((name, tensors[name]) for name in part)
        for name, tensor in expected_tensors(self.config, tensors, GenSizes(tp=2), 1).items():
            assert torch.equal(engine.tensors[name], tensor), name

    def test_only_what_the_given_tensors_determine_is_written(self):
        engine = StandInEngine(self.config, GenSizes(tp=2), 0)
        name = "model.layers.0.self_attn.k_proj.weight"
        assert engine.load_weights([(name, torch.zeros(32, 64, dtype=torch.bfloat16))]) == {
            "model.layers.0.self_attn.qkv_proj.weight": 16 * 64
        }
        poisoned = engine.tensors["model.layers.0.self_attn.qkv_proj.weight"].view(torch.uint8).eq(POISON).all(dim=1)
        assert poisoned.tolist() == [True] * 32 + [False] * 16 + [True] * 16

    def test_unknown_names_and_wrong_shapes_are_refused(self):
        engine = StandInEngine(self.config, GenSizes(), 0)
        with pytest.raises(ValueError, match=r"no parameter 'model\.layers\.9"):
            engine.load_weights([("model.layers.9.input_layernorm.weight", torch.zeros(64))])
        with pytest.raises(ValueError, match=r"has shape \(63,\), wants \(64,\)"):
            engine.load_weights([("model.norm.weight", torch.zeros(63))])

    def test_a_missing_tensor_is_named(self):
        tensors = tiny_checkpoint(self.config)
        del tensors["model.layers.3.mlp.experts.5.up_proj.weight"]
        with pytest.raises(ValueError, match=r"1 HF tensors are missing: model\.layers\.3\.mlp\.experts\.5\.up_proj"):
            expected_tensors(self.config, tensors, GenSizes(), 0)


@pytest.mark.parametrize(
    ("name", "changes", "sizes", "message"),
    [
        ("llama", {}, {"tp": 3}, "cannot be cut by 3|cannot be cut by tp = 3"),
        ("llama", {}, {"pp": 5}, "4 layers do not go around pp = 5"),
        ("llama", {}, {"dp": 2, "ep": 2}, "llama has no experts"),
        ("llama", {}, {"tp": 2, "ep": 4}, r"ep must be 1 or tp \* dp = 2"),
        ("llama", {"model_type": "gpt2"}, {}, "unknown model family 'gpt2'"),
        ("llama", {"torch_dtype": "int8"}, {}, "config dtype 'int8'"),
        ("qwen3-moe", {"moe_intermediate_size": 36}, {"tp": 8}, "cannot be cut by 8"),
        ("qwen3-moe", {"num_experts": 3}, {"tp": 4, "ep": 4}, "3 experts do not go around ep = 4"),
        ("deepseek-v3", {}, {"tp": 16}, "8 heads cannot be cut by tp = 16"),
        ("nemotron-h", {}, {"tp": 8}, "8 Mamba heads in 4 groups cannot be cut by tp = 8"),
        ("gpt-oss", {}, {"tp": 8}, "gpt_oss does not repeat KV heads"),
        ("gpt-oss", {"num_local_experts": 10}, {"tp": 4, "ep": 4}, "cannot spread 10 experts"),
    ],
)
def test_sizes_that_cannot_serve_the_model(name, changes, sizes, message):
    with pytest.raises(ValueError, match=message):
        StandInEngine({**load_config(f"tiny-{name}"), **changes}, GenSizes(**sizes), 0)


def test_a_rank_outside_the_mesh_is_refused():
    with pytest.raises(ValueError, match=r"generation rank 4 is not in \[0, 4\)"):
        StandInEngine(load_config("tiny-llama"), GenSizes(tp=2, pp=2), 4)
