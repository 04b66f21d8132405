"""What each side of a refit holds: main dtype, format of quantized matrices, and which matrices those are.

A quantized weight is a pair of groups: its data, and a grid of scales, one for every block of the matrix.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase

from .parameters import ModelParameters, ParameterGroup, Quantization, Role

Block = tuple[int, int]  # rows, columns

FP8 = "float8_e4m3fn"

# The linear layers that Transformer Engine's fp8_param and vLLM's Fp8LinearMethod and Fp8MoEMethod quantize.
QUANTIZED = frozenset({
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
    """A precision that nobody has heard of."""


@dataclass(frozen=True, slots=True)
class Precision:
    """What one side holds: the dtype of everything that is not quantized, and the format of what is.

    `unquantized_layers` are those whose matrices a trainer that quantizes keeps in `dtype`.
    """

    dtype: str
    format: Format | None = None
    unquantized_layers: frozenset[int] = frozenset()

    def main(self, model_parameters: ModelParameters) -> ModelParameters:
        """The model before quantization, in this side's dtype; what has a dtype of its own stays in it."""
        if self.dtype == model_parameters.dtype:
            return model_parameters
        groups = (
            replace(g, dtype=self.dtype) if g.dtype == model_parameters.dtype and g.role is not Role.EXPERT_BIAS else g
            for g in model_parameters.groups
        )
        return replace(model_parameters, dtype=self.dtype, groups=tuple(groups))


def precision_of(name: str | None, model_parameters: ModelParameters) -> Precision:
    """`bf16`, `fp32`, `fp8` or `mxfp8` for one side of a model; None: the model's parameters's dtype, unquantized.

    FP8 has the blocks that the checkpoint's quantization_config names, one scale a tensor where it names none, and 128
    by 128 where the checkpoint is not in FP8. Raises PrecisionError for any other name.
    """
    if name is None:
        return Precision(model_parameters.dtype)
    if name in UNQUANTIZED:
        return Precision(UNQUANTIZED[name])
    if name == "mxfp8":
        return Precision(model_parameters.dtype, MXFP8)
    if name != "fp8":
        raise PrecisionError(f"unknown precision {name!r}, known: {', '.join(PRECISIONS)}")
    stated = model_parameters.quantization
    if stated is None or stated.method != BLOCK_FP8.method:
        return Precision(model_parameters.dtype, BLOCK_FP8)
    return Precision(model_parameters.dtype, replace(BLOCK_FP8, block=stated.block) if stated.block else TENSOR_FP8)


def with_unquantized_layers(
    precision: Precision, layers: Collection[int], model_parameters: ModelParameters
) -> Precision:
    """The precision of a trainer that keeps the matrices of whole layers in its main dtype (`first_last_layers_bf16`).

    Raises PrecisionError for layers that the model has not.
    """
    count = model_parameters.architecture.layers
    if unknown := sorted(set(layers).difference(range(count))):
        raise PrecisionError(
            f"the trainer cannot keep layers {', '.join(map(str, unknown))} unquantized: the model has 0 to {count - 1}"
        )
    return replace(precision, unquantized_layers=frozenset(layers)) if precision.format is not None else precision


def divided(model_parameters: ModelParameters, is_kept: Callable[[ParameterGroup, int], bool]) -> ModelParameters:
    """Divide groups of matrices of which `is_kept(group, layer)` leaves some layers unquantized."""
    groups: list[ParameterGroup] = []
    for group in model_parameters.groups:
        kept = tuple(layer for layer in group.layers if group.role in QUANTIZED and is_kept(group, layer))
        if len(kept) in {0, len(group.layers)}:
            groups.append(group)
        else:
            converted = tuple(layer for layer in group.layers if layer not in kept)
            groups += [replace(group, layers=converted), replace(group, layers=kept)]
    return replace(model_parameters, groups=tuple(groups))


def in_format(model_parameters: ModelParameters, form: Format) -> ModelParameters:
    """The model's parameters of an engine that quantizes, its groups divided where a part of their layers is not converted.

    The quantization_config of another method is left out: it says nothing about this one, and vLLM loads no checkpoint by
    another method than its config's (vllm/config/model.py, _verify_quantization).
    """
    stated = model_parameters.quantization
    if stated is None or stated.method != form.method:
        return replace(model_parameters, quantization=None)
    if not stated.not_converted:
        return model_parameters
    return divided(model_parameters, lambda group, layer: _is_kept(group, layer, stated))


def is_converted(group: ParameterGroup, model_parameters: ModelParameters) -> bool:
    """Whether the engine quantizes a group, all of it or none (see `in_format`).

    vLLM's MXFP8 takes the output layer too (modelopt.py, ModelOptQuantConfigBase.get_quant_method), but that of gpt-oss,
    which models/gpt_oss.py builds without a config. Where the config states nothing of the format, one that lists what no
    trainer quantizes is assumed: the output layer, and routers.
    """
    stated = model_parameters.quantization
    if group.role is Role.LM_HEAD and stated is not None and stated.method == MXFP8.method:
        return model_parameters.architecture.family != "gpt_oss" and not _is_kept(group, None, stated)
    if group.role not in QUANTIZED:
        return False
    return stated is None or not any(_is_kept(group, layer, stated) for layer in group.layers or (None,))


def _is_kept(group: ParameterGroup, layer: int | None, stated: Quantization) -> bool:
    """Whether a module is listed: by its name, by that of the module it is fused in, or for experts by any inside of theirs.

    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, is_layer_skipped, which matches exactly.
    """
    if group.experts:
        experts = group.name_pattern.partition(".{expert}")[0].format(layer=layer)
        inside = any(listed.startswith(experts + ".") for listed in stated.not_converted)
        return inside or is_listed(experts, experts, stated)
    return is_listed(*module_names(group, layer), stated)


def is_listed(module: str, fused: str, stated: Quantization) -> bool:
    """Whether a module is listed by its name or that of the module it is fused in; MXFP8 takes parts of names, and patterns.

    Source: vllm/model_executor/layers/quantization/modelopt.py, ModelOptQuantConfigBase.is_layer_excluded.
    """
    if module in stated.not_converted or fused in stated.not_converted:
        return True
    return stated.method == MXFP8.method and any(
        listed in fused or fnmatchcase(fused, listed) for listed in stated.not_converted
    )


def module_names(group: ParameterGroup, layer: int | None) -> tuple[str, str]:
    """The module of a weight that is no expert's, and the module that vLLM fuses it in: the same where it does not."""
    module = group.name(layer, None).removesuffix(".weight")
    return module, f"{module.rpartition('.')[0]}.{_FUSED[group.role]}" if group.role in _FUSED else module


def scales_group(group: ParameterGroup, form: Format) -> ParameterGroup:
    """The scales of a weight as a group of parameters: the same role, layers and experts; the view is the block grid."""
    grid = grid_of((group.view[-2], group.view[-1]), form.block_of(group))
    shape = grid if form.block else (1,)
    return replace(group, name_pattern=group.name_pattern + form.suffix, shape=shape, view=grid, dtype=form.scales)


def grid_of(shape: Block, block: Block) -> Block:
    """Blocks along both dims, those at the end maybe partial."""
    return -(-shape[0] // block[0]), -(-shape[1] // block[1])
