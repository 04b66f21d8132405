"""Traces, and the list of a checkpoint's tensors, as text: ranks send them to each other, and caches keep them.

    dump_trace(trace)           one rank's `CondensedTrace`
    dump_checkpoint(tensors)    one entry for all layers and experts of a pattern

Whoever reads such a text need not trust it: what is parsed has the right types, and every copy lies within its tensor.
`require_known` checks a trace against the checkpoint that it names.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import product
from math import prod
from typing import Any

from mcore_reshard.planner.bounded_json import MAX_PLAN_BYTES, BoundsError, parse_json, shown
from mcore_reshard.planner.model.name_patterns import require_parameter_pattern

from .condense import CondensedTrace, Holding, ParameterNames, numbers_in
from .geometry import LocalTensor
from .record_forms import LAYER_PLACE, SIZES, TENSORS, RecordForm, canonical, decode, encode, require_shape
from .strided import StridedCopy
from .traces import HfTensor

TRACE_FORMAT, CHECKPOINT_FORMAT = "mcore-reshard trace", "mcore-reshard checkpoint"
VERSION = 1
# Of a checkpoint: an entry of a few bytes must not stand for more. Kimi-K2 in FP8 has 140,000 tensors, names of 9 MB.
_MOST_TENSORS = 1 << 20
_MOST_NAME_BYTES = 1 << 26


class TraceFileError(ValueError):
    """A text is no trace and no list of tensors, is of another version, or says what cannot be."""


def dump_trace(trace: CondensedTrace) -> str:
    numbers: dict[LocalTensor, int] = {}
    body = {name: encode(getattr(trace, name), form, numbers) for name, form in _TRACE.items()}
    return canonical(
        {"format": TRACE_FORMAT, "version": VERSION, **body, "tensors": encode([*numbers], TENSORS, numbers)}
    )


def parse_trace(text: str, source: str = "the trace") -> CondensedTrace:
    """Read a trace. Raises TraceFileError, which names `source`, where the text is not one or a box leaves its tensor."""
    document = _parse(text, TRACE_FORMAT, {*_TRACE, "tensors"}, source)
    try:
        tensors = decode(document["tensors"], TENSORS, "tensors", ())
        return CondensedTrace(**{name: decode(document[name], form, name, tensors) for name, form in _TRACE.items()})
    except (TypeError, ValueError, IndexError) as error:
        raise TraceFileError(f"{source} is damaged: {error!s:.600}") from error


def dump_checkpoint(checkpoint: Mapping[str, HfTensor]) -> str:
    """The tensors by pattern, in the order in which patterns first appear; then by layer and expert."""
    experts_of: dict[tuple[str, HfTensor], dict[int | None, set[int | None]]] = {}
    for name, tensor in checkpoint.items():
        numbered = numbers_in(name)
        pattern, layer, expert = numbered.pattern, numbered.layer, numbered.expert
        if _name(pattern, layer, expert) != name:  # a number with leading zeros
            pattern, layer, expert = name, None, None
        experts_of.setdefault((pattern, tensor), {}).setdefault(layer, set()).add(expert)
    entries = []
    for (pattern, tensor), layers in experts_of.items():
        alike: dict[tuple[tuple[int, int], ...], list[int | None]] = {}
        for layer, experts in layers.items():
            alike.setdefault(_ranges(experts), []).append(layer)
        entries += [[pattern, tensor.shape, tensor.dtype, _ranges(same), experts] for experts, same in alike.items()]
    return canonical({"format": CHECKPOINT_FORMAT, "version": VERSION, "tensors": entries})


def parse_checkpoint(text: str, source: str = "the list of tensors") -> dict[str, HfTensor]:
    """Read a list of tensors. Raises TraceFileError, which names `source`."""
    document = _parse(text, CHECKPOINT_FORMAT, {"tensors"}, source)
    checkpoint: dict[str, HfTensor] = {}
    try:
        tensors = decode(document["tensors"], _CHECKPOINT, "tensors", ())
        _require_few(tensors)
        for pattern, shape, dtype, layers, experts in tensors:
            require_parameter_pattern(pattern)
            require_shape(pattern, shape)
            for layer, expert in product(_numbers(layers), _numbers(experts)):
                name = _name(pattern, layer, expert)
                if name in checkpoint:
                    raise ValueError(f"it lists {name} twice")
                checkpoint[name] = HfTensor(shape, dtype)
    except (TypeError, ValueError) as error:
        raise TraceFileError(f"{source} is damaged: {error!s:.600}") from error
    return checkpoint


def require_known(trace: CondensedTrace, names: ParameterNames, source: str = "the trace") -> None:
    """Raise TraceFileError unless all that a trace says of parameters fits the checkpoint."""
    for name, _ in trace.computed:
        if name not in names.checkpoint:
            raise TraceFileError(f"{source} names {name}, which is not in the checkpoint")
    for holding in trace.holdings:
        pattern = holding.parameter
        if not holding.pieces:
            continue
        if pattern not in names.by_pattern:
            raise TraceFileError(f"{source} names {pattern}, which is not in the checkpoint")
        if unknown := {place.layer for place in holding.places} - {*names.layers(pattern)}:
            raise TraceFileError(f"{source} has layers {sorted(unknown)} of {pattern}, which are not in the checkpoint")
        experts = names.experts.get(pattern, 0)
        if holding.experts[1] > experts or (experts and not holding.experts[1]):
            raise TraceFileError(f"{source} has experts {holding.experts} of {pattern}, the checkpoint {experts}")
        size = prod(names.checkpoint[names.by_pattern[pattern][0]].shape)
        for tensor, copy in holding.pieces:
            if copy.inverse.dst_span[1] > size:
                raise TraceFileError(f"{source} fills {tensor.name} with elements beyond the end of {pattern}")


def _parse(text: str, form: str, fields: set[str], source: str) -> dict[str, Any]:
    try:
        document = parse_json(text, source, max_bytes=MAX_PLAN_BYTES)
    except BoundsError as error:
        raise TraceFileError(str(error)) from error
    if not isinstance(document, dict) or document.get("format") != form:
        raise TraceFileError(f'{source} has no "format": "{form}"')
    if document.get("version") != VERSION:
        version = shown(document.get("version"))
        raise TraceFileError(f"{source} is of version {version}, this release reads version {VERSION}")
    if document.keys() != {"format", "version", *fields}:
        raise TraceFileError(f"{source} does not have the fields {', '.join(sorted(fields))}")
    return document


def _name(pattern: str, layer: int | None, expert: int | None) -> str:
    name = pattern if layer is None else pattern.replace("{layer}", str(layer), 1)
    return name if expert is None else name.replace("{expert}", str(expert), 1)


def _ranges(numbers: Iterable[int | None]) -> tuple[tuple[int, int], ...]:
    """Numbers as half-open ranges; none for a name without a number: {0, 1, 2, 5} -> ((0, 3), (5, 6))."""
    ranges: list[tuple[int, int]] = []
    for number in sorted(number for number in numbers if number is not None):
        if ranges and ranges[-1][1] == number:
            ranges[-1] = (ranges[-1][0], number + 1)
        else:
            ranges.append((number, number + 1))
    return tuple(ranges)


def _require_few(tensors: Sequence[Any]) -> None:
    """Raise ValueError for ranges that say nothing, and where the entries stand for too many tensors."""
    most = characters = 0
    for pattern, _, _, *both in tensors:
        if any(not 0 <= start < stop for ranges in both for start, stop in ranges):
            raise ValueError(f"{shown(pattern)} has the numbers {shown(both)}")
        layers, experts = (max(1, sum(stop - start for start, stop in ranges)) for ranges in both)
        most, characters = most + layers * experts, characters + layers * experts * len(pattern)
    if most > _MOST_TENSORS or characters > _MOST_NAME_BYTES:
        raise ValueError(f"it lists {most:,} tensors, with names of {characters:,} bytes: more than any model")


def _numbers(ranges: Sequence[tuple[int, int]]) -> list[int | None]:
    return [number for start, stop in ranges for number in range(start, stop)] or [None]


def _copy(
    extents: tuple[int, ...],
    src_offset: int,
    src_strides: tuple[int, ...],
    dst_offset: int,
    dst_strides: tuple[int, ...],
) -> StridedCopy:
    if not len(extents) == len(src_strides) == len(dst_strides):
        raise ValueError(f"a copy of {extents} has strides {src_strides} and {dst_strides}")
    if min(extents, default=1) < 1 or min((src_offset, dst_offset, *src_strides, *dst_strides)) < 0:
        raise ValueError(f"a copy of {extents} has extents below 1, or negative offsets or strides")
    return StridedCopy(extents, src_offset, src_strides, dst_offset, dst_strides)


def _holding(parameter: str, pieces: Any, padding: Any, places: Any, experts: tuple[int, int], slot: int) -> Holding:
    if bool(parameter) != bool(pieces) or not (pieces or padding) or not places:
        raise ValueError(f"a holding of {parameter or 'no parameter'} lacks pieces, padding or layers")
    for tensor, copy in (*pieces, *padding):
        size = prod(tensor.shape)
        if copy.dst_span[1] > size or copy.elements > size:
            raise ValueError(f"a copy into {tensor.name} leaves its {size} elements")
    if any(place.layer < -1 or place.local < -1 or place.vp_stage < 0 for place in places):
        raise ValueError(f"{parameter} has a negative layer")
    if len({*places}) < len(places):
        raise ValueError(f"{parameter} has a layer twice in one place")
    if not 0 <= experts[0] <= experts[1] or slot < 0 or (experts[1] and experts[0] == experts[1]):
        raise ValueError(f"{parameter} has experts {experts} from slot {slot} on")
    return Holding(parameter, pieces, padding, places, experts, slot)


_COPY = RecordForm(_copy, {
    "extents": SIZES, "src_offset": int, "src_strides": SIZES, "dst_offset": int, "dst_strides": SIZES
})  # fmt: skip
_PIECES = [(LocalTensor, _COPY)]
_HOLDING = RecordForm(_holding, {
    "parameter": str, "pieces": _PIECES, "padding": _PIECES, "places": [LAYER_PLACE], "experts": (int, int),
    "first_slot": int,
})  # fmt: skip
_TRACE = {"holdings": [_HOLDING], "computed": [(str, str)], "unfilled": [(str, str)]}
_CHECKPOINT = [(str, SIZES, str, [(int, int)], [(int, int)])]  # pattern, shape, dtype, ranges of layers and of experts
