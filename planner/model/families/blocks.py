"""Groups of parameters that families share: attention, MLPs, experts, and what stands around the layers.

Names and shapes follow transformers' `nn.Linear` convention, `[out, in]`. Every function takes the layers that have the
block and yields nothing where there are none.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from mcore_reshard.planner.model.parameters import Attention, LatentAttention, ParameterGroup, Role


@dataclass(frozen=True, slots=True)
class Layers:
    """Which layers a block is in, under which module prefix, and what its parameters have in common.

    `prefix` holds `{layer}`, as in `model.layers.{layer}`.
    """

    numbers: tuple[int, ...]
    hidden: int
    dtype: str
    prefix: str = "model.layers.{layer}"
    mtp: bool = False

    def only(self, numbers: tuple[int, ...]) -> Layers:
        return replace(self, numbers=numbers)

    def group(
        self,
        name: str,
        role: Role,
        *shape: int,
        dtype: str = "",
        experts: int = 0,
        view: tuple[int, ...] = (),
    ) -> Iterator[ParameterGroup]:
        if self.numbers:
            yield ParameterGroup(
                name_pattern=f"{self.prefix}.{name}",
                role=role,
                shape=shape,
                dtype=dtype or self.dtype,
                layers=self.numbers,
                experts=experts,
                view=view,
                mtp=self.mtp,
            )

    def norm(self, name: str, role: Role, size: int = 0) -> Iterator[ParameterGroup]:
        yield from self.group(f"{name}.weight", role, size or self.hidden)

    def linear(
        self,
        name: str,
        role: Role,
        out: int,
        into: int,
        bias: Role | None = None,
        experts: int = 0,
    ) -> Iterator[ParameterGroup]:
        """`weight` [out, into] and, where `bias` names its role, `bias` [out]."""
        yield from self.group(f"{name}.weight", role, out, into, experts=experts)
        if bias is not None:
            yield from self.group(f"{name}.bias", bias, out, experts=experts)


def embedding(name: str, vocab: int, hidden: int, dtype: str) -> Iterator[ParameterGroup]:
    yield ParameterGroup(name, Role.EMBEDDING, (vocab, hidden), dtype)


def final_norm(name: str, hidden: int, dtype: str) -> Iterator[ParameterGroup]:
    yield ParameterGroup(name, Role.FINAL_NORM, (hidden,), dtype)


def lm_head(vocab: int, hidden: int, dtype: str, tied: bool) -> Iterator[ParameterGroup]:
    """The output layer; a tied one is no parameter of its own."""
    if not tied:
        yield ParameterGroup("lm_head.weight", Role.LM_HEAD, (vocab, hidden), dtype)


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
    layers: Layers,
    width: int,
    module: str = "mlp",
    gated: bool = True,
    bias: bool = False,
) -> Iterator[ParameterGroup]:
    """A dense MLP. No layout rule knows its biases."""
    unknown = Role.UNKNOWN if bias else None
    if gated:
        yield from layers.linear(f"{module}.gate_proj", Role.GATE, width, layers.hidden, unknown)
    yield from layers.linear(f"{module}.up_proj", Role.UP, width, layers.hidden, unknown)
    yield from layers.linear(f"{module}.down_proj", Role.DOWN, layers.hidden, width, unknown)


def experts(
    layers: Layers,
    count: int,
    width: int,
    module: str = "mlp",
    gated: bool = True,
) -> Iterator[ParameterGroup]:
    """Routed experts, two or three matrices each."""
    name = f"{module}.experts.{{expert}}"
    if gated:
        yield from layers.linear(f"{name}.gate_proj", Role.EXPERT_GATE, width, layers.hidden, experts=count)
    yield from layers.linear(f"{name}.up_proj", Role.EXPERT_UP, width, layers.hidden, experts=count)
    yield from layers.linear(f"{name}.down_proj", Role.EXPERT_DOWN, layers.hidden, width, experts=count)


def shared_experts(
    layers: Layers,
    width: int,
    module: str = "mlp.shared_experts",
    gated: bool = True,
) -> Iterator[ParameterGroup]:
    """Shared experts, which HF keeps as one MLP of their summed width."""
    if gated:
        yield from layers.linear(f"{module}.gate_proj", Role.SHARED_GATE, width, layers.hidden)
    yield from layers.linear(f"{module}.up_proj", Role.SHARED_UP, width, layers.hidden)
    yield from layers.linear(f"{module}.down_proj", Role.SHARED_DOWN, layers.hidden, width)
