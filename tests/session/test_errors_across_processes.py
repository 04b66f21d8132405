"""Errors of a refit are the same on the other side of a process boundary: their class, message, notes and fields."""

from __future__ import annotations

import pickle

import pytest

from mcore_reshard.kernels.errors import (
    BindError,
    ChecksumError,
    DeadlineError,
    PeerLostError,
    RefitError,
    SessionError,
    VersionError,
    Waiting,
)
from mcore_reshard.kernels.rendezvous.exchange import Failure
from mcore_reshard.kernels.rendezvous.rendezvous import SessionFailed
from mcore_reshard.planner.layout.mesh import MeshError
from mcore_reshard.planner.proof.prove import Proof, ProofError
from mcore_reshard.planning import InputError
from mcore_reshard.session.state import mixed, name_state

WAITING = Waiting("gen:1", "train:0", 2, "lm_head.weight", False)
LATE = DeadlineError(WAITING, "silent for 3 s")
LATE.others = (PeerLostError(WAITING, "closed"),)
NOTED = VersionError("version 3 does not increase")
NOTED.add_note("after a restart")
MIXED = SessionError("lost")
name_state(MIXED, mixed(3, 4, 0.5), "gen:1")
ERRORS = [
    RefitError("any"),
    BindError("gen:0", ["lm_head.weight: missing", "norm: float32"]),
    ChecksumError(WAITING, "other bytes"),
    LATE,
    NOTED,
    MIXED,
    SessionFailed(Failure.of("train:0", LATE)),
    MeshError("impossible training mesh", ["tp = 0", "pp = 0"]),
    InputError(["no such model", "no such mesh"], "give another"),
    ProofError(Proof((), 1, 0)),
]


def described(error: BaseException) -> tuple[type, str, dict[str, object]]:
    fields = vars(error) | {"others": [described(other) for other in getattr(error, "others", ())]}
    return type(error), str(error), fields


@pytest.mark.parametrize("error", ERRORS, ids=lambda error: type(error).__name__)
def test_an_error_is_pickled_with_its_fields(error: BaseException) -> None:
    restored = pickle.loads(pickle.dumps(error))
    assert described(restored) == described(error)
    assert described(pickle.loads(pickle.dumps(restored))) == described(error)


def test_fields_survive() -> None:
    restored = pickle.loads(pickle.dumps(LATE))
    assert restored.waiting == WAITING and restored.others[0].waiting == WAITING
    assert pickle.loads(pickle.dumps(MIXED)).weight_state == mixed(3, 4, 0.5)
    assert pickle.loads(pickle.dumps(ERRORS[1])).problems == ("lm_head.weight: missing", "norm: float32")
