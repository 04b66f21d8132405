"""Tiny models of every supported family, and checkpoints whose every element says where it belongs.

`TINY` holds HF configs: those that the planner knows as `tiny-...`. `write_checkpoint` writes one with safetensors in
HF names and a payload in which no two elements of the model agree in both of the first two versions, so that comparing
bytes after a refit of each shows any element that landed in a wrong place.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.kernels.copies.cast_arithmetic import over_elements
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.precision import Block

Shapes = dict[str, tuple[int, ...]]
Blocks = Mapping[str, Block]  # by the names of weights that will be quantized

TINY: dict[str, dict[str, Any]] = {
    "llama": load_config("tiny-llama"),
    "llama_tied": load_config("tiny-llama-tied"),
    "qwen2": load_config("tiny-qwen2"),
    "qwen3": load_config("tiny-qwen3"),
    "qwen3_moe": load_config("tiny-qwen3-moe"),
    "deepseek_v3": load_config("tiny-deepseek-v3"),
    "deepseek_v3_nolora": load_config("tiny-moonlight"),
    "kimi_k2": load_config("tiny-kimi-k2"),
    "nemotron_h": load_config("tiny-nemotron-h"),
    # Megatron-Bridge 0.6 tells by its shape whether an expert is stored transposed: no square gate_up_proj.
    "gpt_oss": {**load_config("tiny-gpt-oss"), "intermediate_size": 48},
}

_FLOAT32_NAMES = ("e_score_correction_bias", "A_log", "mixer.D")


def tiny_config(family: str, **overrides: Any) -> dict[str, Any]:
    """A copy of `TINY[family]` with some fields replaced, e.g. `num_key_value_heads=2`, `vocab_size=250`.

    Raises KeyError for a family or a field that does not exist: a misspelled override must not go unseen.
    """
    config = dict(TINY[family])
    unknown = sorted(set(overrides) - set(config))
    if unknown:
        raise KeyError(f"{family} has no config field {', '.join(unknown)}")
    config.update(overrides)
    return config


def checkpoint_shapes(config: Mapping[str, Any]) -> Shapes:
    """Every tensor of the checkpoint in sorted HF name order, and its shape.

    Read off transformers' own model on the meta device; Nemotron-H, which transformers 4 does not have, is listed here.
    """
    shapes = _nemotron_h_shapes(config) if config["model_type"] == "nemotron_h" else _transformers_shapes(config)
    return dict(sorted(shapes.items()))


def checkpoint_dtype(name: str) -> torch.dtype:
    """The dtype that published checkpoints store this tensor in: bfloat16, and float32 for the few that need it."""
    return torch.float32 if name.endswith(_FLOAT32_NAMES) else torch.bfloat16


def payload(shapes: Shapes, version: int, blocks: Blocks | None = None) -> Iterator[tuple[str, torch.Tensor]]:
    """Tensors that identify their elements: (name, tensor) for each of `shapes`, in its order.

    Elements are numbered through the whole model. A bfloat16 element of version 1 is the low digit of its number in
    base 32,640 taken as a bit pattern (the finite non-negative ones), of version 2 the next digit: the two versions
    together identify it. From version 3 on the digit is a hash of number and version. A float32 element has that
    pattern in its upper half and a nonzero lower half, so a cast to bfloat16 keeps the identity and destroys the rest.
    Matrices that will be quantized in `blocks` are E4M3 numbers times a factor for each block, both hashes of where they
    are: one of 254 numbers does not identify an element, but no two regions have the same.
    """
    if version < 1:
        raise ValueError(f"payload versions start at 1, not {version}")
    first = 0
    for name, shape in shapes.items():
        numbers = torch.arange(first, first + math.prod(shape), dtype=torch.int64)
        first += numbers.numel()
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
    for factor in (0x45D9F3B, 0x45D9F3B):
        mixed = (mixed ^ (mixed >> 16)) * factor % 2**32
    return (mixed ^ (mixed >> 16)) % _BASE


def _transformers_shapes(config: Mapping[str, Any]) -> Shapes:
    import transformers

    fields = {key: value for key, value in config.items() if key not in ("model_type", "architectures", "auto_map")}
    model_type = "deepseek_v3" if config["model_type"] == "kimi_k2" else config["model_type"]
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(transformers.AutoConfig.for_model(model_type, **fields))
    shapes: Shapes = {}
    for name, tensor in model.state_dict().items():
        if name == "lm_head.weight" and config["tie_word_embeddings"]:
            continue  # one tensor under two names; checkpoints store it once
        if model_type != "gpt_oss" and ".mlp.experts.gate_up_proj" in name:
            _add_experts(shapes, name, ("gate_proj", "up_proj"), tensor.shape[0], tensor.shape[1] // 2, tensor.shape[2])
        elif model_type != "gpt_oss" and ".mlp.experts.down_proj" in name:
            _add_experts(shapes, name, ("down_proj",), *tensor.shape)
        else:
            shapes[name] = tuple(tensor.shape)
    return shapes


def _add_experts(shapes: Shapes, stacked: str, projections: tuple[str, ...], experts: int, *shape: int) -> None:
    """transformers 5 stacks the experts in its modules; checkpoints keep one tensor each."""
    layer = stacked.rpartition(".")[0]
    for expert in range(experts):
        for projection in projections:
            shapes[f"{layer}.{expert}.{projection}.weight"] = tuple(shape)


def _nemotron_h_shapes(config: Mapping[str, Any]) -> Shapes:
    """NVIDIA's `modeling_nemotron_h.py`: one mixer a layer, named by a letter of `hybrid_override_pattern`."""
    hidden, vocab = config["hidden_size"], config["vocab_size"]
    shapes: Shapes = {"backbone.embeddings.weight": (vocab, hidden), "backbone.norm_f.weight": (hidden,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (vocab, hidden)
    if len(config["hybrid_override_pattern"]) != config["num_hidden_layers"]:
        raise ValueError("hybrid_override_pattern needs one letter for each of num_hidden_layers")
    mixers = {"M": _mamba_shapes, "*": _attention_shapes, "-": _mlp_shapes, "E": _moe_shapes}
    for layer, letter in enumerate(config["hybrid_override_pattern"]):
        shapes[f"backbone.layers.{layer}.norm.weight"] = (hidden,)
        for name, shape in mixers[letter](config).items():
            shapes[f"backbone.layers.{layer}.mixer.{name}"] = shape
    return shapes


def _mamba_shapes(config: Mapping[str, Any]) -> Shapes:
    heads, hidden = config["mamba_num_heads"], config["hidden_size"]
    inner, states = heads * config["mamba_head_dim"], config["n_groups"] * config["ssm_state_size"]
    return {
        "in_proj.weight": (2 * inner + 2 * states + heads, hidden),
        "conv1d.weight": (inner + 2 * states, 1, config["conv_kernel"]),
        "conv1d.bias": (inner + 2 * states,),
        "A_log": (heads,),
        "D": (heads,),
        "dt_bias": (heads,),
        "norm.weight": (inner,),
        "out_proj.weight": (hidden, inner),
    }


def _attention_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, dim = config["hidden_size"], config["head_dim"]
    query, key_value = config["num_attention_heads"] * dim, config["num_key_value_heads"] * dim
    return {
        "q_proj.weight": (query, hidden),
        "k_proj.weight": (key_value, hidden),
        "v_proj.weight": (key_value, hidden),
        "o_proj.weight": (hidden, query),
    }


def _mlp_shapes(config: Mapping[str, Any]) -> Shapes:
    return _up_down("", config["intermediate_size"], config["hidden_size"])


def _moe_shapes(config: Mapping[str, Any]) -> Shapes:
    hidden, experts = config["hidden_size"], config["n_routed_experts"]
    shapes: Shapes = {"gate.weight": (experts, hidden), "gate.e_score_correction_bias": (experts,)}
    for expert in range(experts):
        shapes |= _up_down(f"experts.{expert}.", config["moe_intermediate_size"], hidden)
    return shapes | _up_down("shared_experts.", config["moe_shared_expert_intermediate_size"], hidden)


def _up_down(prefix: str, inner: int, hidden: int) -> Shapes:
    return {f"{prefix}up_proj.weight": (inner, hidden), f"{prefix}down_proj.weight": (hidden, inner)}
