"""Which HF tensor goes where in the tensors of one vLLM rank, written down family by family.

This is an oracle's half: plain index arithmetic that shares no code with the planner, itself compared byte for byte
with vLLM's own `load_weights` (tests/engine). Mirrors vLLM 0.32; every table names the model file it follows.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any

import torch

Shape = tuple[int, ...]
Index = tuple[int | slice, ...]
Config = Mapping[str, Any]
Take = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True)
class GenSizes:
    """Sizes of a vLLM deployment. A rank is dp_index * tp * pp + pp_index * tp + tp_index.

    `ep` 1: experts are cut by tp, and every data-parallel replica is an engine of its own. `ep` tp * dp: one engine
    with expert parallelism, whole experts spread over the tp * dp ranks of a pipeline stage. `layers` is what the variable
    VLLM_PP_LAYER_PARTITION says: the layers of every pipeline stage; empty where it is not set.
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

    @property
    def engine_ranks(self) -> int:
        """Ranks of one engine: all, or those of one data-parallel replica."""
        return self.world if self.ep > 1 else self.tp * self.pp

    def coordinates(self, gen_rank: int) -> tuple[int, int, int]:
        """(dp_index, pp_index, tp_index) of a rank."""
        if not 0 <= gen_rank < self.world:
            raise ValueError(f"generation rank {gen_rank} is not in [0, {self.world})")
        return gen_rank // (self.tp * self.pp), gen_rank // self.tp % self.pp, gen_rank % self.tp


@dataclass(frozen=True, slots=True)
class Target:
    """A box of an engine tensor and how its contents come from the HF tensor."""

    tensor: str
    index: Index
    take: Take


@dataclass(frozen=True, slots=True)
class Part:
    """Rows of one HF matrix inside a fused one: part `which` of `ways` equal cuts of its `rows`."""

    source: str
    rows: int
    ways: int = 1
    which: int = 0


@dataclass(slots=True)
class Table:
    """What one rank holds: `tensors` by vLLM name, and `sources`, every HF tensor, and where it lands here."""

    sizes: GenSizes
    tp_index: int
    ep_index: int
    stage: range  # layers of this pipeline stage
    first: bool
    last: bool
    dtype: torch.dtype
    tensors: dict[str, tuple[Shape, torch.dtype]] = field(default_factory=dict)
    sources: dict[str, tuple[Shape, list[Target]]] = field(default_factory=dict)

    def source(self, name: str, shape: Shape) -> list[Target]:
        known, targets = self.sources.setdefault(name, (shape, []))
        if known != shape:
            raise ValueError(f"{name} is wanted as {known} and as {shape}")
        return targets

    def whole(self, held: bool, tensor: str, source: str, shape: Shape, dtype: torch.dtype | None = None) -> None:
        """The same tensor on every rank."""
        targets = self.source(source, shape)
        if held:
            self.tensors[tensor] = (shape, dtype or self.dtype)
            targets.append(Target(tensor, (), lambda t: t))

    def fused(self, held: bool, tensor: str, parts: list[Part], *rest: int) -> None:
        """Parts one below the other: `[sum(part.rows / part.ways), *rest]`."""
        row = 0
        for part in parts:
            targets = self.source(part.source, (part.rows, *rest))
            rows = _divide(part.rows, part.ways, part.source)
            if held:
                start = part.which * rows
                targets.append(Target(tensor, (slice(row, row + rows),), rows_of(start, start + rows)))
            row += rows
        if held:
            self.tensors[tensor] = ((row, *rest), self.dtype)

    def column(self, held: bool, tensor: str, sources: list[str], rows: int, *rest: int, tp: bool = True) -> None:
        """Matrices of `rows` rows each, cut by rows and fused."""
        ways, which = (self.sizes.tp, self.tp_index) if tp else (1, 0)
        self.fused(held, tensor, [Part(source, rows, ways, which) for source in sources], *rest)

    def row(self, held: bool, tensor: str, source: str, rows: int, columns: int, tp: bool = True) -> None:
        """A matrix cut by columns."""
        targets = self.source(source, (rows, columns))
        ways, which = (self.sizes.tp, self.tp_index) if tp else (1, 0)
        width = _divide(columns, ways, source)
        if held:
            self.tensors[tensor] = ((rows, width), self.dtype)
            targets.append(Target(tensor, (), _columns(which * width, (which + 1) * width)))

    def vocabulary(self, held: bool, tensor: str, source: str, vocab: int, hidden: int) -> None:
        """Rows padded to a multiple of 64, then cut; the padding is zero (layers/vocab_parallel_embedding.py)."""
        targets = self.source(source, (vocab, hidden))
        rows = _divide((vocab + 63) // 64 * 64, self.sizes.tp, "the padded vocabulary")
        if held:
            self.tensors[tensor] = ((rows, hidden), self.dtype)
            targets.append(Target(tensor, (), _padded_rows(self.tp_index * rows, (self.tp_index + 1) * rows)))

    def local_experts(self, experts: int) -> range:
        """Experts of this rank: the first ranks take one more each (fused_moe/expert_map_manager.py)."""
        if experts < self.sizes.ep:
            raise ValueError(f"{experts} experts do not go around ep = {self.sizes.ep} ranks")
        base, more = divmod(experts, self.sizes.ep)
        start = self.ep_index * base + min(self.ep_index, more)
        return range(start, start + base + (self.ep_index < more))

    @property
    def experts_cut(self) -> tuple[int, int]:
        """(into how many parts experts are cut, the number of this rank's part)."""
        return (self.sizes.tp, self.tp_index) if self.sizes.ep == 1 else (1, 0)

    def experts(self, held: bool, tensor: str, source: str, count: int, inner: int, hidden: int, gated: bool) -> None:
        """w13 `[E, (2) inner / tp, hidden]` and w2 `[E, hidden, inner / tp]` (fused_moe/routed_experts.py)."""
        local = self.local_experts(count)
        ways, which = self.experts_cut
        width = _divide(inner, ways, f"the experts of {source}")
        cut = (which * width, (which + 1) * width)
        projections = ("gate_proj", "up_proj") if gated else ("up_proj",)
        if held:
            self.tensors[f"{tensor}.w13_weight"] = ((len(local), len(projections) * width, hidden), self.dtype)
            self.tensors[f"{tensor}.w2_weight"] = ((len(local), hidden, width), self.dtype)
        for expert in range(count):
            here = held and expert in local
            slot = expert - local.start
            for place, projection in enumerate(projections):
                targets = self.source(f"{source}.{expert}.{projection}.weight", (inner, hidden))
                if here:
                    box = (slot, slice(place * width, (place + 1) * width))
                    targets.append(Target(f"{tensor}.w13_weight", box, rows_of(*cut)))
            targets = self.source(f"{source}.{expert}.down_proj.weight", (hidden, inner))
            if here:
                targets.append(Target(f"{tensor}.w2_weight", (slot,), _columns(*cut)))

    def attention(
        self, held: bool, tensor: str, source: str, config: Config, qkv_bias: bool = False, o_bias: bool = False
    ) -> None:
        """qkv_proj `[q; k; v]` and o_proj; few KV heads repeat on neighboring ranks (layers/linear.py)."""
        tp, hidden = self.sizes.tp, config["hidden_size"]
        heads, kv_heads, dim = attention_sizes(config)
        if heads % tp or (kv_heads % tp and tp % kv_heads):
            raise ValueError(f"{heads} heads and {kv_heads} KV heads cannot be cut by tp = {tp}")
        kv_ways = min(tp, kv_heads)
        parts = [
            ("q_proj", heads * dim, tp, self.tp_index),
            ("k_proj", kv_heads * dim, kv_ways, self.tp_index // (tp // kv_ways)),
            ("v_proj", kv_heads * dim, kv_ways, self.tp_index // (tp // kv_ways)),
        ]
        for kind, rest in (("weight", (hidden,)), *([("bias", ())] if qkv_bias else [])):
            fused = [Part(f"{source}.{name}.{kind}", *cut) for name, *cut in parts]
            self.fused(held, f"{tensor}.qkv_proj.{kind}", fused, *rest)
        self.row(held, f"{tensor}.o_proj.weight", f"{source}.o_proj.weight", hidden, heads * dim)
        if o_bias:
            self.whole(held, f"{tensor}.o_proj.bias", f"{source}.o_proj.bias", (hidden,))

    def gated_mlp(self, held: bool, name: str, inner: int, hidden: int, tp: bool = True) -> None:
        gate_up = [f"{name}.gate_proj.weight", f"{name}.up_proj.weight"]
        self.column(held, f"{name}.gate_up_proj.weight", gate_up, inner, hidden, tp=tp)
        self.row(held, f"{name}.down_proj.weight", f"{name}.down_proj.weight", hidden, inner, tp=tp)

    @property
    def shared_experts_cut(self) -> bool:
        """False where vLLM runs MoE sequence-parallel: it keeps shared experts whole (config/parallel.py,
        use_sequence_parallel_moe)."""
        return not (self.sizes.ep > 1 and self.sizes.tp > 1 and self.sizes.dp > 1)


def empty_table(sizes: GenSizes, gen_rank: int, layers: int, dtype: torch.dtype) -> Table:
    """The table of a rank before any family has filled it."""
    dp_index, pp_index, tp_index = sizes.coordinates(gen_rank)
    return Table(
        sizes=sizes,
        tp_index=tp_index,
        ep_index=dp_index * sizes.tp + tp_index if sizes.ep > 1 else 0,
        stage=stage_layers(layers, pp_index, sizes.pp, sizes.layers),
        first=pp_index == 0,
        last=pp_index == sizes.pp - 1,
        dtype=dtype,
    )


def stage_layers(layers: int, pp_index: int, pp: int, partition: Sequence[int] = ()) -> range:
    """Layers of a pipeline stage (distributed/utils.py, get_pp_indices): as `partition` says, or vLLM's own split.

    Left-over layers go to the stages before the last: 5 layers on 2 stages are 3 + 2, 6 on 4 are 1 + 2 + 2 + 1.
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
    ends = list(accumulate(counts))
    return range(ends[pp_index] - counts[pp_index], ends[pp_index])


def attention_sizes(config: Config) -> tuple[int, int, int]:
    """(query heads, KV heads, head dim); absent fields as HF config classes fill them."""
    heads = config["num_attention_heads"]
    return heads, config.get("num_key_value_heads") or heads, config.get("head_dim") or config["hidden_size"] // heads


def _divide(total: int, ways: int, what: str) -> int:
    if total % ways:
        raise ValueError(f"{total} rows or columns of {what} cannot be cut by {ways}")
    return total // ways


def rows_of(start: int, stop: int) -> Take:
    return lambda t: t[start:stop]


def _columns(start: int, stop: int) -> Take:
    return lambda t: t[:, start:stop]


def _padded_rows(start: int, stop: int) -> Take:
    def take(t: torch.Tensor) -> torch.Tensor:
        held = t[start:stop]
        return torch.cat([held, held.new_zeros(stop - start - held.shape[0], *t.shape[1:])])

    return take
