"""Plan the casts of the direct transport: which weights go through slots at the source, in which round, and where.

Cast bytes lie nowhere until the source casts. So the source casts into a slot, the reader pulls from there, and the slot is
reused; the whole model is never held twice. A round of a source (see `rounds`) fills one slot:

    to gen:0  buckets a0 a1 a2        round 0, slot 0: a0 b0        slot 0 again: a2
    to gen:1  buckets b0 b1           round 1, slot 1: a1 b1

Readers that copy engines help take one source after the other (see `turns`). A source then casts for one of them at a time:

    to gen:0  in turn 0               round 0, slot 0: a0           round 1, slot 1: a1         slot 0 again: a2
    to gen:1  in turn 1               round 3, slot 1: b0           round 4, slot 0: b1

The source tells its readers how large its buckets are, where in a slot each reader's bucket begins, and which slot has a
reader's first. Both ends know the rest, since buckets depend on the transfers alone. A reader takes round k of all the
sources that it reads in one turn together.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket, aligned, cut_buckets
from mcore_reshard.kernels.errors import BindError, SessionError
from mcore_reshard.kernels.transports.rounds import bucket_bytes_within, in_rounds
from mcore_reshard.planner.plan.schedule import OtherEndView, Schedule, TransferTable

SLOTS = 2  # one is cast into while the other one is read
PushedPart = Literal["nothing", "casts", "all"]
PUSHED_PARTS: tuple[PushedPart, ...] = get_args(PushedPart)
PUSHED_TILE_BYTES = 256 << 10  # of what a source writes straight into its readers' memory


@dataclass(frozen=True, slots=True)
class SlotPlan:
    """How a source divides its slots among its readers."""

    bucket_bytes: int
    slot_bytes: int
    places: Mapping[int, int]  # by reader: where its bucket begins in a slot
    first: Mapping[int, int]  # by reader: the round that has its first bucket


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


def what_is_pushed(*, is_mutual: bool, by_engine: bool) -> PushedPart:
    """What training ranks push to a reader, as far as they may write its memory; it pulls everything else.

    Everything where GPUs would read each other, since they have ranks of both sides. Two GPUs write to each other at 356 GB/s by
    kernels, and read at 337. On two H100s, Qwen3-30B took 41.2 ms in place of 43.3, and in FP8 22.1 in place of 23.7.
    Otherwise casts. But these go through slots to a reader that a copy engine helps with all its sources. Between two H200s it
    moves 390 GB/s with the kernel beside it, between two H100s and two others 380; a kernel that casts and writes moves 367.
    """
    if is_mutual:
        return "all"
    return "nothing" if by_engine else "casts"


def divided_by_way(
    plain: Schedule, cast: Schedule, said: Mapping[int, PushedPart]
) -> tuple[Schedule, Schedule, tuple[Schedule, Schedule]]:
    """(what others pull out of a source's memory, what it casts into slots, what it pushes of both parts).

    `said` is what each of its readers wants to be pushed.
    """

    def to(*ways: PushedPart) -> list[int]:
        return [peer for peer, pushed in said.items() if pushed in ways]

    pushed = plain.with_peers(to("all")), cast.with_peers(to("all", "casts"))
    return plain.with_peers(to("nothing", "casts")), cast.with_peers(to("nothing")), pushed


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


def divide_slots(
    schedule: Schedule, scratch_bytes: int, turns: Mapping[int, int]
) -> tuple[SlotPlan, list[tuple[Bucket, ...]]]:
    """A source's slots, and the buckets of each round. `schedule` has casts alone, `turns` those in which its readers read it.

    ValueError if no element fits.
    """
    if not schedule.peers:
        return SlotPlan(0, 0, {}, {}), []
    together = by_turn({peer: turns[peer] for peer in schedule.peers})
    bucket_bytes = bucket_bytes_within(scratch_bytes, max(map(len, together)), SLOTS)
    buckets = cut_buckets(schedule, bucket_bytes)
    rounds: list[tuple[Bucket, ...]] = []
    places: dict[int, int] = {}
    first: dict[int, int] = {}
    slot_bytes = 0
    for peers in together:
        of_peer = {peer: tuple(bucket for bucket in buckets if bucket.peer == peer) for peer in peers}
        end = 0
        for peer, of_one in of_peer.items():
            places[peer], first[peer] = end, len(rounds)
            end += aligned(max((bucket.nbytes for bucket in of_one), default=0))
        slot_bytes = max(slot_bytes, end)
        rounds += in_rounds(of_peer)
    return SlotPlan(bucket_bytes, slot_bytes, places, first), rounds


def by_turn(turns: Mapping[int, int]) -> list[list[int]]:
    """The peers of each turn, in order: {0: 1, 1: 0, 2: 1} -> [[1], [0, 2]]."""
    return [sorted(peer for peer in turns if turns[peer] == turn) for turn in sorted({*turns.values()})]
