"""Random tiny models of every family, over random meshes: refits into real vLLM models equal golden, byte by byte."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
from helpers.random_cases import ALL_FAMILIES, cases, draw, refusal
from helpers.validating import OPTIONS, assert_golden


@pytest.fixture(scope="module", autouse=True)
def cache_of_these_tests(tmp_path_factory: pytest.TempPathFactory) -> Any:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(tmp_path_factory.mktemp("cache")))
        yield


def refit(count: int) -> None:
    """Compare the first `count` cases that both upstreams hold."""
    compared = 0
    for case in cases():
        try:
            report = case.refit(OPTIONS)
        except Exception as error:
            if not refusal(error):
                raise AssertionError(case) from error
            continue
        assert_golden(report)
        compared += 1
        if compared == count:
            return


def test_random_models_are_refitted() -> None:
    refit(4)


@pytest.mark.slow
def test_many_random_models_are_refitted() -> None:
    refit(200)


def test_the_first_cases_are_of_every_family_and_no_two_are_alike() -> None:
    drawn = [draw(number) for number in range(200)]
    assert {case.family for case in drawn} == {*ALL_FAMILIES}
    assert len({(str(case.config), case.train, case.gen) for case in drawn}) == 200
    assert [*islice(cases(), 200)] == drawn
