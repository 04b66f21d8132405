"""Choose how every group of a model travels: point to point, by the misc route with a reason, or not at all.

Bulk is a whitelist. A group is bulk only if both layouts know it, and its bytes are equal or a cast is declared. All
groups that share a tensor with it must be bulk too. A quantized weight and its scales have one route.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from mcore_reshard.planner.layout.block_scales import in_dtype, splits_blocks
from mcore_reshard.planner.layout.engines import Engine
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.megatron import computed_scales
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.partitions import Excluded, Layout, Misc, Partition, PartitionOwners, Placed
from mcore_reshard.planner.model.parameters import Attention, ModelParameters, ParameterGroup, Role
from mcore_reshard.planner.model.precision import CASTS, FP8, QUANTIZED, Block, Format, Precision, scales_group

from .plan import Policy

_QKV_ROLES = {Role.Q, Role.K, Role.V, Role.Q_BIAS, Role.K_BIAS, Role.V_BIAS}

_Tensor = tuple[str, int]  # name and layer
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

    def routes(self) -> list[RoutedGroup]:
        groups = [*zip(self._source.model_parameters.groups, self._destination.model_parameters.groups, strict=True)]
        routed = [self._route_group(train_group, gen_group) for train_group, gen_group in groups]
        tensors = [
            [] if isinstance(entry.route, Excluded) else self._tensors(*pair)
            for entry, pair in zip(routed, groups, strict=True)
        ]
        _keep_fused_together(routed, tensors)
        return [_note_cast(train_group, entry) for (train_group, _), entry in zip(groups, routed, strict=True)]

    def _route_group(self, train_group: ParameterGroup, gen_group: ParameterGroup) -> RoutedGroup:
        layer = next(iter(gen_group.layers), None)  # groups are divided: its layers are alike
        quantized = gen_group.dtype == FP8  # as traced
        if gen_group.role is not Role.TRACED:
            quantized = self._engine.quantizes(gen_group, layer, self._destination.model_parameters)
        form = self._destination.precision.format if quantized else None
        destination = self._destination.layout.place(gen_group)
        if form is None:
            return self._plain(train_group, gen_group, destination)
        if len(gen_group.view) == 2:
            return self._quantized(train_group, gen_group, destination, form)
        if len(gen_group.shape) == 2:  # a traced matrix, of which only a finer view is made of boxes
            gen_group, why = replace(gen_group, view=gen_group.shape), "its rows and columns are not kept as a matrix"
            misc = destination if isinstance(destination, Excluded) else Misc(why)
            return self._quantized(train_group, gen_group, misc, form)
        why = f"no layout rule for {form.name} {gen_group.role.value!r}, which Hugging Face does not keep as a matrix"
        return RoutedGroup(gen_group, destination if isinstance(destination, Excluded) else Misc(why))

    def _plain(self, train_group: ParameterGroup, gen_group: ParameterGroup, destination: Placed) -> RoutedGroup:
        ends = self._ends(train_group, destination)
        if not isinstance(ends, BulkRoute):
            return RoutedGroup(gen_group, ends)
        if (form := self._train_format(train_group)) is not None:
            reason = f"trainer holds {form.name}, engine {gen_group.dtype}: nothing dequantizes on the way"
            return RoutedGroup(gen_group, Misc(reason))
        train_dtypes, gen_dtypes = _dtypes(ends.src), _dtypes(ends.dst)
        if train_dtypes == gen_dtypes:
            return RoutedGroup(gen_group, ends)
        asked = (self._source.precision.dtype, self._destination.precision.dtype)
        for cast in CASTS:
            declared = cast == asked or train_group.role is Role.TRACED  # loaders cast what they put elsewhere
            if declared and (train_dtypes, gen_dtypes) == ({cast[0]}, {cast[1]}):
                return RoutedGroup(gen_group, ends, cast=cast)
        reason = f"trainer holds {'/'.join(sorted(train_dtypes))}, engine {'/'.join(sorted(gen_dtypes))}: no cast is declared"
        return RoutedGroup(gen_group, Misc(reason))

    def _quantized(
        self, train_group: ParameterGroup, gen_group: ParameterGroup, destination: Placed, form: Format
    ) -> RoutedGroup:
        """A pair of weight and scales: both arrive as they are, or both are made from one tensor on the way."""
        block = form.block_of(gen_group)
        pair = RoutedGroup(replace(gen_group, dtype=FP8), Misc(""), scales_group(gen_group, form), block)
        ends, train_form = self._ends(train_group, destination), self._train_format(train_group)
        if not isinstance(ends, BulkRoute):
            return replace(pair, route=ends)
        dst = _with_scales(ends.dst, FP8, lambda partition: self._destination.layout.scales(gen_group, partition, form))
        if isinstance(dst, Misc):
            return replace(pair, route=Misc(f"engine: {dst.reason}"))
        cast, src_dtype = None, FP8
        if train_form is None:
            src_dtype = "/".join(sorted(_dtypes(ends.src)))
            cast = (src_dtype, FP8)
            if form.block is None or form.scales != "float32" or cast not in CASTS:
                reason = f"trainer holds {src_dtype}, engine {form.name}: nothing casts that on the way"
                return replace(pair, route=Misc(reason))
            src = _with_scales(ends.src, src_dtype, lambda partition: computed_scales(train_group, partition, block))
        elif train_form != form:
            reason = f"trainer holds {train_form.name}, engine {form.name}: nothing requantizes on the way"
            return replace(pair, route=Misc(reason))
        else:
            scales = self._source.layout.scales
            src = _with_scales(ends.src, FP8, lambda partition: scales(train_group, partition, form))
        if isinstance(src, Misc):
            return replace(pair, route=Misc(f"trainer: {src.reason}"))
        touched = form.block is not None and any(splits_blocks(cut, block) for cut, _ in dst[1].values())
        return replace(pair, route=BulkRoute(src[0], dst[0], src[1], dst[1]), touched=touched, cast=cast)

    def _train_format(self, group: ParameterGroup) -> Format | None:
        """The trainer's fp8_param quantizes every linear weight but those of whole layers, which groups are divided by.

        A trace says itself which weights are quantized.
        """
        precision = self._source.precision
        if group.role is Role.TRACED:
            placed = self._source.layout.place(group)
            return None if isinstance(placed, (Misc, Excluded)) or FP8 not in _dtypes(placed) else precision.format
        kept = group.role not in QUANTIZED or any(layer in precision.unquantized_layers for layer in group.layers)
        return None if kept else precision.format

    def _ends(self, train_group: ParameterGroup, destination: Placed) -> BulkRoute | Misc | Excluded:
        """Placements on both ends where both layouts know the group."""
        if isinstance(destination, Excluded):
            return destination
        if self._policy == "conservative" and (reason := self._too_few_kv_heads(train_group)):
            return Misc(reason)
        source = self._source.layout.place(train_group)
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

    def _tensors(self, train_group: ParameterGroup, gen_group: ParameterGroup) -> list[_Tensor]:
        """The tensors that hold a group, those of the trainer first."""
        tensors: list[_Tensor] = []
        for placed in (self._source.layout.place(train_group), self._destination.layout.place(gen_group)):
            if not isinstance(placed, (Misc, Excluded)):
                names = sorted({tensor.name for tensor in _tensors_of(placed)})
                tensors += [(name, layer) for name in names for layer in train_group.layers or (-1,)]
        return tensors


def _keep_fused_together(routed: list[RoutedGroup], tensors: Sequence[Sequence[_Tensor]]) -> None:
    """Send all groups of a shared tensor by misc if one of them goes by misc.

    The same holds for groups that one tensor would hold in two precisions. `tensors[i]` hold group `i`.
    """
    for index, reason in _find_mixed(routed, tensors):
        routed[index] = replace(routed[index], route=Misc(reason))
    sharing = True
    while sharing:
        reasons: dict[_Tensor, str] = {}
        for entry, tensors_of_group in zip(routed, tensors, strict=True):
            if isinstance(entry.route, Misc):
                for tensor in tensors_of_group:
                    text = f"shares {tensor[0]} with {entry.group.name_pattern} ({entry.route.reason})"
                    reasons.setdefault(tensor, text)
        sharing = False
        for index, entry in enumerate(routed):
            shared = [reasons[tensor] for tensor in tensors[index] if tensor in reasons]
            if shared and isinstance(entry.route, BulkRoute):
                routed[index], sharing = replace(entry, route=Misc(shared[0])), True


def _find_mixed(routed: list[RoutedGroup], tensors: Sequence[Sequence[_Tensor]]) -> Iterator[tuple[int, str]]:
    """Groups that lie in a tensor with others of another precision, on either side."""
    users: dict[_Tensor, int] = {}
    for index, entry in enumerate(routed):
        for tensor in tensors[index] if isinstance(entry.route, BulkRoute) else ():
            first = routed[users.setdefault(tensor, index)]
            if (first.group.dtype, first.cast) != (entry.group.dtype, entry.cast):
                name = first.group.name_pattern
                yield index, f"shares {tensor[0]} with {name}, which the engine keeps otherwise"


def _with_scales(owner_sets: tuple[PartitionOwners, ...], dtype: str, scales_of: Callable[[Partition], Partition | Misc]
) -> tuple[tuple[PartitionOwners, ...], ScalesOf] | Misc:  # fmt: skip
    """The placements with their data in a dtype, and the scales of each cut; placements share cuts."""
    cuts: dict[int, Partition] = {}  # by id of the cut that a placement came with
    scales: dict[int, tuple[Partition, Partition]] = {}
    for partition in (owners.partition for owners in owner_sets):
        if id(partition) not in cuts:
            scales_of_cut = scales_of(partition)
            if isinstance(scales_of_cut, Misc):
                return scales_of_cut
            cuts[id(partition)] = cut = in_dtype(partition, dtype)
            scales[id(cut)] = (cut, scales_of_cut)
    return tuple(replace(p, partition=cuts[id(p.partition)]) for p in owner_sets), scales


def _tensors_of(owner_sets: tuple[PartitionOwners, ...]) -> set[LocalTensor]:
    return {piece.tensor for owners in owner_sets for pieces in owners.partition.pieces for piece in pieces}


def _dtypes(owner_sets: tuple[PartitionOwners, ...]) -> set[str]:
    return {tensor.dtype for tensor in _tensors_of(owner_sets)}


def _note_cast(train_group: ParameterGroup, entry: RoutedGroup) -> RoutedGroup:
    """Say in the reason of a misc weight that the engine's loader casts it, not the plan."""
    if not isinstance(entry.route, Misc) or entry.scales is not None or train_group.dtype == entry.group.dtype:
        return entry
    reason = f"{entry.route.reason}; the trainer holds {train_group.dtype}, the engine's loader casts to what the engine keeps"
    return replace(entry, route=Misc(reason))
