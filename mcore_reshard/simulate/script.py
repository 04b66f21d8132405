"""What every rank does in a refit, in order: the executors' own buckets and rounds, for all ranks at once.

    run      what one rank does on one stream, or in one window of messages: rounds in order
    round    messages that begin together
    message  one bucket, in one round of its sender and one round of its receiver

A rank reaches a round when the round `window` places before it is over, and when it has reached the one before it. A
message begins when both its ranks have reached it.

    nccl     a run for each stream, rounds as in nccl/staging.py; the next one waits for the wire. Rounds have a wave from
             the trainer, and what is passed on of the waves before; over auto mostly what is passed on to other hosts
    gloo     one run of single messages, in a window of slots; those of two ranks pass one after another
    direct   a reader pulls from source after source, or from all at once; a source waits until all have read. Replicas of
             one domain are a chain, in waves of their own
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import aligned, cut, fewest_buckets, paced, pack, pack_evenly
from mcore_reshard.kernels.copies.carried import PLACES
from mcore_reshard.kernels.copies.copy_table import expand, repeat
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.direct.waves import waves_for
from mcore_reshard.kernels.transports.nccl.shared_gpus import SharedGpus
from mcore_reshard.kernels.transports.nccl.staging import (
    Division,
    Messages,
    ScratchBudget,
    divide,
    message_bytes,
    windows_that_fit,
)
from mcore_reshard.kernels.transports.reach import joined_hops, shared_gpus
from mcore_reshard.kernels.transports.rounds import DEFAULT_SLOTS, moment_of, turn_of
from mcore_reshard.planner.layout.mesh import replica_ranks
from mcore_reshard.planner.plan.make_schedule import has_chain
from mcore_reshard.planner.plan.paths import HopKind
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.topology.topology import Topology

from .traffic import Ints, Traffic, traffic_of

Kind = Literal["nccl", "gloo", "direct"]

_EVEN = 1.05  # as in cuda/tiles.py
_MOST_MESSAGES = 800_000  # more are merged


@dataclass(frozen=True, slots=True, eq=False)
class Buckets:
    """Messages, by stage, source, destination and number; every column has one entry a message."""

    src: Ints  # index of a rank: training ranks, then generation ranks
    dst: Ints
    stage: Ints
    hop: Ints
    number: Ints  # among those of the stage, the hop and the two ranks
    nbytes: Ints

    def __len__(self) -> int:
        return len(self.src)

    def rows(self, chosen: Ints) -> Buckets:
        return Buckets(*(getattr(self, name)[chosen] for name in Buckets.__slots__))


@dataclass(frozen=True, slots=True, eq=False)
class PairBuckets:
    """The messages of pairs of ranks; pairs with the same transfers share them."""

    src: Ints  # [pairs]
    dst: Ints
    stage: Ints
    hop: Ints
    sort: Ints  # [pairs]: whose messages are the pair's
    first: Ints  # [sorts + 1]: where the messages of each sort begin
    nbytes: Ints  # of the messages of all sorts

    def and_those_of(self, other: PairBuckets) -> PairBuckets:
        """All messages of both."""
        return PairBuckets(
            np.concatenate([self.src, other.src]),
            np.concatenate([self.dst, other.dst]),
            np.concatenate([self.stage, other.stage]),
            np.concatenate([self.hop, other.hop]),
            np.concatenate([self.sort, other.sort + len(self.first) - 1]),
            np.concatenate([self.first, other.first[1:] + self.first[-1]]),
            np.concatenate([self.nbytes, other.nbytes]),
        )

    @property
    def messages(self) -> int:
        return int(np.diff(self.first)[self.sort].sum())

    def expanded(self, times: int) -> Buckets:
        """All messages; so many consecutive ones of a pair are merged to one."""
        counts = -(-np.diff(self.first) // times)
        _, number = repeat(counts)
        starts = np.repeat(self.first[:-1], counts) + number * times
        nbytes = np.add.reduceat(self.nbytes, starts)
        pair, message = expand(self.sort, counts)
        src, dst, stage, hop = (column[pair] for column in (self.src, self.dst, self.stage, self.hop))
        return Buckets(src, dst, stage, hop, number[message], nbytes[message])


@dataclass(frozen=True, slots=True, eq=False)
class Script:
    """The runs, rounds and messages of all ranks. Rounds of a run are numbered in order, without gaps."""

    buckets: Buckets
    src_round: Ints  # [messages]
    dst_round: Ints
    round_rank: Ints  # [rounds]
    first_round: Ints  # [runs + 1]
    window: Ints  # [runs]
    after: tuple[tuple[int, ...], ...]  # runs that must be over before a run begins
    behind: Ints  # [messages]: the message that is before it on one connection; -1: none
    merged: int


@dataclass(frozen=True, slots=True, eq=False)
class _Side:
    """One end of some messages, or both: of each, its rank, the stream, and the place of its round there."""

    rank: Ints
    stream: Ints
    place: Ints
    window: int


@dataclass(frozen=True, slots=True, eq=False)
class _Part:
    """What moves together by one transport: a wave of a hop."""

    hop: int
    wave: int  # of the first hop; in a hop that is joined with it, what is passed on is of a wave before
    kind: Kind
    buckets: PairBuckets
    division: Division | None = None  # of nccl
    chained: bool = False  # replicas also pass on what they get in this hop


def script_of(plan: Plan, topology: Topology, transport: str, options: Options, most: int = _MOST_MESSAGES) -> Script:
    """The script of a plan. `transport` is nccl, gloo, direct, or auto: direct within a domain, nccl elsewhere.

    Where there are more than `most` messages, consecutive ones of a pair are merged: `Script.merged` says how many.
    """
    ranks = len(topology.train) + len(topology.gen)
    domains = np.concatenate([topology.domains("train"), topology.domains("gen")])
    hops = traffic_of(plan)
    shared = shared_gpus(plan, topology, transport)
    joined = joined_hops(plan, topology, transport)
    parts: list[_Part] = []
    together: dict[int, list[Traffic]] = {}  # over nccl, by wave: of the trainer, of replicas
    is_near = transport == "direct" or all((domains[each.src] == domains[each.dst]).all() for each in hops)
    if transport in ("direct", "auto") and is_near and has_chain(plan):
        parts, hops = [*_chained(plan)], ()
    for hop, traffic in enumerate(hops):
        near = domains[traffic.src] == domains[traffic.dst]
        for wave in np.unique(traffic.wave).tolist():
            by = "nccl" if 0 < hop <= joined else transport
            for kind, chosen in _split(by, traffic.wave == wave, near):
                if not chosen.any():
                    continue
                of_wave = traffic.of_pairs(np.flatnonzero(chosen))
                if kind == "nccl":
                    together.setdefault(wave + hop, []).append(of_wave)
                else:
                    parts.append(_Part(hop, wave, kind, _buckets(of_wave, kind, options.bucket_bytes)))
    ends = [end for of_part in together.values() for each in of_part for end in (each.src, each.dst)]
    members = tuple(np.unique(np.concatenate([np.zeros(0, np.int64), *ends])).tolist())
    on_gpus = shared if transport == "auto" else None
    for number, of_part in together.items():
        kinds = [plan.later_hops[hop] for hop in range(joined) if hop < number <= hop + plan.waves]
        divided = _nccl_buckets(of_part, options, ranks, members, on_gpus, kinds, plan.waves + joined)
        parts.append(_Part(0, number, "nccl", *divided))
    merged = max(1, -(-sum(part.buckets.messages for part in parts) // most))
    carriers = frozenset((plan.train.world + plan.carrier_ranks).tolist())
    writer = _Writer(topology, merged, relayed=bool(plan.later_hops), joined=joined, carriers=carriers)
    for part in sorted(parts, key=lambda part: (part.wave + (joined if part.hop else 0), part.hop)):
        writer.add(part)
    return writer.script()


def _chained(plan: Plan) -> Iterator[_Part]:
    """What goes along a chain of replicas by direct, in waves of its own: a part for each wave and replica."""
    whole, *_ = traffic_of(replace(plan, straight=True))
    first, step = plan.train.world, replica_ranks(plan.gen)
    pulls = whole.of_pairs(np.flatnonzero(whole.dst < first + step))
    nbytes = pulls.pair_bytes
    ends, of_end = np.unique(np.stack([pulls.dst, pulls.stage]), axis=1, return_inverse=True)
    passed = np.zeros(ends.shape[1], np.int64)
    np.add.at(passed, of_end.reshape(-1), nbytes)
    links = [(pulls.src, pulls.dst, pulls.stage, nbytes)]
    links += [(ends[0] + at - step, ends[0] + at, ends[1], passed) for at in range(step, plan.gen.world, step)]
    waves = waves_for(int(plan.recv_bytes.max()))
    for wave in range(waves):
        for link, (src, dst, stage, of_link) in enumerate(links):
            hop = min(link, 1)
            own, part = np.arange(len(of_link) + 1), of_link * (wave + 1) // waves - of_link * wave // waves
            buckets = PairBuckets(src, dst, stage, np.full(len(src), hop), own[:-1], own, part)
            yield _Part(hop, wave, "direct", buckets, chained=True)


def _split(
    transport: str, pairs: NDArray[np.bool_], near: NDArray[np.bool_]
) -> Iterator[tuple[Kind, NDArray[np.bool_]]]:
    if transport == "auto":
        yield "direct", pairs & near
        yield "nccl", pairs & ~near
    else:
        yield transport, pairs  # type: ignore[misc]


def _nccl_buckets(
    hops: Sequence[Traffic],
    options: Options,
    ranks: int,
    members: tuple[int, ...],
    shared: SharedGpus | None,
    kinds: Sequence[HopKind],
    parts: int,
) -> tuple[PairBuckets, Division]:
    """The buckets of hops whose messages share rounds. `members` are the ranks that exchange anything over nccl.

    Replicas may pass on in the hops of these `kinds`. The refit has so many `parts`.
    """
    budget = ScratchBudget(options.scratch_bytes, checksums=options.checksums)
    pairs = np.bincount(
        np.concatenate([end for traffic in hops for end in (traffic.src, traffic.dst)]), minlength=ranks
    )
    division = divide(budget, pairs.tolist(), parts=parts, hops=kinds, members=members, shared=shared)
    if division.is_even:
        nbytes = np.zeros(ranks, np.int64)
        for traffic in hops:
            for end in (traffic.src, traffic.dst):
                np.add.at(nbytes, end, traffic.aligned_pair_bytes)
        windows = int(division.windows_needed(nbytes, pairs).max())
        division = division.with_most([(windows, windows)])
    elif division.keeps_pace:
        most = [0, 0]
        for traffic in hops:
            needed = fewest_buckets(traffic.aligned_pair_bytes, *division.cut_sizes(traffic.kind))
            most[traffic.kind != "train"] = max(most[traffic.kind != "train"], int(needed.max()))
        division = division.with_most([most])
    first, *others = (
        _buckets(
            traffic,
            "nccl",
            *division.cut_sizes(traffic.kind),
            pace=division.pace(traffic.kind),
            equal=division.is_even,
        )
        for traffic in hops
    )
    for other in others:
        first = first.and_those_of(other)
    return first, division


def _buckets(
    traffic: Traffic,
    kind: Kind,
    bucket_bytes: int,
    segment_bytes: int | None = None,
    *,
    pace: int = 0,
    equal: bool = False,
) -> PairBuckets:
    """The buckets that `cut_buckets` makes of the same transfers; direct has one for each pair of ranks in a stage."""
    ends = traffic.src, traffic.dst, traffic.stage, np.full(len(traffic.src), traffic.hop)
    if kind == "direct":
        nbytes = traffic.pair_bytes
        own = np.arange(len(nbytes) + 1)
        return PairBuckets(*ends, own[:-1], own, nbytes)
    segment_bytes = segment_bytes or bucket_bytes
    alike, of_pair = _alike(traffic)
    models = traffic.of_pairs(alike)
    pieces = [
        np.array([prod(piece.extents) * shape.itemsize for piece in cut(shape.extents, shape.itemsize, segment_bytes)])
        for shape in traffic.shapes
    ]
    transfer, piece = expand(models.shape.astype(np.int64), np.array([*map(len, pieces)], np.int64))
    pair = np.repeat(np.arange(len(alike)), np.diff(models.first))[transfer]
    nbytes = np.concatenate(pieces).astype(np.int64)[piece]
    if pace:
        counts = paced(fewest_buckets(models.aligned_pair_bytes, bucket_bytes, segment_bytes), pace, equal=equal)
        starts, offsets = pack_evenly(pair, nbytes, counts)
    else:
        starts, offsets = pack(pair, nbytes, bucket_bytes, segment_bytes)
    last = np.append(starts[1:], len(nbytes)) - 1
    first = np.searchsorted(pair[starts], np.arange(len(alike) + 1))
    return PairBuckets(*ends, of_pair, first, offsets[last] + nbytes[last])


def _alike(traffic: Traffic) -> tuple[Ints, Ints]:
    """(a pair of each sort, the sort of every pair): pairs of one sort have transfers of equal shapes in equal order."""
    counts = np.diff(traffic.first)
    place = np.arange(len(traffic.shape)) - np.repeat(traffic.first[:-1], counts)
    random = np.random.default_rng(0)
    of_shape, of_place = (
        random.integers(0, 1 << 64, size, np.uint64) for size in (len(traffic.shapes), int(counts.max()))
    )
    sums = np.add.reduceat(of_shape[traffic.shape] * of_place[place], traffic.first[:-1])
    _, alike, of_pair = np.unique(sums, return_index=True, return_inverse=True)
    model = np.repeat(traffic.first[alike[of_pair]], counts) + place
    is_like = counts == counts[alike[of_pair]]
    if not is_like.all() or not np.array_equal(traffic.shape[model], traffic.shape):  # two sorts with one sum
        return np.arange(len(counts)), np.arange(len(counts))
    return alike, of_pair.reshape(-1)


class _Writer:
    """Puts the runs of all hops and waves together, each after those that it waits for."""

    def __init__(
        self, topology: Topology, merged: int, *, relayed: bool, joined: int, carriers: frozenset[int]
    ) -> None:
        self._topology, self._merged, self._relayed, self._joined = topology, merged, relayed, joined
        self._carriers = carriers
        self._train = len(topology.train)
        self._gpus = np.concatenate([topology.gpus("train"), topology.gpus("gen")])
        self._buckets: list[Buckets] = []
        self._rounds_of: list[tuple[Ints, Ints]] = []  # both ends of these messages
        self._round_rank: list[Ints] = []
        self._sizes: list[int] = []  # rounds of each run
        self._window: list[int] = []
        self._after: list[tuple[int, ...]] = []
        self._behind: list[Ints] = []
        self._messages = self._rounds = 0
        # By rank, hop, and whether it sends, which in the first hop is no matter; by wave.
        self._runs: dict[tuple[int, int, bool], dict[int, list[int]]] = {}

    def add(self, part: _Part) -> None:
        buckets = part.buckets.expanded(self._merged)
        if part.kind == "nccl":  # a round may send and receive
            assert part.division is not None
            rounds = self._add_side(part, self._nccl_ends(buckets, part.division), sends=False)
            sending, receiving = rounds[: len(buckets)], rounds[len(buckets) :]
        else:
            sends, receives = self._gloo_sides(buckets) if part.kind == "gloo" else self._direct_sides(buckets)
            sending = self._add_side(part, sends, sends=part.hop > 0)
            receiving = self._add_side(part, receives, sends=False)
        self._buckets.append(buckets)
        self._rounds_of.append((sending, receiving))
        behind = np.full(len(buckets), -1)
        if part.kind == "gloo":  # one connection for each pair of ranks, in the order of both
            order = np.lexsort((sending, buckets.dst, buckets.src))
            ends = np.stack([buckets.src[order], buckets.dst[order]])
            is_next = (ends[:, 1:] == ends[:, :-1]).all(axis=0)
            behind[order[1:][is_next]] = order[:-1][is_next] + self._messages
        self._behind.append(behind)
        self._messages += len(buckets)

    def script(self) -> Script:
        none = np.zeros(0, np.int64)
        columns = [
            np.concatenate([none, *(getattr(buckets, name) for buckets in self._buckets)]) for name in Buckets.__slots__
        ]
        return Script(
            Buckets(*columns),
            np.concatenate([none, *(sending for sending, _ in self._rounds_of)]),
            np.concatenate([none, *(receiving for _, receiving in self._rounds_of)]),
            np.concatenate([none, *self._round_rank]),
            np.concatenate([[0], np.cumsum(np.array(self._sizes, np.int64))]),
            np.array(self._window, np.int64),
            tuple(self._after),
            np.concatenate([none, *self._behind]),
            self._merged,
        )

    def _add_side(self, part: _Part, side: _Side, *, sends: bool) -> Ints:
        """Add the runs of these ends; returns the round of each."""
        streams = int(side.stream.max(initial=0)) + 1
        places = int(side.place.max(initial=0)) + 1
        lane = side.rank * streams + side.stream
        rounds, round_of = np.unique(lane * places + side.place, return_inverse=True)
        lanes, sizes = np.unique(rounds // places, return_counts=True)
        for rank in (lanes // streams).tolist():
            before = self._before(rank, part, sends)
            self._runs.setdefault((rank, part.hop, sends), {}).setdefault(part.wave, []).append(len(self._after))
            self._after.append(before)
        self._sizes += sizes.tolist()
        self._window += [side.window] * len(sizes)
        self._round_rank.append(rounds // places // streams)
        self._rounds, first = self._rounds + len(rounds), self._rounds
        return round_of.reshape(-1) + first

    def _before(self, rank: int, part: _Part, sends: bool) -> tuple[int, ...]:
        """The runs that one of a wave waits for: the wave before it, and what must have landed on the rank."""
        awaited = [(part.hop, sends, part.wave - 1)]
        for earlier in range(part.hop):
            joined = earlier <= self._joined
            awaited.append((0 if joined else earlier, False, part.wave + (earlier if joined else 0)))
        if part.chained and sends:
            awaited.append((part.hop, False, part.wave))
        if rank in self._carriers and not part.hop:  # what a wave brings for others takes the place of an earlier one's
            awaited += [(1 + self._joined, True, part.wave - PLACES)]
        before: list[int] = []
        for hop, is_sender, last in awaited:  # a rank may have nothing to do in some waves
            waves = self._runs.get((rank, hop, is_sender), {})
            before += waves.get(max((each for each in waves if each <= last), default=-1), [])
        return tuple(dict.fromkeys(before))

    def _nccl_ends(self, buckets: Buckets, division: Division) -> _Side:
        """Both ends of all messages, those of senders first."""
        budget = division.budget  # merged messages fill slots that are larger by as much
        division = replace(division, budget=replace(budget, scratch_bytes=budget.scratch_bytes * self._merged))
        number, count, turn = self._turns(buckets)
        of_train = buckets.hop == 0  # merged ones are fewer
        division = replace(division, most=(int(count[of_train].max(initial=0)), int(count[~of_train].max(initial=0))))
        phase = division.phase_of(turn, buckets.stage, np.where(buckets.hop > 0, len(self._topology.gen), 0))
        communicator = division.communicator_of(buckets.src, buckets.dst, turn)
        in_slot = aligned(message_bytes(buckets.nbytes, budget))
        columns = number, count, turn, phase, in_slot, communicator
        twice = Messages(*(np.tile(column, 2) for column in columns))
        ranks = np.concatenate([buckets.src, buckets.dst])
        window = twice.windows(next(windows_that_fit(division, twice, ranks)))
        stream = division.stream_of(window, twice.turn, twice.communicator)
        return _Side(ranks, np.broadcast_to(stream, window.shape), window, 1)

    def _direct_sides(self, buckets: Buckets) -> tuple[_Side, _Side]:
        none = np.zeros(len(buckets), np.int64)
        return _Side(buckets.src, none, none, 1), _Side(buckets.dst, none, self._pull_places(buckets), 1)

    def _gloo_sides(self, buckets: Buckets) -> tuple[_Side, _Side]:
        number, count, turn = self._turns(buckets)
        place = np.empty(len(buckets), np.int64)
        place[np.lexsort((turn, buckets.stage, moment_of(number, count, turn)))] = np.arange(len(buckets))
        none = np.zeros_like(place)
        return _Side(buckets.src, none, place, DEFAULT_SLOTS), _Side(buckets.dst, none, place, DEFAULT_SLOTS)

    def _turns(self, buckets: Buckets) -> tuple[Ints, Ints, Ints]:
        """Of each message: its number, the count of its stage and pair, and the turn of the pair."""
        gen_ranks = len(self._topology.gen)
        dst = buckets.dst - self._train
        key = (buckets.stage * (buckets.src.max(initial=0) + 1) + buckets.src) * (dst.max(initial=0) + 1) + dst
        _, pair, counts = np.unique(key, return_inverse=True, return_counts=True)
        from_trainer = turn_of(buckets.src, dst, max(self._train, gen_ranks))
        turn = np.where(buckets.hop == 0, from_trainer, turn_of(buckets.src - self._train, dst, gen_ranks))
        return buckets.number, counts[pair.reshape(-1)], turn

    def _pull_places(self, buckets: Buckets) -> Ints:
        """The turn in which a reader pulls from each source: one after the other if they have about equally much."""
        place = np.zeros(len(buckets), np.int64)
        for reader in np.unique(buckets.dst).tolist():
            rows = np.flatnonzero(buckets.dst == reader)
            sources, source = np.unique(buckets.src[rows], return_inverse=True)
            nbytes = np.bincount(source.reshape(-1), weights=buckets.nbytes[rows])
            own_gpu = bool((self._gpus[sources] == self._gpus[reader]).any())
            if not self._relayed and not own_gpu and nbytes.max() <= _EVEN * nbytes.min():
                place[rows] = (source.reshape(-1) - (reader - self._train)) % len(sources)
        return place
