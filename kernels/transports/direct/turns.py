"""In which order copy engines read several GPUs: each reader begins with another one, and goes on as that one gets free.

    gen:0    train:0, then train:1
    gen:1    train:1, then train:0

On H200s a GPU that one engine reads gives it 381 GB/s. Two at once get 191 each, and the GPU that nobody reads meanwhile gives
nothing. So an order is as good as it keeps readers apart. Kernels, which read from all GPUs in turns of a tile, need none: they
reach 368 GB/s. Ranks that have sources in common compute the same order from the same bytes.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

import numpy as np

from mcore_reshard.planner.plan.schedule import Schedule

if TYPE_CHECKING:
    from .peer_signals import PeerSignals

Gpu = TypeVar("Gpu")
Pulls = Mapping[int, Mapping[Gpu, int]]  # bytes that each reader gets from each GPU, other than its own
Orders = dict[int, list[Gpu]]  # of each reader: the GPUs that it reads

# Times the least time of any order: no other order is sought; kernels take no longer.
_AS_GOOD_AS_ANY, _STILL_FASTER = 1.001, 1.04
# Readers times GPUs, more than a domain of NVLink has. An order of so many takes up to a second to find.
_MOST_PLACES = 4096


def may_use_engine(schedule: Schedule, *, checksums: bool) -> bool:
    """Whether copy engines help who reads: not where replicas pass weights on, nor with checksums, which kernels compute.

    Nor do training ranks push to a reader there, unless replicas are a chain.
    """
    return not (checksums or schedule.relayed or schedule.between_replicas)


def engine_orders(pulls: Pulls[Gpu], gpus: Sequence[Gpu]) -> Orders[Gpu]:
    """In which order each reader takes its GPUs, all of which are among `gpus`.

    Readers that are left out leave all to their kernels: engines would be in each other's way. Each set of readers that have
    GPUs in common, directly or through others, has orders of its own. Who reads one GPU needs no order.
    `gpus` are best in the order of the ranks on them: readers that are numbered alike then begin with the next GPU each.
    """
    given = {reader: {gpu: n for gpu, n in of_reader.items() if n} for reader, of_reader in sorted(pulls.items())}
    orders: Orders[Gpu] = {}
    for readers in _together(given):
        of_readers = {reader: given[reader] for reader in readers}
        found = _good_orders(of_readers, [gpu for gpu in gpus if any(gpu in each for each in of_readers.values())])
        orders |= found or {reader: [*each] for reader, each in of_readers.items() if len(each) == 1}
    return orders


def _together(pulls: Pulls[Gpu]) -> list[list[int]]:
    """Readers that have GPUs in common, directly or through others; those that read nothing are in none of the sets."""
    sets: list[tuple[set[Gpu], list[int]]] = []
    for reader, of_reader in pulls.items():
        gpus, readers = {*of_reader}, [reader]
        apart = []
        for each in sets:
            if each[0] & gpus:
                gpus, readers = gpus | each[0], each[1] + readers
            else:
                apart.append(each)
        sets = [*apart, (gpus, readers)] if of_reader else sets
    return [sorted(readers) for _, readers in sets]


def _good_orders(pulls: Pulls[Gpu], gpus: Sequence[Gpu]) -> Orders[Gpu]:
    """Of one set of readers; {} where engines would be in each other's way."""
    if len(pulls) * len(gpus) > _MOST_PLACES:
        return {}
    of_gpu: Counter[Gpu] = Counter()
    for of_reader in pulls.values():
        of_gpu.update(of_reader)
    least = max([*of_gpu.values(), *(sum(of_reader.values()) for of_reader in pulls.values())])
    orders = _rotated(pulls, gpus)
    takes = _bytes_until_done(pulls, orders)
    if takes > _AS_GOOD_AS_ANY * least:
        listed = _listed(pulls, gpus)
        if (of_listed := _bytes_until_done(pulls, listed)) < takes:
            orders, takes = listed, of_listed
    return orders if takes <= _STILL_FASTER * least else {}


def _rotated(pulls: Pulls[Gpu], gpus: Sequence[Gpu]) -> Orders[Gpu]:
    """All in the order of `gpus`, each from another one on: the best where all read all, or all but their own."""
    return {
        reader: [gpu for gpu in (*gpus[number % len(gpus) :], *gpus[: number % len(gpus)]) if gpu in pulls[reader]]
        for number, reader in enumerate(sorted(pulls))
    }


def _listed(pulls: Pulls[Gpu], gpus: Sequence[Gpu]) -> Orders[Gpu]:
    """Whatever can begin first comes first; of those that can, what leaves most to be read behind it."""
    readers = sorted(pulls)
    left = np.array([[pulls[reader].get(gpu, 0) for gpu in gpus] for reader in readers], np.int64)
    reader_free, gpu_free = np.zeros(len(readers), np.int64), np.zeros(len(gpus), np.int64)
    orders: Orders[Gpu] = {reader: [] for reader in readers}
    for _ in range(np.count_nonzero(left)):
        begin = np.where(left, np.maximum(reader_free[:, None], gpu_free), np.iinfo(np.int64).max)
        behind = np.maximum(left.sum(axis=1)[:, None], left.sum(axis=0))
        row, column = divmod(int(np.where(begin == begin.min(), behind, -1).argmax()), len(gpus))
        reader_free[row] = gpu_free[column] = begin[row, column] + left[row, column]
        left[row, column] = 0
        orders[readers[row]].append(gpus[column])
    return orders


def _bytes_until_done(pulls: Pulls[Gpu], orders: Orders[Gpu]) -> float:
    """How long all of it takes, in bytes of one GPU: readers of a GPU share it, and go on once they are done there."""
    now, at = 0.0, {reader: 0 for reader, order in orders.items() if order}
    left = {reader: float(pulls[reader][orders[reader][0]]) for reader in at}
    while at:
        sharing = Counter(orders[reader][number] for reader, number in at.items())
        rate = {reader: 1 / sharing[orders[reader][number]] for reader, number in at.items()}
        step = min(left[reader] / rate[reader] for reader in at)
        now += step
        for reader in [*at]:
            left[reader] -= step * rate[reader]
            if left[reader] <= 0.5:
                at[reader] += 1
                if at[reader] == len(orders[reader]):
                    del at[reader]
                else:
                    left[reader] = float(pulls[reader][orders[reader][at[reader]]])
    return now


# Of the keys under which readers say what they pull, and sources who reads them.
_PULLS, _READERS = "pulls/", "readers/"

_Pulled = tuple[int, str, int]  # a training rank, its GPU, bytes


def publish_readers(signals: PeerSignals) -> None:
    """A source tells who reads it."""
    signals.publish(sorted(signals.peers), prefix=_READERS)


def engine_turns(
    schedule: Schedule, gpus: Mapping[int, Collection[str]], own: str, signals: PeerSignals, *, helps: bool
) -> dict[int, int]:
    """Of which ranks of a reader's schedule a copy engine takes its share, and in which turn: all of them, or none.

    `gpus` are those of each rank, `own` is the reader's. Readers tell each other what they pull, as far as training ranks have
    readers in common: two who read different ranks of one GPU may not know of each other. One that no engine `helps` tells that
    it pulls nothing; kernels find their way between engines. What sources cast counts as well, also where they push it.
    """
    far = {rank: next(iter(of_rank)) for rank, of_rank in gpus.items() if len(of_rank) == 1 and own not in of_rank}
    nbytes = np.zeros(schedule.train_ranks, np.int64)
    for table in schedule.tables if helps else ():
        np.add.at(nbytes, table.peer, table.nbytes)
    own_pulls = [(rank, gpu, int(nbytes[rank])) for rank, gpu in sorted(far.items()) if nbytes[rank]]
    signals.publish(own_pulls, prefix=_PULLS)
    order = [*{gpu for _, gpu, _ in own_pulls}]
    if len(order) > 1:
        order = _agreed_order(schedule, own_pulls, signals)
    return {rank: order.index(gpu) for rank, gpu in far.items() if gpu in order}


def _agreed_order(schedule: Schedule, own_pulls: list[_Pulled], signals: PeerSignals) -> list[str]:
    """In which order a reader takes its GPUs, by what all readers tell; [] where no engine helps."""
    told = {schedule.rank: own_pulls}
    asked: set[int] = set()
    while new := {rank for pulled in told.values() for rank, _, _ in pulled} - asked:
        asked |= new
        readers = {reader for rank in sorted(new) for reader in _fetched_readers(schedule, rank, signals)}
        for reader in sorted(readers - told.keys()):
            told[reader] = _fetched_pulls(schedule, reader, signals)
    pulls: dict[int, Counter[str]] = defaultdict(Counter)
    first: dict[str, int] = {}  # rank on each GPU
    for reader, pulled in told.items():
        for rank, gpu, given in pulled:
            pulls[reader][gpu] += given
            first[gpu] = min(rank, first.get(gpu, rank))
    return engine_orders(pulls, sorted(first, key=first.__getitem__)).get(schedule.rank, [])


def _fetched_readers(schedule: Schedule, rank: int, signals: PeerSignals) -> list[int]:
    def parse(said: Any) -> list[int]:
        return [whole_number(reader, schedule.gen_ranks) for reader in said]

    return signals.fetch_from("train", rank, parse, _READERS, "who reads it")


def _fetched_pulls(schedule: Schedule, reader: int, signals: PeerSignals) -> list[_Pulled]:
    def parse(said: Any) -> list[_Pulled]:
        return [
            (whole_number(rank, schedule.train_ranks), str(gpu), whole_number(nbytes, 1 << 60))
            for rank, gpu, nbytes in said
        ]

    return signals.fetch_from("gen", reader, parse, _PULLS, "what it pulls")


def whole_number(said: Any, below: int) -> int:
    """A number from 0 on that another rank has published. Raises ValueError."""
    if type(said) is not int or not 0 <= said < below:
        raise ValueError(f"{said!r} is no number below {below}")
    return said
