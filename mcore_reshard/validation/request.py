"""What a validation is asked for."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.megatron import ExpertsModule
from mcore_reshard.planner.model.parameters import Role
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planning import PlanRequest

_DEFAULT_OPTIONS = Options(transport="gloo")


@dataclass(frozen=True, slots=True)
class ValidationRequest:
    """A model and two meshes, as they are read for a plan, and how to refit between them on this machine."""

    planning: PlanRequest
    plan: Plan | None = None  # used instead of making one; it must be for the same meshes
    options: Options = _DEFAULT_OPTIONS
    engine: str = (
        "auto"  # "vllm", "slices" (plain slicing code, itself tested against vLLM), or the first if it is there
    )
    refits: int = 3
    experts: ExpertsModule = "grouped"  # TEGroupedMLP, or "sequential": SequentialMLP
    unknown: frozenset[Role] = frozenset()  # roles to treat as if no layout rule knew them
