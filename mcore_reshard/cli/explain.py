"""`mcore-reshard explain`: where one element comes from and where it goes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

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
from mcore_reshard.planner.proof.prove import ProofError, prove
from mcore_reshard.planning import InputError

from .inputs import read_plan
from .render import facts, noted, ranges, say_what_is_left, shape, table, write, write_json

_ROWS_SHOWN = 64


@dataclass(frozen=True, slots=True)
class Element:
    """What a user points at: `name[i,j]`, or a whole tensor where there is no index."""

    name: str
    index: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class _Answer:
    kind: str  # what the element was taken for: "parameter", "gen tensor" or "train tensor"
    transfers: list[Transfer]
    holders: list[Place]
    notes: list[str]


def run(args: argparse.Namespace) -> int:
    plan = read_plan(args.plan)
    proof = prove(plan)
    if not proof.ok:
        raise ProofError(proof)
    answer = _answer(plan, args.element, args.gen_rank, args.train_rank)
    if args.json:
        write_json(_as_dict(plan, args, answer))
    else:
        write(*_text(args, answer))
    return 0


def parse_element(text: str) -> Element:
    """`model.norm.weight[5]` -> name and index; the name alone means no index. Raises InputError."""
    match = re.fullmatch(r"\s*([^\[\]\s]+)\s*(?:\[([^\[\]]*)\])?\s*", text)
    if match is None:
        raise InputError([f"cannot read {text!r}, write NAME[i,j], for example model.norm.weight[5]"])
    name, inside = match.groups()
    if inside is None:
        return Element(name)
    try:
        return Element(name, tuple(int(part) for part in inside.split(",")))
    except ValueError as error:
        message = f"cannot read the index [{inside}], write whole numbers, for example {name}[5,3]"
        raise InputError([message]) from error


def _answer(plan: Plan, text: str, gen_rank: int | None, train_rank: int | None) -> _Answer:
    """Raises InputError with all that is wrong with the ranks and the element."""
    problems: list[str] = []
    ranks = {"gen": gen_rank, "train": train_rank}
    for world, rank in ranks.items():
        try:
            _ = None if rank is None else parse_rank(plan, f"{world}:{rank}")
        except UnknownElementError as error:
            problems.append(str(error))
            ranks[world] = None
    try:
        answer = _of_element(plan, text, ranks["gen"], ranks["train"])
    except InputError as error:
        problems += error.problems
    except UnknownElementError as error:
        problems.append(str(error))
    if problems:
        raise InputError(problems)
    return answer


def _of_element(plan: Plan, text: str, gen_rank: int | None, train_rank: int | None) -> _Answer:
    world, rest = _prefix(text)
    element = parse_element(rest)
    if world is None:
        try:
            find_parameter(plan, element.name)
        except UnknownElementError as unknown:
            if element.name.rpartition(".")[2] in KV_SCALES:
                message = f"{element.name}: no plan has scales of the KV cache, refit(kv_scales=...) brings them"
                raise InputError([message]) from unknown
            world = _world_of(plan, element.name, gen_rank, train_rank, unknown)
    if world is None:
        return _parameter(plan, element, gen_rank, train_rank)
    return _tensor(plan, element, world, gen_rank, train_rank)


def _parameter(plan: Plan, element: Element, gen_rank: int | None, train_rank: int | None) -> _Answer:
    group = plan.groups[find_parameter(plan, element.name)[0]]
    index = _index(element, group.shape)
    transfers = _between(plan.transfers(element.name, element=index), gen_rank, train_rank)
    notes = list(_precision(plan, element.name, index))
    if gen_rank is not None:
        own = local_tensors(plan, "gen", gen_rank).get(element.name)
        if own is not None and own.shape != group.shape:
            notes.append(
                f"{element.name} is also a tensor of gen:{gen_rank}, {shape(own.shape)} of {shape(group.shape)};"
                f" for an element of that one write 'gen:{element.name}[...]'"
            )
    return _Answer("parameter", transfers, holders_of(plan, element.name, index), notes)


def _between(transfers: Iterable[Transfer], gen_rank: int | None, train_rank: int | None) -> list[Transfer]:
    """The transfers between these ranks; one that has no places is everyone's."""

    def concerns(place: Place | None, rank: int | None) -> bool:
        return place is None or rank is None or place.rank == rank

    return [t for t in transfers if concerns(t.dst, gen_rank) and concerns(t.src, train_rank)]


def _precision(plan: Plan, name: str, index: tuple[int, ...]) -> Iterator[str]:
    """Where the scale of an element is, what a scale is of, and what is cast on the way."""
    number, layer, expert = find_parameter(plan, name)
    for cast in plan.casts:
        if cast.group == number:
            yield f"the trainer holds {cast.src} and sends {cast.dst}"
    computed = {cast.group for cast in plan.casts if cast.dst == FP8}
    for pair in plan.pairs:
        rows, columns = pair.block
        if pair.weight == number:
            scales = plan.groups[pair.scales]
            at = (index[0] // rows, index[1] // columns) if len(scales.shape) == 2 else (0,)
            yield f"its scale is {scales.name(layer, expert)}{_at(at)}, of a block of {rows}x{columns}"
        elif pair.scales == number:
            at = (*index, 0)[:2] if len(index) == 2 else (0, 0)
            last = [
                min(size, (i + 1) * n) - 1
                for size, i, n in zip(plan.groups[pair.weight].shape, at, pair.block, strict=True)
            ]
            box = f"[{at[0] * rows}:{last[0] + 1}, {at[1] * columns}:{last[1] + 1}]"
            yield f"it is the scale of {plan.groups[pair.weight].name(layer, expert)}{box}"
            if pair.weight in computed:
                yield "the trainer holds no scales: it computes this one as it casts the block"


def _tensor(plan: Plan, element: Element, world: World, gen_rank: int | None, train_rank: int | None) -> _Answer:
    rank = gen_rank if world == "gen" else train_rank
    if rank is None:
        message = (
            f"{element.name} is a tensor of every {world} rank, with other content: name one with --{world}-rank N"
        )
        raise InputError([message])
    local = local_tensors(plan, world, rank).get(element.name)
    index = element.index if element.index is not None or local is None else _index(element, local.shape)
    transfers = _between(
        plan.transfers(tensor=element.name, rank=f"{world}:{rank}", element=index or ()), gen_rank, train_rank
    )
    moved = {(t.parameter, t.element): None for t in transfers if t.element is not None}
    holders = [place for name, point in list(moved)[:1] for place in holders_of(plan, name, point)]
    notes = [note for name, point in moved for note in _precision(plan, name, point)]
    if world == "gen" and (repeated := engine_named(plan.engine).repeated_tensor(element.name)):
        notes.append(f"a tensor beside the engine's own, which repeats {repeated} from it")
    return _Answer(f"{world} tensor", transfers, holders, list(dict.fromkeys(notes)))


def _prefix(text: str) -> tuple[World | None, str]:
    if text.startswith("gen:"):
        return "gen", text.removeprefix("gen:")
    return ("train", text.removeprefix("train:")) if text.startswith("train:") else (None, text)


def _world_of(
    plan: Plan, name: str, gen_rank: int | None, train_rank: int | None, unknown: UnknownElementError
) -> World:
    """Whose local tensor a name is that is no HF parameter. Raises where it is nobody's."""
    trainers = re.match(r"vp[0-9]+\.", name) is not None
    if trainers:
        return "train"
    if gen_rank is not None or any(name in local_tensors(plan, "gen", rank) for rank in _one_a_stage(plan)):
        return "gen"
    raise unknown


def _one_a_stage(plan: Plan) -> list[int]:
    return [int(plan.gen.dense_ranks(stage)[0, 0]) for stage in range(plan.gen.pp)]


def _index(element: Element, sizes: tuple[int, ...]) -> tuple[int, ...]:
    if element.index is not None:
        return element.index
    zeros = ",".join("0" * len(sizes))
    message = (
        f"{element.name} has shape {shape(sizes)}: name one element, for example '{element.name}[{zeros}]';"
        f" `show PLAN --parameter '{element.name}'` lists the transfers of all"
    )
    raise InputError([message])


def _as_dict(plan: Plan, args: argparse.Namespace, answer: _Answer) -> dict[str, Any]:
    return {
        "digest": plan.digest,
        "element": args.element,
        "kind": answer.kind,
        "gen_rank": args.gen_rank,
        "train_rank": args.train_rank,
        "origins": [_transfer_as_dict(transfer) for transfer in answer.transfers],
        "holders": [_place_as_dict(place) for place in answer.holders],
        "notes": answer.notes,
    }


def _transfer_as_dict(transfer: Transfer) -> dict[str, Any]:
    return {
        "parameter": transfer.parameter,
        "index": transfer.element or (),
        "route": transfer.route,
        "reason": transfer.reason,
        "pp_stage": transfer.pp_stage,
        "region": transfer.region and asdict(transfer.region),
        "src": transfer.src and _place_as_dict(transfer.src),
        "dst": transfer.dst and _place_as_dict(transfer.dst),
        "relayed_by": transfer.relayed_by,
        "view": transfer.view if transfer.parameter else None,
    }


def _place_as_dict(place: Place) -> dict[str, Any]:
    return {
        "world": place.world,
        "rank": place.rank,
        "tensor": place.tensor,
        "shape": place.shape,
        "dtype": place.dtype,
        "index": place.index,
        "offset": place.offset,
        "byte_offset": place.byte_offset,
    }


# --- text


def _text(args: argparse.Namespace, answer: _Answer) -> Iterator[RenderableType]:
    yield from noted(answer.notes)
    if not answer.transfers:
        yield _nothing(args, answer)
    for alike in _alike(answer.transfers):
        yield from _group(alike, answer.holders)


def _nothing(args: argparse.Namespace, answer: _Answer) -> str:
    """Why no transfer fits the question."""
    holders = {place.rank for place in answer.holders}
    held = f" (held by train {ranges(holders)})" if holders else ""
    if args.train_rank is None:
        return f"gen:{args.gen_rank} does not hold this element: another generation rank or stage does"
    if args.gen_rank is not None:
        return f"train:{args.train_rank} does not send this element to gen:{args.gen_rank}{held}"
    if holders and args.train_rank not in holders:
        return f"train:{args.train_rank} does not hold this element{held}"
    return f"train:{args.train_rank} holds this element and sends it to nobody: its replicas serve every pull{held}"


def _alike(transfers: list[Transfer]) -> list[list[Transfer]]:
    """Transfers grouped by everything but ranks and offsets."""
    groups: dict[tuple[Any, ...], list[Transfer]] = {}
    for transfer in transfers:
        tensors = tuple(place.tensor if place else None for place in (transfer.src, transfer.dst))
        key = (transfer.parameter, transfer.element, transfer.route, transfer.pp_stage, transfer.region, tensors)
        groups.setdefault(key, []).append(transfer)
    return list(groups.values())


def _group(transfers: list[Transfer], holders: list[Place]) -> Iterator[RenderableType]:
    first = transfers[0]
    rows: list[tuple[str, str | Text]] = []
    if first.parameter:
        rows.append(("parameter", Text(f"{first.parameter}{_at(first.element or ())}", style="bold")))
    rows.append(("route", first.route + (f": {first.reason}" if first.reason else "")))
    if first.region is not None:
        rows.append(("stage", f"{first.pp_stage}, in region {first.region} of {shape(first.view)}"))
    for what, place in (("trainer tensor", first.src), ("engine tensor", first.dst)):
        if place is not None:
            rows.append((what, f"{place.tensor}  {place.dtype} {shape(place.shape)}"))
    if holders and first.src is not None:
        rows.append(("held by", f"train {ranges({place.rank for place in holders})}"))
    yield facts(rows)
    if first.src is None and first.dst is None:
        return
    columns = ("index", "element", "byte")
    shown = table(None, "to", *columns, "from", *columns, numbers=("element", "byte"))
    for transfer in transfers[:_ROWS_SHOWN]:
        sender, *where = _cells(transfer.src)
        via = "" if transfer.relayed_by is None else f" via gen:{transfer.relayed_by}"
        shown.add_row(*_cells(transfer.dst), sender + via, *where)
    say_what_is_left(shown, len(transfers) - _ROWS_SHOWN, "transfer")
    yield shown


def _cells(place: Place | None) -> tuple[str, str, str, str]:
    if place is None:
        return "-", "", "", ""
    return f"{place.world}:{place.rank}", _at(place.index), f"{place.offset:,}", f"{place.byte_offset:,}"


def _at(index: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, index)) + "]"
