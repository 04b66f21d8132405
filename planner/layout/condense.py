"""One rank's trace with equal layers and experts as one, and the patterns of names that this needs.

    model.layers.3.mlp.experts.17.up_proj.weight  in  vp0.decoder.layers.1.mlp.experts.linear_fc1.weight5
    is a member of    model.layers.{layer}.mlp.experts.{expert}.up_proj.weight
    with pieces in    vp{vp}.decoder.layers.{layer}.mlp.experts.linear_fc1.weight{expert}

Nothing is known of the model: names are grouped by the numbers in them. traced.py puts the ranks together.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod

from mcore_reshard.planner.model.precision import BLOCK_FP8, FP8, TENSOR_FP8

from .geometry import LocalTensor
from .mesh import LayerPlace
from .strided import StridedCopy
from .traces import HfTensor, RankTrace, TracedTensor

Experts = tuple[int, int]  # half-open
Pieces = tuple[tuple[LocalTensor, StridedCopy], ...]  # tensors by the pattern of their names


@dataclass(frozen=True, slots=True)
class Holding:
    """Parameters of one pattern that one rank keeps in the same way. Copies are those of the expert in slot 0.

    `places` are the layers, each with where the rank keeps it. `experts` are in slots from 0 on; (0, 0): no experts.
    `padding` are boxes of zeros in the tensors of `pieces`; a holding of padding alone has no parameter.
    """

    parameter: str
    pieces: Pieces
    padding: Pieces
    places: tuple[LayerPlace, ...]
    experts: Experts = (0, 0)
    first_slot: int = 0


@dataclass(frozen=True, slots=True)
class CondensedTrace:
    """One rank's trace: what it holds, and for parameters whose tensors are computed, why."""

    holdings: tuple[Holding, ...]
    computed: tuple[tuple[str, str], ...]  # (parameter, reason)
    unfilled: tuple[tuple[str, str], ...]  # (tensor, reason): made of no parameter at all


@dataclass(frozen=True, slots=True)
class NumberedName:
    """A name's pattern, and the layer and the expert that it had; None where it has none."""

    pattern: str
    layer: int | None
    expert: int | None

    @property
    def layer_key(self) -> int:
        """The layer; -1 for none."""
        return -1 if self.layer is None else self.layer


NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")  # a component that is a number


class ParameterNames:
    """The patterns of a checkpoint's names. The first number in a name is the layer, one more is the expert.

    Where layers of a pattern differ in shape or dtype, each of these is a pattern of its own, which says so behind a space.
    Names stay as they are, without a pattern, unless the experts of a pattern are 0, 1, 2, ... in every layer.
    """

    def __init__(self, checkpoint: Mapping[str, HfTensor]) -> None:
        self.checkpoint = checkpoint
        self._numbered: dict[str, NumberedName] = {}
        self.experts: dict[str, int] = {}  # by pattern
        experts: dict[str, dict[int, set[int]]] = defaultdict(lambda: defaultdict(set))
        tensors: dict[str, set[HfTensor]] = defaultdict(set)
        candidates = {name: numbers_in(name) for name in checkpoint}
        for name, numbered in candidates.items():
            tensors[numbered.pattern].add(checkpoint[name])
        for name, numbered in candidates.items():
            if len(tensors[numbered.pattern]) > 1:
                tensor = checkpoint[name]
                numbered = replace(numbered, pattern=f"{numbered.pattern} {list(tensor.shape)} {tensor.dtype}")
                candidates[name] = numbered
            if numbered.layer is not None and numbered.expert is not None:
                experts[numbered.pattern][numbered.layer].add(numbered.expert)
        for pattern, layers in experts.items():
            counts = {len(numbers) for numbers in layers.values()}
            if len(counts) == 1 and all(max(n) + 1 == len(n) for n in layers.values()):
                self.experts[pattern] = counts.pop()
        for name, numbered in candidates.items():
            if numbered.expert is not None and numbered.pattern not in self.experts:
                numbered = NumberedName(name, None, None)
            self._numbered[name] = numbered

    def __getitem__(self, name: str) -> NumberedName:
        return self._numbered[name]

    def layers(self, pattern: str) -> list[int]:
        """The layers of a pattern in order; -1 for a name without one."""
        return sorted({self[name].layer_key for name in self.by_pattern[pattern]})

    def name_pattern(self, pattern: str) -> str:
        """A pattern as names have it, without a shape and a dtype."""
        return numbers_in(name).pattern if (name := self.by_pattern[pattern][0]) != pattern else pattern

    @cached_property
    def by_pattern(self) -> dict[str, list[str]]:
        names: dict[str, list[str]] = defaultdict(list)
        for name, numbered in self._numbered.items():
            names[numbered.pattern].append(name)
        return names


def numbers_in(name: str) -> NumberedName:
    """A name's pattern by its numbers alone; a name with more than two of them stays as it is."""
    found = [*NUMBER.finditer(name)]
    if not found or len(found) > 2 or "{" in name:
        return NumberedName(name, None, None)
    pattern = f"{name[: found[0].start()]}{{layer}}{name[found[0].end() :]}"
    layer = int(found[0].group())
    if len(found) == 1:
        return NumberedName(pattern, layer, None)
    first, second = found
    pattern = f"{name[: first.start()]}{{layer}}{name[first.end() : second.start()]}{{expert}}{name[second.end() :]}"
    return NumberedName(pattern, layer, int(second.group()))


def untraceable(checkpoint: Mapping[str, HfTensor], loader: str, reason: str) -> CondensedTrace:
    """The trace of a rank whose loader does not run on meta tensors: every parameter is computed, as far as one can tell."""
    return CondensedTrace((), tuple((name, f"{loader}: {reason}") for name in checkpoint), ())


def condense(trace: RankTrace, names: ParameterNames, *, is_trainer: bool) -> CondensedTrace:
    """What one rank holds, with equal layers and experts as one. A trainer's tensors have their chunk in front (`vp0.`).

    Scales of an engine's E4M3 tensors are not called unfilled: the plan pairs them with their weights.
    """
    of_scales = {
        traced.tensor.name + form.suffix
        for traced in trace.tensors
        for form in (BLOCK_FP8, TENSOR_FP8)
        if traced.tensor.dtype == FP8 and not is_trainer
    }
    computed: dict[str, str] = {}
    unfilled: list[tuple[str, str]] = []
    by_parameter: dict[str, list[tuple[TracedTensor, StridedCopy]]] = defaultdict(list)
    padding_only: list[TracedTensor] = []
    for traced in trace.tensors:
        if traced.computed:
            unfilled += [(traced.tensor.name, traced.computed)] * (not traced.names)
            for name in traced.names:
                computed.setdefault(name, f"{traced.tensor.name}: {traced.computed}")
        for name, copy in traced.copies if not traced.computed else ():
            by_parameter[name].append((traced, copy))
        if not traced.computed and not traced.copies:
            if traced.padding:
                padding_only.append(traced)
            elif traced.tensor.name not in of_scales:
                unfilled.append((traced.tensor.name, "no Hugging Face tensor fills it"))
    members: dict[tuple[object, ...], dict[LayerPlace, list[tuple[int, int]]]] = defaultdict(lambda: defaultdict(list))
    owner_of_padding: dict[str, str] = {}  # tensor -> the parameter whose holding declares its padding
    for name, copies in by_parameter.items():
        numbered, slot = names[name], _slot_of(names[name], copies)
        pieces, padding, place = [], [], LayerPlace(-1, 0, -1)
        for traced, copy in sorted(copies, key=lambda pair: (pair[0].tensor.name, pair[1].dst_offset)):
            local, place = _local_pattern(traced.tensor, numbered, is_trainer)
            if numbered.expert is not None and "{expert}" not in local.name:
                copy = replace(copy, dst_offset=copy.dst_offset - slot * prod(local.shape[1:]))
            pieces.append((local, copy))
            if owner_of_padding.setdefault(traced.tensor.name, name) == name:
                padding += [(local, box) for box in traced.padding]
        key = (numbered.pattern, tuple(pieces), tuple(dict.fromkeys(padding)))
        expert = -1 if numbered.expert is None else numbered.expert
        members[key][place].append((expert, slot))
    holdings = [holding for key, layers in members.items() for holding in _holdings_of(key, layers)]
    padded: dict[Pieces, list[LayerPlace]] = defaultdict(list)
    for traced in padding_only:
        local, place = _local_pattern(traced.tensor, numbers_in(traced.tensor.name), is_trainer)
        padded[tuple((local, box) for box in traced.padding)].append(place)
    holdings += [Holding("", (), boxes, tuple(places)) for boxes, places in padded.items()]
    return CondensedTrace(tuple(holdings), tuple(computed.items()), tuple(unfilled))


def _slot_of(numbered: NumberedName, copies: Sequence[tuple[TracedTensor, StridedCopy]]) -> int:
    """Where a rank keeps an expert: its number among the tensors, or along the first dim of a tensor that stacks them."""
    if numbered.expert is None:
        return 0
    tensor, copy = copies[0][0].tensor, copies[0][1]
    if (token := _expert_token(tensor.name)) is not None:
        return token[1]
    return copy.dst_offset // prod(tensor.shape[1:])


def _expert_token(name: str) -> tuple[tuple[int, int], int] | None:
    """The span and the value of the expert's number in a tensor's name: `local_experts.3.` or a last component `weight3`."""
    numbers = [*NUMBER.finditer(name)]
    found = numbers[1] if len(numbers) > 1 else re.search(r"(?<=weight)\d+$|(?<=bias)\d+$", name)
    return None if found is None else (found.span(), int(found.group()))


def _local_pattern(tensor: LocalTensor, numbered: NumberedName, is_trainer: bool) -> tuple[LocalTensor, LayerPlace]:
    """A tensor by the pattern of its name, and where its layer is kept."""
    name, chunk, expert_span = tensor.name, 0, None
    if numbered.expert is not None and (token := _expert_token(name)) is not None:
        expert_span = token[0]
    found = NUMBER.search(name)
    layer, local = -1, -1
    if numbered.layer is not None and found is not None and (is_trainer or int(found.group()) == numbered.layer):
        layer, local = numbered.layer, int(found.group())
    edits = [(found.span(), "{layer}")] if layer >= 0 and found is not None else []
    edits += [(expert_span, "{expert}")] if expert_span is not None else []
    for (start, stop), text in sorted(edits, reverse=True):
        name = f"{name[:start]}{text}{name[stop:]}"
    if is_trainer:
        prefix, _, rest = name.partition(".")
        chunk, name = int(prefix[2:]), f"vp{{vp}}.{rest}"
    return replace(tensor, name=name), LayerPlace(layer, chunk, local)


def _holdings_of(key: tuple, layers: Mapping[LayerPlace, Sequence[tuple[int, int]]]) -> Iterable[Holding]:
    """One holding for all layers with the same experts in the same slots. Experts must follow each other as slots do."""
    by_experts: dict[tuple[tuple[int, int], ...], list[LayerPlace]] = defaultdict(list)
    for place, members in layers.items():
        by_experts[tuple(sorted(members))].append(place)
    for members, places in by_experts.items():
        pattern, pieces, padding = key
        ordered = tuple(sorted(places, key=lambda place: place.layer))
        start = 0
        while start < len(members):
            stop = start + 1
            while stop < len(members) and members[stop] == (members[stop - 1][0] + 1, members[stop - 1][1] + 1):
                stop += 1
            expert, slot = members[start]
            experts = (expert, expert + stop - start) if expert >= 0 else (0, 0)
            yield Holding(pattern, pieces, padding, ordered, experts, slot)
            start = stop
