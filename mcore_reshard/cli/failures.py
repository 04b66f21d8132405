"""The message and the exit code of an error; main.py says what the codes mean."""

from __future__ import annotations

from mcore_reshard.kernels.errors import RefitError, TransportUnavailable
from mcore_reshard.planner.layout.mesh import MeshError
from mcore_reshard.planner.model.families import ConfigError
from mcore_reshard.planner.plan.plan_file import PlanFileError
from mcore_reshard.planner.plan.transfers import UnknownElementError
from mcore_reshard.planner.proof.prove import ProofError
from mcore_reshard.planning import InputError
from mcore_reshard.validation.errors import ProcessError, ValidationError

_CODES: dict[type[Exception], int] = {  # the first that fits
    ProofError: 3,
    **dict.fromkeys((InputError, ConfigError, MeshError, PlanFileError, UnknownElementError, ValidationError), 2),
    TransportUnavailable: 2,
    RefitError: 1,
    ProcessError: 1,
}


def outcome_of(error: Exception, debug: bool) -> tuple[str, int]:
    """What to print, and the exit code."""
    for kind, code in _CODES.items():
        if isinstance(error, kind):
            return str(error).replace("both train_dtype and gen_dtype", "both --train-dtype and --gen-dtype"), code
    if isinstance(error, ImportError) and "pip install" in str(error):  # the message names the extra that is missing
        return str(error), 1
    hint = "" if debug else "\nThis is a bug, or this environment is at fault: --debug shows the traceback."
    return f"unexpected {type(error).__name__}: {error}{hint}", 1
