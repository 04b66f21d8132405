"""Tell plan files from configs, so that a command says so if it gets the other one; and plan from traces."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.model.families import ConfigError
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.plan_file import FORMAT, PlanFileError, load_plan
from mcore_reshard.planner.plan.transfers import UnknownElementError
from mcore_reshard.planner.proof.prove import require_proof
from mcore_reshard.planner.topology.topology import GB, Topology, TopologyError, parse_topology, topology_violations
from mcore_reshard.planning import InputError, TracedRequest

from .printable import printable
from .render import count

_HOSTS_ALONE = "--hosts says which ranks are on which host, and needs --topology for the machine"


@contextmanager
def collect_problems(problems: list[str]) -> Iterator[None]:
    """Add what is wrong to `problems` instead of raising it, so that everything is reported at once."""
    try:
        yield
    except InputError as error:
        problems += error.problems
    except PlanFileError as error:
        problems.append(str(error))
    except UnknownElementError as error:
        problems.append(str(error))


def read_plan(source: str, *, proven: bool = True) -> Plan:
    """The plan in a file.

    Raises InputError if `source` is the config of a model, and PlanFileError if it is no plan. With `proven`, raises
    ProofError for an unsound plan.
    """
    try:
        plan = load_plan(source)
    except PlanFileError:
        if not is_config(source):
            raise
        raise InputError(
            [f"{source}: this is the config of a model, where a plan is wanted"],
            f"Make a plan of it with `mcore-reshard plan {source} --train ... --gen ... --out plan.json`.",
        ) from None
    if proven:
        require_proof(plan)
    return plan


def place_problems(topology: str | None, hosts: str | None) -> list[str]:
    """What is wrong with --topology and --hosts, whatever the meshes."""
    if topology is None:
        return [_HOSTS_ALONE] if hosts else []
    return topology_violations(topology, hosts or "")


def topology_of(text: str, train_ranks: int, gen_ranks: int, hosts: str | None = None) -> Topology:
    """What `parse_topology` reads. Raises InputError with all that is wrong."""
    try:
        return parse_topology(text, train_ranks, gen_ranks, hosts or "")
    except TopologyError as error:
        raise InputError(error.violations) from None


def machine_of(plan: Plan, topology: str | None, hosts: str | None) -> Topology | None:
    """Where ranks live: as --topology and --hosts say, else as the plan was made for. Raises InputError with all that is wrong."""
    if topology is not None:
        return topology_of(topology, plan.train.world, plan.gen.world, hosts)
    if hosts:
        raise InputError([_HOSTS_ALONE])
    return plan.topology


def with_topology(plan: Plan, topology: str | None, hosts: str | None) -> Plan:
    """The plan for ranks that live where --topology and --hosts say. Raises InputError as `machine_of` does."""
    machine = machine_of(plan, topology, hosts)
    return plan if machine is None else located(plan, machine)


def of_session(plan: Plan, topology: Topology | None) -> Plan:
    """The plan that a session executes between ranks that live there: it plans anew where that makes a plan better."""
    return plan if topology is None or not topology.decides else located(plan, topology)


def planned_anew(plan: Plan) -> str:
    """What the commands note where `of_session` gives another plan than the file's."""
    return (
        f"between these GPUs a session plans anew, whatever plan it is given: this is that plan, digest {plan.digest}; a"
        " session's has another, of its own hosts' names"
    )


def about_racks(topology: Topology | None) -> list[str]:
    """What the commands note on a machine whose NVLink connects hosts: a session does not know that."""
    if topology is None or topology.machine.hosts_per_domain == 1:
        return []
    machine = topology.machine
    speeds = ",".join(
        f"{name}={speed / GB:g}" for name, speed in zip(("memory", "nvlink", "nic"), machine.speeds, strict=True)
    )
    return [
        "a session does not know racks: it takes each host for an NVLink domain of its own, and moves more between hosts, as"
        f" with --topology h200-8,gpus={machine.gpus},{speeds}; {count(machine.hosts_per_domain, 'host')} in a row are a rack here"
    ]


def uses_pxn() -> bool:
    """Whether NCCL sends to other hosts by the NIC on the receiver's rail, as far as the variables say that it reads."""
    says = os.environ.get
    if says("NCCL_CROSS_NIC") == "0":
        return True  # by that NIC without a hop
    return says("NCCL_P2P_PXN_LEVEL") != "0" and says("NCCL_PXN_DISABLE") != "1"


def plan_from_traces(request: TracedRequest) -> tuple[Plan, tuple[str, ...]]:
    """The plan of a model without layout rules, and notes on it. Raises as `plan_offline` does."""
    from mcore_reshard.validation.offline_plan import plan_offline  # torch: not before the input is known to be good

    if sys.stderr.isatty():  # no spinner: the loaders run in forked processes, and threads do not survive that
        print(f"tracing the loaders of {printable(request.model)} ...", file=sys.stderr)
    return plan_offline(request)


def is_config(source: str) -> bool:
    """Whether this is the config of a model: its name, a file, or a folder that has one."""
    return "model_type" in _document(source)


def is_plan_file(source: str) -> bool:
    """Whether this is a file that says it is a plan, of any version and in any state."""
    return Path(source).is_file() and _document(source).get("format") == FORMAT


def _document(source: str) -> dict[str, Any]:
    """The JSON object of a config or a plan; an empty one where it cannot be read."""
    try:
        return load_config(source)
    except ConfigError:
        return {}
