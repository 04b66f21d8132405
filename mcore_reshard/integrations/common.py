"""What several adapters share: both sides of a session must be under way at once, and have the same options."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from typing import Any, TypeVar

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import GenMesh, format_mesh

_log = logging.getLogger(__name__)
_SECRETS = ("token", "token_file")  # of Options; they stay on the machine
Result = TypeVar("Result")


def options_for_engine(options: Options) -> dict[str, Any]:
    """The fields that differ from the defaults, as plain data that may travel: the engine has the token from its environment."""
    default = asdict(Options())
    return {name: value for name, value in asdict(options).items() if value != default[name] and name not in _SECRETS}


def mesh_of_replicas(mesh: GenMesh, ranks: int, remedy: str) -> GenMesh:
    """The mesh of so many engine ranks, whose engines are replicas of `mesh`: data parallel over all of them.

    Raises RefitError, which ends with `remedy`, where they are no multiple of its ranks, or several engines spread experts.
    """
    replicas, rest = divmod(ranks, mesh.world)
    if rest or not replicas or (replicas > 1 and mesh.ep > 1):
        raise RefitError(f"an engine of {format_mesh(mesh)} has {mesh.world} ranks, and there are {ranks}: {remedy}")
    return replace(mesh, dp=mesh.dp * replicas)


def run_beside(others: Sequence[Callable[[], Any]], own: Callable[[], Result]) -> Result:
    """Call `own` here while each of `others` runs on a thread; return what it returns, once all have ended.

    For a rank that takes part itself and tells engines to: `connect` and `refit` end on both sides together. The error of
    `own` is raised first, else that of the first of `others`. Errors of `others` are logged as they come.
    """
    errors: list[Exception] = []

    def run(call: Callable[[], Any]) -> None:
        try:
            call()
        except Exception as error:
            _log.error("an engine failed: %s: %s", type(error).__name__, error)
            errors.append(error)

    threads = [threading.Thread(target=run, args=(call,), daemon=True) for call in others]
    for thread in threads:
        thread.start()
    try:
        result = own()
    finally:
        for thread in threads:
            thread.join()
    if errors:
        raise errors[0]
    return result
