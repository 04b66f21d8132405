"""One rank's part in a session: its schedule for whatever replicas of the engine take part."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from mcore_reshard.planner.layout.mesh import replica_ranks
from mcore_reshard.planner.plan.make_schedule import RankView
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.replicas import schedule_for
from mcore_reshard.planner.plan.schedule import Schedule
from mcore_reshard.planner.plan.schedule import World as WorldName
from mcore_reshard.planner.proof.prove import require_proof

from .attempts import World
from .places import topology_of


class Part(Protocol):
    """A rank of the trainer or of the engine."""

    @property
    def world(self) -> WorldName: ...

    @property
    def seat(self) -> str:
        """The rank's name, as in "gen:3"."""

    @property
    def seats(self) -> World:
        """All seats of the session."""

    @property
    def plan_digest(self) -> str:
        """The digest of the plan that the rank was given."""

    def schedule(self, replicas: Sequence[int], places: Sequence[str] = ()) -> Schedule:
        """What the rank moves when these replicas take part; `places` has where each rank is (see places.py).

        Raises ProofError for a plan for several hosts that is not sound, and as `schedule_for` does.
        """

    def bytes_by_name(self, *, everything: bool) -> int:
        """Bytes of the whole tensors that move by name, `everything` under golden; 0 where no plan tells."""


@dataclass(frozen=True, slots=True)
class RankOfPlan:
    """A rank whose schedules come from a plan. Replicas may come and go."""

    plan: Plan
    world: WorldName
    rank: int  # a generation rank counts through all replicas, also those that are not in the plan

    @property
    def seat(self) -> str:
        return f"{self.world}:{self.rank}"

    @property
    def seats(self) -> World:
        ranks = replica_ranks(self.plan.gen)
        return World(self.plan.train.world, ranks, self.plan.gen.world // ranks)

    @property
    def plan_digest(self) -> str:
        return self.plan.digest

    def schedule(self, replicas: Sequence[int], places: Sequence[str] = ()) -> Schedule:
        topology = topology_of(places, self.plan.train.world, self.plan.topology)
        schedule = schedule_for(self.plan, self.world, self.rank, replicas, topology)
        if topology is not None:
            assert isinstance(schedule.view, RankView)
            require_proof(schedule.view.plan)
        return schedule

    def bytes_by_name(self, *, everything: bool) -> int:
        return self.plan.misc_bytes + (self.plan.bulk_bytes if everything else 0)


@dataclass(frozen=True, slots=True)
class FixedPart:
    """A rank with one schedule: the whole engine is one replica."""

    fixed: Schedule

    @property
    def world(self) -> WorldName:
        return self.fixed.world

    @property
    def seat(self) -> str:
        return self.fixed.name

    @property
    def seats(self) -> World:
        return World(self.fixed.train_ranks, self.fixed.gen_ranks, 1)

    @property
    def plan_digest(self) -> str:
        return self.fixed.digest

    def schedule(self, replicas: Sequence[int], places: Sequence[str] = ()) -> Schedule:
        return self.fixed

    def bytes_by_name(self, *, everything: bool) -> int:
        return 0


def part_of(schedule: Schedule | Part) -> Part:
    return FixedPart(schedule) if isinstance(schedule, Schedule) else schedule
