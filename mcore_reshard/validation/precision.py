"""The dtypes of both sides of a validation, and golden in the dtype that the engine loads.

The checkpoint is always in bfloat16; a trainer in FP8 quantizes it as it loads, and its own bytes are golden. If the
refit quantizes, golden is Megatron-Bridge's bfloat16 export, quantized by vLLM itself, or by the reference without vLLM.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch

from mcore_reshard.planner.model.families import as_published
from mcore_reshard.planner.model.parameters import ModelParameters, Role
from mcore_reshard.planner.model.precision import BLOCK_FP8, Block
from mcore_reshard.planning import PlanRequest, TracedRequest
from mcore_reshard.trainers.quantized_export import Pairs, quantize_pair

from .errors import ValidationError

# (--train-dtype, --gen-dtype) whose results can be compared byte for byte, beside bf16 on both
_COMPARED = (("bf16", "fp8"), ("fp8", "fp8"))


@dataclass(frozen=True, slots=True)
class SidePrecisions:
    """The precisions of both sides of a validation. `block` is None if neither quantizes."""

    train_dtype: str | None
    gen_dtype: str | None
    trainer_config: dict[str, Any]
    engine_config: dict[str, Any]
    block: Block | None

    @property
    def trainer_block(self) -> Block | None:
        """Blocks that the trainer keeps its weights in."""
        return self.block if self.train_dtype == "fp8" else None

    @property
    def quantized_on_the_way(self) -> bool:
        return self.block is not None and self.trainer_block is None

    def __str__(self) -> str:
        if self.block is None:
            return ""
        quantizer = "quantized on the way" if self.quantized_on_the_way else "kept by the trainer"
        return f"{self.train_dtype} -> {self.gen_dtype} in blocks of {'x'.join(map(str, self.block))}, {quantizer}"


def side_precisions(planning: PlanRequest | TracedRequest) -> SidePrecisions:
    """The precisions of both sides of a model. FP8 has the blocks of the config; 128 by 128 if it names none.

    Raises ValidationError for dtypes that cannot be compared, models that are not in bfloat16 and FP8 not in blocks.
    """
    config = as_published(planning.config)
    plain = {name: value for name, value in config.items() if name != "quantization_config"}
    if isinstance(planning, TracedRequest):
        if planning.form is None:
            return SidePrecisions(None, None, plain, plain, None)
        engine_config = as_published(planning.engine_config)
        train_dtype = "fp8" if planning.quantized_trainer else "bf16"
        return SidePrecisions(train_dtype, "fp8", plain, engine_config, planning.form.block)
    model_parameters = planning.model_parameters
    if model_parameters.dtype != "bfloat16":
        raise ValidationError(
            f"models are validated in bfloat16, or FP8 beside bfloat16, and this one is in {model_parameters.dtype}: give a"
            " config in bfloat16"
        )
    dtypes = (planning.train_dtype or "bf16", planning.gen_dtype or "bf16")
    if dtypes == ("bf16", "bf16"):
        return SidePrecisions(None, None, plain, plain, None)
    if dtypes not in _COMPARED:
        pairs = ", ".join(f"{train} -> {gen}" for train, gen in _COMPARED)
        raise ValidationError(
            f"{dtypes[0]} -> {dtypes[1]} is not validated here: what can be compared is {pairs}, and bf16 on both sides"
        )
    stated = config.get("quantization_config") or _default_quantization(model_parameters)
    if stated.get("quant_method") != "fp8" or not stated.get("weight_block_size"):
        raise ValidationError(f"only FP8 in blocks is validated here, and the config's quantization_config is {stated}")
    rows, columns = stated["weight_block_size"]
    return SidePrecisions(*dtypes, plain, {**plain, "quantization_config": stated}, (int(rows), int(columns)))


def _default_quantization(model_parameters: ModelParameters) -> dict[str, Any]:
    """The quantization_config of a usual FP8 checkpoint. It lists the routers, which stay unquantized."""
    routers = [name for group in model_parameters.groups if group.role is Role.ROUTER for name in group.names()]
    return {
        "quant_method": "fp8",
        "activation_scheme": "dynamic",
        "weight_block_size": list(BLOCK_FP8.block or ()),
        "modules_to_not_convert": [name.removesuffix(".weight") for name in routers],
    }


def quantized_by_engine(
    tensors: Iterable[tuple[str, torch.Tensor]], pairs: Pairs, device: torch.device, *, by_vllm: bool
) -> Iterator[tuple[str, torch.Tensor]]:
    """Quantize the bfloat16 weights of `pairs` as the engine would; other tensors pass through.

    `by_vllm` calls vLLM's own quantizer of bfloat16 checkpoints (layers/quantization/online/fp8.py). Otherwise the
    reference does it (kernels/copies/cast_arithmetic.py), which is tested against vLLM's. The engine's `device` computes,
    because a GPU divides otherwise than a CPU.
    """
    for name, tensor in tensors:
        if (pair := pairs.get(name)) is None:
            yield name, tensor
        elif by_vllm:
            from vllm.utils.deep_gemm import per_block_cast_to_fp8

            # Compiling takes longer than all else, and gives the same bytes on a CPU.
            with torch.compiler.set_stance("force_eager"):
                data, scales = per_block_cast_to_fp8(tensor.to(device), list(pair.block), use_ue8m0=False)
            yield from ((name, data), (pair.name, scales))
        else:
            yield from quantize_pair(name, tensor.to(device), pair)
