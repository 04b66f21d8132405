"""When replicas leave, die or join, the others keep what has not changed, and every byte of every refit is right."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from helpers.fake_memory import share_over_gloo
from helpers.gpu import needs_gpus
from helpers.plans import TWO_LAYERS, Case
from helpers.ranks import run_ranks, store_of, values
from helpers.remote import Answer, Ranks, Remote, tell, weights

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.session import member
from mcore_reshard.session.attendance import WAITS, ready_key
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.places import own_place
from mcore_reshard.session.plan_exchange import publish_plan

# Three replicas or more pass on what they have received.
CASE = Case("tiny-llama", "tp=2", "tp=1,dp=4", changes=TWO_LAYERS)
OPTIONS = Options(transport="gloo", timeout_s=20.0)


def refit(
    trainer: Sequence[Remote], engines: Sequence[Remote], version: int, begins: Callable[[], None] = lambda: None
) -> tuple[list[Answer], list[Answer]]:
    """A refit that all commit, with every byte in place. `begins` returns when trainers may."""
    for engine in engines:
        engine.tell("refit")
    begins()
    told, answers = tell(trainer, "refit", version=version), [engine.answer() for engine in engines]
    assert [answer.error for answer in told + answers] == [None] * len(told + answers)
    assert [(answer.state, answer.held) for answer in answers] == [(f"complete({version})", version)] * len(answers)
    return told, answers


def wait_for_call(address: str, seat: str) -> None:
    """Until a new rank has called `refit`: trainers wait for it from then on."""
    with connect_store(address, OPTIONS, watches=True) as store:
        while not store.get(ready_key(seat), writer=seat).endswith(WAITS.encode()):
            time.sleep(0.02)


def counts(answers: Sequence[Answer], name: str) -> list[int]:
    return [(answer.kept or {}).get(name, 0) for answer in answers]


def start(ranks: Ranks) -> tuple[list[Remote], list[Remote]]:
    trainer = ranks.train(CASE, patch=share_over_gloo)
    engines = [ranks.gen(CASE, rank, patch=share_over_gloo) for rank in range(4)]
    assert [answer.error for answer in tell(trainer + engines, "prepare")] == [None] * 6
    return trainer, engines


def require_kept(before: Sequence[Answer], after: Sequence[Answer], new_peers: int) -> None:
    """Ranks that stay bind no tensor, export nothing, and read and map the memory of new peers alone, once."""
    for name in ("tensors bound", "exports made"):
        assert counts(after, name) == counts(before, name), name
    for name in ("tensors kept", "exports kept"):
        assert all(map(int.__lt__, counts(before, name), counts(after, name))), name
    for was, now in zip(before, after, strict=True):
        newly = now.opened[len(was.opened) :]
        assert len({owner for owner, _ in newly}) <= new_peers, newly
        assert len({*now.opened}) == len(now.opened), "an allocation was mapped twice"
    read = [now - was for was, now in zip(counts(before, "exports read"), counts(after, "exports read"), strict=True)]
    assert all(each <= new_peers for each in read), read


def test_a_replica_leaves_and_another_one_joins_and_what_has_not_changed_is_kept(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    told, answers = refit(trainer, engines, 1)
    assert counts(told, "exports made") == [1, 1]
    first = [*told, *answers[:3]]
    assert engines[3].tell("close").answer().error is None

    told, answers = refit(trainer, engines[:3], 2)
    second = [*told, *answers]
    require_kept(first, second, new_peers=0)
    assert all(now.mapped < was.mapped for was, now in zip(first[2:], second[2:], strict=True)), "the leaver's memory"

    newer = ranks.gen(CASE, 4, patch=share_over_gloo)
    assert newer.tell("prepare").answer().error is None
    told, answers = refit(trainer, [*engines[:3], newer], 3, lambda: wait_for_call(ranks.address, "gen:4"))
    require_kept(second, [*told, *answers[:3]], new_peers=1)
    refit(trainer, [*engines[:3], newer], 4)
    ends = tell([*trainer, *engines[:3], newer], "close")
    assert [answer.mapped for answer in ends] == [0] * 6, "closing releases all"


def test_a_replica_that_starts_again_on_its_seat_is_served_from_no_cache(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    told, answers = refit(trainer, engines, 1)
    first = [*told, *answers[:3]]
    engines[3].kill()
    newer = ranks.gen(CASE, 3, patch=share_over_gloo)
    assert newer.tell("prepare").answer().error is None
    for engine in (*engines[:3], newer):
        engine.tell("refit")
    after = [*tell(trainer, "refit", version=2), *(engine.answer() for engine in (*engines[:3], newer))]
    version = 2
    if any(answer.error for answer in after):  # the death costs one refit at most
        version = 3
        told, answers = refit(trainer, [*engines[:3], newer], 3)
        after = [*told, *answers]
    assert [answer.held for answer in after[2:]] == [version] * 4
    for was, now in zip(first[2:], after[2:5], strict=True):
        before = {handle for owner, handle in was.opened if owner == "relay:3"}
        newly = {handle for owner, handle in now.opened[len(was.opened) :] if owner == "relay:3"}
        assert newly and not newly & before, "memory of the process that died"
        assert was.mapped == now.mapped


def test_after_a_failure_what_is_whole_is_kept_and_the_dead_ranks_memory_is_unmapped(ranks: Ranks) -> None:
    trainer, engines = start(ranks)
    told, answers = refit(trainer, engines, 1)
    first = [*told, *answers[:3]]
    engines[3].freeze()  # it takes no part: the refit fails at the deadline, or goes on without it
    engines[3].kill()
    for engine in engines[:3]:
        engine.tell("refit")
    tell(trainer, "refit", version=2)
    for engine in engines[:3]:
        engine.answer()
    told, answers = refit(trainer, engines[:3], 3)
    second = [*told, *answers]
    require_kept(first, second, new_peers=0)
    assert all(now.mapped < was.mapped for was, now in zip(first[2:], second[2:], strict=True))


TRAINERS, LEAVER, JOINER = 2, 5, 6  # processes: trainers, then replicas 0 to 4
SPAWN_S = 180.0


def on_one_gpu(number: int, address: str, transport: str) -> list[tuple[Counter[str], bool]]:
    """A rank on GPU 0, as the test above has them: what it had made and kept after each refit, and whether it was right."""
    torch.cuda.set_device(0)
    member.own_place = lambda seat, _: own_place(seat, None)  # as on GPUs of their own, so that replicas relay
    plan = CASE.plan()
    world = "train" if number < TRAINERS else "gen"
    rank = number if world == "train" else number - TRAINERS
    options = Options(transport=transport, timeout_s=60.0)
    steps = store_of(address, "steps")

    def meet(step: str) -> None:
        steps.set(f"{step}/{number}", "")
        assert steps.wait_all([f"{step}/{each}" for each in range(JOINER + 1)], SPAWN_S)

    def held(version: int) -> dict[str, torch.Tensor]:
        return {name: each.cuda() for name, each in weights(plan, world, rank, version).items()}  # type: ignore[arg-type]

    tensors = held(0)
    kind: Any = TrainEndpoint if world == "train" else GenerationEndpoint
    endpoint = kind(RankOfPlan(plan, world, rank), lambda: tensors, store=address, options=options)  # type: ignore[arg-type]
    if number == 0:
        publish_plan(plan, address, options)
    meet("planned")
    told: list[tuple[Counter[str], bool]] = []
    for version in (1, 2, 3):
        if version == 2 and number == LEAVER:
            endpoint.close()
        meet(f"before {version}")
        if version == (3 if number == JOINER else 1):
            endpoint.prepare()
            assert endpoint.committed_version == (2 if number == JOINER else None), "it has what other replicas have"
        if number == JOINER and version == 3:
            told.append((Counter(endpoint._kept.counts), is_of(tensors, held(2))))
        meet(f"prepared {version}")
        if (number == LEAVER and version > 1) or (number == JOINER and version < 3):
            continue
        for name, each in held(version).items() if world == "train" else ():
            tensors[name].copy_(each)
        endpoint.refit(version)
        told.append((Counter(endpoint._kept.counts), is_of(tensors, held(version))))
    meet("over")
    endpoint.close()
    return told


def is_of(tensors: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(tensors[name].view(torch.uint8), each.view(torch.uint8)) for name, each in expected.items())


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("transport", ["direct", "auto"])
def test_on_one_gpu_what_has_not_changed_is_kept_too(transport: str) -> None:
    told = values(run_ranks(JOINER + 1, on_one_gpu, transport, timeout_s=SPAWN_S, method="spawn"))
    assert all(is_right for of_rank in told for _, is_right in of_rank)
    stay = [[counts for counts, _ in of_rank] for of_rank in told[:LEAVER]]

    def newly(name: str) -> list[list[int]]:
        """By rank: how many between the first refit and the second, and between this and the third."""
        return [[after[name] - before[name] for before, after in pairwise(of_rank)] for of_rank in stay]

    assert all(of_rank[0]["tensors bound"] > 0 for of_rank in stay)
    assert newly("tensors bound") == newly("exports made") == [[0, 0]] * LEAVER
    assert all(min(each) > 0 for each in newly("exports kept")[TRAINERS:])
    # Replicas are a chain, and each rank maps the memory of the next one: the leaver's, and then the joiner's, is mapped by one.
    assert all(of_rank[0]["exports read"] == 1 for of_rank in stay)
    assert sorted(newly("exports read")) == [[0, 0]] * (LEAVER - 1) + [[0, 1]]
    assert [[before > 0, after > 0] for before, after in newly("allocations mapped")] == newly("exports read")
    assert [before > 0 for before, _ in newly("allocations unmapped")] == [
        after > 0 for _, after in newly("exports read")
    ]
