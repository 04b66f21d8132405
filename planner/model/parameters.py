"""A model's parameters: HF names, global shapes and dtypes, grouped where only layer and expert numbers differ.

Parameters are never listed one by one: the 256 experts of 58 layers are one `ParameterGroup`, because every layout rule
treats them the same. Layout rules dispatch on a group's `role` alone; no rule matches a name.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from math import prod

from .name_patterns import fill, require_parameter_pattern

ITEMSIZE: Mapping[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "uint8": 1}


class Role(str, Enum):
    """A parameter's role, by which layout rules are chosen. Biases have roles of their own."""

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

    TRACED = "traced"  # no role: its layout was read off the loaders of trainer and engine

    UNKNOWN = "unknown"  # no rule: travels by the misc route


EXPERT_ROLES = frozenset({Role.EXPERT_GATE, Role.EXPERT_UP, Role.EXPERT_DOWN})
# All experts of a layer in one parameter.
STACKED_ROLES = frozenset({
    Role.STACKED_GATE_UP, Role.STACKED_GATE_UP_BIAS, Role.STACKED_DOWN, Role.STACKED_DOWN_BIAS,
})  # fmt: skip


MAX_PARAMETERS = 1 << 20  # of a model: schedules and proofs enumerate them. Kimi-K2 in FP8 has 140,000


@dataclass(frozen=True, slots=True)
class ParameterGroup:
    """Parameters that differ in nothing but layer and expert number.

    Regions refer to `view`. It equals `shape`, unless HF interleaves in one dim what layouts cut apart; then it is a
    row-major factoring of `shape`.
    """

    name_pattern: str  # HF name with {layer} and {expert} where they vary
    role: Role
    shape: tuple[int, ...]
    dtype: str
    layers: tuple[int, ...] = ()  # HF layer numbers; empty: not in a layer
    experts: int = 0  # experts 0 .. experts - 1; 0: not an expert
    view: tuple[int, ...] = ()
    mtp: bool = False  # belongs to a multi-token-prediction layer

    def __post_init__(self) -> None:
        require_parameter_pattern(self.name_pattern)
        if not self.view:
            object.__setattr__(self, "view", self.shape)
        if prod(self.view) != prod(self.shape):
            raise ValueError(f"{self.name_pattern}: view {self.view} does not factor shape {self.shape}")
        if self.dtype not in ITEMSIZE:
            raise ValueError(f"{self.name_pattern}: unknown dtype {self.dtype!r}, known: {', '.join(ITEMSIZE)}")
        numbered = "{layer}" in self.name_pattern, "{expert}" in self.name_pattern
        if numbered != (bool(self.layers), bool(self.experts)):
            raise ValueError(
                f"{self.name_pattern}: layers {self.layers} or experts {self.experts} do not fit the pattern"
            )

    @property
    def count(self) -> int:
        return max(1, len(self.layers)) * max(1, self.experts)

    @property
    def nbytes(self) -> int:  # of one parameter
        return prod(self.shape) * ITEMSIZE[self.dtype]

    def name(self, layer: int | None, expert: int | None) -> str:
        return fill(self.name_pattern, layer=layer, expert=expert)

    def parameters(self) -> Iterator[Parameter]:
        for layer in self.layers or (None,):
            for expert in range(self.experts) if self.experts else (None,):
                yield Parameter(self, layer, expert)

    def names(self) -> Iterator[str]:
        return (parameter.name for parameter in self.parameters())


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

    @property
    def conv_sections(self) -> tuple[int, ...]:
        """Rows of x, B, C in conv1d."""
        return self.d_inner, self.groups * self.state, self.groups * self.state

    @property
    def in_sections(self) -> tuple[int, ...]:
        """Rows of z, x, B, C, dt in in_proj."""
        return self.d_inner, *self.conv_sections, self.heads


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


@dataclass(frozen=True, slots=True)
class Quantization:
    """How a checkpoint's files store the matrices, which `ModelParameters` lists as before quantization."""

    method: str  # quant_method: "fp8", "mxfp4", ...
    block: tuple[int, int] | None = None  # weight_block_size (rows, columns); None: the config names no block
    not_converted: tuple[str, ...] = ()  # modules, or patterns of them, that stay in the main dtype

    @property
    def list_name(self) -> str:
        """The field that lists the modules: vLLM's MXFP8 reads no other, its FP8 reads both."""
        return "ignored_layers" if self.method == "mxfp8" else "modules_to_not_convert"


@dataclass(frozen=True, slots=True)
class Parameter:
    """One parameter of a group. `layer` and `expert` are None where the group has none."""

    group: ParameterGroup
    layer: int | None = None
    expert: int | None = None

    @property
    def name(self) -> str:
        return self.group.name(self.layer, self.expert)


@dataclass(frozen=True, slots=True)
class ModelParameters:
    """Every parameter of one model, in HF names and model order. `dtype` is the checkpoint's main dtype.

    Raises `ValueError` where two groups claim one name.
    """

    architecture: Architecture
    groups: tuple[ParameterGroup, ...]
    dtype: str = "bfloat16"
    quantization: Quantization | None = None

    def __post_init__(self) -> None:
        groups_of: dict[str, list[ParameterGroup]] = {}  # several where layers of one pattern differ in role or shape
        for group in self.groups:
            others = groups_of.setdefault(group.name_pattern, [])
            if any(not group.layers or set(group.layers) & set(other.layers) for other in others):
                raise ValueError(f"{group.name_pattern}: two groups list the same parameter")
            others.append(group)

    def __iter__(self) -> Iterator[Parameter]:
        return (parameter for group in self.groups for parameter in group.parameters())

    @property
    def nbytes(self) -> int:
        return sum(group.count * group.nbytes for group in self.groups)
