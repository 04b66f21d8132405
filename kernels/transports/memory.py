"""The memory that a session takes on each rank beside the model, counted from its plan: no device, no tensors, no torch.

    direct   copy tables; slots on training ranks that cast. CUDA IPC maps the trainer's memory and takes none
    nccl     copy tables, slots, and NCCL's own buffers
    gloo     a window of buckets, in the host's memory

Rounds, slots and tiles come from the functions that the executors call. Tensors are taken to begin at multiples of 16
bytes, in memory that is not virtual, as allocators of tensors hand it out.

In a plan of many transfers, ranks that move nearly equal bytes hold nearly equal tables and slots, on the same stage of an
engine. One of them is counted for all: a plan of DeepSeek-V3 for 256 and 128 ranks takes seconds in place of a minute.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.casts import bound_casts, itemsizes
from mcore_reshard.kernels.copies.copy_table import joined
from mcore_reshard.kernels.copies.pull_table import pull_table
from mcore_reshard.kernels.copies.strata import strata_of
from mcore_reshard.kernels.cuda.cast_tiles import cut_gather, scale_blocks
from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES, cut_tiles, table_bytes
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World

from .direct.staging import SLOTS, divide_slots, parted
from .nccl.buffers import buffer_bytes
from .nccl.staging import (
    Division,
    ScratchBudget,
    divide,
    divide_windows,
    divided_rounds,
    pair_count,
    slot_bytes,
)
from .rounds import bucket_bytes_within, gloo_window

_FEW_TRANSFERS = 50_000  # of a plan up to which every rank is counted
_ALIKE = 1.02  # ranks are counted as one where none of them moves more than this many times the bytes of another


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank's end of a transport takes on its device; of gloo, on its host."""

    tables: int = 0  # that kernels walk
    scratch: int = 0  # slots
    nccl: int = 0  # NCCL's own buffers
    scales: int = 0  # of weights that the trainer casts to FP8
    checks: int = 0  # training ranks: tiles whose checksums are compared (Options.source_checks)

    @property
    def total(self) -> int:
        return self.tables + self.scratch + self.nccl + self.scales + self.checks


@dataclass(frozen=True, slots=True)
class SessionMemory:
    """What a session takes, by transport, world and rank; and what `commit="staged"` takes in addition."""

    transports: Mapping[str, Mapping[World, tuple[RankMemory, ...]]]
    staging: tuple[int, ...]  # of each generation rank: a second buffer of the rank's whole share


def session_memory(plan: Plan, options: Options = Options()) -> SessionMemory:  # noqa: B008
    """The memory of a session with `plan`, over each transport that moves it point to point.

    Raises ValueError where `options.scratch_bytes` are too few for nccl or for casts.
    """
    worlds: tuple[World, World] = ("train", "gen")
    alike = {world: _alike(plan, world) for world in worlds}
    schedules = {
        world: {rank: schedule_of(plan, world, rank) for rank in np.unique(alike[world]).tolist()} for world in worlds
    }
    by_transport = {
        "direct": _direct(schedules, alike, options),
        "nccl": _nccl(plan, schedules, alike, options),
        "gloo": {
            world: {rank: RankMemory(scratch=_gloo_scratch(each, options)) for rank, each in of_world.items()}
            for world, of_world in schedules.items()
        },
    }
    staging = {rank: _tensor_bytes(schedule) for rank, schedule in schedules["gen"].items()}
    return SessionMemory(
        {
            transport: {world: tuple(counted[world][rank] for rank in alike[world].tolist()) for world in worlds}
            for transport, counted in by_transport.items()
        },
        tuple(staging[rank] for rank in alike["gen"].tolist()),
    )


_Schedules = Mapping[World, Mapping[int, Schedule]]  # of the ranks that are counted
_Counted = dict[World, dict[int, RankMemory]]
_Alike = Mapping[World, NDArray[np.int64]]


def _alike(plan: Plan, world: World) -> NDArray[np.int64]:
    """[ranks] the rank that is counted for each rank of a world."""
    moved = plan.send_bytes if world == "train" else plan.recv_bytes + plan.relay_bytes
    mesh = plan.train if world == "train" else plan.gen
    stage = np.array([mesh.coordinate(rank)["pp"] if world == "gen" else 0 for rank in range(mesh.world)])
    counted = np.arange(mesh.world)
    if sum(transfers for _, transfers, _ in plan.stage_totals) <= _FEW_TRANSFERS:
        return counted
    first = -1
    for rank in np.lexsort((counted, moved, stage)).tolist():
        if first < 0 or stage[rank] != stage[first] or moved[rank] > _ALIKE * moved[first]:
            first = rank
        counted[rank] = first
    return counted


def _direct(schedules: _Schedules, alike: _Alike, options: Options) -> _Counted:
    parts = {rank: parted(schedule)[1] for rank, schedule in schedules["train"].items()}
    slot_buckets = {  # bytes, of each training rank that casts
        rank: bucket_bytes_within(options.scratch_bytes, len(part.peers), SLOTS)
        for rank, part in parts.items()
        if part.peers
    }
    bucket_bytes = {rank: slot_buckets.get(counted, 0) for rank, counted in enumerate(alike["train"].tolist())}
    train = {}
    for rank, schedule in schedules["train"].items():
        slots, buckets = divide_slots(parts[rank], options.scratch_bytes)
        tables = _gather_bytes(schedule, [bucket for of_peer in buckets.values() for bucket in of_peer])
        train[rank] = replace(_of_trainer(schedule, options), tables=tables, scratch=SLOTS * slots.slot_bytes)
    gen = {
        rank: RankMemory(
            tables=sum(
                _pull_bytes(wave, bucket_bytes, options)
                for hop in _hops(schedule)
                for wave in hop
                if wave.world == "gen"
            )
        )
        for rank, schedule in schedules["gen"].items()
    }
    return {"train": train, "gen": gen}


def _hops(schedule: Schedule) -> list[list[Schedule]]:
    """What a rank moves in each hop, wave by wave: with the trainer; where it passes on, what it sends and receives."""
    if not schedule.relayed or schedule.view is None:
        return [[schedule]]
    waves = list(schedule.view.waves() or (schedule,))
    relays = (wave.view.relays() for wave in waves if wave.view is not None and schedule.world == "gen")
    hops = [waves]
    for of_hop in zip(*relays, strict=True):
        hops += [[relay.sends for relay in of_hop], [relay.receives for relay in of_hop]]
    return hops


def _pull_bytes(schedule: Schedule, bucket_bytes: Mapping[int, int], options: Options) -> int:
    """The tables by which a generation rank pulls. `bucket_bytes` are those of each training rank's slots."""
    plain, cast = parted(schedule)
    assert plain.view is not None, "parted has seen it"
    table = pull_table(plain, plain.view.source_table())
    bases = np.zeros(len(schedule.tensors) + len(table.sources) + 1, np.uint64)
    nbytes = table_bytes(cut_tiles(table.copies, bases, DEFAULT_TILE_BYTES), checksums=options.checksums)
    buckets = [
        bucket for peer in sorted(cast.peers) for bucket in cut_buckets(cast.with_peers({peer}), bucket_bytes[peer])
    ]
    copies = joined([bucket.copies for bucket in buckets])
    return nbytes + table_bytes(cut_tiles(copies, bases, DEFAULT_TILE_BYTES), checksums=options.checksums)


def _nccl(plan: Plan, schedules: _Schedules, alike: _Alike, options: Options) -> _Counted:
    unrelayed: dict[World, dict[int, Schedule]] = {
        world: {rank: _unrelayed(schedule) for rank, schedule in of_world.items()}
        for world, of_world in schedules.items()
    }
    pairs = {
        world: {rank: pair_count(schedule) for rank, schedule in of_world.items()}
        for world, of_world in unrelayed.items()
    }
    counts = [pairs[world][rank] for world in unrelayed for rank in alike[world].tolist()]
    division = divide(ScratchBudget(options.scratch_bytes, checksums=options.checksums), counts)
    counted = [schedule for of_world in unrelayed.values() for schedule in of_world.values()]
    division, cut = divide_windows(division, counted)
    buckets = dict(zip((schedule.name for schedule in counted), cut, strict=True))
    return {
        world: {
            rank: _nccl_rank(schedule, buckets[schedule.name], division, pairs[world][rank], options)
            for rank, schedule in of_world.items()
        }
        for world, of_world in unrelayed.items()
    }


def _unrelayed(schedule: Schedule) -> Schedule:
    return schedule.view.unrelayed() if schedule.relayed and schedule.view is not None else schedule


def _nccl_rank(
    schedule: Schedule, buckets: Sequence[Bucket], division: Division, pairs: int, options: Options
) -> RankMemory:
    rounds = divided_rounds(schedule, buckets, division, in_place=[True] * len(schedule.tensors))
    staged = [placed.bucket for each in rounds for placed in each.staged]
    return replace(
        _of_trainer(schedule, options),
        tables=_gather_bytes(schedule, staged),
        scratch=sum(slot_bytes(rounds).values()),
        nccl=buffer_bytes(pairs, division, receives=schedule.world == "gen"),
    )


def _gather_bytes(schedule: Schedule, buckets: Sequence[Bucket]) -> int:
    """The tables by which a rank packs or unpacks buckets, and those of the scales that it computes for them."""
    casts, bases = bound_casts(schedule), np.zeros(len(schedule.tensors) + 1, np.uint64)
    plain, cast = cut_gather(joined([bucket.copies for bucket in buckets]), bases, casts, DEFAULT_TILE_BYTES)
    elements = [prod(local.shape) for local in schedule.tensors]
    return plain.nbytes + cast.nbytes + scale_blocks(casts, [0] * len(elements), elements).nbytes


def _of_trainer(schedule: Schedule, options: Options) -> RankMemory:
    """What a training rank takes over any transport on a GPU; nothing on generation ranks."""
    casts = bound_casts(schedule)
    scales = {cast.scales for cast in casts.values() if cast.scales is not None}
    return RankMemory(
        scales=sum(4 * prod(schedule.tensors[index].shape) for index in scales),
        checks=strata_of(schedule, [0] * len(schedule.tensors), options.source_checks).nbytes,
    )


def _gloo_scratch(schedule: Schedule, options: Options) -> int:
    windows = [[gloo_window(cut_buckets(wave, options.bucket_bytes)) for wave in hop] for hop in _hops(schedule)]
    return sum(max((slots * nbytes for slots, nbytes in hop), default=0) for hop in windows)


def _tensor_bytes(schedule: Schedule) -> int:
    elements = np.array([prod(local.shape) for local in schedule.tensors], np.int64)
    return int((elements * itemsizes(schedule)).sum())
