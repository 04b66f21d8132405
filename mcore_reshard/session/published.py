"""An error on one rank is everyone's: it is published before it is raised."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous, SessionFailed


class Published:
    """Publish an error raised inside, then raise its cause: this error, or an earlier one of another rank.

    `end` is called with the cause. A class, not @contextmanager: contextlib's frames would keep a replaced exception,
    and the tensors in its traceback, alive.
    """

    def __init__(self, rendezvous: Rendezvous, phase: str, end: Callable[[BaseException], None]) -> None:
        self._rendezvous, self._phase, self._end = rendezvous, phase, end

    def __enter__(self) -> None:
        pass

    def __exit__(self, kind: Any, error: BaseException | None, traceback: Any) -> None:
        if error is None:
            return
        try:
            if not isinstance(error, SessionFailed):  # this one came from the store: every rank knows its cause
                failure = self._rendezvous.fail(self._phase, error)
                if failure != Failure.of(self._rendezvous.rank_name, error) and isinstance(error, RefitError):
                    raise SessionFailed(failure) from error
        except BaseException as cause:
            self._end(cause)
            raise
        self._end(error)
