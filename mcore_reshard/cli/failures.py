"""The exit code of an error; main.py says what the codes mean."""

from __future__ import annotations

import sys

from mcore_reshard.planner.layout.mesh import MeshError
from mcore_reshard.planner.model.families import ConfigError
from mcore_reshard.planner.plan.plan_file import PlanFileError
from mcore_reshard.planner.plan.transfers import UnknownElementError
from mcore_reshard.planner.proof.prove import ProofError
from mcore_reshard.planning import InputError

_INPUT = (InputError, ConfigError, MeshError, PlanFileError, UnknownElementError)


def exit_code_of(error: Exception) -> int | None:
    """The documented code of an error that tells the user what to do; None for an unexpected one."""
    if isinstance(error, ProofError):
        return 3
    if isinstance(error, _INPUT):
        return 2
    if isinstance(error, _loaded("kernels.errors", "TransportUnavailable", "validation.runner", "ValidationError")):
        return 2
    if isinstance(error, _loaded("kernels.errors", "RefitError", "validation.processes", "ProcessError")):
        return 1
    if isinstance(error, ImportError) and "pip install" in str(error):  # the message names the extra that is missing
        return 1
    return None


def _loaded(*names: str) -> tuple[type[Exception], ...]:
    """The errors (module, name, ...) of loaded modules. An error of a module that is not loaded cannot have been raised."""
    pairs = zip(names[::2], names[1::2], strict=True)
    modules = [(sys.modules.get(f"mcore_reshard.{module}"), name) for module, name in pairs]
    return tuple(getattr(module, name) for module, name in modules if module is not None)
