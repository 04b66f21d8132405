"""Random tiny models on random meshes: each number names one case, the same on every machine.

Drawn are a family, its sizes (layers, heads, KV heads, widths, vocabulary, experts, ties, biases) and both meshes. Trainer or
engine may refuse a case in their own words; all others must be refitted without a wrong byte.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass
from random import Random
from typing import Any

from helpers.traced_cases import FAMILIES, has_experts, text_config
from helpers.validation_cases import FAMILIES as WITH_RULES

from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import FAMILIES as MODEL_TYPES
from mcore_reshard.planning import InputError, PlanRequest, TracedRequest, read_request, read_traced_request
from mcore_reshard.validation.errors import BuildError, ValidationError
from mcore_reshard.validation.report import ValidationReport
from mcore_reshard.validation.runner import ValidationRequest, validate

ALL_FAMILIES = (*(f"tiny-{family}" for family in WITH_RULES), *(f for f in FAMILIES if f != "tiny-nemotron-nano-vl"))
_TRAIN = ("tp=1", "tp=2", "tp=4", "pp=2", "tp=2,pp=2", "dp=2", "cp=2")
_TRAIN_EXPERTS = ("ep=2,dp=2", "ep=4,dp=4", "tp=2,ep=2", "tp=2,ep=2,etp=1", "pp=2,ep=2,dp=2")
_GEN = ("tp=1", "tp=2", "tp=4", "pp=2", "tp=2,pp=2", "dp=2")
_GEN_EXPERTS = ("tp=2,ep=2", "dp=2,ep=2", "tp=4,ep=4")
_HEADS = ((8, 1), (8, 2), (8, 4), (8, 8), (4, 2), (4, 4), (16, 4), (12, 4))  # with KV heads
_SIZES: dict[str, tuple[Any, ...]] = {
    "intermediate_size": (64, 96, 160),
    "moe_intermediate_size": (16, 32, 64),
    "shared_expert_intermediate_size": (32, 64),
    "num_experts": (4, 6, 8, 12),
    "n_routed_experts": (4, 8, 12),
    "num_local_experts": (4, 6, 8, 12),
    "kv_lora_rank": (16, 32),
    "v_head_dim": (8, 16),
    "qk_nope_head_dim": (8, 16),
    "linear_num_value_heads": (4, 8),
    "use_qk_norm": (False, True),
    "mamba_num_heads": (8, 16),
    "ssm_state_size": (8, 16),
    "moe_shared_expert_intermediate_size": (32, 64),
}
_HEADS_OF_BRIDGE = {
    "ministral3"
}  # Megatron-Bridge 0.3 builds its trainer with 32 heads and 8 KV heads, whatever the config
_TIED = {"llama", "qwen2", "qwen3", "mistral"}  # families of which both kinds are published


@dataclass(frozen=True)
class RandomCase:
    number: int
    family: str
    config: dict[str, Any]
    train: str
    gen: str

    def refit(self, options: Options) -> ValidationReport:
        """Two refits into vLLM. Raises what `validate` and `request` raise."""
        return validate(ValidationRequest(self.request(), options=options, engine="vllm", refits=2))

    def request(self) -> PlanRequest | TracedRequest:
        """Raises InputError where the planner's rules say that the model does not fit the meshes."""
        read = read_request if self.config["model_type"] in MODEL_TYPES else read_traced_request
        return read(self.config, self.train, self.gen)


def draw(number: int) -> RandomCase:
    rng = Random(f"refit {number}")
    family = rng.choice(ALL_FAMILIES)
    config = copy.deepcopy(load_config(family))
    text: dict[str, Any] = text_config(config)  # type: ignore[assignment]
    is_text = "vision_config" not in config
    text["vocab_size"] = rng.choice((96, 130, 250, 256, 320)) if is_text else rng.choice((256, 258, 320))
    if text["model_type"] == "glm4v_moe_text":
        text["vocab_size"] &= ~7  # Megatron-Bridge 0.3 cuts its vocabulary without padding
    for field in sorted(_SIZES.keys() & text.keys()):
        if text[field] is not None:
            text[field] = rng.choice(_SIZES[field])
    layers, fixed = rng.choice((2, 3, 4, 5)), {"hybrid_override_pattern", "block_configs"} & text.keys()
    if not fixed:
        text["num_hidden_layers"] = layers
        if "layer_types" in text:
            text["layer_types"] = [*text["layer_types"] * layers][:layers]
    if text.get("num_key_value_heads") and text["model_type"] not in _HEADS_OF_BRIDGE:
        heads, kv_heads = rng.choice(_HEADS)
        latent = text.get("kv_lora_rank")
        whole = latent or text["model_type"] == "olmoe"  # Megatron-Bridge 0.3 has one width for both of its norms
        text["num_attention_heads"], text["num_key_value_heads"] = heads, heads if whole else kv_heads
        width = rng.choice((64, 96)) if is_text and not fixed else text["hidden_size"]
        if "head_dim" in text or latent or width % (2 * heads) == 0:
            text["hidden_size"] = width
        else:
            text["hidden_size"] = 8 * heads if is_text else width
    if text["model_type"] in _TIED:
        text["tie_word_embeddings"] = rng.random() < 0.4
    experts = has_experts(config)
    train = rng.choice(_TRAIN + _TRAIN_EXPERTS * experts)
    gen = rng.choice(_GEN + _GEN_EXPERTS * experts)
    return RandomCase(number, family, config, _split(train, text["num_hidden_layers"]), gen)


def _split(train: str, layers: int) -> str:
    return f"{train},layers={layers // 2 + 1}+{layers // 2}" if layers % 2 and "pp=2" in train else train


def cases(first: int = 0) -> Iterator[RandomCase]:
    """Cases from a number on, without end."""
    while True:
        yield draw(first)
        first += 1


def refusal(error: Exception) -> str:
    """The words in which an upstream, or a rule about one, says that it cannot hold a case; empty for any other error."""
    return str(error).splitlines()[0] if isinstance(error, BuildError | InputError | ValidationError) else ""
