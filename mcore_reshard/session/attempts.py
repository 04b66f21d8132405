"""An attempt, its head and its call, and the seats of both worlds.

An attempt is one try to connect, or to refit. An epoch is a set of members whose transports are connected. It serves many
attempts, until its members change or an attempt fails. A replica is the smallest part of an engine that can come or go.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from mcore_reshard.kernels.errors import SessionError, VersionError
from mcore_reshard.kernels.rendezvous.exchange import Failure, parse_stored, stored_text
from mcore_reshard.kernels.rendezvous.rendezvous import SessionFailed

from .agreement import parse_word

PROTOCOL = 31  # version of all that ranks say to each other; both worlds must have the same
CONNECT, REFIT = "connect", "refit"
LEADER = "train:0"
HEAD = "head"


@dataclass(frozen=True, slots=True)
class Head:
    """The attempt under way, as the leader announces it."""

    leader: str  # the leader's process: a trainer that restarts is another one
    number: int  # counts the attempts of a session
    kind: str  # CONNECT or REFIT
    plan: str  # the digest of the plan that the leader published; "" if none is
    protocol: int = PROTOCOL
    package: str = ""

    @property
    def attempt(self) -> str:
        return f"{self.number}-{self.leader[:8]}"

    @property
    def speaks_otherwise(self) -> bool:
        """Whether the leader speaks another version of the protocol."""
        return self.protocol != PROTOCOL

    @classmethod
    def from_json(cls, value: Any) -> Head:
        if value["protocol"] != PROTOCOL:  # it may have other fields as well
            leader, kind, package = (str(value.get(name, "")) for name in ("leader", "kind", "package"))
            return cls(leader, int(value.get("number", 0)), kind, "", int(value["protocol"]), package)
        head = cls(**value)
        if not all(isinstance(text, str) for text in (head.leader, head.kind, head.plan, head.package)):
            raise TypeError("a text is none")
        if not isinstance(head.number, int) or head.kind not in (CONNECT, REFIT):
            raise TypeError("no number, or no kind of an attempt")
        return head


@dataclass(frozen=True, slots=True)
class Call:
    """The members of an attempt, and what each of them said."""

    attempt: str
    kind: str
    members: tuple[str, ...]  # seats, training ranks first
    replicas: tuple[int, ...]  # the engine's replicas among them
    epoch: str  # the attempt in which these members connected, or connect
    words: Mapping[str, Mapping[str, Any]]  # by seat
    plan: str = ""
    left_out: Mapping[str, str] = field(default_factory=dict)  # seats that came and are no members: why

    @property
    def processes(self) -> dict[str, Any]:
        """Who the members are, by seat."""
        return {seat: word["process"] for seat, word in self.words.items() if "process" in word}

    @property
    def places(self) -> tuple[str, ...]:
        """Where the members are, in their order; "" of one that has not said it."""
        return tuple(self.words[member].get("place", "") for member in self.members)

    @classmethod
    def from_json(cls, value: Any) -> Call:
        call = cls(**value)
        words = {str(seat): parse_word(word) for seat, word in call.words.items()}
        if not set(call.members) == set(words) or not all(isinstance(each, int) for each in call.replicas):
            raise TypeError("its members, and those that said something, differ")
        return replace(call, members=tuple(call.members), replicas=tuple(call.replicas), words=words)


@dataclass(frozen=True, slots=True)
class World:
    """The seats of a session, as one rank knows them."""

    train_ranks: int
    replica_ranks: int  # seats of one replica
    replicas: int  # of the engine, as planned

    def train_seats(self) -> list[str]:
        return [f"train:{rank}" for rank in range(self.train_ranks)]

    def seats_of(self, replica: int) -> list[str]:
        first = replica * self.replica_ranks
        return [f"gen:{rank}" for rank in range(first, first + self.replica_ranks)]

    def replica_of(self, seat: str) -> int:
        return int(seat.partition(":")[2]) // self.replica_ranks

    def needed_by(self, seat: str) -> list[str]:
        """Seats without which a rank can take part in no refit: of training ranks, and of its own replica."""
        own = self.seats_of(self.replica_of(seat)) if seat.startswith("gen:") else []
        return [name for name in (*self.train_seats(), *own) if name != seat]

    def members(self, replicas: Iterable[int]) -> tuple[str, ...]:
        return (*self.train_seats(), *(seat for replica in replicas for seat in self.seats_of(replica)))


def parse_call(key: str, content: bytes) -> Call:
    """What the leader called, or its failure as SessionFailed."""
    said = parse_stored(key, content, dict, written_by=LEADER)
    if "failure" in said:
        raise SessionFailed(parse_stored(key, stored_text(said["failure"]).encode(), Failure.from_json))
    return parse_stored(key, stored_text(said).encode(), Call.from_json, written_by=LEADER)


def require_protocol(theirs: int, package: str, whose: str, ours: str) -> None:
    """Raise SessionError where the other side speaks another version of the protocol."""
    if theirs == PROTOCOL:
        return
    older = ours if theirs > PROTOCOL else whose
    raise SessionError(
        f"the {whose} speaks protocol {theirs} (mcore-reshard {package or 'unknown'}), the {ours} protocol {PROTOCOL}:"
        f" upgrade mcore-reshard of the {older}"
    )


def next_version(words: Mapping[str, Mapping[str, Any]], seat: str) -> int:
    """The version that all ranks refit: that of the trainer; ranks of the engine may leave it open (None).

    Raises VersionError unless it is an integer that is larger than what every member has, or the trainer says that it goes
    back.
    """
    if wrong := [f"{word['wrong_version']} on {name}" for name, word in words.items() if "wrong_version" in word]:
        raise VersionError(f"a version is an integer of 64 bits, not {', '.join(wrong)}")
    given: dict[int, list[str]] = {}
    for name, word in words.items():
        if word.get("version") is not None:
            given.setdefault(word["version"], []).append(name)
    if not given:
        raise VersionError("no version was given: pass one to refit on the trainer")
    if len(given) > 1:
        listed = "; ".join(f"{version} on {', '.join(names)}" for version, names in given.items())
        raise VersionError(f"different versions are refitted at once: {listed}; pass one to all ranks")
    (version,) = given
    held = max((word["committed"] for word in words.values() if word.get("committed") is not None), default=-math.inf)
    if version <= held and not any(word.get("rollback") for name, word in words.items() if name.startswith("train:")):
        raise VersionError(
            f"{seat}: version {version} does not follow {held}: pass a larger one, or rollback=True on the trainer"
        )
    return version
