"""The errors that end binding or moving bytes. Their facts are attributes too, because ranks tell each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeVar


class RefitError(RuntimeError):
    """The base of all errors that a refit raises. They pickle with their fields, as Ray and process pools need."""

    def __reduce__(self) -> tuple[Any, ...]:
        return _restored, (type(self), self.args, vars(self))


def _restored(kind: type[RefitError], args: tuple[Any, ...], fields: dict[str, Any]) -> RefitError:
    """An error as it was: constructors take other arguments than the message that `args` holds."""
    error = kind.__new__(kind, *args)
    vars(error).update(fields)
    return error


class BindError(RefitError):
    """A schedule does not fit the tensors it was bound to; `problems` lists everything that is wrong."""

    def __init__(self, rank_name: str, problems: Sequence[str]) -> None:
        self.problems = tuple(problems)
        count = f"{len(problems)} problem{'s' if len(problems) != 1 else ''}"
        super().__init__("\n  ".join((f"{rank_name} cannot bind its schedule, {count}:", *problems)))


class StaleTensorError(RefitError):
    """A bound tensor's storage, shape, stride, dtype or device changed after binding."""


class TornWeightsError(RefitError):
    """Weights were written while they were read: the engine may have got a mixture of two versions."""


class TransportUnavailable(RefitError):
    """The transport asked for is unknown or cannot run here."""


class SessionError(RefitError):
    """The ranks of a session could not meet or do not agree, or a peer reported a failure."""


class ConnectError(SessionError):
    """Transports could not connect: a rank ended meanwhile, or the network does not let them."""


class StoreRestarted(SessionError):
    """The store was started anew: what the ranks had said to each other is gone."""


class SessionClosed(SessionError):
    """The trainer has left the session, without a failure."""


class MixedWeightsError(RefitError):
    """An engine that holds a mixture of two versions was asked to generate."""


class LayoutError(RefitError):
    """The installed trainer or engine keeps weights otherwise than the plan says: nothing may move."""


class TracesNeeded(LayoutError):
    """Layout rules do not know all that an engine holds, and traces of its loaders do. The ranks then plan from traces."""


class VersionError(RefitError):
    """A version that does not increase, or ranks that refit different versions at the same time."""


class KvScalesError(RefitError):
    """No rank can take the scales of the KV cache as they were given. Nothing has moved, and the session goes on."""


@dataclass(frozen=True, slots=True)
class Waiting:
    """A wait of one rank for another: enough to name the culprit if the deadline passes."""

    rank_name: str  # the rank that waits, as "gen:1"
    peer: str  # the rank that it waits for, as "train:0"
    stage: int | None  # pp_stage; None on the misc route
    parameter: str  # first parameter of the bucket
    sends: bool  # True: waits for `peer` to take bytes; False: waits for bytes from it

    def __str__(self) -> str:
        where = "misc route" if self.stage is None else f"stage {self.stage}"
        verb = "to take" if self.sends else "to send"
        return f"{where}: {self.rank_name} waiting for {self.peer} {verb} {self.parameter}"


class TransferError(RefitError):
    """Due bytes did not arrive, or not as they were sent. `waiting` names the bytes and both ranks.

    `others` are the later errors of the same rank: when it waits for several peers, any of them may be to blame.
    """

    others: tuple[TransferError, ...] = ()

    def __init__(self, waiting: Waiting, reason: str) -> None:
        self.waiting = waiting
        super().__init__(f"{waiting}: {reason}")


class DeadlineError(TransferError):
    """A peer was silent for longer than the deadline."""


class PeerLostError(TransferError):
    """A peer closed its connection: it died, or gave up because of an error of its own."""


class ChecksumError(TransferError):
    """A bucket arrived with other bytes, or in another order, than it was sent."""


Error = TypeVar("Error", bound=BaseException)


def first_of(failures: Sequence[Error]) -> Error:
    """The first of a rank's failures, in the order in which they came; it knows the `others`."""
    first, *later = failures
    if isinstance(first, TransferError):
        first.others = tuple(error for error in later if isinstance(error, TransferError))
    return first
