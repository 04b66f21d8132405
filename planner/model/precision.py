"""The precision of each side of a refit: its main dtype, and the format of quantized matrices.

A quantized weight is a pair of groups: its data, and a grid of scales, one for every block of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace

from .parameters import ModelParameters, ParameterGroup, Role

Block = tuple[int, int]  # rows, columns

FP8 = "float8_e4m3fn"

# The linear layers that trainers (Transformer Engine's fp8_param) and engines quantize.
QUANTIZED = frozenset({
    Role.Q, Role.K, Role.V, Role.O,
    Role.MLA_Q, Role.MLA_Q_A, Role.MLA_Q_B, Role.MLA_KV_A, Role.MLA_KV_B, Role.MLA_O,
    Role.GATE, Role.UP, Role.DOWN, Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN,
    Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN, Role.STACKED_GATE_UP, Role.STACKED_DOWN,
    Role.MAMBA_IN, Role.MAMBA_OUT, Role.MTP_PROJ,
})  # fmt: skip

UnquantizedRule = Callable[[ParameterGroup, int], bool]  # (group, HF layer)

# The casts on the way: the source casts, and the wire carries the dtype of the destination.
CASTS = (("float32", "bfloat16"), ("bfloat16", "float32"), ("bfloat16", FP8))


@dataclass(frozen=True, slots=True)
class Format:
    """How quantized matrices are kept: E4M3 data and a scale for every block. `block` None: one scale for the matrix."""

    name: str
    method: str  # quant_method of the checkpoints that have it
    block: Block | None
    scales: str  # dtype
    suffix: str  # of the scales' HF name, after the weight's

    def block_of(self, group: ParameterGroup) -> Block:
        """The block of one matrix; its own shape where it has a single scale."""
        return self.block or (group.view[-2], group.view[-1])


BLOCK_FP8 = Format("block FP8", "fp8", (128, 128), "float32", "_scale_inv")
TENSOR_FP8 = Format("per-tensor FP8", "fp8", None, "float32", "_scale")
MXFP8 = Format("MXFP8", "mxfp8", (1, 32), "uint8", "_scale")  # OCP microscaling: scales are E8M0, a byte each

PRECISIONS = ("bf16", "fp32", "fp8", "mxfp8")
UNQUANTIZED = {"bf16": "bfloat16", "fp32": "float32"}
PRECISION_OF = {dtype: name for name, dtype in UNQUANTIZED.items()}


class PrecisionError(ValueError):
    """An unknown precision, or layers that the model does not have."""


@dataclass(frozen=True, slots=True)
class Precision:
    """The precision of one side: its main `dtype`, and the format of quantized matrices."""

    dtype: str
    format: Format | None = None
    unquantized_layers: frozenset[int] = frozenset()  # whose matrices a trainer that quantizes keeps in `dtype`

    def main(self, model: ModelParameters) -> ModelParameters:
        """The model before quantization, in this side's dtype; parameters with a dtype of their own stay in it."""
        if self.dtype == model.dtype:
            return model
        groups = (
            replace(g, dtype=self.dtype) if g.dtype == model.dtype and g.role is not Role.EXPERT_BIAS else g
            for g in model.groups
        )
        return replace(model, dtype=self.dtype, groups=tuple(groups))


def precision_of(name: str | None, model: ModelParameters) -> Precision:
    """`bf16`, `fp32`, `fp8` or `mxfp8` for one side of a model; None: the config's dtype, unquantized.

    FP8 has the blocks that the config's quantization_config names. If an FP8 config names no block, it has one scale a
    tensor; if the config is not of FP8, blocks of 128 by 128. Raises PrecisionError for any other name.
    """
    if name is None:
        return Precision(model.dtype)
    if name in UNQUANTIZED:
        return Precision(UNQUANTIZED[name])
    if name == "mxfp8":
        return Precision(model.dtype, MXFP8)
    if name != "fp8":
        raise PrecisionError(f"unknown precision {name!r}, known: {', '.join(PRECISIONS)}")
    quantization = model.quantization
    if quantization is None or quantization.method != BLOCK_FP8.method:
        return Precision(model.dtype, BLOCK_FP8)
    return Precision(model.dtype, replace(BLOCK_FP8, block=quantization.block) if quantization.block else TENSOR_FP8)


def with_unquantized_layers(precision: Precision, layers: Collection[int], model: ModelParameters) -> Precision:
    """The precision of a trainer that keeps the matrices of whole layers in its main dtype (`first_last_layers_bf16`).

    Raises PrecisionError for layers that the model does not have.
    """
    count = model.architecture.layers
    if unknown := sorted(set(layers).difference(range(count))):
        raise PrecisionError(
            f"the trainer cannot keep layers {', '.join(map(str, unknown))} unquantized: the model has 0 to {count - 1}"
        )
    return replace(precision, unquantized_layers=frozenset(layers)) if precision.format is not None else precision


def divided(model: ModelParameters, is_unquantized: UnquantizedRule) -> ModelParameters:
    """The model with every group of matrices divided where `is_unquantized(group, layer)` holds for a part of its layers."""
    groups: list[ParameterGroup] = []
    for group in model.groups:
        kept = tuple(layer for layer in group.layers if group.role in QUANTIZED and is_unquantized(group, layer))
        if len(kept) in {0, len(group.layers)}:
            groups.append(group)
        else:
            converted = tuple(layer for layer in group.layers if layer not in kept)
            groups += [replace(group, layers=converted), replace(group, layers=kept)]
    return replace(model, groups=tuple(groups))


def with_format(model: ModelParameters, form: Format) -> ModelParameters:
    """The model as an engine sees it that keeps this format: the quantization_config of another method is left out.

    No engine loads a checkpoint by another method than its config's (vllm/config/model.py, _verify_quantization).
    """
    states_another = model.quantization is not None and model.quantization.method != form.method
    return replace(model, quantization=None) if states_another else model


def scales_group(group: ParameterGroup, form: Format) -> ParameterGroup:
    """The scales of a weight as a group of parameters: the same role, layers and experts; the view is the block grid."""
    grid = grid_of((group.view[-2], group.view[-1]), form.block_of(group))
    shape = grid if form.block else (1,)
    return replace(group, name_pattern=group.name_pattern + form.suffix, shape=shape, view=grid, dtype=form.scales)


def grid_of(shape: Block, block: Block) -> Block:
    """Blocks along both dims, those at the end maybe partial."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
