"""`mcore-reshard explain`: where one element comes from and where it goes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from rich.console import RenderableType

from mcore_reshard.planner.layout.block_scales import KV_SCALES
from mcore_reshard.planner.layout.engines import engine_named
from mcore_reshard.planner.model.precision import FP8
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.plan.transfers import (
    Place,
    Transfer,
    UnknownElementError,
    find_parameter,
    holders_of,
    local_tensors,
    parse_rank,
)
from mcore_reshard.planning import InputError

from .inputs import collect_problems, read_plan
from .render import Cell, facts, grouped, noted, print_report, ranges, styled, table
from .show import origin_as_dict, place_as_dict, rank_name, sender, tensor_lines, tensors_of

_ROWS_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Question:
    """An element, `name[i,j]`, and the ranks that the user asks about. `world`: the name is one of its local tensors."""

    name: str
    index: tuple[int, ...] | None  # None: the user named a whole tensor
    world: World | None = None
    ranks: Mapping[World, int] = field(default_factory=dict)

    def index_in(self, sizes: tuple[int, ...]) -> tuple[int, ...]:
        """The index of the element. Raises InputError, with an example, where the user gave none."""
        if self.index is not None:
            return self.index
        example = f"{self.name}{_brackets([0] * len(sizes))}"
        problem = f"{self.name} has shape {list(sizes)}: name one element, for example '{example}'"
        raise InputError([f"{problem}; `show PLAN --parameter '{self.name}'` lists the transfers of all"])

    def concerns(self, transfer: Transfer) -> bool:
        """Whether the transfer is between these ranks. One without places concerns everyone."""
        places = [place for place in (transfer.src, transfer.dst) if place is not None]
        return all(self.ranks.get(place.world, place.rank) == place.rank for place in places)


@dataclass(frozen=True, slots=True)
class Answer:
    kind: str  # what the name was taken for: "parameter", "gen tensor" or "train tensor"
    transfers: list[Transfer]
    holders: list[Place]
    notes: list[str]
    receivers: frozenset[int] = (
        frozenset()
    )  # generation ranks that get an element of a parameter, whoever is asked about


def run(args: argparse.Namespace) -> int:
    plan = read_plan(args.plan)
    problems: list[str] = []
    ranks: dict[World, int] = {}
    for world, rank in (("gen", args.gen_rank), ("train", args.train_rank)):
        if rank is not None:
            with collect_problems(problems):
                ranks.update([parse_rank(plan, f"{world}:{rank}")])
    with collect_problems(problems):
        question = replace(parse_element(args.element), ranks=ranks)
        owner = question.world or _world_of(plan, question)
        answer = _of_parameter(plan, question) if owner is None else _of_tensor(plan, question, owner)
    if problems:
        raise InputError(problems)
    report: dict[str, Any] = {
        "digest": plan.digest,
        "element": args.element,
        "kind": answer.kind,
        "gen_rank": args.gen_rank,
        "train_rank": args.train_rank,
        "origins": [origin_as_dict(transfer) for transfer in answer.transfers],
        "holders": [place_as_dict(place) for place in answer.holders],
        "notes": answer.notes,
    }
    print_report(args.json, report, _text(args, answer))
    return 0


def parse_element(text: str) -> Question:
    """`gen:model.norm.weight[5]` -> world, name and index; no index where there are no brackets. Raises InputError."""
    match = re.fullmatch(r"\s*(?:(gen|train):)?([^\[\]\s]+)\s*(?:\[([^\[\]]*)\])?\s*", text)
    if match is None:
        raise InputError([f"cannot read {text!r}, write NAME[i,j], for example model.norm.weight[5]"])
    world: World | None = "gen" if match[1] == "gen" else "train" if match[1] else None
    name, inside = match[2], match[3]
    try:
        return Question(name, None if inside is None else tuple(map(int, inside.split(","))), world)
    except ValueError as error:
        problem = f"cannot read the index [{inside}], write whole numbers, for example {name}[5,3]"
        raise InputError([problem]) from error


def _world_of(plan: Plan, question: Question) -> World | None:
    """Whose local tensor the name is, None for an HF parameter. Raises UnknownElementError where it is nobody's."""
    name = question.name
    try:
        find_parameter(plan, name)
        return None
    except UnknownElementError as error:
        if name.rpartition(".")[2] in KV_SCALES:
            problem = f"{name}: no plan has scales of the KV cache, refit(kv_scales=...) brings them"
            raise UnknownElementError(problem) from error
        if re.match(r"vp[0-9]+\.", name):
            return "train"
        one_a_stage = (int(plan.gen.dense_ranks(stage)[0, 0]) for stage in range(plan.gen.pp))
        if "gen" in question.ranks or any(name in local_tensors(plan, "gen", rank) for rank in one_a_stage):
            return "gen"
        raise


def _of_parameter(plan: Plan, question: Question) -> Answer:
    name = question.name
    group = plan.groups[find_parameter(plan, name)[0]]
    index = question.index_in(group.shape)
    transfers = [*plan.transfers(name, element=index)]
    receivers = frozenset(transfer.dst.rank for transfer in transfers if transfer.dst is not None)
    notes = list(_precision_notes(plan, name, index))
    rank = question.ranks.get("gen")
    tensor = None if rank is None else local_tensors(plan, "gen", rank).get(name)
    if tensor is not None and tensor.shape != group.shape:
        sizes, gen_name = f"{list(tensor.shape)} of {list(group.shape)}", f"'gen:{name}[...]'"
        notes.append(f"{name} is also a tensor of gen:{rank}, {sizes}; for an element of that one write {gen_name}")
    carriers = {transfer.relayed_by for transfer in transfers if transfer.relayed_by is not None} - receivers
    if carriers:
        notes.append(f"gen {ranges(carriers)} receive it for others, and hold it no longer than it takes to pass on")
    concerned = [*filter(question.concerns, transfers)]
    return Answer("parameter", concerned, holders_of(plan, name, index), notes, receivers)


def _of_tensor(plan: Plan, question: Question, world: World) -> Answer:
    name, rank = question.name, question.ranks.get(world)
    if rank is None:
        problem = f"{name}: {world} ranks have other content under one name: name one with --{world}-rank N"
        raise InputError([problem])
    tensor = local_tensors(plan, world, rank).get(name)
    index = question.index or () if tensor is None else question.index_in(tensor.shape)
    transfers = [t for t in plan.transfers(tensor=name, rank=f"{world}:{rank}", element=index) if question.concerns(t)]
    elements = list(dict.fromkeys((t.parameter, t.element) for t in transfers if t.element is not None))
    holders = [place for parameter, element in elements[:1] for place in holders_of(plan, parameter, element)]
    notes = [note for parameter, element in elements for note in _precision_notes(plan, parameter, element)]
    if world == "gen" and (repeated := engine_named(plan.engine).repeated_tensor(name)):
        notes.append(f"a tensor beside the engine's own, which repeats {repeated} from it")
    return Answer(f"{world} tensor", transfers, holders, list(dict.fromkeys(notes)))


def _precision_notes(plan: Plan, name: str, index: tuple[int, ...]) -> Iterator[str]:
    """Where the scale of an element is, which block a scale is of, and what is cast on the way."""
    number, layer, expert = find_parameter(plan, name)
    for cast in plan.casts:
        if cast.group == number:
            yield f"the trainer holds {cast.src} and sends {cast.dst}"
    for pair in plan.pairs:
        rows, columns = pair.block
        weight, scales = plan.groups[pair.weight], plan.groups[pair.scales]
        if pair.weight == number:
            block = (index[0] // rows, index[1] // columns) if len(scales.shape) == 2 else (0,)
            yield f"its scale is {scales.name(layer, expert)}{_brackets(block)}, of a block of {rows}x{columns}"
        elif pair.scales == number:
            row, column = index if len(index) == 2 else (0, 0)
            stop = min(weight.shape[0], (row + 1) * rows), min(weight.shape[1], (column + 1) * columns)
            box = f"[{row * rows}:{stop[0]}, {column * columns}:{stop[1]}]"
            yield f"it is the scale of {weight.name(layer, expert)}{box}"
            if any(cast.group == pair.weight and cast.dst == FP8 for cast in plan.casts):
                yield "the trainer holds no scales: it computes this one as it casts the block"


# --- text


def _text(args: argparse.Namespace, answer: Answer) -> Iterator[RenderableType]:
    yield from noted(answer.notes)
    if not answer.transfers:
        yield _why_none(args, answer)
    groups = grouped(answer.transfers, lambda t: (t.parameter, t.element, t.pp_stage, t.region, *tensors_of(t)))
    for alike in groups.values():  # they differ in ranks and offsets alone
        first = alike[0]
        name = styled(f"{first.parameter}{_brackets(first.element or ())}", "bold")
        lines: list[tuple[str, Cell]] = [("parameter", name)] if first.parameter else []
        lines.append(("route", first.route + (f": {first.reason}" if first.reason else "")))
        if first.region is not None:
            lines.append(("stage", f"{first.pp_stage}, in region {first.region} of {list(first.view)}"))
        lines += tensor_lines(first)
        if answer.holders and first.src is not None:
            lines.append(("held by", f"train {ranges({place.rank for place in answer.holders})}"))
        yield facts(lines)
        if first.src is not None or first.dst is not None:
            rows = ((rank_name(t.dst), *_where(t.dst), sender(t), *_where(t.src)) for t in alike)
            columns = "to, index, >element, >byte, from, index, >element, >byte"
            yield table(None, columns, rows, most=_ROWS_SHOWN, noun="transfer")


def _why_none(args: argparse.Namespace, answer: Answer) -> str:
    """Why no transfer is between the ranks of the question."""
    holders = {place.rank for place in answer.holders}
    held_by = f" (held by train {ranges(holders)})" if holders else ""
    if args.train_rank is None:
        return f"gen:{args.gen_rank} does not hold this element (held by gen {ranges(answer.receivers)})"
    if args.gen_rank is not None:
        return f"train:{args.train_rank} does not send this element to gen:{args.gen_rank}{held_by}"
    if holders and args.train_rank not in holders:
        return f"train:{args.train_rank} does not hold this element{held_by}"
    return f"train:{args.train_rank} holds this element and sends it to nobody: its replicas serve every pull{held_by}"


def _where(place: Place | None) -> tuple[Cell, Cell, Cell]:
    return ("", "", "") if place is None else (_brackets(place.index), place.offset, place.byte_offset)


def _brackets(index: Iterable[int]) -> str:
    return "[" + ",".join(map(str, index)) + "]"
