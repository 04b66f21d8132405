"""The forms of records in JSON: one table writes a record, checks it and reads it.

    FORM = RecordForm(LayerPlace, {"layer": int, "vp_stage": int, "local": int})
    encode(LayerPlace(3, 0, 1), FORM, {})      -> [3, 0, 1]
    decode([3, 0, "1"], FORM, "layers", ())    -> TypeError: '1' in layers where a number belongs

Tensors are written by number; the file has a table of them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from math import prod
from operator import attrgetter
from typing import Any

import numpy as np

from mcore_reshard.planner.bounded_json import shown
from mcore_reshard.planner.model.name_patterns import require_tensor_pattern

from .geometry import LocalTensor
from .mesh import LayerPlace


def canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


class RecordForm:
    """The form of each attribute of a record, and how to build one; a list in the file, or {attribute: value}."""

    def __init__(self, build: Callable[..., Any], columns: dict[str, Any], *, is_row: bool = True) -> None:
        self.build, self.columns, self.is_row = build, columns, is_row
        self.forms, self.read = tuple(columns.values()), attrgetter(*columns)
        self.nested = [index for index, form in enumerate(self.forms) if form not in (*_NAMES, SIZES)]
        self.is_flat = is_row and not self.nested


def encode(value: Any, form: Any, numbers: dict[LocalTensor, int]) -> Any:
    """A value as JSON. Tensors are written by number, and added to `numbers` if they are new."""
    if isinstance(form, RecordForm):
        row = list(form.read(value))
        for index in form.nested:
            row[index] = encode(row[index], form.forms[index], numbers)
        return row if form.is_row else dict(zip(form.columns, row, strict=True))
    if isinstance(form, list) and form != SIZES:
        if isinstance(form[0], RecordForm) and form[0].is_flat:
            return [list(row) for row in map(form[0].read, value)]
        return [encode(item, form[0], numbers) for item in value]
    if isinstance(form, tuple):
        return [encode(item, of_one, numbers) for item, of_one in zip(value, form, strict=True)]
    if form is LocalTensor:
        return numbers.setdefault(value, len(numbers))
    return value.tolist() if form is np.ndarray else value


def decode(value: Any, form: Any, where: str, tensors: Sequence[LocalTensor]) -> Any:
    """A value out of JSON. Raises TypeError unless it has the form, so that nothing later has to ask.

    A form is a type, [form] for a list of any length, (form, ...) for a list of that length, or a record.
    """
    if form is int or form is str or form is bool:
        if type(value) is not form or (isinstance(value, int) and abs(value) > _LARGEST):
            raise TypeError(f"{shown(value)} in {where} where {_NAMES[form]} belongs")
        return value
    if form is LocalTensor:
        number = decode(value, int, where, tensors)
        if not 0 <= number < len(tensors):
            raise IndexError(f"tensor {number} in {where}, of {len(tensors)} tensors")
        return tensors[number]
    if form is np.ndarray:
        return np.array(decode(value, [SIZES], where, tensors), dtype=np.int32)
    is_record = isinstance(form, RecordForm)
    if is_record and not form.is_row:
        if not isinstance(value, dict) or value.keys() != form.columns.keys():
            raise TypeError(f"{where} does not have the fields {', '.join(form.columns)}")
        return form.build(**{name: decode(value[name], of_one, name, tensors) for name, of_one in form.columns.items()})
    forms = form.forms if is_record else form
    if not isinstance(value, list) or (isinstance(forms, tuple) and len(value) != len(forms)):
        raise TypeError(
            f"{shown(value)} in {where} where a list{f' of {len(forms)}' * isinstance(forms, tuple)} belongs"
        )
    if isinstance(forms, list):
        return tuple([decode(item, forms[0], where, tensors) for item in value])
    items = [decode(item, of_one, where, tensors) for item, of_one in zip(value, forms, strict=True)]
    return form.build(*items) if is_record else tuple(items)


def _tensor(name: str, shape: tuple[int, ...], dtype: str) -> LocalTensor:
    require_tensor_pattern(name)
    require_shape(name, shape)
    return LocalTensor(name, shape, dtype)


def require_shape(name: str, shape: tuple[int, ...]) -> None:
    """Raise ValueError for a shape that no tensor has: a negative size, too many dims, or more than 2^48 elements."""
    if min(shape, default=0) < 0:
        raise ValueError(f"{name} has a negative size in {shown(shape)}")
    if len(shape) > MAX_DIMS or prod(shape) > _LARGEST:
        raise ValueError(f"{name} has {len(shape)} dims or more than 2^48 elements: {shown(shape)}")


MAX_DIMS = 16  # of a tensor, or of a view that factors it; a rule's largest has 4
_LARGEST = 1 << 48
_NAMES = {int: "a number", str: "a text", bool: "true or false"}
SIZES = [int]
TENSORS = [RecordForm(_tensor, {"name": str, "shape": SIZES, "dtype": str})]
LAYER_PLACE = RecordForm(LayerPlace, dict.fromkeys(("layer", "vp_stage", "local"), int))
