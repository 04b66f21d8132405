"""Tiny models of every supported family, and checkpoints whose every element says where it belongs.

No two elements of a payload agree in both of its first two versions. So the bytes after a refit of each version show
any element that landed in a wrong place.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterator, Mapping
from itertools import accumulate, product
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.kernels.copies.cast_arithmetic import over_elements
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import FAMILIES
from mcore_reshard.planner.model.precision import Block
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine

Shapes = dict[str, tuple[int, ...]]
Blocks = Mapping[str, Block]  # by the names of weights that will be quantized

_NAMES = ("llama", "llama_tied", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3", "kimi_k2", "nemotron_h", "gpt_oss")
# HF configs: those that the planner knows as `tiny-...`
TINY: dict[str, dict[str, Any]] = {name: load_config(f"tiny-{name.replace('_', '-')}") for name in _NAMES}
TINY["deepseek_v3_nolora"] = load_config("tiny-moonlight")
# Megatron-Bridge 0.6 tells by its shape whether an expert is stored transposed: no square gate_up_proj.
TINY["gpt_oss"]["intermediate_size"] = 48

# transformers 5 stacks the experts of a layer in one tensor; checkpoints keep one tensor each
_STACKED_EXPERTS = {"gate_up_proj": ("gate_proj", "up_proj"), "down_proj": ("down_proj",)}
_COPIES = {".embed_tokens.weight": "model.embed_tokens.weight", ".shared_head.head.weight": "lm_head.weight"}
_FLOAT32_NAMES = ("e_score_correction_bias", "expert_bias", "router_bias", "mixer.A_log", "mixer.D")


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A copy of `TINY[family]` with some fields replaced. Raises KeyError for a family or a field that does not exist."""
    if unknown := sorted(set(overrides) - set(TINY[family])):
        raise KeyError(f"{family} has no config field {', '.join(unknown)}")
    return {**TINY[family], **overrides}


def checkpoint_shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of the checkpoint in sorted HF name order, and its shape.

    Of a model that the planner has no rules for: every tensor that Megatron-Bridge exports.
    """
    if config["model_type"] not in FAMILIES or config.get("moe_latent_size"):
        return dict(_exported_shapes(json.dumps(config)))
    if config["model_type"] == "nemotron_h":  # transformers 4 does not have it
        # vLLM has no tied one, and the shapes of a checkpoint in FP8 are those of its weights
        untied = {**config, "tie_word_embeddings": False, "quantization_config": None}
        shapes = StandInEngine(untied, GenSizes(), 0, "meta").checkpoint_shapes
    else:
        shapes = _transformers_shapes(config)
    tied = {"lm_head.weight"} if config["tie_word_embeddings"] else set()  # one tensor under two names, stored once
    return {name: shapes[name] for name in sorted(set(shapes) - tied)}


def checkpoint_dtype(name: str) -> torch.dtype:
    """The dtype in which published checkpoints store this tensor."""
    return torch.float32 if name.endswith(_FLOAT32_NAMES) else torch.bfloat16


def payload(shapes: Shapes, version: int, blocks: Blocks | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that identify their elements: (name, tensor) for each of `shapes`, in its order.

    Elements are numbered through the whole model. A bfloat16 element of version 1 is the low digit of its number in
    base 32,640, taken as a bit pattern (the finite non-negative ones); version 2 has the next digit. From version 3 on
    the digit is a hash of number and version. A float32 element has that pattern in its upper half and a nonzero lower
    half. So a cast to bfloat16 keeps the identity and destroys the rest. Matrices that will be quantized in `blocks` are
    E4M3 numbers times a factor for each block, both hashed from where they are. One of 254 numbers does not identify an
    element, but no two regions have the same numbers.
    """
    if version < 1:
        raise ValueError(f"payload versions start at 1, not {version}")
    starts = dict(zip(shapes, accumulate(map(math.prod, shapes.values()), initial=0), strict=False))
    for name, shape in shapes.items():
        start = starts[_original(name, shapes)]
        numbers = torch.arange(start, start + math.prod(shape), dtype=torch.int64)
        if blocks and name in blocks:
            yield name, _for_blocks(numbers.reshape(shape), version, blocks[name])
            continue
        digits = _digits(numbers, version)
        if name.endswith("A_log"):  # engines keep -exp(A_log): stay where exp neither saturates nor flattens
            digits = _EXPONENT_DIGITS[0] + digits % _EXPONENT_DIGITS[1]
        if checkpoint_dtype(name) == torch.bfloat16:
            tensor = digits.to(torch.int16).view(torch.bfloat16)
        else:
            lower = _digits(numbers, version + 1) + 1  # below half a bfloat16 ulp: a cast rounds down
            tensor = (digits * 2**16 + lower).to(torch.int32).view(torch.float32)
        yield name, tensor.reshape(shape)


def write_checkpoint(
    config: Mapping[str, Any], folder: Path | str, version: int, blocks: Blocks | None = None
) -> dict[str, torch.Tensor]:
    """Write `config.json` and `model.safetensors` with payload `version` into `folder`; return the tensors."""
    from safetensors.torch import save_file

    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = dict(payload(checkpoint_shapes(config), version, blocks))
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return tensors


_EXPONENT_DIGITS = 0x3D80, 0x280  # 640 bfloat16 patterns from 1/16 up, each with an exponential of its own
_E4M3_CODES = 0x7F  # finite non-negative ones
_FACTORS = 1024  # from 1 down to 2**-8
_BASE = 0x7F80  # the number of finite non-negative bfloat16 patterns: 0 .. 0x7F7F


def _original(name: str, shapes: Shapes) -> str:
    """Layers for multi-token prediction may have copies of the embedding and of the head, which are stored twice."""
    return next((first for ending, first in _COPIES.items() if name.endswith(ending) and first in shapes), name)


def _for_blocks(numbers: torch.Tensor, version: int, block: Block) -> torch.Tensor:
    """bfloat16 [rows, columns] of which each block uses the range of E4M3, from int64 element numbers."""
    codes = _digits(numbers, version + 2) % (2 * _E4M3_CODES)
    e4m3 = (codes + codes // _E4M3_CODES).to(torch.uint8).view(torch.float8_e4m3fn)  # 0x7F is NaN
    factors = _digits(numbers[:: block[0], :: block[1]], version + 3) % _FACTORS
    return (e4m3.float() * over_elements(torch.exp2(-factors / 128), block, numbers.shape)).bfloat16()


def _digits(numbers: torch.Tensor, version: int) -> torch.Tensor:
    """One base-32,640 digit for every int64 element number."""
    if version == 1:
        return numbers % _BASE
    if version == 2:
        return numbers // _BASE % _BASE
    mixed = (numbers + version * 0x9E3779B1) % 2**32
    for _ in range(2):
        mixed = (mixed ^ (mixed >> 16)) * 0x45D9F3B % 2**32
    return (mixed ^ (mixed >> 16)) % _BASE


@functools.cache
def _exported_shapes(config: str) -> Shapes:
    from mcore_reshard.validation.trainer.checkpoint_names import exported_tensors

    return {name: tensor.shape for name, tensor in sorted(exported_tensors(json.loads(config)).items())}


def _transformers_shapes(config: Mapping[str, Any]) -> Shapes:
    import transformers

    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "auto_map")}
    model_type = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **fields))
    shapes: Shapes = {}
    for name, tensor in model.state_dict().items():
        module, _, leaf = name.rpartition(".")
        if model_type != "gpt_oss" and module.endswith(".mlp.experts"):
            projections = _STACKED_EXPERTS[leaf]
            experts, rows, columns = tensor.shape
            for expert, projection in product(range(experts), projections):
                shapes[f"{module}.{expert}.{projection}.weight"] = (rows // len(projections), columns)
        else:
            shapes[name] = tuple(tensor.shape)
    return shapes
