"""The memory that a session takes on each rank beside the model, counted from its plan: no device, no tensors, no torch.

    direct   tables of what kernels copy; slots on training ranks that cast for some readers (see `what_is_pushed`). A copy
             engine's copies take none, nor does the trainer's memory, which CUDA IPC maps
    nccl     copy tables, slots, and NCCL's own buffers
    gloo     a window of buckets, in the host's memory
    auto     where ranks are known: direct within an NVLink domain, and nccl elsewhere, wave by wave

Rounds, slots and tiles come from the functions that the executors call. Tensors are taken to begin at multiples of 16
bytes, in memory that is not virtual, as allocators of tensors hand it out. Drivers are taken to be of CUDA 13 or newer: with
older ones no copy engine helps, and the tables of `direct` list every byte.

In a plan of many transfers, one rank is counted for all that move nearly equal bytes, on the same stage of an engine. Their
tables and slots are nearly equal, too, unless copy engines help some of them alone. So a plan of DeepSeek-V3 for 256 and 128
ranks takes seconds in place of a minute.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import Bucket, cut_buckets
from mcore_reshard.kernels.copies.carried import PLACES
from mcore_reshard.kernels.copies.casts import bound_casts, itemsizes
from mcore_reshard.kernels.copies.copy_table import Ints, joined
from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.copies.strata import strata_of
from mcore_reshard.kernels.cuda.cast_tiles import cut_gather, cut_rounds, scale_blocks
from mcore_reshard.kernels.cuda.engine_rows import ENGINE_SHARE, ENGINE_STREAMS, divided
from mcore_reshard.kernels.cuda.tiles import DEFAULT_TILE_BYTES, table_bytes
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import replica_ranks
from mcore_reshard.planner.plan.loads import pair_bytes
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.paths import NIC
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Chain, Schedule, View, World
from mcore_reshard.planner.topology.topology import Topology

from .direct.staging import (
    PUSHED_TILE_BYTES,
    SLOTS,
    PushedPart,
    divide_slots,
    divided_by_way,
    parted,
    what_is_pushed,
    with_other_end,
)
from .direct.turns import engine_orders, may_use_engine
from .direct.waves import push_share, push_turns, waves_for, waves_of
from .nccl.buffers import KERNEL_BYTES, buffer_bytes
from .nccl.shared_gpus import SharedGpus
from .nccl.staging import (
    Division,
    HopEnd,
    ScratchBudget,
    divide,
    divide_windows,
    divided_rounds,
    pair_count,
    slot_bytes,
)
from .reach import joined_hops, shared_gpus
from .rounds import bucket_bytes_within, gloo_window, in_parts

# Bytes that a process takes once for kernels, if it has used none: ours, and those of NCCL (tools/results/first-use-x1.json).
FIRST_USE: Mapping[str, int] = {"copies": 70 << 20, "nccl": KERNEL_BYTES}

_PLACE = 1 << 40  # bytes between two tensors, where it is counted what executors would do
_FEW_TRANSFERS = 50_000  # Every rank of a plan is counted up to here.
# Beyond that, ranks count as one whose shares of bytes that cross NICs, and that are pushed, are the same in so many steps.
_SHARES = 10
_ALIKE = 1.02  # None of them moves more than so many times the bytes of another.

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class RankMemory:
    """Bytes that one rank's end of a transport takes on its device; of gloo, on its host."""

    tables: int = 0  # that kernels walk
    scratch: int = 0  # slots; and the places of what the rank carries for others
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


def session_memory(
    plan: Plan,
    options: Options = Options(),  # noqa: B008
    topology: Topology | None = None,
    transports: Collection[str] = ("direct", "nccl", "gloo", "auto"),
) -> SessionMemory:
    """The memory of a session with `plan`, over each of the `transports`.

    `auto` is among them where `topology`, by default that of the plan, says where ranks are; `nccl` is not where that has
    ranks of both sides on a GPU. Raises ValueError where `options.scratch_bytes` are too few for nccl or for casts.
    """
    topology = topology or plan.topology
    worlds: tuple[World, World] = ("train", "gen")
    pulled = np.zeros((plan.train.world, plan.gen.world), np.int64)
    if not (plan.later_hops or options.checksums) and {"direct", "auto"} & {*transports}:
        pulled = pair_bytes(plan)
    near = _Gpus.of(pulled, topology, near=True)
    is_mutual = np.isin(np.arange(plan.gen.world), sorted(near.mutual))
    pushed_of_train = pulled[:, is_mutual].sum(axis=1) / np.maximum(pulled.sum(axis=1), 1)
    alike: _Alike = {
        "train": _alike(plan, "train", topology, pushed_of_train),
        "gen": _alike(plan, "gen", topology, is_mutual),
    }
    ranks = {
        world: {rank: _Rank(schedule_of(plan, world, rank), plan) for rank in np.unique(alike[world]).tolist()}
        for world in worlds
    }
    by_transport: dict[str, _Counted] = {}
    if "direct" in transports:
        gpus, chains = _Gpus.of(pulled, topology), {} if options.checksums else _chains(ranks)
        if chains:
            by_transport["direct"] = _chained(plan, chains, options, gpus)
        else:
            by_transport["direct"] = _direct(
                _each(ranks, lambda rank: [rank.pulls, *rank.hops[1:]]), alike, options, gpus
            )
    if "nccl" in transports and not (topology is not None and topology.shares_gpus):  # takes no GPU twice
        domains = None if topology is None else shared_gpus(plan, topology, "nccl").cells
        by_transport["nccl"] = _nccl(_each(ranks, lambda rank: rank.hops), alike, options, domains, plan.waves)
    if "gloo" in transports:
        by_transport["gloo"] = _each(ranks, lambda rank: RankMemory(scratch=_gloo_scratch(rank, options)))
    if "auto" in transports and topology is not None:
        joined, shared = joined_hops(plan, topology, "auto"), shared_gpus(plan, topology, "auto")
        all_domains = {domain for world in worlds for domain in topology.domains(world).tolist()}
        chains = {} if options.checksums or len(all_domains) > 1 else _chains(ranks)
        if chains:
            by_transport["auto"] = _chained(plan, chains, options, near)
        else:
            by_transport["auto"] = _auto(near, ranks, alike, options, topology, shared, joined, plan.waves)
    staging = {rank: _tensor_bytes(each.schedule) for rank, each in ranks["gen"].items()}
    carried = min(PLACES, plan.waves) * plan.carried.max(axis=0)

    def counted(transport: str, world: World) -> Iterator[RankMemory]:
        for rank, like in enumerate(alike[world].tolist()):
            of_rank = by_transport[transport][world][like]
            carries = int(carried[rank]) if world == "gen" else 0
            yield replace(of_rank, scratch=of_rank.scratch + carries) if carries else of_rank

    return SessionMemory(
        {transport: {world: tuple(counted(transport, world)) for world in worlds} for transport in by_transport},
        tuple(staging[rank] for rank in alike["gen"].tolist()),
    )


def counts_every_rank(plan: Plan) -> bool:
    """Whether the plan has few transfers: then no rank is counted for others."""
    return sum(transfers for _, transfers, _ in plan.stage_totals) <= _FEW_TRANSFERS


@dataclass(frozen=True)
class _Rank:
    """What a rank moves, expanded where it is counted."""

    schedule: Schedule
    plan: Plan

    @cached_property
    def hops(self) -> list[Schedule]:
        """With the trainer; on generation ranks that pass on, what they send and receive in each later hop."""
        relays = self._view.relays() if self.schedule.world == "gen" else ()
        return [self.schedule, *(end for relay in relays for end in (relay.sends, relay.receives))]

    @cached_property
    def pulls(self) -> Schedule:
        """With the trainer, and where that has the bytes."""
        return with_other_end(self.schedule)

    @cached_property
    def chain(self) -> Chain | None:
        """What it moves where replicas are a chain."""
        return self._view.chain()

    @property
    def _view(self) -> View:
        assert self.schedule.view is not None, "a plan's schedule has one"
        return self.schedule.view


def _by_wave(schedule: Schedule, waves: int) -> list[Schedule]:
    """The transfers of each wave."""
    if waves == 1:
        return [schedule]
    return [schedule.with_rows([table.wave == wave for table in schedule.tables]) for wave in range(waves)]


_Counted = dict[World, dict[int, RankMemory]]
_Chains = dict[World, dict[int, Chain]]
_Alike = Mapping[World, NDArray[np.int64]]


def _each(ranks: Mapping[World, Mapping[int, _Rank]], of_rank: Callable[[_Rank], T]) -> dict[World, dict[int, T]]:
    return {world: {rank: of_rank(each) for rank, each in of_world.items()} for world, of_world in ranks.items()}


def _alike(plan: Plan, world: World, topology: Topology | None, pushed: NDArray[Any]) -> NDArray[np.int64]:
    """[ranks] the rank that is counted for each rank of a world; `pushed` [ranks] is the share of its bytes that is."""
    moved = plan.send_bytes if world == "train" else plan.recv_bytes + plan.relay_bytes
    mesh = plan.train if world == "train" else plan.gen
    stage = np.array([mesh.coordinate(rank)["pp"] if world == "gen" else 0 for rank in range(mesh.world)])
    if world == "gen" and plan.later_hops:  # in a chain, the last replica pushes nothing
        stage = 2 * stage + (np.arange(mesh.world) + replica_ranks(plan.gen) < mesh.world)
    counted = np.arange(mesh.world)
    if counts_every_rank(plan):
        return counted
    if topology is not None and plan.topology is not None:  # `auto` takes nccl for these bytes
        far = (plan.loads.sent if world == "train" else plan.loads.received)[NIC]
        stage = stage * (_SHARES + 1) + np.rint(_SHARES * far / np.maximum(moved, 1)).astype(np.int64)
    stage = stage * (_SHARES + 1) + np.rint(_SHARES * pushed).astype(np.int64)  # it takes tables of those who push
    first = -1
    for rank in np.lexsort((counted, moved, stage)).tolist():
        if first < 0 or stage[rank] != stage[first] or moved[rank] > _ALIKE * moved[first]:
            first = rank
        counted[rank] = first
    return counted


@dataclass(frozen=True)
class _Gpus:
    """The GPUs of training ranks and generation ranks, and in which order each of these takes them by a copy engine."""

    train: Ints
    gen: Ints
    pulls: Mapping[int, Mapping[int, int]]  # bytes that each generation rank pulls from each other GPU
    mutual: Set[int]  # generation ranks that get bytes from their own GPU and from others: these are pushed

    @classmethod
    def of(cls, pulled: Ints, topology: Topology | None, *, near: bool = False) -> _Gpus:
        """Readers get `pulled` [training ranks, generation ranks] bytes, where engines may help.

        Without a topology each rank has a GPU of its own. `near`: pairs of a domain of NVLink alone go by `direct`.
        """
        train, gen = np.arange(pulled.shape[0]), np.arange(pulled.shape[1]) + pulled.shape[0]
        if topology is not None:
            train, gen = topology.gpus("train"), topology.gpus("gen")
            if near:
                pulled = np.where(topology.domains("train")[:, None] == topology.domains("gen"), pulled, 0)
        pulls: dict[int, Counter[int]] = {rank: Counter() for rank in range(len(gen))}
        for source, reader in zip(*(each.tolist() for each in pulled.nonzero()), strict=True):
            pulls[reader][int(train[source])] += int(pulled[source, reader])
        mutual = set()
        for reader, of_reader in pulls.items():
            if of_reader.pop(int(gen[reader]), 0) and of_reader:
                mutual.add(reader)
                of_reader.clear()
        return cls(train, gen, pulls, mutual)

    @cached_property
    def orders(self) -> Mapping[int, Sequence[int]]:
        return engine_orders(self.pulls, [*dict.fromkeys(self.train.tolist())])

    def turns(self, reader: int) -> dict[int, int]:
        """Of each training rank that an engine reads: when."""
        order = self.orders.get(reader, ())
        of_gpu = {gpu: turn for turn, gpu in enumerate(order)}
        return {source: of_gpu[gpu] for source, gpu in enumerate(self.train.tolist()) if gpu in of_gpu}


def _direct(
    schedules: Mapping[World, Mapping[int, Sequence[Schedule]]],
    alike: _Alike,
    options: Options,
    gpus: _Gpus,
) -> _Counted:
    """`schedules` has the hops of each rank that is counted.

    Replicas pull from each other what they pass on. Engine ranks are taken to be such that training ranks can write straight into
    their memory; those whose memory cannot be mapped make trainers hold slots, too.
    """
    pushed = {rank: _what_is_pushed(first, options, gpus) for rank, (first, *_) in schedules["gen"].items()}
    train, slot_buckets = {}, {}  # bytes of a bucket in slots
    for rank, (schedule,) in schedules["train"].items():
        plain, cast = parted(schedule)
        said = {peer: pushed[int(alike["gen"][peer])] for peer in schedule.peers}
        _, slotted, parts = divided_by_way(plain, cast, said)
        turns = {peer: gpus.turns(peer).get(rank, 0) for peer in slotted.peers}
        slots, packed = divide_slots(slotted, options.scratch_bytes, turns)
        if packed:
            slot_buckets[rank] = slots.bucket_bytes
        rounds = [joined([bucket.copies for bucket in together]) for together in packed]
        train[rank] = replace(
            _of_trainer(schedule, options),
            tables=_casting_bytes(schedule, rounds)
            + _push_bytes(parts, dict.fromkeys(said, 1), gpus.train[rank], gpus),
            scratch=SLOTS * slots.slot_bytes,
        )
    # Where the rank that is counted for a source has no slots.
    one_reader = bucket_bytes_within(options.scratch_bytes, 1, SLOTS)
    bucket_bytes = {rank: slot_buckets.get(counted, one_reader) for rank, counted in enumerate(alike["train"].tolist())}
    gen = {}
    for rank, (first, *later) in schedules["gen"].items():
        tables = _pull_bytes(first, bucket_bytes, options, gpus, pushed=pushed[rank])
        for hop in later:
            if hop.world == "gen":
                tables += _pull_bytes(hop, bucket_bytes, options, gpus, pushed="nothing")
        gen[rank] = RankMemory(tables=tables)
    return {"train": train, "gen": gen}


def _chains(ranks: Mapping[World, Mapping[int, _Rank]]) -> _Chains:
    """The chain of each rank that is counted; {} where there is none."""
    chains = {world: {rank: each.chain for rank, each in of_world.items()} for world, of_world in ranks.items()}
    found = {world: {rank: chain for rank, chain in of_world.items() if chain} for world, of_world in chains.items()}
    return found if all(found.values()) else {}


def _chained(plan: Plan, chains: _Chains, options: Options, gpus: _Gpus) -> _Counted:
    """Where ranks push everything from one to the next: tables of their waves."""
    waves = {rank: waves_for(int(nbytes)) for rank, nbytes in enumerate(plan.recv_bytes.tolist())}
    counted: _Counted = {"train": {}, "gen": {}}
    for rank, chain in chains["train"].items():
        tables = _push_bytes(parted(chain.from_trainer), waves, gpus.train[rank], gpus)
        counted["train"][rank] = replace(_of_trainer(chain.from_trainer, options), tables=tables)
    for rank, chain in chains["gen"].items():
        assert chain.among_replicas is not None
        sends = chain.among_replicas.sends
        tables = _push_bytes((sends, sends.with_peers(())), waves, gpus.gen[rank], gpus)
        counted["gen"][rank] = RankMemory(tables=tables)
    return counted


def _push_bytes(parts: tuple[Schedule, Schedule], waves: Mapping[int, int], own_gpu: int, gpus: _Gpus) -> int:
    """The tables by which a rank pushes bytes as they lie there, and what it casts, in the `waves` of each receiver."""
    counts = {peer: waves[peer] for peer in sorted(parts[0].peers | parts[1].peers)}
    plain, cast = (peer_table(part) for part in parts)
    of_plain, of_cast = (
        [table.copies[wave[table.transfer] == number] for number in np.unique(wave).tolist()]
        for table, wave in zip((plain, cast), waves_of(parts, counts), strict=True)
    )
    bases = np.zeros(len(parts[0].tensors) + len(plain.theirs), np.uint64)
    turns = push_turns(parts[0].rank, [peer for peer in counts if gpus.gen[peer] != own_gpu])
    turn_of = np.array([turns.get(peer.rank, -1) for peer in plain.theirs], np.int64)
    share, streams = push_share(max(counts.values(), default=1), ENGINE_SHARE)
    nbytes = 0
    for copies in of_plain:
        turn = turn_of[copies["dst"] - len(parts[0].tensors)]
        nbytes += table_bytes(divided(copies, bases, DEFAULT_TILE_BYTES, turn, share, streams=streams)[0])
    return nbytes + _casting_bytes(parts[1], of_cast, PUSHED_TILE_BYTES)


def _pull_bytes(
    schedule: Schedule,
    bucket_bytes: Mapping[int, int],
    options: Options,
    gpus: _Gpus,
    *,
    pushed: PushedPart,
) -> int:
    """The tables by which a generation rank pulls. `bucket_bytes` are those of each training rank's slots."""
    plain, cast = parted(schedule)
    if pushed == "all":
        return 0
    if pushed == "casts":
        cast = cast.with_peers(())
    table = peer_table(plain)
    buckets = [
        bucket for peer in sorted(cast.peers) for bucket in cut_buckets(cast.with_peers({peer}), bucket_bytes[peer])
    ]
    copies = joined([bucket.copies for bucket in buckets])
    peer = np.repeat([bucket.peer for bucket in buckets], [len(bucket.copies) for bucket in buckets])
    bases = np.zeros(len(schedule.tensors) + len(table.theirs) + 1, np.uint64)
    nbytes = 0
    helps = may_use_engine(schedule, checksums=options.checksums)
    of_slots = dict.fromkeys(_slot_turns(schedule, options, gpus), 0)
    for of_part, source, turns, streams in (
        (table.copies, table.peer, gpus.turns(schedule.rank), ENGINE_STREAMS),
        (copies, peer, of_slots, 1),
    ):
        turn = np.array([turns.get(rank, -1) if helps else -1 for rank in source.tolist()], np.int64)
        tiles, _ = divided(of_part, bases, DEFAULT_TILE_BYTES, turn, ENGINE_SHARE, streams=streams)
        nbytes += table_bytes(tiles, checksums=options.checksums)
    return nbytes


def _what_is_pushed(schedule: Schedule, options: Options, gpus: _Gpus) -> PushedPart:
    """What training ranks push to a generation rank."""
    if not may_use_engine(schedule, checksums=options.checksums):
        return "nothing"
    by_engine = bool(_slot_turns(schedule, options, gpus))
    return what_is_pushed(is_mutual=schedule.rank in gpus.mutual, by_engine=by_engine)


def _slot_turns(schedule: Schedule, options: Options, gpus: _Gpus) -> dict[int, int]:
    """In which turn a generation rank reads each source's slots by a copy engine: {} where it does not help with all of them."""
    turns = gpus.turns(schedule.rank) if may_use_engine(schedule, checksums=options.checksums) else {}
    return turns if turns.keys() >= schedule.peers else {}


def _nccl(
    schedules: Mapping[World, Mapping[int, Sequence[Schedule]]],
    alike: _Alike,
    options: Options,
    domains: Sequence[int] | None,
    waves: int,
    shared: SharedGpus | None = None,
) -> _Counted:
    """`schedules` has what each rank that is counted exchanges: with the other world, then with replicas.

    `domains` has the NVLink domain of each group rank, where these are known. Parts, as in `relay`, share communicators and
    slots, and have tables of their own.
    """
    places = [(world, rank) for world, of_world in schedules.items() for rank in of_world]
    joined = max(len(of_rank) for of_rank in schedules["gen"].values()) // 2
    parts = [*zip(*(_parts(schedules[world][rank], waves, joined) for world, rank in places), strict=True)]
    pairs = [[sum(map(pair_count, of_rank)) for of_rank in part] for part in parts]
    index = {place: number for number, place in enumerate(places)}
    counted = [index[world, rank] for world in schedules for rank in alike[world].tolist()]  # of each group rank
    members = tuple(rank for rank, number in enumerate(counted) if any(of_part[number] for of_part in pairs))
    budget = ScratchBudget(options.scratch_bytes, checksums=options.checksums)
    uses = [_NcclUse() for _ in places]
    for part, of_part in zip(parts, pairs, strict=True):
        hops = {schedule.hop_kind for of_rank in part for schedule in of_rank[1:]}
        counts = [of_part[number] for number in counted]
        division = divide(budget, counts, parts=len(parts), hops=hops, members=members, shared=shared)
        division, ends = divide_windows(division, part, len(alike["train"]))
        for use, of_rank in zip(uses, ends, strict=True):
            use.add(of_rank, division)
    found: _Counted = {"train": {}, "gen": {}}
    for (world, rank), use in zip(places, uses, strict=True):
        own = _of_trainer(schedules[world][rank][0], options)
        nccl = use.buffer_bytes(len(alike["train"]), domains)
        found[world][rank] = replace(own, tables=use.tables, scratch=sum(use.slots.values()), nccl=nccl)
    return found


def _parts(ends: Sequence[Schedule], waves: int, joined: int) -> list[list[Schedule]]:
    """What a rank exchanges in each part: with the other world, and both ends of each hop."""
    first, *later = (_by_wave(end, waves) for end in ends)
    hops = [[*zip(*both, strict=True)] for both in zip(later[::2], later[1::2], strict=True)]
    return in_parts(first, hops, [ends[0].with_peers(())] * joined)


class _NcclUse:
    """What a rank has over nccl in all its parts."""

    def __init__(self) -> None:
        self.tables = 0
        self.slots: dict[tuple[int, int], int] = {}  # bytes, by stream and slot
        self._own = 0
        self._divisions: list[Division] = []
        self._senders: set[int] = set()
        self._receivers: set[int] = set()

    def add(self, ends: Sequence[HopEnd], division: Division) -> None:
        """The tables, slots and peers of a part."""
        in_place = [[True] * len(end.schedule.tensors) for end in ends]
        rounds = divided_rounds(ends, division, in_place=in_place)
        for number, end in enumerate(ends):
            self.tables += _gather_bytes(
                end.schedule, [placed.bucket for each in rounds for placed in each.staged_of(number)]
            )
            peers = {peer + end.first_peer for peer in end.schedule.peers}
            (self._receivers if end.sends else self._senders).update(peers)
        for place, nbytes in slot_bytes(rounds).items():
            self.slots[place] = max(nbytes, self.slots.get(place, 0))
        self._own = ends[0].own
        self._divisions.append(division)

    def buffer_bytes(self, train_ranks: int, domains: Sequence[int] | None) -> int:
        """NCCL's own memory; all parts share communicators."""
        return max(
            buffer_bytes(self._own, self._senders, self._receivers, division, train_ranks, domains)
            for division in self._divisions
        )


def _auto(
    gpus: _Gpus,
    ranks: Mapping[World, Mapping[int, _Rank]],
    alike: _Alike,
    options: Options,
    topology: Topology,
    shared: SharedGpus,
    joined: int,
    waves: int,
) -> _Counted:
    """Pairs of a domain by direct, the others by nccl, and so do replicas in so many `joined` hops."""
    domains = {world: topology.domains(world) for world in ranks}

    def parts(rank: _Rank, *, near: bool) -> Schedule:
        schedule = rank.schedule
        other: World = "gen" if schedule.world == "train" else "train"
        is_near = domains[other] == domains[schedule.world][schedule.rank]
        chosen = np.flatnonzero(is_near == near).tolist()
        return (rank.pulls if near and not schedule.peers.isdisjoint(chosen) else schedule).with_peers(chosen)

    later = _each(ranks, lambda rank: rank.hops[1:])
    ends = 2 * joined
    by_direct, by_nccl = (
        {
            world: {
                rank: [parts(each, near=near), *(later[world][rank][ends:] if near else later[world][rank][:ends])]
                for rank, each in of_world.items()
            }
            for world, of_world in ranks.items()
        }
        for near in (True, False)
    )
    counted = _direct(by_direct, alike, options, gpus)
    for world, of_world in _nccl(by_nccl, alike, options, shared.cells, waves, shared).items():
        for rank, held in of_world.items():
            direct = counted[world][rank]
            counted[world][rank] = replace(
                _of_trainer(ranks[world][rank].schedule, options),
                tables=direct.tables + held.tables,
                scratch=direct.scratch + held.scratch,
                nccl=held.nccl,
            )
    return counted


def _gather_bytes(schedule: Schedule, buckets: Sequence[Bucket]) -> int:
    """The tables by which a rank packs or unpacks buckets, and those of the scales that it computes before."""
    casts, bases = bound_casts(schedule), np.zeros(len(schedule.tensors) + 1, np.uint64)
    tables = cut_gather(joined([bucket.copies for bucket in buckets]), bases, casts, DEFAULT_TILE_BYTES)
    elements = [prod(local.shape) for local in schedule.tensors]
    return sum(table.nbytes for table in tables) + scale_blocks(casts, [0] * len(elements), elements).nbytes


def _casting_bytes(schedule: Schedule, rounds: Sequence[NDArray[np.void]], tile_bytes: int = DEFAULT_TILE_BYTES) -> int:
    """The tables of a source of `direct`, which computes scales; `rounds` are copies."""
    elements = [prod(local.shape) for local in schedule.tensors]
    last = max((int(copies["dst"].max(initial=0)) for copies in rounds), default=0)
    bases = np.zeros(1 + max(len(elements), last), np.uint64)
    # Far from each other, as blocks are told apart by where they lie.
    bases[: len(elements)] = _PLACE * np.arange(1, len(elements) + 1)
    cut = cut_rounds(rounds, bases, bound_casts(schedule), tile_bytes, elements)
    return sum(table.nbytes for tables in cut for table in tables)


def _of_trainer(schedule: Schedule, options: Options) -> RankMemory:
    """What a training rank takes over any transport on a GPU; nothing on generation ranks."""
    casts = bound_casts(schedule)
    scales = {cast.scales for cast in casts.values() if cast.scales is not None}
    return RankMemory(
        scales=sum(4 * prod(schedule.tensors[index].shape) for index in scales),
        checks=strata_of(schedule, [0] * len(schedule.tensors), options.source_checks).nbytes,
    )


def _gloo_scratch(rank: _Rank, options: Options) -> int:
    windows = [
        [gloo_window(cut_buckets(wave, options.bucket_bytes)) for wave in _by_wave(hop, rank.plan.waves)]
        for hop in rank.hops
    ]
    return sum(max((slots * nbytes for slots, nbytes in hop), default=0) for hop in windows)


def _tensor_bytes(schedule: Schedule) -> int:
    elements = np.array([prod(local.shape) for local in schedule.tensors], np.int64)
    elements[[*schedule.carried]] = 0
    return int((elements * itemsizes(schedule)).sum())
