"""What a model consists of: parameters in HF names, with global shapes and dtypes, grouped where only numbers differ.

A catalogue never lists parameter by parameter: the 256 experts of 58 layers are one `ParameterGroup`, because every
layout rule treats them alike. `role` says which rule that is; it is the only thing rules dispatch on, so no rule ever
matches a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from math import prod

ITEMSIZE: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}


class Role(str, Enum):
    """What a parameter is to the layout rules. Biases have roles of their own."""

    EMBEDDING = "embedding"
    LM_HEAD = "lm_head"
    FINAL_NORM = "final_norm"
    ATTENTION_NORM = "attention_norm"  # the norm in front of attention (or of a Mamba mixer's layer)
    MLP_NORM = "mlp_norm"  # the norm in front of a dense MLP
    MOE_NORM = "moe_norm"  # the norm in front of a mixture of experts
    MAMBA_NORM = "mamba_norm"  # the norm in front of a Mamba mixer

    Q = "q"
    K = "k"
    V = "v"
    Q_BIAS = "q_bias"
    K_BIAS = "k_bias"
    V_BIAS = "v_bias"
    O = "o"  # noqa: E741  the output projection's name in the field
    O_BIAS = "o_bias"
    Q_NORM = "q_norm"
    K_NORM = "k_norm"
    SINKS = "sinks"  # gpt-oss: one attention sink logit per query head

    MLA_Q = "mla_q"  # q_proj without q_lora
    MLA_Q_A = "mla_q_a"
    MLA_Q_A_NORM = "mla_q_a_norm"
    MLA_Q_B = "mla_q_b"
    MLA_KV_A = "mla_kv_a"  # kv_a_proj_with_mqa
    MLA_KV_A_NORM = "mla_kv_a_norm"
    MLA_KV_B = "mla_kv_b"
    MLA_O = "mla_o"

    GATE = "gate"
    UP = "up"
    DOWN = "down"

    ROUTER = "router"
    ROUTER_BIAS = "router_bias"  # gpt-oss: a bias of the router's linear layer
    EXPERT_BIAS = "expert_bias"  # e_score_correction_bias, fp32
    EXPERT_GATE = "expert_gate"
    EXPERT_UP = "expert_up"
    EXPERT_DOWN = "expert_down"
    SHARED_GATE = "shared_gate"
    SHARED_UP = "shared_up"
    SHARED_DOWN = "shared_down"
    # gpt-oss: all experts of a layer in one HF tensor
    STACKED_GATE_UP = "stacked_gate_up"  # HF [E, H, 2 I], columns alternate gate and up; view (E, H, I, 2)
    STACKED_GATE_UP_BIAS = "stacked_gate_up_bias"  # HF [E, 2 I]; view (E, I, 2)
    STACKED_DOWN = "stacked_down"  # HF [E, I, H]
    STACKED_DOWN_BIAS = "stacked_down_bias"  # HF [E, H]

    MAMBA_IN = "mamba_in"  # in_proj [2 d_inner + 2 groups state + heads, H]: z, x, B, C, dt
    MAMBA_CONV = "mamba_conv"  # conv1d.weight [d_inner + 2 groups state, 1, kernel]: x, B, C
    MAMBA_CONV_BIAS = "mamba_conv_bias"
    MAMBA_A_LOG = "mamba_a_log"
    MAMBA_D = "mamba_d"
    MAMBA_DT_BIAS = "mamba_dt_bias"
    MAMBA_GATE_NORM = "mamba_gate_norm"  # mixer.norm [d_inner]
    MAMBA_OUT = "mamba_out"

    MTP_EMBEDDING = "mtp_embedding"  # a checkpoint's copy of the embedding
    MTP_HEAD = "mtp_head"  # a checkpoint's copy of the output layer
    MTP_EMBED_NORM = "mtp_embed_norm"  # enorm
    MTP_HIDDEN_NORM = "mtp_hidden_norm"  # hnorm
    MTP_PROJ = "mtp_proj"  # eh_proj [H, 2 H]
    MTP_FINAL_NORM = "mtp_final_norm"  # shared_head.norm

    UNKNOWN = "unknown"  # no rule: travels by the misc route


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that differ in nothing but layer and expert number.

    `pattern` is an HF name with `{layer}` and `{expert}` where they vary. `view` is the shape that regions refer to: it
    equals `shape` except where HF interleaves or fuses things in one dim that layouts cut apart (a row-major factoring
    of `shape`).
    """

    pattern: str
    role: Role
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] = ()  # HF layer numbers; empty: not in a layer
    experts: int = 0  # experts 0 .. experts - 1; 0: not an expert
    view: tuple[int, ...] = ()
    mtp: bool = False  # belongs to a multi-token-prediction layer

    def __post_init__(self) -> None:
        if not self.view:
            object.__setattr__(self, "view", self.shape)
        if prod(self.view) != prod(self.shape):
            raise ValueError(f"{self.pattern}: view {self.view} does not factor shape {self.shape}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"{self.pattern}: unknown dtype {self.dtype!r}, known: {', '.join(ITEMSIZE)}")
        if ("{layer}" in self.pattern) != bool(self.layers) or ("{expert}" in self.pattern) != bool(self.experts):
            raise ValueError(f"{self.pattern}: layers {self.layers} or experts {self.experts} do not fit the pattern")

    @property
    def count(self) -> int:
        return max(1, len(self.layers)) * max(1, self.experts)

    @property
    def nbytes(self) -> int:
        """Bytes of one parameter of the group."""
        return prod(self.shape) * ITEMSIZE[self.dtype]

    def name(self, layer: int | None, expert: int | None) -> str:
        return self.pattern.format(layer=layer, expert=expert)

    def names(self) -> Iterator[str]:
        for layer in self.layers or (None,):
            for expert in range(self.experts) if self.experts else (None,):
                yield self.name(layer, expert)


@dataclass(frozen=True, slots=True)
class Attention:
    """Grouped-query attention: `heads` query heads share `kv_heads` key/value heads of `head_dim`."""

    heads: int
    kv_heads: int
    head_dim: int


@dataclass(frozen=True, slots=True)
class LatentAttention:
    """Multi-head latent attention (DeepSeek-V2/V3). `q_lora_rank` 0: queries are projected directly."""

    heads: int
    q_lora_rank: int
    kv_lora_rank: int
    qk_nope_dim: int
    qk_rope_dim: int
    v_dim: int


@dataclass(frozen=True, slots=True)
class Mamba:
    """A Mamba2 mixer: `heads` heads of `head_dim`, `groups` groups of `state` for B and C, causal conv of `kernel`."""

    heads: int
    head_dim: int
    groups: int
    state: int
    kernel: int

    @property
    def d_inner(self) -> int:
        return self.heads * self.head_dim


@dataclass(frozen=True, slots=True)
class Architecture:
    """The numbers of a model that layout rules need. `layers` excludes multi-token-prediction layers."""

    family: str  # HF model_type
    hidden: int
    layers: int
    vocab: int
    tied: bool
    attention: Attention | LatentAttention
    intermediate: int = 0  # dense MLP width
    experts: int = 0
    expert_intermediate: int = 0
    shared_intermediate: int = 0
    gated: bool = True  # gate/up experts and MLPs (False: up only, e.g. squared ReLU)
    mamba: Mamba | None = None
    mtp_layers: int = 0
    zero_centered_norms: bool = False


@dataclass(frozen=True, slots=True)
class Catalogue:
    """Every parameter of one model, in HF names. `dtype` is the checkpoint's main dtype."""

    architecture: Architecture
    groups: tuple[ParameterGroup, ...]
    dtype: str = "bfloat16"
    _index: dict[str, tuple[int, int | None, int | None]] = field(
        default_factory=dict, repr=False, compare=False, hash=False
    )

    def __len__(self) -> int:
        return sum(group.count for group in self.groups)

    @property
    def nbytes(self) -> int:
        return sum(group.count * group.nbytes for group in self.groups)

    def names(self) -> Iterator[str]:
        for group in self.groups:
            yield from group.names()
