"""The place of every HF tensor in the tensors of one vLLM rank: sizes, and the ways to cut a tensor.

Half of an oracle. It repeats rules of planner/layout on purpose and shares no code with it. It is plain index arithmetic,
compared byte for byte with vLLM's own `load_weights` (tests/engine). families.py has the families. Mirrors vLLM 0.32.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

Shape = tuple[int, ...]
Config = Mapping[str, Any]
Take = Callable[[torch.Tensor], torch.Tensor]
Cut = tuple[int, int]  # (into how many equal parts, the number of this rank's part)

WHOLE: Cut = (1, 0)


@dataclass(frozen=True, slots=True)
class GenSizes:
    """Sizes of a vLLM deployment. A rank is dp_index * tp * pp + pp_index * tp + tp_index.

    `ep` = 1: experts are cut by tp, and every data-parallel replica is an engine of its own.
    `ep` = tp * dp: one engine, whose whole experts are spread over the tp * dp ranks of a pipeline stage.
    `layers`: of each pipeline stage, as in VLLM_PP_LAYER_PARTITION; empty: vLLM's own split.
    """

    tp: int = 1
    pp: int = 1
    dp: int = 1
    ep: int = 1
    layers: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if min(self.tp, self.pp, self.dp, self.ep) < 1:
            raise ValueError(f"sizes must be at least 1: {self}")
        if self.ep not in (1, self.tp * self.dp):
            raise ValueError(f"ep must be 1 or tp * dp = {self.tp * self.dp}, not {self.ep}")

    @property
    def world(self) -> int:
        return self.tp * self.pp * self.dp

    def coordinates(self, gen_rank: int) -> tuple[int, int, int]:
        """(dp_index, pp_index, tp_index) of a rank."""
        if not 0 <= gen_rank < self.world:
            raise ValueError(f"generation rank {gen_rank} is not in [0, {self.world})")
        return gen_rank // (self.tp * self.pp), gen_rank // self.tp % self.pp, gen_rank % self.tp


@dataclass(frozen=True, slots=True)
class Target:
    """A box of an engine tensor and how its contents come from the HF tensor."""

    tensor: str
    index: tuple[int | slice, ...]
    take: Take


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one HF matrix inside a fused one; the rank holds the part `cut` of these `rows`."""

    source: str
    rows: int
    cut: Cut = WHOLE


@dataclass(slots=True)
class Table:
    """What one rank holds: `tensors` by vLLM name; `sources`: every HF tensor, its shape and where it lands here.

    Methods add tensors by their vLLM names. Their HF names are the same, but for what `renames` replaces in them.
    """

    config: Config
    sizes: GenSizes
    tp_index: int
    ep_index: int
    layers: int  # of the whole model
    stage: range  # layers of this pipeline stage
    dtype: torch.dtype
    here: bool = True  # whether this rank holds the tensors that are added next
    renames: Mapping[str, str] = field(default_factory=dict)
    tensors: dict[str, tuple[Shape, torch.dtype]] = field(default_factory=dict)
    sources: dict[str, tuple[Shape, list[Target]]] = field(default_factory=dict)

    @property
    def tp_cut(self) -> Cut:
        return self.sizes.tp, self.tp_index

    @property
    def experts_cut(self) -> Cut:
        return self.tp_cut if self.sizes.ep == 1 else WHOLE

    @property
    def shared_experts_cut(self) -> Cut:
        """Whole where vLLM runs MoE sequence-parallel (config/parallel.py, use_sequence_parallel_moe)."""
        return WHOLE if self.sizes.ep > 1 and self.sizes.tp > 1 and self.sizes.dp > 1 else self.tp_cut

    @property
    def attention_sizes(self) -> tuple[int, int, int]:
        """(query heads, KV heads, head dim); absent fields as HF config classes fill them."""
        heads, get = self.config["num_attention_heads"], self.config.get
        return heads, get("num_key_value_heads") or heads, get("head_dim") or self.config["hidden_size"] // heads

    def each_layer(self) -> Iterator[tuple[int, str]]:
        """Every layer and its name; tensors that are added meanwhile are on the layer's stage."""
        for layer in range(self.layers):
            self.here = layer in self.stage
            yield layer, f"model.layers.{layer}"

    def add(self, tensor: str, shape: Shape, dtype: torch.dtype | None = None) -> None:
        if self.here:
            self.tensors[tensor] = (shape, dtype or self.dtype)

    def load(self, source: str, shape: Shape, target: Target, here: bool = True) -> None:
        """Note an HF tensor, and where it lands if this rank holds that."""
        for part, hf_part in self.renames.items():
            source = source.replace(part, hf_part)
        known, targets = self.sources.setdefault(source, (shape, []))
        if known != shape:
            raise ValueError(f"{source} is wanted as {known} and as {shape}")
        if here and self.here:
            targets.append(target)

    def single(
        self, tensor: str, shape: Shape, take: Take | None = None, source: str = "", dtype: torch.dtype | None = None
    ) -> None:
        """What `take` makes of one HF tensor of this shape; without it the whole tensor."""
        take = take or (lambda t: t)
        self.add(tensor, tuple(take(torch.empty(shape, device="meta")).shape), dtype)
        self.load(source or tensor, shape, Target(tensor, (), take))

    def fused(self, tensor: str, parts: Sequence[Part], *rest: int) -> None:
        """Parts one below the other, each cut on its own. Parts of one source are its rows from the top down."""
        source_rows, starts = Counter[str](), Counter[str]()
        for part in parts:
            source_rows[part.source] += part.rows
        row = 0
        for part in parts:
            ways, which = part.cut
            rows = _divide(part.rows, ways, part.source)
            start = starts[part.source] + which * rows
            target = Target(tensor, (slice(row, row + rows),), _rows(start, start + rows))
            self.load(part.source, (source_rows[part.source], *rest), target)
            starts[part.source] += part.rows
            row += rows
        self.add(tensor, (row, *rest))

    def column(self, tensor: str, rows: int, *rest: int) -> None:
        """A tensor cut by rows."""
        self.fused(tensor, [Part(tensor, rows, self.tp_cut)], *rest)

    def row(self, tensor: str, rows: int, columns: int, cut: Cut | None = None) -> None:
        """A matrix cut by columns."""
        ways, which = cut or self.tp_cut
        width = _divide(columns, ways, tensor)
        self.single(tensor, (rows, columns), _columns(which * width, (which + 1) * width))

    def vocabulary(self, tensor: str) -> None:
        """Rows padded to a multiple of 64, then cut; the padding is zero (layers/vocab_parallel_embedding.py)."""
        vocab = self.config["vocab_size"]
        rows = _divide((vocab + 63) // 64 * 64, self.sizes.tp, "the padded vocabulary")

        def take(whole: torch.Tensor) -> torch.Tensor:
            local = whole[self.tp_index * rows : (self.tp_index + 1) * rows]
            return torch.cat([local, local.new_zeros(rows - len(local), local.shape[1])])

        self.single(tensor, (vocab, self.config["hidden_size"]), take)

    def norms(self, layer: str) -> None:
        for norm in ("input_layernorm", "post_attention_layernorm"):
            self.single(f"{layer}.{norm}.weight", (self.config["hidden_size"],))

    def local_experts(self, experts: int) -> range:
        """Experts of this rank: the first ranks take one more each (fused_moe/expert_map_manager.py)."""
        if experts < self.sizes.ep:
            raise ValueError(f"{experts} experts do not go around ep = {self.sizes.ep} ranks")
        base, more = divmod(experts, self.sizes.ep)
        start = self.ep_index * base + min(self.ep_index, more)
        return range(start, start + base + (self.ep_index < more))

    def experts(self, name: str, count: int, gated: bool = True) -> None:
        """w13 `[E, (2) inner / tp, hidden]` and w2 `[E, hidden, inner / tp]` (fused_moe/routed_experts.py)."""
        inner, hidden = self.config["moe_intermediate_size"], self.config["hidden_size"]
        local, (ways, which) = self.local_experts(count), self.experts_cut
        width = _divide(inner, ways, f"the experts of {name}")
        cut = (which * width, (which + 1) * width)
        projections = ("gate_proj", "up_proj") if gated else ("up_proj",)
        w13, w2 = f"{name}.routed_experts.w13_weight", f"{name}.routed_experts.w2_weight"
        self.add(w13, (len(local), len(projections) * width, hidden))
        self.add(w2, (len(local), hidden, width))
        for expert in range(count):
            here, slot = expert in local, expert - local.start
            for place, projection in enumerate(projections):
                target = Target(w13, (slot, slice(place * width, (place + 1) * width)), _rows(*cut))
                self.load(f"{name}.{expert}.{projection}.weight", (inner, hidden), target, here)
            self.load(f"{name}.{expert}.down_proj.weight", (hidden, inner), Target(w2, (slot,), _columns(*cut)), here)

    def attention(self, name: str, qkv_bias: bool = False, o_bias: bool = False, head_norms: bool = False) -> None:
        """qkv_proj `[q; k; v]` and o_proj; few KV heads repeat on neighboring ranks (layers/linear.py)."""
        tp, hidden, (heads, kv_heads, dim) = self.sizes.tp, self.config["hidden_size"], self.attention_sizes
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            raise ValueError(f"{heads} heads and {kv_heads} KV heads cannot be cut by tp = {tp}")
        kv_ways = min(tp, kv_heads)
        key_value = (kv_heads * dim, (kv_ways, self.tp_index // (tp // kv_ways)))
        parts = {"q_proj": (heads * dim, self.tp_cut), "k_proj": key_value, "v_proj": key_value}
        weights = [Part(f"{name}.{proj}.weight", *part) for proj, part in parts.items()]
        self.fused(f"{name}.qkv_proj.weight", weights, hidden)
        if qkv_bias:
            self.fused(f"{name}.qkv_proj.bias", [Part(f"{name}.{proj}.bias", *part) for proj, part in parts.items()])
        self.row(f"{name}.o_proj.weight", hidden, heads * dim)
        if o_bias:
            self.single(f"{name}.o_proj.bias", (hidden,))
        for norm in ("q_norm", "k_norm") if head_norms else ():
            self.single(f"{name}.{norm}.weight", (dim,))

    def mlp(self, name: str, inner: int, cut: Cut | None = None, gated: bool = True) -> None:
        """down_proj, and up_proj or, `gated`, gate_up_proj `[gate; up]`."""
        hidden, cut = self.config["hidden_size"], cut or self.tp_cut
        fused, projections = ("gate_up_proj", ("gate_proj", "up_proj")) if gated else ("up_proj", ("up_proj",))
        parts = [Part(f"{name}.{projection}.weight", inner, cut) for projection in projections]
        self.fused(f"{name}.{fused}.weight", parts, hidden)
        self.row(f"{name}.down_proj.weight", hidden, inner, cut)


def stage_layers(layers: int, pp_index: int, pp: int, partition: Sequence[int] = ()) -> range:
    """Layers of a pipeline stage (distributed/utils.py, get_pp_indices): as `partition` says, or vLLM's own split.

    The stages before the last take the layers left over. 5 layers on 2 stages are 3 + 2; 6 on 4 are 1 + 2 + 2 + 1.
    """
    counts = list(partition)
    if not counts:
        if layers < pp:
            raise ValueError(f"{layers} layers do not go around pp = {pp} stages")
        counts = [layers // pp] * pp
        for i in range(layers % pp):
            counts[-2 - i] += 1
    if len(counts) != pp or sum(counts) != layers:
        raise ValueError(f"the partition {counts} is not one of {layers} layers on {pp} stages")
    return range(sum(counts[:pp_index]), sum(counts[: pp_index + 1]))


def _divide(total: int, ways: int, what: str) -> int:
    if total % ways:
        raise ValueError(f"{total} rows or columns of {what} cannot be cut by {ways}")
    return total // ways


def _rows(start: int, stop: int) -> Take:
    return lambda t: t[start:stop]


def _columns(start: int, stop: int) -> Take:
    return lambda t: t[:, start:stop]
