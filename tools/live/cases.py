"""What is refitted live: models that vLLM's GPU kernels take, places for both sides, and how the engine runs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from mcore_reshard.integrations.vllm_plugin import BACKEND
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.configs import load_config

VOCABULARY = 1024
_SIZES = {
    "vocab_size": VOCABULARY, "num_hidden_layers": 4, "max_position_embeddings": 2048, "hidden_size": 512,
    "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 1024,
}  # fmt: skip
_MLA = {"num_attention_heads": 16, "num_key_value_heads": 16, "kv_lora_rank": 512, "q_lora_rank": 256, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128}  # fmt: skip
MODELS: dict[str, dict[str, Any]] = {
    "qwen3": _SIZES,
    "qwen3-moe": {**_SIZES, "moe_intermediate_size": 256},
    "deepseek-v3": {name: size for name, size in _SIZES.items() if name != "head_dim"}
    | _MLA
    | {"moe_intermediate_size": 256},
    "gpt-oss": {**_SIZES, "head_dim": 64, "intermediate_size": 512, "max_position_embeddings": 131072},
}
# Kernels for block FP8. Marlin's lay weights out anew, and so do those of DeepGEMM, vLLM's own choice: see
# engines/vllm/redone.py.
TRITON, MARLIN = "triton", "marlin"
# vLLM takes Marlin on GPUs that compute in FP8 only where this is set.
_MARLIN_ENVIRONMENT = {"VLLM_TEST_FORCE_FP8_MARLIN": "1"}
MODES: dict[str, dict[str, Any]] = {
    "eager": {"enforce_eager": True},
    "graphs": {"compilation_config": {"cudagraph_capture_sizes": [1, 2, 4, 8]}},
}


@dataclass(frozen=True, slots=True)
class Place:
    """Which GPUs the processes see, in this order. Rank r of a side runs on the r-th that it sees."""

    trainer_gpus: str
    engine_gpus: str
    ranks: int = 1  # of each side

    @property
    def gpus(self) -> int:
        return len({*self.trainer_gpus.split(","), *self.engine_gpus.split(",")})


PLACES = {
    "one GPU": Place("0", "0"),
    "two GPUs": Place("0,1", "1,0"),
    "TP2 on both": Place("0,1", "0,1", 2),
}
REFIT_WORKER, WEIGHT_TRANSFER = "RefitWorker", "weight transfer"  # by collective_rpc, or vLLM's own calls
SLEEP, PREFIX_CACHE = "sleep", "prefix cache"


@dataclass(frozen=True, slots=True)
class Case:
    """One live session: three refits of checkpoints 1, 2 and 1."""

    model: str
    mode: str = "eager"
    place: str = "one GPU"
    transport: str = "direct"
    gen_dtype: str = "bf16"
    train_dtype: str = "bf16"  # fp8: Transformer Engine keeps the weights of linear layers in blocks of 128 x 128
    fp8_backend: str = TRITON
    door: str = REFIT_WORKER
    feature: str = ""  # SLEEP: of level 2, before the last refit. PREFIX_CACHE: reset after each refit

    @property
    def name(self) -> str:
        trainer = "fp8-trainer" if self.train_dtype == "fp8" else ""
        door = self.door if self.door != REFIT_WORKER else ""
        words = (self.model, trainer, self._computed_in, self.mode, self.place, self.transport, door, self.feature)
        return "-".join(filter(None, words)).replace(" ", "_")

    @property
    def _computed_in(self) -> str:
        return self.gen_dtype if self.fp8_backend == TRITON else f"{self.gen_dtype}-{self.fp8_backend}"

    @property
    def engine_name(self) -> str:
        """Cases of this name share the engines that load a checkpoint: these compute alike."""
        return f"{self.weights_name}-{self._computed_in}-{self.mode}-tp{PLACES[self.place].ranks}"

    @property
    def weights_name(self) -> str:
        """Cases of this name train the same weights."""
        return f"{self.model}-rounded" if self.train_dtype == "fp8" else self.model

    @property
    def checkpoint_name(self) -> str:
        return f"{self.weights_name}-{self.gen_dtype}"

    @property
    def config(self) -> dict[str, Any]:
        """The model's config.json, unquantized."""
        return {**load_config(f"tiny-{self.model}"), **MODELS[self.model]}

    @property
    def train(self) -> TrainMesh:
        """Two training ranks cut experts by EP and dense models by TP."""
        if PLACES[self.place].ranks == 1:
            return TrainMesh()
        return TrainMesh(tp=2) if self.model == "qwen3" else TrainMesh(dp=2, ep=2)

    @property
    def gen(self) -> GenMesh:
        return GenMesh(tp=PLACES[self.place].ranks)

    @property
    def engine_options(self) -> dict[str, Any]:
        """Of vLLM's LLM. Several engines share a GPU, so the size of the cache is fixed, not what is free."""
        return {
            "skip_tokenizer_init": True, "dtype": "bfloat16", "max_model_len": 512, "max_num_seqs": 8,
            "max_num_batched_tokens": 512, "kv_cache_memory_bytes": 256 << 20, "gpu_memory_utilization": 0.05,
            "enable_prefix_caching": False, "seed": 0, "disable_log_stats": True,
            "tensor_parallel_size": PLACES[self.place].ranks, **MODES[self.mode],
            **(dict.fromkeys(("linear_backend", "moe_backend"), self.fp8_backend) if self.gen_dtype == "fp8" else {}),
        }  # fmt: skip

    @property
    def environment(self) -> dict[str, str]:
        """Variables of its engines' processes."""
        return _MARLIN_ENVIRONMENT if self.fp8_backend == MARLIN else {}

    @property
    def refitted_options(self) -> dict[str, Any]:
        """What the refitted engine is given besides, or otherwise."""
        return {
            **({"weight_transfer_config": {"backend": BACKEND}} if self.door == WEIGHT_TRANSFER else {}),
            **({"enable_sleep_mode": True} if self.feature == SLEEP else {}),
            **({"enable_prefix_caching": True} if self.feature == PREFIX_CACHE else {}),
        }


def cases_on(gpus: int, *, fp8_trainers: bool = True) -> list[Case]:
    """Every case that fits this many GPUs and needs all of them. On a GPU, FP8 trainers need the real Transformer Engine."""
    one = [Case(model, mode) for mode in MODES for model in MODELS]
    one += [
        Case("qwen3-moe", gen_dtype="fp8"),
        Case("deepseek-v3", gen_dtype="fp8"),
        *(Case(model, "graphs", gen_dtype="fp8") for model in ("qwen3-moe", "deepseek-v3")),
        *(
            Case(model, mode, gen_dtype="fp8", fp8_backend=MARLIN)
            for model, mode in (("qwen3", "eager"), ("qwen3-moe", "graphs"))
        ),
        Case("qwen3", gen_dtype="fp8", train_dtype="fp8"),
        Case("qwen3-moe", gen_dtype="fp8", train_dtype="fp8"),
        Case("qwen3", door=WEIGHT_TRANSFER),
        Case("qwen3-moe", "graphs", door=WEIGHT_TRANSFER),
        Case("qwen3", door=WEIGHT_TRANSFER, feature=SLEEP),
        Case("qwen3", door=WEIGHT_TRANSFER, feature=PREFIX_CACHE),
    ]
    two = [
        Case(model, mode, "two GPUs", transport)
        for model, mode in (("qwen3", "eager"), ("qwen3-moe", "graphs"), ("deepseek-v3", "eager"), ("gpt-oss", "eager"))
        for transport in ("direct", "nccl")
    ]
    two += [Case("qwen3-moe", "eager", "two GPUs", transport, "fp8") for transport in ("direct", "nccl")]
    two += [
        Case(model, mode, "TP2 on both")
        for model, mode in (("qwen3", "graphs"), ("qwen3-moe", "eager"), ("deepseek-v3", "eager"), ("gpt-oss", "eager"))
    ]
    two += [Case("qwen3", "graphs", "TP2 on both", door=WEIGHT_TRANSFER)]
    cases = [case for case in one + two if fp8_trainers or case.train_dtype != "fp8"]
    return [case for case in cases if PLACES[case.place].gpus == gpus]
