"""The public names: what they need installed, and the README's lines on real training processes."""

from __future__ import annotations

import socket
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers.front_door import Optimizer, free_address, goes_on_listening, golden_file, lines_with, refill

import mcore_reshard as mr
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planning import InputError
from mcore_reshard.session.endpoints import GenerationEndpoint
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.validation import tiny
from mcore_reshard.validation.engine.slices import GenSizes, StandInEngine
from mcore_reshard.validation.processes import run_processes

needs_megatron = pytest.mark.skipif(
    find_spec("megatron") is None or find_spec("megatron.bridge") is None, reason="needs the extra `megatron`"
)
NAMES = ["plan", "load_plan", "Plan", "TrainMesh", "GenMesh", "megatron", "dtensor", "vllm", "Options", "RefitError"]
STEPS = 2


def test_the_public_names_are_these_ten() -> None:
    assert mr.__all__ == NAMES
    assert {*NAMES} < {*dir(mr)}
    assert all(getattr(mr, name) is not None for name in NAMES)
    with pytest.raises(AttributeError, match="no attribute 'refit'; public names: plan, load_plan"):
        mr.refit  # noqa: B018


NUMPY_ALONE = """
import sys

class Hidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {"torch", "megatron", "transformers", "vllm", "triton", "rich"}:
            raise ModuleNotFoundError(f"No module named {name!r}", name=name)

sys.meta_path.insert(0, Hidden())
import mcore_reshard as mr

plan = mr.plan("tiny-qwen3-moe", train="tp=2,pp=2,ep=2", gen=mr.GenMesh(tp=2))
assert plan.prove() and [*plan.transfers(rank="gen:1")] and [*plan.transfers("model.layers.0.*", element=None)]
plan.save(sys.argv[1])
again = mr.load_plan(sys.argv[1])
assert isinstance(again, mr.Plan) and again.digest == plan.digest
assert mr.Options(ctas=3) and issubclass(mr.RefitError, Exception) and mr.TrainMesh(tp=2).world == 2
"""


def test_planning_needs_numpy_alone(tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-c", NUMPY_ALONE, str(tmp_path / "plan.json")], check=True)


def test_all_that_is_wrong_with_a_request_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)5 problems.*training: .*generation: .*unknown dtype 'fp9'"):
        mr.plan("tiny-qwen3-moe", train="tp=3,ep=2", gen="tp=2,x=1", gen_dtype="fp9")


def test_dtypes_without_a_cast_are_refused() -> None:
    with pytest.raises(ValueError, match="give a dtype for train and one for gen"):
        mr.plan({**load_config("tiny-llama"), "torch_dtype": "float16"}, "tp=2", "tp=2", train_dtype="bf16")


def test_layers_in_another_spelling_lead_to_no_further_problem() -> None:
    with pytest.raises(ValueError, match=r"^training: layers are joined by \+; did you mean pp=2,layers=1\+3\?$"):
        mr.plan("tiny-qwen3", "pp=2,layers=1,3", "tp=2")


def test_what_is_no_mesh_no_config_and_no_policy_is_said_at_once() -> None:
    with pytest.raises(ValueError, match=r"(?s)3 problems.*config is a int.*train is a NoneType.*gen is a TrainMesh"):
        mr.plan(3, train=None, gen=mr.TrainMesh())  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="unknown policy 'foo', known: exact, conservative"):
        mr.plan("tiny-llama", train="tp=2", gen="tp=1", policy="foo")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("given", "said"),
    [
        ({"gen_dtype": ["bf16"]}, r"^gen_dtype is a list: give a text$"),
        ({"engine": None}, r"^engine is a NoneType: give a text$"),
        (
            {"train": "tp=99999999999999999999"},
            r"^training: .* = 99999999999999999999 ranks exceed the \d+ that a plan may",
        ),
        (
            {"gen": "tp=99999999999999999999"},
            r"^generation: .* = 99999999999999999999 ranks exceed the \d+ that a plan",
        ),
    ],
    ids=str,
)
def test_what_is_no_text_and_no_degree_is_named(given: dict[str, Any], said: str) -> None:
    with pytest.raises(InputError, match=said):
        mr.plan("tiny-llama", **{"train": "tp=2", "gen": "tp=1"} | given)


def test_a_proof_that_fails_is_false() -> None:
    plan = mr.plan("tiny-llama", train="tp=2", gen="tp=1")
    assert plan.prove()
    assert not replace(plan, transfer_groups=plan.transfer_groups[1:]).prove()


@pytest.mark.parametrize("asked", [{"rank": 0}, {"parameter": ["a"]}, {"element": "1"}, {"element": (1.5,)}], ids=str)
def test_transfers_says_what_it_wants(asked: dict[str, Any]) -> None:
    with pytest.raises(LookupError, match="write "):
        mr.plan("tiny-llama", train="tp=2", gen="tp=1").transfers(**{"parameter": "model.norm.weight"} | asked)


def test_a_config_is_a_name_a_path_or_a_dict(tmp_path: Path) -> None:
    config = load_config("tiny-qwen3")
    tiny.write_checkpoint(config, tmp_path, 1)
    plans = [
        mr.plan(source, train="tp=2", gen="tp=1", model="tiny")
        for source in ("tiny-qwen3", config, tmp_path, str(tmp_path / "config.json"))
    ]
    assert len({plan.digest for plan in plans}) == 1


def test_a_config_of_transformers_is_its_dict() -> None:
    transformers = pytest.importorskip("transformers")
    fields = load_config("tiny-qwen3")
    config = transformers.AutoConfig.for_model(**fields)
    assert not isinstance(config, dict)
    plan = mr.plan(config, train="tp=2", gen="tp=1", model="tiny")
    assert plan.digest == mr.plan(fields, train="tp=2", gen="tp=1", model="tiny").digest
    with pytest.raises(InputError, match=r"config: .*'mamba'"):
        mr.plan(transformers.AutoConfig.for_model("mamba"), train="tp=2", gen="tp=1")


# --- the README's lines ------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def megatron() -> None:
    from mcore_reshard.validation.trainer.build import prepare

    prepare()  # once, so that every forked world finds it imported


def train_by_readme(rank: int, mesh: TrainMesh, folder: Path, address: str) -> None:
    from mcore_reshard.validation.trainer.build import build_trainer

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=mesh.world)
    model = build_trainer(folder / "checkpoint", mesh)
    exec(
        lines_with("mr.megatron.connect(", address),
        {
            "model_chunks": model.model_chunks,
            "bridge": model.bridge,
            "hf_config": load_config(folder / "checkpoint"),
            "optimizer": Optimizer(model, folder, rank),
            "steps": STEPS,
        },
    )


def generate_by_endpoint(rank: int, folder: Path, address: str) -> list[str]:
    """An engine of one's own: the tensors that vLLM would hold. Returns the names of those that differ from golden."""
    from safetensors.torch import load_file

    engine = StandInEngine(load_config(folder / "checkpoint"), GenSizes(tp=2), rank)
    schedule = schedule_of(fetch_plan(address), "gen", rank)
    endpoint = GenerationEndpoint(schedule, engine.tensors, store=address, load_weights=engine.load_weights)
    endpoint.prepare()
    wrong = []
    for step in range(1, STEPS + 1):
        refill(engine.tensors.values())
        endpoint.refit(step)
        arrived = {name: tensor.clone() for name, tensor in engine.tensors.items()}
        refill(engine.tensors.values())
        engine.load_weights(load_file(golden_file(folder, step)).items())
        wrong += [name for name, tensor in engine.tensors.items() if not tensor.equal(arrived[name])]
    endpoint.close()
    return wrong


def by_readme(index: int, mesh: TrainMesh, folder: Path, address: str) -> list[str] | None:
    if index < mesh.world:
        train_by_readme(index, mesh, folder, address)
        return None
    return generate_by_endpoint(index - mesh.world, folder, address)


@needs_megatron
@pytest.mark.parametrize(
    ("model", "mesh"),
    [
        ("tiny-qwen3-moe", TrainMesh(tp=2, pp=2, ep=2)),
        ("tiny-nemotron-h", TrainMesh(tp=2)),  # its A_log and router go by name
    ],
)
def test_the_readmes_lines_move_every_byte(model: str, mesh: TrainMesh, tmp_path: Path, megatron: None) -> None:
    tiny.write_checkpoint(load_config(model), tmp_path / "checkpoint", 1)
    address = free_address()
    outcomes = run_processes(mesh.world + 2, by_readme, (mesh, tmp_path, address), timeout_s=120)
    assert outcomes == [None] * mesh.world + [[], []]
    assert not goes_on_listening(address), "the store of training rank 0 ends with the session"


# --- connect: an error on one rank is every rank's, and no store stays behind ------------------------------------


def refused(rank: int, folder: Path, address: str) -> dict[str, str]:
    """The message of `connect` on this rank in each case."""
    from megatron.core import parallel_state

    from mcore_reshard.validation.trainer.build import build_trainer

    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=2)
    model = build_trainer(folder / "checkpoint", TrainMesh(tp=2))
    config = load_config(folder / "checkpoint")
    golden, short = Options(transport="golden"), Options(timeout_s=2.0)
    outcomes = {}

    def attempt(
        case: str, hf_config: Any = config, bridge: Any = model.bridge, chunks: Any = model.model_chunks, **given: Any
    ) -> None:
        arguments = {"gen": "tp=1", "store": address, "connect_timeout_s": 1.0, **given}
        try:
            mr.megatron.connect(chunks, bridge, hf_config, **arguments)
        except Exception as error:
            outcomes[case] = f"{type(error).__name__}: {error}"
        dist.barrier()
        if goes_on_listening(address):
            outcomes[case] += ", and a store was left behind"
        dist.barrier()

    attempt("family", {**config, "model_type": "mystery"} if rank == 1 else config)
    attempt("path", "/nowhere/config.json" if rank == 1 else config)
    attempt("mesh", gen="tp=3")
    attempt("engine", engine="nothing")
    attempt("golden", bridge=None, options=golden)
    attempt("address", store="10.0.0.1")
    attempt("all", config | {"model_type": "mystery"}, gen="tp=3,x=1", store="10.0.0.1", chunks=[], gen_dtype="fp9")
    attempt("options", options={"transport": "gloo"} if rank == 1 else short)
    attempt("no time", connect_timeout_s=0.0)
    attempt("no number", connect_timeout_s="600", options=None)
    attempt("module", chunks=torch.nn.Linear(2, 2))
    attempt("number", chunks=5)
    attempt("bare", chunks=model.model_chunks[0], bridge=None, options=golden)
    with socket.create_server(("127.0.0.1", 0)) as deaf:
        attempt("taken", store=f"127.0.0.1:{deaf.getsockname()[1]}" if rank == 0 else address, options=short)
    attempt("absent", bridge=None, options=Options(timeout_s=20.0))
    parallel_state.destroy_model_parallel()
    for module in (module for chunk in model.model_chunks for module in chunk.modules()):
        module.__dict__.pop("pg_collection", None)
    attempt("parallel state")
    return outcomes


@needs_megatron
def test_a_connect_that_fails_on_one_rank_fails_on_all(tmp_path: Path, megatron: None) -> None:
    tiny.write_checkpoint(load_config("tiny-llama"), tmp_path / "checkpoint", 1)
    first, second = run_processes(2, refused, (tmp_path, free_address()), timeout_s=120)
    expected: dict[str, Callable[[str], bool]] = {
        "family": lambda said: "RefitError: " in said and "llama on train:0, mystery on train:1" in said,
        "path": lambda said: "RefitError: " in said and "/nowhere/config.json: is no file" in said,
        "mesh": lambda said: "RefitError: " in said and "tp = 3" in said,
        "engine": lambda said: "RefitError: " in said and "no engine 'nothing'" in said,
        "golden": lambda said: (
            "ValueError: Megatron-Bridge exports every parameter (golden): give connect() the" in said
        ),
        "address": lambda said: "'10.0.0.1' is not the address of a store: write 'host:port'" in said,
        "all": lambda said: all(
            part in said
            for part in (
                "model_chunks is empty",
                "axis 'x'",
                "'10.0.0.1' is not the address",
                "gen_dtype 'fp9'",
            )
        ),
        "options": lambda said: "RefitError: " in said and "options is a dict: give mr.Options(...)" in said,
        "no time": lambda said: "RefitError: " in said and "a number of seconds above 0, not 0.0" in said,
        "no number": lambda said: all(
            part in said for part in ("above 0, not '600'", "options is a NoneType: give mr")
        ),
        "module": lambda said: "model_chunks has no decoder in Linear: give the Megatron-Core model, or" in said,
        "number": lambda said: "RefitError: " in said and "model_chunks has no decoder in int: give" in said,
        "bare": lambda said: "ValueError: Megatron-Bridge exports every parameter (golden)" in said,
        "taken": lambda said: "no store of mcore-reshard" in said,
        "absent": lambda said: "gen:0 did not come to connect within 1 s" in said,
        "parallel state": lambda said: "call parallel_state.initialize_model_parallel first" in said,
    }
    for outcomes in (first, second):
        assert outcomes.keys() == expected.keys()
        assert [(case, outcomes[case]) for case, holds in expected.items() if not holds(outcomes[case])] == []
    assert [case for case in first if "left behind" in first[case] + second[case]] == []
    assert first["path"].startswith("SessionError: train:1: RefitError: ")
