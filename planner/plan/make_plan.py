"""Make a plan: place every group on both ends, choose its route, intersect the cuts, balance the sources.

Pure and deterministic: the same catalogue, meshes and policy give the same plan, and the same digest, on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.layout.block_scales import blocks_touched
from mcore_reshard.planner.layout.engines import DEFAULT_ENGINE, engine_named
from mcore_reshard.planner.layout.megatron import MegatronBuild, MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.layout.partitions import Excluded, Misc, Placement, Shards
from mcore_reshard.planner.model.parameters import Catalogue, ParameterGroup
from mcore_reshard.planner.model.precision import divided, in_format, precision_of, with_unquantised_layers

from .plan import (
    Bundle,
    BundleLayer,
    GroupCast,
    Holding,
    Move,
    Pair,
    Plan,
    Policy,
    Template,
    UnplannedGroup,
    landing_bytes,
    replica_bytes,
)
from .plan_file import digest_of
from .routing import Ends, Routed, Router, Side

_DISTINCTLY = 0.95  # relaying adds a hop, so the busiest link must carry this much less


def make_plan(
    catalogue: Catalogue,
    train: TrainMesh,
    gen: GenMesh,
    *,
    model: str = "",
    policy: Policy = "exact",
    engine: str = DEFAULT_ENGINE,
    build: MegatronBuild = MegatronBuild(),  # noqa: B008
    train_dtype: str | None = None,
    gen_dtype: str | None = None,
    train_unquantised_layers: Collection[int] = (),
) -> Plan:
    """Plan the refit of a model from a training mesh to the mesh of an engine.

    `train_dtype` and `gen_dtype` say what either side holds, as in `precision_of`; None: the catalogue's dtype.
    `train_unquantised_layers` are the layers, as in ParameterGroup, whose matrices an FP8 trainer keeps in its main dtype.
    Raises UnknownEngineError, PrecisionError, and MeshError, listing every violation of both meshes, when the model cannot
    be cut this way.
    """
    held, wanted = precision_of(train_dtype, catalogue), precision_of(gen_dtype, catalogue)
    if wanted.format is not None:
        catalogue = in_format(catalogue, wanted.format)
    held = with_unquantised_layers(held, train_unquantised_layers, catalogue)
    catalogue = divided(catalogue, lambda _, layer: layer in held.unquantised_layers)
    held_catalogue, wanted_catalogue = held.main(catalogue), wanted.main(catalogue)
    source = MegatronLayout(held_catalogue, train, build)
    destination = engine_named(engine).layout(wanted_catalogue, gen)
    violations = source.violations() + destination.violations()
    violations += destination.misquantised() if wanted.format is not None else []
    if violations:
        raise MeshError(f"{model or catalogue.architecture.family} does not fit these meshes", violations)
    train = train.canonical(catalogue.architecture.layers)
    sides = Side(held_catalogue, source, held), Side(wanted_catalogue, destination, wanted)
    routed = Router(*sides, train, gen, policy).routes()
    return _Planner(train, gen, model, policy, destination.name).plan(routed)


class _Planner:
    """Holds the tables a plan shares (groups, templates, holdings) while they grow."""

    def __init__(self, train: TrainMesh, gen: GenMesh, model: str, policy: Policy, engine: str) -> None:
        self._train, self._gen, self._model, self._policy, self._engine = train, gen, model, policy, engine
        self._templates: dict[tuple[Shards, Shards], int] = {}
        self._moves: list[tuple[Move, ...]] = []  # of each template
        self._scales: dict[tuple[int, int], int] = {}  # (group, template) of a weight in a pair -> that of its scales
        self._by_identity: dict[tuple[int, int], tuple[int, Shards, Shards]] = {}  # keeps the shards alive
        self._holdings: list[Holding] = []
        self._holding_index: dict[tuple[tuple[int, ...], bytes], int] = {}

    def plan(self, routed: list[Routed]) -> Plan:
        groups: list[ParameterGroup] = []
        pairs: list[Pair] = []
        casts: list[GroupCast] = []
        unplanned: dict[type, list[UnplannedGroup]] = {Misc: [], Excluded: []}
        bundles: list[Bundle] = []
        for entry in routed:
            index = len(groups)
            groups += [entry.group] if entry.scales is None else [entry.group, entry.scales]
            pairs += [] if entry.scales is None else [Pair(index, index + 1, entry.block, entry.touched)]
            if not isinstance(entry.route, Ends):
                unplanned[type(entry.route)] += [
                    UnplannedGroup(i, entry.route.reason) for i in range(index, len(groups))
                ]
                continue
            casts += [] if entry.cast is None else [GroupCast(index, *entry.cast)]
            bundles += self._bundles(index, entry.route.src, entry.route.dst)
            if entry.scales is not None:
                self._scales.update(self._scale_templates(index, entry.route, entry.block))
        bundles.sort(key=_order)
        templates = tuple(Template(*ends, moves) for ends, moves in zip(self._templates, self._moves, strict=True))
        plan = Plan(
            model=self._model,
            train=self._train,
            gen=self._gen,
            engine=self._engine,
            policy=self._policy,
            groups=tuple(groups),
            templates=templates,
            holdings=tuple(self._holdings),
            bundles=self._with_scales(_balanced(bundles, templates, self._holdings, self._train.world, relay=False)),
            misc=tuple(unplanned[Misc]),
            excluded=tuple(unplanned[Excluded]),
            pairs=tuple(pairs),
            casts=tuple(casts),
        )
        plan = self._relayed_if_shorter(plan, bundles)
        object.__setattr__(plan, "digest", digest_of(plan))
        return plan

    def _relayed_if_shorter(self, plan: Plan, bundles: list[Bundle]) -> Plan:
        """The plan, or one in which replicas relay if that makes the busiest link distinctly less busy.

        What a rank receives stays the same, so that only busier senders can gain.
        """
        if plan.recv_bytes.max(initial=0) >= _DISTINCTLY * plan.send_bytes.max(initial=0):
            return plan
        turned = _balanced(bundles, plan.templates, self._holdings, self._train.world, relay=True)
        landed = _landed(turned, plan.templates, self._holdings, self._gen.world)
        relayed = replace(plan, bundles=self._with_scales(landed), relay=True)
        return relayed if relayed.busiest_link < _DISTINCTLY * plan.busiest_link else plan

    def _with_scales(self, bundles: Sequence[Bundle]) -> tuple[Bundle, ...]:
        """The bundles, and beside those of weights in pairs the same ones for their scales."""
        scales = [
            replace(bundle, group=bundle.group + 1, template=self._scales[bundle.group, bundle.template])
            for bundle in bundles
            if (bundle.group, bundle.template) in self._scales
        ]
        return tuple(sorted([*bundles, *scales], key=_order))

    def _bundles(self, group: int, source: Iterable[Placement], destination: Iterable[Placement]) -> Iterable[Bundle]:
        wanted: dict[int, list[Placement]] = {}
        for placement in destination:
            wanted.setdefault(placement.pp_stage, []).append(placement)
        for placements in wanted.values():
            placements.sort(key=lambda placement: placement.experts)
        starts = {stage: [p.experts[0] for p in placements] for stage, placements in wanted.items()}
        stops = {stage: [p.experts[1] for p in placements] for stage, placements in wanted.items()}
        for src in source:
            for stage, placements in wanted.items():
                first, last = 0, len(placements)
                if src.experts[1]:
                    first = bisect_right(stops[stage], src.experts[0])
                    last = bisect_left(starts[stage], src.experts[1])
                for dst in placements[first:last]:
                    bundle = self._bundle(group, src, dst)
                    if bundle is not None:
                        yield bundle

    def _bundle(self, group: int, src: Placement, dst: Placement) -> Bundle | None:
        dst_places = {place.layer: place for place in dst.layers}
        layers = tuple(
            BundleLayer(place.layer, place.vp_stage, place.local, dst_places[place.layer].local)
            for place in src.layers
            if place.layer in dst_places
        )
        experts = (max(src.experts[0], dst.experts[0]), min(src.experts[1], dst.experts[1]))
        if not layers:
            return None
        return Bundle(
            group=group,
            template=self._template(src.shards, dst.shards),
            pp_stage=src.pp_stage,
            src=self._holding(src.ranks),
            dst=self._holding(dst.ranks),
            layers=layers,
            experts=experts,
            src_slot=experts[0] - src.experts[0],
            dst_slot=experts[0] - dst.experts[0],
        )

    def _template(self, src: Shards, dst: Shards) -> int:
        identity = (id(src), id(dst))  # hashing shards is slow, and the experts of a group share theirs
        if identity not in self._by_identity:
            self._by_identity[identity] = (self._new_template(src, dst, None), src, dst)
        return self._by_identity[identity][0]

    def _new_template(self, src: Shards, dst: Shards, moves: tuple[Move, ...] | None) -> int:
        index = self._templates.setdefault((src, dst), len(self._templates))
        if index == len(self._moves):
            self._moves.append(_intersect(src, dst) if moves is None else moves)
        return index

    def _scale_templates(self, group: int, ends: Ends, block: tuple[int, int]) -> Iterator[tuple[tuple[int, int], int]]:
        """The templates of the scales of a group that is placed already: the same moves, in blocks."""
        for src_id, (src, src_scales) in ends.src_scales.items():
            for dst_id, (dst, dst_scales) in ends.dst_scales.items():
                if (src_id, dst_id) in self._by_identity:
                    template = self._template(src, dst)
                    moves = (replace(m, region=blocks_touched(m.region, block)) for m in self._moves[template])
                    yield (group, template), self._new_template(src_scales, dst_scales, tuple(moves))

    def _holding(self, ranks: NDArray[np.int32]) -> int:
        ranks = np.ascontiguousarray(ranks, dtype=np.int32)
        key = (ranks.shape, ranks.tobytes())
        if key not in self._holding_index:
            self._holding_index[key] = len(self._holdings)
            self._holdings.append(Holding(ranks))
        return self._holding_index[key]


def _order(bundle: Bundle) -> tuple[object, ...]:
    return bundle.pp_stage, bundle.group, bundle.layers[0].layer, bundle.experts


def _intersect(src: Shards, dst: Shards) -> tuple[Move, ...]:
    """Every common region of a source piece and a destination piece, by destination shard and piece.

    Pieces are looked up along dim 0 of the parameter, so that the cost follows the number of moves.
    """
    held = sorted(
        (
            (piece.region.start[0], piece.region.stop[0], c, p)
            for c, pieces in enumerate(src.pieces)
            for p, piece in enumerate(pieces)
        )
    )
    starts = [entry[0] for entry in held]
    longest = max((stop - start for start, stop, _, _ in held), default=0)
    moves = []
    for c, pieces in enumerate(dst.pieces):
        for p, piece in enumerate(pieces):
            low, high = piece.region.start[0], piece.region.stop[0]
            near = held[bisect_left(starts, low - longest) : bisect_left(starts, high)]
            for _, _, src_c, src_p in near:
                region = src.pieces[src_c][src_p].region.intersect(piece.region)
                if region is not None:
                    moves.append(Move(src_c, src_p, c, p, region))
    return tuple(moves)


def _balanced(bundles: Sequence[Bundle], templates: Sequence[Template], holdings: Sequence[Holding], world: int,
              *, relay: bool) -> tuple[Bundle, ...]:  # fmt: skip
    """Rotations chosen so that training ranks send alike."""

    def served(bundle: Bundle) -> NDArray[np.int64]:
        replicas = holdings[bundle.src].ranks.shape[1]
        pulls = 1 if relay else holdings[bundle.dst].ranks.shape[1]
        return replica_bytes(templates[bundle.template], bundle, replicas, pulls)

    turns = _turns([(holdings[bundle.src].ranks, served(bundle), bundle.members) for bundle in bundles], world)
    return tuple(replace(bundle, rotation=turn) for bundle, turn in zip(bundles, turns, strict=True))


def _landed(
    bundles: Sequence[Bundle], templates: Sequence[Template], holdings: Sequence[Holding], world: int
) -> tuple[Bundle, ...]:
    """Landings chosen so that generation ranks pass on alike."""
    held = [holdings[bundle.dst].ranks for bundle in bundles]
    turns = _turns(
        [
            (ranks, landing_bytes(templates[bundle.template], bundle, ranks.shape[1]), bundle.members)
            for bundle, ranks in zip(bundles, held, strict=True)
        ],
        world,
    )
    return tuple(replace(bundle, landing=turn) for bundle, turn in zip(bundles, turns, strict=True))


def _turns(shared: Sequence[tuple[NDArray[np.int32], NDArray[np.int64], int]], world: int) -> list[int]:
    """How far to turn each round robin, given as (ranks, bytes, members), both arrays [shards, replicas].

    Uneven remainders land on the least loaded ranks, the largest first. Where all replicas give the same, one bundle goes
    on where the one before it stopped, so that pairs of ranks exchange alike: the embedding's halves come from two
    replicas, and those of the output layer from the same two the other way round.
    """
    load = np.zeros(world, dtype=np.int64)
    turns = [0] * len(shared)
    even: dict[int, int] = {}  # members so far, by the array of ranks, which bundles share
    for index in sorted(range(len(shared)), key=lambda i: (-int(shared[i][1].sum()), i)):
        ranks, shares, members = shared[index]
        if (shares != shares[:, :1]).any():
            turns[index] = _best_turn(load[ranks], shares)
        else:
            turns[index] = even.get(id(ranks), 0) % ranks.shape[1]
            even[id(ranks)] = turns[index] + members
        np.add.at(load, ranks, np.roll(shares, turns[index], axis=1))
    return turns


def _best_turn(load: NDArray[np.int64], shares: NDArray[np.int64]) -> int:
    """The turn of `shares` [shards, replicas] that leaves the lowest peak on `load`; the first one of equals.

    At most 64 turns are looked at, evenly spaced: with more replicas than that, neighbouring turns hardly differ.
    """
    replicas = shares.shape[1]
    turns = np.arange(0, replicas, max(1, replicas // 64))
    turned = shares[:, (np.arange(replicas)[None, :] - turns[:, None]) % replicas]  # [shards, turns, replicas]
    peaks = (load[:, None, :] + turned).max(axis=(0, 2))
    return int(turns[peaks.argmin()])
