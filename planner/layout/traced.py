"""Layouts made of traces: what all ranks of both worlds say of their tensors, as groups of parameters and their owners.

    model.layers.3.mlp.experts.17.up_proj.weight  in  vp0.decoder.layers.1.mlp.experts.linear_fc1.weight5
    becomes the group    model.layers.{layer}.mlp.experts.{expert}.up_proj.weight    [I, H]
    with pieces in       vp{vp}.decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}

A group's layers and experts share a partition exactly where their traces are equal. `condense` does one rank's part,
`read_layouts` puts the ranks together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.model.parameters import Architecture, Attention, ModelParameters, ParameterGroup, Role
from mcore_reshard.planner.model.precision import FP8, Format

from .condense import NUMBER, CondensedTrace, Experts, Holding, NumberedName, ParameterNames, Pieces
from .engines import engine_named
from .geometry import Region
from .megatron import megatron_scales
from .mesh import LayerPlace
from .partitions import Excluded, Layout, Misc, Padding, Partition, PartitionOwners, Placed
from .strided import digit_boxes
from .traces import HfTensor
from .views import Use, Views, shape_chain

_SHOWN = 20  # problems in a message
_GroupKey = tuple[str, tuple[int, ...]]  # pattern of the name, layers
_Dtypes = frozenset[str]
_Scales = Callable[[ParameterGroup, Partition, Format], Partition | Misc]


class TracedLayoutError(ValueError):
    """Traces that make no plan: tensors that nothing fills. `problems` lists every one."""

    def __init__(self, problems: Sequence[str]) -> None:
        shown = [*problems[:_SHOWN], *[f"and {len(problems) - _SHOWN} more"] * (len(problems) > _SHOWN)]
        super().__init__("\n  ".join(("the traces of the loaders make no plan:", *shown)))
        self.problems = tuple(problems)


class TracedLayout(Layout):
    """One side of a plan whose groups lie where traces say. Scales of FP8 lie beside them, by the framework's own rule."""

    def __init__(self, name: str, title: str, placed: Mapping[_GroupKey, Placed], scales: _Scales) -> None:
        self.name, self.title = name, title
        self._placed, self._scales = placed, scales

    def violations(self) -> list[str]:
        return []

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return self._scales(group, partition, form)

    def place(self, group: ParameterGroup) -> Placed:
        return self._placed[group.name_pattern, group.layers]


@dataclass(frozen=True, slots=True)
class TracedLayouts:
    """A model and both of its layouts as traces show them. `dtypes` are the main dtypes of trainer and engine.

    Groups that the engine keeps in E4M3 have that dtype.
    """

    model: ModelParameters
    train: TracedLayout
    gen: TracedLayout
    dtypes: tuple[str, str]
    notes: tuple[str, ...]  # on tensors of the trainer that no Hugging Face tensor fills


def read_layouts(
    family: str,
    checkpoint: Mapping[str, HfTensor],
    train: Sequence[CondensedTrace],
    gen: Sequence[CondensedTrace],
    stages: tuple[Sequence[int], Sequence[int]],
    engine: str,
) -> TracedLayouts:
    """Put the traces of all ranks together; `stages` has the pipeline stage of every rank of both worlds.

    A parameter whose tensor is computed on any rank is misc, with all that share a tensor with it. One that no engine rank
    keeps is excluded. Raises TracedLayoutError for engine tensors that nothing fills.
    """
    unfilled = [f"gen:{rank}: {tensor}: {why}" for rank, trace in enumerate(gen) for tensor, why in trace.unfilled]
    if unfilled:
        raise TracedLayoutError(unfilled)
    names = ParameterNames(checkpoint)
    sides = _Side("train", train, stages[0]), _Side("gen", gen, stages[1])
    routes = _routes(names, sides)
    shapes = {pattern: checkpoint[members[0]].shape for pattern, members in names.by_pattern.items()}
    while True:  # a parameter that turns out to be misc may take others along
        uses = [use for side in sides for use in side.uses(routes)]
        stacked = {(s, t) for s, pattern, t, _ in uses if names.experts.get(pattern) and "{expert}" not in t.name}
        views = Views(shapes, uses, stacked)
        problems = dict(views.problems)
        groups, placed = _place(names, sides, routes, views, problems)
        if not problems:
            break
        for pattern, misc in problems.items():
            routes.update({(pattern, layer): misc for layer in names.layers(pattern) if (pattern, layer) not in routes})
        _spread(routes, sides[1])
    layers = 1 + max((layer for group in groups for layer in group.layers), default=-1)
    architecture = Architecture(family, 0, layers, 0, False, Attention(0, 0, 0))
    dtypes = sides[0].main_dtype, sides[1].main_dtype
    notes = tuple(f"train:{rank}: {name}: {why}" for rank, trace in enumerate(train) for name, why in trace.unfilled)
    source = TracedLayout("megatron", "Megatron-Core", placed[0], megatron_scales)
    destination = TracedLayout(engine, engine, placed[1], engine_named(engine).scales)
    return TracedLayouts(ModelParameters(architecture, groups, dtypes[1]), source, destination, dtypes, notes)


def _place(
    names: ParameterNames,
    sides: tuple[_Side, _Side],
    routes: Mapping[tuple[str, int], Misc | Excluded],
    views: Views,
    problems: dict[str, Misc],
) -> tuple[tuple[ParameterGroup, ...], tuple[dict[_GroupKey, Placed], dict[_GroupKey, Placed]]]:
    """All groups, and where both sides keep them. Adds patterns that turn out to be misc to `problems`.

    Layers of a group have one route, and one dtype on each side.
    """
    groups: list[ParameterGroup] = []
    placed: tuple[dict[_GroupKey, Placed], dict[_GroupKey, Placed]] = ({}, {})
    for pattern, members in names.by_pattern.items():
        by_route: dict[tuple[Misc | Excluded | None, _Dtypes, _Dtypes], list[int]] = defaultdict(list)
        train_dtypes, gen_dtypes = (side.dtypes(pattern) for side in sides)
        for layer in names.layers(pattern):
            by_route[routes.get((pattern, layer)), train_dtypes[layer], gen_dtypes[layer]].append(layer)
        tensor = names.checkpoint[members[0]]
        for (route, _, kept_as), layers in by_route.items():
            numbers = tuple(layer for layer in layers if layer >= 0)
            view = views.parameter(pattern) if route is None else tensor.shape
            name_pattern, experts = names.name_pattern(pattern), names.experts.get(pattern, 0)
            dtype = FP8 if kept_as == {FP8} else tensor.dtype
            groups.append(ParameterGroup(name_pattern, Role.TRACED, tensor.shape, dtype, numbers, experts, view))
            for side, placed_on_side in zip(sides, placed, strict=True):
                owners: Placed = route or ()
                if route is None and pattern not in problems:
                    owners = side.owners(pattern, frozenset(layers), views)
                    if isinstance(owners, Misc):
                        problems[pattern] = owners
                placed_on_side[name_pattern, numbers] = owners
    return tuple(groups), placed


class _Side:
    """The traces of one world, by parameter."""

    def __init__(self, name: str, traces: Sequence[CondensedTrace], stages: Sequence[int]) -> None:
        self.name, self.traces, self.stages = name, traces, stages
        self.holdings: dict[str, list[tuple[int, Holding]]] = defaultdict(list)  # with their ranks
        self.padded: dict[str, list[tuple[int, Holding]]] = defaultdict(list)  # padding alone, by tensor
        self._first_pattern: dict[str, str] = {}  # tensor -> the parameter that declares padding of it
        sizes: dict[str, int] = defaultdict(int)
        for rank, trace in enumerate(traces):
            for holding in trace.holdings:
                if not holding.pieces:
                    self.padded[holding.padding[0][0].name].append((rank, holding))
                    continue
                self.holdings[holding.parameter].append((rank, holding))
                for tensor, _ in (*holding.pieces, *holding.padding):
                    self._first_pattern.setdefault(tensor.name, holding.parameter)
                sizes[holding.pieces[0][0].dtype] += sum(copy.elements for _, copy in holding.pieces)
        sizes.pop(FP8, None)
        self.main_dtype = max(sizes, key=lambda dtype: sizes[dtype], default="bfloat16")
        self._partitions: dict[object, Partition] = {}

    def layers(self, pattern: str) -> set[int]:
        return {place.layer for _, holding in self.holdings[pattern] for place in holding.places}

    def dtypes(self, pattern: str) -> dict[int, _Dtypes]:
        """The dtypes of the tensors that hold a parameter, by layer; none for a layer that is not here."""
        found: dict[int, _Dtypes] = defaultdict(frozenset)
        for _, holding in self.holdings[pattern]:
            kept_as = frozenset(tensor.dtype for tensor, _ in holding.pieces)
            for place in holding.places:
                found[place.layer] |= kept_as
        return found

    def contradictions(self) -> Iterator[tuple[tuple[str, int], str]]:
        """The parameters, as (pattern, layer), of a tensor that is made of other layers on another rank, and why that is odd.

        Tensors of one name are held against each other on all ranks of an engine, and on one stage of a trainer.
        """
        layers_of: dict[tuple[str, int], dict[int, tuple[int, set[str]]]] = defaultdict(dict)
        for pattern, holdings in self.holdings.items():
            for rank, holding in holdings:
                stage = self.stages[rank] if self.name == "train" else 0
                for name in dict.fromkeys(tensor.name for tensor, _ in holding.pieces):
                    for place in holding.places:
                        local = name.replace("{vp}", str(place.vp_stage)).replace("{layer}", str(place.local))
                        found = layers_of[local, stage].setdefault(place.layer, (rank, set()))
                        found[1].add(pattern)
        for (name, _), layers in layers_of.items():
            if len(layers) > 1:
                shown = " and ".join(
                    f"layer {layer} on {self.name}:{rank}" for layer, (rank, _) in sorted(layers.items())
                )
                for layer, (_, patterns) in layers.items():
                    yield from (((pattern, layer), f"{name} is made of {shown}") for pattern in sorted(patterns))

    def uses(self, routes: Mapping[tuple[str, int], Misc | Excluded]) -> Iterator[Use]:
        """What tensors have of the parameters of which some layers travel as bulk."""
        for pattern, holdings in self.holdings.items():
            if any((pattern, layer) not in routes for layer in self.layers(pattern)):
                for pieces in dict.fromkeys(holding.pieces for _, holding in holdings):
                    yield from ((self.name, pattern, tensor, copy) for tensor, copy in pieces)

    def owners(self, pattern: str, layers: frozenset[int], views: Views) -> tuple[PartitionOwners, ...] | Misc:
        """Who holds some layers of a parameter: layers are taken together where all ranks of a stage hold them alike."""
        found: dict[tuple[int, int], list[tuple[int, Holding, LayerPlace]]] = defaultdict(list)
        for rank, holding in self._with_padding(pattern):
            for place in holding.places:
                if place.layer in layers:
                    found[self.stages[rank], place.layer].append((rank, holding, place))
        if self.name == "train":  # the last stage has the embedding too where it predicts several tokens
            first: dict[int, int] = {}
            for stage, layer in sorted(found):
                if any(holding.pieces for _, holding, _ in found[stage, layer]):
                    first.setdefault(layer, stage)
            found = {place: held for place, held in found.items() if place[0] == first.get(place[1])}
        alike: dict[tuple[int, tuple[tuple[int, int], ...]], list[int]] = defaultdict(list)
        for (stage, layer), held in found.items():
            alike[stage, tuple((rank, id(holding)) for rank, holding, _ in held)].append(layer)
        owners: list[PartitionOwners] = []
        for (stage, _), same in alike.items():
            held = found[stage, same[0]]
            places = tuple(next(iter(p for *_, p in found[stage, layer])) for layer in sorted(same))
            by_experts: dict[Experts, list[tuple[int, Holding]]] = defaultdict(list)
            for rank, holding, _ in held:
                if holding.first_slot:
                    return Misc(f"{pattern}: experts of {self.name}:{rank} do not start in its first slot")
                by_experts[holding.experts].append((rank, holding))
            for experts, holders in by_experts.items():
                made = self._partition(pattern, holders, views)
                if isinstance(made, Misc):
                    return made
                owners.append(PartitionOwners(*made, stage, places, experts))
        return tuple(owners)

    def _with_padding(self, pattern: str) -> list[tuple[int, Holding]]:
        """The holdings of a parameter, and those of ranks that have nothing of its tensors but padding."""
        holdings = self.holdings[pattern]
        tensors = {tensor.name for _, holding in holdings for tensor, _ in (*holding.pieces, *holding.padding)}
        own = [name for name in sorted(tensors) if self._first_pattern[name] == pattern]
        return holdings + [entry for name in own for entry in self.padded[name]]

    def _partition(
        self, pattern: str, holders: Sequence[tuple[int, Holding]], views: Views
    ) -> tuple[Partition, NDArray[np.int32]] | Misc:
        """The distinct parts that ranks hold, and the ranks that hold each."""
        ranks_of: dict[tuple[Pieces, Pieces], list[int]] = defaultdict(list)
        for rank, holding in holders:
            ranks_of[holding.pieces, holding.padding].append(rank)
        parts = {part: (views.pieces(self.name, pattern, part[0]), _padding(part[1])) for part in ranks_of}
        # Parts ascend; those without a piece of the parameter come last.
        order = sorted(ranks_of, key=lambda part: (not part[0], parts[part][0][:1] and parts[part][0][0].region))
        if len({len(ranks) for ranks in ranks_of.values()}) > 1:
            if self.name == "train":
                counts = sorted({len(ranks) for ranks in ranks_of.values()})
                return Misc(f"{pattern}: parts are on {' or '.join(map(str, counts))} training ranks")
            grid = [[rank] for part in order for rank in ranks_of[part]]
            order = [part for part in order for _ in ranks_of[part]]
        else:
            grid = [ranks_of[part] for part in order]
        key = (pattern, *order)
        if key not in self._partitions:
            padding = tuple(parts[part][1] for part in order)
            self._partitions[key] = Partition(tuple(parts[part][0] for part in order), padding if any(padding) else ())
        return self._partitions[key], np.array(grid, dtype=np.int32)


def _padding(boxes: Pieces) -> tuple[Padding, ...]:
    """Boxes of zeros, in the coordinates of their tensors' shapes."""
    padding = []
    for tensor, box in boxes:
        for found in digit_boxes(box, shape_chain(tensor.shape)):
            spans = iter([*zip(found.start, found.extents, strict=True)])
            ends = [(0, 1) if size == 1 else next(spans) for size in tensor.shape]
            region = Region(tuple(start for start, _ in ends), tuple(start + extent for start, extent in ends))
            padding.append(Padding(tensor, region))
    return tuple(padding)


def _routes(names: ParameterNames, sides: Sequence[_Side]) -> dict[tuple[str, int], Misc | Excluded]:
    """The parameters of which some layers do not travel as bulk: (pattern, layer) -> the route. Layer -1: in no layer."""
    routes: dict[tuple[str, int], Misc | Excluded] = {}
    for side in sides:
        for trace in side.traces:
            for name, reason in trace.computed:
                routes.setdefault((names[name].pattern, names[name].layer_key), Misc(_general(reason, names[name])))
        for key, reason in side.contradictions():
            routes.setdefault(key, Misc(reason))
    train, gen = sides
    for pattern, members in names.by_pattern.items():
        on_train, on_gen = train.layers(pattern), gen.layers(pattern)
        for layer in {names[name].layer_key for name in members}:
            if (pattern, layer) in routes:
                continue
            if layer not in on_gen:
                routes[pattern, layer] = Excluded("the engine's load_weights does not keep it")
            elif layer not in on_train:
                routes[pattern, layer] = Misc("no tensor of the trainer is filled with it when Megatron-Bridge imports")
    _spread(routes, gen)
    return routes


def _general(reason: str, numbered: NumberedName) -> str:
    """The reason with the layer's number left out, so that layers with one reason are one group."""
    tensor, _, why = reason.partition(": ")
    return (
        f"{NUMBER.sub('{layer}', re.sub(r'^vp[0-9]+.', '', tensor), count=1)}: {why}"
        if numbered.layer is not None
        else reason
    )


def _spread(routes: dict[tuple[str, int], Misc | Excluded], engine: _Side) -> None:
    """Send all parameters of an engine's tensor by misc if one of them goes by misc. Trainer tensors are only read."""
    users: dict[tuple[str, int], set[str]] = defaultdict(set)
    for pattern, holdings in engine.holdings.items():
        for _, holding in holdings:
            for tensor, _ in holding.pieces:
                for place in holding.places:
                    users[tensor.name, place.layer].add(pattern)
    changed = True
    while changed:
        changed = False
        for (name, layer), patterns in users.items():
            misc = [p for p in sorted(patterns) if isinstance(routes.get((p, layer)), Misc)]
            for pattern in patterns if misc else ():
                if (pattern, layer) not in routes:
                    cause = routes[misc[0], layer].reason
                    routes[pattern, layer], changed = Misc(f"shares {name} with {misc[0]} ({cause})"), True
