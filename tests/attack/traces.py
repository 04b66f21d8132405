"""Traces gone wrong: what a tracer with a fault would say of a rank's tensors.

The true traces are those that the layout rules of a tiny MoE model imply; the loaders say the same of every tensor
(tests/engine/test_traces_against_rules.py). Each mutant changes what one rank, or all ranks of one side, say of one tensor.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from math import prod

import numpy as np
from helpers.plans import Case

from mcore_reshard.planner.layout.condense import ParameterNames, condense
from mcore_reshard.planner.layout.geometry import LocalTensor, row_major_strides
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traced import TracedLayoutError, read_layouts
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace, TracedTensor
from mcore_reshard.planner.plan.make_plan import plan_traced
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.plan.trace_check import _copy_of, _in_slot, checkpoint_of, trace_faults

MODEL = Case("tiny-qwen3-moe", "tp=2,pp=2,ep=2,etp=1,dp=2", "tp=2,pp=2", changes=(("vocab_size", 250),))
SIDES: tuple[World, World] = ("train", "gen")
Traces = dict[World, tuple[RankTrace, ...]]


@cache
def true_traces(case: Case = MODEL) -> Traces:
    """What both sides' rules say of every rank's tensors, as traces."""
    plan = case.plan()
    worlds = {"train": plan.train.world, "gen": plan.gen.world}
    return {side: tuple(_trace_of(plan, side, rank) for rank in range(worlds[side])) for side in SIDES}


def _trace_of(plan: Plan, world: World, rank: int) -> RankTrace:
    tensors: dict[str, LocalTensor] = {}
    copies: dict[str, dict[tuple[str, StridedCopy], None]] = {}
    padding: dict[str, dict[StridedCopy, None]] = {}
    for place in plan.groups_of(world, rank):
        transfers, partition = place.transfers, place.partition
        for member in range(transfers.members):
            name, slot = plan.parameter_name(place.index, member), transfers.slot(world, member)
            for piece in partition.pieces[place.part]:
                local = transfers.tensor_name(piece.tensor, world, member)
                tensors[local] = replace(piece.tensor, name=local)
                copy = _in_slot(piece, _copy_of(piece, plan.groups[transfers.group].view), slot)
                copies.setdefault(local, {})[name, copy] = None
            for pad in partition.padding[place.part] if partition.padding else ():
                local = transfers.tensor_name(pad.tensor, world, member)
                tensors[local] = replace(pad.tensor, name=local)
                strides = row_major_strides(pad.tensor.shape)
                offset = sum(start * stride for start, stride in zip(pad.box.start, strides, strict=True))
                still = (0,) * len(strides)
                padding.setdefault(local, {})[StridedCopy(pad.box.extents, 0, still, offset, strides).coalesced()] = (
                    None
                )
    return RankTrace(
        tuple(
            TracedTensor(tensor, tuple(copies.get(name, ())), tuple(padding.get(name, ())))
            for name, tensor in sorted(tensors.items())
        )
    )


@dataclass(frozen=True)
class Mutant:
    """Wrong traces of one side; `everywhere`: all ranks that hold the tensor say the same."""

    fault: str
    side: World
    traces: Traces
    tensor: str

    def __str__(self) -> str:
        return f"{self.fault} of {self.side} tensor {self.tensor}"


Change = Callable[[TracedTensor, random.Random, "_Peers"], TracedTensor | None]


@dataclass(frozen=True)
class _Peers:
    """The other tensors of the ranks of a side, by name."""

    own: Mapping[str, TracedTensor]
    ranks: Sequence[Mapping[str, TracedTensor]]


def _with_copy(tensor: TracedTensor, at: int, name: str, copy: StridedCopy) -> TracedTensor:
    return replace(tensor, copies=(*tensor.copies[:at], (name, copy), *tensor.copies[at + 1 :]))


def _dropped_piece(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    at = rng.randrange(len(tensor.copies))
    return replace(tensor, copies=tensor.copies[:at] + tensor.copies[at + 1 :])


def _shifted_source(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    at = rng.randrange(len(tensor.copies))
    name, copy = tensor.copies[at]
    last = copy.inverse.dst_span[1]
    room = prod(SHAPES[name].shape) > last
    return _with_copy(tensor, at, name, replace(copy, src_offset=copy.src_offset + (1 if room else -1)))


def _shifted_destination(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    at = rng.randrange(len(tensor.copies))
    name, copy = tensor.copies[at]
    room = prod(tensor.tensor.shape) > copy.dst_span[1]
    return _with_copy(tensor, at, name, replace(copy, dst_offset=copy.dst_offset + (1 if room else -1)))


def _wrong_stride(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    at = rng.randrange(len(tensor.copies))
    name, copy = tensor.copies[at]
    dims = [d for d, extent in enumerate(copy.extents) if extent > 1 and copy.src_strides[d] > 1]
    if not dims:
        return None
    strides = list(copy.src_strides)
    strides[rng.choice(dims)] -= 1
    return _with_copy(tensor, at, name, replace(copy, src_strides=tuple(strides)))


def _exchanged_parameters(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    """Two parameters of one tensor in each other's place, as gate and up."""
    names = sorted({name for name, _ in tensor.copies})
    pairs = [(a, b) for a in names for b in names if a < b and SHAPES[a] == SHAPES[b]]
    if not pairs:
        return None
    return _renamed(tensor, dict([(pair := rng.choice(pairs)), pair[::-1]]))


def _renamed(tensor: TracedTensor, names: Mapping[str, str]) -> TracedTensor:
    return replace(tensor, copies=tuple((names.get(name, name), copy) for name, copy in tensor.copies))


def _number_changed(tensor: TracedTensor, rng: random.Random, word: str) -> TracedTensor | None:
    """Another layer or expert of the same parameter."""
    at = rng.randrange(len(tensor.copies))
    name = tensor.copies[at][0]
    pattern = name.split(f"{word}.")
    if len(pattern) < 2:
        return None
    number, _, rest = pattern[1].partition(".")
    others = [o for n in range(8) if n != int(number) and (o := f"{pattern[0]}{word}.{n}.{rest}") in SHAPES]
    return None if not others else _renamed(tensor, {name: rng.choice(others)})


def _wrong_layer(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    return _number_changed(tensor, rng, "layers")


def _wrong_expert(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    return _number_changed(tensor, rng, "experts")


def _data_as_padding(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    at = rng.randrange(len(tensor.copies))
    _, copy = tensor.copies[at]
    box = replace(copy, src_offset=0, src_strides=(0,) * len(copy.extents))
    return replace(tensor, copies=tensor.copies[:at] + tensor.copies[at + 1 :], padding=(*tensor.padding, box))


def _padding_as_data(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    if not tensor.padding:
        return None
    box, name = tensor.padding[0], tensor.copies[0][0]
    dense = tuple(prod(box.extents[d + 1 :]) for d in range(len(box.extents)))
    copy = replace(box, src_offset=0, src_strides=dense)
    return replace(tensor, copies=(*tensor.copies, (name, copy)), padding=tensor.padding[1:])


def _other_rank(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    """What another rank holds of the same tensor."""
    others = [ranks[tensor.tensor.name] for ranks in peers.ranks if tensor.tensor.name in ranks]
    return rng.choice(others)


def _written_twice(tensor: TracedTensor, rng: random.Random, peers: _Peers) -> TracedTensor | None:
    """A piece that lies over another one: the last write has not won."""
    if len(tensor.copies) < 2:
        return None
    (_, first), (name, copy) = rng.sample(tensor.copies, 2)
    return replace(tensor, copies=(*tensor.copies, (name, replace(copy, dst_offset=first.dst_offset))))


Renaming = dict[str, str]


def _exchanged_experts(names: Sequence[str], rng: random.Random) -> Renaming:
    """Two experts of a layer in each other's slots."""
    experts = sorted({name.rpartition(".experts.")[0] + ".experts." for name in names if ".experts." in name})
    if not experts:
        return {}
    layer = rng.choice(experts)
    numbers = sorted({name.removeprefix(layer).split(".")[0] for name in names if name.startswith(layer)})
    if len(numbers) < 2:
        return {}
    one, other = rng.sample(numbers, 2)
    swapped = {one: other, other: one}
    members = [(name, *name.removeprefix(layer).split(".", 1)) for name in names if name.startswith(layer)]
    return {name: f"{layer}{swapped[number]}.{rest}" for name, number, rest in members if number in swapped}


def _stale_layers(names: Sequence[str], rng: random.Random) -> Renaming:
    """All layers are counted from one that is too early, as after a change of the pipeline."""
    found = {}
    for name in names:
        head, dot, rest = name.partition("layers.")
        number, _, leaf = rest.partition(".")
        if dot and int(number):
            found[name] = f"{head}layers.{int(number) - 1}.{leaf}"
    return found


CHANGES: dict[str, Change] = {
    change.__name__.strip("_"): change
    for change in (
        _dropped_piece, _shifted_source, _shifted_destination, _wrong_stride, _exchanged_parameters,
        _wrong_layer, _wrong_expert, _data_as_padding, _padding_as_data, _other_rank, _written_twice,
    )
}  # fmt: skip
RENAMINGS = {"exchanged_experts": _exchanged_experts, "stale_layers": _stale_layers}
FAULTS = (*CHANGES, *RENAMINGS)
SHAPES: dict[str, HfTensor] = checkpoint_of(MODEL.plan())


def mutants(fault: str, seed: int, count: int) -> list[Mutant]:
    """`count` mutants of one fault, on either side; on one rank, or on all that hold the same of the tensor."""
    rng, found = random.Random(f"{fault} {seed}"), []
    for _ in range(400 * count):
        if len(found) == count:
            break
        side: World = rng.choice(SIDES)
        ranks = [{t.tensor.name: t for t in trace.tensors} for trace in true_traces()[side]]
        rank = rng.randrange(len(ranks))
        name = rng.choice(sorted(ranks[rank]))
        everywhere = rng.random() < 0.5
        if fault in RENAMINGS:
            wrong = _renamed_rank(ranks[rank], fault, rng)
            same = [r for r, each in enumerate(ranks) if each == ranks[rank]]
        else:
            tensor = ranks[rank][name]
            changed = CHANGES[fault](tensor, rng, _Peers(ranks[rank], ranks)) if tensor.copies else None
            wrong = {} if changed in (None, tensor) else {name: changed}
            same = [r for r, each in enumerate(ranks) if each.get(name) == tensor]
        if wrong:
            traces = dict(true_traces())
            traces[side] = tuple(
                replace(trace, tensors=tuple(wrong.get(t.tensor.name, t) for t in trace.tensors))
                if r in (same if everywhere else [rank])
                else trace
                for r, trace in enumerate(traces[side])
            )
            found.append(Mutant(fault, side, traces, next(iter(wrong))))
    return found


def _renamed_rank(tensors: Mapping[str, TracedTensor], fault: str, rng: random.Random) -> dict[str, TracedTensor]:
    names = sorted({name for tensor in tensors.values() for name in tensor.names})
    renaming = RENAMINGS[fault](names, rng)
    renamed = {name: _renamed(tensor, renaming) for name, tensor in tensors.items()}
    return {name: tensor for name, tensor in renamed.items() if tensor != tensors[name]}


def traced_plan(traces: Traces) -> Plan:
    """The plan of traces. Raises TracedLayoutError."""
    plan, names = MODEL.plan(), ParameterNames(SHAPES)
    stages = [[mesh.coordinate(rank)["pp"] for rank in range(mesh.world)] for mesh in (plan.train, plan.gen)]
    condensed = [[condense(t, names, is_trainer=side == "train") for t in traces[side]] for side in SIDES]
    return plan_traced(
        read_layouts("mystery", SHAPES, *condensed, (stages[0], stages[1]), "vllm"), plan.train, plan.gen
    )


def refused_by_gate(mutant: Mutant) -> str:
    """Why the mutant makes no plan, no proof, or sends by misc what the truth does not; "" if nothing is seen."""
    try:
        plan = traced_plan(mutant.traces)
    except TracedLayoutError as error:
        return error.problems[0]
    if violations := plan.prove().violations:
        return str(violations[0])
    entries = (*plan.misc, *plan.excluded)
    return f"{plan.groups[entries[0].group].name_pattern}: {entries[0].reason}" if entries else ""


def refused_by_rules(mutant: Mutant) -> str:
    """The first difference from the plan that the rules make."""
    found = (
        f for rank, t in enumerate(mutant.traces[mutant.side]) for f in trace_faults(MODEL.plan(), mutant.side, rank, t)
    )
    return next(found, "")


def shown_by_load(mutant: Mutant) -> str:
    """The first tensor whose tagged elements, read by the trace, are not those that a load puts there."""
    for rank, (said, true) in enumerate(zip(mutant.traces[mutant.side], true_traces()[mutant.side], strict=True)):
        for one, other in zip(said.tensors, true.tensors, strict=True):
            if not np.array_equal(_loaded(one), _loaded(other)):
                return f"{mutant.side}:{rank}: {one.tensor.name}"
    return ""


@cache
def _tags() -> dict[str, int]:
    tags, first = {}, 1
    for name, tensor in SHAPES.items():
        tags[name], first = first, first + prod(tensor.shape)
    return tags


def _loaded(tensor: TracedTensor) -> np.ndarray:
    """A tensor whose elements are tagged through the whole model; padding is 0, what nobody writes is -1."""
    memory = np.full(2 * prod(tensor.tensor.shape), -1, dtype=np.int64)  # room for what is written too far
    for name, copy in [*tensor.copies, *(("", box) for box in tensor.padding)]:
        src = dst = np.zeros((), dtype=np.int64)
        for extent, s, d in zip(copy.extents, copy.src_strides, copy.dst_strides, strict=True):
            index = np.arange(extent)
            src, dst = np.add.outer(src, index * s), np.add.outer(dst, index * d)
        memory[dst + copy.dst_offset] = src + copy.src_offset + _tags()[name] if name else 0
    return memory
