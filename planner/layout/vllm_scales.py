"""Where a vLLM rank keeps the scales of quantized weights, as `load_weights` leaves them.

Source: vllm/model_executor/layers/quantization/fp8.py (Fp8LinearMethod, Fp8MoEMethod) and modelopt.py (KMxfp8Static,
ModelOptMxFp8FusedMoE), 0.32. Fused tensors are fused in blocks as well (layers/linear.py, adjust_block_scale_shard).
"""

from __future__ import annotations

from math import gcd

from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup, Quantization, Role
from mcore_reshard.planner.model.precision import MXFP8, QUANTIZED, Format, is_listed, module_names

from .block_scales import REPEATED, scale_partition, splits_blocks, tensor_scale_partition, touched_scale_partition
from .geometry import LocalTensor
from .partitions import Misc, Partition

REFUSES = "vLLM refuses to build"
_EXPERTS = {Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN}
_FINEST = 32  # layers/fused_moe/oracle/fp8.py refine_fp8_moe_block_shape


def vllm_scales(group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
    """`weight_scale_inv` for blocks, `weight_scale` for MXFP8 and for one scale: the weight's name and more."""
    if group.role is Role.MAMBA_IN:
        return Misc("no layout rule for the scales of in_proj, whose sections vLLM cuts one by one")

    if group.role is Role.LM_HEAD:
        return Misc(
            f"vLLM keeps lm_head in {form.name} as well, which no trainer does: list it in ignored_layers of the"
            " quantization_config"
        )

    def beside(weight: LocalTensor, grid: tuple[int, ...]) -> LocalTensor:
        if form.block is None:  # (experts, 1, 1) is [experts], and [experts, parts] in w13; (1, 1) is [1]
            grid = grid[: 2 if group.role is Role.EXPERT_UP else 1]
        return LocalTensor(weight.name + form.suffix, grid, form.scales)

    if form.block is None:
        return tensor_scale_partition(
            partition, beside, "vLLM brings their scales to the largest and requantizes after loading"
        )
    if splits_blocks(partition, form.block) and _refines(group, partition, form.block):
        return touched_scale_partition(
            partition,
            form.block,
            lambda weight, grid: LocalTensor(f"{weight.name}{form.suffix}{REPEATED}", grid, form.scales),
        )
    found = scale_partition(group, partition, form.block, beside)
    if refusal := _refusal(group, partition, form):
        return Misc(f"{found.reason if isinstance(found, Misc) else form.name}: {REFUSES} {refusal}")
    return found


def _refusal(group: ParameterGroup, partition: Partition, form: Format) -> str:
    """What vLLM does not build; empty where it does.

    MXFP8: columns that are no multiple of 32 (modelopt.py, KMxfp8Static and ModelOptMxFp8FusedMoE, create_weights).
    Blocks: a linear layer of its own that is cut inside of them (utils/fp8_utils.py, validate_fp8_block_shape). Those that
    it fuses it lets pass (layers/linear.py, _maybe_allow_fp8_block_shape_mismatch). Experts too small to refine, but where
    a backend that the user names pads them (layers/fused_moe/oracle/fp8.py, resolve_fp8_moe_weight_block_shape).
    """
    pieces = [piece for held in partition.pieces for piece in held]
    if form == MXFP8:
        columns = {piece.region.extents[1] for piece in pieces if piece.region.extents[1] % 32}
        return f"a layer with {min(columns)} columns on a rank, no multiple of 32" if columns else ""
    if form.block is None or not splits_blocks(partition, form.block):
        return ""
    if group.role in _EXPERTS:
        return "such experts, unless it is told a moe_backend that pads them"
    alone = all(piece.local().extents == piece.tensor.shape for piece in pieces)
    return "a linear layer cut so" if alone else ""


def _refines(group: ParameterGroup, partition: Partition, block: tuple[int, int]) -> bool:
    """Whether vLLM gives experts that are cut inside of blocks smaller ones, each with the scale of that it is part of.

    The plan fills `...weight_scale_inv.blocks`, a tensor beside the engine's own with the checkpoint's blocks that this
    rank has a part of; the engine's adapter repeats them (engines/vllm.py, after_direct_writes).
    """
    return group.role in _EXPERTS and gcd(*block, *partition.pieces[0][0].region.extents) >= _FINEST


def misquantized(model_parameters: ModelParameters) -> list[str]:
    """What no vLLM holds as the quantization_config says."""
    stated = model_parameters.quantization
    if stated is None:
        return []
    return (
        _parts_kept_alone(model_parameters, stated)
        + _routers_not_kept(model_parameters, stated)
        + _tied_head(model_parameters, stated)
    )


def _parts_kept_alone(model_parameters: ModelParameters, stated: Quantization) -> list[str]:
    """Parts of fused modules that are listed without the others.

    Source: vllm/model_executor/layers/quantization/utils/quant_utils.py, is_layer_skipped, which raises ValueError.
    """
    parts: dict[str, list[str]] = {}
    for group in model_parameters.groups:
        if group.role in QUANTIZED and not group.experts and not group.mtp:
            for layer in group.layers:
                module, fused = module_names(group, layer)
                parts.setdefault(fused, []).append(module)
    missing = {
        fused: others
        for fused, modules in parts.items()
        if fused not in stated.not_converted
        and 0 < len(others := [module for module in modules if module not in stated.not_converted]) < len(modules)
    }
    if not missing:
        return []
    fused, others = next(iter(missing.items()))
    more = f", and so on for {len(missing) - 1} more" if len(missing) > 1 else ""
    return [
        f"generation: vLLM quantizes all of {fused} or nothing, and only a part of it is in {stated.list_name} of the"
        f" quantization_config: list {' and '.join(others)} too{more}"
    ]


def _routers_not_kept(model_parameters: ModelParameters, stated: Quantization) -> list[str]:
    """What vLLM would quantize and no trainer does: models/qwen3_moe.py quantizes routers that the config does not name.

    Published FP8 checkpoints name them all, and so is assumed where the config has no quantization_config.
    """
    if model_parameters.architecture.family != "qwen3_moe":
        return []
    routers = [name for group in model_parameters.groups if group.role is Role.ROUTER for name in group.names()]
    modules = {name: name.removesuffix(".weight") for name in routers}
    missing = [name for name, module in modules.items() if not is_listed(module, module, stated)]
    if not missing:
        return []
    return [
        f"generation: vLLM would quantize {len(missing)} routers, such as {missing[0]}: list them in"
        f" {stated.list_name} of the quantization_config"
    ]


def _tied_head(model_parameters: ModelParameters, stated: Quantization) -> list[str]:
    """MXFP8 of an output layer that is the embedding: vLLM builds its scales, then puts the embedding beside them.

    Source: vllm/model_executor/layers/quantization/base_config.py, QuantizeMethodBase.tie_weights.
    """
    if (
        stated.method != MXFP8.method
        or not model_parameters.architecture.tied
        or is_listed("lm_head", "lm_head", stated)
    ):
        return []
    return [
        "generation: vLLM would read the embedding, which lm_head is tied to, as MXFP8, with scales that nothing fills: list"
        f" lm_head in {stated.list_name} of the quantization_config"
    ]
