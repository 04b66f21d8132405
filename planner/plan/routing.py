"""Choose how every group of a model travels: point to point, by the misc route with a reason, or not at all.

A whitelist: a group is bulk only where both layouts know it, the bytes are equal or a cast is declared, and whatever
shares a tensor with it is bulk too. A quantized weight and its scales have one route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace

from mcore_reshard.planner.layout.block_scales import in_dtype, splits_blocks
from mcore_reshard.planner.layout.engines import Engine
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.partitions import Excluded, Layout, Misc, Partition, PartitionOwners
from mcore_reshard.planner.layout.transformer_engine import computed_scales
from mcore_reshard.planner.model.parameters import Attention, ModelParameters, ParameterGroup, Role
from mcore_reshard.planner.model.precision import CASTS, FP8, QUANTIZED, Block, Format, Precision, scales_group

from .plan import Policy

_QKV_ROLES = {Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS}

ScalesOf = Mapping[int, tuple[Partition, Partition]]  # id of a weight's parts -> those parts and the ones of its scales


@dataclass(frozen=True, slots=True)
class BulkRoute:
    """Both ends of a bulk group. `src_scales` and `dst_scales` say where the scales of each cut lie."""

    src: tuple[PartitionOwners, ...]
    dst: tuple[PartitionOwners, ...]
    src_scales: ScalesOf = field(default_factory=dict)
    dst_scales: ScalesOf = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class RoutedGroup:
    """A group as it is on the wire, the scales it is paired with, and how both travel."""

    group: ParameterGroup
    route: BulkRoute | Misc | Excluded
    scales: ParameterGroup | None = None
    block: Block = (0, 0)
    touched: bool = False  # as in QuantizedPair
    cast: tuple[str, str] | None = None  # (dtype in the trainer, dtype in the engine)


@dataclass(frozen=True, slots=True)
class Side:
    """One side of a plan: the model in its main dtype, where that is kept, and its precision."""

    model_parameters: ModelParameters
    layout: Layout
    precision: Precision


class Router:
    """Routes the groups of one model; both sides list the same groups in the same order."""

    def __init__(
        self, source: Side, destination: Side, engine: Engine, train: TrainMesh, gen: GenMesh, policy: Policy
    ) -> None:
        self._source, self._destination, self._engine = source, destination, engine
        self._train, self._gen, self._policy = train, gen, policy
        self._tensor_names: dict[int, list[tuple[str, int]]] = {}

    def routes(self) -> list[RoutedGroup]:
        groups = [*zip(self._source.model_parameters.groups, self._destination.model_parameters.groups, strict=True)]
        routed = [self._routed(held, wanted) for held, wanted in groups]
        self._keep_fused_together(routed)
        return [_saying_what_is_cast(held, entry) for (held, _), entry in zip(groups, routed, strict=True)]

    def _routed(self, held: ParameterGroup, wanted: ParameterGroup) -> RoutedGroup:
        gen = self._destination.precision
        layer = next(iter(wanted.layers), None)  # groups are divided: its layers are alike
        form = gen.format if self._engine.quantizes(wanted, layer, self._destination.model_parameters) else None
        destination = self._destination.layout.place(wanted)
        if form is not None and len(wanted.view) != 2:
            reason = (
                f"no layout rule for {form.name} {wanted.role.value!r}, which Hugging Face does not keep as a matrix"
            )
            return RoutedGroup(wanted, destination if isinstance(destination, Excluded) else Misc(reason))
        if form is None:
            return self._plain(held, wanted, destination)
        scales, block = scales_group(wanted, form), form.block_of(wanted)
        route, cast = self._quantized(held, wanted, destination, form, block)
        touched = (
            isinstance(route, BulkRoute)
            and form.block is not None
            and any(splits_blocks(cut, block) for cut, _ in route.dst_scales.values())
        )
        return RoutedGroup(replace(wanted, dtype=FP8), route, scales, block, touched, cast)

    def _plain(self, held: ParameterGroup, wanted: ParameterGroup, destination: tuple[PartitionOwners, ...] | Misc | Excluded
    ) -> RoutedGroup:  # fmt: skip
        """A group that the engine does not quantize."""
        ends = self._ends(held, destination)
        if not isinstance(ends, BulkRoute):
            return RoutedGroup(wanted, ends)
        if (form := self._held_format(held)) is not None:
            return RoutedGroup(
                wanted, Misc(f"trainer holds {form.name}, engine {wanted.dtype}: nothing dequantizes on the way")
            )
        have, want = _dtypes(ends.src), _dtypes(ends.dst)
        if have == want:
            return RoutedGroup(wanted, ends)
        asked = (self._source.precision.dtype, self._destination.precision.dtype)
        if (have, want) == ({asked[0]}, {asked[1]}) and asked in CASTS:
            return RoutedGroup(wanted, ends, cast=asked)
        reason = f"trainer holds {'/'.join(sorted(have))}, engine {'/'.join(sorted(want))}: no cast is declared"
        return RoutedGroup(wanted, Misc(reason))

    def _quantized(
        self, held: ParameterGroup, wanted: ParameterGroup, destination: tuple[PartitionOwners, ...] | Misc | Excluded,
        form: Format, block: Block,
    ) -> tuple[BulkRoute | Misc | Excluded, tuple[str, str] | None]:  # fmt: skip
        """A pair of weight and scales: both arrive as they are, or both are made from one tensor on the way."""
        ends, held_form = self._ends(held, destination), self._held_format(held)
        if not isinstance(ends, BulkRoute):
            return ends, None
        dst = _with_scales(ends.dst, FP8, lambda partition: self._destination.layout.scales(wanted, partition, form))
        if isinstance(dst, Misc):
            return Misc(f"engine: {dst.reason}"), None
        cast, src_dtype = None, FP8
        if held_form is None:
            src_dtype = "/".join(sorted(_dtypes(ends.src)))
            cast = (src_dtype, FP8)
            if form.block is None or form.scales != "float32" or cast not in CASTS:
                return Misc(f"trainer holds {src_dtype}, engine {form.name}: nothing casts that on the way"), None
            src = _with_scales(ends.src, src_dtype, lambda partition: computed_scales(held, partition, block))
        elif held_form != form:
            return Misc(f"trainer holds {held_form.name}, engine {form.name}: nothing requantizes on the way"), None
        else:
            src = _with_scales(ends.src, FP8, lambda partition: self._source.layout.scales(held, partition, form))
        if isinstance(src, Misc):
            return Misc(f"trainer: {src.reason}"), None
        return BulkRoute(src[0], dst[0], src[1], dst[1]), cast

    def _held_format(self, group: ParameterGroup) -> Format | None:
        """The trainer's fp8_param quantizes every linear weight but those of whole layers, which groups are divided by."""
        held = self._source.precision
        kept = group.role not in QUANTIZED or any(layer in held.unquantized_layers for layer in group.layers)
        return None if kept else held.format

    def _ends(
        self, held: ParameterGroup, destination: tuple[PartitionOwners, ...] | Misc | Excluded
    ) -> BulkRoute | Misc | Excluded:
        """Placements on both ends where both layouts know the group."""
        if isinstance(destination, Excluded):
            return destination
        if self._policy == "conservative" and (reason := self._too_few_kv_heads(held)):
            return Misc(reason)
        source = self._source.layout.place(held)
        if isinstance(source, (Misc, Excluded)):
            return source
        return destination if isinstance(destination, Misc) else BulkRoute(source, destination)

    def _too_few_kv_heads(self, group: ParameterGroup) -> str:
        """The conservative rule: num_query_groups < max(train tp, gen tp)."""
        attention = self._source.model_parameters.architecture.attention
        if group.role not in _QKV_ROLES or not isinstance(attention, Attention):
            return ""
        widest = max(self._train.tp, self._gen.tp)
        if attention.kv_heads >= widest:
            return ""
        return f"conservative policy: {attention.kv_heads} KV heads < max(train tp {self._train.tp}, gen tp {self._gen.tp})"

    def _keep_fused_together(self, routed: list[RoutedGroup]) -> None:
        """A tensor that several groups share travels whole: if one of them goes to misc, so do the others.

        So do groups that a tensor would hold in two precisions.
        """
        for index, reason in self._mixed(routed):
            routed[index] = replace(routed[index], route=Misc(reason))
        changed = True
        while changed:
            changed = False
            reasons: dict[tuple[str, int], str] = {}
            for index, entry in enumerate(routed):
                if isinstance(entry.route, Misc):
                    for name, layer in self._tensors(index):
                        text = f"shares {name} with {entry.group.name_pattern} ({entry.route.reason})"
                        reasons.setdefault((name, layer), text)
            for index, entry in enumerate(routed):
                if isinstance(entry.route, BulkRoute):
                    shared = [reasons[tensor] for tensor in self._tensors(index) if tensor in reasons]
                    if shared:
                        routed[index] = replace(entry, route=Misc(shared[0]))
                        changed = True

    def _mixed(self, routed: list[RoutedGroup]) -> Iterator[tuple[int, str]]:
        """Groups that lie in a tensor with others of another precision, on either side."""
        users: dict[tuple[str, int], int] = {}
        for index, entry in enumerate(routed):
            if isinstance(entry.route, BulkRoute):
                for tensor in self._tensors(index):
                    first = routed[users.setdefault(tensor, index)]
                    if (first.group.dtype, first.cast) != (entry.group.dtype, entry.cast):
                        yield (
                            index,
                            f"shares {tensor[0]} with {first.group.name_pattern}, which the engine keeps otherwise",
                        )

    def _tensors(self, index: int) -> list[tuple[str, int]]:
        """(name, layer) of the tensors that hold a group, those of the trainer first."""
        if index not in self._tensor_names:
            held, wanted = self._source.model_parameters.groups[index], self._destination.model_parameters.groups[index]
            found = []
            for placed in (self._source.layout.place(held), self._destination.layout.place(wanted)):
                names = set() if isinstance(placed, (Misc, Excluded)) else _names(placed)
                found += [(name, layer) for name in sorted(names) for layer in held.layers or (-1,)]
            self._tensor_names[index] = found
        return self._tensor_names[index]


def _with_scales(owner_sets: tuple[PartitionOwners, ...], dtype: str, scales_of: Callable[[Partition], Partition | Misc]
) -> tuple[tuple[PartitionOwners, ...], ScalesOf] | Misc:  # fmt: skip
    """The placements with their data in a dtype, and the scales of each cut; placements share cuts."""
    cuts: dict[int, Partition] = {}  # by id of the cut that a placement came with
    scales: dict[int, tuple[Partition, Partition]] = {}
    for owners in owner_sets:
        if id(owners.partition) not in cuts:
            found = scales_of(owners.partition)
            if isinstance(found, Misc):
                return found
            cut = in_dtype(owners.partition, dtype)
            cuts[id(owners.partition)] = cut
            scales[id(cut)] = (cut, found)
    return tuple(replace(p, partition=cuts[id(p.partition)]) for p in owner_sets), scales


def _names(owner_sets: tuple[PartitionOwners, ...]) -> set[str]:
    return {piece.tensor.name for owners in owner_sets for held in owners.partition.pieces for piece in held}


def _dtypes(owner_sets: tuple[PartitionOwners, ...]) -> set[str]:
    return {piece.tensor.dtype for owners in owner_sets for held in owners.partition.pieces for piece in held}


def _saying_what_is_cast(held: ParameterGroup, entry: RoutedGroup) -> RoutedGroup:
    """Misc weights are cast by the engine's loader, not by the plan; say so in the reason."""
    if not isinstance(entry.route, Misc) or entry.scales is not None or held.dtype == entry.group.dtype:
        return entry
    reason = f"{entry.route.reason}; the trainer holds {held.dtype}, the engine's loader casts to what the engine keeps"
    return replace(entry, route=Misc(reason))
