"""The proof of local tensors: every element has one owner, in the declared order.

Tensors are checked once per class of ranks that hold the same parts, and once for all layers filled the same way.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence, Set
from itertools import pairwise
from typing import NamedTuple

from mcore_reshard.planner.layout.geometry import LocalTensor, Region
from mcore_reshard.planner.layout.partitions import Partition
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import Plan, TransferGroup

from .report import Violation, name_of
from .storage import order_fault
from .tiling import overlap, tiling_fault


class _Filling(NamedTuple):
    """The share of one transfer group in a tensor: one part, in slots `[first, stop)` if experts are stacked."""

    group: int
    pattern: int
    part: int
    first: int
    stop: int


class _Part(NamedTuple):
    """A box of a tensor (in view coordinates) and what fills it."""

    box: Region
    group: int  # -1: padding
    region: Region
    role: Role


# Layer places of a transfer group, as its tensors' names see them: (chunk, layer index) pairs.
_Places = tuple[tuple[int, int], ...]
_Entry = tuple[_Places, _Filling, TransferGroup]
_Contents = dict[tuple[int, int], dict[str, list[_Entry]]]


def check_tensors(plan: Plan) -> Iterator[Violation]:
    """Pieces and declared padding tile each tensor of either world, in the declared order."""
    scales = {pair.scales for pair in plan.pairs}
    for is_src in (True, False):
        contents, served = _contents(plan, is_src)
        checked: set[tuple[str, tuple[_Filling, ...]]] = set()
        for rank, parts in _rank_classes(plan, is_src):
            by_name: dict[str, list[_Entry]] = defaultdict(list)
            for part in parts:
                for name, entries in contents.get(part, {}).items():
                    by_name[name] += entries
            for name, entries in by_name.items():
                for place, fillings, transfers in _tensors_of(entries):
                    if (name, fillings) in checked:
                        continue
                    checked.add((name, fillings))
                    if fault := _tensor_fault(plan, name, fillings, served[name], is_src, scales):
                        rule, message = fault
                        where = f"{'train' if is_src else 'gen'} {rank}"
                        local = name.replace("{vp}", str(place[0])).replace("{layer}", str(place[1]))
                        yield Violation(rule, name_of(plan, transfers), where, f"{local}: {message}")


def _rank_classes(plan: Plan, is_src: bool) -> Iterator[tuple[int, tuple[tuple[int, int], ...]]]:
    """One rank of each class, with the (grid, part) pairs that its class holds."""
    parts_of: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for grid in sorted({transfers.src if is_src else transfers.dst for transfers in plan.transfer_groups}):
        for part, ranks in enumerate(plan.rank_grids[grid].tolist()):
            for rank in ranks:
                parts_of[rank].append((grid, part))
    classes: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in sorted(parts_of):
        classes.setdefault(tuple(parts_of[rank]), rank)
    for parts, rank in classes.items():
        yield rank, parts


def _contents(plan: Plan, is_src: bool) -> tuple[_Contents, dict[str, set[Role]]]:
    """For each (grid, part), the fillings of each tensor by the pattern of its name; and the roles of each name."""
    contents: _Contents = defaultdict(lambda: defaultdict(list))
    served: dict[str, set[Role]] = defaultdict(set)
    partitions = [pattern.src if is_src else pattern.dst for pattern in plan.patterns]
    names_of = [[_names(partition, part) for part in range(len(partition.pieces))] for partition in partitions]
    interned: dict[_Places, _Places] = {}
    for transfers in plan.transfer_groups:
        places: _Places = tuple((p.vp_stage, p.local) if is_src else (0, p.layer) for p in transfers.layers)
        places = interned.setdefault(places, places)
        grid, first = (transfers.src, transfers.src_slot) if is_src else (transfers.dst, transfers.dst_slot)
        stop, role = first + transfers.expert_count, plan.groups[transfers.group].role
        for part, names in enumerate(names_of[transfers.pattern]):
            entry = (places, _Filling(transfers.group, transfers.pattern, part, first, stop), transfers)
            for name in names:
                contents[grid, part][name].append(entry)
                served[name].add(role)
    return contents, served


def _names(partition: Partition, part: int) -> list[str]:
    tensors = [piece.tensor for piece in partition.pieces[part]] + [box.tensor for box in partition.padding_of(part)]
    return list(dict.fromkeys(tensor.name for tensor in tensors))


def _tensors_of(entries: Sequence[_Entry]) -> Iterator[tuple[tuple[int, int], tuple[_Filling, ...], TransferGroup]]:
    """The tensors behind one pattern; those of several layers count as one if they are filled the same way."""
    if all(places is entries[0][0] for places, _, _ in entries):
        yield entries[0][0][0], tuple(sorted(filling for _, filling, _ in entries)), entries[0][2]
        return
    by_place: dict[tuple[int, int], list[_Entry]] = defaultdict(list)
    for entry in entries:
        for place in entry[0]:
            by_place[place].append(entry)
    for place, filled in by_place.items():
        yield place, tuple(sorted(filling for _, filling, _ in filled)), filled[0][2]


def _tensor_fault(
    plan: Plan, name: str, fillings: tuple[_Filling, ...], served: Set[Role], is_src: bool, scales: Set[int]
) -> tuple[str, str] | None:
    """(rule, message) of what is wrong with one tensor, or with one slot of a stack of experts."""
    parts_of = {key: _parts(plan, name, *key, is_src) for key in {filling[:3] for filling in fillings}}
    forms = {form for _, part_forms in parts_of.values() for form in part_forms}
    if len(forms) > 1:
        return "tensors", "its pieces disagree on it: " + " and ".join(map(str, sorted(forms)))
    ((tensor, view, slot_dim),) = forms
    if slot_dim < 0 and "{expert}" not in name:
        fillings = tuple(filling._replace(first=0, stop=1) for filling in fillings)
    whole = Region.whole(view)
    cuts = sorted({end for filling in fillings for end in (filling.first, filling.stop)})
    if slot_dim >= 0:
        whole = whole.within(slot_dim, 0, 1)
        if cuts[0] != 0 or cuts[-1] != view[slot_dim]:
            return "tensors", f"slots {cuts[0]} to {cuts[-1] - 1} are filled, it has {view[slot_dim]}"
    slots_by_filling: dict[tuple[tuple[int, int, int], ...], tuple[int, int]] = {}
    for first, stop in pairwise(cuts):
        filled = tuple(filling[:3] for filling in fillings if filling.first <= first < filling.stop)
        slots_by_filling.setdefault(filled, (first, stop))
    for filled, (first, stop) in slots_by_filling.items():
        parts = [part for key in filled for part in parts_of[key][0]]
        if is_src:
            parts = list(dict.fromkeys(parts))  # several transfer groups may read one group's bytes
        boxes = [part.box for part in parts]
        if is_src and served == {Role.TRACED}:  # it may also hold parameters that are misc or excluded
            clash = overlap(boxes)
            message = f"{clash[0]} and {clash[1]} overlap" if clash else ""
        else:
            message = tiling_fault(whole, boxes)
        if message:
            which = f"slots {first} to {stop - 1} of " if slot_dim >= 0 else ""
            return "tensors", f"{which}{tensor.shape} are not held by exactly one parameter each: {message}"
        if message := _order_fault(parts, served, is_src, padded_each=any(part.group in scales for part in parts)):
            return "order", message
    return None


def _parts(
    plan: Plan, name: str, group: int, pattern: int, part: int, is_src: bool
) -> tuple[list[_Part], set[tuple[LocalTensor, tuple[int, ...], int]]]:
    """The boxes that a part fills in a tensor, within its slot, and the forms (tensor, view, slot dim) it gives it."""
    partition = plan.patterns[pattern].src if is_src else plan.patterns[pattern].dst
    role = plan.groups[group].role
    pieces = [piece for piece in partition.pieces[part] if piece.tensor.name == name]
    padding = [entry for entry in partition.padding_of(part) if entry.tensor.name == name]
    parts = [_Part(piece.local(), group, piece.region, role) for piece in pieces]
    parts += [_Part(entry.box, -1, entry.box, role) for entry in padding]
    forms = {(piece.tensor, piece.view, piece.slot_dim) for piece in pieces}
    return parts, forms | {(entry.tensor, entry.tensor.shape, -1) for entry in padding}


def _order_fault(parts: Sequence[_Part], served: Set[Role], is_src: bool, padded_each: bool) -> str:
    """Parameters follow each other as declared, padding comes last, and each parameter's rows ascend.

    `padded_each`: padding may follow every row, as in tensors of scales.
    """
    if served == {Role.TRACED}:  # no order is declared: the trace says which lies where
        return ""
    in_memory = sorted(parts, key=lambda part: part.box.start)
    last: dict[int, Region] = {}
    for part in in_memory:
        before = last.get(part.group)
        if before is not None and before.start >= part.region.start:
            return f"{part.role.value} {part.region} lies behind {before}"
        if part.group >= 0 and -1 in last and not padded_each:
            return f"{part.role.value} {part.region} lies behind padding"
        last[part.group] = part.region
    return order_fault([part.role for part in in_memory if part.group >= 0], served, is_src)
