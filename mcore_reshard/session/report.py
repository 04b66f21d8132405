"""What a rank says of a refit: a report, or a handle to one that is to come."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

from mcore_reshard.kernels.transports.base import StageReport


@dataclass(frozen=True, slots=True)
class RefitReport:
    """What one rank did in one committed refit."""

    version: int
    transport: str  # one or several, as in "direct+nccl"
    moved: str  # EVERYTHING, or TRAINABLE
    nbytes: int  # moved by the plan, sent or received by this rank
    misc_bytes: int  # of whole tensors exported and loaded by name: the misc route, or everything under golden
    seconds: float  # from the call to the commit
    stages: tuple[StageReport, ...]
    state: str  # of this rank's weights, as in "complete(3)"
    replicas: tuple[int, ...]  # of the engine, that took part
    attempts: int  # 1, and one more for each that failed and was tried again


class RefitHandle:
    """A refit whose bytes have been read, and whose outcome is still to come."""

    def __init__(self, outcome: Future[RefitReport]) -> None:
        self._outcome = outcome

    def done(self) -> bool:
        return self._outcome.done()

    def wait(self) -> RefitReport:
        """The report, once all members have acknowledged the version. Raises what `refit` would."""
        return self._outcome.result()
