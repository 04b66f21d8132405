"""Plans as files: one JSON object, versioned, byte-identical on a round trip, sealed by its digest.

The digest is the SHA-256 of the canonical text of everything else. So equal digests mean equal plans; ranks compare it
before they move a byte.
"""

from __future__ import annotations

import hashlib
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mcore_reshard.planner.bounded_json import MAX_PLAN_BYTES, BoundsError, parse_json, read_bounded, shown
from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import GenMesh, MeshError, TrainMesh
from mcore_reshard.planner.layout.partitions import Padding, Partition
from mcore_reshard.planner.layout.record_forms import LAYER_PLACE, SIZES, TENSORS, RecordForm, canonical, decode, encode
from mcore_reshard.planner.model.parameters import ParameterGroup, Role
from mcore_reshard.planner.topology.topology import Machine, Place, Topology

from .bounds import require_bounded
from .carriers import Carried
from .plan import (
    FrozenLayers,
    GroupCast,
    Overlap,
    Plan,
    Policy,
    QuantizedPair,
    TransferGroup,
    TransferPattern,
    UnplannedGroup,
)

FORMAT = "mcore-reshard plan"
VERSION = 5


class PlanFileError(ValueError):
    """A file is no plan, is damaged, is of another version, or cannot be read or written."""


def digest_of(plan: Plan) -> str:
    return hashlib.sha256(canonical(_body_of(plan)).encode()).hexdigest()


def dump_plan(plan: Plan) -> str:
    return canonical({"format": FORMAT, "version": VERSION, "digest": plan.digest, "plan": _body_of(plan)}) + "\n"


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
        text = read_bounded(path, MAX_PLAN_BYTES)
    except UnicodeDecodeError as error:
        raise PlanFileError(f"{path} is not a plan: it is not text") from error
    except BoundsError as error:
        raise PlanFileError(f"{path} is not a plan: {error}") from error
    except OSError as error:
        raise PlanFileError(f"cannot read plan {path}: {error.strerror}") from error
    return parse_plan(text, str(path))


def parse_plan(text: str, source: str = "plan") -> Plan:
    """Read a plan of unknown origin. Raises PlanFileError, which names `source`; what is returned is not proven yet."""
    try:
        document = parse_json(text, "it", max_bytes=MAX_PLAN_BYTES)
    except BoundsError as error:
        raise PlanFileError(f"{source} is not a plan: {error}") from error
    if not isinstance(document, dict) or document.get("format") != FORMAT:
        raise PlanFileError(
            f'{source} is not a plan: no "format": "{FORMAT}"; write one with `mcore-reshard plan --out`'
        )
    if document.get("version") != VERSION:
        raise PlanFileError(
            f"{source} is a plan of version {shown(document.get('version'))}, this release reads version {VERSION}; plan again"
        )
    sealed = hashlib.sha256(canonical(document.get("plan")).encode()).hexdigest()
    if sealed != (claimed := document.get("digest")):
        claimed = claimed[:64] if isinstance(claimed, str) else shown(claimed)
        raise PlanFileError(f"{source} is damaged: its content has digest {sealed}, it claims {claimed}; plan again")
    try:
        plan = _plan_of(document["plan"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PlanFileError(f"{source} is damaged: {type(error).__name__}: {error!s:.600}; plan again") from error
    object.__setattr__(plan, "digest", sealed)
    return plan


def _body_of(plan: Plan) -> dict[str, Any]:
    numbers: dict[LocalTensor, int] = {}
    values = {**vars(plan), "topology": () if plan.topology is None else (plan.topology,)}
    body: dict[str, Any] = {
        name: encode(values[name], form, numbers)
        for name, form in _PLAN.items()
        if name not in _OPTIONAL or values[name]
    }
    return {**body, "tensors": encode([*numbers], TENSORS, numbers)}


def _plan_of(body: Any) -> Plan:
    if not isinstance(body, dict) or {*body} | _OPTIONAL != {*_PLAN, "tensors"}:
        raise TypeError(f"plan does not have the fields {', '.join((*_PLAN, 'tensors'))}")
    tensors = decode(body["tensors"], TENSORS, "tensors", ())
    fields = {name: decode(body[name], form, name, tensors) for name, form in _PLAN.items() if name in body}
    if fields["policy"] not in get_args(Policy):
        raise ValueError(f"unknown policy {shown(fields['policy'])}")
    plan = Plan(**{**fields, "topology": next(iter(fields["topology"]), None)})
    require_bounded(plan)
    return plan


# --- the form of every record


def _mesh_form(mesh: type[TrainMesh] | type[GenMesh]) -> RecordForm:
    def build(**sizes: Any) -> TrainMesh | GenMesh:
        try:
            return mesh(**sizes)
        except MeshError as error:
            raise ValueError(str(error)) from error

    return RecordForm(build, {**dict.fromkeys(mesh.__dataclass_fields__, int), "layers": SIZES}, is_row=False)


_REGION = {"region.start": SIZES, "region.stop": SIZES}
_PIECE = RecordForm(
    lambda start, stop, *columns: Piece(Region(start, stop), *columns),
    {**_REGION, "tensor": LocalTensor, "origin": SIZES, "dims": SIZES, "view": SIZES, "slot_dim": int},
)
_PADDING = RecordForm(
    lambda tensor, start, stop: Padding(tensor, Region(start, stop)),
    {"tensor": LocalTensor, "box.start": SIZES, "box.stop": SIZES},
)
_OVERLAP = RecordForm(
    lambda src, src_piece, dst, dst_piece, start, stop: Overlap(src, src_piece, dst, dst_piece, Region(start, stop)),
    {"src": int, "src_piece": int, "dst": int, "dst_piece": int, **_REGION},
)
_PARTITION = RecordForm(Partition, {"pieces": [[_PIECE]], "padding": [[_PADDING]]}, is_row=False)
_PATTERN = RecordForm(TransferPattern, {"src": _PARTITION, "dst": _PARTITION, "overlaps": [_OVERLAP]}, is_row=False)
_GROUP = RecordForm(
    lambda name_pattern, role, *columns: ParameterGroup(name_pattern, Role(role), *columns),
    {"name_pattern": str, "role": str, "shape": SIZES, "dtype": str, "layers": SIZES, "experts": int, "view": SIZES,
     "mtp": bool},
)  # fmt: skip
_TRANSFER_GROUP = RecordForm(TransferGroup, {
    **dict.fromkeys(("group", "pattern", "pp_stage", "src", "dst"), int), "layers": [LAYER_PLACE], "experts": (int, int),
    **dict.fromkeys(("src_slot", "dst_slot", "first_src_replica", "first_dst_replica"), int),
})  # fmt: skip
_UNPLANNED = RecordForm(UnplannedGroup, {"group": int, "reason": str})
_MACHINE = RecordForm(
    Machine, {"name": str, **dict.fromkeys(("gpus", "nvlink", "nic", "memory", "hosts_per_domain"), int)}, is_row=False
)
_PLACE = RecordForm(Place, {"host": int, "gpu": int})
_TOPOLOGY = RecordForm(
    Topology, {"machine": _MACHINE, "hosts": [str], "train": [_PLACE], "gen": [_PLACE]}, is_row=False
)
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
    "topology": [_TOPOLOGY],  # one or none
    "pairs": [RecordForm(QuantizedPair, {"weight": int, "scales": int, "block": (int, int), "touched": bool})],
    "casts": [RecordForm(GroupCast, {"group": int, "src": str, "dst": str})],
    "frozen": [RecordForm(FrozenLayers, {"group": int, "layers": SIZES})],
    "carriers": [RecordForm(Carried, {"rank": int, "turns": SIZES})],
}
_OPTIONAL = {"carriers"}  # left out where there are none
