"""Families without layout rules and meshes to refit them over: the cases of the tests and of tools/cover_traced.py."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from helpers.validation_cases import in_blocks

from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planning import TracedRequest, read_traced_request

# column of the table in docs/support.md -> (training mesh, generation mesh, only for families with experts)
MESHES: dict[str, tuple[str, str, bool]] = {
    "TP2 -> TP2": ("tp=2", "tp=2", False),
    "TP4 -> TP2": ("tp=4", "tp=2", False),
    "TP2 -> TP4": ("tp=2", "tp=4", False),
    "TP2 PP2 -> TP2": ("tp=2,pp=2", "tp=2", False),
    "TP2 -> PP2": ("tp=2", "pp=2", False),
    "TP2 EP2 -> TP2": ("tp=2,ep=2", "tp=2", True),
    "EP2 -> TP2 EP2": ("ep=2,dp=2", "tp=2,ep=2", True),
}

# tiny models that Megatron-Bridge 0.3 builds and vLLM loads
FAMILIES = (
    "tiny-deepseek-v2-lite", "tiny-gemma", "tiny-gemma2", "tiny-gemma3", "tiny-gemma3-vl", "tiny-glm4-moe",
    "tiny-glm4v-moe", "tiny-llama-nemotron", "tiny-mistral", "tiny-mistral3", "tiny-nemotron",
    "tiny-nemotron-nano-vl", "tiny-olmoe", "tiny-qwen2.5-vl", "tiny-qwen3-next", "tiny-qwen3-vl", "tiny-qwen3-vl-moe",
)  # fmt: skip
# tiny models that it builds from 0.6 on
NEWEST_FAMILIES = (
    "tiny-ernie4.5-moe", "tiny-glm4.7-flash", "tiny-glm5", "tiny-ling", "tiny-mimo", "tiny-mimo-v2-flash",
    "tiny-minimax-m2", "tiny-nemotron-3-latent-moe", "tiny-qwen3.5", "tiny-qwen3.5-moe", "tiny-step3.5",
)  # fmt: skip
BF16 = "BF16 -> BF16"
PRECISIONS = {BF16: ("bf16", "bf16"), "BF16 -> FP8": ("bf16", "fp8"), "FP8 -> FP8": ("fp8", "fp8")}  # trainer, engine
# text models in block FP8
FP8_FAMILIES = (
    "tiny-deepseek-v2-lite", "tiny-gemma", "tiny-gemma2", "tiny-gemma3", "tiny-glm4-moe", "tiny-llama-nemotron",
    "tiny-mistral", "tiny-nemotron", "tiny-olmoe", "tiny-qwen3-next",
)  # fmt: skip
FP8_MESHES = ("TP2 -> TP2", "TP4 -> TP2", "TP2 EP2 -> TP2", "EP2 -> TP2 EP2")
_EXPERT_FIELDS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")

# By default one mesh of a few: experts, latent attention, several shapes of a layer, a tower of vision, computed weights.
QUICK = [
    ("tiny-olmoe", "EP2 -> TP2 EP2"),
    ("tiny-deepseek-v2-lite", "TP2 EP2 -> TP2"),
    ("tiny-glm4-moe", "TP2 PP2 -> TP2"),
    ("tiny-llama-nemotron", "TP4 -> TP2"),
    ("tiny-qwen3-next", "TP2 EP2 -> TP2"),
    ("tiny-gemma3-vl", "TP2 -> TP2"),
]
NEWEST_QUICK = [("tiny-minimax-m2", "EP2 -> TP2 EP2"), ("tiny-nemotron-3-latent-moe", "TP2 EP2 -> TP2")]
# vLLM leaves the layer scales of Nemotron-Nano-VL's tower as it made them, and its CPU platform has no sparse attention.
# Megatron-Bridge cuts MiMo-V2-Flash only where each rank has a KV head.
REFUSED = {"tiny-nemotron-nano-vl": {*MESHES}, "tiny-glm5": {*MESHES}, "tiny-mimo-v2-flash": {"TP4 -> TP2"}}


def has_experts(config: Mapping[str, Any]) -> bool:
    return any(field in text_config(config) for field in _EXPERT_FIELDS)


def text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model in a config."""
    text: Mapping[str, Any] = config.get("text_config") or config.get("llm_config") or config
    return text


def meshes_of(family: str) -> Iterator[str]:
    moe = has_experts(load_config(family))
    return (name for name, (_, _, experts) in MESHES.items() if moe or not experts)


def arguments(family: str, mesh: str) -> tuple[str, str]:
    """Training mesh and generation mesh of a case. Two stages share an odd number of layers as 2+1."""
    train, gen, _ = MESHES[mesh]
    layers = text_config(load_config(family))["num_hidden_layers"]
    odd = layers % 2 and "pp=" in train
    return f"{train},layers={layers // 2 + 1}+{layers // 2}" if odd else train, gen


def request(model: str, train: str, gen: str, precision: str = BF16) -> TracedRequest:
    """The request of a case. Tiny models in FP8 have blocks of 8 x 8."""
    if precision == BF16:
        return read_traced_request(model, train, gen)
    config = in_blocks(model.removeprefix("tiny-"), (8, 8))
    return read_traced_request(config, train, gen, "exact", *PRECISIONS[precision])


FULL = [(family, mesh) for family in FAMILIES for mesh in meshes_of(family)]
# Engines in block FP8: (family, mesh, precision)
FP8_FULL = [
    (family, mesh, precision)
    for family in FP8_FAMILIES
    for precision in PRECISIONS
    for mesh in meshes_of(family)
    if precision != BF16 and mesh in FP8_MESHES
]
NEWEST_FULL = [(family, mesh) for family in NEWEST_FAMILIES for mesh in meshes_of(family)]

# Published configs, planned and proven but not built: one mesh of many experts or wide tensors, one with a pipeline.
PUBLISHED = [
    ("deepseek-v2-lite", "tp=4,ep=8,etp=1,dp=2", "tp=4"),
    ("deepseek-v2-lite", "tp=2,pp=2,ep=4,etp=1,dp=2,layers=14+13", "tp=2,ep=2"),
    ("gemma-2-9b", "tp=4", "tp=8"),
    ("gemma-2-9b", "tp=2,pp=2", "tp=4"),
    ("gemma-3-27b", "tp=4", "tp=8"),
    ("gemma-3-27b", "tp=2,pp=2", "tp=4"),
    ("glm-4.5-air", "tp=4,ep=8,etp=1,dp=2", "tp=8"),
    ("glm-4.5-air", "tp=2,pp=2,ep=4,etp=1,dp=2", "tp=4,ep=4"),
    ("llama-3.3-nemotron-super-49b", "tp=4", "tp=8"),
    ("llama-3.3-nemotron-super-49b", "tp=2,pp=2", "tp=4"),
    ("olmoe-1b-7b", "tp=4,ep=8,etp=1,dp=2", "tp=4"),
    ("olmoe-1b-7b", "tp=2,pp=2,ep=4,etp=1,dp=2", "tp=4,ep=4"),
    ("qwen2.5-vl-7b", "tp=4", "tp=4"),
    ("qwen2.5-vl-7b", "tp=2,pp=2", "tp=4"),
    ("qwen3-next-80b-a3b", "tp=2,ep=8,etp=1,dp=4", "tp=4"),
    ("qwen3-next-80b-a3b", "tp=2,pp=2,ep=4,etp=1,dp=2", "tp=4,ep=4"),
    ("qwen3-vl-30b-a3b", "tp=4,ep=8,etp=1,dp=2", "tp=4"),
    ("qwen3-vl-30b-a3b", "tp=2,pp=2,ep=4,etp=1,dp=2", "tp=4,ep=4"),
]
