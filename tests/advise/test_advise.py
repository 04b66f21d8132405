"""The meshes that `advise` names can be planned, fit in memory as counted by hand, and no other pair refits faster."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from mcore_reshard.advise.advise import ACTIVATIONS, GPU_BYTES, KV_CACHE, Advised, _advice, _Side, advise
from mcore_reshard.advise.candidates import gen_candidates, train_candidates
from mcore_reshard.advise.footprint import Ints, engine_bytes, placed, send_shares, trainer_bytes
from mcore_reshard.planner.layout.engines import engine_named
from mcore_reshard.planner.layout.megatron import MegatronLayout
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.model.parameters import ModelParameters
from mcore_reshard.planner.plan.locate import located
from mcore_reshard.planner.topology.topology import parse_topology
from mcore_reshard.planning import InputError, PlanRequest, read_request
from mcore_reshard.simulate.simulate import simulate

VLLM = engine_named("vllm")
TINY = [
    "tiny-llama",
    "tiny-qwen2",
    "tiny-qwen3",
    "tiny-qwen3-moe",
    "tiny-deepseek-v3",
    "tiny-moonlight",
    "tiny-kimi-k2",
]


def request_of(config: str, **dtypes: str) -> PlanRequest:
    return read_request(config, TrainMesh(), GenMesh(), **dtypes)


def kept_on(mesh: TrainMesh, model: ModelParameters) -> Ints:
    """What the ranks of a trainer keep."""
    return trainer_bytes(placed(MegatronLayout(model, mesh), model, mesh.world), model.dtype, mesh)


def advised_on(config: str, train: int, gen: int, topology: str = "h200-8", **dtypes: str) -> Advised:
    return advise(request_of(config, **dtypes), parse_topology(topology, train, gen))


# --- bytes of a mesh -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", TINY)
@pytest.mark.parametrize("gen", [GenMesh(tp=2), GenMesh(tp=2, pp=2, dp=2), GenMesh(tp=2, dp=2)])
def test_an_engine_holds_what_a_refit_brings_it(config: str, gen: GenMesh) -> None:
    request = replace(request_of(config), train=TrainMesh(dp=2), gen=gen)
    plan = request.plan()
    layout = VLLM.layout(request.model_parameters, gen)
    assert not plan.misc
    assert (
        engine_bytes(placed(layout, request.model_parameters, gen.world), gen.world).tolist()
        == plan.recv_bytes.tolist()
    )


def test_an_engine_in_fp8_holds_what_a_refit_brings_it_but_for_scales() -> None:
    bf16, fp8 = (advised_on("qwen3-30b-a3b", 8, 2, gen_dtype=dtype).pairs for dtype in ("bf16", "fp8"))
    whole = {pair.gen: pair.gen_bytes for pair in bf16}
    for pair in fp8:
        assert 0.5 < pair.gen_bytes / whole[pair.gen] < 0.53
        plan = replace(request_of("qwen3-30b-a3b", gen_dtype="fp8"), train=pair.train, gen=pair.gen).plan()
        assert pair.gen_bytes == pytest.approx(plan.recv_bytes.max(), rel=0.001)


def test_a_trainer_keeps_six_bytes_and_twelve_divided_by_hand() -> None:
    model = request_of("tiny-llama").model_parameters
    elements = sum(group.count * np.prod(group.shape) for group in model.groups)
    for dp in (1, 2, 4):
        mesh = TrainMesh(dp=dp)
        held = kept_on(mesh, model)
        assert held.tolist() == [int(elements * (6 + 12 / dp))] * dp
    wide = replace(model, dtype="float32")
    mesh = TrainMesh(dp=2)
    assert kept_on(mesh, wide)[0] == int(elements * (8 + 8 / 2))


def test_experts_are_divided_over_their_own_replicas_by_hand() -> None:
    model = request_of("tiny-qwen3-moe").model_parameters
    sizes = {group.name_pattern: group.count * int(np.prod(group.shape)) for group in model.groups}
    experts = sum(size for name, size in sizes.items() if ".experts." in name)
    dense = sum(sizes.values()) - experts
    mesh = TrainMesh(ep=2, dp=4)  # each expert on 2 of the 4 ranks
    held = kept_on(mesh, model)
    assert held.tolist() == [int(dense * (6 + 12 / 4) + experts / 2 * (6 + 12 / 2))] * 4


@pytest.mark.parametrize("config", TINY)
def test_training_ranks_send_every_byte_once_together(config: str) -> None:
    request = replace(request_of(config), train=TrainMesh(tp=2, pp=2, dp=2))
    model = request.model_parameters
    shares = send_shares(placed(MegatronLayout(model, request.train), model, 8), 8)
    assert shares.sum() == pytest.approx(request.plan().bulk_bytes)
    assert shares == pytest.approx(request.plan().send_bytes, rel=0.35)  # where whole members cannot be halved


# --- which meshes --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("config", ["tiny-llama", "tiny-qwen3-moe", "tiny-nemotron-h", "tiny-gpt-oss"])
def test_every_candidate_can_be_planned_and_proven(config: str) -> None:
    request = request_of(config)
    trains, _ = train_candidates(request.model_parameters, 4, 8)
    gens, _ = gen_candidates(request.model_parameters, VLLM, 4)
    assert {mesh.world for mesh, _ in trains} == {mesh.world for mesh, _ in gens} == {4}
    assert len({*(mesh for mesh, _ in trains)}) == len(trains) > 2
    for train, gen in [
        *product([mesh for mesh, _ in trains], [gens[0][0]]),
        *product([trains[0][0]], [m for m, _ in gens]),
    ]:
        assert read_request(config, train, gen).plan().prove().ok


def test_meshes_that_a_model_does_not_allow_are_left_out_with_the_reason() -> None:
    model = request_of("tiny-llama").model_parameters  # 8 heads, 4 KV heads
    trains, reasons = train_candidates(model, 16, 16)
    assert max(mesh.tp for mesh, _ in trains) == 8 and all(mesh.ep == 1 for mesh, _ in trains)
    assert any("cannot be divided by tp = 16" in reason for reason in reasons)
    assert any("exceeds the 4 layers" in reason for reason in reasons)


def test_uneven_pipelines_state_their_layers() -> None:
    model = request_of("deepseek-v3").model_parameters  # 61 layers
    trains, _ = train_candidates(model, 64, 8)
    uneven = next(mesh for mesh, _ in trains if mesh.pp == 8)
    assert uneven.layers == (8, 8, 8, 8, 8, 7, 7, 7)


@pytest.mark.parametrize(
    ("config", "train", "gen", "topology"),
    [
        pytest.param("qwen3-4b", 4, 4, "h200-8", marks=pytest.mark.slow),
        pytest.param("qwen3-4b", 4, 4, "h200-8,gpus=2", marks=pytest.mark.slow),
        ("tiny-qwen3-moe", 4, 2, "h200-8"),
    ],
)
def test_no_other_pair_of_meshes_refits_distinctly_faster(config: str, train: int, gen: int, topology: str) -> None:
    request, places = request_of(config), parse_topology(topology, train, gen)
    trains = [mesh for mesh, _ in train_candidates(request.model_parameters, train, places.machine.gpus)[0]]
    gens = [mesh for mesh, _ in gen_candidates(request.model_parameters, VLLM, gen)[0]]
    seconds = {
        (src, dst): simulate(located(replace(request, train=src, gen=dst).plan(), places), places).seconds
        for src, dst in product(trains, gens)
    }
    pairs = advise(request, places).pairs
    simulated = [pair.simulated_seconds for pair in pairs if pair.simulated_seconds is not None]
    assert simulated == sorted(simulated) and len(simulated) == min(3, len(pairs))
    assert [pair.simulated_seconds is None for pair in pairs] == [number >= 3 for number in range(len(pairs))]
    assert all(seconds[pair.train, pair.gen] == pair.simulated_seconds for pair in pairs[:3])
    assert all(pair.bound_seconds <= 1.001 * seconds[pair.train, pair.gen] for pair in pairs)
    assert simulated[0] <= 1.1 * min(seconds.values())
    assert max(seconds.values()) > 1.1 * simulated[0]  # there are slower ones to choose from


@pytest.mark.long
def test_meshes_whose_bytes_leave_by_few_rails_are_not_advised() -> None:
    """By the NICs of its own GPUs, ep=16 sends as fast as ep=8. With PXN half of its bytes leave by a few NICs."""
    request, places = request_of("qwen3-30b-a3b"), parse_topology("h200-8", 16, 40)
    best = advise(request, places).pairs[0]
    assert (
        best.train.ep == 8 and best.simulated_seconds is not None and best.simulated_seconds < 1.06 * best.bound_seconds
    )
    slower = replace(request, train=TrainMesh(ep=16, dp=16), gen=best.gen).plan()
    assert simulate(located(slower, places), places).seconds > 1.15 * best.simulated_seconds


def test_meshes_are_tried_whose_ranks_send_more_if_they_suit_partly_filled_hosts() -> None:
    """By its busiest rank pp=3,ep=4 is not among the first three; by its busiest NIC it sends 23% less than ep=4, the first."""
    best = advise(request_of("qwen3-30b-a3b"), parse_topology("h200-8", 12, 12)).pairs[0]
    assert (best.train.pp, best.train.ep) == (3, 4) and best.bound_seconds < 0.11


def test_of_trainers_that_refit_as_fast_the_one_that_cuts_least_is_named() -> None:
    """Seven stages of uneven layers have a bound of 32.197 ms, seven replicas 32.198."""
    request, places = request_of("qwen3-4b"), parse_topology("h200-8", 7, 5)
    best, stages = advise(request, places).pairs[0], TrainMesh(pp=7, layers=(6, 5, 5, 5, 5, 5, 5))
    other, _ = _advice(request, places, _Side(stages, 0, 0.0), _Side(best.gen, 0, 0.0), pxn=True)
    assert best.train == TrainMesh(dp=7)
    assert other.bound_seconds < best.bound_seconds <= 1.01 * other.bound_seconds


def test_the_bound_knows_that_all_nics_of_a_host_send_what_a_stage_holds() -> None:
    """The first of four stages has the embedding. Its two GPUs' own NICs would be busy for 45 ms, all eight for 40."""
    request, places = request_of("llama-3.1-8b"), parse_topology("h200-8", 8, 8)
    sides = (_Side(mesh, 0, 0.0) for mesh in (TrainMesh(tp=2, pp=4), GenMesh(tp=4, dp=2)))
    advice, plan = _advice(request, places, *sides, pxn=True)
    assert advice.bound_seconds == pytest.approx(simulate(plan, places).bound_s, rel=1e-6)
    own, _ = _advice(request, places, _Side(advice.train, 0, 0.0), _Side(advice.gen, 0, 0.0), pxn=False)
    assert own.bound_seconds > 1.1 * advice.bound_seconds


# --- memory --------------------------------------------------------------------------------------------------------


def test_what_is_named_fits_in_memory() -> None:
    advised = advised_on("qwen3-235b-a22b", 64, 16)
    assert advised.gpu_bytes == GPU_BYTES["h200-8"] == 141e9
    for pair in advised.pairs:
        assert pair.train_bytes <= (1 - ACTIVATIONS) * advised.gpu_bytes
        assert pair.gen_bytes <= (1 - KV_CACHE) * advised.gpu_bytes
    assert 0 < advised.fitting[0] < advised.allowed[0]  # some meshes would not fit
    assert 0 < advised.fitting[1] < advised.allowed[1]


def test_sides_that_share_gpus_fit_together() -> None:
    advised = advised_on("qwen3-30b-a3b", 8, 8, "h200-8,shared")
    assert all(pair.train_bytes + pair.gen_bytes <= 0.7 * advised.gpu_bytes for pair in advised.pairs)
    assert any("share GPUs" in assumption for assumption in advised.assumptions)


def test_too_few_gpus_are_refused_with_what_the_smallest_mesh_takes() -> None:
    with pytest.raises(
        InputError, match=r"no training mesh fits: the smallest takes 772 GB of each GPU, and 98\.7 GB of"
    ):
        advised_on("deepseek-v3", 16, 8)
    with pytest.raises(InputError, match=r"no generation mesh fits: .* 98\.7 GB of 141 GB are for it: give more GPUs"):
        advised_on("deepseek-v3", 256, 8)
    with pytest.raises(InputError) as error:
        advised_on("deepseek-v3", 16, 4)
    assert [problem.split(" mesh ")[0] for problem in error.value.problems] == ["no training", "no generation"]


def test_a_trainer_that_does_not_fit_on_shared_gpus_is_all_that_is_refused() -> None:
    """The engine would fit beside a smaller trainer: it has no line. 0.7 * 141 GB less its 15.3 GB are for the trainer."""
    for config, gpus, topology, room in [
        ("qwen3-30b-a3b", 4, "h200-8,shared", "83.4 GB of 141 GB"),
        ("llama-3.1-8b", 1, "h100-8,shared", "39.9 GB of 80.0 GB"),
    ]:
        with pytest.raises(InputError) as error:
            advised_on(config, gpus, gpus, topology)
        (problem,) = error.value.problems
        assert problem.startswith("no training mesh fits")
        assert problem.endswith(f"{room} are for it beside the smallest engine: give more GPUs")


def test_where_neither_side_fits_on_shared_gpus_each_is_told_what_it_would_have_alone() -> None:
    with pytest.raises(InputError) as error:
        advised_on("deepseek-v3", 8, 8, "h200-8,shared")
    assert [problem.split(" mesh ")[0] for problem in error.value.problems] == ["no training", "no generation"]
    assert all("and 98.7 GB of 141 GB are for it: give" in problem for problem in error.value.problems)


def test_the_reason_says_what_is_busy_and_how_many_copies_there_are() -> None:
    (pair, *_) = advised_on("llama-3.1-8b", 8, 1).pairs
    assert pair.reason.startswith("16.1 GB enter by NIC; each byte once")
    assert pair.bound_seconds == pytest.approx(16.06 / 50, rel=0.01)
    assert pair.simulated_seconds == pytest.approx(pair.bound_seconds, rel=0.1)
    copies = {pair.gen.dp: pair.reason for pair in advised_on("qwen3-4b", 8, 4).pairs}
    assert "4.0 copies in all" in copies[4]
    shared = advised_on("llama-3.1-8b", 8, 8, "h200-8,shared").pairs[0]
    assert shared.reason == "2.01 GB enter by own GPU; each byte once; 100% from the own host"


@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("config", "gpus"),
    [
        ("llama-3.1-8b", 8),
        ("qwen3-4b", 8),
        ("gpt-oss-20b", 8),
        ("qwen3-30b-a3b", 16),
        ("nemotron-3-nano-30b-a3b", 16),
        pytest.param("qwen3-235b-a22b", 64, marks=pytest.mark.slow),
    ],
)
def test_real_models_are_advised_on(config: str, gpus: int) -> None:
    advised = advised_on(config, gpus, gpus // 2)
    assert advised.pairs and all(pair.train.world == gpus and pair.gen.world == gpus // 2 for pair in advised.pairs)
    assert len({pair.gen for pair in advised.pairs}) == len(advised.pairs)


@pytest.mark.slow
def test_deepseek_v3_on_256_and_128_gpus_takes_less_than_a_minute() -> None:
    start = time.process_time()
    advised = advised_on("deepseek-v3", 256, 128, gen_dtype="fp8", train_dtype="bf16")
    assert time.process_time() - start < 60
    assert advised.pairs[0].simulated_seconds is not None and 0 < advised.pairs[0].simulated_seconds < 1
