"""`mcore-reshard simulate`: how long a refit takes on a machine, and what it waits for."""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from rich.console import RenderableType

from mcore_reshard.kernels.transports.memory import SessionMemory
from mcore_reshard.planner.layout.mesh import format_mesh
from mcore_reshard.planner.plan.least_time import least_time
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology
from mcore_reshard.planning import InputError, PlanRequest, read_request
from mcore_reshard.report.text import seconds_text
from mcore_reshard.simulate.simulate import simulate
from mcore_reshard.simulate.simulation import ROUTES, Simulation, Step

from .inputs import (
    about_racks,
    collect_problems,
    is_config,
    is_plan_file,
    machine_of,
    of_session,
    place_problems,
    planned_anew,
    read_plan,
    uses_pxn,
)
from .memory import as_json, counted_beside, memory_parts
from .render import and_more, count, facts, noted, print_report, progress, size, table
from .summary import rails_fact

_LINKS_SHOWN = 5
_STEPS_SHOWN = 8
_FAR_FROM_LEAST = 1.1


@dataclass(frozen=True, slots=True)
class _Simulated:
    gen: str  # the generation mesh
    plan: Plan
    simulation: Simulation
    least_s: float  # that any plan takes
    memory: SessionMemory  # over the transport that is simulated
    seconds: float  # that it took to plan, to simulate and to count
    is_anew: bool  # the plan is not the file's: a session plans anew for these hosts


def run(args: argparse.Namespace) -> int:
    plans = _plans(args)
    problems: list[str] = []
    topologies: list[Topology] = []
    for plan, _ in plans:
        with collect_problems(problems):
            topology = machine_of(plan, args.topology, args.hosts)
            if topology is None:
                raise InputError([f"{args.source} was made for no machine: give --topology, e.g. h200-8"])
            topologies.append(topology)
    if problems:
        raise InputError([*dict.fromkeys(problems)])
    simulated: list[_Simulated] = []
    for (plan, seconds), topology in zip(plans, topologies, strict=True):
        started = time.perf_counter() - seconds
        with progress(f"simulating {plan.model}, engine {format_mesh(plan.gen)}"):
            try:
                given = plan.digest if is_plan_file(args.source) else ""
                plan = of_session(plan, topology) if given else located(plan, topology)
                with counted_beside(plan, topology, (args.transport,)) as counted:
                    outcome = simulate(plan, topology, args.transport, pxn=uses_pxn())
                    least_s = least_time(plan, topology).seconds
                    memory = counted()
            except ValueError as error:
                raise InputError([str(error)]) from error
        seconds = time.perf_counter() - started
        is_anew = given not in ("", plan.digest)
        simulated.append(_Simulated(format_mesh(plan.gen), plan, outcome, least_s, memory, seconds, is_anew))
    report = _as_json(simulated[0]) if len(simulated) == 1 else {"simulations": [*map(_as_json, simulated)]}
    print_report(args.json, report, _parts(simulated[0]) if len(simulated) == 1 else _what_if(simulated))
    return 0


def _plans(args: argparse.Namespace) -> list[tuple[Plan, float]]:
    """The plans to simulate, and the seconds that each took to make."""
    problems, remedy = place_problems(args.topology, args.hosts), ""
    has_meshes = bool(args.train or args.gen)
    is_damaged = Path(args.source).is_file() and not has_meshes and not is_config(args.source)
    if is_plan_file(args.source) or is_damaged:
        of_plan: list[str] = []
        if has_meshes:
            of_plan.append(f"{args.source} is a plan, which has its meshes: --train and --gen go with a config")
        with collect_problems(of_plan):
            plan = read_plan(args.source)
        if of_plan or problems:
            raise InputError(of_plan + problems)
        return [(plan, 0.0)]
    if not args.train or not args.gen:
        needs = f"{args.source} is no plan file that exists: a config needs --train and at least one --gen"
        raise InputError([needs, *problems])
    if args.topology is None and not args.hosts:
        problems.append(f"no machine is known for {args.source}: give --topology, e.g. h200-8")
    misfits: list[str] = []
    requests: list[PlanRequest] = []
    for gen in args.gen:
        try:
            requests.append(read_request(args.source, args.train, gen, "exact", None, None, args.engine))
        except InputError as error:
            misfits += error.problems
            remedy = error.remedy
    if misfits or problems:
        raise InputError([*dict.fromkeys(misfits + problems)], remedy)
    plans: list[tuple[Plan, float]] = []
    for gen, request in zip(args.gen, requests, strict=True):
        started = time.perf_counter()
        with progress(f"planning {request.model}, engine {gen}"):
            plans.append((request.plan(), time.perf_counter() - started))
    return plans


def _as_json(each: _Simulated) -> dict[str, Any]:
    outcome = each.simulation
    return {
        "model": each.plan.model,
        "digest": each.plan.digest,
        "train": format_mesh(each.plan.train),
        "gen": each.gen,
        "transport": outcome.transport,
        "topology": asdict(outcome.topology),
        "seconds": outcome.seconds,
        "bound_seconds": outcome.bound_s,
        "least_seconds": each.least_s,
        "messages": len(outcome.messages),
        "merged": outcome.merged,
        "routes": [{"route": route, "bytes": nbytes} for route, nbytes in outcome.route_bytes.items()],
        "rails": _rails(outcome),
        "links": [asdict(link) for link in outcome.links],
        "domains": [{"domain": name, "seconds": seconds} for name, seconds in outcome.domains.items()],
        "critical_path": [asdict(step) for step in outcome.critical_path],
        "misc_bytes": each.plan.misc_bytes,
        "memory": as_json(each.memory),
        "simulation_seconds": each.seconds,
    }


def _parts(each: _Simulated) -> Iterator[RenderableType]:
    outcome = each.simulation
    machine, moved = outcome.topology.machine, max(1, sum(outcome.route_bytes.values()))
    yield facts(
        [
            ("model", f"{each.plan.model}: train {format_mesh(each.plan.train)}, gen {each.gen}"),
            (
                "machine",
                f"{count(len(outcome.topology.hosts), 'host')} of {count(machine.gpus, 'GPU')}, {_bandwidths(outcome)}",
            ),
            ("transport", outcome.transport),
            ("predicted", f"{seconds_text(outcome.seconds)}, {_times(outcome, each.least_s)}"),
            ("bound", f"{seconds_text(outcome.bound_s)}: {_bound(outcome)}"),
            ("least", f"{seconds_text(each.least_s)}: no plan between these GPUs is faster"),
            *rails_fact(_rails(outcome)),
        ]
    )
    routes = [(route, size(nbytes), f"{nbytes / moved:.1%}") for route, nbytes in outcome.route_bytes.items()]
    yield table("Bytes", "over, >bytes, >share", routes)
    rows = (
        (link.kind, f"{link.host}, GPU {link.gpu % machine.gpus}", " ".join(link.ranks), size(link.nbytes),
         f"{link.seconds / max(outcome.seconds, 1e-12):.0%}")
        for link in outcome.links[:_LINKS_SHOWN]
    )  # fmt: skip
    yield table("Busiest links", "link, of, ranks, >bytes, >busy", rows)
    yield from _path(outcome)
    yield from memory_parts(each.memory)
    yield from noted(_notes(each))


def _path(outcome: Simulation) -> Iterator[RenderableType]:
    """The longest steps of the critical path, in order of time, and which ranks it is made of."""
    path, longest = outcome.critical_path, outcome.longest_steps(_STEPS_SHOWN)
    rows = (
        (_span(step), step.src, step.dst, f"{step.stage}", step.route, size(step.nbytes), step.why) for step in longest
    )
    shown = table("Critical path", ">time, from, to, >stage, over, >bytes, it could begin once", rows)
    if len(path) > len(longest):
        shown.caption = and_more(len(path) - len(longest), "shorter step")
    yield shown
    if path:
        yield outcome.busiest_on_path


def _what_if(simulated: Sequence[_Simulated]) -> Iterator[RenderableType]:
    """One line for each engine, the fastest first."""
    rows = []
    for each in sorted(simulated, key=lambda each: each.simulation.seconds):
        outcome = each.simulation
        moved = max(1, sum(outcome.route_bytes.values()))
        shares = [f"{outcome.route_bytes[route] / moved:.0%}" for route in ROUTES]
        rows.append(
            (
                each.gen,
                seconds_text(outcome.seconds),
                seconds_text(outcome.bound_s),
                seconds_text(each.least_s),
                size(moved),
                size(max(rank.total for ranks in each.memory.transports[outcome.transport].values() for rank in ranks)),
                *shares,
            )
        )
    columns = "engine, >predicted, >bound, >least, >bytes, >memory, " + ", ".join(f">{route}" for route in ROUTES)
    yield table(
        f"{simulated[0].plan.model}, train {format_mesh(simulated[0].plan.train)}, {simulated[0].simulation.transport}",
        columns,
        rows,
    )
    yield from noted(dict.fromkeys(note for each in simulated for note in _notes(each)))


def _rails(outcome: Simulation) -> dict[str, int]:
    return {"bytes": outcome.route_bytes["NIC"], "on_rail_bytes": outcome.on_rail_bytes}


def _bandwidths(outcome: Simulation) -> str:
    machine = outcome.topology.machine
    return f"each NIC {size(machine.nic)}/s, NVLink {size(machine.nvlink)}/s, memory {size(machine.memory)}/s"


def _bound(outcome: Simulation) -> str:
    """What the bound is made of."""
    link = outcome.links[0] if outcome.links else None
    if link is not None and link.seconds >= outcome.bound_s:
        return f"{link.kind} of {link.host}, GPU {link.gpu % outcome.topology.machine.gpus} ({' '.join(link.ranks)})"
    domain = max(outcome.domains, key=lambda name: outcome.domains[name], default="")
    return f"the NICs of {domain}" if domain else "nothing moves"


def _times(outcome: Simulation, least_s: float) -> str:
    """What the prediction is of the bound, and of the least time."""
    of_bound, of_least = (outcome.seconds / each if each else 1.0 for each in (outcome.bound_s, least_s))
    return f"{of_bound:.2f} times the bound, {of_least:.2f} times the least"


def _notes(each: _Simulated) -> Iterator[str]:
    if each.is_anew:
        yield planned_anew(each.plan)
    yield from about_racks(each.simulation.topology)
    if each.plan.misc:
        yield f"{size(each.plan.misc_bytes)} of misc tensors travel whole, by the golden path: not simulated"
    if each.simulation.transport != "gloo" and each.simulation.on_rail_bytes < each.simulation.route_bytes["NIC"]:
        if uses_pxn():
            yield _about_pxn(each.simulation)
        else:
            yield "nccl sends by the GPU's own NIC, as NCCL_P2P_PXN_LEVEL or NCCL_PXN_DISABLE says"
    entering_s = _busiest(each.simulation, "NIC in")
    if entering_s > _FAR_FROM_LEAST * each.least_s:
        yield (
            f"what enters by the busiest NIC takes {entering_s / each.least_s:.2f} times the least, which takes every NIC of an"
            " engine's host: bytes enter by the NICs of engine ranks alone, and none carries more than 5 GiB for others"
        )
    if each.simulation.merged > 1:
        yield f"every {each.simulation.merged} messages between two ranks were simulated as one"


def _about_pxn(outcome: Simulation) -> str:
    """What nccl's choice of NICs costs, if it is much, or how to find out."""
    leaving_s, entering_s = (_busiest(outcome, kind) for kind in ("NIC out", "NIC in"))
    if leaving_s > _FAR_FROM_LEAST * max(outcome.own_nic_s, entering_s):
        return (
            f"nccl sends by the NIC on the receiver's rail: the busiest one sends for {seconds_text(leaving_s)}; with"
            f" NCCL_P2P_PXN_LEVEL=0 on all ranks, for {seconds_text(outcome.own_nic_s)}: set it here to see the refit"
        )
    return (
        "nccl sends by the NIC on the receiver's rail; with NCCL_P2P_PXN_LEVEL=0, by the GPU's own: set it to compare"
    )


def _busiest(outcome: Simulation, kind: str) -> float:
    """For how long the busiest link of a kind carries bytes, at full bandwidth."""
    return max((link.seconds for link in outcome.links if link.kind == kind), default=0.0)


def _span(step: Step) -> str:
    return f"{seconds_text(step.start_s)} to {seconds_text(step.end_s)}"
