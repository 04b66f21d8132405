"""Layout rules in literal numbers, read off real Megatron-Core and vLLM loads (see also test_validate.py)."""

import numpy as np
import pytest

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.layout.megatron import MegatronBuild, MegatronLayout, padded_vocab
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.partitions import Misc
from mcore_reshard.planner.layout.vllm import VllmLayout
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.parameters import ParameterGroup, Role


def tiny(name, **overrides):
    return parameters_from_config({**load_config(f"tiny-{name}"), **overrides})


def group_of(model_parameters, role):
    return next(group for group in model_parameters.groups if group.role is role)


def rows(layout, model_parameters, role, part):
    """[(global rows, local row)] that a part holds of the first group of a role."""
    owners = layout.place(group_of(model_parameters, role))[0]
    return [((p.region.start[0], p.region.stop[0]), p.origin[0]) for p in owners.partition.pieces[part]]


def test_fused_qkv_is_group_major():
    model_parameters = tiny("qwen3")  # 8 heads of 8, 4 KV heads
    layout = MegatronLayout(model_parameters, TrainMesh(tp=2))
    assert rows(layout, model_parameters, Role.Q, 0) == [((0, 16), 0), ((16, 32), 32)]
    assert rows(layout, model_parameters, Role.K, 0) == [((0, 8), 16), ((8, 16), 48)]
    assert rows(layout, model_parameters, Role.V, 1) == [((16, 24), 24), ((24, 32), 56)]


def test_tensor_parallel_cuts_inside_a_kv_group_when_it_exceeds_the_groups():
    model_parameters = tiny("qwen3", num_key_value_heads=2)
    layout = MegatronLayout(model_parameters, TrainMesh(tp=4))  # rank 0 holds q[0:24], rank 1 q[24:32] k[0:8] v[0:8]
    assert rows(layout, model_parameters, Role.Q, 0) == [((0, 24), 0)]
    assert rows(layout, model_parameters, Role.Q, 1) == [((24, 32), 0)]
    assert rows(layout, model_parameters, Role.K, 0) == []
    assert rows(layout, model_parameters, Role.K, 1) == [((0, 8), 8)]
    assert rows(layout, model_parameters, Role.V, 3) == [((8, 16), 16)]


def test_a_single_kv_head_may_even_be_cut_mid_head():
    model_parameters = tiny("qwen3", num_key_value_heads=1)
    layout = MegatronLayout(model_parameters, TrainMesh(tp=4))  # 80 fused rows, 20 a rank
    assert rows(layout, model_parameters, Role.Q, 0) == [((0, 20), 0)]
    assert rows(layout, model_parameters, Role.K, 3) == [((0, 8), 4)]


def test_vllm_replicates_kv_heads_between_neighbors():
    model_parameters = tiny("qwen3", num_key_value_heads=2)
    layout = VllmLayout(model_parameters, GenMesh(tp=4))
    assert [rows(layout, model_parameters, Role.K, r) for r in range(4)] == [
        [((0, 8), 16)], [((0, 8), 16)], [((8, 16), 16)], [((8, 16), 16)],
    ]  # fmt: skip
    assert [rows(layout, model_parameters, Role.V, r)[0][1] for r in range(4)] == [24] * 4


def test_gate_and_up_are_halves_on_both_sides():
    model_parameters = tiny("llama")  # intermediate 96
    for layout in (MegatronLayout(model_parameters, TrainMesh(tp=2)), VllmLayout(model_parameters, GenMesh(tp=2))):
        assert rows(layout, model_parameters, Role.GATE, 1) == [((48, 96), 0)]
        assert rows(layout, model_parameters, Role.UP, 1) == [((48, 96), 48)]


def test_vllm_pads_the_vocabulary_to_64_and_declares_it():
    model_parameters = tiny("llama", vocab_size=250)
    partition = (
        VllmLayout(model_parameters, GenMesh(tp=2)).place(group_of(model_parameters, Role.EMBEDDING))[0].partition
    )
    assert [piece.region for (piece,) in partition.pieces] == [Region((0, 0), (128, 64)), Region((128, 0), (250, 64))]
    assert [[padding.box for padding in held] for held in partition.padding] == [[], [Region((122, 0), (128, 64))]]


def test_megatron_pads_the_vocabulary_only_where_it_must():
    assert padded_vocab(151936, 8) == 151936
    assert padded_vocab(250, 4) == 256  # the largest power of two in 250 is 2; a multiple of 2 * 4
    assert padded_vocab(129280, 3) == 129408


def test_experts_sit_in_contiguous_blocks_over_the_expert_mesh():
    model_parameters = tiny("qwen3-moe")  # 8 experts
    owner_sets = MegatronLayout(model_parameters, TrainMesh(tp=2, dp=2, ep=2, etp=2)).place(
        group_of(model_parameters, Role.EXPERT_UP)
    )
    assert [(p.experts, p.ranks.tolist()) for p in owner_sets] == [((0, 4), [[0], [1]]), ((4, 8), [[2], [3]])]
    assert owner_sets[0].partition.pieces[1][0].origin == (16, 0)  # [gate_1; up_1], 16 rows each


def test_vllm_gives_spare_experts_to_the_first_ranks():
    model_parameters = tiny("qwen3-moe", num_experts=10)
    owner_sets = VllmLayout(model_parameters, GenMesh(tp=4, ep=4)).place(group_of(model_parameters, Role.EXPERT_UP))
    assert [p.experts for p in owner_sets] == [(0, 3), (3, 6), (6, 8), (8, 10)]
    assert [p.partition.pieces[0][0].tensor.shape for p in owner_sets] == [
        (3, 64, 64),
        (3, 64, 64),
        (2, 64, 64),
        (2, 64, 64),
    ]


@pytest.mark.parametrize("role", [Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN])
def test_legacy_grouped_mlp_is_used_as_its_forward_views_it(role):
    """GroupedMLP.forward: weight1.view(E, H, -1), weight2.view(E, -1, H), although declared [H, E 2I] and [E I, H]."""
    model_parameters = tiny("qwen3-moe")
    experts, hidden, inner = 4, 64, 32
    layout = MegatronLayout(model_parameters, TrainMesh(dp=2, ep=2), MegatronBuild(experts="stacked"))
    (piece,) = layout.place(group_of(model_parameters, role))[0].partition.pieces[0]
    flat = np.arange(np.prod(piece.tensor.shape))
    for expert in range(experts):
        if role is Role.EXPERT_DOWN:  # HF [H, I]; used transposed, as [I, H]
            wanted = flat.reshape(experts, inner, hidden)[expert].T
        else:  # HF [I, H]; used as [H, 2 I] with gate first
            half = 0 if role is Role.EXPERT_GATE else inner
            wanted = flat.reshape(experts, hidden, 2 * inner)[expert, :, half : half + inner].T
        offset = piece.offset((0, 0), slot=expert)
        held = np.lib.stride_tricks.as_strided(flat[offset:], wanted.shape, [8 * s for s in piece.strides])
        assert (held == wanted).all()


def test_sequential_experts_are_modules_of_their_own():
    model_parameters = tiny("qwen3-moe")
    layout = MegatronLayout(model_parameters, TrainMesh(), MegatronBuild(experts="sequential"))
    (piece,) = layout.place(group_of(model_parameters, Role.EXPERT_DOWN))[0].partition.pieces[0]
    assert (
        piece.tensor.name
        == "vp0.decoder.layers.{layer}.mlp.experts.local_experts.{expert}.linear_fc2.weight".replace("vp0", "vp{vp}")
    )


def test_norms_are_fused_into_linears_or_separate():
    model_parameters = tiny("llama")
    for fused, attention, mlp in (
        (True, "self_attention.linear_qkv.layer_norm_weight", "mlp.linear_fc1.layer_norm_weight"),
        (False, "input_layernorm.weight", "pre_mlp_layernorm.weight"),
    ):
        layout = MegatronLayout(model_parameters, TrainMesh(), MegatronBuild(fused_norms=fused))
        names = [
            layout.place(group_of(model_parameters, role))[0]
            .partition.pieces[0][0]
            .tensor.name.removeprefix("vp{vp}.decoder.layers.{layer}.")
            for role in (Role.ATTENTION_NORM, Role.MLP_NORM)
        ]
        assert names == [attention, mlp]


def test_a_hybrid_model_ends_in_final_norm_even_without_mamba_layers():
    model_parameters = tiny("nemotron-h", hybrid_override_pattern="*E", num_hidden_layers=2)
    (placed,) = MegatronLayout(model_parameters, TrainMesh(pp=2)).place(group_of(model_parameters, Role.FINAL_NORM))
    assert placed.partition.pieces[0][0].tensor.name == "vp{vp}.decoder.final_norm.weight"
    assert any(
        "does not interleave" in why for why in MegatronLayout(model_parameters, TrainMesh(pp=2, vpp=2)).violations()
    )


def test_gpt_oss_experts_are_transposed_and_interleaved():
    model_parameters = tiny("gpt-oss")  # 8 experts, hidden 64; gate_up [E, H, 2 I] with view (E, H, I, 2)
    group = group_of(model_parameters, Role.STACKED_GATE_UP)
    inner = group.view[2]
    source = MegatronLayout(model_parameters, TrainMesh(dp=2, ep=2)).place(group)[0].partition.pieces[1]
    assert len(source) == 4 * 2  # 4 local experts, gate and up
    up = source[1]
    assert (up.tensor.name.rpartition(".")[2], up.tensor.shape) == ("weight0", (2 * inner, 64))
    assert up.offset((4, 0, 0, 1)) == inner * 64  # [gate; up]: up starts after I rows of H
    (wanted,) = VllmLayout(model_parameters, GenMesh(tp=2)).place(group)[0].partition.pieces[1]
    assert wanted.tensor.shape == (8, inner, 64)
    assert wanted.offset((0, 3, inner // 2 + 1, 1)) == (2 + 1) * 64 + 3  # rows gate_i, up_i alternate


def test_mamba_sections_are_cut_one_by_one():
    model_parameters = tiny("nemotron-h")  # 8 heads of 8, 4 groups of state 16: z 64, x 64, B 64, C 64, dt 8
    expected = [((32, 64), 0), ((96, 128), 32), ((160, 192), 64), ((224, 256), 96), ((260, 264), 128)]
    assert rows(MegatronLayout(model_parameters, TrainMesh(tp=2)), model_parameters, Role.MAMBA_IN, 1) == expected
    assert rows(VllmLayout(model_parameters, GenMesh(tp=2)), model_parameters, Role.MAMBA_IN, 1) == expected


def test_with_one_mamba_group_vllm_keeps_b_and_c_whole():
    model_parameters = tiny("nemotron-h", n_groups=1)  # z 64, x 64, B 16, C 16, dt 8
    assert rows(VllmLayout(model_parameters, GenMesh(tp=2)), model_parameters, Role.MAMBA_IN, 1) == [
        ((32, 64), 0), ((96, 128), 32), ((128, 144), 64), ((144, 160), 80), ((164, 168), 96),
    ]  # fmt: skip


def test_shared_experts_are_whole_under_sequence_parallel_moe():
    model_parameters = tiny("deepseek-v3")
    group = group_of(model_parameters, Role.SHARED_UP)
    cut = VllmLayout(model_parameters, GenMesh(tp=2)).place(group)[0]
    whole = VllmLayout(model_parameters, GenMesh(tp=2, dp=2, ep=4)).place(group)[0]
    assert (len(cut.partition.pieces), len(whole.partition.pieces)) == (2, 1)
    assert whole.ranks.tolist() == [[0, 2, 1, 3]]


def test_an_unknown_parameter_is_misc_with_a_reason_never_a_default():
    model_parameters = tiny("llama")
    unknown = ParameterGroup("model.layers.{layer}.mystery.weight", Role.UNKNOWN, (64,), "bfloat16", (0, 1, 2, 3))
    for layout in (MegatronLayout(model_parameters, TrainMesh()), VllmLayout(model_parameters, GenMesh())):
        placed = layout.place(unknown)
        assert isinstance(placed, Misc) and "no layout rule for 'unknown'" in placed.reason


@pytest.mark.parametrize(
    ("layout", "complaints"),
    [
        (
            lambda: MegatronLayout(tiny("qwen3-moe"), TrainMesh(tp=3, dp=3, ep=9, etp=1)),
            ["8 attention heads cannot be divided by tp = 3", "8 experts cannot be divided by ep = 9"],
        ),
        (lambda: MegatronLayout(tiny("llama"), TrainMesh(dp=2, ep=2)), ["want a model with experts"]),
        (
            lambda: MegatronLayout(tiny("qwen3", num_attention_heads=6, num_key_value_heads=1), TrainMesh(tp=3)),
            ["linear_qkv's 64 rows cannot be divided by tp = 3"],
        ),
        (
            lambda: VllmLayout(tiny("qwen3-moe", num_key_value_heads=3, num_attention_heads=6), GenMesh(tp=4)),
            [
                "6 attention heads cannot be divided by tp = 4",
                "3 KV heads are neither a multiple nor a divisor of tp = 4",
            ],
        ),
        (lambda: VllmLayout(tiny("gpt-oss"), GenMesh(tp=8)), ["4 KV heads cannot be divided by tp = 8"]),
        (lambda: VllmLayout(tiny("nemotron-h"), GenMesh(tp=8)), ["4 Mamba groups cannot be divided by tp = 8"]),
        (
            lambda: MegatronLayout(tiny("nemotron-h"), TrainMesh(tp=2, cp=3)),
            ["4 Mamba heads on each tp rank cannot be"],
        ),
        (
            lambda: MegatronLayout(tiny("nemotron-h", mamba_num_heads=12, n_groups=3), TrainMesh(cp=4)),
            ["3 Mamba groups on each tp rank are neither a multiple nor a divisor of cp = 4"],
        ),
        (
            lambda: VllmLayout(tiny("gpt-oss", num_local_experts=9), GenMesh(dp=2, ep=2)),
            ["9 experts cannot be divided"],
        ),
        (lambda: VllmLayout(tiny("kimi-k2", tie_word_embeddings=True), GenMesh()), ["does not tie word embeddings"]),
        (lambda: VllmLayout(tiny("qwen3", attention_bias=True), GenMesh()), ["vLLM's qwen3 has no o_proj.bias"]),
    ],
)
def test_a_model_that_cannot_be_cut_lists_every_reason(layout, complaints):
    violations = layout().violations()
    for complaint in complaints:
        assert any(complaint in violation for violation in violations), violations
