"""Hold a plan against the trace of one rank: what rules say of its tensors, and what its own loader does with them.

Rules and traces share no code. A difference means that the installed trainer or engine keeps weights otherwise than the
rules know; it is found here, before a byte moves.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence

from mcore_reshard.planner.layout.geometry import Piece, Region, ravel, row_major_strides
from mcore_reshard.planner.layout.strided import NotNestedError, StridedCopy, compose, digit_boxes
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.planner.layout.vllm_quantized import CHECKPOINT_BLOCKS
from mcore_reshard.planner.model.precision import FP8

from .plan import Plan
from .schedule import World

_SHOWN = 3  # boxes of each side in a fault

_Copies = dict[str, set[StridedCopy]]  # by Hugging Face name


def checkpoint_of(plan: Plan, *, quantized: bool = True) -> dict[str, HfTensor]:
    """The Hugging Face tensors of a plan, as an engine loads them; or as before quantization, which Megatron-Bridge maps."""
    scales = {pair.scales for pair in plan.pairs}
    main = next((group.dtype for group in plan.groups if group.dtype not in (FP8, "float32")), "bfloat16")
    return {
        name: HfTensor(group.shape, main if group.dtype == FP8 and not quantized else group.dtype)
        for number, group in enumerate(plan.groups)
        if quantized or number not in scales
        for name in group.names()
    }


def trace_faults(plan: Plan, world: World, rank: int, trace: RankTrace) -> list[str]:
    """Every tensor of a rank of which the plan and the trace say different things, and what both say.

    Tensors of parameters that travel by misc, or not at all, are not compared. Scales are compared where the trace has
    them. Of scales that an engine's adapter repeats for smaller blocks, only the names are (`CHECKPOINT_BLOCKS`).
    """
    shapes = {name: tensor.shape for name, tensor in checkpoint_of(plan).items()}
    scales = {name for pair in plan.pairs for name in plan.groups[pair.scales].names()}
    unplanned = {name for entry in (*plan.misc, *plan.excluded) for name in plan.groups[entry.group].names()}
    planned, planned_shapes = _planned(plan, world, rank)
    traced = {tensor.tensor.name: tensor for tensor in trace.tensors}
    faults: list[str] = []
    for name, copies in planned.items():
        if name.endswith(CHECKPOINT_BLOCKS) and (made := traced.pop(name.removesuffix(CHECKPOINT_BLOCKS), None)):
            if {*made.names} != copies.keys():
                faults.append(f"{name}: the plan fills it with {_named(copies)}, the loader with {_named(made.names)}")
        elif name in traced:
            faults += _tensor_faults(name, copies, planned_shapes[name], traced[name], shapes)
        elif not copies.keys() <= scales:
            faults.append(f"{name}: the plan fills it with {_named(copies)}, the loader knows no such tensor")
    for name, tensor in traced.items():
        if name not in planned and (unknown := [n for n in tensor.names if n not in unplanned]):
            faults.append(f"{name}: the loader fills it with {_named(unknown)}, the plan does not")
    return faults


def _planned(plan: Plan, world: World, rank: int) -> tuple[dict[str, _Copies], dict[str, tuple[int, ...]]]:
    """What the plan says of a rank's tensors: by name, the copies that fill it; and its shape."""
    planned: dict[str, _Copies] = defaultdict(lambda: defaultdict(set))
    shapes: dict[str, tuple[int, ...]] = {}
    for place in plan.groups_of(world, rank):
        transfers, group = place.transfers, plan.groups[place.transfers.group]
        copies = [(piece, _copy_of(piece, group.view)) for piece in place.partition.pieces[place.part]]
        for member in range(transfers.members):
            name = plan.parameter_name(place.index, member)
            slot = transfers.slot(world, member)
            for piece, copy in copies:
                tensor = transfers.tensor_name(piece.tensor, world, member)
                shapes[tensor] = piece.tensor.shape
                planned[tensor][name].add(_in_slot(piece, copy, slot))
    return planned, shapes


def _copy_of(piece: Piece, view: tuple[int, ...]) -> StridedCopy:
    region = piece.region
    offset = ravel(region.start, view)
    return StridedCopy(region.extents, offset, row_major_strides(view), piece.offset(region.start), piece.strides)


def _in_slot(piece: Piece, copy: StridedCopy, slot: int) -> StridedCopy:
    moved = 0 if piece.slot_dim < 0 else slot * row_major_strides(piece.view)[piece.slot_dim]
    return StridedCopy(
        copy.extents, copy.src_offset, copy.src_strides, copy.dst_offset + moved, copy.dst_strides
    ).coalesced()


def _tensor_faults(
    name: str,
    planned: Mapping[str, set[StridedCopy]],
    shape: tuple[int, ...],
    traced: TracedTensor,
    shapes: Mapping[str, tuple[int, ...]],
) -> Iterator[str]:
    if traced.computed:
        yield f"{name}: the plan fills it with {_named(planned)}, the loader computes it ({traced.computed})"
        return
    if shape != traced.tensor.shape:
        yield f"{name}: the plan has {shape}, the model {traced.tensor.shape}"
        return
    loaded: _Copies = defaultdict(set)
    for parameter, copy in traced.copies:
        loaded[parameter].add(copy.coalesced())
    for parameter in sorted(planned.keys() | loaded.keys()):
        ours, theirs = planned.get(parameter, set()), loaded.get(parameter, set())
        if ours != theirs and not _same(ours, theirs):
            sides = (_drawn(copies, shapes.get(parameter, ()), shape) for copies in (ours, theirs))
            yield "{}: of {} the plan has {}, the loader puts {}".format(name, parameter, *sides)


def _same(ours: set[StridedCopy], theirs: set[StridedCopy]) -> bool:
    """Whether two sets of disjoint copies from one tensor to another say the same of every element."""
    if sum(copy.elements for copy in ours) != sum(copy.elements for copy in theirs):
        return False
    try:
        for one in ours:
            met = [part for other in theirs for part in compose(other, one.inverse)]  # from the parameter to itself
            if sum(part.elements for part in met) != one.elements:
                return False
            if any(part.src_offset != part.dst_offset or part.src_strides != part.dst_strides for part in met):
                return False
    except NotNestedError:
        return False
    return True


def _named(names: Mapping[str, object] | Sequence[str]) -> str:
    listed = sorted(names)
    return ", ".join(listed[:_SHOWN]) + (f" and {len(listed) - _SHOWN} more" if len(listed) > _SHOWN else "")


def _drawn(copies: set[StridedCopy], parameter: tuple[int, ...], tensor: tuple[int, ...]) -> str:
    """Copies as boxes: "[0:8, 0:64] at [16:24, 0:64]"."""
    shown = []
    for copy in sorted(copies, key=lambda copy: copy.dst_offset)[:_SHOWN]:
        ends = zip((copy.inverse, copy), (parameter, tensor), strict=True)
        shown.append(" at ".join(_box(end, shape) for end, shape in ends))
    more = f" and {len(copies) - _SHOWN} more" if len(copies) > _SHOWN else ""
    return (", ".join(shown) + more) or "nothing"


def _box(copy: StridedCopy, shape: tuple[int, ...]) -> str:
    """The destination of a copy as a box of a shape, or as what it is where it is none."""
    try:
        boxes = digit_boxes(copy, row_major_strides(shape))
        if len(boxes) == 1:
            start = boxes[0].start
            stop = tuple(first + count for first, count in zip(start, boxes[0].extents, strict=True))
            return str(Region(start, stop))
    except (NotNestedError, ValueError):
        pass
    return f"{copy.extents} from {copy.dst_offset} in steps of {copy.dst_strides}"
