"""Which errors are whose fault, as exit codes. See cli.py for what the codes mean."""

from __future__ import annotations

import sys

from mcore_reshard.planner.explain import ExplainError
from mcore_reshard.planner.families import ConfigError
from mcore_reshard.planner.mesh import MeshError
from mcore_reshard.planner.plan_file import PlanFileError
from mcore_reshard.planner.proof import ProofError

from .inputs import InputError

_INPUT = (InputError, ConfigError, MeshError, PlanFileError, ExplainError)


def exit_code_of(error: Exception) -> int | None:
    """The documented code of an error that says all a user needs; None for one that should not have happened."""
    if isinstance(error, ProofError):
        return 3
    if isinstance(error, _INPUT):
        return 2
    kernels = sys.modules.get("mcore_reshard.kernels.errors")  # torch is not imported to classify an error
    if kernels is not None and isinstance(error, kernels.TransportUnavailable):
        return 2
    if kernels is not None and isinstance(error, kernels.RefitError):
        return 1
    if isinstance(error, ImportError) and "pip install" in str(error):  # an extra is missing, and the message names it
        return 1
    return None
