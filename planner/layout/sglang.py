"""SGLang as the engine. It has no layout rules here: plans for it come from traces of its own loader (traced.py)."""

from __future__ import annotations

from collections.abc import Sequence

from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup
from mcore_reshard.planner.model.precision import Format

from .engines import Engine
from .mesh import GenMesh
from .partitions import Layout, Misc, Partition, Placed

_NO_RULES = "no layout rules for SGLang, a plan is read off its own loader: plan --traced, where SGLang is installed"


class SglangLayout(Layout):
    """A generation side that no plan can be made for."""

    name = "sglang"
    title = "SGLang"

    def violations(self) -> list[str]:
        return [f"generation: {_NO_RULES}"]

    def scales(self, group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
        return _scales(group, partition, form)

    def place(self, group: ParameterGroup) -> Placed:
        return Misc(_NO_RULES)


def _layout(model: ModelParameters, mesh: GenMesh) -> Layout:
    return SglangLayout()


def _quantizes(group: ParameterGroup, layer: int | None, model: ModelParameters) -> bool:
    return False


def _misquantized(model: ModelParameters) -> list[str]:
    return [f"generation: no quantized layouts of SGLang are known; {_NO_RULES}"]


def _scales(group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
    return Misc(_NO_RULES)


def _notes(misc: Sequence[tuple[str, str]]) -> list[str]:
    return []


ENGINE = Engine(
    name="sglang",
    layout=_layout,
    quantizes=_quantizes,
    misquantized=_misquantized,
    scales=_scales,
    notes=_notes,
    transposed={},
    has_rules=False,
)
