"""Plans as files: one JSON object, versioned, byte-identical on a round trip, sealed by its digest.

The digest is the SHA-256 of the canonical text of everything else. So equal digests mean equal plans; ranks compare it
before they move a byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import GenMesh, LayerPlace, MeshError, TrainMesh
from mcore_reshard.planner.layout.partitions import Padding, Partition
from mcore_reshard.planner.model.parameters import ParameterGroup, Role

from .plan import GroupCast, Overlap, Plan, Policy, QuantizedPair, TransferGroup, TransferPattern, UnplannedGroup

FORMAT = "mcore-reshard plan"
VERSION = 3


class PlanFileError(ValueError):
    """A file is no plan, is damaged, is of another version, or cannot be read or written."""


def digest_of(plan: Plan) -> str:
    return hashlib.sha256(_canonical(_body_of(plan)).encode()).hexdigest()


def dump_plan(plan: Plan) -> str:
    return _canonical({"format": FORMAT, "version": VERSION, "digest": plan.digest, "plan": _body_of(plan)}) + "\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a file whole or not at all. A device, a pipe or a terminal is written into: renaming would replace it.

    Raises PlanFileError where the file cannot be written.
    """
    text = dump_plan(plan)
    target = Path(os.path.realpath(path))  # a link stays a link
    in_place = os.path.exists(path) and not os.path.isfile(path)
    written = Path(path) if in_place else target.with_name(target.name + ".partial")
    try:
        written.write_text(text)
        if not in_place:
            written.replace(target)
    except OSError as error:
        raise PlanFileError(f"cannot write plan {path}: {error.strerror or error}") from error


def load_plan(path: str | Path) -> Plan:
    """Read a plan. Raises PlanFileError where the file is missing, foreign, damaged or of another version."""
    try:
        text = Path(path).read_text()
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{path} is not a plan: it is not text") from error
    except OSError as error:
        raise PlanFileError(f"cannot read plan {path}: {error.strerror}") from error
    return parse_plan(text, str(path))


def parse_plan(text: str, source: str = "plan") -> Plan:
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise PlanFileError(f"{source} is not a plan: it is not JSON ({error})") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanFileError(
            f'{source} is not a plan: no "format": "{FORMAT}"; write one with `mcore-reshard plan --out`'
        )
    if document.get("version") != VERSION:
        raise PlanFileError(
            f"{source} is a plan of version {document.get('version')!r}, this release reads version {VERSION}; plan again"
        )
    sealed = hashlib.sha256(_canonical(document.get("plan")).encode()).hexdigest()
    if sealed != document.get("digest"):
        raise PlanFileError(
            f"{source} is damaged: its content has digest {sealed}, it claims {document.get('digest')}; plan again"
        )
    try:
        plan = _plan_of(document["plan"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PlanFileError(f"{source} is damaged: {type(error).__name__}: {error}; plan again") from error
    object.__setattr__(plan, "digest", sealed)
    return plan


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _body_of(plan: Plan) -> dict[str, Any]:
    numbers: dict[LocalTensor, int] = {}
    body: dict[str, Any] = {name: _encode(getattr(plan, name), form, numbers) for name, form in _PLAN.items()}
    return {**body, "tensors": _encode([*numbers], _TENSORS, numbers)}


def _plan_of(body: Any) -> Plan:
    if not isinstance(body, dict) or body.keys() != {*_PLAN, "tensors"}:
        raise TypeError(f"plan does not have the fields {', '.join((*_PLAN, 'tensors'))}")
    tensors = _decode(body["tensors"], _TENSORS, "tensors", ())
    fields = {name: _decode(body[name], form, name, tensors) for name, form in _PLAN.items()}
    if fields["policy"] not in get_args(Policy):
        raise ValueError(f"unknown policy {fields['policy']!r}")
    return Plan(**fields)


# --- the form of every record: one table to write, check and read it by


class _Record:
    """The form of each attribute of a record, and how to build one; a list in the file, or {attribute: value}."""

    def __init__(self, build: Callable[..., Any], columns: dict[str, Any], *, is_row: bool = True) -> None:
        self.build, self.columns, self.is_row = build, columns, is_row
        self.forms, self.read = tuple(columns.values()), attrgetter(*columns)
        self.nested = [index for index, form in enumerate(self.forms) if form not in (*_NAMES, _SIZES)]


def _encode(value: Any, form: Any, numbers: dict[LocalTensor, int]) -> Any:
    """A value as JSON. Tensors are written by number, and added to `numbers` if they are new."""
    if isinstance(form, _Record):
        row = list(form.read(value))
        for index in form.nested:
            row[index] = _encode(row[index], form.forms[index], numbers)
        return row if form.is_row else dict(zip(form.columns, row, strict=True))
    if isinstance(form, list) and form != _SIZES:
        return [_encode(item, form[0], numbers) for item in value]
    if form is LocalTensor:
        return numbers.setdefault(value, len(numbers))
    return value.tolist() if form is np.ndarray else value


def _decode(value: Any, form: Any, where: str, tensors: Sequence[LocalTensor]) -> Any:
    """A value out of JSON. Raises TypeError unless it has the form, so that nothing later has to ask.

    A form is a type, [form] for a list of any length, (form, ...) for a list of that length, or a record.
    """
    if form is int or form is str or form is bool:
        if type(value) is not form or (isinstance(value, int) and abs(value) > _LARGEST):
            raise TypeError(f"{value!r} in {where} where {_NAMES[form]} belongs")
        return value
    if form is LocalTensor:
        return tensors[_decode(value, int, where, tensors)]
    if form is np.ndarray:
        return np.array(_decode(value, [_SIZES], where, tensors), dtype=np.int32)
    is_record = isinstance(form, _Record)
    if is_record and not form.is_row:
        if not isinstance(value, dict) or value.keys() != form.columns.keys():
            raise TypeError(f"{where} does not have the fields {', '.join(form.columns)}")
        return form.build(
            **{name: _decode(value[name], of_one, name, tensors) for name, of_one in form.columns.items()}
        )
    forms = form.forms if is_record else form
    if not isinstance(value, list) or (isinstance(forms, tuple) and len(value) != len(forms)):
        raise TypeError(f"{value!r} in {where} where a list{f' of {len(forms)}' * isinstance(forms, tuple)} belongs")
    if isinstance(forms, list):
        return tuple([_decode(item, forms[0], where, tensors) for item in value])
    items = [_decode(item, of_one, where, tensors) for item, of_one in zip(value, forms, strict=True)]
    return form.build(*items) if is_record else tuple(items)


def _mesh_form(mesh: type[TrainMesh] | type[GenMesh]) -> _Record:
    def build(**sizes: Any) -> TrainMesh | GenMesh:
        try:
            return mesh(**sizes)
        except MeshError as error:
            raise ValueError(str(error)) from error

    return _Record(build, {**dict.fromkeys(mesh.__dataclass_fields__, int), "layers": _SIZES}, is_row=False)


_LARGEST = 1 << 48
_NAMES = {int: "a number", str: "a text", bool: "true or false"}
_SIZES = [int]
_REGION = {"region.start": _SIZES, "region.stop": _SIZES}
_TENSORS = [_Record(LocalTensor, {"name": str, "shape": _SIZES, "dtype": str})]
_PIECE = _Record(
    lambda start, stop, *columns: Piece(Region(start, stop), *columns),
    {**_REGION, "tensor": LocalTensor, "origin": _SIZES, "dims": _SIZES, "view": _SIZES, "slot_dim": int},
)
_PADDING = _Record(
    lambda tensor, start, stop: Padding(tensor, Region(start, stop)),
    {"tensor": LocalTensor, "box.start": _SIZES, "box.stop": _SIZES},
)
_OVERLAP = _Record(
    lambda src, src_piece, dst, dst_piece, start, stop: Overlap(src, src_piece, dst, dst_piece, Region(start, stop)),
    {"src": int, "src_piece": int, "dst": int, "dst_piece": int, **_REGION},
)
_PARTITION = _Record(Partition, {"pieces": [[_PIECE]], "padding": [[_PADDING]]}, is_row=False)
_PATTERN = _Record(TransferPattern, {"src": _PARTITION, "dst": _PARTITION, "overlaps": [_OVERLAP]}, is_row=False)
_GROUP = _Record(
    lambda name_pattern, role, *columns: ParameterGroup(name_pattern, Role(role), *columns),
    {"name_pattern": str, "role": str, "shape": _SIZES, "dtype": str, "layers": _SIZES, "experts": int, "view": _SIZES,
     "mtp": bool},
)  # fmt: skip
_LAYER = _Record(LayerPlace, dict.fromkeys(("layer", "vp_stage", "local"), int))
_TRANSFER_GROUP = _Record(TransferGroup, {
    **dict.fromkeys(("group", "pattern", "pp_stage", "src", "dst"), int), "layers": [_LAYER], "experts": (int, int),
    **dict.fromkeys(("src_slot", "dst_slot", "first_src_replica", "first_dst_replica"), int),
})  # fmt: skip
_UNPLANNED = _Record(UnplannedGroup, {"group": int, "reason": str})
_PLAN = {
    "model": str,
    "train": _mesh_form(TrainMesh),
    "gen": _mesh_form(GenMesh),
    "engine": str,
    "policy": str,
    "groups": [_GROUP],
    "patterns": [_PATTERN],
    "rank_grids": [np.ndarray],
    "transfer_groups": [_TRANSFER_GROUP],
    "misc": [_UNPLANNED],
    "excluded": [_UNPLANNED],
    "relay": bool,
    "pairs": [_Record(QuantizedPair, {"weight": int, "scales": int, "block": (int, int), "touched": bool})],
    "casts": [_Record(GroupCast, {"group": int, "src": str, "dst": str})],
}
