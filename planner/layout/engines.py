"""Everything that the planner, the proof and the command line know of a generation engine: one record, `Engine`.

An engine is one module of this package, named after it, with its record as `ENGINE`. A second engine is one new file.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from pkgutil import iter_modules

from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup, Role
from mcore_reshard.planner.model.precision import Format, divided, with_format

from .mesh import GenMesh
from .partitions import Layout, Misc, Partition

DEFAULT_ENGINE = "vllm"

# (role, dims of the view) -> local dim of each global dim.
Transposed = Mapping[tuple[Role, int], tuple[int, ...]]


class UnknownEngineError(ValueError):
    """No module of this package is an engine of that name."""


@dataclass(frozen=True, slots=True)
class Engine:
    """One engine: its layout, what it quantizes, and its notes to users on a plan."""

    name: str
    layout: Callable[[ModelParameters, GenMesh], Layout]
    quantizes: Callable[[ParameterGroup, int | None, ModelParameters], bool]  # when asked to; None: not in a layer
    misquantized: Callable[[ModelParameters], list[str]]  # why no trainer can send what it would then hold
    scales: Callable[[ParameterGroup, Partition, Format], Partition | Misc]  # as in Layout
    transposed: Transposed  # kept in another order of dims than Hugging Face; the proof compares it with the layout
    notes: Callable[[Sequence[tuple[str, str]]], list[str]]  # on a plan, given (name, reason) of all misc groups
    has_rules: bool = True  # False: `layout` places nothing, and every plan is read off the engine's own loader
    repeated_suffix: str = ""  # tensor x + this stands for the engine's x, which its adapter repeats from it

    def quantized(self, model: ModelParameters, form: Format) -> ModelParameters:
        """The model that the engine quantizes to a format: groups are divided where it leaves some layers unquantized."""
        model = with_format(model, form)
        return divided(model, lambda group, layer: not self.quantizes(group, layer, model))

    def repeated_tensor(self, name: str) -> str:
        """The engine's own tensor that is repeated from `name`; empty where none is."""
        suffix = self.repeated_suffix
        return name.removesuffix(suffix) if suffix and name.endswith(suffix) else ""


def engine_named(name: str) -> Engine:
    """The engine whose module is `planner/layout/<name>.py`. Raises UnknownEngineError where there is none."""
    module = f"{__package__}.{name}"
    if name.isidentifier() and find_spec(module) is not None:
        engine = getattr(import_module(module), "ENGINE", None)
        if isinstance(engine, Engine):
            return engine
    known = ", ".join(engine_names())
    raise UnknownEngineError(
        f"no engine {name!r}, known: {known}; planner/layout/{name}.py would have to define ENGINE"
    )


def engine_names() -> list[str]:
    """The engines of this package."""
    modules = [import_module(f"{__package__}.{module.name}") for module in iter_modules([str(Path(__file__).parent)])]
    return sorted(module.ENGINE.name for module in modules if isinstance(getattr(module, "ENGINE", None), Engine))
