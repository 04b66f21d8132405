"""All unusual storage, declared apart from the layout rules so that the proof can check them against it.

Tilings cannot tell a square matrix from its transpose, nor gate from up. So this file lists every transposition, and the
order of parameters that share a tensor. All other parameters lie as Hugging Face has them: dims in order, rows in order,
one tensor each.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence, Set
from itertools import accumulate
from math import prod
from operator import mul

from mcore_reshard.planner.layout.engines import Transposed
from mcore_reshard.planner.layout.geometry import Piece
from mcore_reshard.planner.model.parameters import STACKED_ROLES, Role

# Parameters that share a tensor, in the order in which they follow each other there (once, or once per KV group).
FUSED: tuple[tuple[Role, ...], ...] = (
    (Role.Q, Role.K, Role.V),
    (Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS),
    (Role.GATE, Role.UP),
    (Role.SHARED_GATE, Role.SHARED_UP),
    (Role.EXPERT_GATE, Role.EXPERT_UP),
    (Role.MLA_Q_A, Role.MLA_KV_A),
)

# Where a trainer may let gate and up take turns, in blocks of equal rows (Megatron-Core's *_glu_interleave_size).
ALTERNATING = frozenset({role for fused in FUSED[3:5] for role in fused})

# Where a trainer's cut may fall inside of a round: linear_qkv with more ranks than KV heads.
_CUT_INSIDE = {Role.Q, Role.Q_BIAS}

# Parameters made of several sections (z, x, B, C, dt and x, B, C) that are cut one by one; all others have one.
SECTIONS: Mapping[Role, int] = {Role.MAMBA_IN: 5, Role.MAMBA_CONV: 3, Role.MAMBA_CONV_BIAS: 3}

# Roles of which a training rank holds several pieces: one for each of its KV groups or experts.
_MANY_AT_SOURCE = {role for fused in FUSED[:2] for role in fused} | STACKED_ROLES

# Roles that one name may serve in different layers: Nemotron-H has a norm in front of every mixer, whatever it is.
INTERCHANGEABLE = frozenset({Role.ATTENTION_NORM, Role.MLP_NORM, Role.MOE_NORM, Role.MAMBA_NORM})

# Views that are not listed lie as Hugging Face has them; an engine's own list is in its module.
# Megatron-Core: gpt-oss linears are [out, in] where HF has [expert, in, out]; GroupedMLP keeps weights as [in, out].
MEGATRON: Transposed = {
    (Role.STACKED_GATE_UP, 4): (0, 3, 2, 1),
    (Role.STACKED_GATE_UP_BIAS, 3): (0, 2, 1),
    (Role.STACKED_DOWN, 3): (0, 2, 1),
    (Role.STACKED_DOWN_BIAS, 2): (0, 1),
    (Role.EXPERT_GATE, 4): (3, 1),
    (Role.EXPERT_UP, 4): (3, 1),
    (Role.EXPERT_DOWN, 3): (2, 1),
}
# GroupedMLP.weight1 is declared [H, experts * rows] and used as (experts, H, rows): a view that splits no dims.
_RECAST = {Role.EXPERT_GATE, Role.EXPERT_UP}


def storage_fault(piece: Piece, role: Role, transposed: Transposed) -> str:
    """Why a piece does not lie in its tensor as declared ("" when it does)."""
    if role is Role.TRACED:  # the trace is the declaration
        return ""
    tensor, view = piece.tensor, piece.view
    declared = transposed.get((role, len(view)))
    if declared is None:
        if view != tensor.shape:
            return f"{tensor.name} {tensor.shape} is viewed as {view}, which is not declared for {role.value!r}"
        declared = tuple(dim for dim in range(len(view)) if dim != piece.slot_dim)
    elif role not in _RECAST and not _refines(view, tensor.shape):
        return f"{tensor.name} {tensor.shape} is viewed as {view}, which does not split its dims"
    if piece.dims != declared:
        return f"{tensor.name} keeps dims in order {piece.dims}, declared for {role.value!r} is {declared}"
    return ""


def _turns_fault(pieces: Sequence[Piece]) -> str:
    """Why the pieces of gate or up in one tensor are no blocks of equal rows, each as far from the next ("" when they are)."""
    rows = [(piece.region.start[0], piece.region.extents[0], piece.origin[piece.dims[0]]) for piece in pieces]
    first, block, local = rows[0] if rows else (0, 0, 0)
    turns = [(first + number * block, block, local + 2 * number * block) for number in range(len(rows))]
    if rows == turns and (len(rows) < 2 or local in (0, block)):
        return ""
    wrong = next((row for row, turn in zip(rows, turns, strict=True) if row != turn), rows[0])
    return (
        f"rows {wrong[0]}:{wrong[0] + wrong[1]} at {wrong[2]} are no blocks of {block} rows that take turns with others"
    )


def _refines(view: tuple[int, ...], shape: tuple[int, ...]) -> bool:
    """Whether each dim of `shape` is a run of dims of `view`: (1, 2, 8, 4) refines (16, 4)."""
    ends = set(accumulate(view, mul))
    return prod(view) == prod(shape) and all(end in ends for end in accumulate(shape, mul))


def shared_name_fault(roles: Set[Role]) -> str:
    """Why tensors of one name may not hold parameters of these roles ("" when they may)."""
    if len(roles) < 2 or roles <= INTERCHANGEABLE or any(roles <= set(fused) for fused in FUSED):
        return ""
    return f"serves {' and '.join(sorted(role.value for role in roles))}, which do not share tensors"


def order_fault(roles: Sequence[Role], served: Set[Role], is_src: bool) -> str:
    """Why parameters may not follow each other like this in a tensor whose name serves `served` ("" when they may).

    A fused tensor holds whole rounds of its set: [gate, up] once or in turns, [q, k, v] once or for every KV group. Only
    the trainer's cut of q, k, v may fall inside of a round, when there are fewer KV heads than ranks.
    """
    order = next((fused for fused in FUSED if served <= set(fused)), None)
    if not roles or len(served) < 2 or order is None:
        distinct = sorted({role.value for role in roles})
        return f"{', '.join(distinct)} share a tensor, and no order is declared" if len(distinct) > 1 else ""
    order = tuple(role for role in order if role in served)
    places = [order.index(role) for role in roles]
    if places == list(range(len(order))) * max(1, len(places) // len(order)):
        return ""
    if is_src and order[0] in _CUT_INSIDE and places == list(range(places[0], places[0] + len(places))):
        return ""
    shown, declared = (", ".join(role.value for role in listed) for listed in (roles[:8], order))
    return f"it holds {shown} in this order; declared is {declared}"


def sections_fault(partition: Sequence[Sequence[Piece]], role: Role, is_src: bool) -> tuple[int, str] | None:
    """The first part that is not made of the declared sections, and why.

    Sections are cut one by one: every part's rows of one section lie in front of all rows of the next section.
    """
    count = SECTIONS.get(role, 1)
    if role is Role.TRACED or (is_src and role in _MANY_AT_SOURCE):
        return None
    if is_src and role in ALTERNATING:
        faults = ((part, _turns_fault(pieces)) for part, pieces in enumerate(partition))
        return next(((part, fault) for part, fault in faults if fault), None)
    stop = 0
    for part, pieces in enumerate(partition):
        if pieces and len(pieces) != count:
            return part, f"a part has {len(pieces)} pieces, {role.value!r} is made of {count} sections"
    for section in range(count if count > 1 else 0):
        regions = [pieces[section].region for pieces in partition if pieces]
        for part, region in enumerate(regions):
            if region.start[0] < stop:
                return part, f"section {section} of {role.value!r} begins at {region}, inside of the one before"
        stop = max((region.stop[0] for region in regions), default=0)
    return None
