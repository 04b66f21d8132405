"""What becomes of a vLLM rank's tensors when the config asks for block FP8: data in E4M3, and scales beside them.

The other half of the oracle's tables, and again no code of the planner's: the scale of every element is taken the same
way as the element, and one of each block is kept. Mirrors vLLM 0.32's layers/quantization/fp8.py (Fp8LinearMethod,
Fp8MoEMethod, for checkpoints that are in FP8).
"""

from __future__ import annotations

from dataclasses import replace

import torch

from .tables import Config, Index, Shape, Table, Take, Target

SUFFIX = "_scale_inv"
_FAMILIES = {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2"}

_FUSED_IN = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}

Block = tuple[int, int]


def quantize(table: Table, config: Config) -> None:
    """Turn the linear layers of a filled table into block FP8, if the config's quantization_config says so.

    Raises ValueError for another quantization, and for parts of tensors that do not begin and end on block edges: vLLM
    refuses those, or for experts makes the blocks smaller, which is not written down here.
    """
    stated = config.get("quantization_config")
    if not stated:
        return
    if stated.get("quant_method") != "fp8" or not stated.get("weight_block_size"):
        raise ValueError(f"only block FP8 is written down here, not {stated}")
    if config["model_type"] not in _FAMILIES:
        raise ValueError(f"{config['model_type']} in FP8 is not written down here")
    block = (int(stated["weight_block_size"][0]), int(stated["weight_block_size"][1]))
    kept = stated.get("ignored_layers") or stated.get("modules_to_not_convert") or ()
    for name, (shape, targets) in list(table.sources.items()):
        if _is_linear(name) and not _is_kept(name, kept):
            scales = [_beside(table, target, shape, block) for target in targets]
            table.sources[name + SUFFIX] = (_grid(shape, block), scales)
            for target in targets:
                _add_scales(table, target.tensor, block)


def _is_linear(name: str) -> bool:
    """The `..._proj` matrices; kv_a_proj_with_mqa is one too."""
    return name.startswith("model.layers.") and name.endswith("weight") and "_proj" in name.split(".")[-2]


def _is_kept(name: str, kept: list[str] | tuple[str, ...]) -> bool:
    """Listed modules stay as they are, by their name or by that of the module they are fused in; the experts of a layer
    do if one of them, or all, are listed."""
    experts, found, _ = name.partition(".experts.")
    if found:
        return any(f"{listed}.".startswith(experts + found) for listed in kept)
    prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
    return any(f"{prefix}.{module}" in kept for module in {leaf, _FUSED_IN.get(leaf, leaf)})


def _add_scales(table: Table, tensor: str, block: Block) -> None:
    shape, _ = table.tensors[tensor]
    table.tensors[tensor] = (shape, torch.float8_e4m3fn)
    table.tensors[tensor + SUFFIX] = ((*shape[:-2], *_grid(shape, block)), torch.float32)


def _grid(shape: Shape, block: Block) -> Block:
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def _beside(table: Table, target: Target, whole: Shape, block: Block) -> Target:
    """Where the scales of a matrix `whole` go, of which the target takes a part."""
    shape, _ = table.tensors[target.tensor]
    box = torch.empty(shape, device="meta")[target.index].shape
    rows = [part for part in target.index if isinstance(part, slice)]
    for part, full, size in zip(box, whole, block, strict=True):
        if part % size and part != full:
            raise ValueError(f"{target.tensor} holds {part} of {full} rows or columns: not whole blocks of {size}")
    if any(part.start % block[0] for part in rows):
        raise ValueError(f"{target.tensor}: parts share a block of {block[0]} rows")
    index: Index = tuple(_in_blocks(part, block[0]) if isinstance(part, slice) else part for part in target.index)
    return replace(
        target, tensor=target.tensor + SUFFIX, index=index, take=_one_of_each_block(target.take, whole, block)
    )


def _in_blocks(rows: slice, size: int) -> slice:
    return slice(rows.start // size, -(-rows.stop // size))


def _one_of_each_block(take: Take, whole: Shape, block: Block) -> Take:
    def scales(grid: torch.Tensor) -> torch.Tensor:
        by_row = grid.repeat_interleave(block[0], 0)[: whole[0]]
        return take(by_row.repeat_interleave(block[1], 1)[:, : whole[1]])[:: block[0], :: block[1]]

    return scales
