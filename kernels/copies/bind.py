"""Bind a rank's schedule to its live tensors: check everything first, touch no byte.

Transports then cut it into buckets (`cut_buckets`), or make a table of what they pull or push (`peer_table`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import torch

from mcore_reshard.kernels.errors import BindError, StaleTensorError, TornWeightsError
from mcore_reshard.planner.plan.schedule import Schedule, StageSchedule, is_carried

from .carried import carried_places
from .casts import Casts, bound_casts, cast_problems
from .checks import tensor_problems, transfer_problems, unfilled_tensors, unnamed_transfers
from .tensors import Fingerprint

_SAMPLED_TENSORS = 256


@dataclass(frozen=True, slots=True)
class StageTotals:
    """Totals of a rank's transfers in one stage."""

    pp_stage: int
    transfers: int
    nbytes: int

    @classmethod
    def of(cls, stage: StageSchedule) -> StageTotals:
        nbytes = int(stage.sends.nbytes.sum() + stage.recvs.nbytes.sum())
        return cls(stage.pp_stage, len(stage.sends) + len(stage.recvs), nbytes)


@dataclass(frozen=True, slots=True)
class WriteCounts:
    """How often live tensors have been written in place. torch counts, and views count with their base.

    It does not see writes through `.data`, nor writes to a flat buffer that `param.data` was pointed into:
    `source_checks` finds those.

    The model's own tensors are read, not the detached ones that are bound. Both count alike, and each further object
    costs a refit a cache miss.
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
    tensors: tuple[torch.Tensor, ...]  # in the order of Schedule.tensors; scales that casts compute are allocated here
    casts: Casts
    fingerprints: Mapping[str, Fingerprint]  # of the tensors that the model has, by name
    stages: tuple[StageTotals, ...]

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

    def part(self, schedule: Schedule) -> BoundSchedule:
        """Another schedule of the same rank, bound to some of the same tensors, with scales of its own.

        Raises `BindError` for transfers that do not fit.
        """
        if problems := unnamed_transfers(schedule) or cast_problems(schedule) or transfer_problems(schedule):
            raise BindError(schedule.name, problems)
        if (schedule.tensors, schedule.computed) == (self.schedule.tensors, self.schedule.computed):
            return self._with(schedule)
        return _bind_unchecked(schedule, self.by_name)

    def rows(self, schedule: Schedule) -> BoundSchedule:
        """The same schedule with some of its transfers, bound to the same tensors, scales among them."""
        totals = tuple(map(StageTotals.of, schedule.stages))
        return replace(self, schedule=schedule, casts=bound_casts(schedule), stages=totals)

    def again(self, schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> BoundSchedule | None:
        """The rank's schedule among other replicas, bound to the same live `tensors`: only its transfers are checked.

        None where the tensors must be bound anew: the schedule names others, or some have moved. Scales that casts compute
        are allocated anew: a refit that failed may still write those of before. Raises `BindError` as `bind` does.
        """
        before = self.schedule
        if (schedule.tensors, schedule.casts, schedule.computed) != (before.tensors, before.casts, before.computed):
            return None
        try:
            self.check_fresh(tensors)
        except StaleTensorError:
            return None
        problems = unnamed_transfers(schedule) or [
            *unfilled_tensors(schedule, tensors),
            *(cast_problems(schedule) or transfer_problems(schedule)),
        ]
        if problems:
            raise BindError(schedule.name, problems)
        return self._with(schedule)

    def check_fresh(self, tensors: Mapping[str, torch.Tensor]) -> WriteCounts:
        """Raise `StaleTensorError` unless every tensor of the live model still lies where it was bound.

        Returns how often each has been written by now. Every refit checks thousands of tensors, so the check is the
        least that suffices. A tensor on another device has another address. A tensor with other strides is no longer
        row-major, as all bound tensors are (see `misfits`).
        """
        stale: list[str] = []
        live: list[torch.Tensor] = []
        for name, (address, shape, _, dtype, _) in self.fingerprints.items():
            tensor = tensors.get(name)
            if tensor is None:
                stale.append(f"{name}: it is gone")
                continue
            live.append(tensor)
            if (
                tensor.data_ptr() != address
                or tensor.shape != shape
                or tensor.dtype is not dtype
                or not tensor.is_contiguous()
            ):
                stale.append(f"{name}: {self.fingerprints[name].changes(tensor)}")
        if stale:
            title = f"{self.rank_name}: {len(stale)} bound tensors changed since prepare():"
            remedy = "keep weights where they were bound, or close this rank and connect it again"
            raise StaleTensorError("\n  ".join((title, *stale, remedy)))
        return WriteCounts.of(live)

    def check_in_place(self, tensors: Sequence[torch.Tensor]) -> None:
        """Raise `StaleTensorError` unless a sample of `tensors`, those that `check_fresh` saw last, lies where it was bound.

        For a rank that is read, before anybody reads: an offload moves all tensors, so 256 tell. `check_fresh` looks at
        all of them while bytes move: 12,627 tensors take it 24 ms, and the addresses of all would take 10 ms here.
        """
        step = max(1, len(tensors) // _SAMPLED_TENSORS)
        bound = list(self.fingerprints.values())[::step]
        if [tensor.data_ptr() for tensor in tensors[::step]] != [fingerprint.address for fingerprint in bound]:
            self.check_fresh(dict(zip(self.fingerprints, tensors, strict=True)))

    def check_unwritten(self, before: WriteCounts) -> None:
        """Raise `TornWeightsError` naming what was written since `check_fresh` returned `before`."""
        now = WriteCounts.of(before.tensors)
        if now.counts == before.counts:
            return
        counts = zip(self.fingerprints, before.counts, now.counts, strict=True)
        tensors = [name for name, count_before, count_now in counts if count_before != count_now]
        raise TornWeightsError(
            f"{self.rank_name}: {len(tensors)} tensors were written while they were read: {tensors[0]};"
            " change weights only after refit() has returned"
        )

    def _with(self, schedule: Schedule) -> BoundSchedule:
        """Another schedule of the same tensors, with scales of its own."""
        computed = {*schedule.computed}
        tensors = tuple(
            torch.zeros_like(each) if index in computed else each for index, each in enumerate(self.tensors)
        )
        totals = tuple(map(StageTotals.of, schedule.stages))
        return BoundSchedule(schedule, tensors, bound_casts(schedule), self.fingerprints, totals)

    def zero_padding(self) -> None:
        """Zero the elements of destination tensors that no parameter fills, such as a padded vocabulary's tail."""
        for tensor, offset, strided_box in self.schedule.padding:
            flat = self.tensors[tensor].detach().reshape(-1)
            flat.as_strided(strided_box.extents, strided_box.strides, flat.storage_offset() + offset).zero_()


def bind(schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> BoundSchedule:
    """Bind `schedule` to the rank's live `tensors` (by the names of `Schedule.tensors`).

    Raises `BindError` listing everything unbound, of another shape, dtype, stride or device, or out of bounds.
    """
    problems = unnamed_transfers(schedule) or [
        *tensor_problems(schedule, tensors),
        *(cast_problems(schedule) or transfer_problems(schedule)),
    ]
    if problems:
        raise BindError(schedule.name, problems)
    return _bind_unchecked(schedule, tensors)


def _bind_unchecked(schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> BoundSchedule:
    weight_of = {cast.scales: schedule.tensors[cast.tensor] for cast in schedule.casts}  # by tensor of scales
    if carried := _allocate_carried(schedule, tensors):
        tensors = {**tensors, **carried}
    bound: list[torch.Tensor] = []
    fingerprints: dict[str, Fingerprint] = {}
    for index, local in enumerate(schedule.tensors):
        if index in weight_of:
            device = tensors[weight_of[index].name].device
            bound.append(torch.zeros(local.shape, dtype=torch.float32, device=device))
        else:
            bound.append(tensors[local.name].detach())
            if index not in schedule.carried:
                fingerprints[local.name] = Fingerprint.of(bound[-1])
    totals = tuple(map(StageTotals.of, schedule.stages))
    return BoundSchedule(schedule, tuple(bound), bound_casts(schedule), fingerprints, totals)


def _allocate_carried(schedule: Schedule, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """The tensors in which the rank carries for others, beside its own. {} where `tensors` has them, or there are none.

    Those of another program of the rank may lie in the same memory: programs take turns.
    """
    if all(schedule.tensors[index].name in tensors for index in schedule.carried):
        return {}
    begins, nbytes = carried_places(schedule)
    known = next((tensor for name, tensor in tensors.items() if is_carried(name)), None)
    if known is not None and known.untyped_storage().nbytes() >= nbytes:
        memory = torch.empty(0, dtype=torch.uint8, device=known.device).set_(known.untyped_storage())  # type: ignore[call-overload]
    else:
        own = (local.name for index, local in enumerate(schedule.tensors) if index not in schedule.carried)
        device = next((tensors[name].device for name in own if name in tensors), torch.device("cpu"))
        memory = torch.empty(nbytes, dtype=torch.uint8, device=device)
    found: dict[str, torch.Tensor] = {}
    for index, begin in begins.items():
        local = schedule.tensors[index]
        dtype = getattr(torch, local.dtype)
        found[local.name] = memory[begin : begin + prod(local.shape) * dtype.itemsize].view(dtype).view(local.shape)
    return found
