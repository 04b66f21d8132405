"""Scales of the KV cache that travel with a refit: given on training rank 0, landed where attention has them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch
from helpers.handmade import allocate, random_transfers, schedule_of
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.errors import KvScalesError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

WORLDS = (2, 2)
ATTENTION = "model.layers.{}.self_attn.attn"
SCALES = {f"{ATTENTION.format(0)}.k_scale": 0.1, f"{ATTENTION.format(0)}.v_scale": 2.5}
LATER = {f"{ATTENTION.format(1)}.k_scale": 0.3, f"{ATTENTION.format(1)}.v_scale": 4.0}
BOTH_HAVE_ALL = (tuple(SCALES), tuple(SCALES))

Names = tuple[tuple[str, ...] | None, ...]


def refit(number: int, address: str, names: Names, given: Mapping[int, Mapping[str, Any]]) -> Any:
    """Rank `number` of four refits three times, the second time with the scales `given` by rank: what each one brought.

    `names` are the scales that each generation rank has; None where it takes none.
    """
    world, rank = ("train", number) if number < WORLDS[0] else ("gen", number - WORLDS[0])
    transfers = random_transfers(np.random.default_rng(7), WORLDS, parameters=5, stages=1)
    schedule = schedule_of(transfers, world, rank, WORLDS)  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=1 if world == "train" else None)
    landed: list[Any] = []

    def untouched() -> bool:
        return all((tensor.view(torch.uint8) == 0xEE).all() for tensor in tensors.values())

    endpoint: TrainEndpoint | GenerationEndpoint
    if world == "train":
        endpoint = TrainEndpoint(schedule, tensors, store=address, options=Options(timeout_s=20.0))
    else:
        has = names[rank]
        endpoint = GenerationEndpoint(
            schedule, tensors, store=address, options=Options(timeout_s=20.0),
            after_direct_writes=lambda: landed.append("derived"),
            set_kv_scales=None if has is None else lambda scales: landed.append(dict(scales)),
            kv_scale_names=None if has is None else lambda: has,
        )  # fmt: skip
    endpoint.prepare()
    for version in (1, 2, 3):
        if world == "gen":
            for tensor in tensors.values():
                tensor.view(torch.uint8).fill_(0xEE)
        try:
            endpoint.refit(version, kv_scales=given.get(number) if version == 2 else None)
            assert world == "train" or not untouched()
        except KvScalesError as error:
            assert world == "train" or untouched()
            landed.append(str(error))
    assert endpoint.committed_version == 3
    endpoint.close()
    return landed


def check_refused(refused: str, names: Names, given: Mapping[int, Mapping[str, Any]]) -> None:
    """All ranks raise alike, nothing has moved, and the refits before and after are as if nothing had been."""
    first, second, *engines = values(run_ranks(4, refit, names, given))
    assert (first, second) == ([refused], [refused])
    assert engines == [["derived", refused, "derived"]] * 2


@pytest.mark.parametrize("given", [{0: SCALES}, {0: SCALES, 1: SCALES}], ids=["on one rank", "on both"])
def test_scales_land_last_and_only_with_the_refit_they_came_with(given: Any) -> None:
    first, second, *engines = values(run_ranks(4, refit, BOTH_HAVE_ALL, given))
    assert (first, second) == ([], [])
    assert engines == [["derived", "derived", SCALES, "derived"]] * 2


@pytest.mark.parametrize("given", [SCALES | LATER, LATER], ids=["of both stages", "of the last alone"])
def test_each_pipeline_stage_of_an_engine_gets_the_scales_of_its_layers(given: Any) -> None:
    first, second, *engines = values(run_ranks(4, refit, (tuple(SCALES), tuple(LATER)), {0: given}))
    assert (first, second) == ([], [])
    landed = [{name: scale for name, scale in given.items() if name in stage} for stage in (SCALES, LATER)]
    assert engines == [["derived", "derived", *([own] if own else []), "derived"] for own in landed]


def test_names_that_no_rank_has_are_all_listed_before_anything_moves() -> None:
    wrong = {"model.layers.0.self_attn.k_scale": 1.0, f"{ATTENTION.format(2)}.k_scale": 1.0}
    refused = (
        "2 of 6 scales of the KV cache are of no attention layer of any generation rank whose cache has scales:"
        f" model.layers.0.self_attn.k_scale, {ATTENTION.format(2)}.k_scale; name the engine's own, as in"
        " model.layers.0.self_attn.attn.k_scale, and start it with a quantized cache (kv_cache_dtype)"
    )
    check_refused(refused, (tuple(SCALES), tuple(LATER)), {0: {**SCALES, **wrong, **LATER}})


def test_scales_that_a_rank_cannot_take_are_refused_before_anything_moves() -> None:
    refused = (
        "2 scales of the KV cache came with the refit, and no function to set them was given on gen:1: give"
        " set_kv_scales= and kv_scale_names="
    )
    check_refused(refused, (tuple(SCALES), None), {0: SCALES})


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
    check_refused(refused, BOTH_HAVE_ALL, given)


WRONG = {
    "a": float("nan"), "b": "x", "c": 0, "d": 1e-46, "e": 1e39, "f": -1, "g": None, "h": torch.ones(2), "i": 10**400,
    "j": True, "k": "0.5",
}  # fmt: skip


def test_what_is_no_positive_float32_is_refused_with_all_names_before_anything_moves() -> None:
    refused = (
        "scales of the KV cache are positive float32 numbers by name, and a is nan, b is 'x', c is 0, d is 1e-46, e is 1e+39,"
        f" f is -1, g is None, h is tensor([1., 1.]), i is 1{'0' * 39}, j is True, k is '0.5' on train:0; c is 0 on train:1"
    )
    check_refused(refused, BOTH_HAVE_ALL, {0: {**SCALES, **WRONG}, 1: {**SCALES, "c": 0}})


@pytest.mark.parametrize(
    ("given", "said"),
    [([*SCALES], "a list in place of a mapping of names to scales"), ({("a", 0): 0.5}, "('a', 0) is 0.5")],
    ids=["names alone", "names in parts"],
)
def test_what_is_no_mapping_of_names_is_refused_before_anything_moves(given: Any, said: str) -> None:
    refused = f"scales of the KV cache are positive float32 numbers by name, and {said} on train:0"
    check_refused(refused, BOTH_HAVE_ALL, {0: given})


def words_said(number: int, address: str) -> list[tuple[str, list[str]]]:
    """The phases of two refits, the second with scales, and what one of two ranks had to say at each."""
    said: list[tuple[str, list[str]]] = []
    gather = Rendezvous.gather

    def noted(self: Rendezvous, phase: str, word: Mapping[str, Any], **options: Any) -> dict[str, Any]:
        said.append((phase, sorted(word)))
        return gather(self, phase, word, **options)

    Rendezvous.gather = noted  # type: ignore[method-assign]
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=5, stages=1)
    schedule = schedule_of(transfers, "gen" if number else "train", 0, (1, 1))
    takes = {"set_kv_scales": lambda _: None, "kv_scale_names": lambda: SCALES}
    kind: Any = GenerationEndpoint if number else TrainEndpoint
    endpoint = kind(schedule, allocate(schedule), store=address, **(takes if number else {}))
    endpoint.prepare()
    endpoint.refit(1)
    endpoint.refit(2, kv_scales=None if number else SCALES)
    endpoint.close()
    return said[2:]  # without those of the connection


def test_names_are_asked_for_only_where_scales_came() -> None:
    train, gen = values(run_ranks(2, words_said))
    assert (train, gen) == ([("kv_scales", [])], [("kv_scales", ["lacks"])]), "of two refits, one of them with scales"


def test_setting_scales_and_naming_them_go_together() -> None:
    transfers = random_transfers(np.random.default_rng(7), WORLDS, parameters=5, stages=1)
    schedule = schedule_of(transfers, "gen", 0, WORLDS)
    for half in ({"set_kv_scales": lambda _: None}, {"kv_scale_names": lambda: SCALES}):
        with pytest.raises(ValueError, match="give set_kv_scales and kv_scale_names together"):
            GenerationEndpoint(schedule, {}, store="127.0.0.1:1", **half)  # type: ignore[arg-type]
