"""Families and meshes to validate: the cases of test_validate.py and of the support table in docs/support.md."""

from __future__ import annotations

from typing import Any

from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config

FAMILIES = (
    "llama", "llama-tied", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3", "moonlight", "kimi-k2", "nemotron-h", "gpt-oss",
)  # fmt: skip
MOE = {"qwen3-moe", "deepseek-v3", "moonlight", "kimi-k2", "nemotron-h", "gpt-oss"}
# name: (training mesh, generation mesh, config overrides, only for families with experts)
MESHES: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "TP2 -> TP4": ("tp=2", "tp=4", {}, False),
    "TP4 -> TP2": ("tp=4", "tp=2", {}, False),
    "TP2 PP2 -> TP2": ("tp=2,pp=2", "tp=2", {}, False),
    "TP1 EP4 -> TP2": ("ep=4,dp=4", "tp=2", {}, True),
    "TP2 EP4 ETP1 -> TP4": ("tp=2,ep=4,etp=1,dp=2", "tp=4", {}, True),
    "TP2 EP2 ETP2 -> TP2": ("tp=2,ep=2,etp=2,dp=2", "tp=2", {}, True),
    "PP2 VPP2 -> TP1 DP2": ("pp=2,vpp=2", "tp=1,dp=2", {}, False),
    "PP2 3+1 layers -> TP2": ("pp=2,layers=3+1", "tp=2", {}, False),
    "CP2 -> TP2": ("cp=2", "tp=2", {}, False),
    "CP2 EP2 -> TP1": ("cp=2,ep=2", "tp=1", {}, True),
    "DP2 -> TP2 DP2": ("dp=2", "tp=2,dp=2", {}, False),
    "TP1 -> TP1 DP3": ("tp=1", "dp=3", {}, False),
    "2 KV heads, TP2 -> TP4": ("tp=2", "tp=4", {"num_key_value_heads": 2}, False),
    "2 KV heads, TP4 -> TP2": ("tp=4", "tp=2", {"num_key_value_heads": 2}, False),
    "1 KV head, TP4 -> TP2": ("tp=4", "tp=2", {"num_key_value_heads": 1}, False),
    "EP2 -> gen EP2": ("ep=2,dp=2", "tp=2,ep=2", {}, True),
    "TP2 -> gen EP4 over TP2 DP2": ("tp=2", "tp=2,dp=2,ep=4", {}, True),
    "TP2 -> gen PP2": ("tp=2", "pp=2", {}, False),
    "PP2 -> gen PP2 TP2": ("pp=2", "tp=2,pp=2", {}, False),
    "vocabulary 250, TP4 -> TP2": ("tp=4", "tp=2", {"vocab_size": 250}, False),
    "vocabulary 130, TP1 -> TP4": ("tp=1", "tp=4", {"vocab_size": 130}, False),
    "embedding and loss alone": ("pp=4,layers=0+3+1+0", "tp=2", {}, False),
    "uneven chunks": ("pp=2,vpp=2,layers=1+2+1+0", "tp=1", {}, False),
}

# More of them for machines with few GPUs, where NCCL needs one for each rank.
FEW_RANKS: dict[str, tuple[str, str, dict[str, Any], bool]] = {
    "TP1 -> TP1": ("tp=1", "tp=1", {}, False),
    "TP2 -> TP2": ("tp=2", "tp=2", {}, False),
    "TP1 -> TP2": ("tp=1", "tp=2", {}, False),
    "TP1 -> DP3": ("tp=1", "dp=3", {}, False),
    "PP3 -> TP1": ("pp=3,layers=1+2+1", "tp=1", {}, False),
    "EP2 -> TP2": ("ep=2,dp=2", "tp=2", {}, True),
    "TP2 EP2 ETP1 -> TP2": ("tp=2,ep=2,etp=1", "tp=2", {}, True),
    "1 KV head, TP2 -> TP2": ("tp=2", "tp=2", {"num_key_value_heads": 1}, False),
}

# The default suite: each family with tensor parallelism or with experts, each mesh once.
DEFAULT = [
    ("llama", "TP2 -> TP4"),
    ("llama", "PP2 3+1 layers -> TP2"),
    ("llama", "vocabulary 250, TP4 -> TP2"),
    ("llama", "embedding and loss alone"),
    ("llama-tied", "PP2 -> gen PP2 TP2"),
    ("llama-tied", "vocabulary 130, TP1 -> TP4"),
    ("qwen2", "TP4 -> TP2"),
    ("qwen2", "2 KV heads, TP2 -> TP4"),
    ("qwen3", "2 KV heads, TP4 -> TP2"),
    ("qwen3", "1 KV head, TP4 -> TP2"),
    ("qwen3", "CP2 -> TP2"),
    ("qwen3", "DP2 -> TP2 DP2"),
    ("qwen3", "TP1 -> TP1 DP3"),
    ("qwen3-moe", "TP2 EP4 ETP1 -> TP4"),
    ("qwen3-moe", "PP2 VPP2 -> TP1 DP2"),
    ("qwen3-moe", "CP2 EP2 -> TP1"),
    ("qwen3-moe", "uneven chunks"),
    ("deepseek-v3", "TP2 -> gen EP4 over TP2 DP2"),
    ("moonlight", "EP2 -> gen EP2"),
    ("kimi-k2", "TP2 EP2 ETP2 -> TP2"),
    ("nemotron-h", "TP2 -> TP4"),
    ("nemotron-h", "TP2 PP2 -> TP2"),
    ("gpt-oss", "TP2 -> gen PP2"),
    ("gpt-oss", "TP1 EP4 -> TP2"),
]


_LAYERS_OF_HYBRID = {"3+1": "6+2", "1+2+1": "2+4+2"}  # Nemotron-H's tiny config has 8 layers
_REFUSED = {
    ("gpt-oss", "TP2 EP2 ETP2 -> TP2"),  # Megatron-Core: experts with biases at ETP = 1 only
    ("nemotron-h", "PP2 VPP2 -> TP1 DP2"),  # Megatron-Core does not interleave hybrid models
    ("nemotron-h", "uneven chunks"),
    ("nemotron-h", "embedding and loss alone"),  # nor lets its hybrid stages be empty
    ("gpt-oss", "2 KV heads, TP2 -> TP4"),  # vLLM's gpt-oss does not replicate KV heads
    ("gpt-oss", "1 KV head, TP4 -> TP2"),
    ("gpt-oss", "1 KV head, TP2 -> TP2"),
}
_ALL = MESHES | FEW_RANKS
_LATENT = {"deepseek-v3", "moonlight", "kimi-k2"}  # no KV heads to speak of


def standing(family: str, mesh: str) -> str:
    """T: default tests, A: `make validate-all`, n: refused by Megatron-Core or vLLM, -: does not exist."""
    _, _, overrides, experts = _ALL[mesh]
    if (experts and family not in MOE) or ("num_key_value_heads" in overrides and family in _LATENT):
        return "-"
    if (family, mesh) in _REFUSED:
        return "n"
    return "T" if (family, mesh) in DEFAULT else "A"


def arguments(family: str, mesh: str) -> tuple[str, str, dict[str, Any]]:
    """Training mesh, generation mesh and config overrides of a case."""
    train, gen, overrides, _ = _ALL[mesh]
    head, layers, counts = train.partition("layers=")
    if family == "nemotron-h" and layers:
        train = head + layers + _LAYERS_OF_HYBRID.get(counts, counts)
    return train, gen, overrides


REFUSED = sorted(_REFUSED)
FULL = [(family, mesh) for family in FAMILIES for mesh in MESHES if standing(family, mesh) == "A"]


def on_gpus(gpus: int, *, shared: bool) -> list[tuple[str, str]]:
    """Every case that `gpus` GPUs can hold, those first that together have each family and each mesh at least once.

    `shared`: ranks may share a GPU, so that any mesh fits.
    """
    fitting = [
        (family, mesh)
        for mesh in _ALL
        for family in FAMILIES
        if standing(family, mesh) in "TA" and (shared or _ranks(family, mesh) <= gpus)
    ]
    turn = dict.fromkeys(FAMILIES, 0)
    chosen: list[tuple[str, str]] = []
    for mesh in dict.fromkeys(mesh for _, mesh in fitting):
        family = min((f for f, m in fitting if m == mesh), key=lambda f: turn[f])
        turn[family] += 1
        chosen.append((family, mesh))
    chosen += [next(case for case in fitting if case[0] == f) for f, times in turn.items() if fitting and not times]
    return chosen + [case for case in fitting if case not in chosen]


def covering(cases: list[tuple[str, str]]) -> list[tuple[str, str]]:
    """The first of `cases`, up to where each family and each mesh has come at least once."""
    wanted = {name for case in cases for name in case}
    for count, case in enumerate(cases, 1):
        wanted -= set(case)
        if not wanted:
            return cases[:count]
    return []


def _ranks(family: str, mesh: str) -> int:
    train, gen, _ = arguments(family, mesh)
    return parse_train_mesh(train).world + parse_gen_mesh(gen).world


# Block FP8: (family, training mesh, generation mesh, what the trainer holds, blocks). Heads of 8 rows split blocks of 16
# in the trainer's fused QKV tensor, and go to misc.
FP8_DEFAULT = [
    ("llama", "tp=2,pp=2", "tp=2", "fp8", (16, 16)),
    ("qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2", "fp8", (8, 8)),
    ("deepseek-v3", "tp=2,ep=2", "tp=2,ep=2", "fp8", (8, 8)),
    ("qwen3", "tp=2", "tp=4", "bf16", (8, 8)),
    ("qwen3-moe", "ep=2,dp=2", "tp=2", "bf16", (16, 16)),
    ("deepseek-v3", "tp=2,ep=2,pp=2", "tp=2", "bf16", (8, 16)),
]
_FP8_MESHES = [
    ("tp=2", "tp=1"), ("tp=1", "tp=2"), ("tp=2,pp=2,layers=3+1", "tp=2"), ("cp=2", "tp=1,dp=2"), ("tp=1", "dp=3"), ("tp=2", "pp=2"),
]  # fmt: skip
_FP8_EXPERTS = [("ep=4,dp=4", "tp=2"), ("tp=2,ep=4,etp=1,dp=2", "tp=2"), ("tp=2", "tp=2,dp=2,ep=4")]
FP8_FULL = [
    (family, train, gen, dtype, block)
    for dtype, block in (("fp8", (8, 8)), ("bf16", (8, 16)))
    for family in ("llama", "qwen2", "qwen3", "qwen3-moe", "deepseek-v3", "kimi-k2")
    for train, gen in _FP8_MESHES + (_FP8_EXPERTS if family in MOE else [])
] + [
    (f"{family}-fp8", train, gen, dtype, (128, 128))
    for dtype in ("fp8", "bf16")
    for family in ("qwen3", "qwen3-moe", "deepseek-v3")
    for train, gen in (("tp=2,pp=2,layers=1+1", "tp=2"), ("tp=1", "tp=2"))
]


# Experts that tp = 4 cuts inside of blocks, so that vLLM refines them: (blocks, config overrides). In the second case
# some ranks have a part of one block and some of two; a plan sends such experts by misc.
_EXPERTS_OF_384 = {"hidden_size": 128, "num_attention_heads": 4, "moe_intermediate_size": 384}
REFINED_EXPERTS = [
    ((64, 64), {**_EXPERTS_OF_384, "head_dim": 64, "num_key_value_heads": 2}),
    ((128, 128), {**_EXPERTS_OF_384, "head_dim": 128, "num_key_value_heads": 4}),
]

# vLLM refines these experts too, at tp = 2: their 192 rows are whole blocks, but 192 columns are not. Neither is cut in w13.
REFINED_COLUMNS = ((64, 128), REFINED_EXPERTS[0][1])
# vLLM builds these with refined scales on any rank, and fails to load them: 96 is not whole blocks.
UNLOADABLE_EXPERTS = ((64, 64), {**REFINED_EXPERTS[0][1], "moe_intermediate_size": 96})


def in_blocks(family: str, block: tuple[int, int], **changes: Any) -> dict[str, Any]:
    """The tiny config of a family as an FP8 checkpoint in these blocks, which names routers as published ones do."""
    config = {**load_config(f"tiny-{family}"), **changes}
    routers = [f"model.layers.{layer}.mlp.gate" for layer in range(config["num_hidden_layers"])]
    stated = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(block)}
    return {**config, "quantization_config": {**stated, "modules_to_not_convert": routers}}
