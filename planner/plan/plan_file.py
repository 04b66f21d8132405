"""Plans as files: one JSON object, versioned, byte-identical on a round trip, sealed by its digest.

The digest is the SHA-256 of the canonical text of everything else, so that equal digests mean equal plans; ranks compare
it before they move a byte.
"""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path
from typing import Any, get_args

import numpy as np

from mcore_reshard.planner.layout.geometry import LocalTensor, Piece, Region
from mcore_reshard.planner.layout.mesh import GenMesh, LayerPlace, MeshError, TrainMesh
from mcore_reshard.planner.layout.partitions import Padding, Partition
from mcore_reshard.planner.model.parameters import ParameterGroup, Role

from .plan import (
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
VERSION = 3


class PlanFileError(ValueError):
    """A file that is no plan, is damaged, or is of another version."""


def digest_of(plan: Plan) -> str:
    return hashlib.sha256(_canonical(_encode(plan)).encode()).hexdigest()


def dump_plan(plan: Plan) -> str:
    """The file's text."""
    return _canonical({"format": FORMAT, "version": VERSION, "digest": plan.digest, "plan": _encode(plan)}) + "\n"


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a file whole or not at all. A device, a pipe or a terminal is written into: renaming would replace it."""
    if os.path.exists(path) and not os.path.isfile(path):
        with open(path, "w") as stream:
            stream.write(dump_plan(plan))
        return
    target = Path(os.path.realpath(path))  # a link stays a link
    temporary = target.with_name(target.name + ".partial")
    temporary.write_text(dump_plan(plan))
    temporary.replace(target)


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
        _check(document["plan"], _FORM)
        plan = _decode(document["plan"])
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError) as error:
        raise PlanFileError(f"{source} is damaged: {type(error).__name__}: {error}; plan again") from error
    object.__setattr__(plan, "digest", sealed)
    return plan


def _canonical(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def _encode(plan: Plan) -> dict[str, Any]:
    tensors: dict[LocalTensor, int] = {}

    def tensor(value: LocalTensor) -> int:
        return tensors.setdefault(value, len(tensors))

    def partition(value: Partition) -> dict[str, Any]:
        return {
            "pieces": [
                [[*_region(p.region), tensor(p.tensor), p.origin, p.dims, p.view, p.slot_dim] for p in pieces]
                for pieces in value.pieces
            ],
            "padding": [[[tensor(p.tensor), *_region(p.box)] for p in padding] for padding in value.padding],
        }

    patterns = [
        {
            "src": partition(t.src),
            "dst": partition(t.dst),
            "overlaps": [[m.src, m.src_piece, m.dst, m.dst_piece, *_region(m.region)] for m in t.overlaps],
        }
        for t in plan.patterns
    ]
    return {
        "model": plan.model,
        "train": _mesh(plan.train),
        "gen": _mesh(plan.gen),
        "engine": plan.engine,
        "policy": plan.policy,
        "groups": [
            [g.name_pattern, g.role.value, g.shape, g.dtype, g.layers, g.experts, g.view, g.mtp] for g in plan.groups
        ],
        "tensors": [[t.name, t.shape, t.dtype] for t in tensors],
        "patterns": patterns,
        "rank_grids": [ranks.tolist() for ranks in plan.rank_grids],
        "transfer_groups": [
            [
                b.group, b.pattern, b.pp_stage, b.src, b.dst,
                [[at.layer, at.vp_stage, at.local] for at in b.layers],
                b.experts, b.src_slot, b.dst_slot, b.first_src_replica, b.first_dst_replica,
            ]
            for b in plan.transfer_groups
        ],
        "misc": [[u.group, u.reason] for u in plan.misc],
        "excluded": [[u.group, u.reason] for u in plan.excluded],
        "relay": plan.relay,
        "pairs": [[p.weight, p.scales, p.block, p.touched] for p in plan.pairs],
        "casts": [[c.group, c.src, c.dst] for c in plan.casts],
    }  # fmt: skip


def _region(region: Region) -> tuple[tuple[int, ...], tuple[int, ...]]:
    return region.start, region.stop


def _mesh(mesh: TrainMesh | GenMesh) -> dict[str, Any]:
    return {name: getattr(mesh, name) for name in mesh.__dataclass_fields__}


def _check(value: Any, form: Any, where: str = "plan") -> None:
    """Raise TypeError unless a JSON value has a form, so that nothing later has to ask.

    A form is a type, [form] for a list of any length, (form, ...) for a list of that length, or {name: form}.
    """
    if isinstance(form, dict):
        if not isinstance(value, dict) or value.keys() != form.keys():
            raise TypeError(f"{where} does not have the fields {', '.join(form)}")
        for name in form:
            _check(value[name], form[name], name)
    elif isinstance(form, type):
        if type(value) is not form or (isinstance(value, int) and abs(value) > _LARGEST):
            raise TypeError(f"{value!r} in {where} where {_NAMES[form]} belongs")
    elif not isinstance(value, list) or (isinstance(form, tuple) and len(value) != len(form)):
        raise TypeError(f"{value!r} in {where} where a list{f' of {len(form)}' * isinstance(form, tuple)} belongs")
    else:
        for index, item in enumerate(value):
            _check(item, form[index] if isinstance(form, tuple) else form[0], where)


_LARGEST = 1 << 48
_NAMES = {int: "a number", str: "a text", bool: "true or false"}
_SIZES = [int]
_PIECE = (_SIZES, _SIZES, int, _SIZES, _SIZES, _SIZES, int)
_PARTITION = {"pieces": [[_PIECE]], "padding": [[(int, _SIZES, _SIZES)]]}
_FORM = {
    "model": str,
    "train": {**dict.fromkeys(TrainMesh.__dataclass_fields__, int), "layers": _SIZES},
    "gen": {**dict.fromkeys(GenMesh.__dataclass_fields__, int), "layers": _SIZES},
    "engine": str,
    "policy": str,
    "groups": [(str, str, _SIZES, str, _SIZES, int, _SIZES, bool)],
    "tensors": [(str, _SIZES, str)],
    "patterns": [{"src": _PARTITION, "dst": _PARTITION, "overlaps": [(int, int, int, int, _SIZES, _SIZES)]}],
    "rank_grids": [[_SIZES]],
    "transfer_groups": [(int, int, int, int, int, [(int, int, int)], (int, int), int, int, int, int)],
    "misc": [(int, str)],
    "excluded": [(int, str)],
    "relay": bool,
    "pairs": [(int, int, (int, int), bool)],
    "casts": [(int, str, str)],
}


def _decode(body: dict[str, Any]) -> Plan:
    tensors = [LocalTensor(name, tuple(shape), dtype) for name, shape, dtype in body["tensors"]]

    def partition(value: dict[str, Any]) -> Partition:
        return Partition(
            tuple(
                tuple(
                    Piece(Region(tuple(a), tuple(b)), tensors[t], tuple(origin), tuple(dims), tuple(view), slot)
                    for a, b, t, origin, dims, view, slot in pieces
                )
                for pieces in value["pieces"]
            ),
            tuple(
                tuple(Padding(tensors[t], Region(tuple(a), tuple(b))) for t, a, b in padding)
                for padding in value["padding"]
            ),
        )

    def unplanned(rows: list[Any]) -> tuple[UnplannedGroup, ...]:
        return tuple(UnplannedGroup(group, reason) for group, reason in rows)

    if body["policy"] not in get_args(Policy):
        raise ValueError(f"unknown policy {body['policy']!r}")
    try:
        train = TrainMesh(**{**body["train"], "layers": tuple(body["train"]["layers"])})
        gen = GenMesh(**{**body["gen"], "layers": tuple(body["gen"]["layers"])})
    except MeshError as error:
        raise ValueError(str(error)) from error
    return Plan(
        model=body["model"],
        train=train,
        gen=gen,
        engine=body["engine"],
        policy=body["policy"],
        groups=tuple(
            ParameterGroup(name_pattern, Role(role), tuple(shape), dtype, tuple(layers), experts, tuple(view), mtp)
            for name_pattern, role, shape, dtype, layers, experts, view, mtp in body["groups"]
        ),
        patterns=tuple(
            TransferPattern(
                partition(t["src"]),
                partition(t["dst"]),
                tuple(
                    Overlap(a, b, c, d, Region(tuple(start), tuple(stop))) for a, b, c, d, start, stop in t["overlaps"]
                ),
            )
            for t in body["patterns"]
        ),
        rank_grids=tuple(np.array(ranks, dtype=np.int32) for ranks in body["rank_grids"]),
        transfer_groups=tuple(
            TransferGroup(
                group,
                pattern,
                stage,
                src,
                dst,
                tuple(LayerPlace(*at) for at in layers),
                tuple(experts),
                s,
                d,
                *turns,
            )
            for group, pattern, stage, src, dst, layers, experts, s, d, *turns in body["transfer_groups"]
        ),
        misc=unplanned(body["misc"]),
        excluded=unplanned(body["excluded"]),
        relay=body["relay"],
        pairs=tuple(
            QuantizedPair(weight, scales, (rows, columns), touched)
            for weight, scales, (rows, columns), touched in body["pairs"]
        ),
        casts=tuple(GroupCast(group, src, dst) for group, src, dst in body["casts"]),
    )
