"""The bug classes that refits are known to have, each put into a good plan or session on purpose.

A mutant is what a buggy planner, trainer or engine would produce; something must refuse it, naming parameter, ranks and
rule. `LAYERS` says what may refuse it, from the earliest to the latest.
"""

from __future__ import annotations

from .bugs import BUGS, LAYERS, NOTES
from .in_plans import PLAN_MUTANTS
from .of_precision import PRECISION_MUTANTS
from .records import Mutant, Rejection
from .with_processes import SESSION_MUTANTS
from .with_tensors import TENSOR_MUTANTS

__all__ = ["BUGS", "LAYERS", "MUTANTS", "NOTES", "Mutant", "Rejection"]

MUTANTS: tuple[Mutant, ...] = tuple(
    sorted((*PLAN_MUTANTS, *PRECISION_MUTANTS, *TENSOR_MUTANTS, *SESSION_MUTANTS), key=lambda mutant: mutant.bug)
)
