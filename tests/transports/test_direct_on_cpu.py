"""The direct transport from end to end, without a GPU: every byte arrives, by pulls, along chains, and beside another transport."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import MagicMock

import pytest
from helpers import direct_on_cpu
from helpers.plans import Case
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.copies.executed import first_difference
from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.transports.direct import turns
from mcore_reshard.kernels.transports.peer_access import UNREACHABLE_VARIABLE
from mcore_reshard.planner.layout.megatron import MegatronBuild

MOE = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2")
DENSE = Case("tiny-qwen3", "tp=2,dp=2", "tp=4")
PIPELINED = Case("tiny-llama", "tp=2,pp=2", "tp=2")
ONE_TO_THREE = Case("tiny-qwen3", "tp=1", "dp=3")
TWO_TO_FOUR = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2,dp=2")
FP8_TO_FP8 = Case("tiny-qwen3-moe-fp8", "tp=1", "dp=2", dtypes=("fp8", "fp8"), block=(128, 128))
ALL_CAST = Case("tiny-qwen3", "tp=1", "dp=3", dtypes=("bf16", "fp8"), block=(8, 8))
SOME_CAST = Case(
    "tiny-qwen3", "tp=2", "tp=1,dp=4", dtypes=("bf16", "fp8"), block=(8, 8), kept=("model.layers.1.mlp.down_proj",)
)
PIPELINED_CAST = Case("tiny-qwen3-moe", "pp=2", "tp=1", dtypes=("bf16", "fp8"), block=(8, 16))
CAST_TO_TWO = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16))
FOUR_CAST_TO_TWO = Case("tiny-qwen3-moe", "tp=2,ep=4,dp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16))
NARROWED = Case("tiny-qwen3", "tp=2", "tp=1", dtypes=("fp32", "bf16"))
STACKED = Case("tiny-qwen3-moe", "tp=2,ep=2", "tp=2", MegatronBuild(experts="stacked"), dtypes=("fp32", "bf16"))
ON_ONE_HOST = Case("tiny-qwen3", "tp=1", "dp=4", machine="h200-8,gpus=8", hosts="train=a*1,gen=a*4@1")
DENSE_ALONE_IS_PASSED_ON = Case("tiny-qwen3-moe", "tp=1", "tp=2,dp=2,ep=4")
THREE_HOPS = Case("tiny-qwen3", "tp=2", "tp=1,dp=4", machine="h200-8,gpus=2")


def refitted(case: Case, unreachable: str | None = None, waves: int = 5, **how: Any) -> tuple[list[str], list[str]]:
    """(executors, ends) of all ranks after refits without a wrong byte, of which both ends of each pair agree."""
    plan = case.plan()
    held = direct_on_cpu.of_all_ranks(plan)
    by_pair = unreachable is not None
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNREACHABLE_VARIABLE, unreachable or "")
        told: Any = values(
            run_ranks(len(held), one_rank, plan, held, waves, {"by_pair": by_pair, **how}, timeout_s=60.0)
        )
    assert [wrong for *_, wrong in told] == [{}] * len(held)
    digests = {f"{number}": of_rank for number, (_, _, of_rank, _) in enumerate(told)}
    assert sum(map(len, digests.values())) and first_difference(digests) is None
    return [name for name, *_ in told], [end for _, end, *_ in told]


def one_rank(number: int, address: str, plan: Any, held: Any, waves: int, how: dict[str, Any]) -> Any:
    return direct_on_cpu.refit(number, address, plan, held, waves, **how)


def test_what_is_passed_on_before_it_has_landed_is_found() -> None:
    plan = ONE_TO_THREE.plan()
    held = direct_on_cpu.of_all_ranks(plan)
    told: Any = values(run_ranks(4, one_rank, plan, held, 5, {"early": True}, timeout_s=60.0))
    assert [bool(wrong) for *_, wrong in told[1:]] == [False, True, True]


def test_readers_pull() -> None:
    assert refitted(MOE) == (["direct"] * 4, ["Source"] * 2 + ["Reader"] * 2)


@pytest.mark.parametrize("apart", [False, True], ids=["one GPU", "a GPU each"])
@pytest.mark.parametrize("case", [MOE, DENSE, PIPELINED], ids=str)
def test_a_copy_engine_helps_readers(case: Case, apart: bool) -> None:
    plan = case.plan()
    ends = ["Source"] * plan.train.world + ["Reader with an engine"] * plan.gen.world
    assert refitted(case, engine=True, apart=apart)[1] == ends


def test_where_readers_would_meet_no_engine_helps(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_STILL_FASTER", 0.0)
    assert refitted(MOE, engine=True, apart=True)[1] == ["Source"] * 2 + ["Reader"] * 2


@pytest.mark.parametrize("engine", [False, True], ids=["kernels", "engines"])
@pytest.mark.parametrize(
    ("case", "gpus", "pushes"),
    [
        (MOE, (0, 1, 0, 1), "that pushes"),
        (DENSE, (0, 1, 2, 3, 0, 1, 2, 3), "that pushes"),
        (PIPELINED, (0, 0, 1, 1, 0, 1), "that pushes"),
        (CAST_TO_TWO, (0, 1, 0, 1), "that pushes all"),
        (FOUR_CAST_TO_TWO, (0, 1, 2, 3, 0, 3), "that pushes all"),
        (NARROWED, (0, 1, 1), "that pushes casts"),
        (STACKED, (0, 1, 1, 0), "that pushes casts"),
    ],
    ids=str,
)
def test_trainers_push_everything_to_readers_on_their_gpus(
    case: Case, gpus: tuple[int, ...], pushes: str, engine: bool
) -> None:
    """Readers get bytes from their own GPU and from others. No engine takes what stays on a GPU."""
    train = len(gpus) - case.plan().gen.world
    source, reader = f"Source {pushes}", "Reader that is written"
    names, ends = refitted(case, engine=engine, gpus=gpus)
    assert names == ["direct"] * len(gpus)
    assert {end.removesuffix(" with an engine") for end in ends[:train]} == {source}
    helped = engine and "casts" not in pushes  # where something is pushed as it lies
    assert any(end.endswith("engine") for end in ends[:train]) == helped
    assert ends[train:] == [reader] * (len(gpus) - train)


@pytest.mark.parametrize(
    ("how", "reader"),
    [
        ({"sleeping": {0, 1}, "engine": True}, "Reader with an engine"),
        ({"sleeping": {0, 1}}, "Reader"),
        ({"checksums": True, "engine": True}, "Reader"),
    ],
    ids=["sleep", "sleep, kernels", "checksums"],
)
@pytest.mark.parametrize("case", [MOE, CAST_TO_TWO], ids=str)
def test_readers_that_cannot_be_written_pull_also_on_their_sources_gpus(
    case: Case, how: dict[str, Any], reader: str
) -> None:
    assert refitted(case, gpus=(0, 1, 0, 1), **how)[1] == ["Source"] * 2 + [reader] * 2


@pytest.mark.parametrize("case", [MOE, CAST_TO_TWO], ids=str)
def test_trainers_push_to_one_reader_while_another_pulls(case: Case) -> None:
    """The first engine rank is on a trainer's GPU, the second one has a GPU of its own."""
    ends = refitted(case, engine=True, gpus=(0, 1, 0, 2))[1]
    assert ends[2:] == ["Reader that is written", "Reader with an engine"]
    assert all(end.startswith("Source that pushes") for end in ends[:2])


@pytest.mark.parametrize("case", [CAST_TO_TWO, PIPELINED_CAST, FOUR_CAST_TO_TWO, NARROWED, STACKED], ids=str)
def test_engines_take_one_source_after_another_also_of_what_is_cast(case: Case) -> None:
    plan = case.plan()
    ends = ["Source"] * plan.train.world + ["Reader with an engine"] * plan.gen.world
    assert refitted(case, engine=True, apart=True)[1] == ends


def test_where_readers_would_meet_trainers_write_what_they_cast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "_STILL_FASTER", 0.0)
    ends = ["Source that pushes casts"] * 2 + ["Reader that is written"] * 2
    assert refitted(CAST_TO_TWO, engine=True, apart=True)[1] == ends


@pytest.mark.parametrize("case", [PIPELINED_CAST, CAST_TO_TWO, NARROWED, STACKED], ids=str)
def test_a_trainer_pushes_what_it_casts(case: Case) -> None:
    plan = case.plan()
    assert (
        refitted(case)[1]
        == ["Source that pushes casts"] * plan.train.world + ["Reader that is written"] * plan.gen.world
    )


@pytest.mark.parametrize(
    "how",
    [{"sleeping": {0, 1}}, {"checksums": True}, {"engine": True}, {"sleeping": {0, 1}, "shared": True}],
    ids=["sleep", "checksums", "one GPU that a copy engine reads", "sleep on a shared GPU"],
)
def test_some_readers_pull_casts_through_slots(how: dict[str, Any]) -> None:
    reader = "Reader with an engine" if "engine" in how else "Reader"
    assert refitted(CAST_TO_TWO, **how)[1] == ["Source"] * 2 + [reader] * 2


def test_a_source_casts_for_readers_of_both_kinds() -> None:
    ends = ["Source that pushes casts"] * 2 + ["Reader", "Reader that is written"]
    assert refitted(CAST_TO_TWO, sleeping={0})[1] == ends


CHAIN = ["ChainSource", *["Replica"] * 3]


@pytest.mark.parametrize("waves", [1, 5, 64])
def test_replicas_are_a_chain(waves: int) -> None:
    assert refitted(ONE_TO_THREE, waves=waves) == (["direct"] * 4, CHAIN)


def test_a_copy_engine_helps_a_chain() -> None:
    *push, last = CHAIN
    assert refitted(ONE_TO_THREE, engine=True, apart=True)[1] == [*(f"{end} with an engine" for end in push), last]


@pytest.mark.parametrize("how", [{}, {"engine": True, "apart": True}], ids=["kernels", "engines"])
@pytest.mark.parametrize("case", [TWO_TO_FOUR, FP8_TO_FP8, ALL_CAST, SOME_CAST, ON_ONE_HOST], ids=str)
def test_replicas_of_several_kinds_are_chains(case: Case, how: dict[str, Any]) -> None:
    plan = case.plan()
    assert len(plan.later_hops) == 1
    ends = [end.removesuffix(" with an engine") for end in refitted(case, **how)[1]]
    assert ends == ["ChainSource"] * plan.train.world + ["Replica"] * plan.gen.world


@pytest.mark.parametrize("case", [ONE_TO_THREE, ALL_CAST], ids=str)
def test_with_checksums_replicas_pull_wave_by_wave(case: Case) -> None:
    assert set(refitted(case, checksums=True)[1]) == {"RelayedExecutor"}


def test_replicas_that_share_experts_are_no_chain() -> None:
    plan = DENSE_ALONE_IS_PASSED_ON.plan()
    assert len(plan.later_hops) == 1
    assert set(refitted(DENSE_ALONE_IS_PASSED_ON)[1]) == {"RelayedExecutor"}


def test_what_is_passed_on_twice_is_pulled_wave_by_wave() -> None:
    assert set(refitted(THREE_HOPS)[1]) == {"RelayedExecutor"}


def test_where_all_are_near_auto_has_a_chain() -> None:
    assert refitted(ONE_TO_THREE, unreachable="")[1] == CHAIN


@pytest.mark.parametrize(
    ("case", "unreachable"),
    [
        (ONE_TO_THREE, "train:0-gen:2"),
        (ALL_CAST, "train:0-gen:2,relay:0-gen:1"),
        (PIPELINED_CAST, "train:0-gen:0"),
    ],
    ids=["one replica", "one replica, and others from each other, cast", "a stage, cast"],
)
def test_beside_pairs_that_are_far(case: Case, unreachable: str) -> None:
    names, ends = refitted(case, unreachable)
    assert "direct+far" in names and {*names} <= {"direct", "far", "direct+far"}
    assert {*ends} <= {"RelayedExecutor", "MixedExecutor"}


SLOTS_OF = {"bucket_bytes": 256, "places": {"1": 0}, "first_slots": {"1": 1}, "slots": {}, "events": ["a", "b"]}
READ_BY = {"events": {"1": ["a", "b"]}, "turns": {"1": 2}, "gpu": "GPU-0"}
MALFORMED = [
    *(SLOTS_OF | {"bucket_bytes": word} for word in (0, 100, 256.0, True, "256")),
    *(SLOTS_OF | {"places": word} for word in ({}, {"1": 8}, {"1": -256}, {"1": 0.5})),
    *(SLOTS_OF | {"first_slots": word} for word in ({}, {"1": 2}, {"1": -1}, {"1": True}, {"1": "1"})),
    *(SLOTS_OF | {"events": word} for word in ("ab", ["a"], {"a": 1, "b": 2}, None)),
    *(READ_BY | {"turns": word} for word in ({}, {"1": 4}, {"1": -1}, {"1": 1.5}, {"1": True})),
    *(READ_BY | {"events": word} for word in ({}, {"1": ["a"]}, {"1": "ab"})),
]


def refused(number: int, address: str, words: list[dict[str, Any]]) -> list[bool]:
    """Which words of a source, or of a reader, are malformed."""
    direct_on_cpu.import_no_cuda()
    from mcore_reshard.kernels.rendezvous.exchange import parse_stored, stored_text
    from mcore_reshard.kernels.transports.direct import slots

    device: Any = None
    slots.Export, slots.open_event = MagicMock(), lambda text, _: text  # type: ignore[misc, assignment]
    found = []
    for word in words:
        parse = (
            partial(slots._parse_slots, device, 1) if "slots" in word else partial(slots._parse_reader, device, 1, 4)
        )
        try:
            parse_stored("word", stored_text(word).encode(), parse)
            found.append(False)
        except SessionError:
            found.append(True)
    return found


def test_words_about_slots_are_checked() -> None:
    (found,) = values(run_ranks(1, refused, [SLOTS_OF, READ_BY, *MALFORMED], timeout_s=60.0))
    assert found == [False] * 2 + [True] * len(MALFORMED)
