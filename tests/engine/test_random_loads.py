"""Tiny models of every family, on random meshes: real loaders put tagged weights where the traces of the same models say.

vLLM's loader runs on one rank, in this process; Megatron-Bridge's runs on all ranks of a world, in processes of their own.
"""

from __future__ import annotations

import json
import os
import random
from collections.abc import Iterator, Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.zoo_newest import IS_NEWEST, NEWEST_MESHES

from mcore_reshard.engines.vllm.model import loaded_tensors
from mcore_reshard.engines.vllm.trace import trace_loading
from mcore_reshard.planner.layout.mesh import TrainMesh, parse_train_mesh
from mcore_reshard.planner.layout.traces import HfTensor, RankTrace
from mcore_reshard.planner.model.configs import load_config, traced_names
from mcore_reshard.validation.engine.slices import GenSizes, poison
from mcore_reshard.validation.engine.vllm_engine import build_engine
from mcore_reshard.validation.processes import ProcessError, run_processes
from mcore_reshard.validation.tiny import TINY, checkpoint_shapes, payload, write_checkpoint
from mcore_reshard.validation.trainer import build, te_standin

TRACED = [name for name in traced_names() if name.startswith("tiny-") and (IS_NEWEST or name not in NEWEST_MESHES)]
CONFIGS: dict[str, dict[str, Any]] = {**TINY, **{name: load_config(name) for name in TRACED}}
CHANGES: list[dict[str, Any]] = [
    {}, {}, {"vocab_size": 250}, {"vocab_size": 130}, {"num_key_value_heads": 2}, {"num_key_value_heads": 1},
    {"num_attention_heads": 16, "head_dim": 8}, {"intermediate_size": 160}, {"num_hidden_layers": 3},
]  # fmt: skip
GEN = [
    GenSizes(tp=1), GenSizes(tp=2), GenSizes(tp=4), GenSizes(pp=2), GenSizes(tp=2, pp=2), GenSizes(tp=2, ep=2),
    GenSizes(tp=4, ep=4),
]  # fmt: skip
TRAIN = ["tp=1", "tp=2", "tp=4", "pp=2", "tp=2,pp=2", "ep=2,dp=2", "tp=2,ep=2", "tp=2,ep=2,etp=1"]


@pytest.fixture(scope="module", autouse=True)
def megatron() -> None:
    build.prepare()  # once for all forked processes; it registers configs that transformers lacks


def draws(seed: int) -> Iterator[tuple[str, dict[str, Any], random.Random]]:
    """Names and changed configs, without end."""
    rng = random.Random(seed)
    while True:
        name = rng.choice(sorted(CONFIGS))
        changes = rng.choice(CHANGES)
        config = CONFIGS[name]
        listed = "num_hidden_layers" in changes and "layer_types" in config  # a list with an entry for each layer
        if name in TINY and changes.keys() <= config.keys() and not listed:
            config = {**config, **changes}
        yield name, config, rng


def wrong(
    trace: RankTrace, data: Mapping[str, torch.Tensor], live: Mapping[str, torch.Tensor]
) -> tuple[int, list[str]]:
    """The bytes compared, and the tensors that hold other bytes than their trace says."""
    compared, found = 0, []
    for each in trace.tensors:
        if each.computed:
            continue
        loaded = live[each.tensor.name].detach()
        said = poison(torch.empty(each.tensor.shape, dtype=loaded.dtype)).reshape(-1)
        for box in each.padding:
            said.as_strided(box.extents, box.dst_strides, box.dst_offset).zero_()
        for name, copy in each.copies:
            source = data[name].as_strided(copy.extents, copy.src_strides, copy.src_offset)
            said.as_strided(copy.extents, copy.dst_strides, copy.dst_offset).copy_(source)
        compared += said.numel() * said.element_size()
        if not torch.equal(said.view(torch.uint8), loaded.contiguous().reshape(-1).view(torch.uint8)):
            found.append(each.tensor.name)
    return compared, found


def hf_tensors(data: Mapping[str, torch.Tensor]) -> dict[str, HfTensor]:
    return {
        name: HfTensor(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in data.items()
    }


def check_engines(count: int, folder: Path) -> None:
    done, families = 0, set()
    for name, config, rng in draws(seed=1):
        sizes = rng.choice(GEN)
        gen_rank = rng.randrange(sizes.world)
        (folder / "config.json").write_text(json.dumps(config))
        try:
            data = dict(payload(checkpoint_shapes(config), 1))
            engine = build_engine(folder, sizes, gen_rank)
            with torch.no_grad():
                engine.load_weights(iter(data.items()))
        except Exception:  # models that vLLM, or transformers, does not build on this mesh or with this change
            continue
        # The trace is of the engine as it is; poisoned, so that what a trace leaves out would show.
        compared, found = wrong(trace_loading(engine, hf_tensors(data)), data, dict(loaded_tensors(engine)))
        assert compared and not found, (name, sizes, gen_rank, found[:5])
        done += 1
        families.add(name)
        if done == count:
            break
    assert len(families) > min(count, len(CONFIGS)) // 2


def trainer_rank(rank: int, folder: str, mesh: TrainMesh) -> tuple[int, list[str]]:
    from safetensors.torch import load_file

    from mcore_reshard.trainers.megatron.model import local_tensors
    from mcore_reshard.trainers.megatron.trace import trace_import

    os.environ["MEGATRON_CONFIG_LOCK_DIR"] = f"{folder}/locks{rank}"
    store = torch.distributed.FileStore(f"{folder}/store", mesh.world)
    limit = timedelta(seconds=90)
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=mesh.world, timeout=limit)
    trainer = build.build_trainer(f"{folder}/1", mesh)
    data = load_file(f"{folder}/1/model.safetensors")
    with te_standin.cpu_as_device():
        tasks = trainer.bridge.get_conversion_tasks(trainer.model_chunks)
        trace = trace_import(trainer.bridge._model_bridge, trainer.model_chunks, tasks, hf_tensors(data))
    return wrong(trace, data, local_tensors(trainer.model_chunks))


def check_trainers(count: int, folder: Path) -> None:
    done = 0
    for number, (name, config, rng) in enumerate(draws(seed=2)):
        mesh = parse_train_mesh(rng.choice(TRAIN))
        place = folder / str(number)
        try:
            write_checkpoint(config, place / "1", 1)
            ranks = run_processes(mesh.world, trainer_rank, (str(place), mesh), timeout_s=200)
        except (ProcessError, ValueError, KeyError, NotImplementedError):
            continue  # Megatron-Core does not build every model on every mesh
        for rank, (_, found) in enumerate(ranks):
            assert not found, (name, mesh, rank, found[:5])
        assert sum(compared for compared, _ in ranks), (name, mesh)
        done += 1
        if done == count:
            return


def test_vllm_loads_what_traces_say(tmp_path: Path) -> None:
    check_engines(12, tmp_path)


def test_megatron_bridge_loads_what_traces_say(tmp_path: Path) -> None:
    check_trainers(2, tmp_path)


@pytest.mark.slow
def test_vllm_loads_what_traces_say_of_many_models(tmp_path: Path) -> None:
    check_engines(140, tmp_path)


@pytest.mark.slow
def test_megatron_bridge_loads_what_traces_say_of_many_models(tmp_path: Path) -> None:
    check_trainers(60, tmp_path)
