"""Measure `prepare`, as `connect` calls it, with the share of one DeepSeek-V3 rank: 256 training ranks to 128 of an engine.

    python tools/bench_prepare.py --out tools/results/prepare-x1.json                    # one GPU, by `direct`
    python tools/bench_prepare.py --device cpu --transport gloo --narrow 56 --out FILE   # no GPU: same counts, few bytes

One GPU cannot hold 384 ranks, so two sessions stand for them. Their model is DeepSeek-V3 with every width that tensor
parallelism cuts divided by 32. An engine of one rank then has the tensors, transfers and bytes of a real rank of tp=32:
845 tensors, 43.9 GB, in 47,877 transfers (a real one: 45,857).

- `one trainer`: its rank holds all layers and experts, 30,486 tensors. A real one has 232.
- `sixteen trainers`: pp=4, ep=4; each holds up to 2,115 tensors. The engine's rank reads from 16 peers, a real one from 256.

What differs from the real session: its store serves 384 ranks, on many hosts; its weights of `down_proj` lie in rows of
4 KiB at the trainer, here in rows of 128 bytes; `direct` reads GPU memory, which no two hosts share.

Each session connects three times: in fresh processes (modules are imported, kernels compiled), and twice more. One of a tiny
model runs first, so that files have been read. The trace of a real rank is timed beside them, with an empty cache and with a
full one, where Megatron-Bridge or vLLM is installed. What a rank of the real plan does without its peers is timed too: its
schedule, and the table of what it pulls.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import os
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from datetime import date
from functools import wraps
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest import mock

# Counting GPUs through the driver would spoil this process for forking.
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import numpy as np
import torch

from mcore_reshard.kernels.copies.peer_table import peer_table
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.layout.mesh import format_mesh, parse_gen_mesh, parse_train_mesh
from mcore_reshard.planner.model.configs import load_config
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World
from mcore_reshard.planner.plan.trace_check import checkpoint_of, trace_faults
from mcore_reshard.planning import plan as make_plan
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan
from mcore_reshard.session.store_server import serve_store
from mcore_reshard.validation.processes import run_processes

sys.path.insert(0, str(Path(__file__).parent))
import synthetic
from bench import machine

RESULTS = Path(__file__).parent / "results"
MODEL, GOAL_S = "deepseek-v3", 3.0
WARM_UP = "tiny-deepseek-v3"  # of a session before all others, which reads modules and libraries from disk
TRAIN, GEN = (
    "tp=8,pp=8,ep=32,dp=4,layers=8+8+8+8+8+7+7+7",
    "tp=32,dp=4",
)  # 256 -> 128 ranks, as bench_planner.py has them
TRAIN_RANK, GEN_RANK = 40, 5  # a training rank with eight layers of experts
PARTS = 32
SESSIONS = {"one trainer": "tp=1", "sixteen trainers": "pp=4,ep=4,dp=4,layers=16+15+15+15"}
CONNECTS = 3
SHARE = ("tensors", "transfers", "bytes", "peers")  # what `share_of` tells
_CUT = ("num_attention_heads", "num_key_value_heads", "intermediate_size", "moe_intermediate_size")

# What counts as which phase, by where a name is looked up. A phase counts its own time, without phases within it.
_SESSION = "mcore_reshard.session"
_ENDS = "mcore_reshard.kernels.transports.direct.ends"
_SIGNALS = "mcore_reshard.kernels.transports.direct.peer_signals"
_KEPT = "mcore_reshard.kernels.transports.kept"
_TIMED = {
    "exchange": (
        f"{_SESSION}.connection.connect_group",
        "mcore_reshard.kernels.rendezvous.rendezvous.Rendezvous.gather",
    ),
    "checks": (f"{_SESSION}.executed_check.ExecutedTables", f"{_SESSION}.connection.SourceChecks"),
}
_TIMED_DIRECT = {
    "exchange": (
        *(f"{_SIGNALS}.{name}" for name in ("PeerSignals.fetch", "PeerSignals.publish", "connect_group")),
        *(f"{_KEPT}.{name}" for name in ("Kept.publish", "Kept.export_of")),
    ),
    "map": (f"{_KEPT}.Kept.export", f"{_KEPT}.Mappings.addresses"),
    "tables": tuple(f"{_ENDS}.{name}" for name in ("peer_table", "Pull")),
    "checks": (f"{_ENDS}.tile_problems",),
}


@dataclass(frozen=True, slots=True)
class Setting:
    """One session, as all of its processes know it."""

    config: Mapping[str, Any]
    train: str
    device: str
    transport: str
    address: str
    timeout_s: float
    together: Any  # a barrier of all processes

    def plan(self) -> Plan:
        return make_plan(self.config, self.train, "tp=1", model=MODEL)


def cut_config(model: str, parts: int, narrow: int) -> dict[str, Any]:
    """A model of which one rank has what a rank of `tp=parts` has of `model`; `narrow` divides the width of its rows."""
    config = load_config(model)
    for name in _CUT:
        if config[name] % parts:
            raise SystemExit(f"{model}: {name} = {config[name]} is no multiple of --parts {parts}")
        config[name] //= parts
    config["vocab_size"] = -(-config["vocab_size"] // parts // 64) * 64
    config["hidden_size"] = max(1, config["hidden_size"] // narrow)
    return config


def run_rank(number: int, setting: Setting) -> dict[str, Any]:
    """One process: its tensors, the same session CONNECTS times, and whether every element is right."""
    train_ranks = parse_train_mesh(setting.train).world
    world: World = "train" if number < train_ranks else "gen"
    rank = number if world == "train" else number - train_ranks
    device = torch.device("cuda", 0) if setting.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        torch.cuda.set_device(device)
    plan = setting.plan()
    schedule = schedule_of(plan, world, rank)
    tensors = synthetic.allocate(schedule, device)
    if world == "train":
        synthetic.fill(plan, world, rank, tensors)
    if device.type == "cuda":
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
    facts: dict[str, Any] = {"world": world, "rank": rank, **share_of(schedule)}
    facts["connects"] = [connected(setting, world, rank, tensors, number) for number in range(CONNECTS)]
    if world == "gen" and (wrong := synthetic.wrong_elements(plan, world, rank, tensors)):
        raise SystemExit(f"{len(wrong)} parameters are wrong: {next(iter(wrong.items()))}")
    setting.together.wait(setting.timeout_s)
    return facts


def connected(
    setting: Setting, world: World, rank: int, tensors: Mapping[str, torch.Tensor], number: int
) -> dict[str, Any]:
    """One session from the plan to its second refit: seconds of connect, by phase, and of both refits."""
    options = Options(session=f"prepare-{number}", transport=setting.transport, timeout_s=setting.timeout_s)
    setting.together.wait(setting.timeout_s)
    start = time.perf_counter()
    if world == "train":
        plan = setting.plan()
        assert plan.prove(), "the plan has no proof"
        if rank == 0:
            publish_plan(plan, setting.address, options)
    else:
        plan = fetch_plan(setting.address, options)
    plan_s = time.perf_counter() - start
    kind = TrainEndpoint if world == "train" else GenerationEndpoint
    endpoint = kind(RankOfPlan(plan, world, rank), tensors, store=setting.address, options=options)
    with timed_phases(endpoint._record, setting.transport):
        endpoint.prepare()
    connect_s = time.perf_counter() - start
    phases = {"plan": plan_s, **endpoint._record.last_seconds}
    phases["other"] = connect_s - sum(phases.values())
    refits = []
    for version in (1, 2):
        setting.together.wait(setting.timeout_s)
        begin = time.perf_counter()
        endpoint.refit(version)
        refits.append(time.perf_counter() - begin)
    setting.together.wait(setting.timeout_s)
    endpoint.close()
    return {"connect_s": connect_s, "phases": phases, "first_refit_s": refits[0], "second_refit_s": refits[1]}


@contextmanager
def timed_phases(record: Any, transport: str) -> Iterator[None]:
    """Have the functions of _TIMED count as phases of `record`."""
    with ExitStack() as patches:
        for table in (_TIMED, _TIMED_DIRECT if transport == "direct" else {}):
            for phase, names in table.items():
                for name in names:
                    patches.enter_context(_timed(record, phase, name))
        yield


def _timed(record: Any, phase: str, name: str) -> Any:
    place, _, last = name.rpartition(".")
    try:
        owner: Any = import_module(place)
    except ModuleNotFoundError:  # a class
        module, _, owner_name = place.rpartition(".")
        owner = getattr(import_module(module), owner_name)
    function: Callable[..., Any] = getattr(owner, last)

    @wraps(function)
    def timed(*args: Any, **kwargs: Any) -> Any:
        with record.phase(phase):
            return function(*args, **kwargs)

    return mock.patch.object(owner, last, timed)


def share_of(schedule: Schedule) -> dict[str, int]:
    """The size of a rank's part."""
    tables = [stage.sends if schedule.world == "train" else stage.recvs for stage in schedule.stages]
    return {
        "tensors": len(schedule.tensors),
        "transfers": sum(map(len, tables)),
        "bytes": sum(int(table.nbytes.sum()) for table in tables),
        "peers": len({*np.concatenate([table.peer for table in tables]).tolist()}),
    }


def measure_session(name: str, train: str, arguments: argparse.Namespace) -> dict[str, Any]:
    """One session in fresh processes: the slowest rank of each side, by phase."""
    ranks = parse_train_mesh(train).world + 1
    with serve_store() as store:
        setting = Setting(
            cut_config(arguments.model, arguments.parts, arguments.narrow),
            train,
            arguments.device,
            arguments.transport,
            store.address,
            arguments.timeout_s,
            multiprocessing.get_context("fork").Barrier(ranks),
        )
        begin = time.perf_counter()
        told = run_processes(ranks, run_rank, (setting,), timeout_s=arguments.timeout_s)
    sides = {world: [each for each in told if each["world"] == world] for world in ("train", "gen")}
    largest = {world: max(each, key=lambda rank: rank["transfers"]) for world, each in sides.items()}
    connects = []
    for number in range(CONNECTS):
        of_side = {world: [each["connects"][number] for each in side] for world, side in sides.items()}
        both = [*of_side["train"], *of_side["gen"]]
        slowest = {world: max(side, key=lambda each: each["connect_s"]) for world, side in of_side.items()}
        times = {key: max(each[key] for each in both) for key in ("connect_s", "first_refit_s", "second_refit_s")}
        connects.append({**times, "phases": {world: each["phases"] for world, each in slowest.items()}})
    return {
        "name": name,
        "train": train,
        "gen": "tp=1",
        "ranks": f"{ranks - 1} -> 1",
        "largest": {world: {key: each[key] for key in SHARE} for world, each in largest.items()},
        "whole_s": time.perf_counter() - begin,
        "connects": connects,
        "median_later_connect_s": statistics.median(each["connect_s"] for each in connects[1:]),
    }


def trace_trainer(_: int, model: str, train: str, gen: str, rank: int) -> dict[str, float]:
    """Seconds of the trace check of one real training rank: with an empty cache, then with a full one."""
    from mcore_reshard.trainers.megatron.trace import kept_of_trainer, trace_import
    from mcore_reshard.validation.offline_traces import _fake_world
    from mcore_reshard.validation.trainer import build, te_standin
    from mcore_reshard.validation.trainer.checkpoint_names import use_any_checkpoint, write_config

    plan = make_plan(model, train, gen)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}),
        _fake_world(rank, plan.train.world),
    ):
        write_config(load_config(model), folder)
        bridge, chunks = build.build_on_meta(folder, plan.train, None)
        use_any_checkpoint(bridge)
        with te_standin.cpu_as_device():
            bridge.get_conversion_tasks(chunks)  # as loading a checkpoint does: it adds attributes to modules
        start = time.perf_counter()
        kept = kept_of_trainer(bridge, chunks, agrees_with=plan.digest)
        assert kept.read() is None, "the cache is not empty"
        with te_standin.cpu_as_device():
            tasks = bridge.get_conversion_tasks(chunks)
            trace = trace_import(bridge._model_bridge, chunks, tasks, checkpoint_of(plan, quantized=False))
        faults = trace_faults(plan, "train", rank, trace)
        kept.write([])
        cold_s, begin = time.perf_counter() - start, time.perf_counter()
        assert kept_of_trainer(bridge, chunks, agrees_with=plan.digest).read() is not None, "nothing was kept"
        warm_s = time.perf_counter() - begin
    assert not faults, faults[0]
    return {"cold_s": cold_s, "warm_s": warm_s}


def trace_engine(_: int, model: str, train: str, gen: str, rank: int) -> dict[str, float]:
    """The same of one real rank of vLLM, on the meta device."""
    from vllm.config import CompilationConfig, VllmConfig

    from mcore_reshard.engines.vllm.trace import trace_loading
    from mcore_reshard.tracing.fingerprint import fingerprint
    from mcore_reshard.tracing.kept import KeptFile
    from mcore_reshard.validation.engine import vllm_engine
    from mcore_reshard.validation.ranks import gen_sizes
    from mcore_reshard.validation.trainer.checkpoint_names import write_config

    plan = make_plan(model, train, gen)
    with tempfile.TemporaryDirectory() as folder, mock.patch.dict(os.environ, {"XDG_CACHE_HOME": folder}):
        unquantized = {key: value for key, value in load_config(model).items() if key != "quantization_config"}
        write_config(unquantized, folder)
        twin = vllm_engine.build_engine(folder, gen_sizes(plan.gen), rank, device="meta")

        def kept() -> KeptFile:
            return KeptFile.of(
                "vllm", models=[fingerprint(twin, (VllmConfig, CompilationConfig))], place=rank, agrees=plan.digest
            )

        start = time.perf_counter()
        assert kept().read() is None, "the cache is not empty"
        faults = trace_faults(plan, "gen", rank, trace_loading(twin, checkpoint_of(plan)))
        kept().write([])
        cold_s, begin = time.perf_counter() - start, time.perf_counter()
        assert kept().read() is not None, "nothing was kept"
        warm_s = time.perf_counter() - begin
    assert not faults, faults[0]
    return {"cold_s": cold_s, "warm_s": warm_s}


def measure_traces(arguments: argparse.Namespace) -> dict[str, Any]:
    """The trace checks of both sides, in a process each; a reason where a loader is not installed."""
    traces: dict[str, Any] = {}
    for side, function, module, rank in (
        ("train", trace_trainer, "mcore_reshard.validation.trainer.build", arguments.train_rank),
        ("gen", trace_engine, "mcore_reshard.validation.engine.vllm_engine", arguments.gen_rank),
    ):
        try:
            import_module(module).prepare()
            given = (arguments.model, arguments.train, arguments.gen, rank)
            (traces[side],) = run_processes(1, function, given, timeout_s=arguments.timeout_s)
        except (ImportError, RuntimeError) as error:
            traces[side] = {"not_measured": str(error).strip().splitlines()[-1]}
    return traces


def measure_alone(arguments: argparse.Namespace) -> dict[str, Any]:
    """What one rank of each side does for the real plan without its peers, in seconds, and the size of its part."""
    start = time.perf_counter()
    plan = make_plan(arguments.model, arguments.train, arguments.gen)
    plan_s, start = time.perf_counter() - start, time.perf_counter()
    assert plan.prove(), "the plan has no proof"
    alone: dict[str, Any] = {"plan_s": plan_s, "proof_s": time.perf_counter() - start}
    for world, rank in (("train", arguments.train_rank), ("gen", arguments.gen_rank)):
        start = time.perf_counter()
        schedule = schedule_of(plan, world, rank)  # type: ignore[arg-type]
        row: dict[str, Any] = {"schedule_s": time.perf_counter() - start}
        if world == "gen":
            assert schedule.view is not None
            start = time.perf_counter()
            peer_table(schedule)
            row["peer_table_s"] = time.perf_counter() - start
        alone[world] = {"rank": rank, **share_of(schedule), **row}
    return alone


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--transport", default="direct")
    parser.add_argument("--model", default=MODEL)
    parser.add_argument("--train", default=TRAIN, help="the real mesh, of which traces and single ranks are timed")
    parser.add_argument("--gen", default=GEN)
    parser.add_argument("--train-rank", type=int, default=TRAIN_RANK)
    parser.add_argument("--gen-rank", type=int, default=GEN_RANK)
    parser.add_argument("--parts", type=int, default=PARTS, help="the engine's tensor parallelism that is cut out")
    parser.add_argument("--narrow", type=int, default=1, help="divide the width of rows: same tensors, fewer bytes")
    parser.add_argument("--sessions", nargs="+", choices=SESSIONS, default=list(SESSIONS))
    parser.add_argument("--timeout-s", type=float, default=100.0)
    parser.add_argument("--out", type=Path, default=RESULTS / "prepare-x1.json")
    arguments = parser.parse_args(argv)
    gpu = machine.gpus()[0] if arguments.device == "cuda" else None
    document: dict[str, Any] = {
        "command": machine.command("bench_prepare.py", sys.argv[1:] if argv is None else argv),
        "date": date.today().isoformat(),
        "hardware": f"1 x {gpu[0]}" if gpu else f"a {platform.machine()} CPU",
        **({"driver": gpu[1]} if gpu else {}),
        "cores": len(os.sched_getaffinity(0)),
        "versions": machine.versions("cuda-core", "megatron-core", "megatron-bridge", "vllm"),
        "model": arguments.model,
        "transport": arguments.transport,
        "goal_s": GOAL_S,
        "parts": arguments.parts,
        "narrow": arguments.narrow,
        "meshes": [format_mesh(parse_train_mesh(arguments.train)), format_mesh(parse_gen_mesh(arguments.gen))],
        "sessions": [],
    }
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    small = argparse.Namespace(**{**vars(arguments), "model": WARM_UP, "parts": 1, "narrow": 1})
    measure_session("warm-up", "tp=1", small)
    for name in arguments.sessions:
        document["sessions"].append(measure_session(name, SESSIONS[name], arguments))
        write(document, arguments.out)
    document["real"] = measure_alone(arguments)
    document["traces"] = measure_traces(arguments)
    write(document, arguments.out)
    return 0


def write(document: dict[str, Any], out: Path) -> None:
    """The document with seconds of four digits; written anew after each part, so that a late failure loses none."""
    out.write_text(json.dumps(rounded(document), indent=1) + "\n")
    print(json.dumps(rounded(document["sessions"][-1])), flush=True)


def rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 4)
    if isinstance(value, dict):
        return {key: rounded(each) for key, each in value.items()}
    return [rounded(each) for each in value] if isinstance(value, list) else value


if __name__ == "__main__":
    sys.exit(main())
