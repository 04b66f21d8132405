"""Groups of parameters that families share: attention, MLPs and experts, and the frame around the layers.

Names and shapes follow transformers' `nn.Linear` convention, `[out, in]`. Every function takes the layers that have the
block and yields nothing where there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigReader, read_quantization
from mcore_reshard.planner.model.parameters import (
    Architecture,
    Attention,
    LatentAttention,
    ModelParameters,
    ParameterGroup,
    Role,
)

# The gate, up and down matrices of a dense MLP, of routed experts, and of shared experts
MLP = (Role.GATE, Role.UP, Role.DOWN)
EXPERT = (Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN)
SHARED = (Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN)


@dataclass(frozen=True, slots=True)
class Layers:
    """The layers of a model that have a block, and the block's module prefix."""

    model: ModelParameters  # without groups
    numbers: Sequence[int]
    prefix: str = "model.layers.{layer}"
    mtp: bool = False

    @property
    def hidden(self) -> int:
        return self.model.architecture.hidden

    def group(
        self, name: str, role: Role, *shape: int, dtype: str = "", experts: int = 0, view: tuple[int, ...] = ()
    ) -> Iterator[ParameterGroup]:
        if self.numbers:
            pattern, dtype, numbers = f"{self.prefix}.{name}", dtype or self.model.dtype, tuple(self.numbers)
            yield ParameterGroup(pattern, role, shape, dtype, numbers, experts, view, self.mtp)

    def norm(self, name: str, role: Role, size: int = 0) -> Iterator[ParameterGroup]:
        return self.group(f"{name}.weight", role, size or self.hidden)

    def linear(
        self, name: str, role: Role, out: int, into: int, bias: Role | None = None, experts: int = 0
    ) -> Iterator[ParameterGroup]:
        """`weight` [out, into] and, where `bias` names its role, `bias` [out]."""
        yield from self.group(f"{name}.weight", role, out, into, experts=experts)
        if bias is not None:
            yield from self.group(f"{name}.bias", bias, out, experts=experts)


def read_model(reader: ConfigReader, hidden: int, vocab: int, **sizes: Any) -> ModelParameters:
    """The model, without groups yet; `sizes` are the other fields of its `Architecture`.

    Reads the last fields, which the configs of all families have. Raises `ConfigError` with all problems.
    """
    tied, dtype, quantization = reader.flag("tie_word_embeddings"), reader.dtype(), read_quantization(reader)
    reader.finish()
    architecture = Architecture(family=reader.family, hidden=hidden, vocab=vocab, tied=tied, **sizes)
    return ModelParameters(architecture, (), dtype, quantization)


def framed(
    model: ModelParameters,
    groups: Iterable[ParameterGroup],
    embedding: str = "model.embed_tokens.weight",
    norm: str = "model.norm.weight",
    mtp: Iterable[ParameterGroup] = (),
) -> ModelParameters:
    """The model with these groups between embedding, final norm and output layer; a tied one is no parameter."""
    sizes = model.architecture
    shape = (sizes.vocab, sizes.hidden)
    head = () if sizes.tied else (ParameterGroup("lm_head.weight", Role.LM_HEAD, shape, model.dtype),)
    first = ParameterGroup(embedding, Role.EMBEDDING, shape, model.dtype)
    last = ParameterGroup(norm, Role.FINAL_NORM, (sizes.hidden,), model.dtype)
    return replace(model, groups=(first, *groups, last, *head, *mtp))


def attention(
    layers: Layers,
    sizes: Attention,
    module: str = "self_attn",
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norms: bool = False,
) -> Iterator[ParameterGroup]:
    """Grouped-query attention: q, k, v, o and, where asked for, their biases and the norms over one head's q and k."""
    queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
    yield from layers.linear(f"{module}.q_proj", Role.Q, queries, layers.hidden, Role.Q_BIAS if qkv_bias else None)
    yield from layers.linear(f"{module}.k_proj", Role.K, keys, layers.hidden, Role.K_BIAS if qkv_bias else None)
    yield from layers.linear(f"{module}.v_proj", Role.V, keys, layers.hidden, Role.V_BIAS if qkv_bias else None)
    yield from layers.linear(f"{module}.o_proj", Role.O, layers.hidden, queries, Role.O_BIAS if o_bias else None)
    if qk_norms:
        yield from layers.norm(f"{module}.q_norm", Role.Q_NORM, sizes.head_dim)
        yield from layers.norm(f"{module}.k_norm", Role.K_NORM, sizes.head_dim)


def latent_attention(layers: Layers, sizes: LatentAttention, bias: bool) -> Iterator[ParameterGroup]:
    """Multi-head latent attention, with the biases of `DeepseekV3Attention` (transformers), which no layout rule knows."""
    hidden, heads = layers.hidden, sizes.heads
    query_rows = heads * (sizes.qk_nope_dim + sizes.qk_rope_dim)
    unknown = Role.UNKNOWN if bias else None
    if sizes.q_lora_rank:
        yield from layers.linear("self_attn.q_a_proj", Role.MLA_Q_A, sizes.q_lora_rank, hidden, unknown)
        yield from layers.norm("self_attn.q_a_layernorm", Role.MLA_Q_A_NORM, sizes.q_lora_rank)
        yield from layers.linear("self_attn.q_b_proj", Role.MLA_Q_B, query_rows, sizes.q_lora_rank)
    else:
        yield from layers.linear("self_attn.q_proj", Role.MLA_Q, query_rows, hidden)
    compressed = sizes.kv_lora_rank + sizes.qk_rope_dim
    yield from layers.linear("self_attn.kv_a_proj_with_mqa", Role.MLA_KV_A, compressed, hidden, unknown)
    yield from layers.norm("self_attn.kv_a_layernorm", Role.MLA_KV_A_NORM, sizes.kv_lora_rank)
    expanded = heads * (sizes.qk_nope_dim + sizes.v_dim)
    yield from layers.linear("self_attn.kv_b_proj", Role.MLA_KV_B, expanded, sizes.kv_lora_rank)
    yield from layers.linear("self_attn.o_proj", Role.MLA_O, hidden, heads * sizes.v_dim, unknown)


def mlp(
    layers: Layers,
    width: int,
    module: str = "mlp",
    roles: tuple[Role, Role, Role] = MLP,
    bias: Role | None = None,
    experts: int = 0,
    hidden: int = 0,
) -> Iterator[ParameterGroup]:
    """Up and down matrices, and a gate where the model has gates; `hidden` is their size if it is not the model's."""
    gate, up, down = roles
    hidden = hidden or layers.hidden
    if layers.model.architecture.gated:
        yield from layers.linear(f"{module}.gate_proj", gate, width, hidden, bias, experts)
    yield from layers.linear(f"{module}.up_proj", up, width, hidden, bias, experts)
    yield from layers.linear(f"{module}.down_proj", down, hidden, width, bias, experts)
