"""The outcome of a simulated refit: its messages over time, the bytes of every link, and the critical path."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.planner.topology.topology import Topology

ROUTES = ("own GPU", "NVLink", "NIC")  # what a message crosses, the nearest first
LINKS = ("memory", "NVLink out", "NVLink in", "NIC out", "NIC in")  # of each GPU


@dataclass(frozen=True, slots=True, eq=False)
class Messages:
    """Messages in the order of their start; every column has one entry a message.

    A message is under way from the moment at which both its ends have reached it. Where `Simulation.merged` is above 1,
    it stands for so many consecutive messages of its two ranks.
    """

    start_s: NDArray[np.float64]  # from the beginning of the refit
    end_s: NDArray[np.float64]
    src: NDArray[np.int32]  # index into Simulation.ranks
    dst: NDArray[np.int32]
    src_gpu: NDArray[np.int32]  # numbered as Topology.gpus: host * GPUs of a host + GPU
    dst_gpu: NDArray[np.int32]
    route: NDArray[np.int8]  # index into ROUTES
    stage: NDArray[np.int32]  # the trainer's pipeline stage that the bytes come from
    hop: NDArray[np.int8]  # 0: from the trainer; from 1 on: passed on between generation ranks
    nbytes: NDArray[np.int64]

    def __len__(self) -> int:
        return len(self.nbytes)


@dataclass(frozen=True, slots=True, eq=False)
class Flow:
    """What has moved when. Between two moments all rates are constant, and no link carries more than its bandwidth."""

    moments_s: NDArray[np.float64]  # [moments], ascending from 0 to the end of the refit
    moved: NDArray[np.float64]  # [moments, kinds]: bytes until then
    route: NDArray[np.int8]  # [kinds], and so on: as in Messages
    hop: NDArray[np.int8]
    stage: NDArray[np.int32]


@dataclass(frozen=True, slots=True, eq=False)
class Link:
    """One link of one GPU in one direction, and what it carries in the refit."""

    kind: str  # of LINKS
    gpu: int  # numbered as Topology.gpus
    host: str
    ranks: tuple[str, ...]  # that live on the GPU
    nbytes: int
    seconds: float  # nbytes at full bandwidth


@dataclass(frozen=True, slots=True)
class Step:
    """Part of the critical path: consecutive messages between the same ranks that the next part waited for."""

    start_s: float
    end_s: float
    src: str
    dst: str
    stage: int
    route: str  # of ROUTES
    messages: int
    nbytes: int
    why: str  # what the first of these messages waited for, in words


@dataclass(frozen=True, slots=True, eq=False)
class Simulation:
    """A refit as it would run: rounds of the executor, on links that share their bandwidth max-min fair."""

    transport: str
    topology: Topology
    ranks: tuple[str, ...]  # training ranks, then generation ranks: "train:0", "gen:3"
    rank_gpus: NDArray[np.int64]  # of each rank, numbered as Topology.gpus
    messages: Messages
    flow: Flow
    links: tuple[Link, ...]  # that carry anything, the busiest first
    domains: Mapping[str, float]  # the bound of each NVLink domain's NICs together, in seconds
    critical_path: tuple[Step, ...]  # in order of time
    merged: int  # consecutive rounds that were simulated as one; 1: each by itself

    @property
    def seconds(self) -> float:
        """Predicted time of the refit, from its first message to its last."""
        return float(self.messages.end_s.max(initial=0.0))

    @property
    def bound_s(self) -> float:
        """No order of messages is faster: the busiest link at full bandwidth, or the NICs of the busiest domain."""
        return max([0.0, *(link.seconds for link in self.links[:1]), *self.domains.values()])

    @property
    def route_bytes(self) -> dict[str, int]:
        """Bytes by route, in the order of ROUTES."""
        counts = [int(self.messages.nbytes[self.messages.route == route].sum()) for route in range(len(ROUTES))]
        return dict(zip(ROUTES, counts, strict=True))

    @property
    def on_rail_bytes(self) -> int:
        """Bytes by NIC that leave and enter by NICs of one number."""
        messages, gpus = self.messages, self.topology.machine.gpus
        is_on_rail = messages.src_gpu % gpus == messages.dst_gpu % gpus
        return int(messages.nbytes[is_on_rail & (messages.route == ROUTES.index("NIC"))].sum())

    @property
    def own_nic_s(self) -> float:
        """For how long the busiest NIC would send, at full bandwidth, if every GPU sent by its own."""
        messages = self.messages
        by_nic = messages.route == ROUTES.index("NIC")
        sent = np.bincount(messages.src_gpu[by_nic], messages.nbytes[by_nic])
        return float(sent.max(initial=0.0) / self.topology.machine.nic)

    def longest_steps(self, most: int) -> list[Step]:
        """The longest steps of the critical path, in order of time."""
        longest = sorted(self.critical_path, key=lambda step: step.start_s - step.end_s)[:most]
        return sorted(longest, key=lambda step: step.start_s)

    @property
    def busiest_on_path(self) -> str:
        """Which ranks the critical path is made of, in words; empty where nothing moves."""
        if not self.critical_path:
            return ""
        total = max(self.seconds, 1e-12)
        sender, sending = _most([(step.src, step) for step in self.critical_path])
        reader, receiving = _most([(step.dst, step) for step in self.critical_path])
        return f"{sender} sends {sending / total:.0%} of this time, {reader} receives {receiving / total:.0%} of it"


def _most(steps: Sequence[tuple[str, Step]]) -> tuple[str, float]:
    """The rank with the most time, and how much."""
    seconds: dict[str, float] = {}
    for rank, step in steps:
        seconds[rank] = seconds.get(rank, 0.0) + step.end_s - step.start_s
    return max(seconds.items(), key=lambda item: item[1])
