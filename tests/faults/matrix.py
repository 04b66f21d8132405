"""The cells of the fault matrix: which fault, when, and who."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import cycle

TRAIN, GEN = ("train:0", "train:1"), ("gen:0", "gen:1")
STORE = "store"
DEADLINE_S = 4.0
PAUSES_S = {"freeze, short": 0.4 * DEADLINE_S, "freeze, long": DEADLINE_S + 2.5}

# In the order of a refit. Who can be the victim there.
PHASES: dict[str, tuple[str, ...]] = {
    "binding": TRAIN + GEN,
    "hello": TRAIN + GEN,
    "connecting": TRAIN + GEN,
    "between refits": TRAIN + GEN,
    "waiting for the call": TRAIN + GEN,
    "before reads": TRAIN + GEN,
    "first bucket": TRAIN + GEN,
    "middle bucket": TRAIN + GEN,
    "last bucket": TRAIN + GEN,
    "before export": TRAIN + GEN,
    "in export": TRAIN,
    "in load_weights": GEN,
    "in after_direct_writes": GEN,
    "before the vote": TRAIN + GEN,
    "voted": TRAIN + GEN,
    "outcome read": TRAIN + GEN,
    "recovering": TRAIN + GEN,
    "closing": TRAIN + GEN,
}
PREPARING = ("binding", "hello", "connecting")
_BULK = ("first bucket", "middle bucket", "last bucket", "before export")
_CALLBACKS = (
    "binding",
    "waiting for the call",
    "before reads",
    "in export",
    "in load_weights",
    "in after_direct_writes",
)
_ON_THE_STORE = ("hello", "waiting for the call", "before the vote")  # what the victim says there can be damaged
_WITH_PEERS = (
    "waiting for the call",
    "before reads",
    *_BULK,
    "in export",
    "in load_weights",
    "before the vote",
    "voted",
)
_SOCKETS = ("connection to the store dropped", "connection to the store half-closed")
_PEER_SOCKETS = ("connections to ranks dropped", "connections to ranks half-closed")
STORE_FAULTS = ("store killed", "store frozen, short", "store frozen, long", "store restarted")
RANK_FAULTS = (
    "kill", "freeze, short", "freeze, long", "interrupt", "exception", "corruption", *_SOCKETS, *_PEER_SOCKETS,
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Cell:
    """One session in which something breaks."""

    phase: str
    fault: str
    victim: str  # a seat, or STORE
    transport: str = "gloo"
    replica_ranks: int = 1
    staged: bool = False
    seat: str = ""  # that is in the phase when the store breaks
    train_ranks: int = 2
    replicas: int = 2  # of one training rank, two pass on to each other

    @property
    def at(self) -> str:
        """The seat whose phase it is."""
        return self.seat or self.victim

    @property
    def seats(self) -> list[str]:
        """All ranks of the session."""
        return [*TRAIN[: self.train_ranks], *(f"gen:{rank}" for rank in range(self.replicas * self.replica_ranks))]

    @property
    def ranks(self) -> tuple[int, int, int]:
        """What its plan depends on."""
        return self.replica_ranks, self.train_ranks, self.replicas

    @property
    def preparing(self) -> bool:
        return self.phase in PREPARING

    @property
    def is_pause(self) -> bool:
        """Whether all ends well without anybody's help."""
        return self.fault.endswith("short")

    @property
    def restarts(self) -> bool:
        """Whether a new process takes the victim's seat."""
        dies = self.fault == "kill" or self.phase == "closing"
        return dies and (self.victim.startswith("train:") or self.preparing or self.replicas == 1)

    def __str__(self) -> str:
        ranks = f", replicas of {self.replica_ranks}" if self.replica_ranks > 1 else ", staged" if self.staged else ""
        moment = f"{self.phase}{f' of {self.seat}' if self.seat else ''}"
        if self.train_ranks == 1:
            ranks += ", one to one" if self.replicas == 1 else ", one to two"
        return f"{self.fault} of {self.victim}, {moment}, {self.transport}{ranks}"


def cells(transport: str = "gloo") -> list[Cell]:
    """All cells of a transport. Kills hit every kind of victim; other faults take victims in turn."""
    found = list(_cells_of_replicas_of_one(transport))
    if transport == "golden":
        found = [cell for cell in found if cell.phase not in (*_BULK, "before reads", *PREPARING)]
    else:
        found += [*_cells_of_larger_replicas(transport), *_staged_cells(transport), *_cells_of_a_relay(transport)]
    return [*dict.fromkeys(found)]


def _cells_of_replicas_of_one(transport: str) -> Iterator[Cell]:
    for number, (phase, victims) in enumerate(PHASES.items()):
        start = number % len(victims)
        turn = cycle(victims[start:] + victims[:start])
        yield from (Cell(phase, "kill", victim, transport) for victim in victims)
        for fault in ("freeze, long", "interrupt"):
            yield from (Cell(phase, fault, next(turn), transport) for _ in range(2))
        for fault in ("freeze, short", *_SOCKETS):
            yield Cell(phase, fault, next(turn), transport)
        if phase in _WITH_PEERS:
            yield from (Cell(phase, fault, next(turn), transport) for fault in _PEER_SOCKETS)
        if phase in _CALLBACKS:
            callers = [seat for seat in victims if phase != "before reads" or seat in TRAIN]
            if not (transport == "golden" and phase == "waiting for the call"):  # it asks for no tensors
                yield from (Cell(phase, "exception", victim, transport) for victim in callers[:2])
        if phase in (*_ON_THE_STORE, *(_BULK[:3] if transport == "gloo" else ())):
            yield Cell(phase, "corruption", next(turn), transport)
        if phase == "in export":
            yield Cell(phase, "corruption", "train:0", transport)
        if phase != "binding":
            yield from (Cell(phase, fault, STORE, transport, seat=next(turn)) for fault in STORE_FAULTS)


def _cells_of_larger_replicas(transport: str) -> Iterator[Cell]:
    """Where one rank's death takes another one out of the session."""
    for phase in ("connecting", "between refits", "middle bucket", "in load_weights", "before the vote", "recovering"):
        yield Cell(phase, "kill", "gen:1", transport, replica_ranks=2)
    for phase in ("middle bucket", "voted"):
        yield Cell(phase, "freeze, long", "gen:3", transport, replica_ranks=2)
        yield Cell(phase, "interrupt", "gen:2", transport, replica_ranks=2)


def _cells_of_a_relay(transport: str) -> Iterator[Cell]:
    """Where replicas get half of everything from each other, in waves."""
    seats = TRAIN[:1] + GEN
    turn = cycle(seats)
    for phase in ("connecting", *_BULK[:3], "before the vote", "recovering"):
        for fault in ("kill", "freeze, long", "interrupt"):
            victims = seats if phase == "middle bucket" or (fault == "kill" and phase in _BULK) else (next(turn),)
            yield from (Cell(phase, fault, victim, transport, train_ranks=1) for victim in victims)
    for fault in ("freeze, short", *_PEER_SOCKETS):
        yield Cell("middle bucket", fault, next(turn), transport, train_ranks=1)


def _staged_cells(transport: str) -> Iterator[Cell]:
    """Where bytes land in a second buffer first."""
    victims = cycle(GEN + TRAIN)
    for phase in (
        "middle bucket",
        "in load_weights",
        "in after_direct_writes",
        "before the vote",
        "voted",
        "outcome read",
    ):
        for fault in ("kill", "interrupt", "freeze, long"):
            victim = next(each for each in victims if each in PHASES[phase])
            yield Cell(phase, fault, victim, transport, staged=True)
        yield Cell(phase, "store restarted", STORE, transport, staged=True, seat="gen:0")


SMOKE = (
    Cell("between refits", "kill", "gen:1"),
    Cell("middle bucket", "kill", "train:1"),
    Cell("in load_weights", "exception", "gen:0"),
    Cell("first bucket", "corruption", "train:0"),
    Cell("voted", "interrupt", "gen:1"),
    Cell("waiting for the call", "freeze, short", "gen:0"),
    Cell("in after_direct_writes", "freeze, long", "gen:1"),
    Cell("before the vote", "connection to the store dropped", "train:1"),
    Cell("in load_weights", "kill", "gen:1", "golden"),
    Cell("before the vote", "store killed", STORE, seat="gen:0"),
    Cell("voted", "store frozen, long", STORE, seat="train:1"),
    Cell("outcome read", "store restarted", STORE, "golden", seat="train:1"),
    Cell("recovering", "kill", "gen:0"),
    Cell("waiting for the call", "kill", "train:0"),
    Cell("before reads", "interrupt", "gen:1"),
    Cell("middle bucket", "kill", "gen:1", replica_ranks=2),
    Cell("in load_weights", "kill", "gen:1", staged=True),
    Cell("middle bucket", "kill", "gen:0", train_ranks=1, replicas=1),
    Cell("middle bucket", "kill", "gen:0", train_ranks=1),
    Cell("middle bucket", "freeze, long", "gen:1", train_ranks=1),
)
