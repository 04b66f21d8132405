"""The verdict on live refits finds whatever is not as in the engine that loaded the checkpoint."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from live.cases import PLACES, cases_on
from live.verdict import judge
from live.whole_model import speeds


def answers(first: int, logprob: float) -> list[dict[str, Any]]:
    return [{"tokens": [first, 7], "logprobs": [logprob, -0.5]}]


def engines() -> tuple[dict[str, Any], dict[int, dict[str, Any]]]:
    """A refitted engine without a fault, and those that loaded checkpoints 1 and 2."""
    loaded = {
        number: {
            "sums": {"0:lm_head.weight": number, "0:norm.weight": 10 + number},
            "answers": answers(number, -0.1 * number),
            "again": answers(number, -0.1 * number),
        }
        for number in (1, 2)
    }
    told = {"transport": "direct", "nbytes": 4, "misc_bytes": 0, "seconds": 0.01}
    refits = [{**copy.deepcopy(loaded[number]), **told} for number in (1, 2, 1)]
    return {"kernels": {}, "before": answers(9, -3.0), "refits": refits}, loaded


def test_an_engine_that_is_alike_has_no_problems() -> None:
    verdict = judge("eager", *engines())
    assert verdict["problems"] == []
    assert [row["equal_logprobs"] for row in verdict["refits"]] == [1, 1, 1]
    assert [row["tensors"] for row in verdict["refits"]] == [2, 2, 2]


def other_bytes(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][1]["sums"]["0:norm.weight"] += 1


def missing_tensor(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    del refitted["refits"][2]["sums"]["0:norm.weight"]


def more_tensors(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][0]["sums"]["1:norm.weight"] = 5


def other_tokens(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][1]["answers"][0]["tokens"][1] = 8


def other_logprobs(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    for number in (0, 2):
        refitted["refits"][number]["answers"][0]["logprobs"][1] += 1e-7


def answers_do_not_come_back(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["refits"][2]["answers"][0]["logprobs"][0] -= 0.01


def equal_checkpoints(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    for engine in (loaded[2], refitted["refits"][1]):
        engine["answers"] = engine["again"] = loaded[1]["answers"]


def unsteady_engine(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    loaded[1]["again"] = answers(1, -0.2)


def random_weights_that_answer_alike(refitted: dict[str, Any], loaded: dict[int, Any]) -> None:
    refitted["before"] = loaded[2]["answers"]


@pytest.mark.parametrize(
    ("damage", "problem"),
    [
        (other_bytes, "refit 2: 1 tensors have other bytes, first 0:norm.weight"),
        (missing_tensor, "refit 3: 1 tensors have other bytes"),
        (more_tensors, "refit 1: 1 tensors have other bytes, first 1:norm.weight"),
        (other_tokens, "refit 2: 1 of 1 answers have other tokens"),
        (other_logprobs, "refit 1: 1 of 1 answers have other log-probabilities"),
        (answers_do_not_come_back, "the answers after the last refit are not those after the first"),
        (equal_checkpoints, "the checkpoints give the same answers"),
        (unsteady_engine, "the engine that loaded checkpoint 1 answers differently the second time"),
        (random_weights_that_answer_alike, "random weights answer as checkpoint 2 does"),
    ],
)
def test_each_damage_is_named(damage: Any, problem: str) -> None:
    refitted, loaded = engines()
    damage(refitted, loaded)
    assert any(text.startswith(problem) for text in judge("eager", refitted, loaded)["problems"])


def test_engines_that_compile_may_differ_in_logprobs_but_not_in_what_comes_back() -> None:
    refitted, loaded = engines()
    other_logprobs(refitted, loaded)
    verdict = judge("graphs", refitted, loaded)
    assert verdict["problems"] == []
    assert verdict["refits"][0]["largest_difference"] == pytest.approx(1e-7)


def test_every_case_has_a_name_of_its_own() -> None:
    cases = cases_on(1) + cases_on(2)
    assert len({case.name for case in cases}) == len(cases)
    assert {PLACES[case.place].gpus for case in cases} == {1, 2}


def test_tokens_per_second_are_told_apart_by_what_overlaps_a_refit() -> None:
    """Steps of 10 ms, and of 20 ms while a refit runs; the last step of another batch counts for nothing."""
    starts = [0.00, 0.01, 0.02, 0.04, 0.06, 0.07]
    steps = [*((start, 4) for start in starts), (0.08, 2), (0.5, 4)]
    without, during = speeds(steps, [(0.02, 0.06)], batch=4)
    assert without == pytest.approx(400)
    assert during == pytest.approx(200)
    _, half = speeds([(0.0, 4), (0.02, 4), (0.04, 1)], [(0.01, 0.02)], batch=4)
    assert half == pytest.approx(200)


def test_a_run_without_refits_gives_no_speeds() -> None:
    with pytest.raises(ValueError, match="both beside refits and without"):
        speeds([(0.0, 4), (0.01, 4)], [], batch=4)
