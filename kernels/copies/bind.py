"""Bind a rank's schedule to its tensors: a table of strided copies per peer and stage, cut into buckets.

Binding checks everything first and touches no byte. What comes out needs no planner any more: executors walk the lanes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import prod

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.errors import BindError, TornWeightsError
from mcore_reshard.kernels.options import DEFAULT_BUCKET_BYTES
from mcore_reshard.planner.layout.geometry import row_major_strides
from mcore_reshard.planner.plan.schedule import Schedule, StageSchedule, TransferTable

from .buckets import check_bucket_bytes, cut, pack
from .casts import CastForm, Casts, band_copies, bound_casts, cast_problems
from .checks import itemsizes, tensor_problems, transfer_problems
from .copy_table import COPY, SCRATCH, StridedCopy, expand, strided_copies
from .tensors import Fingerprint, check_fresh

Ints = NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Bucket:
    """One message: copies `[first_copy, stop_copy)` of its lane; `nbytes` end with its last part."""

    first_copy: int
    stop_copy: int
    nbytes: int
    parameter: tuple[int, int]  # (transfer group, member) of the first transfer in it, for messages


@dataclass(frozen=True, slots=True)
class PeerCopies:
    """What passes between this rank and one peer in one stage and one direction, in the order both ends agree on.

    In `copies` (dtype COPY) base indices are those of `Schedule.tensors`, and SCRATCH is the bucket.
    """

    peer: int  # rank in the other world
    sends: bool
    copies: NDArray[np.void]
    buckets: tuple[Bucket, ...]


@dataclass(frozen=True, slots=True)
class BoundStage:
    pp_stage: int
    transfers: int
    nbytes: int  # without the padding between parts
    peer_copies: tuple[PeerCopies, ...]


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """How often live tensors have been written in place, as torch counts; writes through `.data` go uncounted.

    Of the live tensors themselves, not of those that are bound, which count the same: in a refit that looks at thousands,
    each object is a cache miss.
    """

    tensors: Sequence[torch.Tensor]
    counts: Sequence[int]

    @classmethod
    def of(cls, tensors: Sequence[torch.Tensor]) -> WriteCounts:
        try:
            return cls(tensors, [tensor._version for tensor in tensors])
        except RuntimeError:  # inference tensors count nothing
            return cls(tensors, [0 if tensor.is_inference() else tensor._version for tensor in tensors])


@dataclass(frozen=True, slots=True)
class BoundSchedule:
    """A schedule bound to live tensors. Valid as long as the tensors stay where they are: see `check_fresh`."""

    schedule: Schedule
    tensors: tuple[torch.Tensor, ...]  # in the order of Schedule.tensors, those that are computed allocated here
    casts: Casts
    fingerprints: Mapping[str, Fingerprint]  # of those that the model has, by name
    bucket_bytes: int
    stages: tuple[BoundStage, ...]

    @property
    def rank_name(self) -> str:
        return self.schedule.name

    @property
    def by_name(self) -> dict[str, torch.Tensor]:
        return {local.name: tensor for local, tensor in zip(self.schedule.tensors, self.tensors, strict=True)}

    @property
    def nbytes(self) -> int:
        return sum(stage.nbytes for stage in self.stages)

    @property
    def device(self) -> torch.device | None:
        """Where all bound tensors live; None if there are none."""
        return self.tensors[0].device if self.tensors else None

    def check_fresh(self, tensors: Mapping[str, torch.Tensor]) -> WriteCounts:
        """Raise `StaleTensorError` if a tensor of the live model no longer lies where it was bound.

        Returns how often each has been written by now.
        """
        return WriteCounts.of(check_fresh(self.rank_name, self.fingerprints, tensors))

    def check_unwritten(self, before: WriteCounts) -> None:
        """Raise `TornWeightsError` naming what was written since `check_fresh` returned `before`."""
        now = WriteCounts.of(before.tensors)
        if now.counts == before.counts:
            return
        names = zip(self.fingerprints, before.counts, now.counts, strict=True)
        written = [name for name, a, b in names if a != b]
        raise TornWeightsError(
            f"{self.rank_name}: {len(written)} tensors were written while they were read: {written[0]}"
        )

    def zero_padding(self) -> None:
        """Zero the elements of destination tensors that no parameter fills, such as a padded vocabulary's tail."""
        for tensor, offset, strided_box in self.schedule.padding:
            flat = self.tensors[tensor].detach().reshape(-1)
            flat.as_strided(strided_box.extents, strided_box.strides, flat.storage_offset() + offset).zero_()

    def parameter(self, bucket: Bucket) -> str:
        return self.schedule.parameter_name(*bucket.parameter)


def bind(
    schedule: Schedule, tensors: Mapping[str, torch.Tensor], *, bucket_bytes: int = DEFAULT_BUCKET_BYTES
) -> BoundSchedule:
    """Bind `schedule` to the rank's live `tensors` (by the names of `Schedule.tensors`).

    Raises `BindError` listing everything unbound, of another shape, dtype, stride or device, or out of bounds.
    `bucket_bytes` must be equal on all ranks.
    """
    check_bucket_bytes(bucket_bytes)
    if problems := [
        *tensor_problems(schedule, tensors),
        *(cast_problems(schedule) or transfer_problems(schedule)),
    ]:
        raise BindError(schedule.name, problems)
    scales = _allocated(schedule, tensors)
    bound = tuple(
        scales[n] if n in scales else tensors[local.name].detach() for n, local in enumerate(schedule.tensors)
    )
    recipes = CopyExpander(schedule, bucket_bytes)
    return BoundSchedule(
        schedule=schedule,
        tensors=bound,
        casts=bound_casts(schedule),
        fingerprints={
            local.name: Fingerprint.of(bound[n]) for n, local in enumerate(schedule.tensors) if n not in scales
        },
        bucket_bytes=bucket_bytes,
        stages=tuple(_bound_stage(stage, recipes) for stage in schedule.stages),
    )


def _allocated(schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> dict[int, torch.Tensor]:
    """The tensors that the trainer does not have, each on the device of the weight that it is computed from."""
    return {
        cast.scales: torch.zeros(
            schedule.tensors[cast.scales].shape,
            dtype=torch.float32,
            device=tensors[schedule.tensors[cast.tensor].name].device,
        )
        for cast in schedule.casts
        if cast.scales is not None
    }


def _bound_stage(stage: StageSchedule, recipes: CopyExpander) -> BoundStage:
    return BoundStage(
        pp_stage=stage.pp_stage,
        transfers=len(stage.sends) + len(stage.recvs),
        nbytes=int(stage.sends.nbytes.sum() + stage.recvs.nbytes.sum()),
        peer_copies=(*recipes.peer_copies(stage.sends, sends=True), *recipes.peer_copies(stage.recvs, sends=False)),
    )


@dataclass(frozen=True, slots=True)
class _Recipe:
    """How transfers of one geometry and element size become parts, and parts copies; offsets are the transfer's own."""

    segment_bytes: Ints
    segment_offsets: Ints  # bytes from the transfer's first element, in the local tensor
    segment_copies: Ints  # number of copies of each part
    copies: NDArray[np.void]  # of all parts; offsets from the part's beginning on both sides


@dataclass(frozen=True, slots=True)
class _Segments:
    """All parts of a table in wire order, peer by peer."""

    row: Ints  # of the table
    nbytes: Ints
    offsets: Ints  # bytes from the start of the local tensor
    kinds: Ints  # index into what `copies_of` expands

    def of(self, mine: slice) -> _Segments:
        return _Segments(self.row[mine], self.nbytes[mine], self.offsets[mine], self.kinds[mine])


class CopyExpander:
    """Expands whole tables at once: Python runs once per geometry and, where blocks are cast, place in a matrix, numpy
    once per transfer.
    """

    def __init__(self, schedule: Schedule, bucket_bytes: int) -> None:
        self._strided_boxes = schedule.strided_boxes
        self._itemsizes = itemsizes(schedule)
        self._bucket_bytes = bucket_bytes
        casts = bound_casts(schedule)
        self._forms = tuple({cast.form: None for cast in casts.values()})
        self._form_of = np.full(len(schedule.tensors), -1, np.int64)  # index into forms
        self._matrix = np.ones(len(schedule.tensors), np.int64)  # elements after which places repeat
        for tensor, cast in casts.items():
            self._form_of[tensor] = self._forms.index(cast.form)
            self._matrix[tensor] = max(1, prod(cast.form.matrix))

    def peer_copies(self, table: TransferTable, *, sends: bool) -> tuple[PeerCopies, ...]:
        if not len(table):
            return ()
        order = np.argsort(table.peer, kind="stable")
        tensor = table.tensor[order]
        itemsize = self._itemsizes[tensor]
        place = table.offset[order] % self._matrix[tensor]
        keys = np.stack([table.strided_box[order], itemsize, self._form_of[tensor], place])
        keys, recipe_of = np.unique(keys, axis=1, return_inverse=True)
        recipes = [self._recipe(*key, sends=sends) for key in keys.T.tolist()]
        owner, kinds = expand(recipe_of.reshape(-1), np.array([len(recipe.segment_bytes) for recipe in recipes]))
        row = order[owner]
        segments = _Segments(
            row=row,
            nbytes=np.concatenate([recipe.segment_bytes for recipe in recipes])[kinds],
            offsets=table.offset[row] * itemsize[owner]
            + np.concatenate([recipe.segment_offsets for recipe in recipes])[kinds],
            kinds=kinds,
        )
        copy_counts = np.concatenate([recipe.segment_copies for recipe in recipes])
        copies = np.concatenate([recipe.copies for recipe in recipes])
        peers, firsts = np.unique(table.peer[row], return_index=True)
        bounds = [*firsts.tolist(), len(row)]
        return tuple(
            self._peer_copies(peer, table, segments.of(slice(*bounds[n : n + 2])), copy_counts, copies, sends=sends)
            for n, peer in enumerate(peers.tolist())
        )

    def _peer_copies(
        self,
        peer: int,
        table: TransferTable,
        segments: _Segments,
        copy_counts: Ints,
        all_copies: NDArray[np.void],
        *,
        sends: bool,
    ) -> PeerCopies:
        starts, bucket_offsets = pack(segments.nbytes, self._bucket_bytes)
        owner, members = expand(segments.kinds, copy_counts)
        copies = all_copies[members]
        local, scratch = ("src", "dst") if sends else ("dst", "src")
        copies[local] = table.tensor[segments.row][owner]
        copies[local + "_offset"] += segments.offsets[owner]
        copies[scratch] = SCRATCH
        copies[scratch + "_offset"] += bucket_offsets[owner]

        bounds = np.append(starts, len(segments.row))
        last = bounds[1:] - 1
        first_copies = np.searchsorted(owner, bounds).tolist()
        named = segments.row[starts]
        parameters = zip(table.transfer_group[named].tolist(), table.member[named].tolist(), strict=True)
        nbytes = (bucket_offsets[last] + segments.nbytes[last]).tolist()
        return PeerCopies(peer, sends, copies, tuple(map(Bucket, first_copies, first_copies[1:], nbytes, parameters)))

    def _recipe(self, strided_box: int, itemsize: int, form: int, place: int, *, sends: bool) -> _Recipe:
        extents, strides = self._strided_boxes[strided_box].extents, self._strided_boxes[strided_box].strides
        cast = self._forms[form] if form >= 0 else None
        wire_itemsize = cast.to_bytes if cast else itemsize
        segments = cut(extents, wire_itemsize, self._bucket_bytes)
        starts = [sum(at * stride for at, stride in zip(segment.start, strides, strict=True)) for segment in segments]
        if cast:
            copies = [
                _cast_copies(cast, place + start, segment.extents, strides)
                for segment, start in zip(segments, starts, strict=True)
            ]
        else:
            copies = [_copies_of(segment.extents, strides, itemsize, sends=sends) for segment in segments]
        return _Recipe(
            segment_bytes=np.array([prod(segment.extents) * wire_itemsize for segment in segments], np.int64),
            segment_offsets=np.array(starts, np.int64) * itemsize,
            segment_copies=np.array(list(map(len, copies)), np.int64),
            copies=np.concatenate(copies) if copies else np.empty(0, COPY),
        )


def _copies_of(extents: tuple[int, ...], strides: tuple[int, ...], itemsize: int, *, sends: bool) -> NDArray[np.void]:
    """A part's copies between its place in the local tensor and its packed bytes, with both offsets relative."""
    packed = row_major_strides(extents)
    src, dst = (strides, packed) if sends else (packed, strides)
    return _records(strided_copies(extents, src, dst, itemsize))


def _cast_copies(form: CastForm, place: int, extents: tuple[int, ...], strides: tuple[int, ...]) -> NDArray[np.void]:
    """The same for a part that is cast when it is sent, from `place` elements into a matrix on."""
    if form.block != (0, 0):
        return _records(band_copies(form, place, extents, strides))
    packed = row_major_strides(extents)
    return _records(strided_copies(extents, strides, packed, form.to_bytes, src_itemsize=form.src_bytes))


def _records(copies: Sequence[StridedCopy]) -> NDArray[np.void]:
    return np.array(
        [(0, 0, c.src_offset, c.dst_offset, c.extents, c.src_strides, c.dst_strides, c.row_bytes) for c in copies],
        COPY,
    )
