"""The machine under a refit: which rank lives on which GPU, and how fast the links between GPUs are.

    h200-8          hosts of 8 GPUs; trainer and engine on hosts of their own
    h200-8,shared   engine rank r on the GPU of training rank r
    h200-8,nic=25   another bandwidth of a GPU's NIC, in GB/s (1e9 bytes)

Three kinds of links carry a byte: the GPU's own memory, NVLink within a domain, and NICs between domains. A domain is
one host, or a rack of hosts whose GPUs NVLink connects.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

World = Literal["train", "gen"]

GB = 10**9
_HOSTS_TERM = re.compile(r"([A-Za-z0-9][A-Za-z0-9_.-]*)\*([1-9][0-9]{0,5})(?:@([0-9]{1,4}))?")
_BANDWIDTH = "GB/s, more than 0 and less than 1,000,000, with at most three decimals"
_SETTINGS = {"nic": _BANDWIDTH, "nvlink": _BANDWIDTH, "memory": _BANDWIDTH, "gpus": "the GPUs of a host, at most 9,999"}
_MAX_TEXT = 1 << 16


class TopologyError(ValueError):
    """A topology that cannot be; `violations` lists every reason."""

    def __init__(self, violations: Sequence[str]) -> None:
        super().__init__("bad topology: " + "; ".join(violations))
        self.violations = tuple(violations)

    def __reduce__(self) -> tuple[Any, ...]:
        return TopologyError, (self.violations,), vars(self)


class Place(NamedTuple):
    """The GPU of a rank."""

    host: int  # index into Topology.hosts
    gpu: int  # of this host


@dataclass(frozen=True, slots=True)
class Machine:
    """Hosts of one kind. Bandwidths are bytes per second and GPU, in each direction."""

    name: str
    gpus: int  # of a host
    nvlink: int  # into or out of one GPU
    nic: int  # of the NIC of one GPU
    memory: int  # a copy within one GPU: payload, which is read and written
    hosts_per_domain: int = 1  # that NVLink connects

    @property
    def speeds(self) -> tuple[int, int, int]:
        """Bytes per second within a GPU, by NVLink, by NIC."""
        return self.memory, self.nvlink, self.nic

    def __post_init__(self) -> None:
        numbers = {name: value for name, value in asdict(self).items() if name != "name"}
        if wrong := [f"{name} must be positive, not {value}" for name, value in numbers.items() if not value > 0]:
            raise TopologyError(wrong)


# NVLink and NICs: NVIDIA's data sheets (450 and 900 GB/s each way; 400 Gb/s), less what copies reach (docs/performance.md:
# 0.9 of NVLink). A copy within an H200 was measured at 2.1 TB/s; the others are scaled by their memory's bandwidth.
MACHINES = {
    machine.name: machine
    for machine in (
        Machine("h100-8", 8, 400 * GB, 50 * GB, 1400 * GB),
        Machine("h200-8", 8, 400 * GB, 50 * GB, 2100 * GB),
        Machine("gb200-nvl72", 4, 800 * GB, 50 * GB, 3400 * GB, hosts_per_domain=18),
    )
}


@dataclass(frozen=True, slots=True)
class Topology:
    """Where every rank lives. Plain values, equal on all ranks of a session."""

    machine: Machine
    hosts: tuple[str, ...]  # names
    train: tuple[Place, ...]  # of training rank r
    gen: tuple[Place, ...]  # of generation rank r

    def __post_init__(self) -> None:
        violations = [
            f"{world}:{rank} is on host {place.host}, GPU {place.gpu}: there are {len(self.hosts)} hosts of"
            f" {self.machine.gpus} GPUs"
            for world in ("train", "gen")
            for rank, place in enumerate(getattr(self, world))
            if not (0 <= place.host < len(self.hosts) and 0 <= place.gpu < self.machine.gpus)
        ]
        if violations:
            raise TopologyError(violations[:5])

    def places(self, world: World) -> tuple[Place, ...]:
        return self.train if world == "train" else self.gen

    def gpus(self, world: World) -> NDArray[np.int64]:
        """The GPU of each rank, numbered over all hosts: host * GPUs of a host + GPU."""
        places = np.array(self.places(world), np.int64).reshape(-1, 2)
        return np.asarray(places[:, 0] * self.machine.gpus + places[:, 1], np.int64)

    def host_of(self, world: World) -> NDArray[np.int64]:
        """The host of each rank."""
        return np.array([place.host for place in self.places(world)], np.int64)

    def rails(self, world: World) -> NDArray[np.int64]:
        """The rail of each rank: the number of its GPU, and of the NIC beside it, within its host."""
        return np.array([place.gpu for place in self.places(world)], np.int64)

    def domains(self, world: World) -> NDArray[np.int64]:
        """The NVLink domain of each rank."""
        return self.host_of(world) // self.machine.hosts_per_domain

    @property
    def decides(self) -> bool:
        """Whether a session plans for these places, whatever plan it was given: session/places.py asks the same of its ranks."""
        return len({place.host for place in (*self.train, *self.gen)}) > 1 or self.shares_gpus

    @property
    def shares_gpus(self) -> bool:
        """Whether a GPU has ranks of both sides."""
        return not {*self.train}.isdisjoint(self.gen)

    def with_gen(self, seats: Sequence[int]) -> Topology:
        """The topology of only these generation ranks, in this order."""
        return replace(self, gen=tuple(self.gen[seat] for seat in seats))


def parse_topology(text: str, train_ranks: int, gen_ranks: int, hosts: str = "") -> Topology:
    """A topology as the command line gives it.

    `text` is a machine, maybe "shared", and maybe other numbers for it: "h200-8,nic=25,gpus=4". `hosts` says where ranks
    live, in their order: "train=a*8+b*8,gen=b*4@4" puts training ranks 0 to 7 on host a, and 8 to 15 on b. The engine's
    four ranks are on b, from GPU 4 on. Without it, ranks fill hosts in order. Raises TopologyError with all that is wrong.
    """
    machine, shared, violations = _machine_of(text, hosts)
    if shared and not hosts and gen_ranks > train_ranks:
        violations.append(f"{gen_ranks} generation ranks cannot share the GPUs of {train_ranks} training ranks")
    names, placed, counts, misplaced = _placed(machine, hosts)
    violations += misplaced
    if hosts and machine is not None:
        violations += [
            f"hosts have {counts[world]} {world} ranks, the mesh has {ranks}"
            for world, ranks in (("train", train_ranks), ("gen", gen_ranks))
            if counts[world] not in (None, ranks)
        ]
    if violations or machine is None:
        raise TopologyError(violations)
    if hosts:
        return Topology(machine, names, tuple(placed["train"]), tuple(placed["gen"]))
    train = [Place(*divmod(rank, machine.gpus)) for rank in range(train_ranks)]
    used = -(-train_ranks // machine.gpus)
    if not shared:  # a domain of their own
        used = -(-used // machine.hosts_per_domain) * machine.hosts_per_domain
    gen = train[:gen_ranks] if shared else [Place(used + r // machine.gpus, r % machine.gpus) for r in range(gen_ranks)]
    count = 1 + max(place.host for place in (*train, *gen))
    return Topology(machine, tuple(f"host{number}" for number in range(count)), tuple(train), tuple(gen))


def topology_violations(text: str, hosts: str = "") -> list[str]:
    """What is wrong with a topology, as `parse_topology` takes it, however many ranks there are."""
    machine, _, violations = _machine_of(text, hosts)
    return violations + _placed(machine, hosts)[3]


def _machine_of(text: str, hosts: str) -> tuple[Machine | None, bool, list[str]]:
    """The machine, if it is known; whether both sides share GPUs; and what is wrong."""
    violations: list[str] = []
    name, *settings = text[:_MAX_TEXT].split(",")
    machine = MACHINES.get(name)
    if machine is None:
        violations.append(f"there is no machine {name!r}; known are {', '.join(MACHINES)}")
    shared = "shared" in settings
    changed: dict[str, int] = {}
    for setting in settings:
        key, _, value = setting.partition("=")
        if key in changed:
            violations.append(f"{key} is given twice")
        elif key == "gpus" and re.fullmatch(r"[0-9]{1,4}", value):
            changed[key] = int(value)
        elif key in ("nic", "nvlink", "memory") and re.fullmatch(r"[0-9]{1,6}(\.[0-9]{1,3})?", value):
            changed[key] = round(float(value) * GB)
        elif key in _SETTINGS and value:
            violations.append(f"{setting!r}: {key} is {_SETTINGS[key]}")
        elif setting != "shared":
            violations.append(f"{setting!r} is none of shared, nic=GB/S, nvlink=GB/S, memory=GB/S, gpus=COUNT")
    if zeros := [key for key, value in changed.items() if not value]:
        violations.append(f"{', '.join(zeros)} must be positive, not 0")
    if shared and hosts:
        violations.append("leave out 'shared': hosts say which ranks share a GPU")
    if machine is not None:
        machine = None if zeros else replace(machine, **changed)  # type: ignore[arg-type]
    return machine, shared, violations


def _placed(
    machine: Machine | None, text: str
) -> tuple[tuple[str, ...], dict[str, list[Place]], dict[str, int | None], list[str]]:
    """The hosts that a text names, where the ranks of each world live, how many these are, and what is wrong.

    No hosts: nowhere. Where not all of a text can be read, nobody knows how many ranks it means: None.
    """
    violations: list[str] = []
    counts: dict[str, int | None] = {"train": 0, "gen": 0}
    names: dict[str, int] = {}
    places: dict[str, list[Place]] = {"train": [], "gen": []}
    for part in text[:_MAX_TEXT].split(",") if text else ():
        world, _, listed = part.partition("=")
        if world not in places or places[world]:
            violations.append(f"{part!r}: hosts are given once as train=HOST*RANKS+..., once as gen=HOST*RANKS+...")
            counts = dict.fromkeys(places)
            continue
        used: dict[str, int] = {}
        for term in listed.split("+"):
            found = _HOSTS_TERM.fullmatch(term)
            if found is None:
                violations.append(f"{term!r} is not HOST*RANKS or HOST*RANKS@FIRST_GPU")
                counts[world] = None
                continue
            host, count = found[1], int(found[2])
            first = int(found[3]) if found[3] else used.get(host, 0)
            used[host] = first + count
            if (before := counts[world]) is not None:
                counts[world] = before + count
            if machine is None:
                continue
            if first + count > machine.gpus:
                violations.append(f"{term!r}: a host of {machine.name} has {machine.gpus} GPUs")
                continue
            number = names.setdefault(host, len(names))
            places[world] += [Place(number, gpu) for gpu in range(first, first + count)]
        if twice := sorted(place for place, ranks in Counter(places[world]).items() if ranks > 1):
            host, gpu = [*names][twice[0].host], twice[0].gpu
            violations.append(f"{part!r} puts two ranks on GPU {gpu} of host {host}: a GPU has one of each side")
    return tuple(names), places, counts, violations
