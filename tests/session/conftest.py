"""What tests of sessions start: a store in a process of its own, and the ranks that meet there with the module's OPTIONS."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from helpers.ranks import StoreProcess, store_process
from helpers.remote import Ranks


@pytest.fixture
def host() -> Iterator[StoreProcess]:
    with store_process() as process:
        yield process


@pytest.fixture
def ranks(host: StoreProcess, request: pytest.FixtureRequest) -> Iterator[Ranks]:
    with Ranks(host.address, request.module.OPTIONS) as ranks:
        yield ranks
