"""Make a plan: place every group on both ends, choose its route, intersect the cuts, balance the sources.

Pure and deterministic: the same catalogue, meshes and policy give the same plan, and the same digest, on every rank.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from .engines import DEFAULT_ENGINE, engine_named
from .layout import Excluded, Layout, Misc, Placement, Shards
from .megatron import MegatronBuild, MegatronLayout
from .mesh import GenMesh, MeshError, TrainMesh
from .parameters import Attention, Catalogue, ParameterGroup, Role
from .plan import (
    Bundle,
    BundleLayer,
    Holding,
    Move,
    Plan,
    Policy,
    Template,
    UnplannedGroup,
    landing_bytes,
    replica_bytes,
)
from .plan_file import digest_of

_DISTINCTLY = 0.95  # relaying adds a hop, so the busiest link must carry this much less
_QKV_ROLES = {Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS}


def make_plan(
    catalogue: Catalogue,
    train: TrainMesh,
    gen: GenMesh,
    *,
    model: str = "",
    policy: Policy = "exact",
    engine: str = DEFAULT_ENGINE,
    build: MegatronBuild = MegatronBuild(),  # noqa: B008
) -> Plan:
    """Plan the refit of a model from a training mesh to the mesh of an engine.

    Raises UnknownEngineError, and MeshError, listing every violation of both meshes, when the model cannot be cut this way.
    """
    source = MegatronLayout(catalogue, train, build)
    destination = engine_named(engine).layout(catalogue, gen)
    if violations := source.violations() + destination.violations():
        raise MeshError(f"{model or catalogue.architecture.family} does not fit these meshes", violations)
    train = train.canonical(catalogue.architecture.layers)
    return _Planner(catalogue, train, gen, model, policy, source, destination).plan()


class _Planner:
    """Holds the tables a plan shares (templates, holdings) while they grow."""

    def __init__(self, catalogue: Catalogue, train: TrainMesh, gen: GenMesh, model: str, policy: Policy,
                 source: Layout, destination: Layout) -> None:  # fmt: skip
        self._catalogue, self._train, self._gen = catalogue, train, gen
        self._model, self._policy = model, policy
        self._source, self._destination = source, destination
        self._templates: dict[tuple[Shards, Shards], int] = {}
        self._by_identity: dict[tuple[int, int], tuple[int, Shards, Shards]] = {}  # keeps the shards alive
        self._holdings: list[Holding] = []
        self._holding_index: dict[tuple[tuple[int, ...], bytes], int] = {}

    def plan(self) -> Plan:
        groups = self._catalogue.groups
        routed = [self._route(group) for group in groups]
        self._keep_fused_together(routed)
        bundles = [
            bundle
            for index, route in enumerate(routed)
            if not isinstance(route, (Misc, Excluded))
            for bundle in self._bundles(index, *route)
        ]
        bundles.sort(key=lambda b: (b.pp_stage, b.group, b.layers[0].layer, b.experts))
        templates = tuple(Template(src, dst, _intersect(src, dst)) for src, dst in self._templates)
        plan = Plan(
            model=self._model,
            train=self._train,
            gen=self._gen,
            engine=self._destination.name,
            policy=self._policy,
            groups=groups,
            templates=templates,
            holdings=tuple(self._holdings),
            bundles=_balanced(bundles, templates, self._holdings, self._train.world, relay=False),
            misc=tuple(UnplannedGroup(i, r.reason) for i, r in enumerate(routed) if isinstance(r, Misc)),
            excluded=tuple(UnplannedGroup(i, r.reason) for i, r in enumerate(routed) if isinstance(r, Excluded)),
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
        relayed = replace(plan, bundles=landed, relay=True)
        return relayed if relayed.busiest_link < _DISTINCTLY * plan.busiest_link else plan

    def _route(self, group: ParameterGroup) -> tuple[tuple[Placement, ...], tuple[Placement, ...]] | Misc | Excluded:
        """Bulk (placements on both ends) only when both layouts know the group and the bytes are equal."""
        destination = self._destination.place(group)
        if isinstance(destination, Excluded):
            return destination
        if self._policy == "conservative" and (reason := self._too_few_kv_heads(group)):
            return Misc(reason)
        source = self._source.place(group)
        if isinstance(source, (Misc, Excluded)):
            return source
        if isinstance(destination, Misc):
            return destination
        held, wanted = _dtypes(source), _dtypes(destination)
        if held != wanted:
            return Misc(
                f"trainer holds {'/'.join(sorted(held))}, engine {'/'.join(sorted(wanted))}: no cast is declared"
            )
        return source, destination

    def _too_few_kv_heads(self, group: ParameterGroup) -> str:
        """The conservative rule: num_query_groups < max(train tp, gen tp)."""
        attention = self._catalogue.architecture.attention
        if group.role not in _QKV_ROLES or not isinstance(attention, Attention):
            return ""
        widest = max(self._train.tp, self._gen.tp)
        if attention.kv_heads >= widest:
            return ""
        return f"conservative policy: {attention.kv_heads} KV heads < max(train tp {self._train.tp}, gen tp {self._gen.tp})"

    def _keep_fused_together(self, routed: list) -> None:  # type: ignore[type-arg]
        """A tensor that several groups share travels whole: if one of them goes to misc, so do the others."""
        changed = True
        while changed:
            changed = False
            reasons: dict[str, str] = {}
            for group, route in zip(self._catalogue.groups, routed, strict=True):
                if isinstance(route, Misc):
                    for layout in (self._source, self._destination):
                        for name in _tensors(layout.place(group)):
                            reasons.setdefault(name, f"shares {name} with {group.pattern} ({route.reason})")
            for index, route in enumerate(routed):
                if isinstance(route, (Misc, Excluded)):
                    continue
                shared = [reasons[name] for side in route for name in sorted(_tensors(side)) if name in reasons]
                if shared:
                    routed[index] = Misc(shared[0])
                    changed = True

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
            index = self._templates.setdefault((src, dst), len(self._templates))
            self._by_identity[identity] = (index, src, dst)
        return self._by_identity[identity][0]

    def _holding(self, ranks: NDArray[np.int32]) -> int:
        ranks = np.ascontiguousarray(ranks, dtype=np.int32)
        key = (ranks.shape, ranks.tobytes())
        if key not in self._holding_index:
            self._holding_index[key] = len(self._holdings)
            self._holdings.append(Holding(ranks))
        return self._holding_index[key]


def _tensors(placed: tuple[Placement, ...] | Misc | Excluded) -> set[str]:
    if isinstance(placed, (Misc, Excluded)):
        return set()
    return {piece.tensor.name for placement in placed for held in placement.shards.pieces for piece in held}


def _dtypes(placements: tuple[Placement, ...]) -> set[str]:
    return {piece.tensor.dtype for placement in placements for held in placement.shards.pieces for piece in held}


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

    turns = _turns([(holdings[bundle.src].ranks, served(bundle)) for bundle in bundles], world)
    return tuple(replace(bundle, rotation=turn) for bundle, turn in zip(bundles, turns, strict=True))


def _landed(
    bundles: Sequence[Bundle], templates: Sequence[Template], holdings: Sequence[Holding], world: int
) -> tuple[Bundle, ...]:
    """Landings chosen so that generation ranks pass on alike."""
    held = [holdings[bundle.dst].ranks for bundle in bundles]
    turns = _turns(
        [
            (ranks, landing_bytes(templates[bundle.template], bundle, ranks.shape[1]))
            for bundle, ranks in zip(bundles, held, strict=True)
        ],
        world,
    )
    return tuple(replace(bundle, landing=turn) for bundle, turn in zip(bundles, turns, strict=True))


def _turns(shared: Sequence[tuple[NDArray[np.int32], NDArray[np.int64]]], world: int) -> list[int]:
    """How far to turn each round robin, given as (ranks, bytes), both [shards, replicas].

    Uneven remainders land on the least loaded ranks, the largest first.
    """
    load = np.zeros(world, dtype=np.int64)
    turns = [0] * len(shared)
    for index in sorted(range(len(shared)), key=lambda i: (-int(shared[i][1].sum()), i)):
        ranks, shares = shared[index]
        turns[index] = _best_turn(load[ranks], shares) if (shares != shares[:, :1]).any() else 0
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
