"""Which pairs of ranks can read each other's GPU memory, found out together: both ends of a pair must choose alike.

A generation rank reaches a training rank if both run on one host, it sees the other's GPU (CUDA_VISIBLE_DEVICES may
hide it), the two GPUs can access each other and the training rank's memory can be exported. Pairs named in the
environment variable MCORE_RESHARD_UNREACHABLE of the generation rank, as in `train:0-gen:1,relay:1-gen:0`, are out of
reach whatever the hardware says, also where no such ranks exchange bytes: that is how several hosts are simulated on one.
"""

from __future__ import annotations

import os
import re
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.host import host
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.planner.plan.schedule import Schedule

UNREACHABLE_VARIABLE = "MCORE_RESHARD_UNREACHABLE"
_NUMBER = "(0|[1-9][0-9]*)"
_PAIR = re.compile(f"(train|relay):{_NUMBER}-gen:{_NUMBER}")


@dataclass(frozen=True, slots=True)
class RankPair:
    """Two ranks that exchange bytes, or would. `src` is a training rank, or a generation rank that relays."""

    src: int
    dst: int
    relays: bool

    def __str__(self) -> str:
        return f"{'relay' if self.relays else 'train'}:{self.src}-gen:{self.dst}"


def unavailable_reasons_by_pair(
    exchange: StoreExchange,
    bound: BoundSchedule,
    direct_unavailable_reason: str | None,
    *,
    sources: Collection[int],
    relays: Collection[int],
) -> dict[RankPair, str | None]:
    """Why pairs cannot share memory; None where they can. All ranks call this together and get the pairs of all.

    A generation rank asks for the training ranks `sources` and the replicas `relays`; a training rank asks for none.
    `direct_unavailable_reason` says why this rank can share memory with nobody. Raises `TransportUnavailable` on all ranks
    if MCORE_RESHARD_UNREACHABLE of any rank has a word that is no pair.
    """
    schedule = bound.schedule
    seats = exchange.gather("seat", _seat(bound, direct_unavailable_reason), _parse_seat)
    if wrong := sorted({word for seat in seats for word in seat["malformed"]}):
        raise TransportUnavailable(
            f"{UNREACHABLE_VARIABLE} has {', '.join(map(repr, wrong))}: pairs are written train:0-gen:1 or relay:1-gen:0,"
            " with commas between them"
        )
    asked = [RankPair(src, schedule.rank, False) for src in sorted(sources)]
    asked += [RankPair(src, schedule.rank, True) for src in sorted(relays)]
    own_pairs = [
        (
            pair.src,
            pair.dst,
            pair.relays,
            _pair_unavailable_reason(seats[_seat_number(schedule, pair)], direct_unavailable_reason, bound, pair),
        )
        for pair in asked
    ]
    return dict(reason for pairs in exchange.gather("reach", own_pairs, _parse_pairs) for reason in pairs)


def _seat_number(schedule: Schedule, pair: RankPair) -> int:
    return schedule.train_ranks + pair.src if pair.relays else pair.src


def _seat(bound: BoundSchedule, direct_unavailable_reason: str | None) -> dict[str, Any]:
    """Where this rank is, and why others cannot read its memory."""
    schedule, unavailable_reason = bound.schedule, direct_unavailable_reason
    if unavailable_reason is None and (schedule.world == "train" or schedule.relayed):
        unavailable_reason = _export_unavailable_reason(bound)
    malformed = [word for word in _declared() if not _PAIR.fullmatch(word)]
    return {
        "unavailable_reason": unavailable_reason,
        "host": host(),
        "gpu": gpu_of(bound.device),
        "malformed": malformed,
    }


def _parse_seat(seat: Any) -> dict[str, Any]:
    reason, malformed = seat["unavailable_reason"], [str(word) for word in seat["malformed"]]
    return {
        "unavailable_reason": None if reason is None else str(reason),
        "host": str(seat["host"]),
        "gpu": str(seat["gpu"]),
        "malformed": malformed,
    }


def _parse_pairs(pairs: Any) -> list[tuple[RankPair, str | None]]:
    return [
        (RankPair(int(src), int(dst), bool(relays)), None if why is None else str(why))
        for src, dst, relays, why in pairs
    ]


def _export_unavailable_reason(bound: BoundSchedule) -> str | None:
    if not gpu_of(bound.device):
        return None
    from mcore_reshard.kernels.cuda.ipc import export  # needs CUDA's Python packages

    try:
        export(bound.by_name)
    except TransportUnavailable as error:
        return str(error)
    return None


def _pair_unavailable_reason(
    there: Mapping[str, Any], direct_unavailable_reason: str | None, bound: BoundSchedule, pair: RankPair
) -> str | None:
    here = gpu_of(bound.device)
    if str(pair) in _declared():
        return f"declared in {UNREACHABLE_VARIABLE}"
    if why := there["unavailable_reason"] or direct_unavailable_reason:
        return str(why)
    if there["host"] != host():
        return "on different hosts"
    if there["gpu"] == here:
        return None
    uuids = [gpu_of(device) for device in range(torch.cuda.device_count())]
    if there["gpu"] not in uuids:
        return "the reader does not see the other's GPU (CUDA_VISIBLE_DEVICES)"
    if not torch.cuda.can_device_access_peer(uuids.index(here), uuids.index(there["gpu"])):
        return "the two GPUs cannot access each other"
    return None


def _declared() -> set[str]:
    return {pair.strip() for pair in os.environ.get(UNREACHABLE_VARIABLE, "").split(",") if pair.strip()}
