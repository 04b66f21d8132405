"""Generation ranks read the weights straight out of the training ranks' memory, or are pushed to: one NVLink domain, or one GPU.

Training ranks export their allocations once. Each generation rank maps what it needs, also once (see `kept`), and in each
refit pulls everything with one kernel launch, beside which a copy engine takes large copies (see `pull`). It takes from
all stages and sources. The order differs from receiver to receiver, so that no source has to serve all of them at once.
The signals by which both ends keep order: see `ends`. Where training ranks cast, they do so into `slots`, or write it where it
belongs, see `pushes`. They push everything where GPUs would read each other, and where replicas pass on, see `chain`.
"""

from __future__ import annotations

import time
from contextlib import ExitStack

from mcore_reshard.kernels.copies.bind import BoundSchedule
from mcore_reshard.kernels.copies.read_back import Executed
from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import DEFAULT_SCRATCH_BYTES
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.kernels.transports.base import StageReport, merge_reports
from mcore_reshard.kernels.transports.kept import Kept
from mcore_reshard.planner.plan.schedule import Chain

from .chain import ChainSource, Replica
from .ends import Reader, Source
from .peer_signals import PeerSignals
from .pull import DirectOptions


class DirectExecutor:
    """One rank's end of the direct transport. Constructed on all ranks at the same time; `store` is its own.

    With a `chain` each rank pushes to the next. `kept` has what earlier executors of this rank have exported and mapped;
    without it this one closes what it maps. Raises `TransportUnavailable` where memory cannot be exported or mapped. Tensors
    of ranks that are read or written must outlive the others' `close`.
    """

    name = "direct"

    def __init__(
        self,
        store: StoreKeys,
        bound: BoundSchedule,
        *,
        timeout_s: float,
        scratch_bytes: int = DEFAULT_SCRATCH_BYTES,
        options: DirectOptions = DirectOptions(),  # noqa: B008
        kept: Kept | None = None,
        chain: Chain | None = None,
    ) -> None:
        if chain is not None:
            bound = bound.part(chain.from_trainer)
        self._bound = bound
        self._own_kept = Kept() if kept is None else None
        kept = self._own_kept or kept
        assert kept is not None
        self._runs = 0
        self._closed = False
        self._signals = PeerSignals(store, bound, timeout_s)
        self._end: Source | Reader | ChainSource | Replica
        try:
            if chain is not None and chain.among_replicas is not None:
                self._end = Replica(bound, chain.among_replicas, self._signals, options, kept)
            elif chain is not None:
                self._end = ChainSource(bound, self._signals, options, kept)
            elif bound.schedule.world == "train":
                self._end = Source(bound, self._signals, scratch_bytes, options, kept)
            else:
                self._end = Reader(bound, self._signals, options, kept)
        except BaseException:
            self._signals.close()
            if self._own_kept is not None:
                self._own_kept.close()
            raise
        self.scratch_bytes = self._end.scratch_bytes  # of a training rank's slots; 0 where nothing is cast
        self.table_bytes = self._end.table_bytes  # GPU memory of what the kernels walk, and of checksums

    @property
    def executed(self) -> tuple[Executed, ...]:
        return self._end.executed

    def run(self) -> tuple[StageReport, ...]:
        """Move every byte once. Raises `DeadlineError`, `PeerLostError` or `ChecksumError`.

        After an error on one end the other may go on, reading or writing, until the session is closed everywhere.
        """
        if self._closed:
            raise SessionError(f"{self._bound.rank_name}: this executor is closed; begin a new session")
        self._runs += 1
        start = time.perf_counter()
        self._end.run(self._runs)
        seconds = time.perf_counter() - start
        return merge_reports(
            [
                tuple(
                    StageReport(
                        each.pp_stage, each.transfers, 0, each.nbytes, seconds if each.transfers else 0.0, start
                    )
                    for each in bound.stages
                )
                for bound in self._end.bound
            ]
        )

    @property
    def written_bytes(self) -> int:
        return self._end.written_bytes

    def close(self) -> None:
        """End writes, unmap peers' memory, and close the connections: who waits gets `PeerLostError`. May be called twice."""
        self._closed = True
        with ExitStack() as closing:  # the last one first
            if self._own_kept is not None:
                closing.callback(self._own_kept.close)
            closing.callback(self._end.close)
            closing.callback(self._signals.close)
            closing.callback(self._end.end_writes)
