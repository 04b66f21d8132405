"""Small plans for tests: every family, on meshes that reach every rule of the planner."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cache
from typing import Any

from helpers.validation_cases import REFINED_EXPERTS

from mcore_reshard.planner.layout.megatron import MegatronBuild
from mcore_reshard.planner.layout.mesh import parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import parameters_from_config
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.make_plan import make_plan
from mcore_reshard.planner.plan.plan import Plan, Policy
from mcore_reshard.planner.topology.topology import parse_topology


@dataclass(frozen=True)
class Case:
    """A built-in config, changed where `changes` says, on two meshes."""

    config: str
    train: str
    gen: str
    build: MegatronBuild = MegatronBuild()  # noqa: RUF009
    policy: Policy = "exact"
    changes: tuple[tuple[str, Any], ...] = field(default=())
    dtypes: tuple[str | None, str | None] = (None, None)  # --train-dtype, --gen-dtype
    block: tuple[int, ...] = ()  # weight_block_size of an FP8 checkpoint; () where dtypes say FP8: one scale a tensor
    kept: tuple[str, ...] = ()  # modules_to_not_convert
    unquantized: tuple[int, ...] = ()  # layers that an FP8 trainer keeps in its main dtype
    machine: str = ""  # --topology; "": nobody knows where ranks are
    hosts: str = ""  # --hosts

    def __str__(self) -> str:
        extra = [self.build.experts] if self.build.experts != "grouped" else []
        extra += ["in turns"] if self.build.alternating_experts else []
        extra += [self.policy] if self.policy != "exact" else []
        extra += [f"{name}={value}" for name, value in self.changes]
        extra += ["/".join(map(str, self.dtypes))] if any(self.dtypes) else []
        extra += ["x".join(map(str, self.block))] if self.block else []
        extra += [f"but {', '.join(self.kept)}"] if self.kept else []
        extra += [f"but layers {self.unquantized} of the trainer"] if self.unquantized else []
        extra += [f"on {each}" for each in (self.machine, self.hosts) if each]
        return " ".join([self.config, self.train, "->", self.gen, *extra])

    @cache  # noqa: B019  cases are few and live as long as the tests
    def plan(self) -> Plan:
        plan = self.new_plan()
        if not self.machine:
            return plan
        return located(plan, parse_topology(self.machine, plan.train.world, plan.gen.world, self.hosts))

    @property
    def hf_config(self) -> dict[str, Any]:
        config = {**load_config(self.config), **dict(self.changes)}
        if "fp8" in self.dtypes:
            quantization: dict[str, Any] = {"quant_method": "fp8", "activation_scheme": "dynamic"}
            quantization |= {"weight_block_size": list(self.block)} if self.block else {}
            routers = [f"model.layers.{layer}.mlp.gate" for layer in range(4)]  # as published checkpoints say
            config["quantization_config"] = quantization | {"modules_to_not_convert": [*self.kept, *routers]}
        return config

    def new_plan(self) -> Plan:
        return make_plan(
            parameters_from_config(self.hf_config),
            parse_train_mesh(self.train),
            parse_gen_mesh(self.gen),
            model=self.config,
            policy=self.policy,
            build=self.build,
            train_dtype=self.dtypes[0],
            gen_dtype=self.dtypes[1],
            train_unquantized_layers=self.unquantized,
        )


TWO_LAYERS = (("num_hidden_layers", 2),)  # half of the waves, where replicas pass on
_MTP = (("num_nextn_predict_layers", 1),)
_THIRDS = (("num_attention_heads", 12), ("num_key_value_heads", 6), ("vocab_size", 192))

TINY = (
    Case("tiny-llama", "tp=2,pp=2,dp=2", "tp=4"),
    Case("tiny-llama", "tp=2,cp=2,pp=2,layers=3+1", "tp=2,dp=2", MegatronBuild(fused_norms=False)),
    Case("tiny-llama", "tp=4", "tp=8", changes=(("num_key_value_heads", 2), ("vocab_size", 250))),
    Case("tiny-llama", "tp=8", "tp=1,pp=3", changes=(("num_key_value_heads", 2),)),
    Case("tiny-llama", "tp=2", "tp=8", policy="conservative"),
    Case("tiny-llama-tied", "pp=2,vpp=2", "tp=2,pp=2", changes=(("vocab_size", 130),)),
    Case("tiny-qwen2", "tp=4,dp=2", "tp=2,dp=2"),
    Case("tiny-qwen3", "tp=2,pp=2,vpp=2", "dp=2"),
    Case("tiny-qwen3", "tp=1", "tp=2,dp=2"),
    Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=3"),
    Case("tiny-qwen3-moe", "ep=4,dp=4", "tp=2"),
    Case("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2,dp=2,ep=4"),
    Case("tiny-qwen3-moe", "tp=2,ep=2,pp=2", "tp=3,ep=3", changes=_THIRDS),
    Case("tiny-qwen3-moe", "ep=2,etp=2,dp=4", "tp=2", MegatronBuild(experts="stacked")),
    Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=4", MegatronBuild(experts="sequential")),
    Case("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2", MegatronBuild(alternating_experts=8)),
    Case("tiny-deepseek-v3", "tp=2,ep=4,dp=2,pp=2", "tp=4"),
    Case("tiny-deepseek-v3", "tp=2,ep=2", "tp=4", MegatronBuild(alternating_experts=16, alternating_shared=4)),
    Case("tiny-deepseek-v3", "tp=1,pp=2,ep=2,dp=2,layers=3+1", "tp=2,dp=2,ep=4", changes=_MTP),
    Case("tiny-kimi-k2", "ep=2,dp=2", "tp=2,pp=2"),
    Case("tiny-moonlight", "tp=2,ep=2", "tp=2"),
    Case("tiny-nemotron-h", "tp=2,ep=2,pp=2", "tp=2,pp=2"),
    Case("tiny-nemotron-h", "tp=4,ep=4", "tp=2,ep=2"),
    Case("tiny-nemotron-h", "dp=2,ep=2", "tp=4", changes=(("n_groups", 1),)),
    Case("tiny-gpt-oss", "tp=2,ep=2", "tp=2"),
    Case("tiny-gpt-oss", "ep=2,dp=2", "tp=4", MegatronBuild(experts="sequential", padded_vocab=320)),
    Case("tiny-gpt-oss", "ep=4,dp=4", "tp=2,ep=2,pp=2"),
    Case("tiny-gpt-oss", "ep=2,dp=2", "tp=2", MegatronBuild(alternating_experts=8)),
)

_KEPT = ("model.layers.1.mlp.down_proj", "model.layers.2.self_attn.o_proj", "lm_head", "model.layers.0.input_layernorm")

# Experts of width 384, which tp = 4 cuts inside of blocks of 64: vLLM refines them to blocks of 32.
REFINED = tuple(REFINED_EXPERTS[0][1].items())

_LINEARS = ("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")
LAST_LAYER = tuple(f"model.layers.3.{linear}" for linear in _LINEARS)

# The trainer keeps the first and the last layer in bf16, the engine the last one.
UNQUANTIZED_LAYERS = Case(
    "tiny-llama",
    "tp=2,pp=2,layers=3+1",
    "tp=2",
    dtypes=("fp8", "fp8"),
    block=(8, 8),
    kept=LAST_LAYER,
    unquantized=(0, 3),
)

QUANTIZED = (
    Case("tiny-llama", "tp=2,pp=2,dp=2", "tp=4", dtypes=("fp8", "fp8"), block=(8, 8)),
    Case("tiny-llama", "tp=2,cp=2", "tp=2,dp=2", dtypes=("bf16", "fp8"), block=(16, 8), kept=_KEPT),
    Case("tiny-llama", "tp=4", "tp=8", changes=(("num_key_value_heads", 2),), dtypes=("bf16", "fp8"), block=(4, 8)),
    Case("tiny-llama", "tp=1,dp=2", "tp=2", dtypes=("fp8", "fp8")),
    Case("tiny-llama", "tp=2", "tp=2", dtypes=("mxfp8", "mxfp8")),
    Case("tiny-llama", "tp=2,dp=2", "tp=2", dtypes=("fp32", "bf16")),
    Case("tiny-qwen3-moe", "tp=2,ep=2,etp=2,dp=2", "tp=2,dp=2,ep=4", dtypes=("fp8", "fp8"), block=(8, 8)),
    Case("tiny-qwen3-moe", "ep=4,dp=4", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16)),
    Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", dtypes=("fp8", "fp8")),
    Case("tiny-qwen3-moe", "ep=2,etp=2,dp=4", "tp=4", changes=REFINED, dtypes=("fp8", "fp8"), block=(64, 64)),
    Case("tiny-deepseek-v3", "tp=2,ep=4,dp=2,pp=2", "tp=4", changes=_MTP, dtypes=("fp8", "fp8"), block=(8, 8)),
    Case("tiny-deepseek-v3", "tp=2,ep=2,pp=2", "tp=2,dp=2,ep=4", dtypes=("bf16", "fp8"), block=(8, 8)),
    Case("tiny-deepseek-v3", "tp=2,ep=2", "tp=2", dtypes=("bf16", "fp32")),
    Case("tiny-nemotron-h", "tp=2,ep=2,pp=2", "tp=2", dtypes=("fp8", "fp8"), block=(8, 8)),
    Case("tiny-gpt-oss", "tp=2,ep=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8)),
    UNQUANTIZED_LAYERS,
    Case(
        "tiny-deepseek-v3",
        "pp=2,vpp=2,ep=2,dp=2,layers=1+2+0+1",
        "tp=2",
        changes=_MTP,
        dtypes=("fp8", "fp8"),
        block=(8, 8),
        unquantized=(1, 3),
    ),
)
