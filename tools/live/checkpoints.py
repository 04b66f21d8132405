"""Two random checkpoints of a case, as Hugging Face would save them; for an FP8 engine also as vLLM quantizes them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file

from mcore_reshard.kernels.copies.cast_arithmetic import E4M3_LARGEST, over_elements
from mcore_reshard.planner.model.precision import Block
from mcore_reshard.planning import read_request
from mcore_reshard.trainers.quantized_export import pairs_by_name
from mcore_reshard.validation import tiny
from mcore_reshard.validation.hf_configs import register_configs
from mcore_reshard.validation.precision import quantized_by_engine, side_precisions

from .cases import Case

VERSIONS = (1, 2, 1)  # the checkpoint of each refit


def trainer_folder(root: Path, case: Case, checkpoint: int) -> Path:
    return root / "checkpoints" / case.weights_name / str(checkpoint)


def engine_folder(root: Path, case: Case, checkpoint: int) -> Path:
    """What an engine loads: quantized where it holds FP8."""
    if case.gen_dtype == "bf16":
        return trainer_folder(root, case, checkpoint)
    return root / "checkpoints" / case.checkpoint_name / str(checkpoint)


def write_checkpoints(root: Path, case: Case, device: torch.device) -> None:
    """Write the folders of a case that are not there. `device` quantizes: a GPU divides otherwise than a CPU."""
    register_configs()
    request = read_request(case.config, "tp=1", "tp=1", train_dtype=case.train_dtype, gen_dtype=case.gen_dtype)
    pairs = pairs_by_name(request.plan()) if case.gen_dtype == "fp8" else {}
    for checkpoint in (1, 2):
        plain = dict(_weights(case, checkpoint))
        if case.train_dtype == "fp8":
            rounded = {name: rounded_to_fp8(plain[name], pair.block) for name, pair in pairs.items()}
            plain |= {name: dequantized(*rounded[name], pair.block) for name, pair in pairs.items()}
            quantized = plain | {name: data for name, (data, _) in rounded.items()}
            quantized |= {pair.name: rounded[name][1] for name, pair in pairs.items()}
        elif pairs:
            quantized = dict(quantized_by_engine(plain.items(), pairs, device, by_vllm=device.type == "cuda"))
        if not (folder := trainer_folder(root, case, checkpoint)).exists():
            _write(folder, case.config, plain)
        if not (folder := engine_folder(root, case, checkpoint)).exists():
            shapes = {pair.name: pair.shape for pair in pairs.values()}
            shaped = {name: value.reshape(shapes.get(name, value.shape)) for name, value in quantized.items()}
            _write(folder, side_precisions(request).engine_config, shaped)


def rounded_to_fp8(weight: torch.Tensor, block: Block) -> tuple[torch.Tensor, torch.Tensor]:
    """E4M3 data [M, K] and the scales of its blocks, float32, near a weight without blocks of zeros.

    A quantizer that is given the dequantized weight makes the same bytes again, Transformer Engine's as well: each scale is
    a power of two, and the largest element of its block is 448 of it.
    """
    rows, columns = weight.shape
    down, across = -(-rows // block[0]), -(-columns // block[1])
    padded = torch.nn.functional.pad(weight.float(), (0, across * block[1] - columns, 0, down * block[0] - rows))
    blocks = padded.reshape(down, block[0], across, block[1])
    largest = blocks.abs().amax((1, 3), keepdim=True)
    scales = torch.exp2(torch.ceil(torch.log2(largest / E4M3_LARGEST)))
    data = torch.where(blocks.abs() == largest, blocks.sign() * E4M3_LARGEST, blocks / scales)
    whole = data.reshape(padded.shape)[:rows, :columns].to(torch.float8_e4m3fn)
    return whole.contiguous(), scales.reshape(down, across)


def dequantized(data: torch.Tensor, scales: torch.Tensor, block: Block) -> torch.Tensor:
    """The bfloat16 weight; exact for scales that are powers of two."""
    return (data.float() * over_elements(scales, block, data.shape)).to(torch.bfloat16)


def _weights(case: Case, checkpoint: int) -> Iterator[tuple[str, torch.Tensor]]:
    """Random weights of usual sizes, so that greedy answers of two checkpoints differ from the first token on."""
    generator = torch.Generator().manual_seed(checkpoint)
    for name, shape in tiny.checkpoint_shapes(case.config).items():
        value = torch.randn(shape, generator=generator)
        if "norm" in name:
            value = 1 + 0.1 * value
        elif len(shape) == 1:
            value = 0.1 * value
        elif "embed" not in name:
            value = value / shape[-1] ** 0.5
        yield name, value.to(tiny.checkpoint_dtype(name))


def _write(folder: Path, config: dict[str, object], tensors: dict[str, torch.Tensor]) -> None:
    partial = folder.with_name(folder.name + ".partial")
    partial.mkdir(parents=True, exist_ok=True)
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    contiguous = {name: tensor.cpu().contiguous() for name, tensor in tensors.items()}
    save_file(contiguous, partial / "model.safetensors", metadata={"format": "pt"})
    partial.rename(folder)
