"""Prove a plan before a byte moves.

The proof looks at the plan alone: it does not ask the layout rules again, so it also holds for plans read from a file.
Templates are checked once each; what differs between bundles (ranks, layers, experts, slots) is checked per bundle; and
local tensors are checked per class of ranks that hold the same shards. The cost follows the number of distinct layouts.

A plan is sound when
  groups       every parameter is bulk, misc or excluded, exactly one of them;
  members      every bulk parameter reaches every generation rank that holds its stage, once;
  holders      the ranks named are those that hold the shard on the mesh, and replicas agree;
  source       source shards tile the parameter;
  cover        the moves into each destination piece tile it, out of pieces that hold what they send;
  bounds       pieces lie inside of their local tensors;
  bytes        both ends of a move have the same dtype, hence equal bytes;
  tensors      pieces and declared padding tile each destination tensor, and no source byte belongs to two parameters;
  stages       bundles leave from their stage's ranks, in stage order, towards generation ranks only (so no cycle);
  pairs        (block-scaled weights) weight and scales share route, stage and ranks.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np

from .geometry import LocalTensor, Piece, Region
from .parameters import ITEMSIZE, ParameterGroup
from .plan import Bundle, Plan, Template

_SHOWN = 20  # violations kept per rule: a broken template breaks thousands of parameters


@dataclass(frozen=True, slots=True)
class Violation:
    """One way in which a plan is wrong."""

    rule: str
    parameter: str
    ranks: str  # e.g. "train 0, 4 -> gen 1"
    message: str

    def __str__(self) -> str:
        return f"[{self.rule}] {self.parameter} ({self.ranks}): {self.message}"


@dataclass(frozen=True, slots=True)
class Proof:
    """The outcome. `destination_bytes` is what all generation ranks want of bulk parameters, `covered_bytes` what arrives."""

    violations: tuple[Violation, ...]
    destination_bytes: int
    covered_bytes: int

    @property
    def ok(self) -> bool:
        return not self.violations and self.destination_bytes == self.covered_bytes


class ProofError(ValueError):
    """A plan that does not hold; `proof` has the violations."""

    def __init__(self, proof: Proof) -> None:
        shown = "\n  ".join(map(str, proof.violations[:10]))
        super().__init__(f"the plan is not sound, {len(proof.violations)} violations:\n  {shown}")
        self.proof = proof


def prove(plan: Plan) -> Proof:
    """Check every rule; never raises for an unsound plan."""
    structure = list(_limit(_check_references(plan)))
    if structure:  # nothing else can be evaluated on dangling references
        return Proof(tuple(structure), 0, 0)
    violations: list[Violation] = []
    for check in (_check_groups, _check_templates, _check_holders, _check_members, _check_tensors, _check_stages):
        violations += _limit(check(plan))
    wanted, covered = _bytes(plan)
    return Proof(tuple(violations), wanted, covered)


def _limit(found: Iterable[Violation]) -> Iterator[Violation]:
    counts: dict[str, int] = defaultdict(int)
    for violation in found:
        counts[violation.rule] += 1
        if counts[violation.rule] <= _SHOWN:
            yield violation


def _bytes(plan: Plan) -> tuple[int, int]:
    """Bytes that destination pieces hold over all ranks, and bytes that moves bring."""
    wanted = covered = 0
    for bundle in plan.bundles:
        template = plan.templates[bundle.template]
        copies = bundle.members * plan.dst_replicas(bundle)
        held = sum(p.region.elements * ITEMSIZE[p.tensor.dtype] for pieces in template.dst.pieces for p in pieces)
        wanted += held * copies
        covered += int(template.move_bytes.sum()) * copies
    return wanted, covered


def _ranks(plan: Plan, bundle: Bundle, src_shard: int | None = None, dst_shard: int | None = None) -> str:
    src, dst = plan.holdings[bundle.src].ranks, plan.holdings[bundle.dst].ranks
    src = src if src_shard is None else src[src_shard : src_shard + 1]
    dst = dst if dst_shard is None else dst[dst_shard : dst_shard + 1]
    return f"train {_list(src.ravel())} -> gen {_list(dst.ravel())}"


def _list(ranks: Iterable[int]) -> str:
    found = [str(int(r)) for r in ranks]
    return ", ".join(found) if len(found) <= 8 else ", ".join(found[:8]) + f", ... ({len(found)})"


# --- references


def _check_references(plan: Plan) -> Iterator[Violation]:
    for index, bundle in enumerate(plan.bundles):
        where = f"bundle {index}"
        for what, value, size in (
            ("group", bundle.group, len(plan.groups)),
            ("template", bundle.template, len(plan.templates)),
            ("source holding", bundle.src, len(plan.holdings)),
            ("destination holding", bundle.dst, len(plan.holdings)),
        ):
            if not 0 <= value < size:
                yield Violation("references", where, "-", f"{what} {value} does not exist, the plan has {size}")
                return
        group = plan.groups[bundle.group]
        if not bundle.layers or not set(at.layer for at in bundle.layers) <= set(group.layers or (-1,)):
            yield Violation("references", group.pattern, where, f"layers {[at.layer for at in bundle.layers]} are not the group's")
        low, high = bundle.experts
        if (low, high) != (0, 0) and not 0 <= low < high <= group.experts or ((high == 0) != (group.experts == 0)):
            yield Violation("references", group.pattern, where, f"experts [{low}, {high}) are not among {group.experts}")
        template = plan.templates[bundle.template]
        for side, shards, holding in (("source", template.src, bundle.src), ("destination", template.dst, bundle.dst)):
            if len(shards.pieces) != len(plan.holdings[holding].ranks):
                yield Violation(
                    "references", group.pattern, where,
                    f"{side} has {len(shards.pieces)} shards for {len(plan.holdings[holding].ranks)} rows of ranks",
                )  # fmt: skip
        for number, move in enumerate(template.moves):
            sides = ((template.src, move.src, move.src_piece), (template.dst, move.dst, move.dst_piece))
            if any(not 0 <= c < len(s.pieces) or not 0 <= p < len(s.pieces[c]) for s, c, p in sides):
                yield Violation("references", group.pattern, where, f"move {number} names a piece that does not exist")


# --- groups


def _check_groups(plan: Plan) -> Iterator[Violation]:
    routes: dict[int, set[str]] = defaultdict(set)
    for bundle in plan.bundles:
        routes[bundle.group].add("bulk")
    for name, unplanned in (("misc", plan.misc), ("excluded", plan.excluded)):
        for entry in unplanned:
            routes[entry.group].add(name)
            if not entry.reason:
                yield Violation("groups", plan.groups[entry.group].pattern, "-", f"{name} without a reason")
    for index, group in enumerate(plan.groups):
        if len(routes[index]) != 1:
            found = " and ".join(sorted(routes[index])) or "by no route"
            yield Violation("groups", group.pattern, "all ranks", f"travels {found}; every parameter has exactly one route")


# --- templates


def _check_templates(plan: Plan) -> Iterator[Violation]:
    first: dict[tuple[int, tuple[int, ...]], Bundle] = {}
    for bundle in plan.bundles:
        first.setdefault((bundle.template, plan.groups[bundle.group].view), bundle)
    for (index, view), bundle in first.items():
        for rule, src, dst, message in _template_faults(plan.templates[index], view):
            yield Violation(rule, plan.parameter_name(plan.bundles.index(bundle), 0), _ranks(plan, bundle, src, dst), message)


def _template_faults(template: Template, view: tuple[int, ...]) -> Iterator[tuple[str, int | None, int | None, str]]:
    whole = Region.whole(view)
    for shards, is_src in ((template.src, True), (template.dst, False)):
        for c, pieces in enumerate(shards.pieces):
            src, dst = (c, None) if is_src else (None, c)
            for piece in pieces:
                if message := _piece_fault(piece, whole):
                    yield "bounds", src, dst, message
    held = [piece.region for pieces in template.src.pieces for piece in pieces]
    if message := tiling_fault(whole, held):
        yield "source", None, None, f"source shards do not tile the parameter {whole}: {message}"
    arriving: dict[tuple[int, int], list[Region]] = defaultdict(list)
    for move in template.moves:
        src_piece, dst_piece = template.src.pieces[move.src][move.src_piece], template.dst.pieces[move.dst][move.dst_piece]
        if not src_piece.region.contains(move.region):
            yield "cover", move.src, move.dst, f"{move.region} is sent by a shard that holds {src_piece.region}"
        if src_piece.tensor.dtype != dst_piece.tensor.dtype:
            yield (
                "bytes", move.src, move.dst,
                f"{src_piece.tensor.name} is {src_piece.tensor.dtype}, {dst_piece.tensor.name} is"
                f" {dst_piece.tensor.dtype}, and no cast is declared",
            )  # fmt: skip
        arriving[move.dst, move.dst_piece].append(move.region)
    for c, pieces in enumerate(template.dst.pieces):
        for p, piece in enumerate(pieces):
            if message := tiling_fault(piece.region, arriving[c, p]):
                yield "cover", None, c, f"destination region {piece.region} is not written exactly once: {message}"


def _piece_fault(piece: Piece, whole: Region) -> str:
    if len(piece.region.start) != len(whole.start) or not whole.contains(piece.region):
        return f"region {piece.region} of {piece.tensor.name} is outside of the parameter {whole}"
    if prod(piece.view) != prod(piece.tensor.shape):
        return f"view {piece.view} of {piece.tensor.name} does not factor its shape {piece.tensor.shape}"
    if len(set(piece.dims)) != len(piece.dims) or not all(0 <= dim < len(piece.view) for dim in piece.dims):
        return f"dims {piece.dims} of {piece.tensor.name} do not fit its view {piece.view}"
    if not Region.whole(piece.view).contains(piece.local()):
        return f"local box {piece.local()} is outside of {piece.tensor.name} {piece.view}"
    return ""


def tiling_fault(box: Region, parts: Sequence[Region]) -> str:
    """Why `parts` do not tile `box` ("" when they do): a part outside, a gap, or an overlap."""
    outside = next((part for part in parts if not box.contains(part)), None)
    if outside is not None:
        return f"{outside} is outside of {box}"
    if clash := overlap(parts):
        return f"{clash[0]} and {clash[1]} overlap"
    covered = sum(part.elements for part in parts)
    return "" if covered == box.elements else f"{covered} of {box.elements} elements are written"


def overlap(parts: Sequence[Region]) -> tuple[Region, Region] | None:
    """Two parts that share an element, if any. Sorts along one dim at a time; equal extents recurse to the next dim."""
    return _overlap_along([part for part in parts if part.elements], 0)


def _overlap_along(parts: Sequence[Region], dim: int) -> tuple[Region, Region] | None:
    if len(parts) < 2:
        return None
    if dim == len(parts[0].start):
        return parts[0], parts[1]
    cluster: list[Region] = []
    reach = -1
    for part in [*sorted(parts, key=lambda p: p.start[dim]), None]:
        if part is None or part.start[dim] >= reach:
            if len(cluster) > 1 and (clash := _clash(cluster, dim)):
                return clash
            cluster = []
        if part is not None:
            cluster.append(part)
            reach = max(reach, part.stop[dim])
    return None


def _clash(cluster: Sequence[Region], dim: int) -> tuple[Region, Region] | None:
    spans = {(part.start[dim], part.stop[dim]) for part in cluster}
    if len(spans) == 1:
        return _overlap_along(cluster, dim + 1)
    start, stop = (np.array([getattr(part, end) for part in cluster]) for end in ("start", "stop"))
    for i in range(len(cluster) - 1):
        hit = ((start[i] < stop[i + 1 :]) & (start[i + 1 :] < stop[i])).all(axis=1)
        if hit.any():
            return cluster[i], cluster[i + 1 + int(hit.argmax())]
    return None


# --- holders


def _check_holders(plan: Plan) -> Iterator[Violation]:
    """Ranks exist, hold one shard each, and agree with the mesh on which shard, stage and experts that is."""
    seen: set[tuple[int, int, int, tuple[int, int], bool, int]] = set()
    for bundle in plan.bundles:
        group = plan.groups[bundle.group]
        shards = len(plan.templates[bundle.template].src.pieces)
        key = (bundle.src, bundle.dst, bundle.pp_stage, bundle.experts, bool(group.experts), shards)
        if key in seen:
            continue
        seen.add(key)
        for message in _holder_faults(plan, bundle, group):
            yield Violation("holders", group.name(bundle.layers[0].layer, bundle.experts[0]), _ranks(plan, bundle), message)


def _holder_faults(plan: Plan, bundle: Bundle, group: ParameterGroup) -> Iterator[str]:
    for world, holding, size in (
        ("train", bundle.src, plan.train.world),
        ("gen", bundle.dst, plan.gen.world),
    ):
        ranks = plan.holdings[holding].ranks
        if ranks.min() < 0 or ranks.max() >= size:
            yield f"{world} ranks {_list(ranks.ravel())} are outside of the {size} of the mesh"
            return
        if len(np.unique(ranks)) != ranks.size:
            yield f"a {world} rank holds two shards of one parameter: {ranks.tolist()}"
    ranks = plan.holdings[bundle.src].ranks
    stages = {plan.train.coordinate(int(r))["pp"] for r in ranks.ravel()}
    if stages != {bundle.pp_stage}:
        yield f"source ranks sit on pipeline stages {sorted(stages)}, the bundle leaves from stage {bundle.pp_stage}"
        return
    if message := _source_holder_fault(plan, bundle, group):
        yield message
    if message := _destination_holder_fault(plan, bundle, group):
        yield message


def _source_holder_fault(plan: Plan, bundle: Bundle, group: ParameterGroup) -> str:
    mesh, ranks = plan.train, plan.holdings[bundle.src].ranks
    if group.experts:
        local = group.experts // mesh.ep
        ep = bundle.experts[0] // local
        if (bundle.experts[1] - 1) // local != ep or bundle.src_slot != bundle.experts[0] - ep * local:
            return f"experts {bundle.experts} do not start at slot {bundle.src_slot} of one expert-parallel rank ({local} each)"
        expected = mesh.expert_ranks(bundle.pp_stage)[ep]
    elif len(ranks) == 1:
        expected = mesh.dense_ranks(bundle.pp_stage).reshape(1, -1)
    elif plan.templates[bundle.template].src.pieces[0] and _cut_by_experts(plan, bundle):
        expected = mesh.expert_ranks(bundle.pp_stage).reshape(mesh.ep, -1)
    else:
        expected = mesh.dense_ranks(bundle.pp_stage)
    return _same_holders("train", expected, ranks)


def _cut_by_experts(plan: Plan, bundle: Bundle) -> bool:
    """Stacked expert tensors (all experts in one HF parameter) are cut over the expert mesh."""
    return plan.groups[bundle.group].role.value.startswith("stacked")


def _destination_holder_fault(plan: Plan, bundle: Bundle, group: ParameterGroup) -> str:
    mesh, ranks = plan.gen, plan.holdings[bundle.dst].ranks
    stages = {mesh.coordinate(int(r))["pp"] for r in ranks.ravel()}
    if len(stages) != 1:
        return f"destination ranks sit on pipeline stages {sorted(stages)}"
    stage = stages.pop()
    dense = mesh.dense_ranks(stage)
    if group.experts and mesh.ep > 1:
        base, left = divmod(group.experts, mesh.ep)
        first = [ep * base + min(ep, left) for ep in range(mesh.ep + 1)]
        ep = next(e for e in range(mesh.ep) if first[e] <= bundle.experts[0] < first[e + 1])
        if bundle.experts[1] > first[ep + 1] or bundle.dst_slot != bundle.experts[0] - first[ep]:
            return f"experts {bundle.experts} do not start at slot {bundle.dst_slot} of one expert-parallel rank"
        return _same_holders("gen", mesh.expert_ranks(stage)[ep].reshape(1, 1), ranks)
    if _cut_by_experts(plan, bundle) and mesh.ep > 1:
        return _same_holders("gen", mesh.expert_ranks(stage).reshape(mesh.ep, 1), ranks)
    return _same_holders("gen", dense.reshape(1, -1) if len(ranks) == 1 else dense, ranks)


def _same_holders(world: str, expected: np.ndarray, ranks: np.ndarray) -> str:
    if ranks.shape == expected.shape and all(set(a) == set(b) for a, b in zip(ranks.tolist(), expected.tolist())):
        return ""
    return f"{world} ranks {ranks.tolist()} hold the shards on paper, {expected.tolist()} on the mesh"


# --- members


def _check_members(plan: Plan) -> Iterator[Violation]:
    """Each parameter of a bulk group arrives once at each generation rank of each stage that it is meant for."""
    arrivals: dict[int, dict[tuple[int, int], int]] = defaultdict(dict)
    layer_places: dict[tuple[int, int], tuple[int, int, int]] = {}
    for index, bundle in enumerate(plan.bundles):
        group = plan.groups[bundle.group]
        stage = plan.gen.coordinate(int(plan.holdings[bundle.dst].ranks[0, 0]))["pp"]
        for at in bundle.layers:
            place = layer_places.setdefault((stage, at.layer), (bundle.pp_stage, at.vp_stage, at.src_local))
            if group.layers and place != (bundle.pp_stage, at.vp_stage, at.src_local):
                yield Violation(
                    "members", group.name(at.layer, bundle.experts[0]), _ranks(plan, bundle),
                    f"layer {at.layer} is on stage, chunk, index {(bundle.pp_stage, at.vp_stage, at.src_local)} here and on {place} elsewhere",
                )  # fmt: skip
            if group.layers and at.dst_local != at.layer:
                yield Violation(
                    "members", group.name(at.layer, bundle.experts[0]), _ranks(plan, bundle),
                    f"layer {at.layer} is written to the engine's layer {at.dst_local}",
                )  # fmt: skip
        for at in bundle.layers:
            for expert in range(*bundle.experts) if group.experts else (-1,):
                key = (at.layer, expert)
                here = arrivals[bundle.group].setdefault(key, 0)
                if here & (1 << stage):
                    yield Violation(
                        "members", plan.parameter_name(index, 0), _ranks(plan, bundle), f"layer {at.layer} expert {expert} arrives twice"
                    )
                arrivals[bundle.group][key] = here | (1 << stage)
    for number, found in arrivals.items():
        group = plan.groups[number]
        missing = group.count - len(found)
        if missing:
            absent = next(
                (layer, expert)
                for layer in group.layers or (-1,)
                for expert in (range(group.experts) if group.experts else (-1,))
                if (layer, expert) not in found
            )
            yield Violation("members", group.name(*absent), "all gen ranks", f"{missing} parameters of {group.pattern} never arrive")
    yield from _check_places(plan)


def _check_places(plan: Plan) -> Iterator[Violation]:
    """The pipeline holds layers in order: chunk by chunk, each layer once, as the mesh counts them."""
    layers = [layer for group in plan.groups if not group.mtp for layer in group.layers]
    if not layers:
        return
    try:
        places = plan.train.place_layers(max(layers) + 1)
    except ValueError as error:
        yield Violation("stages", "all layers", "all train ranks", str(error))
        return
    for bundle in plan.bundles:
        for at in bundle.layers:
            if at.layer < 0:
                continue
            place = places[at.layer]
            if (place.pp_stage, place.vp_stage, place.local) != (bundle.pp_stage, at.vp_stage, at.src_local):
                yield Violation(
                    "stages", plan.groups[bundle.group].name(at.layer, bundle.experts[0]), _ranks(plan, bundle),
                    f"layer {at.layer} is read from stage {bundle.pp_stage} chunk {at.vp_stage} index {at.src_local}, the"
                    f" pipeline keeps it on stage {place.pp_stage} chunk {place.vp_stage} index {place.local}",
                )  # fmt: skip


# --- tensors


_Content = tuple[tuple[LocalTensor, tuple[tuple[int, int, tuple[int, ...]], ...]], ...]


def _check_tensors(plan: Plan) -> Iterator[Violation]:
    """Destination tensors are tiled by pieces and padding; source tensors are claimed at most once."""
    for source in (False, True):
        contents = _contents(plan, source)
        checked: set[tuple[object, ...]] = set()
        for rank, held in _rank_classes(plan, source).items():
            by_tensor: dict[tuple[str, int, int], list[tuple[int, int, int, int, int]]] = defaultdict(list)
            for holding, shard in held:
                for key, entries in contents.get((holding, shard), {}).items():
                    by_tensor[key] += entries
            for (name, _, layer), entries in by_tensor.items():
                signature = (name, tuple(sorted((plan.bundles[e[0]].group, *e[1:]) for e in entries)))
                if signature in checked:
                    continue
                checked.add(signature)
                message = _tensor_fault(plan, name, entries, source)
                if message:
                    bundle = entries[0][0]
                    parameter = plan.parameter_name(bundle, 0)
                    world = "train" if source else "gen"
                    yield Violation("tensors", parameter, f"{world} {rank}", f"{name.format(vp='*', layer=layer, expert='*')}: {message}")


def _rank_classes(plan: Plan, source: bool) -> dict[int, tuple[tuple[int, int], ...]]:
    """One rank of each class, with the (holding, shard) pairs that its class holds."""
    used = {bundle.src if source else bundle.dst for bundle in plan.bundles}
    held: dict[int, list[tuple[int, int]]] = defaultdict(list)
    for holding in sorted(used):
        for shard, ranks in enumerate(plan.holdings[holding].ranks):
            for rank in ranks.tolist():
                held[rank].append((holding, shard))
    classes: dict[tuple[tuple[int, int], ...], int] = {}
    for rank in sorted(held):
        classes.setdefault(tuple(held[rank]), rank)
    return {rank: pairs for pairs, rank in classes.items()}


def _contents(plan: Plan, source: bool) -> dict[tuple[int, int], dict[tuple[str, int, int], list[tuple[int, ...]]]]:
    """For each (holding, shard): what lands in each (tensor pattern, chunk, layer), as (bundle, template, shard, slot0, slots)."""
    found: dict[tuple[int, int], dict[tuple[str, int, int], list[tuple[int, ...]]]] = defaultdict(lambda: defaultdict(list))
    for index, bundle in enumerate(plan.bundles):
        template = plan.templates[bundle.template]
        shards, holding, slot = (
            (template.src, bundle.src, bundle.src_slot) if source else (template.dst, bundle.dst, bundle.dst_slot)
        )
        for shard, pieces in enumerate(shards.pieces):
            padding = shards.padding[shard] if shards.padding else ()
            for name in dict.fromkeys([p.tensor.name for p in pieces] + [p.tensor.name for p in padding]):
                for at in bundle.layers:
                    place = (at.vp_stage, at.src_local) if source else (0, at.dst_local)
                    found[holding, shard][(name, *place)].append(
                        (index, bundle.template, shard, slot, slot + bundle.expert_count)
                    )
    return found


def _tensor_fault(plan: Plan, name: str, entries: Sequence[tuple[int, ...]], source: bool) -> str:
    """Check one local tensor, slot by slot where experts are stacked or numbered in the name."""
    boxes: dict[int, dict[tuple[int, Region], None]] = defaultdict(dict)  # several bundles may read one group's bytes
    views: set[tuple[tuple[int, ...], tuple[int, ...], int]] = set()
    slot_dims: set[int] = set()
    for index, template_index, shard, first, stop in entries:
        claim = plan.bundles[index].group if source else index
        template = plan.templates[template_index]
        shards = template.src if source else template.dst
        pieces = [piece for piece in shards.pieces[shard] if piece.tensor.name == name]
        for piece in pieces:
            views.add((piece.tensor.shape, piece.view, piece.slot_dim))
            slot_dims.add(piece.slot_dim)
            box = piece.local()
            if piece.slot_dim >= 0:
                box = box.within(piece.slot_dim, 0, 1)
            for slot in range(first, stop) if piece.slot_dim >= 0 or "{expert}" in name else (0,):
                boxes[slot][claim, box] = None
        for padding in shards.padding[shard] if shards.padding else ():
            if padding.tensor.name == name:
                views.add((padding.tensor.shape, padding.tensor.shape, -1))
                boxes[0][-1, padding.box] = None
    if len({shape for shape, _, _ in views}) > 1 or len({view for _, view, _ in views}) > 1:
        return f"its pieces disagree on its shape: {sorted(views)}"
    _, view, slot_dim = next(iter(views))
    box = Region.whole(view)
    if slot_dim >= 0:
        if not source and sorted(boxes) != list(range(view[slot_dim])):
            return f"slots {sorted(boxes)} of {view[slot_dim]} are written"
        if any(slot >= view[slot_dim] for slot in boxes):
            return f"slot {max(boxes)} is outside of {view[slot_dim]}"
        box = box.within(slot_dim, 0, 1)
    for parts in {tuple(sorted(part for _, part in claims)): None for claims in boxes.values()}:
        if source:
            clash = overlap(parts)
            message = f"two parameters claim {clash[0]} and {clash[1]}" if clash else ""
        else:
            message = tiling_fault(box, parts)
        if message:
            return message
    return ""


# --- stages


def _check_stages(plan: Plan) -> Iterator[Violation]:
    last = -1
    for index, bundle in enumerate(plan.bundles):
        if not 0 <= bundle.pp_stage < plan.train.pp or bundle.pp_stage < last:
            yield Violation(
                "stages", plan.parameter_name(index, 0), _ranks(plan, bundle),
                f"stage {bundle.pp_stage} follows stage {last} of {plan.train.pp}; stages run in order",
            )  # fmt: skip
        last = max(last, bundle.pp_stage)
