"""Scales of the KV cache that travel with a refit: given on training rank 0, landed on every generation rank."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
from handmade import allocate, random_moves, schedule_of
from ranks import run_ranks, values

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.refit import GenerationEndpoint, TrainEndpoint

WORLDS = (2, 2)
SCALES = {"model.layers.0.self_attn.attn.k_scale": 0.1, "model.layers.0.self_attn.attn.v_scale": 2.5}


def refit(number: int, address: str, deaf: int, given: Mapping[int, Mapping[str, float]]) -> Any:
    """Rank `number` of four refits three times, the second time with the scales `given` by rank. What each one brought.

    Generation rank `deaf` takes no scales.
    """
    world, rank = ("train", number) if number < WORLDS[0] else ("gen", number - WORLDS[0])
    moves = random_moves(np.random.default_rng(7), WORLDS, parameters=5, stages=1)
    schedule = schedule_of(moves, world, rank, WORLDS)  # type: ignore[arg-type]
    landed: list[Any] = []

    def derive() -> None:
        landed.append("derived")

    def land(scales: Mapping[str, float]) -> None:
        landed.append(dict(scales))

    endpoint: TrainEndpoint | GenerationEndpoint
    if world == "train":
        endpoint = TrainEndpoint(schedule, allocate(schedule), store=address, timeout_s=20.0)
    else:
        takes = None if rank == deaf else land
        endpoint = GenerationEndpoint(
            schedule, allocate(schedule), store=address, timeout_s=20.0, after_direct_writes=derive, set_kv_scales=takes
        )
    endpoint.prepare()
    for version in (1, 2, 3):
        try:
            endpoint.refit(version, kv_scales=given.get(number) if version == 2 else None)
        except SessionError as error:
            landed.append(str(error))
    endpoint.close()
    return landed


@pytest.mark.parametrize("given", [{0: SCALES}, {0: SCALES, 1: SCALES}], ids=["on one rank", "on both"])
def test_scales_land_last_and_only_with_the_refit_they_came_with(given: Any) -> None:
    first, second, *engines = values(run_ranks(4, refit, -1, given))
    assert (first, second) == ([], [])
    assert engines == [["derived", "derived", SCALES, "derived"]] * 2


def test_scales_that_a_rank_cannot_take_are_refused_before_anything_moves() -> None:
    refused = "2 scales of the KV cache came with the refit, and no function to set them was given on gen:1"
    first, second, *engines = values(run_ranks(4, refit, 1, {0: SCALES}))
    assert (first, second) == ([refused], [refused])
    assert engines == [["derived", refused, "derived"]] * 2


@pytest.mark.parametrize(
    ("given", "sent", "lost"),
    [
        ({1: SCALES}, 0, "train:1"),
        ({0: SCALES, 1: {**SCALES, "model.layers.0.self_attn.attn.v_scale": 2.0}}, 2, "train:1"),
        ({0: SCALES, 3: {"model.layers.1.self_attn.attn.k_scale": 1.0}}, 2, "gen:1"),
    ],
    ids=["not on rank 0", "other numbers", "on a generation rank"],
)
def test_scales_that_would_be_lost_are_refused_before_anything_moves(given: Any, sent: int, lost: str) -> None:
    refused = (
        f"scales of the KV cache travel from train:0, which was given {sent}: others were given on {lost}; give all of"
        " them on train:0"
    )
    first, second, *engines = values(run_ranks(4, refit, -1, given))
    assert (first, second) == ([refused], [refused])
    assert engines == [["derived", refused, "derived"]] * 2


def kv_word(scales: Mapping[str, Any]) -> None:
    moves = random_moves(np.random.default_rng(7), WORLDS, parameters=5, stages=1)
    TrainEndpoint(schedule_of(moves, "train", 0, WORLDS), {}, store="127.0.0.1:1")._kv_word(scales)


@pytest.mark.parametrize("scale", [float("nan"), "a", 0, 1e-46, 1e39])  # the last two are 0 and inf as float32
def test_what_is_no_number_is_an_error_of_the_caller(scale: Any) -> None:
    with pytest.raises(ValueError):
        kv_word({"model.layers.0.self_attn.attn.k_scale": scale})


def test_all_wrong_scales_are_named() -> None:
    with pytest.raises(ValueError, match=r"and a is -1\.0, c is 0\.0"):
        kv_word({"a": -1, "b": 1, "c": 0})
