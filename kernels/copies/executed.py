"""What two ranks will execute, compared before the first byte: the rows that were proven are the rows that move.

The tables that an executor walks hold places in the memory of one rank. Read back through that rank's layout, they say
which element of which parameter lies at which byte of a message, in which dtype:

    train:0   tensor qkv, elements 64 to 128   ->  message 3, bytes 0 to 128  ->  rows 4 to 8 of q_proj, bfloat16
    gen:2     message 3, bytes 0 to 128        ->  tensor q, elements 0 to 64 ->  rows 4 to 8 of q_proj, bfloat16

Both ends of a pair publish a digest of all this and of the order of their transfers. If an end would read or write
anything else than the other one expects, the digests differ. A generation rank also checks that it fills each of its
tensors once.

A schedule without a plan behind it does not say where parameters lie. Its pairs compare names, sizes, order and the bytes
of messages, and each rank compares its tables with its own transfers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from hashlib import blake2b

import numpy as np

from mcore_reshard.planner.plan.held import Held
from mcore_reshard.planner.plan.schedule import Schedule

from .bind import BoundSchedule
from .box_sums import PRIME, number_of, sums_of
from .read_back import Entries, Executed, TableReader
from .tiling import untiled

__all__ = ["Executed", "ExecutedTables", "Program", "executed_digests", "first_difference", "named_difference"]

Program = tuple[BoundSchedule, Sequence[Executed]]  # what a kind of refit binds, and the tables of its executors
_TOLD = 2000  # parameters whose sums two ranks tell each other to find the first that differs


class ExecutedTables:
    """All that a rank will execute in a session: in a refit of everything and, if there is another kind, in that one.

    `problems` are signs of damage that this rank can see alone. `digests` is by pair, as "train:0>gen:3". `balance` is their
    sum, less those of pairs that this rank receives from: 0 modulo PRIME over all ranks if both ends of each pair agree.
    """

    def __init__(self, programs: Sequence[Program]) -> None:
        self.problems: list[str] = []
        self.digests: dict[str, str] = {}
        self._entries: list[Entries] = []
        rows: dict[str, list[str]] = {}
        signs: dict[str, int] = {}
        for number, (bound, tables) in enumerate(programs):
            covered: dict[str, int] = {}
            held = _held(bound.schedule)
            for executed in tables:
                reader = TableReader(executed, number, _held(executed.bound.schedule))
                self.problems += reader.problems
                self._entries += reader.entries
                schedule = executed.bound.schedule
                for local, total in zip(schedule.tensors, reader.covered.tolist(), strict=True):
                    covered[local.name] = covered.get(local.name, 0) + total
                for pair, digest in _row_digests(schedule, held is not None).items():
                    rows.setdefault(pair, []).append(f"{number} {executed.wave} {digest}")
                    signs[pair] = 1 if schedule.world == "train" else -1
            if bound.schedule.world == "gen" and held is not None and number == 0:  # later programs leave out tensors
                self.problems += untiled(bound.schedule, covered)
        sums = self._sums()
        for pair in sorted(rows.keys() | sums.keys()):
            text = "\n".join(
                [*rows.get(pair, ()), *(f"{stage} {total}" for stage, total in sorted(sums.get(pair, {}).items()))]
            )
            self.digests[pair] = blake2b(text.encode(), digest_size=8).hexdigest()
        self.balance = sum(signs.get(pair, 1) * int(digest, 16) for pair, digest in self.digests.items()) % PRIME

    def details(self, pair: str) -> dict[str, dict[str, str]]:
        """By pipeline stage and parameter: a digest of what moves between a pair, of _TOLD parameters at most."""
        totals: dict[tuple[int, str], int] = {}
        for each in self._entries:
            peers = [peer for peer in np.unique(each.peer).tolist() if _pair(each.schedule, peer) == pair]
            chosen = np.isin(each.peer, peers)
            columns = np.concatenate([each.stage[:, None], each.parameter], axis=1)[chosen]
            keys, row_of = np.unique(columns, axis=0, return_inverse=True)
            for (stage, *parameter), total in zip(
                keys.tolist(), sums_of(row_of.reshape(-1), each.weights[chosen], len(keys)), strict=True
            ):
                key = each.schedule.stages[stage].pp_stage, each.name(parameter)
                totals[key] = (totals.get(key, 0) + total) % PRIME
        told: dict[str, dict[str, str]] = {}
        for (pp_stage, name), total in sorted(totals.items())[:_TOLD]:
            told.setdefault(str(pp_stage), {})[name] = f"{number_of(str(total)):016x}"[-8:]
        return told

    def _sums(self) -> dict[str, dict[int, int]]:
        """The sum of each pair in each pipeline stage."""
        sums: dict[str, dict[int, int]] = {}
        for each in self._entries:
            stages = len(each.schedule.stages)
            keys, row_of = np.unique(each.peer * stages + each.stage, return_inverse=True)
            for key, total in zip(keys.tolist(), sums_of(row_of.reshape(-1), each.weights, len(keys)), strict=True):
                of_pair = sums.setdefault(_pair(each.schedule, key // stages), {})
                pp_stage = each.schedule.stages[key % stages].pp_stage
                of_pair[pp_stage] = (of_pair.get(pp_stage, 0) + total) % PRIME
        return sums


def executed_digests(programs: Sequence[Program]) -> dict[str, str]:
    """The digest of each pair that this rank is in, as "train:0>gen:3" -> 16 hex digits, equal at both ends."""
    return ExecutedTables(programs).digests


def first_difference(digests: Mapping[str, Mapping[str, str]]) -> str | None:
    """The first pair of which its two ranks do not say the same; `digests` are those of each rank. None: all agree."""
    said: dict[str, list[str]] = {}
    for of_rank in digests.values():
        for pair, digest in of_rank.items():
            said.setdefault(pair, []).append(digest)
    return next((pair for pair, of_ends in said.items() if len(of_ends) != 2 or of_ends[0] != of_ends[1]), None)


def named_difference(pair: str, details: Sequence[Mapping[str, Mapping[str, str]]]) -> str:
    """The sentence about a pair that differs; `details` are those of its ends."""
    src, dst = pair.split(">")
    sides = [*details, {}, {}][:2]
    if len(details) < 2:
        return f"{src} and {dst} would not move the same bytes: only one of them has transfers with the other"
    first = next(_differing(*sides), None)
    where = "in another order or of other sizes" if first is None else f"first at stage {first[0]}, {first[1]}"
    return f"{src} and {dst} would not move the same bytes: their transfers differ, {where}"


def _differing(
    one: Mapping[str, Mapping[str, str]], other: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str]]:
    for stage in sorted(one.keys() | other.keys(), key=int):
        ours, theirs = one.get(stage, {}), other.get(stage, {})
        for name in sorted(ours.keys() | theirs.keys()):
            if ours.get(name) != theirs.get(name):
                yield stage, name


def _held(schedule: Schedule) -> Held | None:
    return None if schedule.view is None else schedule.view.held()


def _row_digests(schedule: Schedule, is_planned: bool) -> dict[str, str]:
    """By pair: parameters, extents, bytes and order of the transfers, as the schedule lists them."""
    extents = [number_of(str(box.extents)) for box in schedule.strided_boxes]
    boxes = np.array(extents or [0], np.int64)
    tables = []
    for number, (stage, table) in enumerate(zip(schedule.stages, schedule.tables, strict=True)):
        ids = [table.transfer_group.astype(np.int64), table.member.astype(np.int64)]
        if not is_planned:
            names = map(schedule.parameter_name, ids[0].tolist(), ids[1].tolist())
            ids = [np.array([number_of(name) for name in names], np.int64)]
        columns = [table.peer.astype(np.int64), *ids, table.nbytes, boxes[table.strided_box]]
        place = [np.full(len(table), value, np.int64) for value in (number, stage.pp_stage)]
        tables.append(np.stack([*columns, *place], axis=1))
    if not any(len(table) for table in tables):
        return {}
    rows = np.concatenate(tables)
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    peers, firsts = np.unique(rows[:, 0], return_index=True)
    parts = zip(peers.tolist(), np.split(rows[:, 1:], firsts[1:]), strict=True)
    return {_pair(schedule, peer): blake2b(part.tobytes(), digest_size=8).hexdigest() for peer, part in parts}


def _pair(schedule: Schedule, peer: int) -> str:
    """ "train:0>gen:3", from the sender to the receiver."""
    if schedule.world == "train":
        return f"{schedule.name}>{schedule.name_of('gen', peer)}"
    return f"{schedule.name_of('train', peer)}>{schedule.name}"
