"""The options of a session: one record, checked when it is made."""

from __future__ import annotations

from typing import Any

import pytest

from mcore_reshard.kernels.options import TRANSPORTS, Options
from mcore_reshard.kernels.transports.registry import transports


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"ctas": 0}, "ctas must be at least 1, or None, not 0"),
        ({"timeout_s": float("inf")}, "timeout_s must be above 0 and finite, not inf"),
        ({"bucket_bytes": 100}, "bucket_bytes must be a multiple of 16, at most 1073741824, not 100"),
        ({"bucket_bytes": 1 << 31}, "bucket_bytes must be a multiple of 16, at most 1073741824, not 2147483648"),
        ({"scratch_bytes": True}, "scratch_bytes must be at least 1, not True"),
        ({"checksums": "yes"}, "checksums must be True or False, not 'yes'"),
        ({"source_checks": True}, "source_checks must be one of sampled, full, off, not True"),
        ({"session": ""}, "session must be a name, not ''"),
        ({"transport": "foo"}, "transport must be one of auto, direct, nccl, gloo, golden, not 'foo'"),
    ],
)
def test_a_wrong_option_is_refused_when_the_record_is_made(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as refusal:
        Options(**given)
    assert str(refusal.value) == f"these options are wrong:\n  {message}"


def test_all_wrong_options_are_listed_at_once() -> None:
    with pytest.raises(ValueError) as refusal:
        Options(transport=None, timeout_s=0, ctas=-1)  # type: ignore[arg-type]
    assert [line.split()[0] for line in str(refusal.value).splitlines()[1:]] == ["transport", "timeout_s", "ctas"]


def test_an_option_names_every_transport_there_is() -> None:
    assert [transport.name for transport in transports()] == TRANSPORTS


def test_options_compare_by_value_and_stay_as_they_are() -> None:
    assert Options() == Options(transport="auto", session="refit", timeout_s=60.0)
    with pytest.raises(AttributeError):
        Options().timeout_s = 1.0  # type: ignore[misc]
