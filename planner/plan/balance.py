"""Load balance: which replica of a part serves a pull, so that replicas share the load.

A pull is one overlap on its way to one destination replica. Every member of a transfer group makes the same pulls 0, 1,
2, ... of each source part. All replicas of the part could serve them, and take turns. For member `k`:

    replica = (first + k * stride + pull) % replicas

Now and then a number is skipped, so that each source meets every end: see `_mixed`.

`stride` is the number of pulls, raised until it is coprime with the number of replicas. Otherwise a pull would visit only
some replicas, and it goes to the same rank for every member. With 2 pulls and 4 replicas, the stride is 3:

    member              0  1  2  3
    pull 0, stride 2    0  2  0  2      half of the replicas
    pull 0, stride 3    0  3  2  1      all of them
    pull 1, stride 3    1  0  3  2

If members do not fill whole turns, some replicas serve more. `first` is chosen so that idle ranks take this surplus. In a
plan that relays, the same round robin over destination replicas says where each overlap lands. Between known hosts `first`
evens out every wave: a wave has a few members of each group, which must not land on the same few replicas.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import chain
from math import lcm

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int64]
Numbers = Ints | int
MOST_WAVES = 16  # of a relay; more overlap better, and every wave takes some words between all ranks
WAVE_LAGS = 8  # so many places within a wave, from which groups with few overlaps begin
_LANDINGS_IN_A_WAVE = 12  # of a rank, at least, if so many replicas take turns
_FIRSTS_TRIED = 64  # evenly spaced; with more replicas, neighboring ones hardly differ


def waves_for(passed_on: int, received: int, landings: int, replicas: int, *, far: bool) -> int:
    """The number of waves where replicas pass on so many of the bytes that they receive: 1, 2, 4, 8, 16, 24, or 32.

    The last wave is passed on when nothing lands any more, which costs a wave's part of what is passed on; each wave
    costs some order. So the best number goes with the square root of the share that is passed on. Where this is most,
    NICs and NVLink are equally busy: 24 waves are better, and 32 if replicas pass on to other hosts as well (`far`).

    A rank has so many `landings` of what the trainer sends by NIC, on which `replicas` take turns. If a wave has few of
    them, some replicas get twice as much as others. Simulated with overlaps of 1 MiB, Qwen3 4B on 32 replicas took 1.2
    times as long in 16 waves as in 4.
    """
    numbers = [1, *(waves for waves in (2, 4, 8, MOST_WAVES) if waves**2 * received < 2 * MOST_WAVES**2 * passed_on)]
    if numbers[-1] == MOST_WAVES:
        numbers.append(32 if far else 24)
    return max(waves for waves in numbers if waves <= 2 or landings >= min(replicas, _LANDINGS_IN_A_WAVE) * waves)


def wave_of(members: int, pairs: Ints, waves: int, lag: int = WAVE_LAGS // 2) -> Ints:
    """The wave of every overlap of every member [members, overlaps] of a transfer group.

    Overlaps with equal `pairs` [overlaps] are of the same two parts. Each two parts have work in all waves, or in as
    many as they have overlaps; a single one is in the middle, where all hops are under way:

        members              0  1  2  3  4  5  6  7  8  9
        of four waves        0  0  1  1  1  2  2  3  3  3

    Where there are fewer overlaps than waves, transfer groups with other lags, from 0 to 7, are in other waves:

        three members, of eight waves    lag 0    0  2  5        lag 4    1  4  6        lag 7    2  5  7

    Waves are even. A smaller last one, which is passed on alone, would make all others larger than what the trainer sends
    meanwhile; where NICs of the engine are as busy as the trainer's, this takes longer.
    """
    of_pair = np.bincount(pairs, minlength=1)[pairs]
    place = WAVE_LAGS * (np.arange(members)[:, None] * of_pair + order_within(pairs)) + lag
    return waves * place // (WAVE_LAGS * members * of_pair)  # integers: all ranks must agree


def stride_of(turns: Ints, replicas: Numbers) -> Ints:
    """The first numbers, from each number of turns on, that share no factor with `replicas`: [2, 3], 4 -> [3, 3]."""
    strides = turns.copy()
    while (shared := np.gcd(strides, replicas) > 1).any():
        strides[shared] += 1
    return strides


@dataclass(frozen=True, slots=True)
class Row:
    """Replicas of one part that take turns, over one kind of link."""

    part: int
    replicas: tuple[int, ...]
    link: int = 0
    passed_to: tuple[int, ...] = ()  # the replicas that get it from whose turn it is; (): those of the row

    @property
    def passes_to(self) -> tuple[int, ...]:
        """The replicas that share what lands in a turn; () where it has come to the only one."""
        return self.passed_to or (self.replicas if len(self.replicas) > 1 else ())


class Rows:
    """Rows by number, each once: many turns share them, and to compare numbers is fast."""

    def __init__(self) -> None:
        self._rows: list[Row] = []
        self._numbers: dict[tuple[object, ...], int] = {}
        self._alone: dict[tuple[int, int, int], list[int]] = {}
        self._columns: tuple[Ints, ...] = (
            np.zeros(0, np.int64),
        ) * 5  # of the rows that there were when somebody asked

    def __getitem__(self, number: int) -> Row:
        return self._rows[number]

    def number_of(self, part: int, replicas: tuple[int, ...], link: int, passed_to: tuple[int, ...] = ()) -> int:
        key = part, replicas, link, passed_to
        if key not in self._numbers:
            self._numbers[key] = len(self._rows)
            self._rows.append(Row(*key))
        return self._numbers[key]

    def alone(self, part: int, replicas: int, link: int) -> list[int]:
        """The rows of which each replica of a part is alone."""
        key = part, replicas, link
        if key not in self._alone:
            self._alone[key] = [self.number_of(part, (replica,), link) for replica in range(replicas)]
        return self._alone[key]

    def columns(self) -> tuple[Ints, ...]:
        """(parts, links, sizes, starts, replicas): a row's replicas are `sizes` of the last one, from `starts` on."""
        if len(self._columns[0]) < len(self._rows):
            rows = self._rows[len(self._columns[0]) :]
            replicas = [*chain.from_iterable(row.replicas for row in rows)]
            new = [[row.part for row in rows], [row.link for row in rows], [len(row.replicas) for row in rows]]
            sizes = np.array(new[2], np.int64)
            starts = len(self._columns[4]) + np.cumsum(sizes) - sizes
            added = (*(np.array(each, np.int64) for each in new), starts, np.array(replicas, np.int64))
            self._columns = tuple(np.concatenate(each) for each in zip(self._columns, added, strict=True))
        return self._columns


@dataclass(frozen=True, eq=False)
class Turns:
    """The turns that every member takes, each in a row of replicas.

    Replicas of all rows, one row after the other, are the places.
    """

    known: Rows
    found: Ints  # [rows]: their numbers in `known`
    parts: Ints  # [rows]
    links: Ints  # [rows]
    row: Ints  # [turns]
    number: Ints  # [turns]: that count on in its row; without `facing`, turns of the same row before it
    strides: Ints  # [turns]
    replicas: Ints  # [places]
    row_of: Ints  # [places]
    starts: Ints  # [rows]: the first place of each
    sizes: Ints  # [rows]
    cycle: Ints  # [turns]: after so many members a number is skipped; 0: never

    @classmethod
    def of(cls, rows: Sequence[Row], row: Ints, facing: Turns | None = None) -> Turns:
        """`row` [turns] is the row of each turn of a member, in order. `facing`: the turns at the other end of these legs."""
        known = Rows()
        found = [known.number_of(each.part, each.replicas, each.link, each.passed_to) for each in rows]
        return cls.numbered(known, np.array(found, np.int64), row, facing)

    @classmethod
    def numbered(cls, known: Rows, found: Ints, row: Ints, facing: Turns | None = None) -> Turns:
        """The same of rows that are `found` [rows] in `known`."""
        parts, links, sizes, starts, replicas = known.columns()
        sizes = sizes[found]
        row_of, place = runs_of(starts[found], sizes)
        strides = stride_of(np.maximum(np.bincount(row, minlength=len(found)), 1), sizes)
        number, cycle = order_within(row), np.zeros(len(row), np.int64)
        if facing is not None:
            cycle = np.lcm(sizes[row], facing.sizes[facing.row])
            number = _mixed(row, cycle, facing)
        return cls(
            known,
            found,
            parts[found],
            links[found],
            row,
            number,
            strides[row],
            replicas[place],
            row_of,
            np.cumsum(sizes) - sizes,
            sizes,
            cycle,
        )

    @cached_property
    def rows(self) -> tuple[Row, ...]:
        return tuple(map(self.known.__getitem__, self.found.tolist()))

    def replica(self, first: Numbers, member: Numbers, turn: Numbers | slice = slice(None)) -> Ints:
        """Which replica takes a turn of a member; arguments broadcast against each other."""
        row = self.row[turn]
        taken: Ints = self.replicas[self.starts[row] + (first + self._moved_on(member, turn)) % self.sizes[row]]
        return taken

    def _moved_on(self, member: Numbers, turn: Numbers | slice = slice(None)) -> Ints:
        """By how many replicas a member is ahead of the first one in a turn."""
        moved = np.asarray(member * self.strides[turn] + self.number[turn], np.int64)
        cycle = self.cycle[turn]
        return moved + np.where(cycle, member // np.maximum(cycle, 1), 0) if cycle.any() else moved

    @property
    def period(self) -> int:
        """After so many members turns repeat."""
        return lcm(*np.unique(self.sizes[self.row] * np.maximum(self.cycle, 1)).tolist())

    def nbytes(self, wave: Ints, waves: int, overlap: Ints, overlap_bytes: Ints) -> Ints:
        """Bytes that the replica of each place moves in each of `waves` if `first` is 0, as [waves, places].

        `wave` [members, overlaps], `overlap` [turns] is that of each turn, ascending.
        """
        (members, overlaps), places = wave.shape, len(self.replicas)
        period = min(self.period, members)  # later members repeat the first ones
        alike = (wave * period + (np.arange(members) % period)[:, None]) * overlaps + np.arange(overlaps)
        counts = np.bincount(alike.reshape(-1))
        found = np.flatnonzero(counts)
        first_turn = np.searchsorted(overlap, np.arange(overlaps + 1))
        each, turn = runs_of(first_turn[found % overlaps], np.diff(first_turn)[found % overlaps])
        of_wave, member = np.divmod(found[each] // overlaps, period)
        row = self.row[turn]
        place = of_wave * places + self.starts[row] + self._moved_on(member, turn) % self.sizes[row]
        nbytes = (counts[found] * overlap_bytes[found % overlaps])[each]
        moved = np.bincount(place, nbytes, minlength=waves * places)  # exact up to 2**53
        return moved.astype(np.int64).reshape(waves, places)

    def moved_from(self, first: Numbers) -> Ints:
        """[..., places]: the place of which each gets the bytes if `first`, a number or [..., 1], is not 0."""
        row = self.row_of
        return self.starts[row] + (np.arange(len(row)) - self.starts[row] - first) % self.sizes[row]

    def ranks(self, grid: NDArray[np.int32]) -> NDArray[np.int32]:
        """The rank of each place [places]; `grid` [parts, replicas] has those of the parts."""
        return grid[self.parts[self.row_of], self.replicas]


def _mixed(row: Ints, cycle: Ints, facing: Turns) -> Ints:
    """Numbers of turns by which each source meets every end of its legs. In step, it would meet a few of them only:

        ends of legs 0 to 7     0 1 2 3  0 1 2 3
        sources, in step        0 1 2 3  0 1 2 3
        sources, mixed          0 1 2 3  1 2 3 0

    Turns count on from one row of ends to the next. After each common cycle they skip a number; so do members, of which each
    may have a few turns alone.
    """
    order = np.argsort(facing.row, kind="stable")
    number = np.empty_like(row)
    number[order] = order_within(row[order])
    return np.asarray(number + number // cycle)


@dataclass(frozen=True, eq=False)
class Work:
    """What there is to distribute over the places of turns: the same for transfer groups that move equal overlaps."""

    turns: Turns
    cost: Ints  # [waves, places], if `first` is 0

    @cached_property
    def total(self) -> int:
        return int(self.cost.sum())

    @cached_property
    def is_even(self) -> bool:
        """Whether all replicas of a row serve equally much in each wave, whichever begins."""
        return bool((self.cost == self.cost[:, self.turns.starts[self.turns.row_of]]).all())

    @cached_property
    def busy_waves(self) -> Ints:
        """The waves in which it costs anything."""
        return np.flatnonzero(self.cost.any(axis=1))

    @cached_property
    def busy_cost(self) -> Ints:
        """[busy waves, places]: `cost` in them."""
        return self.cost[self.busy_waves]


@dataclass(frozen=True, eq=False)
class Share:
    """What one transfer group has to distribute. Those that have the same to distribute over the same ranks are one."""

    work: Work
    ranks: NDArray[np.int32]  # [places], of `world`
    world: int
    members: int
    alike: Hashable  # shares with equal ones have the same rows of ranks

    @cached_property
    def places(self) -> Ints:
        """[busy waves, places]: of each in the loads [waves, world] of all ranks, as one row."""
        return np.asarray(self.work.busy_waves[:, None] * self.world + self.ranks)


def first_replicas(shares: Sequence[Share]) -> list[int]:
    """`first` of each share, so that ranks bear equally much in every wave. All shares have as many waves and ranks.

    The largest choose first: each puts its uneven remainder on the least loaded ranks. If all replicas serve equally
    much, a round robin goes on where the one before it stopped, so that pairs of ranks exchange equally much. Two
    replicas serve the embedding's halves; the same two serve the output layer's halves, the other way round.
    """
    load = np.zeros(len(shares[0].work.cost) * shares[0].world if shares else 0, np.int64)
    firsts = [0] * len(shares)
    members_before: dict[Hashable, int] = {}
    for index in sorted(range(len(shares)), key=lambda i: (-shares[i].work.total, i)):
        share = shares[index]
        if share.work.is_even:
            firsts[index] = members_before.get(share.alike, 0) % int(share.work.turns.sizes.max(initial=1))
            members_before[share.alike] = firsts[index] + share.members
            cost = share.work.busy_cost
        else:
            firsts[index] = _least_busy_first(load[share.places], share.work)
            cost = share.work.busy_cost.take(share.work.turns.moved_from(firsts[index]), axis=1)
        np.add.at(load, share.places.reshape(-1), cost.reshape(-1))
    return firsts


def _least_busy_first(load: Ints, work: Work) -> int:
    """The `first` that leaves the lowest peaks on `load` [busy waves, places], added over waves.

    Of equals that which adds most where there is least: where all leave the same peaks, they must not all begin at one
    replica. Then the lowest one.
    """
    widest, cost = int(work.turns.sizes.max()), work.busy_cost
    firsts = np.arange(0, widest, max(1, widest // _FIRSTS_TRIED))
    froms = [*work.turns.moved_from(firsts[:, None])]
    total = np.array([(cost.take(moved_from, axis=1) + load).max(axis=1).sum() for moved_from in froms])
    best = np.flatnonzero(total == total.min())
    if len(best) > 1:
        cost, load = _small(cost), _small(load)
        best = best[np.argmin([(cost.take(froms[each], axis=1) * load).sum() for each in best], keepdims=True)]
    return int(firsts[best[0]])


def _small(nbytes: Ints) -> Ints:
    """The bytes in units of which the largest number has 20 bits, so that sums of products fit into 64."""
    return nbytes >> max(0, int(nbytes.max(initial=0)).bit_length() - 20)


def runs_of(first: Ints, counts: Ints) -> tuple[Ints, Ints]:
    """So many numbers from each first one on, as (entry, number): [7, 2] and [1, 3] -> [0, 1, 1, 1], [7, 2, 3, 4]."""
    entry = np.repeat(np.arange(len(first)), counts)
    return entry, (first - (np.cumsum(counts) - counts))[entry] + np.arange(len(entry))


def order_within(values: Ints) -> Ints:
    """For each value, how many equal ones come before it: [3, 7, 3] -> [0, 0, 1]."""
    by_value = np.argsort(values, kind="stable")
    starts = np.searchsorted(values[by_value], values[by_value], side="left")
    order = np.empty(len(values), np.int64)
    order[by_value] = np.arange(len(values)) - starts
    return order
