"""Plan the casts of the direct transport: which weights go through slots at the source, in which round, and where.

Cast bytes lie nowhere until the source casts. So the source casts into a slot, the reader pulls from there, and the slot is
reused; the whole model is never held twice. A round of a source (see `rounds`) fills one slot:

    to gen:0  buckets a0 a1 a2        round 0, slot 0: a0 b0        slot 0 again: a2
    to gen:1  buckets b0 b1           round 1, slot 1: a1 b1

The source tells its readers how large its buckets are, and where in a slot each reader's bucket begins. Both ends know
the rest, since buckets depend on the transfers alone. A reader takes round k of all its sources together.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket, aligned, cut_buckets
from mcore_reshard.kernels.copies.casts import Casts
from mcore_reshard.kernels.errors import BindError, SessionError
from mcore_reshard.kernels.transports.rounds import bucket_bytes_within
from mcore_reshard.planner.plan.schedule import OtherEndView, Schedule, TransferTable

SLOTS = 2  # one is cast into while the other one is read
PUSHED_TILE_BYTES = 256 << 10  # of what a source writes straight into its readers' memory


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How a source divides its slots among its readers."""

    bucket_bytes: int
    slot_bytes: int
    places: Mapping[int, int]  # by reader: where its bucket begins in a slot


def with_other_end(schedule: Schedule) -> Schedule:
    """A generation rank's schedule with its other end computed: filters of it need not do so again."""
    if schedule.world == "train" or schedule.view is None:
        return schedule
    return replace(schedule, view=OtherEndView(schedule.view.other_end(), schedule.view))


def parted(schedule: Schedule) -> tuple[Schedule, Schedule]:
    """(transfers of bytes as they lie at their sources, those that are cast and their scales, in the order of `_by_tensor`).

    Both ends agree.
    """
    if schedule.world == "train":
        cast = np.array([entry.tensor for entry in schedule.casts], np.int64)
        sources = [stage.sends.tensor for stage in schedule.stages]
        casts = [np.isin(tensor, cast) for tensor in sources]
        computed = [np.isin(tensor, schedule.computed) for tensor in sources]
    elif schedule.view is None:
        raise SessionError(f"{schedule.name}: this schedule does not say where its bytes lie at their sources")
    else:
        other_end = schedule.view.other_end()
        if [len(stage.recvs) for stage in schedule.stages] != [len(table) for table in other_end.stages]:
            raise BindError(schedule.name, ["the pulls are not those of the transfers received"])
        src_dtypes = np.array([local.dtype for local in other_end.tensors], object)
        dst_dtypes = np.array([local.dtype for local in schedule.tensors], object)
        sources = [table.tensor for table in other_end.stages]
        casts = [
            np.asarray(src_dtypes[table.tensor] != dst_dtypes[stage.recvs.tensor], bool)
            for stage, table in zip(schedule.stages, other_end.stages, strict=True)
        ]
        computed = [np.isin(table.transfer_group, [*other_end.computed]) for table in other_end.stages]
    cast_rows = [_by_tensor(*each) for each in zip(schedule.tables, sources, casts, computed, strict=True)]
    plain = [~(cast | scales) for cast, scales in zip(casts, computed, strict=True)]
    return schedule.with_rows(plain), schedule.with_rows(cast_rows)


def has_slots(cast: Schedule, *, checksums: bool, by_engine: bool) -> bool:
    """Whether casts go through slots although readers' memory can be mapped.

    They do for readers that pass them on or sum what they read, and for readers all of whose bytes a copy engine may read.
    Between two H200s it moves 390 GB/s with the kernel beside it, where a kernel that casts and writes moves 367. Other
    numbers of GPUs were not measured.
    """
    return cast.relayed or checksums or by_engine


def _by_tensor(
    table: TransferTable, source: NDArray[np.int32], cast: NDArray[np.bool_], scales: NDArray[np.bool_]
) -> NDArray[np.int64]:
    """The transfers that are `cast`, those of one tensor at the source together, expert by expert, then `scales`.

        gate and up projections, both of linear_fc1     gate 0, up 0, gate 1, up 1, ...

    So they lie in a slot as an engine's w13 has them, and are pulled in few large copies. Both ends order them alike.
    """
    rows = np.flatnonzero(cast | scales)
    peer, group, member = (column[rows] for column in (table.peer, table.transfer_group, table.member))
    _, tensor = np.unique(np.stack([peer, source[rows]]), axis=1, return_inverse=True)
    tensor = tensor.reshape(-1)
    first = np.full(len(rows), np.iinfo(np.int64).max)  # the first group of each tensor and peer
    np.minimum.at(first, tensor, group)
    return rows[np.lexsort((group, member, first[tensor], scales[rows]))]


def new_weights(rounds: Iterable[NDArray[np.void]], casts: Casts) -> Iterator[list[int]]:
    """For each of a source's `rounds` of copies: weights that it casts and no earlier one does, as indices of tensors.

    Their scales are computed in that round. They are sent in it, or later: a source sends no scales without their weight.
    """
    seen: set[int] = set()
    for copies in rounds:
        weights = {*np.unique(copies["src"]).tolist()} & casts.keys()
        yield sorted(weights - seen)
        seen |= weights


def divide_slots(schedule: Schedule, scratch_bytes: int) -> tuple[SlotPlan, dict[int, tuple[Bucket, ...]]]:
    """A source's slots, and the buckets of each reader. `schedule` has casts alone. ValueError if no element fits."""
    peers = sorted(schedule.peers)
    if not peers:
        return SlotPlan(0, 0, {}), {}
    bucket_bytes = bucket_bytes_within(scratch_bytes, len(peers), SLOTS)
    buckets = cut_buckets(schedule, bucket_bytes)
    of_peer = {peer: tuple(bucket for bucket in buckets if bucket.peer == peer) for peer in peers}
    largest = [aligned(max((bucket.nbytes for bucket in of_peer[peer]), default=0)) for peer in peers]
    places = (np.cumsum(largest) - largest).tolist()
    return SlotPlan(bucket_bytes, sum(largest), dict(zip(peers, places, strict=True))), of_peer
