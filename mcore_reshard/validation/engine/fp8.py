"""The tensors of a vLLM rank in block FP8: data in E4M3, and scales beside them.

The other half of the oracle, again without code of the planner's. It cuts the scale of every element as it cuts the
element, and keeps one of each block. Mirrors vLLM 0.32's layers/quantization/fp8.py (Fp8LinearMethod,
Fp8MoEMethod). vLLM makes blocks of experts smaller where tensor parallelism cuts inside of them; a plan then fills a
tensor of the checkpoint's blocks, and the engine repeats them.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import gcd

import torch

from .tables import Shape, Table, Target

SUFFIX = "_scale_inv"
BLOCKS = ".blocks"  # a plan names the tensor that scales are repeated from by their name and this
_SMALLEST = 32  # blocks that vLLM makes
_FAMILIES = {"llama", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2"}

_FUSED_IN = {
    **dict.fromkeys(("q_proj", "k_proj", "v_proj"), "qkv_proj"),
    **dict.fromkeys(("gate_proj", "up_proj"), "gate_up_proj"),
    **dict.fromkeys(("q_a_proj", "kv_a_proj_with_mqa"), "fused_qkv_a_proj"),
}

Block = tuple[int, int]


@dataclass(frozen=True, slots=True)
class Refined:
    """Scales that vLLM repeats from a tensor of the checkpoint's blocks, `blocks_shape`: [experts, rows, columns].

    Scale [e, i, j] of the engine is [e, rows[i], columns[j]] of that tensor.
    """

    blocks_shape: Shape
    rows: torch.Tensor
    columns: torch.Tensor


def quantize(table: Table) -> dict[str, Refined]:
    """Turn the linear layers of a filled table into block FP8, if the config's quantization_config says so.

    Returns the scales whose blocks vLLM makes smaller, by name. Raises ValueError for another quantization, and for
    parts of tensors that do not begin and end on block edges, which vLLM refuses.
    """
    config, stated = table.config, table.config.get("quantization_config")
    if not stated:
        return {}
    if stated.get("quant_method") != "fp8" or not stated.get("weight_block_size"):
        raise ValueError(f"only block FP8 is written down here, not {stated}")
    if config["model_type"] not in _FAMILIES:
        raise ValueError(f"{config['model_type']} in FP8 is not written down here")
    block = (int(stated["weight_block_size"][0]), int(stated["weight_block_size"][1]))
    kept = stated.get("ignored_layers") or stated.get("modules_to_not_convert") or ()
    expert_block = _expert_block(table, block)
    numbers: dict[str, list[torch.Tensor]] = {}  # of the checkpoint's blocks, for each matrix in a refined tensor
    for name, (shape, targets) in list(table.sources.items()):
        # Linear layers have names like q_proj and kv_a_proj_with_mqa.
        is_linear = name.startswith("model.layers.") and name.endswith("weight") and "_proj" in name.split(".")[-2]
        if not is_linear or _is_kept(name, kept):
            continue
        grid, fine = _grid(shape, block), expert_block if ".experts." in name else block
        scales = [_beside(table, target, shape, block, fine) for target in targets]
        table.sources[name + SUFFIX] = (grid, scales)
        for target, scale in zip(targets, scales, strict=True):
            whole, _ = table.tensors[target.tensor]
            table.tensors[target.tensor] = (whole, torch.float8_e4m3fn)
            table.tensors[scale.tensor] = ((*whole[:-2], *_grid(whole, fine)), torch.float32)
            if fine != block and scale.index[0] == 0:  # all experts are alike
                block_numbers = torch.arange(grid[0] * grid[1]).reshape(grid)
                numbers.setdefault(scale.tensor, []).append(scale.take(block_numbers))
    return {name: _refined(table.tensors[name][0], parts) for name, parts in numbers.items()}


def _expert_block(table: Table, block: Block) -> Block:
    """vLLM makes the blocks of experts smaller where it cuts inside of them: fused_moe/oracle/fp8.py,
    refine_fp8_moe_block_shape."""
    if "moe_intermediate_size" not in table.config:
        return block
    inner, hidden = table.config["moe_intermediate_size"], table.config["hidden_size"]
    ways, _ = table.experts_cut
    width = inner // ways
    if width % block[0] == 0 and (ways == 1 or width % block[1] == 0):
        return block
    size = gcd(*block, width, hidden)
    if size < _SMALLEST:
        return block
    if any(part % edge for part in (inner, hidden) for edge in block):  # its loader would cut the grid unevenly
        raise ValueError(f"experts of {inner} by {hidden} are not whole blocks of {block}: vLLM fails to load them")
    return (size, size)


def _refined(shape: Shape, parts: list[torch.Tensor]) -> Refined:
    """`parts`: for each matrix of an expert, gate above up, the numbers of the checkpoint's blocks that its scales are of."""
    rows, first = [], 0
    for numbers in parts:
        touched, of_row = numbers[:, 0].unique(return_inverse=True)
        rows.append(first + of_row)
        first += len(touched)
    touched, columns = parts[0][0].unique(return_inverse=True)
    return Refined((shape[0], first, len(touched)), torch.cat(rows), columns)


def _is_kept(name: str, kept: list[str] | tuple[str, ...]) -> bool:
    """Whether the config lists a module, or the one that it is fused into; for experts, one of the layer or all of them."""
    layer, separator, _ = name.partition(".experts.")
    if separator:
        return any(f"{listed}.".startswith(layer + separator) for listed in kept)
    prefix, _, leaf = name.removesuffix(".weight").rpartition(".")
    return any(f"{prefix}.{module}" in kept for module in {leaf, _FUSED_IN.get(leaf, leaf)})


def _grid(shape: Shape, block: Block) -> Block:
    return -(-shape[-2] // block[0]), -(-shape[-1] // block[1])


def _beside(table: Table, target: Target, whole: Shape, block: Block, fine: Block) -> Target:
    """The target of the scales of a matrix `whole`, where `target` takes a part of it: one for each `fine` block."""
    shape, _ = table.tensors[target.tensor]
    box = torch.empty(shape, device="meta")[target.index].shape
    for extent, full, size in zip(box, whole, fine, strict=True):
        if extent % size and extent != full:
            raise ValueError(f"{target.tensor} holds {extent} of {full} rows or columns: not whole blocks of {size}")
    index = list(target.index)
    for position, part in enumerate(index):
        if isinstance(part, slice):
            if part.start % fine[0]:
                raise ValueError(f"{target.tensor}: parts share a block of {fine[0]} rows")
            index[position] = slice(part.start // fine[0], -(-part.stop // fine[0]))

    def take(grid: torch.Tensor) -> torch.Tensor:
        by_row = grid.repeat_interleave(block[0], 0)[: whole[0]]
        return target.take(by_row.repeat_interleave(block[1], 1)[:, : whole[1]])[:: fine[0], :: fine[1]]

    return Target(target.tensor + SUFFIX, tuple(index), take)
