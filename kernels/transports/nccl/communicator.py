"""One NCCL communicator that never blocks: its caller polls against a deadline, and can abort.

It uses NVIDIA's own binding (nccl4py) of the library that torch has loaded. torch's own process group will not do: its
watchdog ends the process after a timeout, and a trainer must outlive its generator.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, NamedTuple

import torch

from mcore_reshard.kernels.errors import PeerLostError, TransferError, Waiting, first_of
from mcore_reshard.kernels.transports.base import gpu_unavailable_reason

if TYPE_CHECKING:
    from nccl.core import Communicator


class Payload(NamedTuple):
    """A message as NCCL takes it."""

    member: int  # the peer's rank in the communicator
    sends: bool
    content: torch.Tensor  # contiguous, uint8 [nbytes]


class NcclError(TransferError):
    """NCCL reported an error; the communicator is of no further use."""


def nccl_unavailable_reason() -> str | None:
    """Why NCCL cannot be used on this machine; None if it can."""
    return gpu_unavailable_reason("nccl4py", "cuda-core", "cuda-bindings")


def new_unique_id() -> bytes:
    """The id that the members of a new communicator must share, 128 bytes."""
    from nccl.core import get_unique_id

    return bytes(get_unique_id())


class NcclCommunicator:
    """A member of a communicator, on the current device. It connects in the background: poll `is_idle`."""

    def __init__(
        self, unique_id: bytes, member: int, members: int, waiting: Waiting, *, most_ctas: int | None = None
    ) -> None:
        from nccl.bindings import nccl as bindings
        from nccl.core import Communicator, NCCLConfig, UniqueId

        self._bindings = bindings
        self._communicator: Communicator | None
        try:
            config = NCCLConfig(blocking=False, max_ctas=most_ctas)
            self._communicator = Communicator.init(members, member, UniqueId.from_bytes(unique_id), config)
        except bindings.NCCLError as error:
            raise NcclError(waiting, f"NCCL could not connect {members} ranks: {error}") from error

    def is_idle(self, waits: Sequence[Waiting]) -> bool:
        """Whether the last start has been handed to the device.

        Raises `NcclError` if it failed, and `PeerLostError` if a peer is to blame: any of `waits`, NCCL does not say which.
        """
        results = self._bindings.Result
        result = self._open(waits[0]).get_async_error()
        if result in (results.Success, results.InProgress):
            return bool(result == results.Success)
        said = self._open(waits[0]).get_last_error()
        reason = f"NCCL: {self._bindings.get_error_string(result)}" + (f" ({said})" if said else "")
        if result != results.RemoteError:
            raise NcclError(waits[0], reason)
        if len(waits) > 1:
            reason += f"; it may be any of {', '.join(waiting.peer for waiting in waits)}"
        raise first_of([PeerLostError(waiting, reason) for waiting in waits])

    def start(self, payloads: Iterable[Payload], stream: torch.cuda.Stream, waiting: Waiting) -> None:
        """Queue messages on `stream`, as one group: one kernel sends and receives all of them at once.

        A member that gets several takes them in the order in which it was sent them.
        """
        # The binding's lower layer: the upper one examines every tensor again in each refit.
        nccl, communicator, handle = self._bindings, self._bindings.Comm(self._open(waiting).ptr), stream.cuda_stream
        try:
            nccl.group_start()
            try:
                for member, sends, content in payloads:
                    move = nccl.send if sends else nccl.recv
                    move(content.data_ptr(), content.numel(), nccl.DataType.Uint8, member, communicator, handle)
            finally:
                nccl.group_end()
        except nccl.NCCLError as error:
            raise NcclError(waiting, f"NCCL: {error}") from error

    def abort(self) -> None:
        """End everything under way and free it. Waits for the device, and for CUDA graphs with messages of it to go."""
        communicator, self._communicator = self._communicator, None
        if communicator is not None:
            with suppress(self._bindings.NCCLError):
                communicator.abort()

    def _open(self, waiting: Waiting) -> Communicator:
        if self._communicator is None:
            raise NcclError(waiting, "the communicator has been closed")
        return self._communicator
