"""Groups of parameters that families share: attention, MLPs, experts, and the frame around the layers.

Names and shapes follow transformers' `nn.Linear` convention, `[out, in]`. Every function takes the layers that have the
block and yields nothing where there are none.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from mcore_reshard.planner.model.config_reader import ConfigReader, read_quantization
from mcore_reshard.planner.model.parameters import (
    Architecture,
    Attention,
    LatentAttention,
    ModelParameters,
    ParameterGroup,
    Quantization,
    Role,
)


@dataclass(frozen=True, slots=True)
class Layers:
    """Which layers a block is in, under which module prefix, and what its parameters have in common.

    `prefix` holds `{layer}`, as in `model.layers.{layer}`.
    """

    numbers: tuple[int, ...]
    hidden: int
    dtype: str
    prefix: str
    mtp: bool = False

    def group(
        self, name: str, role: Role, *shape: int, dtype: str = "", experts: int = 0, view: tuple[int, ...] = ()
    ) -> Iterator[ParameterGroup]:
        if self.numbers:
            pattern = f"{self.prefix}.{name}"
            yield ParameterGroup(pattern, role, shape, dtype or self.dtype, self.numbers, experts, view, self.mtp)

    def norm(self, name: str, role: Role, size: int = 0) -> Iterator[ParameterGroup]:
        yield from self.group(f"{name}.weight", role, size or self.hidden)

    def linear(
        self, name: str, role: Role, out: int, into: int, bias: Role | None = None, experts: int = 0
    ) -> Iterator[ParameterGroup]:
        """`weight` [out, into] and, where `bias` names its role, `bias` [out]."""
        yield from self.group(f"{name}.weight", role, out, into, experts=experts)
        if bias is not None:
            yield from self.group(f"{name}.bias", bias, out, experts=experts)


@dataclass(frozen=True, slots=True)
class Frame:
    """The parts that every decoder has around its layers: embedding, final norm and output layer."""

    family: str
    hidden: int
    vocab: int
    tied: bool
    dtype: str
    quantization: Quantization | None

    def layers(self, numbers: Iterable[int], prefix: str = "model.layers.{layer}", mtp: bool = False) -> Layers:
        return Layers(tuple(numbers), self.hidden, self.dtype, prefix, mtp)

    def model(
        self,
        groups: Iterable[ParameterGroup],
        embedding: str = "model.embed_tokens.weight",
        norm: str = "model.norm.weight",
        mtp: Iterable[ParameterGroup] = (),
        **numbers: Any,
    ) -> ModelParameters:
        """The model with these groups in its layers; `numbers` are the other fields of its `Architecture`.

        A tied output layer is no parameter of its own.
        """
        vocab = (self.vocab, self.hidden)
        head = () if self.tied else (ParameterGroup("lm_head.weight", Role.LM_HEAD, vocab, self.dtype),)
        return ModelParameters(
            Architecture(family=self.family, hidden=self.hidden, vocab=self.vocab, tied=self.tied, **numbers),
            (
                ParameterGroup(embedding, Role.EMBEDDING, vocab, self.dtype),
                *groups,
                ParameterGroup(norm, Role.FINAL_NORM, (self.hidden,), self.dtype),
                *head,
                *mtp,
            ),
            self.dtype,
            self.quantization,
        )


def read_frame(reader: ConfigReader, hidden: int, vocab: int) -> Frame:
    """Reads the last fields, which the configs of all families have. Raises `ConfigError` with all problems."""
    tied, dtype, quantization = reader.flag("tie_word_embeddings"), reader.dtype(), read_quantization(reader)
    reader.finish()
    return Frame(reader.family, hidden, vocab, tied, dtype, quantization)


def attention(
    layers: Layers,
    numbers: Attention,
    module: str = "self_attn",
    qkv_bias: bool = False,
    o_bias: bool = False,
    qk_norms: bool = False,
) -> Iterator[ParameterGroup]:
    """Grouped-query attention: q, k, v, o and, where asked for, their biases and the norms over one head's q and k."""
    hidden, head = layers.hidden, numbers.head_dim
    queries, keys = numbers.heads * head, numbers.kv_heads * head
    yield from layers.linear(f"{module}.q_proj", Role.Q, queries, hidden, Role.Q_BIAS if qkv_bias else None)
    yield from layers.linear(f"{module}.k_proj", Role.K, keys, hidden, Role.K_BIAS if qkv_bias else None)
    yield from layers.linear(f"{module}.v_proj", Role.V, keys, hidden, Role.V_BIAS if qkv_bias else None)
    yield from layers.linear(f"{module}.o_proj", Role.O, hidden, queries, Role.O_BIAS if o_bias else None)
    if qk_norms:
        yield from layers.norm(f"{module}.q_norm", Role.Q_NORM, head)
        yield from layers.norm(f"{module}.k_norm", Role.K_NORM, head)


def latent_attention(layers: Layers, numbers: LatentAttention, bias: bool = False) -> Iterator[ParameterGroup]:
    """Multi-head latent attention as DeepSeek-V2/V3 name it.

    `bias` is on the down projections and the output, as in transformers' `DeepseekV3Attention`. No layout rule knows it.
    """
    hidden, heads = layers.hidden, numbers.heads
    query_dim = numbers.qk_nope_dim + numbers.qk_rope_dim
    unknown = Role.UNKNOWN if bias else None
    if numbers.q_lora_rank:
        yield from layers.linear("self_attn.q_a_proj", Role.MLA_Q_A, numbers.q_lora_rank, hidden, unknown)
        yield from layers.norm("self_attn.q_a_layernorm", Role.MLA_Q_A_NORM, numbers.q_lora_rank)
        yield from layers.linear("self_attn.q_b_proj", Role.MLA_Q_B, heads * query_dim, numbers.q_lora_rank)
    else:
        yield from layers.linear("self_attn.q_proj", Role.MLA_Q, heads * query_dim, hidden)
    compressed = numbers.kv_lora_rank + numbers.qk_rope_dim
    yield from layers.linear("self_attn.kv_a_proj_with_mqa", Role.MLA_KV_A, compressed, hidden, unknown)
    yield from layers.norm("self_attn.kv_a_layernorm", Role.MLA_KV_A_NORM, numbers.kv_lora_rank)
    expanded = heads * (numbers.qk_nope_dim + numbers.v_dim)
    yield from layers.linear("self_attn.kv_b_proj", Role.MLA_KV_B, expanded, numbers.kv_lora_rank)
    yield from layers.linear("self_attn.o_proj", Role.MLA_O, hidden, heads * numbers.v_dim, unknown)


def mlp(
    layers: Layers, width: int, module: str = "mlp", gated: bool = True, bias: bool = False
) -> Iterator[ParameterGroup]:
    """A dense MLP. No layout rule knows its biases."""
    return _feed_forward(
        layers, width, module, (Role.GATE, Role.UP, Role.DOWN), gated, bias=Role.UNKNOWN if bias else None
    )


def experts(
    layers: Layers, count: int, width: int, module: str = "mlp", gated: bool = True
) -> Iterator[ParameterGroup]:
    """Routed experts, two or three matrices each."""
    roles = Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN
    return _feed_forward(layers, width, f"{module}.experts.{{expert}}", roles, gated, experts=count)


def shared_experts(
    layers: Layers, width: int, module: str = "mlp.shared_experts", gated: bool = True
) -> Iterator[ParameterGroup]:
    """Shared experts, which HF keeps as one MLP of their summed width; a width of 0: none."""
    roles = Role.SHARED_GATE, Role.SHARED_UP, Role.SHARED_DOWN
    return _feed_forward(layers, width, module, roles, gated) if width else iter(())


def _feed_forward(
    layers: Layers, width: int, module: str, roles: tuple[Role, Role, Role], gated: bool, **shared: Any
) -> Iterator[ParameterGroup]:
    """`shared`: what `Layers.linear` is told of all the matrices."""
    gate, up, down = roles
    if gated:
        yield from layers.linear(f"{module}.gate_proj", gate, width, layers.hidden, **shared)
    yield from layers.linear(f"{module}.up_proj", up, width, layers.hidden, **shared)
    yield from layers.linear(f"{module}.down_proj", down, layers.hidden, width, **shared)
