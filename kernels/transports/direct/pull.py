"""One launch of a rank that pulls: the copy engine takes large copies from other GPUs, a kernel everything else.

58 GB of whole experts    the copy engine takes 55 GB, the largest copies first; of several GPUs in turns (see turns.py)
3 GB of rows              the kernel, and what the copy engine leaves of the experts
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.copy_table import Ints
from mcore_reshard.kernels.copies.peer_table import PeerTable
from mcore_reshard.kernels.copies.tensors import gpu_of
from mcore_reshard.kernels.cuda.copy_engine import EngineCopies, is_available
from mcore_reshard.kernels.cuda.copy_kernel import DeviceCopies, KernelShape
from mcore_reshard.kernels.cuda.engine_rows import ENGINE_SHARE, divided
from mcore_reshard.kernels.cuda.executed_tiles import NameOf, PlacedCopies, tile_problems
from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES, interleaved
from mcore_reshard.kernels.errors import ChecksumError
from mcore_reshard.planner.plan.schedule import Schedule

from .peer_signals import PeerSignals
from .turns import may_use_engine


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How generation ranks pull. Training ranks ignore it."""

    shape: KernelShape | None = (
        None  # None: all of a GPU that reads its own memory alone, else 48 of its multiprocessors; 96 of a replica that pushes
    )
    tile_bytes: int = DEFAULT_TILE_BYTES
    checksums: bool = False  # sum every tile as it is read and as it was written, and compare
    engine_share: float = ENGINE_SHARE


class Pull:
    """Copies (dtype COPY) that `device` runs, any number of times. A replica that pushes has no part for the copy engine.

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
        self._engine_streams = engine_streams
        order = interleaved(peer[tiles["copy"]].astype(np.int64), first, together)
        self._kernel = DeviceCopies(tiles[order], device, shape, checksums=options.checksums, own_gpu=own_gpu)
        self.nbytes = self._kernel.nbytes

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue everything on `stream`. Does not wait."""
        if self._engine is None:
            self._kernel.launch(stream)
            return
        for each in self._engine_streams:
            each.wait_stream(stream)
        try:
            self._kernel.launch(stream)
            self._engine.launch(self._engine_streams)
        finally:  # whoever waits for `stream` waits for what was queued
            for each in self._engine_streams:
                stream.wait_stream(each)

    def read_back(self) -> NDArray[np.void]:
        """Everything that the next launch copies (dtype TILE), as the device and the driver are told."""
        tiles = self._kernel.read_back()
        return tiles if self._engine is None else np.concatenate([tiles, self._engine.read_back()])

    def empty(self, stream: torch.cuda.Stream) -> None:
        """Queue on `stream`: launches that begin later copy nothing. For good. Not for one with a copy engine's part."""
        assert self._engine is None
        self._kernel.empty(stream)

    def damaged(self) -> Ints:
        """Copies that wrote other bytes than they read, where these are summed; the last launch must have ended."""
        return self._kernel.damaged()


class Waves:
    """The copies of a table in waves, each of which is one launch; `wave` [copies] is that of each.

    Other arguments are those of `Pull`, for the copies of all waves.
    """

    def __init__(
        self,
        table: PeerTable,
        wave: Ints,
        addresses: NDArray[np.uint64],
        device: torch.device,
        shape: KernelShape,
        options: DirectOptions,
        **others: Any,
    ) -> None:
        self._copies = [np.flatnonzero(wave == number) for number in range(1 + int(wave.max(initial=0)))]
        self._pulls = [
            Pull(table.copies[copies], addresses, device, shape, options, peer=table.peer[copies], **others)
            for copies in self._copies
        ]
        self.nbytes = sum(pull.nbytes for pull in self._pulls)

    def __len__(self) -> int:
        return len(self._pulls)

    def prepare(self, stream: torch.cuda.Stream) -> None:
        """Queue what may happen before others may be written: nothing."""

    def launch(self, wave: int, stream: torch.cuda.Stream) -> None:
        """Queue a wave on `stream`. Does not wait."""
        self._pulls[wave].launch(stream)

    def read_back(self) -> NDArray[np.void]:
        """As `Pull.read_back`, of all waves."""
        tables = [pull.read_back() for pull in self._pulls]
        for tiles, copies in zip(tables, self._copies, strict=True):
            tiles["copy"] = copies[tiles["copy"]]
        return np.concatenate(tables)

    def problems(self, placed: PlacedCopies, name_of: NameOf) -> list[str]:
        """How what the device and the driver are told differs from `placed`, the copies of the table."""
        return tile_problems(self.read_back(), placed, name_of)

    def empty(self, stream: torch.cuda.Stream) -> None:
        """As `Pull.empty`, of all waves."""
        for pull in self._pulls:
            pull.empty(stream)

    def damaged(self) -> Ints:
        """As `Pull.damaged`, of all waves."""
        return np.concatenate([copies[pull.damaged()] for pull, copies in zip(self._pulls, self._copies, strict=True)])


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
    return may_use_engine(schedule, checksums=options.checksums) and options.engine_share > 0 and is_available()


def on_one_gpu(gpus: Mapping[int, Collection[str]], device: torch.device) -> dict[int, int]:
    """The ranks on the only other GPU than `device`, each in turn 0: none where there are several. `gpus` are those of ranks."""
    own = gpu_of(device)
    others = {gpu for of_rank in gpus.values() for gpu in of_rank} - {own}
    return {rank: 0 for rank, of_rank in gpus.items() if own not in of_rank} if len(others) == 1 else {}
