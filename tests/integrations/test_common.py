"""What adapters share."""

from __future__ import annotations

import threading

import pytest

import mcore_reshard as mr
from mcore_reshard.integrations.common import mesh_of_replicas, options_for_engine, run_beside


def test_options_travel_to_engines_without_secrets() -> None:
    options = mr.Options(transport="gloo", timeout_s=61.0, token="a" * 64, token_file=None, session="s")
    assert options_for_engine(options) == {"transport": "gloo", "timeout_s": 61.0, "session": "s"}


def test_replicas_fill_the_engine_ranks() -> None:
    assert mesh_of_replicas(mr.GenMesh(tp=4), 8, "") == mr.GenMesh(tp=4, dp=2)
    assert mesh_of_replicas(mr.GenMesh(tp=2, dp=2, ep=4), 4, "") == mr.GenMesh(tp=2, dp=2, ep=4)
    for mesh, ranks in [(mr.GenMesh(tp=4), 6), (mr.GenMesh(tp=4), 2), (mr.GenMesh(tp=2, ep=2), 4)]:
        with pytest.raises(mr.RefitError, match=rf"has {mesh.world} ranks, and there are {ranks}: do this"):
            mesh_of_replicas(mesh, ranks, "do this")


def test_both_sides_run_at_the_same_time() -> None:
    met = threading.Barrier(3, timeout=20)
    assert run_beside([met.wait, met.wait], lambda: met.wait() * 0 + 7) == 7


def test_the_own_error_is_raised_before_that_of_an_engine() -> None:
    def fails(message: str) -> None:
        raise ValueError(message)

    with pytest.raises(ValueError, match="own"):
        run_beside([lambda: fails("engine")], lambda: fails("own"))
    with pytest.raises(ValueError, match="engine"):
        run_beside([lambda: fails("engine")], lambda: None)
