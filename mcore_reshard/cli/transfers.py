"""Transfers as `show` and `explain` print them: the same words for both ends, each command with its own columns."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from mcore_reshard.planner.plan.transfers import Place, Transfer

from .render import Cell

_ELEMENT = "world rank tensor shape dtype index offset byte_offset"


def transfer_as_dict(transfer: Transfer) -> dict[str, Any]:
    """One row of `show --parameter --json`."""
    if transfer.route != "bulk":
        return _as_dict(transfer, "parameter route reason bytes", "")
    keys = "parameter route pp_stage view region bytes src dst relayed_by"
    return _as_dict(transfer, keys, "rank tensor shape dtype offset strides")


def origin_as_dict(transfer: Transfer) -> dict[str, Any]:
    """One of the `origins` of `explain --json`."""
    return _as_dict(transfer, "parameter index route reason pp_stage region src dst relayed_by view", _ELEMENT)


def _as_dict(transfer: Transfer, keys: str, place_keys: str) -> dict[str, Any]:
    values = {
        "index": transfer.element or (),
        "bytes": transfer.nbytes,
        "region": transfer.region and asdict(transfer.region),
        "src": place_as_dict(transfer.src, place_keys),
        "dst": place_as_dict(transfer.dst, place_keys),
        "view": transfer.view if transfer.parameter else None,
    }
    return {key: values[key] if key in values else getattr(transfer, key) for key in keys.split()}


def place_as_dict(place: Place | None, keys: str = _ELEMENT) -> dict[str, Any] | None:
    """One end of a transfer, or one of the `holders` of `explain --json`."""
    return None if place is None else {key: getattr(place, key) for key in keys.split()}


def tensor_lines(transfer: Transfer) -> Iterator[tuple[str, Cell]]:
    """The local tensors at both ends, as far as the transfer has any."""
    for title, place in (("trainer tensor", transfer.src), ("engine tensor", transfer.dst)):
        if place is not None:
            yield title, f"{place.tensor}  {place.dtype} {list(place.shape)}"


def tensors_of(transfer: Transfer) -> list[str]:
    """The names of the local tensors, of both ends where there are two."""
    return [place.tensor for place in (transfer.src, transfer.dst) if place is not None]


def sender(transfer: Transfer) -> str:
    """`train:1`, or `train:1 via gen:0` where a replica passes it on."""
    return rank_name(transfer.src) + ("" if transfer.relayed_by is None else f" via gen:{transfer.relayed_by}")


def rank_name(place: Place | None) -> str:
    return "-" if place is None else f"{place.world}:{place.rank}"


def offset(place: Place | None) -> Cell:
    return "" if place is None else place.offset
