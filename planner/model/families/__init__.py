"""From a Hugging Face config to a model's parameters: one function per `model_type`.

Imports the files of `planner.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from difflib import get_close_matches
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigError, ConfigReader, looks_like
from mcore_reshard.planner.model.parameters import MAX_PARAMETERS, ModelParameters

from .deepseek_v3 import deepseek_v3
from .gpt_oss import gpt_oss
from .llama_qwen import llama_qwen
from .nemotron_h import nemotron_h

__all__ = ["FAMILIES", "ConfigError", "as_published", "parameters_from_config"]

FAMILIES: Mapping[str, Callable[[ConfigReader], ModelParameters]] = {
    "deepseek_v3": deepseek_v3,
    "gpt_oss": gpt_oss,
    "kimi_k2": deepseek_v3,
    "llama": llama_qwen,
    "mistral": llama_qwen,
    "nemotron_h": nemotron_h,
    "qwen2": llama_qwen,
    "qwen3": llama_qwen,
    "qwen3_moe": llama_qwen,
}

# The names of fields in configs that transformers 5 writes (`attribute_map` of its config classes).
_WRITTEN_AS = {"qwen3_moe": {"num_local_experts": "num_experts"}}
_TRACED = (
    "For any other model that Megatron-Bridge and vLLM can load, add `--traced` to `mcore-reshard plan` or `validate`:"
    " torch, megatron-core, megatron-bridge and vllm must be installed."
)


def as_published(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config with its fields named as in published checkpoints, whichever transformers wrote it."""
    written = _WRITTEN_AS.get(str(config.get("model_type")), {})
    renamed = {name: config[other] for other, name in written.items() if other in config and name not in config}
    return {name: value for name, value in config.items() if name not in written} | renamed


def parameters_from_config(config: Mapping[str, Any]) -> ModelParameters:
    """Every parameter of the model that `config` (an HF config.json) describes.

    Raises `ConfigError` for a `model_type` that no family knows. Raises it also for fields that are missing, misspelled,
    of the wrong type, or at odds with another, and lists them all.
    """
    family = config.get("model_type")
    if isinstance(family, str) and family in FAMILIES:
        parameters = FAMILIES[family](ConfigReader(as_published(config)))
        if (count := sum(group.count for group in parameters.groups)) > MAX_PARAMETERS:
            raise ConfigError(
                f"{family} config", [f"it has {count:,} parameters, no more than {MAX_PARAMETERS:,} are supported"]
            )
        return parameters
    problem = f"model_type {family!r} is not known"
    if family is None:
        problem = f"model_type is missing{looks_like('model_type', config)}"
    if "text_config" in config:
        problem += (
            ": no multimodal model has layout rules. Its text_config alone will not do: trainer and engine keep those tensors"
            " under other names than a text model's"
        )
    elif close := get_close_matches(str(family), FAMILIES, n=2, cutoff=0.6):
        problem += f"; did you mean {' or '.join(close)}?"
    raise ConfigError("config", [problem], f"Known families: {', '.join(FAMILIES)}. {_TRACED}")
