"""Mutants that are plans. Each is sealed, written to a file's text, read back and proven, as a real one would be."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
from helpers.plans import Case
from helpers.simulate import damage

from mcore_reshard.planner.layout.geometry import Region
from mcore_reshard.planner.layout.megatron import MegatronBuild
from mcore_reshard.planner.layout.mesh import GenMesh, LayerPlace
from mcore_reshard.planner.layout.partitions import Padding
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import Plan, UnplannedGroup
from mcore_reshard.planner.plan.plan_file import VERSION, PlanFileError, dump_plan, parse_plan
from mcore_reshard.planner.proof.prove import prove

from .edits import (
    edit_transfers,
    moved,
    recut,
    retensor,
    rows,
    sealed,
    transfer_groups_of,
    whole_of,
    with_rank_grid,
    without_groups,
    without_transfers,
)
from .records import Mutant, Rejection

LLAMA = Case("tiny-llama", "tp=2,pp=2,dp=2", "tp=4")
FEW_HEADS = Case("tiny-llama", "tp=4", "tp=8", changes=(("num_key_value_heads", 2),))
PADDED = Case("tiny-llama", "tp=4", "tp=2", changes=(("vocab_size", 250),))
TIED = Case("tiny-llama-tied", "pp=2", "tp=2,pp=2")
DATA_PARALLEL = Case("tiny-llama", "tp=2", "tp=2,dp=2")
MOE = Case("tiny-qwen3-moe", "tp=2,ep=4,dp=2", "tp=2")
MOE_ETP = Case("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2,dp=2,ep=4")
UNEVEN = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=4,ep=4", changes=(("num_experts", 10),))
DEEPSEEK = Case("tiny-deepseek-v3", "tp=2,ep=2,pp=2", "tp=2")
WITH_MTP = Case("tiny-deepseek-v3", "tp=1,pp=2,layers=3+1", "tp=2", changes=(("num_nextn_predict_layers", 1),))
NEMOTRON = Case("tiny-nemotron-h", "tp=2,ep=2,pp=2", "tp=2")
GPT_OSS = Case("tiny-gpt-oss", "ep=2,dp=2", "tp=2")
SEQUENTIAL = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", MegatronBuild(experts="sequential"))

Break = Callable[[Plan], Plan]

_found: list[Mutant] = []


def mutants_of(found: list[Mutant]) -> Callable[..., Callable[[Break], Break]]:
    """A decorator that registers ways to break a case's plan, and the rule of the proof that must refuse each."""

    def mutant(bug: int, case: Case, rule: str, *, harm: str = "") -> Callable[[Break], Break]:
        """The docstring of what is decorated says what is wrong. `harm` says what the bug leads to where every element
        would still arrive."""

        def register(breaks: Break) -> Break:
            what = (breaks.__doc__ or "").strip()
            shows = partial(_damage, case, breaks)
            found.append(Mutant(bug, what, ("proof", rule), partial(_proven, case, breaks, rule), shows, harm))
            return breaks

        return register

    return mutant


mutant = mutants_of(_found)


def _proven(case: Case, breaks: Break, rule: str) -> Rejection | None:
    proof = prove(parse_plan(dump_plan(sealed(breaks(case.plan())))))
    if proof.ok or not proof.violations:
        return None
    first = next((v for v in proof.violations if v.rule == rule), proof.violations[0])
    return Rejection("proof", first.rule, first.parameter, first.ranks, first.message)


def _damage(case: Case, breaks: Break) -> list[str]:
    return damage(case.plan(), breaks(case.plan()))


# --- 1


@mutant(1, LLAMA, "source")
def rank_zero_slices(plan: Plan) -> Plan:
    """every training rank's share of o_proj is described as rank 0's"""
    first = plan.patterns[plan.transfer_groups[transfer_groups_of(plan, Role.O)[0]].pattern].src.pieces[0]
    return recut(plan, Role.O, src=lambda c, pieces: first)


@mutant(1, FEW_HEADS, "tensors")
def rank_zero_offsets(plan: Plan) -> Plan:
    """offsets into linear_qkv are those of rank 0 on every rank, whose shares differ"""

    def offsets(c: int, pieces):  # type: ignore[no-untyped-def]
        return [moved(piece, 0) for piece in pieces]

    return recut(recut(plan, Role.K, src=offsets), Role.Q, src=offsets)


@mutant(1, LLAMA, "consumed")
def rank_zero_wants(plan: Plan) -> Plan:
    """every generation rank is sent what rank 0 wants of down_proj"""
    first = plan.patterns[plan.transfer_groups[transfer_groups_of(plan, Role.DOWN)[0]].pattern].dst.pieces[0]
    return recut(plan, Role.DOWN, dst=lambda c, pieces: first)


# --- 2


@mutant(2, LLAMA, "stages", harm="later stages are waited for before earlier ones are complete")
def stages_regrouped(plan: Plan) -> Plan:
    """parameters are regrouped by size, across pipeline stages"""
    return replace(
        plan,
        transfer_groups=tuple(
            sorted(plan.transfer_groups, key=lambda b: -plan.patterns[b.pattern].overlap_bytes.sum())
        ),
    )


@mutant(2, DATA_PARALLEL, "holders")
def replicas_exchanged(plan: Plan) -> Plan:
    """generation parts are listed in another order than the ranks that hold them"""
    dst = plan.rank_grids[plan.transfer_groups[transfer_groups_of(plan, Role.O)[0]].dst]
    plan, grid = with_rank_grid(plan, dst[::-1].copy())
    return edit_transfers(plan, transfer_groups_of(plan, Role.O), lambda b: replace(b, dst=grid))


# --- 3, 4, 12, 17, 25: dtypes


@mutant(3, DEEPSEEK, "bytes")
def router_bias_narrowed(plan: Plan) -> Plan:
    """the engine holds e_score_correction_bias as bf16, the trainer as fp32"""
    return retensor(plan, Role.EXPERT_BIAS, lambda t: replace(t, dtype="bfloat16"), source=False)


@mutant(3, DEEPSEEK, "bytes")
def router_bias_sent_narrow(plan: Plan) -> Plan:
    """the trainer sends e_score_correction_bias as bf16, the engine holds fp32"""
    return retensor(plan, Role.EXPERT_BIAS, lambda t: replace(t, dtype="bfloat16"), source=True)


@mutant(4, LLAMA, "tensors")
def half_a_fused_tensor_upcast(plan: Plan) -> Plan:
    """gate_proj is planned as fp32 on both ends, its other half up_proj is still bf16"""
    for source in (True, False):
        plan = retensor(plan, Role.GATE, lambda t: replace(t, dtype="float32"), source=source)
    return plan


@mutant(12, MOE, "bytes")
def fp8_awaited(plan: Plan) -> Plan:
    """the engine awaits w2 as fp8, the trainer sends bf16"""
    return retensor(plan, Role.EXPERT_DOWN, lambda t: replace(t, dtype="float8_e4m3fn"), source=False)


@mutant(17, MOE, "bounds")
def unknown_dtype(plan: Plan) -> Plan:
    """w2 has a packed four-bit dtype on both ends that no transport can count"""
    for source in (True, False):
        plan = retensor(plan, Role.EXPERT_DOWN, lambda t: replace(t, dtype="float4_e2m1fn_x2"), source=source)
    return plan


@mutant(25, LLAMA, "bytes")
def weight_without_its_scale(plan: Plan) -> Plan:
    """the engine quantized down_proj to fp8; the plan has no scale for it"""
    return retensor(plan, Role.DOWN, lambda t: replace(t, dtype="float8_e4m3fn"), source=False)


@mutant(25, NEMOTRON, "order")
def in_proj_cut_through_its_sections(plan: Plan) -> Plan:
    """in_proj is cut in equal parts by rank, through z, x, B, C and dt"""
    whole = whole_of(plan, Role.MAMBA_IN).stop[0]

    def equal_parts(c: int, pieces):  # type: ignore[no-untyped-def]
        return [rows(pieces[0], c * whole // 2, (c + 1) * whole // 2)]

    return recut(plan, Role.MAMBA_IN, dst=equal_parts)


# --- 5


@mutant(5, NEMOTRON, "groups")
def up_proj_has_no_route(plan: Plan) -> Plan:
    """up_proj of non-gated experts gets no route, there being no gate to pair it with"""
    return without_transfers(plan, transfer_groups_of(plan, Role.EXPERT_UP))


@mutant(5, NEMOTRON, "tensors")
def up_proj_as_half(plan: Plan) -> Plan:
    """w13 of non-gated experts is laid out as if a gate came first"""

    def second_half(c: int, pieces):  # type: ignore[no-untyped-def]
        (piece,) = pieces
        experts, inner, hidden = piece.tensor.shape
        tensor = replace(piece.tensor, shape=(experts, 2 * inner, hidden))
        return [replace(piece, tensor=tensor, view=tensor.shape, origin=(0, inner, 0))]

    return recut(plan, Role.EXPERT_UP, dst=second_half)


# --- 6


@mutant(6, LLAMA, "order")
def gate_and_up_exchanged(plan: Plan) -> Plan:
    """gate_up_proj holds up first"""
    half = plan.patterns[plan.transfer_groups[transfer_groups_of(plan, Role.UP)[0]].pattern].dst.pieces[0][0].origin[0]
    plan = recut(plan, Role.GATE, dst=lambda c, pieces: [moved(piece, half) for piece in pieces])
    return recut(plan, Role.UP, dst=lambda c, pieces: [moved(piece, 0) for piece in pieces])


@mutant(6, LLAMA, "storage")
def gate_and_up_interleaved(plan: Plan) -> Plan:
    """rows of gate and up alternate in gate_up_proj"""

    def alternating(half: int):  # type: ignore[no-untyped-def]
        def change(c: int, pieces):  # type: ignore[no-untyped-def]
            (piece,) = pieces
            total, hidden = piece.tensor.shape
            return [replace(piece, view=(total // 2, 2, hidden), origin=(0, half, 0), dims=(0, 2))]

        return change

    return recut(recut(plan, Role.GATE, dst=alternating(0)), Role.UP, dst=alternating(1))


@mutant(6, DATA_PARALLEL, "order")
def fused_before_cut(plan: Plan) -> Plan:
    """[gate; up] is cut as one matrix: tensor-parallel rank 0 gets all of gate, rank 1 all of up"""
    inner = whole_of(plan, Role.GATE).stop[0]

    def all_on(rank: int):  # type: ignore[no-untyped-def]
        return lambda c, pieces: [rows(pieces[0], 0, inner, at=0)] if c == rank else []

    return recut(recut(plan, Role.GATE, dst=all_on(0)), Role.UP, dst=all_on(1))


@mutant(6, MOE, "order")
def expert_gate_and_up_exchanged(plan: Plan) -> Plan:
    """linear_fc1 of every expert is read as [up; gate]"""
    half = whole_of(plan, Role.EXPERT_GATE).stop[0]
    plan = recut(plan, Role.EXPERT_GATE, src=lambda c, pieces: [moved(piece, half) for piece in pieces])
    return recut(plan, Role.EXPERT_UP, src=lambda c, pieces: [moved(piece, 0) for piece in pieces])


@mutant(6, GPT_OSS, "storage")
def gpt_oss_rows_not_interleaved(plan: Plan) -> Plan:
    """the engine's w13 of gpt-oss is filled with [gate; up] halves, where its rows alternate"""

    def halves(c: int, pieces):  # type: ignore[no-untyped-def]
        (piece,) = pieces
        experts, inner, two, hidden = piece.view
        return [replace(piece, view=(experts, two, inner, hidden), dims=(0, 3, 2, 1))]

    return recut(plan, Role.STACKED_GATE_UP, dst=halves)


# --- 7


@mutant(7, MOE, "holders")
def experts_on_the_dense_mesh(plan: Plan) -> Plan:
    """experts of ETP = 1 are looked for at the dense coordinates, tensor parallel outermost"""
    dense = plan.train.dense_ranks(0).reshape(4, 1, 1)
    return _experts_at(plan, lambda ep: dense[ep])


@mutant(7, MOE_ETP, "holders")
def expert_tensor_parallel_ranks_exchanged(plan: Plan) -> Plan:
    """expert tensor parallelism is counted outside of expert parallelism"""
    ranks = plan.train.expert_ranks(0).transpose(1, 0, 2).reshape(2, 2, 1)
    return _experts_at(plan, lambda ep: ranks[ep])


@mutant(7, MOE, "references")
def experts_cut_by_dense_tp(plan: Plan) -> Plan:
    """experts are held by the dense tensor-parallel ranks, which hold whole experts each"""
    return _experts_at(plan, lambda ep: plan.train.dense_ranks(0))


def _experts_at(plan: Plan, ranks_of) -> Plan:  # type: ignore[no-untyped-def]
    experts = transfer_groups_of(plan, Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)
    local = 8 // plan.train.ep
    for index in experts:
        plan, grid = with_rank_grid(
            plan, np.ascontiguousarray(ranks_of(plan.transfer_groups[index].experts[0] // local))
        )
        plan = edit_transfers(plan, [index], lambda b, src=grid: replace(b, src=src))  # type: ignore[misc]
    return plan


# --- 8


def _heads_of_rank(plan: Plan, head_of) -> Plan:  # type: ignore[no-untyped-def]
    for role in (Role.K, Role.V):
        rows_each = (
            plan.patterns[plan.transfer_groups[transfer_groups_of(plan, role)[0]].pattern]
            .dst.pieces[0][0]
            .region.extents[0]
        )

        def change(c: int, pieces, rows_each: int = rows_each):  # type: ignore[no-untyped-def]
            head = head_of(c)
            return [rows(pieces[0], head * rows_each, (head + 1) * rows_each)] if head is not None else []

        plan = recut(plan, role, dst=change)
    return plan


@mutant(8, FEW_HEADS, "order")
def heads_round_robin(plan: Plan) -> Plan:
    """two KV heads over eight ranks are dealt out in turn, where neighbors share one"""
    return _heads_of_rank(plan, lambda c: c % 2)


@mutant(8, FEW_HEADS, "order")
def heads_uneven(plan: Plan) -> Plan:
    """two KV heads over eight ranks: five hold the first, three the second"""
    return _heads_of_rank(plan, lambda c: int(c >= 5))


@mutant(8, FEW_HEADS, "tensors")
def heads_not_replicated(plan: Plan) -> Plan:
    """each KV head is sent to one rank, the other three get none"""
    return _heads_of_rank(plan, lambda c: c // 4 if c % 4 == 0 else None)


@mutant(8, FEW_HEADS, "consumed")
def one_head_for_all(plan: Plan) -> Plan:
    """every rank gets KV head 0"""
    return _heads_of_rank(plan, lambda c: 0)


# --- 9


@mutant(9, NEMOTRON, "places")
def stage_zero_by_default(plan: Plan) -> Plan:
    """`backbone.` layers are not recognized and looked for on stage 0"""
    later = [i for i, b in enumerate(plan.transfer_groups) if b.pp_stage == 1 and b.layers[0].layer >= 0]
    first = {b.group: b.src for b in reversed(plan.transfer_groups) if b.pp_stage == 0}
    at_zero = {plan.rank_grids[b.src].shape: b.src for b in plan.transfer_groups if b.pp_stage == 0}

    def default(transfers):  # type: ignore[no-untyped-def]
        src = first.get(transfers.group, at_zero[plan.rank_grids[transfers.src].shape])
        return replace(transfers, pp_stage=0, src=src)

    return edit_transfers(plan, later, default)


@mutant(9, LLAMA, "holders")
def stage_forgotten(plan: Plan) -> Plan:
    """the second stage's layers are sent by the first stage's ranks"""
    first = {plan.rank_grids[b.src].shape: b.src for b in plan.transfer_groups if b.pp_stage == 0}
    later = [i for i, b in enumerate(plan.transfer_groups) if b.pp_stage == 1]
    return edit_transfers(plan, later, lambda b: replace(b, src=first[plan.rank_grids[b.src].shape]))


@mutant(9, Case("tiny-llama", "tp=2", "tp=2,pp=2"), "holders")
def engine_stage_zero(plan: Plan) -> Plan:
    """all layers are written to the engine's first stage"""
    for index in [i for i, b in enumerate(plan.transfer_groups) if plan.rank_grids[b.dst].min() > 0]:
        shape = plan.rank_grids[plan.transfer_groups[index].dst].shape
        plan, grid = with_rank_grid(plan, plan.gen.dense_ranks(0).reshape(shape))
        plan = edit_transfers(plan, [index], lambda b, dst=grid: replace(b, dst=dst))  # type: ignore[misc]
    return plan


# --- 10


@mutant(10, LLAMA, "groups")
def unmapped_parameter(plan: Plan) -> Plan:
    """a parameter without a mapping is skipped"""
    return without_transfers(plan, transfer_groups_of(plan, Role.LM_HEAD))


@mutant(10, LLAMA, "groups")
def excluded_with_a_reason(plan: Plan) -> Plan:
    """a parameter is declared excluded, as prediction layers may be"""
    (group,) = {plan.transfer_groups[i].group for i in transfer_groups_of(plan, Role.O)}
    plan = without_transfers(plan, transfer_groups_of(plan, Role.O))
    return replace(plan, excluded=(*plan.excluded, UnplannedGroup(group, "unmapped")))


@mutant(10, LLAMA, "arrivals")
def one_layer_skipped(plan: Plan) -> Plan:
    """the last layer of a stage is skipped for one parameter"""
    index = transfer_groups_of(plan, Role.O)[0]
    return edit_transfers(plan, [index], lambda b: replace(b, layers=b.layers[:-1]))


@mutant(10, TIED, "arrivals")
def tied_head_skipped(plan: Plan) -> Plan:
    """the tied embedding reaches the engine's first stage, not the last, where it is the head"""
    return without_transfers(plan, transfer_groups_of(plan, Role.EMBEDDING)[1:])


@mutant(10, LLAMA, "tensors")
def part_of_a_fused_tensor_unlisted(plan: Plan) -> Plan:
    """the model's parameters does not list v_proj"""
    return without_groups(plan, Role.V)


# --- 11


@mutant(11, LLAMA, "groups", harm="one side enters the misc broadcast, the other does not")
def decided_twice(plan: Plan) -> Plan:
    """the sending side takes a parameter for misc, the receiving side for bulk"""
    (group,) = {plan.transfer_groups[i].group for i in transfer_groups_of(plan, Role.O)}
    return replace(plan, misc=(*plan.misc, UnplannedGroup(group, "matches the blacklist")))


@mutant(11, LLAMA, "names")
def hf_names_in_the_trainer(plan: Plan) -> Plan:
    """HF names are used for the trainer's tensors"""
    name = "model.layers.{layer}.self_attn.o_proj.weight"
    return retensor(plan, Role.O, lambda t: replace(t, name=name), source=True)


@mutant(11, LLAMA, "groups", harm="reports and misc exports mean another parameter")
def listed_under_two_names(plan: Plan) -> Plan:
    """two groups claim one HF name"""
    o, down = (plan.transfer_groups[transfer_groups_of(plan, role)[0]].group for role in (Role.O, Role.DOWN))
    groups = list(plan.groups)
    groups[down] = replace(groups[down], name_pattern=groups[o].name_pattern)
    return replace(plan, groups=tuple(groups))


# --- 13


@mutant(13, DATA_PARALLEL, "holders", harm="shares of a new plan would be cut for tp=4")
def tp_is_the_world(plan: Plan) -> Plan:
    """the engine of tp=2, dp=2 is taken for tp=4"""
    return replace(plan, gen=GenMesh(tp=4))


@mutant(13, DATA_PARALLEL, "holders")
def cut_by_the_world(plan: Plan) -> Plan:
    """shares are cut for tp=4 and sent to an engine of tp=2, dp=2"""
    return replace(replace(DATA_PARALLEL, gen="tp=4").plan(), gen=plan.gen)


@mutant(13, DATA_PARALLEL, "holders")
def data_parallel_forgotten(plan: Plan) -> Plan:
    """only the first replica of the engine is refitted"""
    return replace(replace(DATA_PARALLEL, gen="tp=2").plan(), gen=plan.gen)


# --- 18


@mutant(18, WITH_MTP, "places")
def prediction_layer_as_decoder_layer(plan: Plan) -> Plan:
    """the prediction layer is planned as the decoder's next layer"""
    number = next(i for i, g in enumerate(plan.groups) if g.mtp and g.role is Role.MLA_O)
    (layer,) = plan.groups[number].layers
    groups = list(plan.groups)
    groups[number] = replace(groups[number], mtp=False)
    like = plan.transfer_groups[transfer_groups_of(plan, Role.MLA_O)[-1]]
    added = replace(like, group=number, layers=(LayerPlace(layer, 0, like.layers[-1].local + 1),))
    excluded = tuple(u for u in plan.excluded if u.group != number)
    return replace(plan, groups=tuple(groups), transfer_groups=(*plan.transfer_groups, added), excluded=excluded)


@mutant(18, TIED, "places")
def embedding_from_the_last_stage(plan: Plan) -> Plan:
    """the shared embedding is read from its copy on the last stage"""
    last = next(b.src for b in plan.transfer_groups if b.pp_stage == 1)
    return edit_transfers(plan, transfer_groups_of(plan, Role.EMBEDDING), lambda b: replace(b, pp_stage=1, src=last))


@mutant(18, TIED, "arrivals")
def embedding_from_both_stages(plan: Plan) -> Plan:
    """both copies of the shared embedding are sent"""
    return replace(plan, transfer_groups=tuple(sorted(
        (*plan.transfer_groups, plan.transfer_groups[transfer_groups_of(plan, Role.EMBEDDING)[0]]), key=lambda b: b.pp_stage,
    )))  # fmt: skip


# --- 20, 23


@mutant(20, LLAMA, "stages", harm="stages are waited for in a circle by ranks that count them upwards")
def stages_backwards(plan: Plan) -> Plan:
    """the last stage goes first"""
    return replace(plan, transfer_groups=tuple(sorted(plan.transfer_groups, key=lambda b: -b.pp_stage)))


@mutant(23, NEMOTRON, "groups")
def mixer_d_dropped(plan: Plan) -> Plan:
    """mixer.D is counted as loaded with A_log, and not sent"""
    return without_transfers(plan, transfer_groups_of(plan, Role.MAMBA_D))


@mutant(23, NEMOTRON, "tensors")
def written_twice(plan: Plan) -> Plan:
    """mixer.D and mixer.dt_bias are written to one tensor"""
    return retensor(
        plan, Role.MAMBA_D, lambda t: replace(t, name=t.name.replace("mixer.D", "mixer.dt_bias")), source=False
    )


# --- 26


@mutant(26, MOE, "arrivals")
def last_expert_left_in_the_next_bucket(plan: Plan) -> Plan:
    """the last expert of one rank is not sent"""
    index = transfer_groups_of(plan, Role.EXPERT_DOWN)[0]
    return edit_transfers(plan, [index], lambda b: replace(b, experts=(b.experts[0], b.experts[1] - 1)))


@mutant(26, MOE, "tensors")
def half_of_a_fused_tensor_on_misc(plan: Plan) -> Plan:
    """gate of w13 goes to misc, up stays bulk"""
    (group,) = {plan.transfer_groups[i].group for i in transfer_groups_of(plan, Role.EXPERT_GATE)}
    plan = without_transfers(plan, transfer_groups_of(plan, Role.EXPERT_GATE))
    return replace(plan, misc=(UnplannedGroup(group, "a reason"),))


@mutant(26, LLAMA, "places", harm="what is bound next is looked up in the wrong pipeline")
def stale_pipeline(plan: Plan) -> Plan:
    """layers are looked up in the pipeline of an earlier run"""
    return replace(plan, train=replace(plan.train, layers=(3, 1)))


@mutant(26, SEQUENTIAL, "holders")
def experts_shifted(plan: Plan) -> Plan:
    """local experts are counted from one"""
    experts = transfer_groups_of(plan, Role.EXPERT_DOWN)
    return edit_transfers(plan, experts, lambda b: replace(b, src_slot=b.src_slot + 1))


# --- 29


@mutant(29, UNEVEN, "holders")
def experts_left_over_go_last(plan: Plan) -> Plan:
    """ten experts over four ranks are placed 3, 3, 3, 1, where the engine has 3, 3, 2, 2"""
    down = [plan.transfer_groups[i] for i in transfer_groups_of(plan, Role.EXPERT_DOWN)]
    rank_two, rank_three = (next(b for b in down if expert in range(*b.experts)) for expert in (7, 8))
    moved_on = replace(rank_three, experts=(8, 9), dst=rank_two.dst, dst_slot=2)
    stays = replace(rank_three, experts=(9, 10), src_slot=rank_three.src_slot + 1)
    return replace(plan, transfer_groups=(*(b for b in plan.transfer_groups if b != rank_three), moved_on, stays))


@mutant(29, UNEVEN, "holders")
def experts_rounded_up_at_the_source(plan: Plan) -> Plan:
    """experts per training rank are rounded up to a power of two"""
    index = next(i for i in transfer_groups_of(plan, Role.EXPERT_DOWN) if plan.transfer_groups[i].experts[0] == 5)
    return edit_transfers(plan, [index], lambda b: replace(b, src_slot=b.src_slot + 1))


# --- 30


@mutant(30, PADDED, "tensors")
def padding_not_declared(plan: Plan) -> Plan:
    """the tail of the engine's vocabulary is nobody's"""
    return _repad(plan, lambda padding: ())


@mutant(30, PADDED, "bounds")
def padding_sent_as_data(plan: Plan) -> Plan:
    """the trainer's padding rows are sent to the engine's"""

    def to_the_end(c: int, pieces):  # type: ignore[no-untyped-def]
        (piece,) = pieces
        low = piece.region.start[0]
        return [rows(piece, low, low + piece.tensor.shape[0])]

    return recut(plan, Role.LM_HEAD, src=to_the_end, dst=to_the_end)


@mutant(29, PADDED, "order")
def vocabulary_cut_before_it_is_padded(plan: Plan) -> Plan:
    """250 rows over two ranks are cut 125, 125 and then padded to 128 each, where the engine has 128, 122"""

    def equal_parts(c: int, pieces):  # type: ignore[no-untyped-def]
        return [rows(pieces[0], c * 125, (c + 1) * 125)]

    plan = recut(plan, Role.LM_HEAD, dst=equal_parts)
    (index,) = {plan.transfer_groups[i].pattern for i in transfer_groups_of(plan, Role.LM_HEAD)}
    pattern = plan.patterns[index]
    tensor = pattern.dst.pieces[0][0].tensor
    tail = Padding(tensor, Region((125, 0), tensor.shape))
    padded = replace(pattern, dst=replace(pattern.dst, padding=((tail,), (tail,))))
    return replace(plan, patterns=(*plan.patterns[:index], padded, *plan.patterns[index + 1 :]))


@mutant(30, PADDED, "tensors")
def padding_over_data(plan: Plan) -> Plan:
    """one row of the vocabulary is zeroed as padding"""

    def wider(padding):  # type: ignore[no-untyped-def]
        return tuple(replace(p, box=p.box.within(0, p.box.start[0] - 1, p.box.stop[0])) for p in padding)

    return _repad(plan, wider)


def _repad(plan: Plan, change) -> Plan:  # type: ignore[no-untyped-def]
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in transfer_groups_of(plan, Role.LM_HEAD)}:
        dst = patterns[index].dst
        patterns[index] = replace(patterns[index], dst=replace(dst, padding=tuple(map(change, dst.padding))))
    return replace(plan, patterns=tuple(patterns))


# --- files


def file_mutant(bug: int, what: str, case: Case, damaged: Callable[[str], str]) -> None:
    def refused() -> Rejection | None:
        try:
            parse_plan(damaged(dump_plan(case.plan())), "plan.json")
        except PlanFileError as error:
            return Rejection("file", "PlanFileError", "all parameters", "all ranks", str(error))
        return None

    _found.append(Mutant(bug, what, ("file", "PlanFileError"), refused))


file_mutant(2, "two moves change places in the file", LLAMA, lambda text: text.replace("[0,0,0,0,", "[0,0,1,0,", 1))
file_mutant(
    19, "a plan of another version is read", LLAMA, lambda text: text.replace(f'"version":{VERSION}', '"version":0')
)

PLAN_MUTANTS: tuple[Mutant, ...] = tuple(_found)
