"""Rails: bytes that leave a host by one NIC and enter the other host by the NIC of the same number.

In a rail-optimized cluster NIC i of every host hangs on leaf switch i. Between NICs of two numbers, bytes cross the
spine; or NVLink first, to the GPU beside the right NIC (PXN, NCCL's default where the two share a PCIe switch). So replicas
share the work by rails, where every NIC still carries as much. A trainer of tp=2, dp=2 and an engine of tp=1, dp=4, on
hosts of four GPUs:

    part 0 is on rails 0 and 2          enters at 0, 1, 2, 3 in turn        on rails: at 0 and 2
    part 1 is on rails 1 and 3          enters at 0, 1, 2, 3 in turn        on rails: at 1 and 3
    source of what enters at 2          rails 0 and 2 in turn               on rails: 2

Rails come second to balance. Where an engine of one rank gets everything by one NIC, the source on its rail could send
everything. Then the other sources would idle, so all of them take turns.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .balance import Ints, Rows, Turns, runs_of

_EQUAL = 1e-5  # sums of as many bytes differ by less
_NEARLY = 0.9  # of the bytes of a part: with less, few pairs of ranks exchange most, and rounds are less even


@dataclass(frozen=True, slots=True)
class Rails:
    """The rails of a transfer group's replicas."""

    src: Ints  # [source parts, replicas]
    dst: Ints  # [destination parts, replicas]
    members: int


def with_forwarders(
    members: NDArray[np.bool_], trains: NDArray[np.bool_], hosts: Ints, gpus: Ints, rails: Ints, *, relays: bool
) -> NDArray[np.bool_]:
    """Which ranks [ranks] need communicators of NCCL: `members`, who exchange bytes, and ranks beside them.

    NCCL sends to another host by the NIC on the receiver's rail, through the GPU beside it, if a member is there (source:
    `ncclTopoGetNetDev` of graph/search.cc, 2.28.9). So hosts that send have a member on the rails of those that receive, if a
    rank is there. Where members of both sides share GPUs, a communicator has one side of a host: these are training ranks.
    `trains` are the training ranks; `rails` of ranks without a GPU are -1. `relays`: generation ranks send to other hosts as well.
    """
    found, is_reached = members.copy(), (rails >= 0) & np.isin(rails, rails[members & ~trains])
    if np.isin(gpus[members & trains], gpus[members & ~trains]).any():
        return found | (trains & is_reached & np.isin(hosts, hosts[members & trains]))
    sends = members & (trains | relays)
    others = np.flatnonzero(is_reached & np.isin(hosts, hosts[sends]) & ~np.isin(gpus, gpus[members]))
    found[others[np.unique(gpus[others], return_index=True)[1]]] = True
    return found


def rows_on_rails(rows: Rows, number: Ints, src_part: Ints, nbytes: Ints, on_rail: NDArray[np.bool_]) -> Ints:
    """Who takes turns in place of rows of one host's replicas: those on rails of the source part, in `rows` as well.

    Entries [entries] are a row's `number`, and the source part that sends it so many bytes. `on_rail` [source parts,
    destination parts, replicas] says which replicas are on a rail of a source. Rows of which not all replicas would get as
    many bytes stay.
    """
    parts, _, sizes, starts, replicas = rows.columns()
    found, row = np.unique(number, return_inverse=True)
    first_place = np.cumsum(sizes[found]) - sizes[found]
    entry, place = runs_of(first_place[row], sizes[number])
    _, at = runs_of(starts[number], sizes[number])
    chosen = on_rail[src_part[entry], parts[number[entry]], replicas[at]]
    count = np.bincount(entry, chosen, len(number)).astype(np.int64)
    loads = np.bincount(place, chosen * (nbytes / np.maximum(count, 1))[entry])
    row_of = np.repeat(np.arange(len(found)), sizes[found])
    first = loads[first_place[row_of]]
    stays = np.bincount(row_of, np.abs(loads - first) > _EQUAL * first, len(found))
    stays += np.bincount(row, count == 0, len(found))
    ends = np.cumsum(count)
    on_rails, taken = replicas[at[chosen]], number.copy()
    for each in np.flatnonzero(stays[row] == 0).tolist():
        old, on_its_rail = rows[number[each]], on_rails[ends[each] - count[each] : ends[each]]
        taken[each] = rows.number_of(old.part, tuple(on_its_rail.tolist()), old.link, old.replicas)
    return taken


def rows_that_exchange(pulls: Turns, landings: Turns, nbytes: Ints, rails: Rails, link: int) -> NDArray[np.bool_]:
    """[rows of pulls]: those over this link whose sources are on the rails of their ends. `nbytes` [turns] of each."""
    shared = (pulls.links == link) & (pulls.sizes > 1)
    if not shared.any():
        return shared
    count = 1 + int(max(rails.src.max(initial=0), rails.dst.max(initial=0)))
    of_sources, of_ends = _by_rail(pulls, rails.src, count), _by_rail(landings, rails.dst, count)
    wanted = np.zeros((len(pulls.found), count))
    np.add.at(wanted, pulls.row, nbytes[:, None] * of_ends[landings.row])
    shares = wanted / np.maximum(wanted.sum(axis=1), 1)[:, None]
    meet = np.minimum(of_sources, shares).sum(axis=1)
    return np.asarray(shared & (meet >= _NEARLY))


def _by_rail(turns: Turns, rails: Ints, count: int) -> NDArray[np.float64]:
    """[rows, rails]: the share of each rail in a row's replicas."""
    shares = np.zeros((len(turns.found), count))
    row = turns.row_of
    np.add.at(shares, (row, rails[turns.parts[row], turns.replicas]), 1 / turns.sizes[row])
    return shares


def exchanged(sources: Ints, src_rail: Ints, dst_rail: Ints, row: Ints, nbytes: Ints) -> Ints:
    """The sources of legs, in another order: on the rails of the legs' ends, as far as there are as many. All are [legs].

    Legs of one row and of as many bytes exchange, so that every source sends as much as before.

        ends on rails       0  1  0  1
        sources on rails    0  0  1  1    ->    0  1  0  1
    """
    rails = 1 + int(max(src_rail.max(initial=0), dst_rail.max(initial=0)))
    _, size = np.unique(nbytes, return_inverse=True)
    alike = row * (int(size.max(initial=0)) + 1) + size.reshape(-1)
    of_src, of_dst = alike * rails + src_rail, alike * rails + dst_rail
    labels = (int(alike.max(initial=0)) + 1) * rails
    has, wants = np.bincount(of_src, minlength=labels), np.bincount(of_dst, minlength=labels)
    meet = np.minimum(has, wants)
    src_order, src_meets = _evenly(of_src, has, meet)
    dst_order, dst_meets = _evenly(of_dst, wants, meet)
    taken = np.empty_like(sources)
    taken[dst_order[dst_meets]] = sources[src_order[src_meets]]
    rest = [np.sort(order[~meets]) for order, meets in ((src_order, src_meets), (dst_order, dst_meets))]
    rest_src, rest_dst = (legs[np.argsort(alike[legs], kind="stable")] for legs in rest)
    taken[rest_dst] = sources[rest_src]
    return taken


def _evenly(label: Ints, size: Ints, chosen: Ints) -> tuple[Ints, NDArray[np.bool_]]:
    """The order by label, and which entries of it are chosen: so many of each label's, spread over them."""
    order = np.argsort(label, kind="stable")
    ordered = label[order]
    place = np.arange(len(label)) - (np.cumsum(size) - size)[ordered]
    size, chosen = size[ordered], chosen[ordered]
    return order, (place + 1) * chosen // size > place * chosen // size
