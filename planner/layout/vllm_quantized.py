"""vLLM's quantization: the matrices that it quantizes, where their scales lie, and what vLLM or a trainer cannot hold.

Scales lie as `load_weights` leaves them: fused tensors are fused in blocks as well (layers/linear.py,
adjust_block_scale_shard). Source: layers/quantization/fp8.py (Fp8LinearMethod, Fp8MoEMethod) and modelopt.py (KMxfp8Static,
ModelOptMxFp8FusedMoE). Paths are under vllm/model_executor of vLLM 0.32.
"""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from math import gcd

from mcore_reshard.planner.model.name_patterns import fill
from mcore_reshard.planner.model.parameters import ModelParameters, ParameterGroup, Quantization, Role
from mcore_reshard.planner.model.precision import MXFP8, QUANTIZED, Block, Format

from .block_scales import scale_partition, splits_blocks, tensor_scale_partition, touched_scale_partition
from .geometry import LocalTensor
from .partitions import Misc, Partition

# `...weight_scale_inv.blocks`: the checkpoint's scales of every block that a rank has a part of, beside the engine's own
# tensor. The engine's adapter repeats them into that one (engines/vllm/refined_scales.py).
CHECKPOINT_BLOCKS = ".blocks"
_REFUSES = "vLLM refuses to"
_FINEST_BLOCK = 32  # layers/fused_moe/oracle/fp8.py refine_fp8_moe_block_shape
# Modules that vLLM fuses -> their name in a list of modules, instead of each part's (packed_modules_mapping of models/).
_FUSED_INTO = {
    **dict.fromkeys((Role.Q, Role.K, Role.V), "qkv_proj"),
    **dict.fromkeys((Role.GATE, Role.UP, Role.SHARED_GATE, Role.SHARED_UP), "gate_up_proj"),
    **dict.fromkeys((Role.MLA_Q_A, Role.MLA_KV_A), "fused_qkv_a_proj"),
}


def quantizes(group: ParameterGroup, layer: int | None, model: ModelParameters) -> bool:
    """Whether vLLM quantizes the matrices of a group in one layer.

    vLLM's MXFP8 takes the output layer too (layers/quantization/modelopt.py, ModelOptQuantConfigBase.get_quant_method). It
    leaves that of gpt-oss alone: models/gpt_oss.py builds it without a config. If the model has no quantization_config of
    this format, the plan assumes one that lists the output layer and the routers: no trainer quantizes these.
    """
    quantization = model.quantization
    if group.role is Role.LM_HEAD:
        if quantization is None or quantization.method != MXFP8.method or model.architecture.family == "gpt_oss":
            return False
    elif group.role not in QUANTIZED:
        return False
    return quantization is None or not _is_listed(group, layer, quantization)


def misquantized(model: ModelParameters) -> list[str]:
    """Why vLLM cannot hold the model as its quantization_config says; empty where it can."""
    if (quantization := model.quantization) is None:
        return []
    reasons = [rule(model, quantization) for rule in (_half_listed_modules, _quantized_routers, _tied_head)]
    return [f"generation: {reason}" for reason in reasons if reason]


def _is_listed(group: ParameterGroup, layer: int | None, quantization: Quantization) -> bool:
    """Whether the config lists a module: by its name, by that of the module it is fused into, or for experts by any inside.

    Source: layers/quantization/utils/quant_utils.py, is_layer_skipped, which matches exactly.
    """
    if not group.experts:
        return _is_module_listed(*_module_names(group, layer), quantization)
    experts = fill(group.name_pattern.partition(".{expert}")[0], layer=layer)
    if any(listed.startswith(experts + ".") for listed in quantization.not_converted):
        return True
    return _is_module_listed(experts, "", quantization)


def _is_module_listed(module: str, fused: str, quantization: Quantization) -> bool:
    """Whether the config lists a module, or the one that it is fused into, if any. MXFP8 takes parts of names, and patterns.

    Source: layers/quantization/modelopt.py, ModelOptQuantConfigBase.is_layer_excluded.
    """
    fused = fused or module
    if module in quantization.not_converted or fused in quantization.not_converted:
        return True
    return quantization.method == MXFP8.method and any(
        listed in fused or fnmatchcase(fused, listed) for listed in quantization.not_converted
    )


def _module_names(group: ParameterGroup, layer: int | None) -> tuple[str, str]:
    """The module of a weight that is no expert's, and the module that vLLM fuses it into: the same where it does not."""
    module = group.name(layer, None).removesuffix(".weight")
    fused = _FUSED_INTO.get(group.role)
    return module, f"{module.rpartition('.')[0]}.{fused}" if fused else module


def _half_listed_modules(model: ModelParameters, quantization: Quantization) -> str:
    """Parts of fused modules that are listed without the others; empty where there are none.

    Source: layers/quantization/utils/quant_utils.py, is_layer_skipped, which raises ValueError.
    """
    modules_of: dict[str, list[str]] = {}  # by the name of the fused module
    for group in model.groups:
        if group.role in QUANTIZED and not group.experts and not group.mtp:
            for layer in group.layers:
                module, fused = _module_names(group, layer)
                modules_of.setdefault(fused, []).append(module)
    half_listed = {}
    for fused, modules in modules_of.items():
        others = [module for module in modules if module not in quantization.not_converted]
        if fused not in quantization.not_converted and 0 < len(others) < len(modules):
            half_listed[fused] = others
    if not half_listed:
        return ""
    fused, others = next(iter(half_listed.items()))
    more = f", and so on for {len(half_listed) - 1} more" if len(half_listed) > 1 else ""
    return (
        f"vLLM quantizes all of {fused} or nothing, and only a part of it is in {quantization.list_name} of the"
        f" quantization_config: list {' and '.join(others)} too{more}"
    )


def _quantized_routers(model: ModelParameters, quantization: Quantization) -> str:
    """Routers that vLLM would quantize, though no trainer does. Published FP8 checkpoints list them all.

    Source: models/qwen3_moe.py, which quantizes the routers that the config does not list.
    """
    if model.architecture.family != "qwen3_moe":
        return ""
    routers = [name for group in model.groups if group.role is Role.ROUTER for name in group.names()]
    missing = [name for name in routers if not _is_module_listed(name.removesuffix(".weight"), "", quantization)]
    if not missing:
        return ""
    return (
        f"vLLM would quantize {len(missing)} routers, such as {missing[0]}: list them in {quantization.list_name} of the"
        " quantization_config"
    )


def _tied_head(model: ModelParameters, quantization: Quantization) -> str:
    """MXFP8 of an output layer that is the embedding: vLLM builds its scales, then puts the embedding beside them.

    Source: layers/quantization/base_config.py, QuantizeMethodBase.tie_weights.
    """
    reads_mxfp8 = quantization.method == MXFP8.method and not _is_module_listed("lm_head", "", quantization)
    if not reads_mxfp8 or not model.architecture.tied:
        return ""
    return (
        "vLLM would read the embedding, which lm_head is tied to, as MXFP8, with scales that nothing fills: list"
        f" lm_head in {quantization.list_name} of the quantization_config"
    )


def vllm_scales(group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
    """`weight_scale_inv` for blocks, `weight_scale` for MXFP8 and for one scale: the weight's name and a suffix."""
    if group.role is Role.MAMBA_IN:
        return Misc("no layout rule for the scales of in_proj, whose sections vLLM cuts one by one")
    if group.role is Role.LM_HEAD:
        return Misc(
            f"vLLM keeps lm_head in {form.name} as well, which no trainer does: list it in ignored_layers of the"
            " quantization_config"
        )

    def beside(weight: LocalTensor, grid: tuple[int, ...]) -> LocalTensor:
        if form.block is None:  # (experts, 1, 1) is [experts], and [experts, parts] in w13; (1, 1) is [1]
            grid = grid[: 2 if _leaf(partition).startswith("w13") else 1]
        return LocalTensor(weight.name + form.suffix, grid, form.scales)

    def checkpoint_blocks(weight: LocalTensor, grid: tuple[int, ...]) -> LocalTensor:
        return LocalTensor(weight.name + form.suffix + CHECKPOINT_BLOCKS, grid, form.scales)

    if form.block is None:
        reason = "vLLM brings their scales to the largest and requantizes after loading"
        return tensor_scale_partition(partition, beside, reason)
    if _misfits(group, partition, form.block) and gcd(*form.block, *_extents(partition)) >= _FINEST_BLOCK:
        if any(size % edge for size in group.view for edge in form.block):
            return Misc(
                f"{form.name}: {_REFUSES} load experts of {group.view}, which are not whole blocks of {form.block}"
            )
        return touched_scale_partition(partition, form.block, checkpoint_blocks)
    scales = scale_partition(group, partition, form.block, beside)
    if refusal := _refusal(group, partition, form.block, form):
        return Misc(f"{scales.reason if isinstance(scales, Misc) else form.name}: {_REFUSES} build {refusal}")
    return scales


def notes(misc: Sequence[tuple[str, str]]) -> list[str]:
    """One note that vLLM cannot run on these ranks, if a group travels by misc for such a reason."""
    refused = [name for name, reason in misc if _REFUSES in reason]
    if not refused:
        return []
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    return [f"{_REFUSES} run this model on these ranks: {refused[0]}{more}; the reasons are above"]


def _refusal(group: ParameterGroup, partition: Partition, block: Block, form: Format) -> str:
    """The kind of layer that vLLM does not build; empty if it builds this one.

    MXFP8: columns that are no multiple of 32 (modelopt.py, KMxfp8Static and ModelOptMxFp8FusedMoE, create_weights).
    Blocks: experts too small to refine (layers/fused_moe/oracle/fp8.py, resolve_fp8_moe_weight_block_shape), and a linear
    layer cut inside of them (utils/fp8_utils.py, validate_fp8_block_shape), unless it is fused (layers/linear.py,
    _maybe_allow_fp8_block_shape_mismatch).
    """
    if form == MXFP8:
        columns = {piece.region.extents[1] for part in partition.pieces for piece in part}
        odd = [count for count in columns if count % 32]
        return f"a layer with {min(odd)} columns on a rank, no multiple of 32" if odd else ""
    if group.experts:
        misfits = _misfits(group, partition, block)
        return "such experts, unless it is told a moe_backend that pads them" if misfits else ""
    alone = all(piece.local().extents == piece.tensor.shape for part in partition.pieces for piece in part)
    return "a linear layer cut so" if alone and splits_blocks(partition, block) else ""


def _misfits(group: ParameterGroup, partition: Partition, block: Block) -> bool:
    """Whether the width of these experts on a rank is not whole blocks. Uncut columns may end in a partial block.

    vLLM then refines the blocks of w13 and w2 to 32 or more (layers/fused_moe/oracle/fp8.py, refine_fp8_moe_block_shape).
    Its loader repeats each scale and cuts that grid evenly (routed_experts.py, weight_loader), so partial blocks do not
    load. Width 96 has 2 blocks of 64; they become 4 of 32, and the engine has room for 3.
    """
    if not group.experts:
        return False
    width = _extents(partition)[1 if _leaf(partition).startswith("w2") else 0]
    return width % block[0] != 0 or (len(partition.pieces) > 1 and width % block[1] != 0)


def _leaf(partition: Partition) -> str:
    """The last word of a tensor's name: of experts `w13_weight`, which has gate and up, or `w2_weight`."""
    return partition.pieces[0][0].tensor.name.rpartition(".")[2]


def _extents(partition: Partition) -> tuple[int, ...]:
    """Rows and columns of an expert on a rank: vLLM cuts experts evenly."""
    return partition.pieces[0][0].region.extents
