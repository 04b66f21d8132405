"""Quantized weights in plans: pairs of data and scales, casts, and what goes to misc for which reason."""

from __future__ import annotations

from dataclasses import replace

import pytest
from helpers.plans import LAST_LAYER, QUANTIZED, Case
from helpers.simulate import damage, scale_damage
from helpers.validation_cases import UNLOADABLE_EXPERTS

from mcore_reshard.planner.layout.geometry import LocalTensor, Region
from mcore_reshard.planner.layout.megatron import MegatronBuild
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.model.precision import QUANTIZED as QUANTIZED_ROLES
from mcore_reshard.planner.model.precision import PrecisionError
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import GroupCast, Plan, QuantizedPair, TransferPattern
from mcore_reshard.planner.plan.plan_file import dump_plan, parse_plan
from mcore_reshard.planner.proof.prove import prove


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_a_quantized_plan_is_sound_and_delivers(case: Case) -> None:
    plan = case.plan()
    proof = prove(plan)
    assert proof.violations == ()
    assert proof.ok
    assert damage(plan) == []


@pytest.mark.parametrize("case", [case for case in QUANTIZED if case.plan().pairs], ids=str)
def test_every_element_lies_with_the_scale_of_its_own_block(case: Case) -> None:
    assert scale_damage(case.plan()) == []


@pytest.mark.parametrize("case", QUANTIZED, ids=str)
def test_scales_of_another_part_are_seen(case: Case) -> None:
    plan = case.plan()
    in_blocks = {pair.scales for pair in plan.pairs if plan.groups[pair.scales].shape != (1,)}
    patterns = list(plan.patterns)
    for pattern in {transfers.pattern for transfers in plan.transfer_groups if transfers.group in in_blocks}:
        dst = patterns[pattern].dst
        patterns[pattern] = replace(patterns[pattern], dst=replace(dst, pieces=dst.pieces[::-1]))
    assert bool(in_blocks) == bool(scale_damage(replace(plan, patterns=tuple(patterns))))


FP8 = Case("tiny-llama", "tp=2", "tp=4", dtypes=("fp8", "fp8"), block=(8, 8))
CAST = Case("tiny-llama", "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8))


def group_named(plan: Plan, pattern: str) -> int:
    return next(
        index for index, group in enumerate(plan.groups) if group.name_pattern == f"model.layers.{{layer}}.{pattern}"
    )


def pattern_of(plan: Plan, pattern: str) -> TransferPattern:
    group = group_named(plan, pattern)
    return plan.patterns[next(transfers.pattern for transfers in plan.transfer_groups if transfers.group == group)]


def reasons(plan: Plan) -> dict[str, str]:
    return {
        plan.groups[entry.group].name_pattern.removeprefix("model.layers.{layer}."): entry.reason for entry in plan.misc
    }


class TestLayouts:
    """Scales lie as their weights do, in blocks. tiny-llama: 8 heads of 8, 4 KV heads, hidden 64, MLP 96."""

    def test_fused_attention_rows_in_blocks(self) -> None:
        # linear_qkv on training rank 1: for KV groups 2 and 3 two query heads, k, v; a block is one head high
        held = pattern_of(FP8.plan(), "self_attn.k_proj.weight_scale_inv").src.pieces[1]
        name = "vp{vp}.decoder.layers.{layer}.self_attention.linear_qkv.weight._rowwise_scale_inv"
        assert [(p.tensor, p.region, p.origin) for p in held] == [
            (LocalTensor(name, (8, 8), "float32"), Region((2, 0), (3, 8)), (2, 0)),
            (LocalTensor(name, (8, 8), "float32"), Region((3, 0), (4, 8)), (6, 0)),
        ]

    def test_gate_and_up_share_a_tensor_of_scales(self) -> None:
        wanted = pattern_of(FP8.plan(), "mlp.up_proj.weight_scale_inv").dst.pieces[3]
        (piece,) = wanted
        assert piece.tensor == LocalTensor("model.layers.{layer}.mlp.gate_up_proj.weight_scale_inv", (6, 8), "float32")
        assert (piece.region, piece.origin) == (Region((9, 0), (12, 8)), (3, 0))

    def test_the_trainer_pads_columns_to_four_and_nobody_sends_them(self) -> None:
        source = pattern_of(FP8.plan(), "mlp.down_proj.weight_scale_inv").src  # [64, 48] on each rank: grid (8, 6)
        assert source.pieces[1][0].tensor.shape == (8, 8)
        assert source.pieces[1][0].region == Region((0, 6), (8, 12))
        assert [(entry.tensor.shape, entry.box) for entry in source.padding[1]] == [((8, 8), Region((0, 6), (8, 8)))]

    def test_mxfp8_pads_rows_to_128_as_well(self) -> None:
        plan = Case("tiny-llama", "tp=2", "tp=2", dtypes=("mxfp8", "mxfp8")).plan()
        name = "vp{vp}.decoder.layers.{layer}.self_attention.linear_proj.weight._rowwise_scale_inv"
        source = pattern_of(plan, "self_attn.o_proj.weight_scale").src  # [64, 32] on each rank: grid (64, 1)
        assert source.pieces[0][0].tensor == LocalTensor(name, (128, 4), "uint8")
        assert [entry.box for entry in source.padding[0]] == [Region((0, 1), (64, 4)), Region((64, 0), (128, 4))]

    def test_one_scale_of_a_whole_matrix_goes_to_every_part_of_it(self) -> None:
        plan = Case("tiny-llama", "tp=1", "tp=2", dtypes=("fp8", "fp8")).plan()
        pattern = pattern_of(plan, "self_attn.o_proj.weight_scale")
        assert pattern.src.pieces[0][0].tensor == LocalTensor(
            "vp{vp}.decoder.layers.{layer}.self_attention.linear_proj.weight._scale_inv", (1,), "float32"
        )
        assert [pieces[0].tensor.shape for pieces in pattern.dst.pieces] == [(1,), (1,)]
        assert [(overlap.src, overlap.dst, overlap.region) for overlap in pattern.overlaps] == [
            (0, 0, Region((0, 0), (1, 1))),
            (0, 1, Region((0, 0), (1, 1))),
        ]

    def test_one_scale_an_expert_lies_in_its_slot(self) -> None:
        plan = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", dtypes=("fp8", "fp8")).plan()
        (piece,) = pattern_of(plan, "mlp.experts.{expert}.down_proj.weight_scale").dst.pieces[0]
        assert piece.tensor == LocalTensor(
            "model.layers.{layer}.mlp.experts.routed_experts.w2_weight_scale", (8,), "float32"
        )
        assert (piece.view, piece.slot_dim, piece.dims) == ((8, 1, 1), 0, (1, 2))


class TestReasons:
    """Why a pair goes to misc: always the whole pair, and whatever shares a tensor with it."""

    def test_a_head_smaller_than_a_block(self) -> None:
        found = reasons(Case("tiny-llama", "tp=2", "tp=2", dtypes=("fp8", "fp8"), block=(16, 16)).plan())
        tensor = "vp{vp}.decoder.layers.{layer}.self_attention.linear_qkv.weight"
        assert (
            found["self_attn.k_proj.weight"]
            == f"trainer: {tensor} holds rows 0:8 of 32 at 16, which splits a block of 16x16"
        )
        assert found["self_attn.q_proj.weight_scale_inv"].startswith(f"shares {tensor} with")
        assert set(found) == {f"self_attn.{part}_proj.weight{scale}" for part in "qkv" for scale in ("", "_scale_inv")}

    def test_a_cut_through_a_block(self) -> None:
        found = reasons(Case("tiny-llama", "tp=2", "tp=4", dtypes=("fp8", "fp8"), block=(8, 32)).plan())
        assert found["mlp.down_proj.weight"] == found["mlp.down_proj.weight_scale_inv"]
        assert found["mlp.down_proj.weight"] == (
            "engine: model.layers.{layer}.mlp.down_proj.weight holds columns 0:24 of 96 at 0, which splits a block of 8x32:"
            " vLLM refuses to build a linear layer cut so"
        )

    def test_a_cut_through_a_block_of_what_the_engine_fuses_is_no_reason_for_it_to_refuse(self) -> None:
        found = reasons(Case("tiny-llama", "tp=1", "tp=2", dtypes=("fp8", "fp8"), block=(32, 8)).plan())
        assert found["mlp.gate_proj.weight"] == (
            "engine: model.layers.{layer}.mlp.gate_up_proj.weight holds rows 0:48 of 96 at 0, which splits a block of 32x8"
        )

    def test_experts_that_no_block_of_32_divides(self) -> None:
        found = reasons(Case("tiny-qwen3-moe", "tp=1", "tp=2", dtypes=("fp8", "fp8"), block=(8, 32)).plan())
        assert found["mlp.experts.{expert}.down_proj.weight"].endswith(
            "which splits a block of 8x32: vLLM refuses to build such experts, unless it is told a moe_backend that pads them"
        )

    @pytest.mark.parametrize("mesh", ["tp=1", "tp=3", "tp=2,ep=2"])
    def test_experts_that_are_not_whole_blocks_though_a_block_of_32_divides_them(self, mesh: str) -> None:
        block, changes = UNLOADABLE_EXPERTS
        heads = {"num_attention_heads": 6, "num_key_value_heads": 6, "vocab_size": 192} if mesh == "tp=3" else {}
        case = Case(
            "tiny-qwen3-moe",
            "tp=1",
            mesh,
            dtypes=("bf16", "fp8"),
            block=block,
            changes=tuple({**changes, **heads}.items()),
        )
        assert reasons(case.plan())["mlp.experts.{expert}.down_proj.weight"] == (
            "engine: block FP8: vLLM refuses to load experts of (128, 96), which are not whole blocks of (64, 64)"
        )

    def test_columns_that_no_mxfp8_has(self) -> None:
        widths = (("intermediate_size", 80),)
        plan = Case("tiny-llama", "tp=1", "tp=1", dtypes=("mxfp8", "mxfp8"), changes=widths).plan()
        reason = "engine: MXFP8: vLLM refuses to build a layer with 80 columns on a rank, no multiple of 32"
        assert reasons(plan) == {"mlp.down_proj.weight": reason, "mlp.down_proj.weight_scale": reason}

    def test_a_fused_tensor_with_one_scale(self) -> None:
        found = reasons(Case("tiny-llama", "tp=1", "tp=1", dtypes=("fp8", "fp8")).plan())
        assert found["mlp.gate_proj.weight"] == (
            "engine: model.layers.{layer}.mlp.gate_up_proj.weight holds other parameters too: vLLM brings their scales to"
            " the largest and requantizes after loading"
        )
        assert "mlp.down_proj.weight" not in found

    def test_a_scale_for_each_training_rank(self) -> None:
        found = reasons(Case("tiny-llama", "tp=2", "tp=1", dtypes=("fp8", "fp8")).plan())
        assert found["mlp.down_proj.weight"] == (
            "trainer: each of 2 training ranks has one scale of its own, for its part of the matrix"
        )

    @pytest.mark.parametrize(
        ("dtypes", "block", "reason"),
        [
            (("fp8", "bf16"), (8, 8), "trainer holds block FP8, engine bfloat16: nothing dequantizes on the way"),
            (("mxfp8", "fp8"), (8, 8), "trainer holds MXFP8, engine block FP8: nothing requantizes on the way"),
            (("bf16", "mxfp8"), (), "trainer holds bfloat16, engine MXFP8: nothing casts that on the way"),
            (("fp32", "fp8"), (8, 8), "trainer holds float32, engine block FP8: nothing casts that on the way"),
            (("bf16", "fp8"), (), "trainer holds bfloat16, engine per-tensor FP8: nothing casts that on the way"),
        ],
    )  # fmt: skip
    def test_formats_that_nothing_turns_into_each_other(
        self, dtypes: tuple[str, str], block: tuple[int, ...], reason: str
    ) -> None:
        plan = Case("tiny-llama", "tp=1", "tp=1", dtypes=dtypes, block=block).plan()
        assert prove(plan).ok
        assert reasons(plan)["self_attn.o_proj.weight"] == reason

    def test_the_local_experts_of_one_tensor_have_no_rows_to_block(self) -> None:
        build = MegatronBuild(experts="stacked")
        plan = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", build, dtypes=("bf16", "fp8"), block=(8, 8)).plan()
        assert reasons(plan)["mlp.experts.{expert}.down_proj.weight"] == (
            "trainer: no layout rule for the scales of vp{vp}.decoder.layers.{layer}.mlp.experts.weight2, which does not"
            " keep the matrix as [out, in]"
        )


class TestModulesThatStay:
    def test_layers_are_told_apart(self) -> None:
        kept = ("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.o_proj")
        plan = Case("tiny-llama", "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8), kept=kept).plan()
        down = [(g.layers, g.dtype) for g in plan.groups if g.name_pattern.endswith("down_proj.weight")]
        assert down == [((0, 2, 3), "float8_e4m3fn"), ((1,), "bfloat16")]
        assert not plan.misc

    @pytest.mark.parametrize(
        ("config", "kept", "problem"),
        [
            (
                "tiny-llama",
                ("model.layers.1.self_attn.q_proj",),
                "generation: vLLM quantizes all of model.layers.1.self_attn.qkv_proj or nothing, and only a part of it is"
                " in modules_to_not_convert of the quantization_config: list model.layers.1.self_attn.k_proj and"
                " model.layers.1.self_attn.v_proj too",
            ),
            (
                "tiny-deepseek-v3",
                ("model.layers.0.mlp.up_proj", "model.layers.2.self_attn.q_a_proj"),
                "list model.layers.2.self_attn.kv_a_proj_with_mqa too, and so on for 1 more",
            ),
        ],
    )
    def test_a_part_of_what_the_engine_fuses_cannot_stay_alone(
        self, config: str, kept: tuple[str, ...], problem: str
    ) -> None:
        case = Case(config, "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8), kept=kept)
        with pytest.raises(MeshError) as caught:
            case.plan()
        (violation,) = caught.value.violations
        assert violation.endswith(problem)

    def test_parts_that_the_engine_does_not_fuse_or_does_not_load_stay_alone(self) -> None:
        kept = ("model.layers.1.self_attn.kv_a_proj_with_mqa",)  # fused with q_a_proj, where there is one
        assert Case("tiny-moonlight", "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8), kept=kept).plan().pairs
        mtp = Case(
            "tiny-deepseek-v3", "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8),
            changes=(("num_nextn_predict_layers", 1),), kept=("model.layers.4.self_attn.q_a_proj",),
        )  # fmt: skip
        assert mtp.plan().pairs

    @pytest.mark.parametrize(
        ("config", "kept", "parts"),
        [
            ("tiny-llama", "model.layers.1.self_attn.qkv_proj", {"q_proj", "k_proj", "v_proj"}),
            ("tiny-llama", "model.layers.1.mlp.gate_up_proj", {"gate_proj", "up_proj"}),
            ("tiny-deepseek-v3", "model.layers.1.self_attn.fused_qkv_a_proj", {"q_a_proj", "kv_a_proj_with_mqa"}),
            ("tiny-deepseek-v3", "model.layers.1.mlp.shared_experts.gate_up_proj", {"gate_proj", "up_proj"}),
        ],
    )
    def test_a_module_may_be_listed_by_the_name_that_the_engine_gives_it(
        self, config: str, kept: str, parts: set[str]
    ) -> None:
        plan = Case(config, "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8), kept=(kept,)).plan()
        stay = [g for g in plan.groups if g.layers == (1,) and g.dtype == "bfloat16" and g.role in QUANTIZED_ROLES]
        assert {group.name_pattern.split(".")[-2] for group in stay} == parts and len(stay) == len(parts)

    def test_experts_stay_as_one(self) -> None:
        kept = ("model.layers.1.mlp.experts.3.up_proj",)
        case = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8), kept=kept)
        experts = [g for g in case.plan().groups if ".experts." in g.name_pattern and g.layers == (1,)]
        assert {group.dtype for group in experts} == {"bfloat16"}
        assert len(experts) == 3

    def test_what_is_never_quantized(self) -> None:
        plan = Case("tiny-deepseek-v3", "tp=2", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8)).plan()
        kept = {group.role for group in plan.groups if group.dtype not in {"float8_e4m3fn"}} - QUANTIZED_ROLES
        assert {Role.EMBEDDING, Role.LM_HEAD, Role.ROUTER, Role.EXPERT_BIAS, Role.MLA_Q_A_NORM} <= kept
        assert {g.dtype for g in plan.groups if g.role is Role.EXPERT_BIAS} == {"float32"}


class TestLayersThatTheTrainerKeeps:
    """first_last_layers_bf16: linear weights of whole layers stay in bf16 in a trainer that is otherwise in FP8."""

    CASE = Case(
        "tiny-llama", "tp=2,pp=2,layers=3+1", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8), unquantized=(0, 3),
        kept=(*LAST_LAYER, *(module.replace("layers.3", "layers.2") for module in LAST_LAYER)),
    )  # fmt: skip

    def test_each_layer_goes_its_own_way(self) -> None:
        plan = self.CASE.plan()
        assert prove(plan).ok
        pairs, casts = {pair.weight for pair in plan.pairs}, {c.group: (c.src, c.dst) for c in plan.casts}
        reason = {entry.group: entry.reason for entry in plan.misc}
        for role in (Role.Q, Role.K, Role.V, Role.O, Role.GATE, Role.UP, Role.DOWN):
            groups = [g for g, group in enumerate(plan.groups) if group.role is role and group.dtype != "float32"]
            found = {plan.groups[g].layers: (g in pairs, casts.get(g), reason.get(g)) for g in groups}
            assert found == {
                (0,): (True, ("bfloat16", "float8_e4m3fn"), None),
                (1,): (True, None, None),
                (2,): (False, None, "trainer holds block FP8, engine bfloat16: nothing dequantizes on the way"),
                (3,): (False, None, None),
            }

    def test_what_a_rank_holds_is_said_layer_by_layer(self) -> None:
        first, last = (schedule_of(self.CASE.plan(), "train", rank) for rank in (0, 2))
        held = {tensor.name: tensor for tensor in (*first.tensors, *last.tensors)}
        fc2 = "vp0.decoder.layers.{}.mlp.linear_fc2.weight"
        assert [held[fc2.format(layer)].dtype for layer in (0, 1)] == ["bfloat16", "float8_e4m3fn"]
        scales = [held[fc2.format(layer) + "._rowwise_scale_inv"].shape for layer in (0, 1)]
        assert scales == [(8, 6), (8, 8)]  # computed, and Transformer Engine's with its padding
        assert fc2.format(2) not in {tensor.name for tensor in first.tensors}  # misc
        assert {t.dtype for t in last.tensors} == {"bfloat16"} and not last.casts  # the last stage has layer 3 alone

    def test_chunks_of_a_pipeline_count_layers_of_the_whole_model(self) -> None:
        train = "pp=2,vpp=2,layers=1+2+0+1"  # stage 0 has layer 0, stage 1 has 1 and 2, and 3 in its second chunk
        plan = Case("tiny-llama", train, "tp=1", dtypes=("fp8", "fp8"), block=(8, 8), unquantized=(1, 3)).plan()
        names = [schedule_of(plan, "train", rank) for rank in (0, 1)]
        cast = [sorted({s.tensors[cast.tensor].name.partition(".mlp.")[0] for cast in s.casts
                        if ".mlp." in s.tensors[cast.tensor].name}) for s in names]  # fmt: skip
        assert cast == [[], ["vp0.decoder.layers.0", "vp1.decoder.layers.0"]]

    def test_all_layers_kept_are_a_trainer_that_quantizes_nothing(self) -> None:
        kept = Case("tiny-deepseek-v3", "pp=2", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8), unquantized=(3, 0, 2, 1))
        assert kept.plan().digest == replace(kept, dtypes=("bf16", "fp8"), unquantized=()).plan().digest

    @pytest.mark.parametrize("train_dtype", [None, "bf16", "fp32"])
    def test_a_trainer_that_quantizes_nothing_keeps_all_layers_anyway(self, train_dtype: str | None) -> None:
        case = Case("tiny-llama", "tp=2", "tp=2", dtypes=(train_dtype, "fp8"), block=(8, 8), unquantized=(0, 3))
        assert case.plan().digest == replace(case, unquantized=()).plan().digest

    def test_groups_stay_whole_where_no_layer_is_kept(self) -> None:
        layers = {group.layers for group in FP8.plan().groups}
        assert layers == {(), (0, 1, 2, 3)}

    def test_order_and_repetition_do_not_matter(self) -> None:
        again = replace(self.CASE, unquantized=(3, 0, 3))
        assert again.plan().digest == self.CASE.plan().digest != replace(self.CASE, unquantized=()).plan().digest

    def test_layers_that_the_model_has_not_are_refused(self) -> None:
        problem = "the trainer cannot keep layers -1, 4 unquantized: the model has 0 to 3"
        with pytest.raises(PrecisionError, match=problem):
            replace(self.CASE, unquantized=(0, 4, -1)).plan()


class TestWhatMxfp8Takes:
    """Compared with vLLM itself in tests/engine/test_mxfp8.py."""

    def plan(self, *ignored: str, **changes: object) -> Plan:
        stated = {"quant_method": "mxfp8", "ignored_layers": list(ignored)}
        config = {**load_config("tiny-llama"), "quantization_config": stated, **changes}
        return make_plan(parameters_from_config(config), TrainMesh(), GenMesh(), train_dtype="mxfp8", gen_dtype="mxfp8")

    def test_misc_says_that_the_loader_casts(self) -> None:
        narrowed = Case("tiny-llama", "tp=2", "tp=8", policy="conservative", dtypes=("fp32", "bf16")).plan()
        said = "; the trainer holds float32, the engine's loader casts to what the engine keeps"
        assert {narrowed.groups[entry.group].role for entry in narrowed.misc} == {Role.Q, Role.K, Role.V}
        assert all(entry.reason.endswith(said) for entry in narrowed.misc)
        alike = Case("tiny-llama", "tp=2", "tp=8", policy="conservative").plan()
        assert alike.misc and not any("casts" in entry.reason for entry in alike.misc)

    def test_the_output_layer_goes_to_misc_as_a_pair(self) -> None:
        plan = self.plan()
        assert prove(plan).ok
        reason = (
            "engine: vLLM keeps lm_head in MXFP8 as well, which no trainer does: list it in ignored_layers of the"
            " quantization_config"
        )
        found = {plan.groups[u.group].name_pattern: (plan.groups[u.group].dtype, u.reason) for u in plan.misc}
        assert found == {"lm_head.weight": ("float8_e4m3fn", reason), "lm_head.weight_scale": ("uint8", reason)}

    @pytest.mark.parametrize("listed", ["lm_head", "head", "lm_*"])
    def test_listed_by_its_name_a_part_of_it_or_a_pattern_it_stays(self, listed: str) -> None:
        plan = self.plan(listed)
        assert not plan.misc
        assert [group.dtype for group in plan.groups if group.role is Role.LM_HEAD] == ["bfloat16"]

    def test_a_tied_one_has_no_scales(self) -> None:
        with pytest.raises(MeshError, match=r"with scales that nothing fills: list lm_head in ignored_layers of the"):
            self.plan(tie_word_embeddings=True)
        assert not self.plan("lm_head", tie_word_embeddings=True).misc

    def test_without_a_config_for_it_the_output_layer_is_assumed_to_stay(self) -> None:
        for stated in (None, {"quant_method": "awq", "modules_to_not_convert": ["model.layers.0.mlp.down_proj"]}):
            plan = self.plan(quantization_config=stated)
            assert not plan.misc
            assert [group.dtype for group in plan.groups if group.role is Role.DOWN] == ["float8_e4m3fn", "uint8"]


class TestSchedules:
    def test_a_cast_names_its_tensor_its_scales_and_its_block(self) -> None:
        schedule = schedule_of(CAST.plan(), "train", 0)
        names = [tensor.name for tensor in schedule.tensors]
        fc1 = "vp0.decoder.layers.0.mlp.linear_fc1.weight"
        (cast,) = [cast for cast in schedule.casts if names[cast.tensor] == fc1]
        assert (cast.to, cast.block) == ("float8_e4m3fn", (8, 8))
        assert schedule.tensors[cast.tensor] == LocalTensor(fc1, (96, 64), "bfloat16")
        assert schedule.tensors[cast.scales] == LocalTensor(fc1 + "._rowwise_scale_inv", (12, 8), "float32")
        assert set(schedule.computed) == {cast.scales for cast in schedule.casts}
        assert len(schedule.casts) == 16  # linear_qkv, linear_proj, linear_fc1, linear_fc2 of four layers

    def test_wire_bytes_are_those_of_the_destination(self) -> None:
        sends = schedule_of(CAST.plan(), "train", 0).stages[0].sends
        plan = CAST.plan()
        down = group_named(plan, "mlp.down_proj.weight")
        rows = [i for i in range(len(sends)) if plan.transfer_groups[sends.transfer_group[i]].group == down]
        assert {int(sends.nbytes[i]) for i in rows} == {64 * 48}
        assert plan.wire_bytes["float8_e4m3fn"] == 4 * (64 * 64 * 2 + 2 * 32 * 64 + 3 * 64 * 96)
        assert sum(plan.wire_bytes.values()) == int(plan.recv_bytes.sum())

    def test_nothing_is_cast_between_equals_or_on_the_generation_side(self) -> None:
        assert schedule_of(FP8.plan(), "train", 0).casts == ()
        assert schedule_of(CAST.plan(), "gen", 0).casts == ()
        assert schedule_of(CAST.plan(), "gen", 0).computed == ()

    def test_master_weights_are_cast_without_scales(self) -> None:
        schedule = schedule_of(Case("tiny-llama", "tp=2", "tp=2", dtypes=("fp32", "bf16")).plan(), "train", 0)
        assert {(cast.to, cast.scales) for cast in schedule.casts} == {("bfloat16", None)}
        assert len(schedule.casts) == len(schedule.tensors)

    def test_a_routers_bias_of_a_checkpoint_in_float32_keeps_its_dtype(self) -> None:
        changes = (("torch_dtype", "float32"),)
        plan = Case("tiny-deepseek-v3", "tp=2,ep=2", "tp=2", changes=changes, dtypes=("fp32", "bf16")).plan()
        assert {g.dtype for g in plan.groups if g.role is Role.EXPERT_BIAS} == {"float32"}

    def test_a_file_gives_back_pairs_and_casts(self) -> None:
        plan = CAST.plan()
        again = parse_plan(dump_plan(plan))
        assert (again.pairs, again.casts, again.digest) == (plan.pairs, plan.casts, plan.digest)
        assert plan.pairs[0] == QuantizedPair(2, 3, (8, 8))
        assert plan.casts[0] == GroupCast(2, "bfloat16", "float8_e4m3fn")


def test_an_unknown_precision_is_refused() -> None:
    with pytest.raises(PrecisionError, match="unknown precision 'int4', known: bf16, fp32, fp8, mxfp8"):
        Case("tiny-llama", "tp=1", "tp=1", dtypes=("int4", None)).plan()
