"""Where ranks stand in the group of a session: training ranks come first, generation ranks follow."""

from __future__ import annotations

from mcore_reshard.planner.plan.schedule import Schedule, World


def group_rank(schedule: Schedule, world: World, rank: int) -> int:
    """Where a rank of a world stands in the session's group: training ranks come first."""
    return rank if world == "train" else schedule.train_ranks + rank


def peer_group_rank(schedule: Schedule, peer: int) -> int:
    """Where a rank of the other world stands in the session's group."""
    return group_rank(schedule, "gen" if schedule.world == "train" else "train", peer)


def group_names(schedule: Schedule) -> list[str]:
    """How messages call the ranks of the session's group, in order."""
    train = [schedule.name_of("train", rank) for rank in range(schedule.train_ranks)]
    return [*train, *(schedule.name_of("gen", rank) for rank in range(schedule.gen_ranks))]
