"""What each side of a refit holds: main dtype, format of quantised matrices, and which matrices those are.

A quantised weight is a pair of groups: its data, and a grid of scales, one for every block of the matrix.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from .parameters import Catalogue, ParameterGroup, Quantization, Role

Block = tuple[int, int]  # rows, columns

FP8 = "float8_e4m3fn"

# The linear layers that Transformer Engine's fp8_param and vLLM's Fp8LinearMethod and Fp8MoEMethod quantise.
QUANTISED = frozenset({
    Role.Q, Role.K, Role.V, Role.O,
    Role.MLA_Q, Role.MLA_Q_A, Role.MLA_Q_B, Role.MLA_KV_A, Role.MLA_KV_B, Role.MLA_O,
    Role.GATE, Role.UP, Role.DOWN, Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN,
    Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN, Role.STACKED_GATE_UP, Role.STACKED_DOWN,
    Role.MAMBA_IN, Role.MAMBA_OUT, Role.MTP_PROJ,
})  # fmt: skip

# What vLLM fuses, by the name that a list of modules may give instead of each part's (packed_modules_mapping of models/).
_FUSED = {
    **dict.fromkeys((Role.Q, Role.K, Role.V), "qkv_proj"),
    **dict.fromkeys((Role.GATE, Role.UP, Role.SHARED_GATE, Role.SHARED_UP), "gate_up_proj"),
    **dict.fromkeys((Role.MLA_Q_A, Role.MLA_KV_A), "fused_qkv_a_proj"),
}

# What may change on the way: the source casts, and the wire carries the dtype of the destination.
CASTS = (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", FP8))


@dataclass(frozen=True, slots=True)
class Format:
    """How quantised matrices are kept: E4M3 data and a scale for every block. `block` None: one scale for the matrix."""

    name: str
    block: Block | None
    scales: str  # dtype
    suffix: str  # of the scales' HF name, after the weight's

    def block_of(self, group: ParameterGroup) -> Block:
        """The block of one matrix; its own shape where it has a single scale."""
        return self.block or (group.view[-2], group.view[-1])


BLOCK_FP8 = Format("block FP8", (128, 128), "float32", "_scale_inv")
TENSOR_FP8 = Format("per-tensor FP8", None, "float32", "_scale")
MXFP8 = Format("MXFP8", (1, 32), "uint8", "_scale")  # OCP microscaling: scales are E8M0, a byte each

PRECISIONS = ("bf16", "fp32", "fp8", "mxfp8")
UNQUANTISED = {"bf16": "bfloat16", "fp32": "float32"}


class PrecisionError(ValueError):
    """A precision that nobody has heard of."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What one side holds: the dtype of everything that is not quantised, and the format of what is."""

    dtype: str
    format: Format | None = None

    def main(self, catalogue: Catalogue) -> Catalogue:
        """The model before quantisation, in this side's dtype; what the config keeps in another dtype stays in it."""
        if self.dtype == catalogue.dtype:
            return catalogue
        groups = (replace(g, dtype=self.dtype) if g.dtype == catalogue.dtype else g for g in catalogue.groups)
        return replace(catalogue, dtype=self.dtype, groups=tuple(groups))


def precision_of(name: str | None, catalogue: Catalogue) -> Precision:
    """`bf16`, `fp32`, `fp8` or `mxfp8` for one side of a model; None: the catalogue's dtype, unquantised.

    FP8 has the blocks that the checkpoint's quantization_config names, one scale a tensor where it names none, and 128
    by 128 where the checkpoint is not in FP8. Raises PrecisionError for any other name.
    """
    if name is None:
        return Precision(catalogue.dtype)
    if name in UNQUANTISED:
        return Precision(UNQUANTISED[name])
    if name == "mxfp8":
        return Precision(catalogue.dtype, MXFP8)
    if name != "fp8":
        raise PrecisionError(f"unknown precision {name!r}, known: {', '.join(PRECISIONS)}")
    stated = catalogue.quantization
    if stated is None or stated.method != "fp8":
        return Precision(catalogue.dtype, BLOCK_FP8)
    return Precision(catalogue.dtype, replace(BLOCK_FP8, block=stated.block) if stated.block else TENSOR_FP8)


def split_by_precision(catalogue: Catalogue) -> Catalogue:
    """The catalogue with groups divided where a part of their layers is not converted (`modules_to_not_convert`)."""
    stated = catalogue.quantization
    if stated is None or not stated.not_converted:
        return catalogue
    groups: list[ParameterGroup] = []
    for group in catalogue.groups:
        kept = tuple(layer for layer in group.layers if _is_kept(group, layer, stated))
        if group.role not in QUANTISED or len(kept) in {0, len(group.layers)}:
            groups.append(group)
        else:
            converted = tuple(layer for layer in group.layers if layer not in kept)
            groups += [replace(group, layers=converted), replace(group, layers=kept)]
    return replace(catalogue, groups=tuple(groups))


def is_converted(group: ParameterGroup, stated: Quantization | None) -> bool:
    """Whether the engine quantises a group, all of it or none (see `split_by_precision`)."""
    if group.role not in QUANTISED:
        return False
    return stated is None or not any(_is_kept(group, layer, stated) for layer in group.layers or (None,))


def _is_kept(group: ParameterGroup, layer: int | None, stated: Quantization) -> bool:
    """Whether a module is listed: by its name, by that of the module it is fused in, or for experts by any inside of theirs.

    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, is_layer_skipped, which matches exactly.
    """
    if group.experts:
        experts = group.pattern.partition(".{expert}")[0].format(layer=layer)
        return any(listed == experts or listed.startswith(experts + ".") for listed in stated.not_converted)
    return any(name in stated.not_converted for name in module_names(group, layer))


def module_names(group: ParameterGroup, layer: int | None) -> tuple[str, str]:
    """The module of a weight that is no expert's, and the module that vLLM fuses it in: the same where it does not."""
    module = group.name(layer, None).removesuffix(".weight")
    return module, f"{module.rpartition('.')[0]}.{_FUSED[group.role]}" if group.role in _FUSED else module


def scales_group(group: ParameterGroup, form: Format) -> ParameterGroup:
    """The scales of a weight as a group of parameters: the same role, layers and experts; the view is the block grid."""
    grid = grid_of((group.view[-2], group.view[-1]), form.block_of(group))
    shape = grid if form.block else (1,)
    return replace(group, pattern=group.pattern + form.suffix, shape=shape, view=grid, dtype=form.scales)


def grid_of(shape: Block, block: Block) -> Block:
    """Blocks along both dims, those at the end maybe partial."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
