"""slime's own updater class and engine actors, moving a Megatron-Core trainer's weights into real SGLang models."""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist
from helpers import sglang_server
from helpers.assembled import differences
from helpers.sglang_server import Rank, held
from safetensors.torch import load_file

from mcore_reshard.engines.sglang.model import load_weights, local_tensors
from mcore_reshard.integrations.sglang import LOADER
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.planner.layout.mesh import TrainMesh
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.processes import run_processes
from mcore_reshard.validation.tiny import tiny_config, write_checkpoint

CHECKOUT = os.environ.get("MCORE_RESHARD_SLIME", "")
MISSING = [name for name in ("sglang", "ray", "httpx", "tqdm") if importlib.util.find_spec(name) is None]
pytestmark = [
    pytest.mark.sglang,
    pytest.mark.skipif(
        not Path(CHECKOUT, "slime").is_dir(), reason="needs a slime checkout: MCORE_RESHARD_SLIME=/path"
    ),
    pytest.mark.skipif(bool(MISSING), reason=f"needs {', '.join(MISSING)}: run `make test-sglang`"),
]
TRAIN, ENGINES = TrainMesh(tp=2), 2
ROOT = Path(__file__).parents[2]
SESSION = ["begin_weight_update", "update_weights_from_tensor", "end_weight_update"]
UPDATE = ["pause_generation", "flush_cache", *SESSION, "continue_generation"]


@pytest.fixture(scope="module", autouse=True)
def imported() -> None:
    from mcore_reshard.validation.trainer.build import prepare

    sys.path.append(CHECKOUT)
    sglang_server.prepare()
    prepare()


def await_file(file: Path) -> str:
    while not file.exists():  # run_processes ends this process when another one fails
        time.sleep(0.05)
    return file.read_text()


def write_whole(file: Path, text: str) -> None:
    file.with_suffix(".partial").write_text(text)
    file.with_suffix(".partial").rename(file)


def drive(folder: Path) -> None:
    """The Ray cluster, and the engine actors in it."""
    os.environ.setdefault("RAY_agent_register_timeout_ms", "200000")  # for busy machines
    import ray
    from helpers.slime_engine import ServedEngine

    paths = os.pathsep.join([str(ROOT), str(ROOT / "tests"), CHECKOUT])
    os.environ |= {"RAY_AUTH_MODE": "disabled", "RES_OPTIONS": "timeout:1 attempts:1"}
    ray.init(
        num_cpus=4, include_dashboard=False, namespace="slime", runtime_env={"env_vars": {"PYTHONPATH": paths}},
        _temp_dir=f"/tmp/ray-{os.getpid()}", object_store_memory=80 << 20,
    )  # fmt: skip
    actors = []
    for index in range(ENGINES):
        port = int(await_file(folder / f"port{index}"))
        actor = ray.remote(ServedEngine).options(name=f"engine{index}", num_cpus=0.1).remote("127.0.0.1", port)
        assert ray.get(actor.get_url.remote()) == f"http://127.0.0.1:{port}"
        actors.append(actor)
    write_whole(folder / "ray", ray.get_runtime_context().gcs_address)
    for rank in range(TRAIN.world):
        await_file(folder / f"done{rank}")
    ray.shutdown()


def train(rank: int, folder: Path) -> tuple[Any, Any]:
    from mcore_reshard.validation.trainer.build import build_trainer

    os.environ |= {"MEGATRON_CONFIG_LOCK_DIR": str(folder / f"locks{rank}"), "RAY_AUTH_MODE": "disabled"}
    dist.init_process_group("gloo", store=dist.FileStore(str(folder / "store")), rank=rank, world_size=TRAIN.world)
    trainer = build_trainer(folder / "1", TRAIN)
    import ray
    import slime.backends.megatron_utils as package
    from slime.utils.distributed_utils import init_gloo_group
    from slime.utils.misc import load_function

    ray.init(address=await_file(folder / "ray"), namespace="slime", log_to_driver=False)
    init_gloo_group()
    actor = ModuleType("slime.backends.megatron_utils.actor")  # the real one needs megatron.training and CUDA
    sys.modules[actor.__name__] = package.actor = actor
    args = arguments(folder)
    load_function(args.custom_megatron_init_path)(args)  # as initialize.py does
    updater = actor.UpdateWeightFromDistributed(
        args, trainer.model_chunks, weights_getter=dict, model_name="qwen3config", quantization_config=None
    )
    updater.weight_version = 0
    engines = [ray.get_actor(f"engine{index}") for index in range(ENGINES)]
    for session in (1, 2):  # slime connects anew whenever engines are
        updater.connect_rollout_engines(engines, None, engine_gpu_counts=[1] * ENGINES)
        trainer.load(folder / str(session))
        updater.update_weights()
    metrics = updater.pop_metrics()
    updater.disconnect_rollout_engines()
    write_whole(folder / f"done{rank}", "")
    return updater.weight_version, metrics


def arguments(folder: Path, **others: Any) -> SimpleNamespace:
    given = {
        "hf_checkpoint": str(folder / "1"),
        "rollout_num_gpus_per_engine": 1,
        "custom_megatron_init_path": "mcore_reshard.integrations.slime.install",
        "sglang_custom_weight_loader": [LOADER],
        "colocate": False,
        "update_weight_mode": "full",
        "update_weight_transport": "nccl",
    }
    return SimpleNamespace(**given | others)


def generate(index: int, folder: Path) -> tuple[list[Any], list[str], list[Any]]:
    engine = Rank(folder / "1", GenSizes(), 0, folder / f"gen{index}", load=False)
    snapshots: list[dict[str, torch.Tensor]] = []
    handle = engine.handle

    def handle_and_look(route: str, body: dict[str, Any]) -> dict[str, Any]:
        if route == "continue_generation":
            snapshots.append(held(engine.model))
            for tensor in local_tensors(engine.model).values():
                poison(tensor)
        return handle(route, body)

    engine.handle = handle_and_look  # type: ignore[method-assign]
    engine.serve(folder / f"port{index}", lambda: len(list(folder.glob("done?"))) == TRAIN.world)
    wrong = []
    for version, found in enumerate(snapshots, 1):
        load_weights(engine.model, load_file(folder / str(version) / "model.safetensors").items())
        wrong.append(differences(found, held(engine.model)))
    return wrong, engine.routes, engine.versions


def run_rank(index: int, folder: Path) -> Any:
    if index < TRAIN.world:
        return train(index, folder)
    if index < TRAIN.world + ENGINES:
        return generate(index - TRAIN.world, folder)
    return drive(folder)


def test_slimes_updates_bring_every_byte_that_sglang_would_load(tmp_path: Path) -> None:
    for version in (1, 2):
        write_checkpoint(tiny_config("qwen3"), tmp_path / str(version), version)
    results = run_processes(TRAIN.world + ENGINES + 1, run_rank, (tmp_path,), timeout_s=300)
    for version, metrics in results[: TRAIN.world]:
        assert version == 2
        assert metrics["refit/bytes"] > 100_000 and metrics["refit/seconds"] > 0
    for wrong, routes, versions in results[TRAIN.world : -1]:
        assert wrong == [[], []]
        assert routes == [*SESSION, *UPDATE, *SESSION, *UPDATE]
        assert versions == [None, "1", None, "2"]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ({"colocate": True}, "--colocate: slime hands engines tensors of their own GPU"),
        ({"update_weight_mode": "delta", "update_weight_transport": "disk"}, "--update-weight-mode delta: take full"),
        ({"sglang_custom_weight_loader": None}, f"give --sglang-custom-weight-loader {LOADER}"),
    ],
)
def test_arguments_under_which_slime_updates_otherwise_are_refused(others: dict[str, Any], message: str) -> None:
    from mcore_reshard.integrations.slime import check_arguments

    check_arguments(arguments(Path()))
    with pytest.raises(RefitError, match=message):
        check_arguments(arguments(Path(), **others))


def test_engines_that_no_one_plan_describes_are_refused() -> None:
    from mcore_reshard.integrations.slime import _mesh_of

    assert _mesh_of([2, 2], None) == (2, "tp=2,dp=2")
    assert _mesh_of([4], [{"tp_size": 4, "ep_size": 4}]) == (4, "tp=4,ep=4")
    for configs in ([{"tp_size": 2}, {"tp_size": 4}], [{"pp_size": 2}] * 2, [{"ep_size": 2}] * 2):
        with pytest.raises(RefitError, match="no refit reaches these engines"):
            _mesh_of([2, 2], configs)
