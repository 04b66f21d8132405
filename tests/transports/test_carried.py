"""Carriers: ranks that receive by their NIC what others of their host want, and pass it on."""

from __future__ import annotations

from dataclasses import replace
from itertools import pairwise
from threading import Event
from typing import Any

import numpy as np
import pytest
import synthetic
import torch
from helpers import planned_refits
from helpers.gpu import needs_gpus
from helpers.plans import Case
from helpers.ranks import run_ranks, values
from helpers.ways import rounds_stand_in, stand_in
from plan.test_carriers import CARRYING, MOE, STRADDLED
from test_mixed import apart, on_gpus
from test_relay import Left, Part, after, fail

from mcore_reshard.kernels.copies.bind import bind
from mcore_reshard.kernels.copies.carried import PLACES, carried_places
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports import memory as memory_count
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports import relay as relaying
from mcore_reshard.kernels.transports.memory import session_memory
from mcore_reshard.kernels.transports.mixed import connect_by_pair
from mcore_reshard.kernels.transports.peer_access import UNREACHABLE_VARIABLE
from mcore_reshard.kernels.transports.relay import RelayedExecutor
from mcore_reshard.planner.plan.frozen import with_frozen
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan


def all_pairs(plan: Plan) -> str:
    """Every pair of ranks, as MCORE_RESHARD_UNREACHABLE has them."""
    gen = range(plan.gen.world)
    pairs = [f"train:{src}-gen:{dst}" for src in range(plan.train.world) for dst in gen]
    return ",".join(pairs + [f"relay:{src}-gen:{dst}" for src in gen for dst in gen if src != dst])


def over_gloo(number: int, address: str, case: Case) -> Any:
    return planned_refits.refit(number, address, case, "cpu", transport="gloo", bucket_bytes=8192, timeout_s=60.0)


def over_stand_ins(number: int, address: str, case: Case, unreachable: str) -> Any:
    """By `auto`, whose nccl has its rounds over gloo, and whose direct is gloo's."""
    near, far = stand_in("near"), rounds_stand_in("far")
    auto = replace(registry._transports["auto"], devices=frozenset({"cpu"}), unavailable_reason=lambda: None,
                   connect=lambda context: connect_by_pair(context, near, far))  # fmt: skip
    registry._transports["auto"] = auto  # this process ends with the test
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNREACHABLE_VARIABLE, unreachable)
        return planned_refits.refit(number, address, case, "cpu", timeout_s=60.0)


@pytest.mark.parametrize("case", CARRYING, ids=str)
def test_every_byte_arrives_over_gloo(case: Case) -> None:
    ranks = case.plan().train.world + case.plan().gen.world
    assert values(run_ranks(ranks, over_gloo, case, timeout_s=120.0)) == [({"gloo"}, {})] * ranks


@pytest.mark.parametrize("case", [STRADDLED, MOE], ids=str)
@pytest.mark.parametrize("way", ["auto", "nccl"])
def test_every_byte_arrives_in_the_rounds_of_nccl(case: Case, way: str) -> None:
    """With `auto` ranks pass on by direct, with nccl in the rounds of the next wave."""
    plan = case.plan()
    unreachable = apart(case) if way == "auto" else all_pairs(plan)
    ranks = plan.train.world + plan.gen.world
    found = values(run_ranks(ranks, over_stand_ins, case, unreachable, timeout_s=120.0))
    engine = {"far+near"} if way == "auto" else {"far"}
    assert found == [({"far"}, {})] * plan.train.world + [(engine, {})] * plan.gen.world


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("checksums", [False, True], ids=["plain", "checksums"])
@pytest.mark.parametrize("case", CARRYING, ids=str)
@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_every_byte_arrives_on_gpus(case: Case, transport: str, checksums: bool) -> None:
    plan = case.plan()
    ranks = plan.train.world + plan.gen.world
    unreachable = apart(case) if transport == "auto" else ""
    options = {"checksums": checksums, "scratch_bytes": 1 << 20}  # over nccl each pair has a message in every window
    told = run_ranks(ranks, on_gpus, case, transport, unreachable, options, timeout_s=180.0, method="spawn")
    engine = {"direct+nccl"} if transport == "auto" else {"nccl"}
    assert values(told) == [({"nccl"}, {})] * plan.train.world + [(engine, {})] * plan.gen.world


def failing_to_pass_on(number: int, address: str) -> None:
    """Generation rank 0 fails when it passes on the wave that would make room for another."""
    role = relaying._connect_role

    def broken(connect: Any, context: Any, hop: int, waves: Any) -> relaying.Role:
        found = role(connect, context, hop, waves)
        if waves[0].name == "relay:0":
            found.waves[4].run = lambda: fail(OSError("the wave is on fire"))  # type: ignore[method-assign, assignment]
        return found

    relaying._connect_role = broken  # this process ends with the test
    planned_refits.refit(number, address, STRADDLED, "cpu", transport="gloo", timeout_s=20.0)


def test_a_carrier_that_fails_is_everyones_error_with_its_cause_and_at_once() -> None:
    plan = STRADDLED.plan()
    assert 0 in plan.carrier_ranks
    outcomes = run_ranks(plan.train.world + plan.gen.world, failing_to_pass_on, timeout_s=60.0)
    assert max(outcome.seconds for outcome in outcomes) < 15
    assert all("the wave is on fire" in str(outcome.error) for outcome in outcomes)
    assert {outcome.kind for outcome in outcomes} == {"OSError", "SessionFailed"}


DEEP = replace(STRADDLED, changes=(("num_hidden_layers", 24),))
FIRST, LAST = range(16), range(8, 24)  # of its layers


def frozen_plan(case: Case, layers: range) -> Plan:
    plan = case.plan()
    groups = enumerate(plan.groups)
    trained = {(number, layer) for number, group in groups for layer in group.layers or (-1,) if layer not in layers}
    return with_frozen(plan, trained, {})


def refits_of_frozen(
    number: int, address: str, case: Case, layers: range, commit: str, transport: str = "gloo", unreachable: str = ""
) -> list[dict[str, int]]:
    """Wrong elements of three refits: all, and twice what the trainer does not leave frozen."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(UNREACHABLE_VARIABLE, unreachable)
        return _refits_of_frozen(number, address, frozen_plan(case, layers), commit, transport)


def _refits_of_frozen(number: int, address: str, plan: Plan, commit: str, transport: str) -> list[dict[str, int]]:
    options = Options(timeout_s=60.0, transport=transport, commit=commit, bucket_bytes=8192, scratch_bytes=1 << 20)
    device = "cpu" if transport == "gloo" else "cuda"
    rank, tensors, endpoint = planned_refits.endpoint_of(number, address, plan, device, options)
    train = endpoint.world == "train"
    endpoint.prepare()
    wrong: list[dict[str, int]] = []
    for version in (1, 2, 3):
        for local in without_frozen_tensors(plan, rank) if version > 1 and not train else ():
            tensors[local].view(torch.uint8).fill_(synthetic.POISON)
        endpoint.refit(version)
        wrong.append({} if train else synthetic.wrong_elements(plan, "gen", rank, tensors))
    endpoint.close()
    return wrong


def without_frozen_tensors(plan: Plan, rank: int) -> list[str]:
    """The engine's tensors that a later refit fills."""
    later = schedule_of(plan, "gen", rank).later
    assert later is not None
    return [local.name for index, local in enumerate(later.tensors) if index not in later.carried]


@pytest.mark.parametrize("commit", ["in_place", "staged"])
@pytest.mark.parametrize("layers", [FIRST, LAST], ids=["first", "last"])
def test_refits_that_leave_layers_out_bring_the_others(layers: range, commit: str) -> None:
    """What a rank carries then comes in other waves than before."""
    plan = frozen_plan(DEEP, layers)
    later = schedule_of(plan, "gen", int(plan.carrier_ranks[0])).later
    assert later is not None and later.carried
    told = values(run_ranks(14, refits_of_frozen, DEEP, layers, commit, timeout_s=120.0))
    assert told == [[{}, {}, {}]] * 14


@pytest.mark.gpu
@needs_gpus(1)
@pytest.mark.parametrize("commit", ["in_place", "staged"])
@pytest.mark.parametrize("layers", [FIRST, LAST], ids=["first", "last"])
@pytest.mark.parametrize("transport", ["auto", "nccl"])
def test_refits_on_gpus_that_leave_layers_out_bring_the_others(layers: range, commit: str, transport: str) -> None:
    unreachable = apart(DEEP) if transport == "auto" else ""
    told = run_ranks(
        14, refits_of_frozen, DEEP, layers, commit, transport, unreachable, timeout_s=180.0, method="spawn"
    )
    assert values(told) == [[{}, {}, {}]] * 14


# --- memory -----------------------------------------------------------------------------------------------------------


def test_waves_take_turns_in_three_places() -> None:
    plan = MOE.plan()
    schedule = schedule_of(plan, "gen", int(plan.carrier_ranks[0]))
    begins, nbytes = carried_places(schedule)
    table, found = schedule.tables[0], dict[int, list[tuple[int, int]]]()
    for tensor, wave, size in zip(table.tensor.tolist(), table.wave.tolist(), table.nbytes.tolist(), strict=True):
        if tensor in schedule.carried:
            found.setdefault(wave, []).append((begins[tensor], begins[tensor] + size))
    place = nbytes // PLACES
    assert len(found) > PLACES and begins.keys() == schedule.carried
    for wave, spans in found.items():
        spans.sort()
        assert all(stop <= start for (_, stop), (start, _) in pairwise(spans))
        assert spans[0][0] >= wave % PLACES * place and spans[-1][1] <= (wave % PLACES + 1) * place


def test_what_is_carried_is_bound_beside_the_model_and_counted() -> None:
    plan = MOE.plan()
    rank = int(plan.carrier_ranks[0])
    schedule = schedule_of(plan, "gen", rank)
    bound = bind(schedule, synthetic.allocate(schedule, torch.device("cpu")))
    carried = [bound.tensors[index] for index in sorted(schedule.carried)]
    (memory,) = {tensor.untyped_storage().data_ptr() for tensor in carried}
    nbytes = carried[0].untyped_storage().nbytes()
    assert nbytes == carried_places(schedule)[1]
    assert not any(name.startswith("carried:") for name in bound.fingerprints)
    assert memory not in {bound.by_name[name].untyped_storage().data_ptr() for name in bound.fingerprints}
    places = PLACES * int(plan.carried[:, rank].max())
    assert places <= nbytes < 1.5 * places, "tensors begin at multiples of 256 bytes, which are many here"
    for transport in ("gloo", "nccl", "auto"):
        with pytest.MonkeyPatch.context() as patch:
            counted = session_memory(plan, transports=(transport,)).transports[transport]["gen"]
            patch.setattr(memory_count, "PLACES", 0)
            without = session_memory(plan, transports=(transport,)).transports[transport]["gen"]
        assert [each.scratch - other.scratch for each, other in zip(counted, without, strict=True)] == [
            PLACES * int(carried) for carried in plan.carried.max(axis=0)
        ]
    part = bound.part(schedule.view.waves()[1])  # type: ignore[union-attr]
    assert {each.untyped_storage().data_ptr() for each in part.tensors} & {memory}, "waves have the same places"


# --- order ------------------------------------------------------------------------------------------------------------


def relayed(first: list[Part], sends: list[Part], *, carries: bool) -> RelayedExecutor:
    group: Any = Left()
    receives = [Part() for _ in sends]
    roles = [relaying.Role(1, True, tuple(sends), group), relaying.Role(1, False, tuple(receives), group)]
    return RelayedExecutor(first, roles, None, carries=carries)


@pytest.mark.parametrize("carries", [True, False])
def test_a_wave_lands_once_the_one_in_its_place_has_been_passed_on(carries: bool) -> None:
    seen: list[bool] = []
    let_go = Event()
    sends = [Part(lambda: after(let_go)), *(Part() for _ in range(4))]
    first = [Part() for _ in range(5)]
    first[2] = Part(lambda: seen.append(first[3].ran.wait(0.2)) or let_go.set() if carries else None)  # type: ignore[func-returns-value]
    first[3] = Part(lambda: seen.append(sends[0].ran.is_set()) or let_go.set())  # type: ignore[func-returns-value]
    executor = relayed(first, sends, carries=carries)
    executor.run()
    assert seen == ([False, True] if carries else [False])
    executor.close()


def test_who_cannot_pass_on_receives_to_the_end() -> None:
    """The trainer may wait for this rank."""
    sends = [Part(lambda: fail(OSError("on fire"))), *(Part() for _ in range(4))]
    first = [Part() for _ in range(5)]
    executor = relayed(first, sends, carries=True)
    with pytest.raises(OSError, match="on fire"):
        executor.run()
    assert first[4].ran.is_set()
    executor.close()


def test_a_rank_that_carries_nothing_passes_on_as_before() -> None:
    plan = STRADDLED.plan()
    idle = [r for r in range(plan.gen.world) if r not in plan.carrier_ranks]
    assert idle and all(not schedule_of(plan, "gen", rank).carried for rank in idle)
    assert np.all([schedule_of(plan, "gen", rank).carried for rank in plan.carrier_ranks.tolist()])
