"""Refits through SGLang's own weight updates: `--custom-weight-loader mcore_reshard.integrations.sglang.load`."""

from __future__ import annotations

import importlib.util
import os
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import sglang_server
from helpers.assembled import differences
from helpers.front_door import free_address
from helpers.sglang_server import Rank, held, in_background, post
from safetensors.torch import load_file

import mcore_reshard as mr
from mcore_reshard.engines.sglang.model import load_weights, local_tensors
from mcore_reshard.integrations.sglang import LOADER, command_request, command_tensors, send
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import tiny_config, write_checkpoint

INSTALLED = importlib.util.find_spec("sglang") is not None
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(not INSTALLED, reason="needs SGLang: run `make test-sglang`, which installs it for a CPU"),
]
OPTIONS = Options(transport="gloo", timeout_s=60)
SENT = {"transport": "gloo", "timeout_s": 60}
SESSION = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    """SGLang and Megatron, once, so that forked ranks find them."""
    from mcore_reshard.validation.trainer.build import prepare

    sglang_server.prepare()
    prepare()


def train(rank: int, folder: Path, mesh: TrainMesh, sizes: GenSizes, store: str, poison_one: bool = False) -> Any:
    """A trainer whose first rank also tells the engine, as a driver would."""
    from mcore_reshard.validation.trainer.build import build_trainer

    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = str(folder / f"locks{rank}")
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=mesh.world)
    model = build_trainer(folder / "1", mesh)
    tell = partial(in_background_send, folder, sizes.tp) if rank == 0 else lambda *_, **__: lambda: None
    told = tell("connect", store=store, **SENT)
    trainer = mr.megatron.connect(
        model.model_chunks, model.bridge, folder / "1", gen=f"tp={sizes.tp},ep={sizes.ep}", store=store,
        engine="sglang", options=OPTIONS,
    )  # fmt: skip
    told()
    misc = 0
    for version in (1, 2):
        model.load(folder / str(version))
        told = tell("refit", version=version)
        misc += trainer.refit(version).misc_bytes
        told()
        if rank == 0:
            post(url_of(folder), "flush_cache", {})  # the engine writes down what it holds
        dist.barrier()
    told = tell("close")
    trainer.close()
    told()
    (folder / f"done{rank}").touch()
    return misc


def in_background_send(folder: Path, tp: int, command: str, **arguments: Any) -> Any:
    return in_background(lambda: send(partial(post, url_of(folder)), command, tp=tp, **arguments))


def url_of(folder: Path) -> str:
    while not (folder / "port").exists():  # run_processes ends this process when another one fails
        time.sleep(0.02)
    return f"http://127.0.0.1:{(folder / 'port').read_text()}"


def generate(rank: int, folder: Path, sizes: GenSizes, ranks: int) -> tuple[list[Any], list[str], Any]:
    """Names of tensors that differ from what SGLang's loader makes of each version; the routes; the weight versions."""
    engine = Rank(folder / "1", sizes, rank, folder / "gen", load=False)
    snapshots: list[dict[str, torch.Tensor]] = []
    handle = engine.handle

    def handle_and_look(route: str, body: dict[str, Any]) -> dict[str, Any]:
        answer = handle(route, body)
        if route == "flush_cache":
            snapshots.append(held(engine.model))
            for tensor in local_tensors(engine.model).values():
                poison(tensor)
        return answer

    engine.handle = handle_and_look  # type: ignore[method-assign]
    engine.serve(folder / "port", lambda: len(list(folder.glob("done*"))) == ranks)
    wrong = []
    for version, found in enumerate(snapshots, 1):
        load_weights(engine.model, load_file(folder / str(version) / "model.safetensors").items())
        wrong.append(differences(found, held(engine.model)))
    return wrong, engine.routes, (engine.versions, engine.flushed)


def run_rank(index: int, folder: Path, mesh: TrainMesh, sizes: GenSizes, store: str) -> Any:
    if index < mesh.world:
        return train(index, folder, mesh, sizes, store)
    return generate(index - mesh.world, folder, sizes, mesh.world)


@pytest.mark.parametrize(
    ("family", "mesh", "sizes"),
    [
        ("qwen3", TrainMesh(tp=2), GenSizes(tp=1)),
        ("llama", TrainMesh(pp=2), GenSizes(tp=2)),
        ("qwen3_moe", TrainMesh(tp=2, ep=2, etp=1), GenSizes(tp=2, ep=2)),
        ("deepseek_v3", TrainMesh(tp=2), GenSizes(tp=2)),
    ],
)
def test_updates_of_sglang_bring_every_byte_that_its_loader_would_load(
    tmp_path: Path, family: str, mesh: TrainMesh, sizes: GenSizes
) -> None:
    for version in (1, 2):
        write_checkpoint(tiny_config(family), tmp_path / str(version), version)
    args = (tmp_path, mesh, sizes, free_address())
    results = run_processes(mesh.world + sizes.tp, run_rank, args, timeout_s=300)
    assert results[: mesh.world] == [0] * mesh.world  # nothing went by misc
    for wrong, routes, (versions, flushed) in results[mesh.world :]:
        assert wrong == [[], []]
        assert routes == [*SESSION, *SESSION, "flush_cache", *SESSION, "flush_cache", *SESSION]
        assert versions == [None, "1", "2", None]
        assert flushed == 2


def in_one_process(check: Any, *args: Any) -> Any:
    """What `check(*args)` returns in a process of its own: SGLang's groups and this adapter's state are a process's."""
    return run_processes(1, lambda _: check(*args), timeout_s=200)[0]


def one_rank(folder: Path, family: str) -> Rank:
    checkpoint = folder / "checkpoint"
    write_checkpoint(tiny_config(family), checkpoint, 1)
    return Rank(checkpoint, GenSizes(), 0, folder / "groups")


def refusal(engine: Rank, command: str, **arguments: Any) -> str:
    """The message of a command that SGLang answers with a failure. The engine's session must be closed again."""
    engine.routes.clear()
    with pytest.raises(mr.RefitError) as caught:
        send(engine.handle, command, tp=1, **arguments)
    assert engine.routes == SESSION
    return str(caught.value)


def refusals(folder: Path) -> dict[str, str]:
    engine = one_rank(folder, "qwen3_moe")
    found = {"no session": refusal(engine, "refit", version=1)}
    found["no store"] = refusal(engine, "connect", store=free_address(), connect_timeout_s=0.5, timeout_s=0.5)
    found["wrong option"] = refusal(engine, "connect", store=free_address(), bucket_bytes=3)
    engine.model.model.layers[1].mlp.experts.quant_method._aiter_runner = object()
    found["layout"] = refusal(engine, "connect", store=free_address())
    engine.model.model.layers[1].mlp.experts.quant_method._aiter_runner = None
    weights = [("lm_head.weight", torch.zeros(2)), ("model.norm.weight", torch.zeros(2))]
    engine.handle("begin_weight_update", {})
    found["weights"] = str(engine.manager.tp_worker.model_runner.weight_updater.update_weights_from_tensor(
        named_tensors=weights, load_format=LOADER
    ))  # fmt: skip
    engine.handle("end_weight_update", {})
    send(engine.handle, "close", tp=1)  # the engine still answers
    return found


def test_errors_of_commands_are_answers_and_end_the_update(tmp_path: Path) -> None:
    found = in_one_process(refusals, tmp_path)
    for case, words in {
        "no session": "SGLang refused refit: SessionError: this worker is in no session",
        "no store": "SGLang refused connect: SessionError: ",
        "wrong option": "ValueError: these options are wrong:\n  bucket_bytes must be",
        "layout": "the AITER backend shuffles experts after loading: model.layers.1.mlp.experts.w13_weight",
        "weights": "takes one tensor, mcore_reshard.command, with a command, not 2 tensors (first lm_head.weight)",
    }.items():
        assert words in found[case], found[case]


def places(folder: Path) -> list[str]:
    from mcore_reshard.engines.sglang.rank import sglang_place

    one_rank(folder, "qwen3")
    from sglang.srt import runtime_context

    parallel, found = runtime_context.get_parallel(), []
    for sizes in ({"pp_size": 2}, {"dp_size": 2}, {"ep_size": 2, "tp_size": 4}):
        given = type(
            "Parallel", (), {"__getattr__": lambda self, name, sizes=sizes: sizes.get(name, getattr(parallel, name))}
        )
        runtime_context.get_parallel = lambda given=given: given()
        with pytest.raises(ValueError, match="no refit reaches this SGLang engine") as caught:
            sglang_place()
        found.append(str(caught.value))
    return found


def test_meshes_whose_ranks_sglang_does_not_tell_together_are_refused(tmp_path: Path) -> None:
    stages, replicas, experts = in_one_process(places, tmp_path)
    assert "pp_size = 2: SGLang's stages take a command one after the other" in stages
    assert "dp_size = 2: SGLang refuses updates from tensors" in replicas
    assert "ep_size = 2: experts must be cut by tp_size alone, or ep_size be tp_size = 4" in experts


def begun_and_ended(folder: Path, family: str) -> tuple[list[str], list[str]]:
    """What differs after an update in which nothing was written, where a load ran and where none did."""
    engine = one_rank(folder, family)
    before = held(engine.model)
    send(engine.handle, "close", tp=1)
    after_loads = differences(held(engine.model), before)
    engine.handle("begin_weight_update", {})
    engine.handle("end_weight_update", {})
    return after_loads, differences(held(engine.model), before)


@pytest.mark.parametrize("family", ["qwen3", "llama_tied", "qwen3_moe", "deepseek_v3", "gpt_oss"])
def test_begin_and_end_of_an_update_leave_every_byte_of_unquantized_models(tmp_path: Path, family: str) -> None:
    assert in_one_process(begun_and_ended, tmp_path, family) == ([], [])


def mixed_and_drafted(folder: Path) -> tuple[str, str, list[str]]:
    from types import SimpleNamespace

    from sglang.srt.model_executor.model_runner import ModelRunner

    from mcore_reshard.engines.sglang.rank import SglangRank
    from mcore_reshard.integrations import sglang as adapter
    from mcore_reshard.kernels.errors import MixedWeightsError
    from mcore_reshard.session.state import intact, mixed

    engine, calls = one_rank(folder, "qwen3"), []
    rank = adapter._rank = SglangRank(engine.model)
    rank.endpoint = SimpleNamespace(state=mixed(3, 4, 0.5), rank_name="gen:0", close=lambda: None)  # type: ignore[assignment]
    with pytest.raises(MixedWeightsError) as caught:
        ModelRunner.forward(SimpleNamespace(), None)
    rank.endpoint.state = intact(3)  # type: ignore[misc]
    with pytest.raises(AttributeError) as ran:  # forward itself
        ModelRunner.forward(SimpleNamespace(), None)
    rank.refit = lambda version, everything: calls.append(str(version))  # type: ignore[method-assign, assignment]
    refit = command_tensors("refit", version=7)
    adapter.load(engine.model, refit)
    adapter.load(torch.nn.Linear(2, 2), refit)  # SGLang gives the draft model the same tensors
    return str(caught.value), str(ran.value), calls


def test_a_mixture_does_not_generate_and_a_draft_model_is_left_alone(tmp_path: Path) -> None:
    mixture, ran, calls = in_one_process(mixed_and_drafted, tmp_path)
    assert "gen:0: this engine holds a mixture of versions 3 and 4 (50%)" in mixture
    assert "apply_deprecated_skip_attn_backend_init" in ran  # of the batch, which is None here
    assert calls == ["7"]


def test_a_request_is_json_that_needs_no_client_of_sglang() -> None:
    import json

    body = json.loads(json.dumps(command_request("refit", 2, version=7)))
    assert body["load_format"] == LOADER and body["weight_version"] == "7" and body["flush_cache"] is True
    assert len(body["serialized_named_tensors"]) == 2 and body["selector"] == "target"
    assert command_request("connect", 1, store="a:1")["flush_cache"] is False
    with pytest.raises(ValueError, match="unknown command 'load', known: connect, refit, close"):
        command_request("load", 1)
