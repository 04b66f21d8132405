"""What adapters share."""

from __future__ import annotations

import threading

import pytest

import mcore_reshard as mr
from mcore_reshard.integrations.common import options_for_engine, run_beside


def test_options_travel_to_engines_without_secrets() -> None:
    options = mr.Options(transport="gloo", timeout_s=61.0, token="a" * 64, token_file=None, session="s")
    assert options_for_engine(options) == {"transport": "gloo", "timeout_s": 61.0, "session": "s"}


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
