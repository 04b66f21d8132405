"""Mutants of quantized and cast plans: scales that are not their weights', and dtypes that change undeclared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from helpers.plans import REFINED, Case

from mcore_reshard.planner.layout.block_scales import in_dtype
from mcore_reshard.planner.layout.geometry import Piece, Region
from mcore_reshard.planner.layout.partitions import Padding, Partition
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import GroupCast, Plan, TransferPattern

from .edits import Recut, edit_transfers, overlaps_between, retensor
from .in_plans import mutants_of
from .records import Mutant

LLAMA = Case("tiny-llama", "tp=2,pp=2,dp=2", "tp=4", dtypes=("fp8", "fp8"), block=(8, 8))
MOE = Case("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2,dp=2,ep=4", dtypes=("fp8", "fp8"), block=(8, 8))
MOE_CAST = Case("tiny-qwen3-moe", "ep=4,dp=4", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16))
REFINED_MOE = Case("tiny-qwen3-moe", "ep=2,etp=2,dp=4", "tp=4", changes=REFINED, dtypes=("fp8", "fp8"), block=(64, 64))
DEEPSEEK = Case("tiny-deepseek-v3", "tp=2,ep=2,pp=2", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8))
MASTER = Case("tiny-llama", "tp=2,dp=2", "tp=2", dtypes=("fp32", "bf16"))

_found: list[Mutant] = []
mutant = mutants_of(_found)


def scales_of(plan: Plan, role: Role) -> list[int]:
    """The transfer groups of the scales of a role."""
    scales = {pair.scales for pair in plan.pairs if plan.groups[pair.scales].role is role}
    return [index for index, transfers in enumerate(plan.transfer_groups) if transfers.group in scales]


def recut_scales(plan: Plan, role: Role, src: Recut) -> Plan:
    """Other source pieces for the scales of a role, padding as before, and the moves that follow."""
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in scales_of(plan, role)}:
        pattern = patterns[index]
        pieces = tuple(tuple(src(c, held)) for c, held in enumerate(pattern.src.pieces))
        partition = replace(pattern.src, pieces=pieces)
        patterns[index] = TransferPattern(partition, pattern.dst, overlaps_between(partition, pattern.dst))
    return replace(plan, patterns=tuple(patterns))


def pair_index(plan: Plan, role: Role) -> int:
    return next(index for index, pair in enumerate(plan.pairs) if plan.groups[pair.weight].role is role)


def with_casts(plan: Plan, *casts: GroupCast) -> Plan:
    return replace(plan, casts=casts)


# --- 32: a scale taken from another part


@mutant(32, LLAMA, "pairs")
def scales_of_the_next_rank(plan: Plan) -> Plan:
    """scales of down_proj are taken for those of the other tensor-parallel rank"""
    pattern = plan.patterns[plan.transfer_groups[scales_of(plan, Role.DOWN)[0]].pattern]
    return recut_scales(plan, Role.DOWN, lambda c, _: pattern.src.pieces[1 - c])


@mutant(32, MOE, "pairs")
def scales_of_the_next_expert(plan: Plan) -> Plan:
    """scales of w2 are read one expert further than its data"""
    return edit_transfers(plan, scales_of(plan, Role.EXPERT_DOWN), lambda b: replace(b, src_slot=b.src_slot + 1))


@mutant(32, LLAMA, "pairs", harm="data of one replica goes with scales of another, which may be of another version")
def scales_of_another_replica(plan: Plan) -> Plan:
    """data-parallel replicas take turns for scales and for data apart"""
    return edit_transfers(
        plan, scales_of(plan, Role.O), lambda b: replace(b, first_src_replica=b.first_src_replica + 1)
    )


@mutant(32, LLAMA, "pairs")
def scales_of_the_blocks_below(plan: Plan) -> Plan:
    """scales of o_proj are read one row of blocks below their weights"""

    def below(_: int, pieces: Sequence[Piece]) -> Sequence[Piece]:
        (piece,) = pieces
        last = piece.region.stop[0]
        first = replace(piece, region=piece.region.within(0, 0, last - 1), origin=(1, 0))
        return [first, replace(piece, region=piece.region.within(0, last - 1, last), origin=(0, 0))]

    return recut_scales(plan, Role.O, below)


@mutant(32, REFINED_MOE, "pairs")
def scales_of_the_neighbors_blocks(plan: Plan) -> Plan:
    """where the engine cuts inside of blocks, each rank gets the scales of the blocks that the next one touches"""
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in scales_of(plan, Role.EXPERT_DOWN)}:
        pattern = patterns[index]
        held = pattern.dst.pieces
        regions = [held[(c + 2) % len(held)][0].region for c in range(len(held))]
        pieces = tuple((replace(mine, region=region),) for ((mine,), region) in zip(held, regions, strict=True))
        partition = replace(pattern.dst, pieces=pieces)
        patterns[index] = TransferPattern(pattern.src, partition, overlaps_between(pattern.src, partition))
    return replace(plan, patterns=tuple(patterns))


# --- 33: pairs exchanged


@mutant(33, LLAMA, "pairs", harm="k would be read with the scales of v")
def k_with_scales_of_v(plan: Plan) -> Plan:
    """k_proj is paired with the scales of v_proj, and the other way round"""
    k, v = pair_index(plan, Role.K), pair_index(plan, Role.V)
    pairs = list(plan.pairs)
    pairs[k], pairs[v] = replace(pairs[k], scales=pairs[v].scales), replace(pairs[v], scales=pairs[k].scales)
    return replace(plan, pairs=tuple(pairs))


@mutant(33, DEEPSEEK, "pairs")
def scales_in_each_others_place(plan: Plan) -> Plan:
    """scales of gate_proj are read where those of up_proj lie, and the other way round"""

    def of(role: Role) -> Partition:
        return plan.patterns[plan.transfer_groups[scales_of(plan, role)[0]].pattern].src

    gate, up = of(Role.EXPERT_GATE), of(Role.EXPERT_UP)
    recut = recut_scales(plan, Role.EXPERT_GATE, lambda c, _: up.pieces[c])
    return recut_scales(recut, Role.EXPERT_UP, lambda c, _: gate.pieces[c])


@mutant(33, LLAMA, "pairs")
def weight_on_its_own(plan: Plan) -> Plan:
    """down_proj has scales on both ends, and the plan does not send them"""
    gone = set(scales_of(plan, Role.DOWN))
    pair = plan.pairs[pair_index(plan, Role.DOWN)]
    return replace(
        plan,
        transfer_groups=tuple(transfers for index, transfers in enumerate(plan.transfer_groups) if index not in gone),
        pairs=tuple(p for p in plan.pairs if p != pair),
    )


# --- 34: padding of scales


@mutant(34, LLAMA, "pairs")
def padding_as_scales(plan: Plan) -> Plan:
    """scales of down_proj start in the second column, and the last comes from the trainer's padding"""

    def shifted(_: int, pieces: Sequence[Piece]) -> Sequence[Piece]:
        return [replace(piece, origin=(piece.origin[0], 1)) for piece in pieces]

    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in scales_of(plan, Role.DOWN)}:
        pattern = patterns[index]
        pieces = tuple(tuple(shifted(c, held)) for c, held in enumerate(pattern.src.pieces))
        boxes = (Region((0, 0), (8, 1)), Region((0, 7), (8, 8)))
        padding = tuple(tuple(Padding(held[0].tensor, box) for box in boxes) for held in pieces)
        patterns[index] = replace(pattern, src=Partition(pieces, padding))
    return replace(plan, patterns=tuple(patterns))


@mutant(34, LLAMA, "tensors", harm="nobody says that these elements are no scales")
def padding_undeclared(plan: Plan) -> Plan:
    """the trainer's padding of scales is not declared, as if its grid were the engine's"""
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in scales_of(plan, Role.DOWN)}:
        patterns[index] = replace(patterns[index], src=replace(patterns[index].src, padding=()))
    return replace(plan, patterns=tuple(patterns))


# --- 35: a router bias narrowed


@mutant(35, DEEPSEEK, "casts")
def router_bias_cast(plan: Plan) -> Plan:
    """e_score_correction_bias is narrowed to bf16 by a cast that the plan declares"""
    group = next(index for index, group in enumerate(plan.groups) if group.role is Role.EXPERT_BIAS)
    plan = retensor(plan, Role.EXPERT_BIAS, lambda t: replace(t, dtype="bfloat16"), source=False)
    return with_casts(plan, *plan.casts, GroupCast(group, "float32", "bfloat16"))


# --- 36: casts missing or unknown


@mutant(36, MOE_CAST, "bytes")
def cast_missing(plan: Plan) -> Plan:
    """w2 is bf16 in the trainer and FP8 in the engine, and its cast is not declared"""
    down = plan.pairs[pair_index(plan, Role.EXPERT_DOWN)].weight
    return with_casts(plan, *(cast for cast in plan.casts if cast.group != down))


@mutant(36, MASTER, "bytes")
def master_weights_uncast(plan: Plan) -> Plan:
    """fp32 master weights are sent into bf16 tensors, nothing being declared"""
    return with_casts(plan)


@mutant(36, MASTER, "casts")
def cast_unknown(plan: Plan) -> Plan:
    """fp32 o_proj goes to fp16, which nothing casts to"""
    plan = retensor(plan, Role.O, lambda t: replace(t, dtype="float16"), source=False)
    group = next(index for index, group in enumerate(plan.groups) if group.role is Role.O)
    return with_casts(plan, *(replace(c, dst="float16") if c.group == group else c for c in plan.casts))


@mutant(36, MOE_CAST, "pairs")
def scales_computed_in_a_padded_grid(plan: Plan) -> Plan:
    """the scales that the source computes are placed as Transformer Engine would keep them, padded to four columns"""
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in scales_of(plan, Role.EXPERT_DOWN)}:
        src = patterns[index].src
        pieces = tuple(
            tuple(replace(p, tensor=replace(p.tensor, shape=(p.tensor.shape[0], 4)), view=()) for p in held)
            for held in src.pieces
        )
        filled = src.pieces[0][0].region.stop[1]
        padding = tuple(tuple(Padding(p.tensor, Region((0, filled), p.tensor.shape)) for p in held) for held in pieces)
        patterns[index] = replace(patterns[index], src=Partition(pieces, padding))
    return replace(plan, patterns=tuple(patterns))


@mutant(36, LLAMA, "pairs")
def scales_in_another_dtype(plan: Plan) -> Plan:
    """on both ends, the scales of down_proj are said to be E8M0 bytes, while the pair has float32"""
    patterns = list(plan.patterns)
    for index in {plan.transfer_groups[i].pattern for i in scales_of(plan, Role.DOWN)}:
        ends = (in_dtype(partition, "uint8") for partition in (patterns[index].src, patterns[index].dst))
        patterns[index] = TransferPattern(*ends, patterns[index].overlaps)
    return replace(plan, patterns=tuple(patterns))


# --- 37: bf16 sent into FP8


@mutant(37, LLAMA, "bytes")
def bf16_sent_into_fp8(plan: Plan) -> Plan:
    """the trainer holds gate_up_proj in bf16, the plan sends it into FP8 tensors as it is"""
    for role in (Role.GATE, Role.UP):
        scales = {plan.transfer_groups[i].pattern for i in scales_of(plan, role)}
        kept = {index: plan.patterns[index] for index in scales}
        plan = retensor(plan, role, lambda t: replace(t, dtype="bfloat16"), source=True)
        plan = replace(plan, patterns=tuple(kept.get(i, t) for i, t in enumerate(plan.patterns)))
    return plan


@mutant(37, MOE_CAST, "casts")
def half_a_fused_tensor_cast(plan: Plan) -> Plan:
    """of linear_fc1, gate is cast to FP8 and up goes to a bf16 tensor as it is"""
    up = plan.pairs[pair_index(plan, Role.EXPERT_UP)]
    plan = with_casts(plan, *(cast for cast in plan.casts if cast.group != up.weight))
    return retensor(plan, Role.EXPERT_UP, lambda t: replace(t, dtype="bfloat16"), source=False)


PRECISION_MUTANTS: tuple[Mutant, ...] = tuple(_found)
