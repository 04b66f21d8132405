"""Plan, prove and run the refit of a Megatron-Core trainer's weights into a generation engine.

    import mcore_reshard as mr

    plan = mr.plan("qwen3-30b-a3b", train="tp=2,pp=2,ep=4,dp=2", gen="tp=4")     # numpy alone: no torch, no GPU
    trainer = mr.megatron.connect(model_chunks, bridge, hf_config, gen="tp=4", store="10.0.0.1:29600")
    llm = LLM(path, worker_extension_cls="mcore_reshard.vllm.RefitWorker")

Each public name is loaded when it is first used.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from . import dtensor as dtensor
    from . import megatron as megatron
    from . import vllm as vllm
    from .kernels.errors import RefitError as RefitError
    from .kernels.options import Options as Options
    from .planner.layout.mesh import GenMesh as GenMesh
    from .planner.layout.mesh import TrainMesh as TrainMesh
    from .planner.plan.plan import Plan as Plan
    from .planner.plan.plan_file import load_plan as load_plan
    from .planning import plan as plan

__version__ = "0.2.0"

# Where each public name is defined, in the order of use; the three modules are names themselves.
_MODULES = {
    "plan": "planning",
    "load_plan": "planner.plan.plan_file",
    "Plan": "planner.plan.plan",
    "TrainMesh": "planner.layout.mesh",
    "GenMesh": "planner.layout.mesh",
    "megatron": "megatron",
    "dtensor": "dtensor",
    "vllm": "vllm",
    "Options": "kernels.options",
    "RefitError": "kernels.errors",
}

__all__ = [*_MODULES]


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}; public names: {', '.join(__all__)}")
    module = import_module(f"{__name__}.{_MODULES[name]}")
    value = module if _MODULES[name] == name else getattr(module, name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
