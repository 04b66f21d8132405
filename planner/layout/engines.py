"""Generation engines by name. An engine is one module of this package, named after it:

LAYOUT       its Layout class, called with a model's parameters and a generation mesh
TRANSPOSED   what it keeps in another order of dims than Hugging Face, declared apart from its rules for the proof
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from mcore_reshard.planner.model.parameters import ModelParameters, Role

from .mesh import GenMesh
from .partitions import Layout

DEFAULT_ENGINE = "vllm"

# (role, dims of the view) -> local dim of each global dim.
Transposed = Mapping[tuple[Role, int], tuple[int, ...]]


class UnknownEngineError(ValueError):
    """No module of this package is an engine of that name."""


@dataclass(frozen=True, slots=True)
class Engine:
    """What planning and the proof need of an engine."""

    name: str
    layout: Callable[[ModelParameters, GenMesh], Layout]
    transposed: Transposed


def engine_named(name: str) -> Engine:
    """The engine whose module is `planner/layout/<name>.py`. Raises UnknownEngineError where there is none."""
    unknown = UnknownEngineError(
        f"no engine {name!r}: planner/layout/{name}.py would have to define LAYOUT and TRANSPOSED"
    )
    if not name.isidentifier():
        raise unknown
    try:
        module = importlib.import_module(f"{__package__}.{name}")
    except ModuleNotFoundError as error:
        if error.name != f"{__package__}.{name}":
            raise
        raise unknown from None
    if not hasattr(module, "LAYOUT") or not hasattr(module, "TRANSPOSED"):
        raise unknown
    return Engine(name, module.LAYOUT, module.TRANSPOSED)
