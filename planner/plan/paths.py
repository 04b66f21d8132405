"""How every overlap reaches every replica of its destination: straight from a training rank, or passed on by replicas.

A transfer group's parts have replicas on both ends. `Sites` says which of them share a GPU or an NVLink domain. Without
sites every rank is far from every other. One overlap, which four replicas of the engine need, on two hosts:

    straight     train -> 0, train -> 1, train -> 2, train -> 3        each replica gets it from the trainer
    share        train -> 0, train -> 3;    0 -> 1, 3 -> 2             it enters a host once, and NVLink does the rest
    relay        train -> 0;    0 -> 3;     0 -> 1, 3 -> 2             it leaves the trainer once as well

Where a training rank is on the replica's own GPU, the replica gets it from there. Where one is on its host, too; to relay,
one replica of that host gets it and passes it on. Which one of several ranks sends or receives is a matter of turns, see
`balance`, and between hosts of `rails`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import chain
from math import lcm
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from .balance import Ints, Numbers, Row, Rows, Turns, order_within, runs_of, wave_of
from .rails import Rails, exchanged, rows_on_rails, rows_that_exchange

OWN_GPU, NVLINK, NIC = LINKS = 0, 1, 2  # the nearest first
LINK_NAMES = {OWN_GPU: "own GPU", NVLINK: "NVLink", NIC: "NIC"}
HopKind = Literal["train", "relay", "share"]  # from the trainer; between domains; within a domain
InDomains = dict[int, tuple[list[int], int]]  # by domain: replicas of one part, and the number of their row


@dataclass(frozen=True, eq=False)
class Sites:
    """Where the replicas of both ends are: equal numbers are one GPU, or one NVLink domain."""

    src_gpus: Ints  # [source parts, replicas]
    src_domains: Ints
    dst_gpus: Ints  # [destination parts, replicas]
    dst_domains: Ints
    # [source parts, destination parts, replicas]: which are on a rail of some source; None: no matter, or all.
    on_rail: NDArray[np.bool_] | None = None
    # By (destination part, replica): who receives by NIC in turn for it. Numbers from that of replicas on are carriers.
    turns: Mapping[tuple[int, int], tuple[int, ...]] = field(default_factory=dict)
    carriers: int = 0
    rows: Rows = field(default_factory=Rows, repr=False)  # of all legs that were asked for; sites may share them
    # The replicas of each domain, by destination part, with the row that they are over NICs; sites with one `dst_domains`
    # may share them.
    in_domains: dict[int, InDomains] = field(default_factory=dict, repr=False)
    paths: dict[Hashable, Paths] = field(default_factory=dict, init=False, repr=False)  # of what is moved between them
    _legs: dict[tuple[int, int, bool, bool], Ints] = field(default_factory=dict, init=False, repr=False)
    _sources: dict[int, tuple[dict[int, int], dict[int, int], int]] = field(
        default_factory=dict, init=False, repr=False
    )

    @cached_property
    def key(self) -> Hashable:
        """Equal for sites that differ in nothing but numbers: the same ranks are near each other, in the same order."""
        return self.src_gpus.shape, self.dst_gpus.shape, self._nearness, tuple(self.turns.items())

    @property
    def replicas(self) -> int:
        """Of each destination part; carriers have the numbers from there on."""
        return self.dst_gpus.shape[1]

    @property
    def _nearness(self) -> bytes:
        """Who is on the GPU, in the domain, and on a rail of whom."""
        rails = b"" if self.on_rail is None else self.on_rail.tobytes()
        numbers, domains = np.unique(self.dst_domains, return_inverse=True)
        sources = self.src_domains - self.src_domains.min()  # gaps between numbers make another key: no harm, and fast
        near = _index_of(numbers, self.src_domains)
        if (near < 0).all():  # nor does anybody share a GPU
            return domains.tobytes() + sources.tobytes() + rails
        gpus, own = np.unique(self.dst_gpus, return_inverse=True)
        columns = domains, sources, near, own, _index_of(gpus, self.src_gpus)
        return b"".join(each.tobytes() for each in columns) + rails

    @classmethod
    def apart(cls, src_shape: tuple[int, ...], dst_shape: tuple[int, ...]) -> Sites:
        """Sites that are all far from each other."""
        src = np.arange(src_shape[0] * src_shape[1], dtype=np.int64).reshape(src_shape)
        dst = src.size + np.arange(dst_shape[0] * dst_shape[1], dtype=np.int64).reshape(dst_shape)
        return cls(src, src, dst, dst)

    def legs(self, src_part: int, dst_part: int, *, relay: bool, share: bool) -> Ints:
        """[legs, 2]: who sends and who receives, of each leg from the trainer of an overlap of these parts, in `rows`."""
        key = src_part, dst_part, relay, share
        if key not in self._legs:  # many patterns have overlaps of these parts
            self._legs[key] = np.array(self._legs_between(*key), np.int64).reshape(-1, 2)
        return self._legs[key]

    def _legs_between(self, src_part: int, dst_part: int, relay: bool, share: bool) -> list[tuple[int, int]]:
        on_gpu, in_domain, everyone = self._sources_of(src_part)
        on_own, beside, over_nic = (self.rows.alone(dst_part, self.replicas, link) for link in LINKS)
        gpus, far = self.dst_gpus[dst_part].tolist(), []
        own: list[tuple[int, int]] = []  # (replica, who sends) on the replica's GPU
        near: list[tuple[list[int], int]] = []  # (replicas, who sends) in their domain
        for domain, (replicas, row) in self._in_domains_of(dst_part).items():
            if domain not in in_domain:
                far.append((replicas, row))
                continue
            own += [(replica, on_gpu[gpus[replica]]) for replica in replicas if gpus[replica] in on_gpu]
            near.append(([replica for replica in replicas if gpus[replica] not in on_gpu], in_domain[domain]))
        legs = [(sender, on_own[replica]) for replica, sender in sorted(own)]
        if relay and share:
            together = sorted((mates, sender) for mates, sender in near if mates)
            legs += [(sender, self.rows.number_of(dst_part, tuple(mates), NVLINK)) for mates, sender in together]
        else:
            alone = sorted((replica, sender) for mates, sender in near for replica in mates)
            legs += [(sender, beside[replica]) for replica, sender in alone]
        if relay and far:
            cells = [replica for replicas, _ in far for replica in replicas]
            return [*legs, (everyone, self.rows.number_of(dst_part, tuple(cells if share else sorted(cells)), NIC))]
        if share:
            return [*legs, *((everyone, row) for _, row in far)]
        return [
            *legs,
            *((everyone, over_nic[replica]) for replica in sorted(r for replicas, _ in far for r in replicas)),
        ]

    def _in_domains_of(self, dst_part: int) -> InDomains:
        if dst_part not in self.in_domains:
            self.in_domains[dst_part] = {
                domain: (replicas, self._row_by_nic(dst_part, replicas))
                for domain, replicas in _by_number(self.dst_domains[dst_part]).items()
            }
        return self.in_domains[dst_part]

    def _row_by_nic(self, dst_part: int, replicas: list[int]) -> int:
        """The row of a domain's replicas that get bytes by NIC, with their carriers."""
        turns = [self.turns.get((dst_part, replica), (replica,)) for replica in replicas]
        taken = tuple(each[turn % len(each)] for turn in range(max(map(len, turns))) for each in turns)
        has_carriers = any((dst_part, replica) in self.turns for replica in replicas)
        return self.rows.number_of(dst_part, taken, NIC, tuple(replicas) if has_carriers else ())

    def _sources_of(self, src_part: int) -> tuple[dict[int, int], dict[int, int], int]:
        """Which rows of `rows` send, of a part's replicas: those of each GPU, of each domain, and all of them."""
        if src_part not in self._sources:
            by_gpu, by_domain = (_by_number(each[src_part]) for each in (self.src_gpus, self.src_domains))
            everyone = self.rows.number_of(src_part, _from_domain_to_domain(self.src_domains[src_part]), NIC)
            self._sources[src_part] = (
                {gpu: self.rows.number_of(src_part, tuple(own), OWN_GPU) for gpu, own in by_gpu.items()},
                {domain: self.rows.number_of(src_part, tuple(near), NVLINK) for domain, near in by_domain.items()},
                everyone,
            )
        return self._sources[src_part]


def _as_they_come(numbers: Ints) -> tuple[Ints, Ints]:
    """Each number once, as they come, and where each of `numbers` is among these: [7, 2, 7] -> [7, 2], [0, 1, 0]."""
    first = np.full(numbers.max(initial=-1) + 1, -1)
    first[numbers[::-1]] = np.arange(len(numbers))[::-1]
    found = np.flatnonzero(first >= 0)
    found = found[np.argsort(first[found])]
    first[found] = np.arange(len(found))
    return found, first[numbers]


def _index_of(known: Ints, numbers: Ints) -> Ints:
    """Where each number is in `known`, which ascends; -1 where it is not."""
    index = np.minimum(np.searchsorted(known, numbers), len(known) - 1)
    return np.where(known[index] == numbers, index, -1)


def _by_number(numbers: Ints) -> dict[int, list[int]]:
    """The replicas of each GPU or domain: [4, 4, 7] -> {4: [0, 1], 7: [2]}."""
    replicas: dict[int, list[int]] = {}
    for replica, number in enumerate(numbers.tolist()):
        replicas.setdefault(number, []).append(replica)
    return replicas


def _each_of(rows: Sequence[Sequence[int]], row: Ints) -> tuple[Ints, Ints]:
    """The numbers in the row of each entry, as (entry, number): [(3, 4), (5,)] and [1, 0] -> [0, 1, 1], [5, 3, 4]."""
    sizes = np.array([*map(len, rows)], np.int64)
    numbers = np.fromiter(chain.from_iterable(rows), np.int64, int(sizes.sum()))
    entry, place = runs_of((np.cumsum(sizes) - sizes)[row], sizes[row])
    return entry, numbers[place]


def _from_domain_to_domain(domains: Ints) -> tuple[int, ...]:
    """The numbers of these replicas, from domain to domain: [4, 4, 7, 7] -> (0, 2, 1, 3).

    So a few turns in a row are of all hosts. With PXN, NIC i of each of them sends what they bring to rail i.
    """
    return tuple(np.lexsort((domains, order_within(domains))).tolist())


@dataclass(frozen=True, slots=True)
class Hop:
    """Legs of the paths of some members: each takes one overlap from one replica to another.

    Those of several transfer groups at once are [groups, members, legs].
    """

    kind: HopKind
    overlap: Ints  # [legs]
    src: Ints  # [members, legs]: replica of the source part, or after the first hop of the destination part
    dst: Ints  # [members, legs]: replica of the destination part
    runs: NDArray[np.bool_]  # [members, legs]: whether the member takes that leg
    link: Ints  # [legs]


@dataclass(frozen=True)
class Paths:
    """The paths of the overlaps of a transfer group; they depend on its cuts, and on where replicas are."""

    src_parts: Ints  # [overlaps]
    dst_parts: Ints
    overlap_bytes: Ints
    sites: Sites
    relay: bool  # each overlap leaves the trainer once
    share: bool  # each overlap enters an NVLink domain once
    _kept: dict[tuple[int, ...], Ints] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def pulls(self) -> Turns:
        """The turns of training ranks, one for each leg of the first hop."""
        return self._first_hop[1]

    @property
    def landings(self) -> Turns:
        """The turns of the generation ranks that these legs lead to."""
        return self._first_hop[2]

    @property
    def pulled(self) -> Ints:
        """[legs of the first hop]: the overlap of each."""
        return self._first_hop[0]

    @cached_property
    def passes_on(self) -> bool:
        """Whether replicas pass anything on."""
        return any(row.passes_to for row in self.landings.rows)

    @cached_property
    def passed_on(self) -> Ints:
        """[overlaps]: how many replicas get each from another one."""
        straight = np.bincount(self.pulled, minlength=len(self.src_parts))
        return np.asarray(self.sites.replicas - straight, np.int64)

    def waves(self, members: int, waves: int, lag: int) -> Ints:
        """[members, overlaps]: in which of `waves` waves each overlap moves, through all its hops."""
        pairs = self.src_parts * len(self.sites.dst_gpus) + self.dst_parts
        return self._keep_by_wave(3, members, waves, lag, lambda: wave_of(members, pairs, waves, lag))

    @property
    def relays(self) -> bool:
        """Whether they pass anything on to other domains."""
        return len(self._cells[0]) > 0

    @property
    def shares(self) -> bool:
        """Whether they pass anything on within domains."""
        return len(self._mates[0]) > 0

    @cached_property
    def period(self) -> int:
        """After so many members, the turns of generation ranks repeat."""
        return lcm(*self.landings.sizes.tolist(), *(self._cells[1].sizes.tolist() if self.relay else ()))

    @cached_property
    def _first_hop(self) -> tuple[Ints, Turns, Turns]:
        nbytes: Counter[tuple[int, int]] = Counter()
        ends = [*zip(self.src_parts.tolist(), self.dst_parts.tolist(), strict=True)]
        for parts, size in zip(ends, self.overlap_bytes.tolist(), strict=True):
            nbytes[parts] += size
        legs = [self.sites.legs(*parts, relay=self.relay, share=self.share) for parts in nbytes]
        counts = np.array([len(between) for between in legs], np.int64)
        rows = np.concatenate([np.zeros((0, 2), np.int64), *legs])
        if self.sites.on_rail is not None and self.share and not self.relay:
            self._put_on_rails(rows, np.repeat(np.array([(*parts, size) for parts, size in nbytes.items()]), counts, 0))
        place = {parts: number for number, parts in enumerate(nbytes)}
        overlap, leg = runs_of(
            *(each[[place[parts] for parts in ends]] for each in (np.cumsum(counts) - counts, counts))
        )
        (sources, src), (destinations, dst) = ((found, row[leg]) for found, row in map(_as_they_come, rows.T))
        landings = Turns.numbered(self.sites.rows, destinations, dst)
        return overlap, Turns.numbered(self.sites.rows, sources, src, facing=landings), landings

    def _put_on_rails(self, rows: Ints, parts: Ints) -> None:
        """Of `rows` [legs, 2] that get bytes over NICs, keep the replicas on rails of the source where these share evenly.

        `parts` [legs, 3]: source part, destination part, and bytes between these, of each leg.
        """
        assert self.sites.on_rail is not None
        _, links, sizes, *_ = self.sites.rows.columns()
        turns = np.flatnonzero((links[rows[:, 1]] == NIC) & (sizes[rows[:, 1]] > 1))
        if self.sites.turns:
            known = self.sites.rows
            turns = turns[[not known[number].passed_to for number in rows[turns, 1].tolist()]]
        src_part, _, nbytes = parts[turns].T
        rows[turns, 1] = rows_on_rails(self.sites.rows, rows[turns, 1], src_part, nbytes, self.sites.on_rail)

    @cached_property
    def _cells(self) -> tuple[Ints, Turns]:
        """Where one leg leads to several domains: (that leg, turn) of each of them."""
        if not self.relay:
            none = np.zeros(0, np.int64)
            return none, Turns.of([], none)
        rows: dict[Row, int] = {}
        cells_of: list[list[int]] = []  # of each row of landings
        for landing in self.landings.rows:
            members: dict[int, list[int]] = {}
            for replica in landing.replicas if landing.link == NIC else ():
                members.setdefault(int(self._cell_of(landing.part, replica)), []).append(replica)
            cells = [Row(landing.part, tuple(cell), NIC) for cell in members.values()]
            cells_of.append([rows.setdefault(cell, len(rows)) for cell in cells if len(landing.replicas) > 1])
        leg_of, cell = _each_of(cells_of, self.landings.row)
        return leg_of, Turns.of([*rows], cell)

    @cached_property
    def _mates(self) -> tuple[Ints, Ints, Ints]:
        """What is passed on within domains, as (leg of the first hop, cell or -1, replica that it is passed on to)."""
        leg_of, cells = self._cells
        of_cells = [row.passes_to for row in cells.rows]
        of_rows = [() if self.relay and row.link == NIC else row.passes_to for row in self.landings.rows]
        (cell, from_cell), (leg, from_leg) = (
            _each_of([mates if self.share else () for mates in of_each], row)
            for of_each, row in ((of_cells, cells.row), (of_rows, self.landings.row))
        )
        return np.append(leg_of[cell], leg), np.append(cell, np.full(len(leg), -1)), np.append(from_cell, from_leg)

    def _cell_of(self, part: Ints | int, replica: Ints | int) -> Ints:
        """A number that the replicas share that one of them passes on to: that of the domain, if it does."""
        cell = self.sites.dst_domains[part, replica] if self.share else replica
        return np.asarray(cell, np.int64)

    def first_hop(
        self,
        first_src: Numbers,
        first_dst: Numbers,
        member: Ints,
        only: NDArray[np.bool_] | None = None,
        to: int | None = None,
        rails: Rails | None = None,
    ) -> Hop:
        """What leaves the trainer for these members; `only` [overlaps] says of which overlaps.

        The replicas that begin may be those of several transfer groups, as [groups, 1, 1]. With `to`, legs that cannot
        lead to this replica are left out. `rails` are those of these replicas, if they are in several domains; sites with
        equal keys may have others.
        """
        overlap, pulls, landings = self._first_hop
        chosen = np.ones(len(overlap), bool) if only is None else only[overlap]
        if to is not None:
            chosen &= np.isin(landings.row, landings.row_of[landings.replicas == to])
        legs, every = np.flatnonzero(chosen), member[:, None]
        src, dst = pulls.replica(first_src, every, legs), landings.replica(first_dst, every, legs)
        if rails is not None:
            self._exchange(src, (first_src, first_dst), member, legs, rails)
        return Hop("train", overlap[legs], src, dst, np.ones(src.shape, bool), pulls.links[pulls.row[legs]])

    def _exchange(self, src: Ints, firsts: tuple[Numbers, Numbers], member: Ints, legs: Ints, rails: Rails) -> None:
        """Put sources on the rails of their ends in `src` [members, legs], or in that of several transfer groups."""
        overlap, pulls, landings = self._first_hop
        rows = rows_that_exchange(pulls, landings, self.overlap_bytes[overlap], rails, NIC)
        here = rows[pulls.row[legs]]
        if not here.any():
            return
        rows &= np.isin(np.arange(len(rows)), pulls.row[legs])
        others = np.flatnonzero(rows[pulls.row])  # all legs of these rows, of all members
        every, of = np.arange(rails.members)[:, None], overlap[others]
        taken, ends = pulls.replica(firsts[0], every, others), landings.replica(firsts[1], every, others)
        src_rail, dst_rail = rails.src[self.src_parts[of], taken], rails.dst[self.dst_parts[of], ends]
        row = np.arange(np.size(firsts[0]))[:, None, None] * len(rows) + pulls.row[others]  # of each transfer group
        columns = np.broadcast_arrays(taken, src_rail, dst_rail, row, self.overlap_bytes[of])
        taken = exchanged(*(column.reshape(-1) for column in columns)).reshape(taken.shape)
        src[..., here] = taken[..., member[:, None], np.searchsorted(others, legs[here])]

    def later_hops(self, first_dst: Numbers, member: Ints, only: NDArray[np.bool_] | None = None) -> list[Hop]:
        """What replicas pass on to each other for these members: between domains, then within them."""
        hops: list[Hop] = []
        if not self.passes_on:
            return hops
        every = member[:, None]
        if self.relays:
            leg_of = self._cells[0]
            turns = np.arange(len(leg_of)) if only is None else np.flatnonzero(only[self.pulled[leg_of]])
            overlap = self.pulled[leg_of[turns]]
            root, lander = self.landings.replica(first_dst, every, leg_of[turns]), self._lander(first_dst, every, turns)
            is_on_way = root != lander
            hops.append(Hop("relay", overlap, root, lander, is_on_way, np.full(len(turns), NIC)))
        if self.shares:
            leg, cell, mate = self._mates
            if only is not None:
                chosen = only[self.pulled[leg]]
                leg, cell, mate = leg[chosen], cell[chosen], mate[chosen]
            landed = self.landings.replica(first_dst, every, leg)
            src = np.where(cell < 0, landed, self._lander(first_dst, every, cell)) if self.relay else landed
            mates = np.broadcast_to(mate, src.shape)
            hops.append(Hop("share", self.pulled[leg], src, mates, src != mates, np.full(len(leg), NVLINK)))
        return hops

    def _lander(self, first_dst: Numbers, member: Ints, cell: Ints) -> Ints:
        """Which replica of a cell gets what one leg brings for several: in the cell where that leg ends, its end."""
        leg_of, cells = self._cells
        if not len(leg_of):
            return np.zeros(np.broadcast_shapes(member.shape, cell.shape), np.int64)
        part = self.dst_parts[self.pulled[leg_of[cell]]]
        root, lander = self.landings.replica(first_dst, member, leg_of[cell]), cells.replica(first_dst, member, cell)
        return np.where(self._cell_of(part, root) == self._cell_of(part, lander), root, lander)

    def pulled_bytes(self, members: int, waves: int, lag: int) -> Ints:
        """Bytes that each replica of a row of `pulls` sends if the first one begins, as [waves, places]."""
        return self._keep_by_wave(0, members, waves, lag, lambda: self._moved_bytes(self.pulls, members, waves, lag))

    def landed_bytes(self, members: int, waves: int, lag: int) -> Ints:
        """Bytes that each replica of a row of `landings` gets from the trainer if the first one begins; in the same form."""
        return self._keep_by_wave(1, members, waves, lag, lambda: self._moved_bytes(self.landings, members, waves, lag))

    def _moved_bytes(self, turns: Turns, members: int, waves: int, lag: int) -> Ints:
        return turns.nbytes(self.waves(members, waves, lag), waves, self.pulled, self.overlap_bytes)

    def passed_bytes(self, members: int, first_dst: int) -> Ints:
        """Bytes that replicas pass on, as [2, links, parts, replicas]: what each sends, and what it gets from others."""
        period = self.period

        def count() -> Ints:
            parts, replicas = self.sites.dst_gpus.shape
            passed = np.zeros((2, len(LINKS), parts, replicas + self.sites.carriers), np.int64)
            member = np.arange(min(period, members))
            repeats = members // len(member) + (member < members % len(member))
            for hop in self.later_hops(first_dst, member):
                nbytes = np.where(hop.runs, repeats[:, None] * self.overlap_bytes[hop.overlap], 0)
                for end, replica in enumerate((hop.src, hop.dst)):
                    np.add.at(passed[end], (hop.link, self.dst_parts[hop.overlap], replica), nbytes)
            return passed

        return self._keep((2, members, first_dst % period), count)

    def _keep_by_wave(self, kind: int, members: int, waves: int, lag: int, count: Callable[[], Ints]) -> Ints:
        """As `_keep`, for what no lag changes where waves have equally many members."""
        return self._keep((kind, members, waves, lag if members % waves else 0), count)

    def _keep(self, key: tuple[int, ...], count: Callable[[], Ints]) -> Ints:
        if key not in self._kept:  # many transfer groups share it, and so do plans for more or fewer replicas
            self._kept[key] = count()
            self._kept[key].flags.writeable = False
        return self._kept[key]
