"""Where a vLLM rank keeps the scales of quantized weights, as `load_weights` leaves them.

Source: vllm/model_executor/layers/quantization/fp8.py (Fp8LinearMethod, Fp8MoEMethod) and modelopt.py (KMxfp8Static,
ModelOptMxFp8FusedMoE), 0.32. Fused tensors are fused in blocks as well (layers/linear.py, adjust_block_scale_shard).
"""

from __future__ import annotations

from collections.abc import Sequence
from math import gcd

from mcore_reshard.planner.model.parameters import EXPERT_ROLES, ParameterGroup, Role
from mcore_reshard.planner.model.precision import MXFP8, Block, Format

from .block_scales import scale_partition, splits_blocks, tensor_scale_partition, touched_scale_partition
from .geometry import LocalTensor
from .partitions import Misc, Partition

# `...weight_scale_inv.blocks`: the checkpoint's scales of every block that a rank has a part of, beside the engine's own
# tensor. The engine's adapter repeats them into that one (engines/vllm/refined_scales.py).
CHECKPOINT_BLOCKS = ".blocks"
_REFUSES = "vLLM refuses to"
_FINEST_BLOCK = 32  # layers/fused_moe/oracle/fp8.py refine_fp8_moe_block_shape


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
            grid = grid[: 2 if group.role is Role.EXPERT_UP else 1]
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
    """One note that vLLM cannot run on these ranks, if the reason of a group that travels by misc is such a refusal."""
    refused = [name for name, reason in misc if _REFUSES in reason]
    if not refused:
        return []
    more = f" and {len(refused) - 1} more" if len(refused) > 1 else ""
    return [f"{_REFUSES} run this model on these ranks: {refused[0]}{more}; the reasons are above"]


def _refusal(group: ParameterGroup, partition: Partition, block: Block, form: Format) -> str:
    """What vLLM does not build; empty where it builds the layer.

    MXFP8: columns that are no multiple of 32 (modelopt.py, KMxfp8Static and ModelOptMxFp8FusedMoE, create_weights).
    Blocks: a linear layer that is cut inside of them (utils/fp8_utils.py, validate_fp8_block_shape). vLLM skips this check
    for fused layers (layers/linear.py, _maybe_allow_fp8_block_shape_mismatch). It rejects experts too small to subdivide,
    unless the chosen moe_backend pads them (layers/fused_moe/oracle/fp8.py, resolve_fp8_moe_weight_block_shape).
    """
    if form == MXFP8:
        columns = {piece.region.extents[1] for part in partition.pieces for piece in part}
        odd = [count for count in columns if count % 32]
        return f"a layer with {min(odd)} columns on a rank, no multiple of 32" if odd else ""
    if group.role in EXPERT_ROLES:
        misfits = _misfits(group, partition, block)
        return "such experts, unless it is told a moe_backend that pads them" if misfits else ""
    alone = all(piece.local().extents == piece.tensor.shape for part in partition.pieces for piece in part)
    return "a linear layer cut so" if alone and splits_blocks(partition, block) else ""


def _misfits(group: ParameterGroup, partition: Partition, block: Block) -> bool:
    """Whether the width of these experts on a rank is not whole blocks. Uncut columns may end in a partial block.

    vLLM then refines the blocks of both w13 and w2, where blocks of 32 or more fit (layers/fused_moe/oracle/fp8.py,
    refine_fp8_moe_block_shape). Its loader repeats each scale and cuts the repeated grid evenly, so that a matrix with a
    partial block does not load (layers/fused_moe/routed_experts.py, weight_loader). Example, in blocks of 64: width 96 has
    2 blocks, which are repeated to 4 of 32, and the engine has room for 3.
    """
    if group.role not in EXPERT_ROLES:
        return False
    width = _extents(partition)[1 if group.role is Role.EXPERT_DOWN else 0]
    return width % block[0] != 0 or (len(partition.pieces) > 1 and width % block[1] != 0)


def _extents(partition: Partition) -> tuple[int, ...]:
    """Rows and columns of an expert on a rank: vLLM cuts experts evenly."""
    return partition.pieces[0][0].region.extents
