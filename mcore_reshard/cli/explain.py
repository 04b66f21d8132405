"""`mcore-reshard explain`: where one element comes from and where it goes."""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import RenderableType
from rich.text import Text

from mcore_reshard.planner.layout.block_scales import KV_SCALES, REPEATED
from mcore_reshard.planner.model.precision import FP8
from mcore_reshard.planner.plan.explain import (
    Element,
    ExplainError,
    Origin,
    Place,
    check_rank,
    explain_engine_tensor,
    explain_parameter,
    explain_trainer_tensor,
    find_parameter,
    holders_of,
    local_tensors,
    parse_element,
)
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import World
from mcore_reshard.planner.proof.prove import ProofError, prove
from mcore_reshard.planning import InputError

from .inputs import read_plan
from .render import facts, noted, ranges, say_what_is_left, shape, table, write, write_json

_ROWS_SHOWN = 64


@dataclass(frozen=True, slots=True)
class _Answer:
    kind: str  # what the element was taken for: "parameter", "gen tensor" or "train tensor"
    origins: list[Origin]
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
        write(*_text(plan, args, answer))
    return 0


def _answer(plan: Plan, text: str, gen_rank: int | None, train_rank: int | None) -> _Answer:
    """Raises InputError with all that is wrong with the ranks and the element."""
    problems: list[str] = []
    ranks: dict[World, int | None] = {"gen": gen_rank, "train": train_rank}
    for world, rank in ranks.items():
        try:
            check_rank(plan, world, rank)
        except ExplainError as error:
            problems.append(str(error))
            ranks[world] = None
    try:
        answer = _of_element(plan, text, ranks["gen"], ranks["train"])
    except ExplainError as error:
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
        except ExplainError as unknown:
            if element.name.rpartition(".")[2] in KV_SCALES:
                raise ExplainError(
                    f"{element.name}: no plan has scales of the KV cache, refit(kv_scales=...) brings them"
                ) from unknown
            world = _world_of(plan, element.name, gen_rank, train_rank, unknown)
    if world is None:
        return _parameter(plan, element, gen_rank, train_rank)
    return _tensor(plan, element, world, gen_rank, train_rank)


def _parameter(plan: Plan, element: Element, gen_rank: int | None, train_rank: int | None) -> _Answer:
    group = plan.groups[find_parameter(plan, element.name)[0]]
    index = _index(element, group.shape)
    origins = explain_parameter(plan, element.name, index, gen_rank, train_rank)
    notes = list(_precision(plan, element.name, index))
    if gen_rank is not None:
        own = local_tensors(plan, "gen", gen_rank).get(element.name)
        if own is not None and own.shape != group.shape:
            notes.append(
                f"{element.name} is also a tensor of gen:{gen_rank}, {shape(own.shape)} of {shape(group.shape)};"
                f" for an element of that one write 'gen:{element.name}[...]'"
            )
    return _Answer("parameter", origins, holders_of(plan, element.name, index), notes)


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


def _tensor(plan: Plan, element: Element, world: str, gen_rank: int | None, train_rank: int | None) -> _Answer:
    rank, explain = (gen_rank, explain_engine_tensor) if world == "gen" else (train_rank, explain_trainer_tensor)
    if rank is None:
        raise ExplainError(
            f"{element.name} is a tensor of every {world} rank, with other content: name one with --{world}-rank N"
        )
    held = local_tensors(plan, "gen" if world == "gen" else "train", rank).get(element.name)
    index = element.index if element.index is not None or held is None else _index(element, held.shape)
    origins = explain(plan, element.name, index or (), rank)
    other = train_rank if world == "gen" else gen_rank
    if other is not None:
        end = "src" if world == "gen" else "dst"
        origins = [o for o in origins if (place := getattr(o, end)) is not None and place.rank == other]
    first = origins[0] if origins else None
    holders = holders_of(plan, first.parameter, first.index) if first is not None and first.parameter else []
    notes = [
        note for origin in origins if origin.parameter for note in _precision(plan, origin.parameter, origin.index)
    ]
    if element.name.endswith(REPEATED):
        notes.append(f"a tensor beside the engine's own, which repeats {element.name.removesuffix(REPEATED)} from it")
    return _Answer(f"{world} tensor", origins, holders, list(dict.fromkeys(notes)))


def _prefix(text: str) -> tuple[str | None, str]:
    world, colon, rest = text.partition(":")
    return (world, rest) if colon and world in {"gen", "train"} else (None, text)


def _world_of(plan: Plan, name: str, gen_rank: int | None, train_rank: int | None, unknown: ExplainError) -> str:
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
    raise ExplainError(
        f"{element.name} has shape {shape(sizes)}: name one element, for example '{element.name}[{zeros}]';"
        f" `show PLAN --parameter '{element.name}'` lists the transfers of all"
    )


def _as_dict(plan: Plan, args: argparse.Namespace, answer: _Answer) -> dict[str, Any]:
    return {
        "digest": plan.digest,
        "element": args.element,
        "kind": answer.kind,
        "gen_rank": args.gen_rank,
        "train_rank": args.train_rank,
        "origins": [_origin_as_dict(plan, origin) for origin in answer.origins],
        "holders": [_place_as_dict(place) for place in answer.holders],
        "notes": answer.notes,
    }


def _origin_as_dict(plan: Plan, origin: Origin) -> dict[str, Any]:
    ends = {end: None if place is None else _place_as_dict(place) for end, place in _ends(origin).items()}
    view = list(plan.groups[find_parameter(plan, origin.parameter)[0]].view) if origin.parameter else None
    return {**asdict(origin), **ends, "view": view}


def _ends(origin: Origin) -> dict[str, Place | None]:
    return {"src": origin.src, "dst": origin.dst}


def _place_as_dict(place: Place) -> dict[str, Any]:
    return {**asdict(place), "byte_offset": place.byte_offset}


# --- text


def _text(plan: Plan, args: argparse.Namespace, answer: _Answer) -> Iterator[RenderableType]:
    yield from noted(answer.notes)
    if not answer.origins:
        yield _nothing(args, answer)
    for group in _alike(answer.origins):
        yield from _group(plan, group, answer.holders)


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


def _alike(origins: list[Origin]) -> list[list[Origin]]:
    """Origins grouped by everything but ranks and offsets."""
    groups: dict[tuple[Any, ...], list[Origin]] = {}
    for origin in origins:
        tensors = tuple(place.tensor if place else None for place in (origin.src, origin.dst))
        key = (origin.parameter, origin.index, origin.route, origin.pp_stage, origin.region, tensors)
        groups.setdefault(key, []).append(origin)
    return list(groups.values())


def _group(plan: Plan, origins: list[Origin], holders: list[Place]) -> Iterator[RenderableType]:
    first = origins[0]
    rows: list[tuple[str, str | Text]] = []
    if first.parameter:
        rows.append(("parameter", Text(f"{first.parameter}{_at(first.index)}", style="bold")))
    rows.append(("route", first.route + (f": {first.reason}" if first.reason else "")))
    if first.region is not None:
        view = plan.groups[find_parameter(plan, first.parameter)[0]].view
        rows.append(("stage", f"{first.pp_stage}, in region {first.region} of {shape(view)}"))
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
    for origin in origins[:_ROWS_SHOWN]:
        sender, *where = _cells(origin.src)
        via = "" if origin.relayed_by is None else f" via gen:{origin.relayed_by}"
        shown.add_row(*_cells(origin.dst), sender + via, *where)
    say_what_is_left(shown, len(origins) - _ROWS_SHOWN, "transfer")
    yield shown


def _cells(place: Place | None) -> tuple[str, str, str, str]:
    if place is None:
        return "-", "", "", ""
    return f"{place.world}:{place.rank}", _at(place.index), f"{place.offset:,}", f"{place.byte_offset:,}"


def _at(index: tuple[int, ...]) -> str:
    return "[" + ",".join(map(str, index)) + "]"
