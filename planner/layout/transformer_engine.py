"""Where Transformer Engine keeps the scales of quantized parameters, and where a cast in flight puts those it computes.

A quantized parameter is a tensor of its own class. In a plan its E4M3 data has the parameter's name. Its scales have that
name and the attribute's, as in `linear_fc2.weight._rowwise_scale_inv`.
Source: transformer_engine/pytorch/tensor/{float8_blockwise,mxfp8,float8}_tensor.py; shapes read off real parameters.
"""

from __future__ import annotations

from dataclasses import replace

from mcore_reshard.planner.model.parameters import ParameterGroup
from mcore_reshard.planner.model.precision import MXFP8, Block, Format

from .block_scales import scale_partition, tensor_scale_partition
from .geometry import LocalTensor
from .partitions import Misc, Partition

_ROWWISE = "._rowwise_scale_inv"


def te_scales(group: ParameterGroup, partition: Partition, form: Format) -> Partition | Misc:
    """Float8BlockwiseQTensor pads the grid's columns to 4, MXFP8Tensor its rows to 128 as well; Float8Tensor has [1]."""
    if form.block is None:
        if len(partition.pieces) > 1:
            return Misc(
                f"each of {len(partition.pieces)} training ranks has one scale of its own, for its part of the matrix"
            )
        return tensor_scale_partition(partition, _single, "its one scale serves them all")
    rows_to = 128 if form.scales == MXFP8.scales else 1

    def padded(weight: LocalTensor, grid: tuple[int, ...]) -> LocalTensor:
        rows, columns = (-(-size // to) * to for size, to in zip(grid, (rows_to, 4), strict=True))
        return LocalTensor(weight.name + _ROWWISE, (rows, columns), form.scales)

    return scale_partition(group, partition, form.block, padded)


def computed_scales(group: ParameterGroup, partition: Partition, block: Block) -> Partition | Misc:
    """The scales that the source of a cast computes: the block grid of its local tensor, unpadded."""
    return scale_partition(
        group, partition, block, lambda weight, grid: LocalTensor(weight.name + _ROWWISE, grid, "float32")
    )


def _single(weight: LocalTensor, view: tuple[int, ...]) -> LocalTensor:
    return replace(weight, name=weight.name + "._scale_inv", shape=(1,), dtype="float32")
