"""A second buffer for a rank's whole share: bytes land there, and are copied in once all members have everything.

    in place    trainer -> live tensors                                        a failure leaves a mixture
    staged      trainer -> staged tensors -> all have everything -> live       a failure before the copy leaves nothing

Refits of a session use the same buffers, also those of later epochs: they are as large as the rank's bound tensors, whoever
else takes part. `close` of the endpoint frees them. Whole tensors that move by name are kept on the CPU until the copy.
"""

from __future__ import annotations

from dataclasses import replace
from math import prod

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.tensors import byte_view
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.kernels.host import available_memory
from mcore_reshard.planner.plan.schedule import Schedule, is_carried

STAGED = "staged"  # the value of Options.commit, and the phase in which members say that they have everything
_GB = 1e9


class StagedTensors:
    """The buffers of one generation rank."""

    def __init__(self, rank_name: str) -> None:
        self._rank_name = rank_name
        self._buffers: dict[str, torch.Tensor] = {}
        self._live: dict[str, torch.Tensor] = {}
        self._fills: list[tuple[Schedule, dict[str, tuple[int, int]]]] = []  # by program; refits ask each time
        self.copied_bytes = 0  # of live tensors, that the last `copy_in` may have written

    @property
    def nbytes(self) -> int:
        return sum(buffer.nbytes for buffer in self._buffers.values())

    def take_place_of(self, live: BoundSchedule) -> BoundSchedule:
        """`live` with buffers in place of its tensors; it is fresh as long as the live tensors are.

        Raises `BindError` that says how much memory is missing.
        """
        self._live = {name: tensor for name, tensor in live.by_name.items() if not is_carried(name)}
        fitting = {name: buffer for name, buffer in self._buffers.items() if _fits(buffer, self._live.get(name))}
        self._buffers = fitting
        programs = (live.schedule, live.schedule.later)
        self._fills = [(schedule, _bytes_by_tensor(schedule)) for schedule in programs if schedule is not None]
        new = {name: tensor for name, tensor in self._live.items() if name not in fitting}
        for device in {tensor.device for tensor in new.values()}:
            needed = sum(tensor.nbytes for tensor in new.values() if tensor.device == device)
            require_memory(self._rank_name, device, needed, "a second buffer of the rank's weights")
        try:
            for name, tensor in new.items():
                self._buffers[name] = torch.empty_like(tensor, requires_grad=False)
                byte_view(self._buffers[name]).zero_()  # on a CPU, memory is taken only as it is written
        except torch.OutOfMemoryError as error:
            self.free()
            raise BindError(self._rank_name, [f"commit={STAGED!r}: {error}"]) from error
        # What the rank carries for others is not its own: it lands where it did.
        both = {**live.by_name, **self._buffers}
        return replace(live, tensors=tuple(both[local.name] for local in live.schedule.tensors))

    def begin(self, program: BoundSchedule) -> None:
        """Make ready for a program's transfers. Where they fill a tensor in part, its buffer gets the rest of it."""
        self.copied_bytes = 0
        with torch.inference_mode():
            for name in self._filled_in_part(program.schedule):
                _copy_bytes(self._live[name], self._buffers[name])

    def bytes_of(self, program: BoundSchedule) -> int:
        """How many bytes `copy_in` writes."""
        return sum(self._buffers[name].nbytes for name in self._filled(program.schedule))

    def copy_in(self, program: BoundSchedule) -> None:
        """Copy what has landed into the live tensors, on their device. When this returns, all streams see it."""
        with torch.inference_mode():
            for name in self._filled(program.schedule):
                self.copied_bytes += self._buffers[name].nbytes
                _copy_bytes(self._buffers[name], self._live[name])
        if program.device is not None and program.device.type == "cuda":
            torch.cuda.current_stream(program.device).synchronize()

    def free(self) -> None:
        self._buffers, self._live, self._fills = {}, {}, []

    def _filled(self, schedule: Schedule) -> list[str]:
        """The tensors into which a schedule's transfers or zeros go."""
        return [name for name, (filled, _) in self._fill_of(schedule).items() if filled]

    def _filled_in_part(self, schedule: Schedule) -> list[str]:
        """Those of them in which other bytes stay: of parameters that move by name, or that the trainer leaves frozen.

        A tensor that is counted too low is among them, which costs time but changes no byte.
        """
        return [name for name, (filled, whole) in self._fill_of(schedule).items() if 0 < filled != whole]

    def _fill_of(self, schedule: Schedule) -> dict[str, tuple[int, int]]:
        return next(fill for program, fill in self._fills if program is schedule)


def require_memory(rank_name: str, device: torch.device, needed: int, purpose: str) -> None:
    """Raise `BindError`, which says how much is missing, unless `device` has `needed` bytes free."""
    free = _free_bytes(device)
    if free is None or needed <= free:
        return
    problem = (
        f"commit={STAGED!r} needs {needed / _GB:.2f} GB on {device} for {purpose}, and {free / _GB:.2f} GB are free there:"
        f" {(needed - free) / _GB:.2f} GB are missing; free them, or give all ranks commit='in_place'"
    )
    raise BindError(rank_name, [problem])


def _free_bytes(device: torch.device) -> int | None:
    """Bytes that can be allocated on a device; None where nobody knows."""
    if device.type == "cpu":
        return available_memory()
    if device.type != "cuda":
        return None
    torch.cuda.empty_cache()  # what the allocator keeps for later counts as taken
    return int(torch.cuda.mem_get_info(device)[0])


def _bytes_by_tensor(schedule: Schedule) -> dict[str, tuple[int, int]]:
    """Of every tensor: (bytes that the trainer, other replicas and zeros fill, bytes of the tensor)."""
    filled = {local.name: 0 for local in schedule.tensors}
    hops = [schedule]
    if schedule.relayed and schedule.view is not None:
        hops += [relay.receives for relay in schedule.view.relays()]
    for hop in hops:
        received = np.zeros(len(hop.tensors), np.int64)
        for stage in hop.stages:
            np.add.at(received, stage.recvs.tensor, stage.recvs.nbytes)
        for local, nbytes in zip(hop.tensors, received.tolist(), strict=True):
            filled[local.name] = filled.get(local.name, 0) + nbytes
    itemsizes = {local.name: getattr(torch, local.dtype).itemsize for local in schedule.tensors}
    for tensor, _, strided_box in schedule.padding:
        name = schedule.tensors[tensor].name
        filled[name] += prod(strided_box.extents) * itemsizes[name]
    return {
        local.name: (filled[local.name], prod(local.shape) * itemsizes[local.name])
        for index, local in enumerate(schedule.tensors)
        if index not in schedule.carried
    }


def _fits(buffer: torch.Tensor, live: torch.Tensor | None) -> bool:
    return live is not None and (buffer.shape, buffer.dtype, buffer.device) == (live.shape, live.dtype, live.device)


def _copy_bytes(source: torch.Tensor, target: torch.Tensor) -> None:
    """Copy the bytes of a row-major tensor to another one of its shape and dtype."""
    byte_view(target).copy_(byte_view(source))
