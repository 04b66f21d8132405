"""Make a plan: place every group on both ends, choose its route, intersect the cuts, balance the sources.

Pure and deterministic: the same model's parameters, meshes and policy give the same plan, and the same digest, on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.block_scales import blocks_touched
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE, engine_named
from mcore_reshard.planner.layout.megatron import DEFAULT_BUILD, MegatronBuild, MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.layout.partitions import Excluded, Misc, Partition, PartitionOwners
from mcore_reshard.planner.layout.traced import TracedLayouts
from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup
from mcore_reshard.planner.model.precision import (
    FP8,
    Format,
    Precision,
    PrecisionError,
    divided,
    precision_of,
    with_unquantized_layers,
)

from .balance import Share, Work, first_replicas
from .bands import band_count
from .bounds import require_countable
from .carriers import carriers_for
from .loads import busiest_link
from .paths import LINKS, NIC, OWN_GPU
from .plan import GroupCast, Overlap, Plan, Policy, QuantizedPair, TransferGroup, TransferPattern, UnplannedGroup
from .plan_file import digest_of
from .routing import BulkRoute, RoutedGroup, Router, Side

_LARGEST_OVERLAP = 4 << 20  # bytes; replicas, and the waves of a relay, share the work of a larger tensor
_LARGEST_OF_SMALL_MODELS = 1 << 20  # the same in a small model, whose waves else have too few for many ranks
_LARGEST_OF_SMALL_RELAYS = 1 << 18  # the same between hosts, where replicas are more, and no copy engine takes the rows
_OVERLAPS = 1 << 16  # a model is small if it has not so many of the largest
_LARGEST_OF_EXPERTS = 8 << 20  # these are many
_DISTINCTLY = 0.95  # relaying adds a hop, so it must take the busiest link below this share of its bytes
# The same for a plan that casts, whose hops cannot overlap; and where both sides share GPUs, and messages are small.
_DISTINCTLY_AT_MORE_COST = 0.9


def make_plan(
    model_parameters: ModelParameters,
    train: TrainMesh,
    gen: GenMesh,
    *,
    model: str = "",
    policy: Policy = "exact",
    engine: str = DEFAULT_ENGINE,
    build: MegatronBuild = DEFAULT_BUILD,
    train_dtype: str | None = None,
    gen_dtype: str | None = None,
    train_unquantized_layers: Collection[int] = (),
) -> Plan:
    """Plan the refit of a model from a training mesh to the mesh of an engine.

    `train_dtype` and `gen_dtype` say what either side holds, as in `precision_of`; None: the checkpoint's main dtype.
    `train_unquantized_layers` are the layers, as in ParameterGroup, whose matrices an FP8 trainer keeps in its main dtype.
    Raises UnknownEngineError, PrecisionError, and MeshError, listing every violation of both meshes, when the model cannot
    be cut this way.
    """
    train_precision = precision_of(train_dtype, model_parameters)
    gen_precision = precision_of(gen_dtype, model_parameters)
    engine_rules = engine_named(engine)
    if gen_precision.format is not None:
        model_parameters = engine_rules.quantized(model_parameters, gen_precision.format)
    train_precision = with_unquantized_layers(train_precision, train_unquantized_layers, model_parameters)
    model_parameters = divided(model_parameters, lambda _, layer: layer in train_precision.unquantized_layers)
    train_parameters, gen_parameters = train_precision.main(model_parameters), gen_precision.main(model_parameters)
    source = MegatronLayout(train_parameters, train, build)
    destination = engine_rules.layout(gen_parameters, gen)
    violations = source.violations() + destination.violations()
    violations += engine_rules.misquantized(gen_parameters) if gen_precision.format is not None else []
    if violations:
        raise MeshError(f"{model or model_parameters.architecture.family} does not fit these meshes", violations)
    train = train.canonical(model_parameters.architecture.layers)
    gen = gen.canonical(model_parameters.architecture.layers)
    sides = Side(train_parameters, source, train_precision), Side(gen_parameters, destination, gen_precision)
    routed = Router(*sides, engine_rules, train, gen, policy).routes()
    blank = Plan(model, train, gen, destination.name, policy, (), (), (), ())
    return _Planner(blank).plan(routed)


def plan_traced(
    layouts: TracedLayouts, train: TrainMesh, gen: GenMesh, *, model: str = "", form: Format | None = None
) -> Plan:
    """Plan the refit of a model whose layouts were read off the loaders of trainer and engine.

    `form` is the format of what either side keeps in E4M3. Raises PrecisionError where the engine's tensors contradict it.
    """
    model_parameters, engine_rules = layouts.model, engine_named(layouts.gen.name)
    _check_format(model_parameters, form, layouts.gen.name)
    precisions = Precision(layouts.dtypes[0], form), Precision(layouts.dtypes[1], form)
    sides = Side(model_parameters, layouts.train, precisions[0]), Side(model_parameters, layouts.gen, precisions[1])
    routed = Router(*sides, engine_rules, train, gen, "exact").routes()
    return _Planner(Plan(model, train, gen, layouts.gen.name, "exact", (), (), (), ())).plan(routed)


def _check_format(model: ModelParameters, form: Format | None, engine: str) -> None:
    """Raise PrecisionError unless the engine has matrices in E4M3 exactly where a format is stated, and nothing else in it."""
    quantized = [group for group in model.groups if group.dtype == FP8]
    if form is None and quantized:
        raise PrecisionError(
            f"{engine} keeps {len(quantized)} groups of weights in {FP8}, such as {quantized[0].name_pattern}: say that the"
            " engine is in fp8 (gen_dtype, --gen-dtype)"
        )
    if form is not None and not quantized:
        raise PrecisionError(
            f"the engine is said to be in fp8, and {engine} keeps no weight in {FP8}: give its config a quantization_config"
            " of method fp8, or leave fp8 out"
        )
    if odd := [group for group in quantized if len(group.shape) != 2]:
        raise PrecisionError(
            f"{engine} keeps {odd[0].name_pattern} {list(odd[0].shape)} in {FP8}, which is no matrix in the checkpoint: no"
            " scales of such a tensor are known; refit this engine unquantized"
        )


class _Planner:
    """Holds the tables a plan shares (groups, patterns, rank grids) while they grow."""

    def __init__(self, blank: Plan) -> None:
        self._blank = blank  # has the meshes and names alone
        self._patterns: dict[tuple[Partition, Partition], int] = {}
        self._overlaps: list[tuple[Overlap, ...]] = []  # of each pattern
        self._scales: dict[tuple[int, int], int] = {}  # (group, pattern) of a weight in a pair -> that of its scales
        self._by_identity: dict[tuple[int, int], tuple[int, Partition, Partition]] = {}  # keeps the parts alive
        self._rank_grids: list[NDArray[np.int32]] = []
        self._rank_grid_index: dict[tuple[tuple[int, ...], bytes], int] = {}

    def plan(self, routed: list[RoutedGroup]) -> Plan:
        groups: list[ParameterGroup] = []
        pairs: list[QuantizedPair] = []
        casts: list[GroupCast] = []
        unplanned: dict[type, list[UnplannedGroup]] = {Misc: [], Excluded: []}
        transfer_groups: list[TransferGroup] = []
        for entry in routed:
            index = len(groups)
            groups.append(entry.group)
            if entry.scales is not None:
                groups.append(entry.scales)
                pairs.append(QuantizedPair(index, index + 1, entry.block, entry.touched))
            if not isinstance(entry.route, BulkRoute):
                unplanned[type(entry.route)] += [
                    UnplannedGroup(i, entry.route.reason) for i in range(index, len(groups))
                ]
                continue
            if entry.cast is not None:
                casts.append(GroupCast(index, *entry.cast))
            transfer_groups += self._transfer_groups(index, entry.route.src, entry.route.dst)
            self._scales.update(self._scale_patterns(index, entry.route, entry.block))
        transfer_groups.sort(key=_order)
        cuts = zip(self._patterns, self._overlaps, strict=True)
        patterns = tuple(TransferPattern(*ends, overlaps) for ends, overlaps in cuts)
        plan = replace(
            self._blank,
            groups=tuple(groups),
            patterns=patterns,
            rank_grids=tuple(self._rank_grids),
            misc=tuple(unplanned[Misc]),
            excluded=tuple(unplanned[Excluded]),
            pairs=tuple(pairs),
            casts=tuple(casts),
        )
        return balance_plan(plan, transfer_groups, self._scales)

    def _transfer_groups(
        self, group: int, source: Collection[PartitionOwners], destination: Collection[PartitionOwners]
    ) -> Iterable[TransferGroup]:
        by_stage: dict[int, list[PartitionOwners]] = {}
        for dst in sorted(destination, key=lambda owners: owners.experts):
            by_stage.setdefault(dst.pp_stage, []).append(dst)
        layers_of = {id(dst): {place.layer for place in dst.layers} for dst in destination}
        for src in source:
            for owner_sets in by_stage.values():
                first, last = 0, len(owner_sets)
                if src.experts[1]:
                    first = bisect_right(owner_sets, src.experts[0], key=lambda dst: dst.experts[1])
                    last = bisect_left(owner_sets, src.experts[1], key=lambda dst: dst.experts[0])
                for dst in owner_sets[first:last]:
                    if layers := tuple(place for place in src.layers if place.layer in layers_of[id(dst)]):
                        experts = max(src.experts[0], dst.experts[0]), min(src.experts[1], dst.experts[1])
                        pattern = self._pattern_index(src.partition, dst.partition)
                        grids = self._rank_grid(src.ranks), self._rank_grid(dst.ranks)
                        slots = experts[0] - src.experts[0], experts[0] - dst.experts[0]
                        yield TransferGroup(group, pattern, src.pp_stage, *grids, layers, experts, *slots)

    def _pattern_index(self, src: Partition, dst: Partition) -> int:
        """The number of the pattern of two partitions. Its overlaps are whole."""
        identity = (id(src), id(dst))  # hashing parts is slow, and the experts of a group share theirs
        if identity not in self._by_identity:
            known = (src, dst) in self._patterns
            overlaps = () if known else _intersect(src, dst)
            self._by_identity[identity] = self._new_pattern(src, dst, overlaps), src, dst
        return self._by_identity[identity][0]

    def _new_pattern(self, src: Partition, dst: Partition, overlaps: tuple[Overlap, ...]) -> int:
        index = self._patterns.setdefault((src, dst), len(self._patterns))
        if index == len(self._overlaps):
            self._overlaps.append(overlaps)
        return index

    def _scale_patterns(
        self, group: int, ends: BulkRoute, block: tuple[int, int]
    ) -> Iterator[tuple[tuple[int, int], int]]:
        """The patterns of the scales of a group that is placed already: the same overlaps, in blocks."""
        for src_id, (_, src_scales) in ends.src_scales.items():
            for dst_id, (_, dst_scales) in ends.dst_scales.items():
                if (src_id, dst_id) in self._by_identity:
                    pattern = self._by_identity[src_id, dst_id][0]
                    overlaps = (replace(m, region=blocks_touched(m.region, block)) for m in self._overlaps[pattern])
                    yield (group, pattern), self._new_pattern(src_scales, dst_scales, tuple(overlaps))

    def _rank_grid(self, ranks: NDArray[np.int32]) -> int:
        ranks = np.ascontiguousarray(ranks, dtype=np.int32)
        key = (ranks.shape, ranks.tobytes())
        if key not in self._rank_grid_index:
            self._rank_grid_index[key] = len(self._rank_grids)
            self._rank_grids.append(ranks)
        return self._rank_grid_index[key]


def balance_plan(plan: Plan, transfer_groups: list[TransferGroup], scales: Mapping[tuple[int, int], int]) -> Plan:
    """The plan with these transfer groups, sources balanced, and its digest. Replicas pass on where that pays.

    `transfer_groups` are in the plan's order, without the scales of pairs. `scales` has the pattern of a pair's scales by
    (group, pattern) of its weight.
    """
    plan = _balanced(_cut(plan, transfer_groups, _LARGEST_OF_SMALL_MODELS), transfer_groups, scales, relay=False)
    if _may_gain_by_relaying(plan):
        relayed = _balanced(plan, transfer_groups, scales, relay=True)
        costs_more = relayed.waves == 1 or (plan.topology is not None and plan.topology.shares_gpus)
        distinctly = _DISTINCTLY_AT_MORE_COST if costs_more else _DISTINCTLY
        plan = relayed if busiest_link(relayed) < distinctly * busiest_link(plan) else plan
    if plan.spans_hosts and "relay" in plan.later_hops:
        finer = _cut(plan, transfer_groups, _LARGEST_OF_SMALL_RELAYS)
        plan = plan if finer is plan else _balanced(finer, transfer_groups, scales, relay=True)
    if carriers := carriers_for(plan):
        plan = _balanced(replace(plan, carriers=carriers), transfer_groups, scales, relay=False)
    object.__setattr__(plan, "digest", digest_of(plan))
    return plan


def _cut(plan: Plan, transfer_groups: Sequence[TransferGroup], least: int) -> Plan:
    """The plan with its overlaps cut as its size asks for: to a 65,536th of its bytes, if that is `least` bytes or more.

    Itself if its overlaps are cut so already. Raises ValueError for more transfers than any model has.
    """
    scales = {pair.scales for pair in plan.pairs}
    nbytes = sum(group.count * group.nbytes for index, group in enumerate(plan.groups) if index not in scales)
    largest = min(max(nbytes // _OVERLAPS, least), _LARGEST_OVERLAP)
    largest_of = {each.pattern: _LARGEST_OF_EXPERTS if each.experts[1] else largest for each in transfer_groups}
    patterns = [*plan.patterns]
    bands = {
        index: band_count(patterns[index].overlaps, patterns[index].dst, most) for index, most in largest_of.items()
    }
    require_countable(sum(each.members * bands[each.pattern] for each in transfer_groups))
    for index, most in largest_of.items():
        patterns[index] = patterns[index].in_bands(most)
    unchanged = all(new is old for new, old in zip(patterns, plan.patterns, strict=True))
    return plan if unchanged else replace(plan, patterns=tuple(patterns))


def _may_gain_by_relaying(plan: Plan) -> bool:
    """Relaying leaves what ranks receive as it is, between hosts what enters by NIC. So only the busiest sender can gain."""
    ways = [(plan.recv_bytes, plan.send_bytes)]
    if plan.spans_hosts:
        sent, received = plan.from_trainer
        ways.append((received[NIC], sent[NIC]))
    return any(into.max(initial=0) < _DISTINCTLY * out.max(initial=0) for into, out in ways)


def _balanced(
    plan: Plan, transfer_groups: list[TransferGroup], scales: Mapping[tuple[int, int], int], *, relay: bool
) -> Plan:
    """The plan with these transfer groups. Their turns even out what ranks send, and what enters by which NIC."""
    plan = plan.turned(_with_scales(transfer_groups, scales), relay=relay)
    machine = None if plan.topology is None else plan.topology.machine
    nic_cost = 1 if machine is None else max(1, round(machine.nvlink / machine.nic))
    cost_of_link = np.array([0 if link == OWN_GPU else nic_cost if link == NIC else 1 for link in LINKS], np.int64)
    sending: list[Share] = []
    landing: list[Share] = []
    passes_on = any(alike.paths.passes_on for alike in plan.alike)
    waves = plan.balanced_waves
    works: dict[tuple[int, int], Work] = {}
    kept: dict[tuple[int, int, int, int], Share] = {}
    for transfers in transfer_groups:
        paths, members = plan.paths(transfers), transfers.members
        ends = [(sending, plan.train.world, paths.pulls, transfers.src, paths.pulled_bytes)]
        if passes_on:
            ends.append((landing, plan.gen.world, paths.landings, transfers.dst, paths.landed_bytes))
        for shares, world, turns, grid, count in ends:
            nbytes = count(members, waves, plan.wave_lag(transfers))  # kept by the paths
            key = id(turns), id(nbytes), members, grid
            if key not in kept:
                if key[:2] not in works:
                    works[key[:2]] = Work(turns, nbytes * cost_of_link[turns.links[turns.row_of]])
                ranks = turns.ranks(plan.receivers(grid) if shares is landing else plan.rank_grids[grid])
                kept[key] = Share(works[key[:2]], ranks, world, members, grid)
            shares.append(kept[key])
    firsts = zip(
        transfer_groups,
        first_replicas(sending),
        first_replicas(landing) if passes_on else [0] * len(transfer_groups),
        strict=True,
    )
    turned = [
        each
        if (src, dst) == (each.first_src_replica, each.first_dst_replica)
        else replace(each, first_src_replica=src, first_dst_replica=dst)
        for each, src, dst in firsts
    ]
    return plan.turned(_with_scales(turned, scales), relay=relay)


def _with_scales(
    transfer_groups: Sequence[TransferGroup], scales: Mapping[tuple[int, int], int]
) -> tuple[TransferGroup, ...]:
    """The transfer groups; after each group of a weight in a pair, the same one for its scales."""
    of_scales = [
        replace(transfers, group=transfers.group + 1, pattern=scales[transfers.group, transfers.pattern])
        for transfers in transfer_groups
        if (transfers.group, transfers.pattern) in scales
    ]
    return tuple(sorted([*transfer_groups, *of_scales], key=_order))


def _order(transfers: TransferGroup) -> tuple[object, ...]:
    return transfers.pp_stage, transfers.group, transfers.layers[0].layer, transfers.experts


def _intersect(src: Partition, dst: Partition) -> tuple[Overlap, ...]:
    """Every common region of a source piece and a destination piece, by destination part and piece.

    Pieces are looked up along dim 0 of the parameter, so that the cost follows the number of overlaps.
    """
    rows = sorted(
        (piece.region.start[0], piece.region.stop[0], part, number)
        for part, pieces in enumerate(src.pieces)
        for number, piece in enumerate(pieces)
    )
    starts = [start for start, *_ in rows]
    longest = max((stop - start for start, stop, *_ in rows), default=0)
    overlaps = []
    for part, pieces in enumerate(dst.pieces):
        for number, piece in enumerate(pieces):
            start, stop = piece.region.start[0], piece.region.stop[0]
            for *_, src_part, src_number in rows[bisect_left(starts, start - longest) : bisect_left(starts, stop)]:
                region = src.pieces[src_part][src_number].region.intersect(piece.region)
                if region is not None:
                    overlaps.append(Overlap(src_part, src_number, part, number, region))
    return tuple(overlaps)
