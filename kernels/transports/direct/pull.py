"""One launch of a rank that pulls: the copy engine takes large copies from other GPUs, a kernel everything else.

58 GB of whole experts    the copy engine takes 55 GB, the largest copies first; of several GPUs in turns (see turns.py)
3 GB of rows              the kernel, and what the copy engine leaves of the experts
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import PeerTable
from mcore_reshard.kernels.cuda.copy_engine import EngineCopies, is_available
from mcore_reshard.kernels.cuda.copy_kernel import DeviceCopies, KernelShape
from mcore_reshard.kernels.cuda.engine_rows import ENGINE_SHARE, divided
from mcore_reshard.kernels.cuda.streams import fork, joined
from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES, interleaved
from mcore_reshard.kernels.errors import ChecksumError
from mcore_reshard.planner.plan.schedule import Schedule

from .peer_signals import PeerSignals
from .turns import may_use_engine


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How generation ranks pull, and how others push what they do not cast."""

    shape: KernelShape | None = (
        None  # None: all of a GPU that reads its own memory alone, else 48 of its multiprocessors
    )
    tile_bytes: int = DEFAULT_TILE_BYTES
    checksums: bool = False  # sum every tile as it is read and as it was written, and compare
    engine_share: float = ENGINE_SHARE


class Pull:
    """Copies (dtype COPY) that `device` runs, any number of times.

    `peer` [copies] is the rank that each reads, or writes. `first` and `together` order the kernel's tiles, as for `interleaved`.
    """

    def __init__(
        self,
        copies: NDArray[np.void],
        addresses: NDArray[np.uint64],
        device: torch.device,
        shape: KernelShape,
        options: DirectOptions,
        *,
        peer: Ints | NDArray[np.int32],
        by_engine: Mapping[int, int] | None = None,  # of ranks of whose copies the copy engine takes its share: when
        first: int,
        together: int | None,
        own_gpu: bool = False,
        engine_streams: Sequence[torch.cuda.Stream] = (),
    ) -> None:
        turn = np.full(len(copies), -1)
        for rank, of_rank in (by_engine or {}).items():
            turn[peer == rank] = of_rank
        streams = len(engine_streams)
        tiles, rows = divided(copies, addresses, options.tile_bytes, turn, options.engine_share, streams=streams)
        self._engine = EngineCopies(rows, device, streams) if len(rows.src) else None
        self._engine_streams = () if self._engine is None else engine_streams
        order = interleaved(peer[tiles["copy"]].astype(np.int64), first, together)
        self._kernel = DeviceCopies(tiles[order], device, shape, checksums=options.checksums, own_gpu=own_gpu)
        self.nbytes = self._kernel.nbytes

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue everything on `stream`. Does not wait."""
        self.fork(stream)
        self.launch_forked(stream)

    def fork(self, stream: torch.cuda.Stream) -> None:
        """Have the copy engine wait for what is on `stream` now: calls that may be made while others are waited for."""
        fork(stream, self._engine_streams)

    def launch_forked(self, stream: torch.cuda.Stream) -> None:
        """`launch` after `fork`, with nothing queued on `stream` in between."""
        with joined(stream, self._engine_streams):
            self.queue(stream)

    def queue(self, stream: torch.cuda.Stream) -> None:
        """Queue the kernel on `stream`, and the copy engine's part on its streams. Neither waits for the other."""
        self._kernel.launch(stream)
        if self._engine is not None:
            self._engine.launch(self._engine_streams)

    def read_back(self) -> NDArray[np.void]:
        """Everything that the next launch copies (dtype TILE), as the device and the driver are told."""
        tiles = self._kernel.read_back()
        return tiles if self._engine is None else np.concatenate([tiles, self._engine.read_back()])

    def damaged(self) -> Ints:
        """Copies that wrote other bytes than they read, where these are summed; the last launch must have ended."""
        return self._kernel.damaged()


def check_sums(bound: BoundSchedule, table: PeerTable, damaged: Ints, signals: PeerSignals) -> None:
    """Raise `ChecksumError` where copies of a table wrote other bytes than they read."""
    for copy in damaged.tolist():
        stage = bound.stages[int(table.stage[copy])].pp_stage
        peer = signals.peers[int(table.peer[copy])]
        waiting = replace(peer, stage=stage, parameter=parameter_of(bound, table, copy))
        raise ChecksumError(waiting, "other bytes were written than were read")


def parameter_of(bound: BoundSchedule, table: PeerTable, copy: int) -> str:
    """The parameter of a copy of the table, by its HF name."""
    return bound.schedule.parameter_name(int(table.transfer_group[copy]), int(table.member[copy]))


def engine_helps(schedule: Schedule, options: DirectOptions) -> bool:
    """Whether a copy engine helps who reads, and the driver has batches of copies."""
    return may_use_engine(schedule, checksums=options.checksums) and has_engine(options)


def has_engine(options: DirectOptions) -> bool:
    return options.engine_share > 0 and is_available()
