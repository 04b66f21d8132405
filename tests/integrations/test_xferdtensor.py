"""Our `xferdtensor` beside NeMo-RL's golden one, on the cases of NeMo-RL's unit tests, in gloo processes."""

from __future__ import annotations

import importlib
import inspect
import os
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from torch.distributed.tensor import Partial, Replicate, Shard

from mcore_reshard.integrations.xferdtensor import xferdtensor
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.validation.processes import run_processes

CHECKOUT = Path(os.environ.get("MCORE_RESHARD_NEMO_RL", "/nonexistent"))
needs_checkout = pytest.mark.skipif(
    not (CHECKOUT / "nemo_rl").is_dir(), reason="set MCORE_RESHARD_NEMO_RL to a checkout of NVIDIA-NeMo/RL"
)
WORLD = 6


class Case(NamedTuple):
    """A tensor's way: the meshes are given by their ranks and shapes."""

    src: tuple[tuple[int, ...], tuple[int, ...]]
    src_placements: tuple[Any, ...]
    dst: tuple[tuple[int, ...], tuple[int, ...]]
    dst_placements: tuple[Any, ...]
    shape: tuple[int, ...]
    dtype: torch.dtype = torch.bfloat16


OWN_CASES = [
    Case(((0, 1), (2,)), (Shard(1),), ((2, 3), (2,)), (Shard(0),), (8, 4)),
    Case(((0, 1, 2, 3), (2, 2)), (Shard(0), Shard(1)), ((4, 5), (2,)), (Shard(0),), (8, 4), torch.float8_e4m3fn),
    Case(((3, 2), (2,)), (Shard(0),), ((5, 0, 1, 4), (4,)), (Replicate(),), (6, 3, 2), torch.float32),
    Case(((0, 1), (2, 1)), (Replicate(), Replicate()), ((2, 3, 4, 5), (2, 2)), (Shard(0), Shard(0)), (8, 4)),
]
UNEVEN = [  # 10 rows over 4 ranks are 3, 3, 3, 1, and 4 rows over 3 are 2, 2, 0; golden cuts them otherwise
    Case(((0, 1), (2,)), (Shard(0),), ((2, 3, 4, 5), (4,)), (Shard(0),), (10, 2)),
    Case(((0, 1, 2), (3,)), (Shard(0),), ((3, 4), (2,)), (Shard(1),), (4, 3)),
]


class Mesh:
    def __init__(self, ranks: tuple[int, ...], shape: tuple[int, ...]) -> None:
        self.mesh = torch.tensor(ranks).reshape(shape)


class Ref:
    """As NeMo-RL's DTensorRef."""

    def __init__(self, local: torch.Tensor, shape: tuple[int, ...]) -> None:
        self._local_tensor, self.shape, self.dtype, self.device = local, torch.Size(shape), local.dtype, local.device


class ProcessGroup:
    """What both versions use of NeMo-RL's StatelessProcessGroup, which moves by NCCL; by gloo."""

    def __init__(self, rank: int, tcp_store: Any, group: Any = None) -> None:
        self.rank, self.master_address, self.tcp_store, self._group = rank, "127.0.0.1", tcp_store, group

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, src, group=self._group)


def theirs(name: str) -> Any:
    """A module of NeMo-RL's weight_sync, without the package's __init__, which imports all of NeMo-RL."""
    for package in ("nemo_rl", "nemo_rl.weight_sync"):
        module = sys.modules.setdefault(package, ModuleType(package))
        module.__path__ = [str(CHECKOUT / package.replace(".", "/"))]
    return importlib.import_module(f"nemo_rl.weight_sync.{name}")


def cases_of_their_unit_tests(monkeypatch: pytest.MonkeyPatch) -> list[Case]:
    """Runs NeMo-RL's tests of geometry, and listens to what they ask for."""
    impl, cases = theirs("xferdtensor_python"), []
    spec = importlib.util.spec_from_file_location(
        "theirs_test", CHECKOUT / "tests/unit/weight_sync/test_xferdtensor_python.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)
    actual = impl._plan_geometry

    def listen(src_mesh: Any, src: Any, dst_mesh: Any, dst: Any, shape: Any) -> Any:
        sides = [(tuple(mesh.mesh.flatten().tolist()), tuple(mesh.mesh.shape)) for mesh in (src_mesh, dst_mesh)]
        cases.append(Case(sides[0], tuple(src), sides[1], tuple(dst), tuple(shape)))
        return actual(src_mesh, src, dst_mesh, dst, shape)

    monkeypatch.setattr(impl, "_plan_geometry", listen)
    for name, test in inspect.getmembers(tests, inspect.isfunction):
        if name.startswith("test_") and "geometry" in name:
            test()
    return list(dict.fromkeys(cases))


def part(whole: torch.Tensor, side: tuple[Any, ...], placements: tuple[Any, ...], rank: int) -> torch.Tensor:
    """What torch.chunk, dim by dim of the mesh, gives a rank."""
    ranks, shape = side
    coordinate = (torch.tensor(ranks).reshape(shape) == rank).nonzero()[0].tolist()
    for placement, count, index in zip(placements, shape, coordinate, strict=True):
        if isinstance(placement, Shard):
            parts = whole.chunk(count, placement.dim)
            empty = whole.narrow(placement.dim, 0, 0)
            whole = parts[index] if index < len(parts) else empty
    return whole.clone().contiguous()


def run_cases(rank: int, folder: Path, cases: list[Case], with_golden: bool) -> list[str]:
    """Each case by ours, twice, and by golden; returns the names of those whose bytes differ."""
    store = dist.FileStore(str(folder / "store"))
    dist.init_process_group("gloo", store=store, rank=rank, world_size=WORLD)
    ours, wrong = ProcessGroup(rank, store), []
    for number, case in enumerate(cases):
        members = sorted({*case.src[0], *case.dst[0]})
        group = dist.new_group(members)
        for step in (1, 2):
            count = torch.Size(case.shape).numel()
            whole = (torch.arange(count) % 120 + step).to(case.dtype).reshape(case.shape)
            src = part(whole, case.src, case.src_placements, rank) if rank in case.src[0] else None
            expected = part(whole, case.dst, case.dst_placements, rank) if rank in case.dst[0] else None
            outcomes = {"ours": None if expected is None else torch.zeros_like(expected.T).T}  # strided where 2-D
            calls = {"ours": (xferdtensor, ours)}
            if with_golden and rank in members:
                outcomes["golden"] = None if expected is None else torch.zeros_like(expected)
                calls["golden"] = (theirs("xferdtensor").xferdtensor_golden, ProcessGroup(rank, store, group))
            for name, (call, process_group) in calls.items():
                local = outcomes[name]
                call(
                    None if src is None else Ref(src, case.shape), Mesh(*case.src), case.src_placements,
                    None if local is None else Ref(local, case.shape), Mesh(*case.dst), case.dst_placements,
                    process_group,
                )  # fmt: skip
                same = local is None or local.contiguous().view(torch.uint8).equal(expected.view(torch.uint8))
                wrong += [] if same else [f"case {number} step {step}: {name}"]
    dist.barrier()
    return wrong


@needs_checkout
def test_bytes_equal_those_of_their_golden(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cases = cases_of_their_unit_tests(monkeypatch)
    assert len(cases) == 3  # gather, split, and data-parallel replicas, which the striped version has as well
    assert run_processes(WORLD, run_cases, (tmp_path, cases + OWN_CASES, True), timeout_s=120.0) == [[]] * WORLD


def test_uneven_parts_are_those_of_torch_chunk(tmp_path: Path) -> None:
    assert run_processes(WORLD, run_cases, (tmp_path, UNEVEN, False), timeout_s=120.0) == [[]] * WORLD


@needs_checkout
def test_the_signature_is_theirs() -> None:
    expected = inspect.signature(theirs("xferdtensor").xferdtensor).parameters
    assert [*inspect.signature(xferdtensor).parameters] == [*expected]


def test_one_error_lists_everything_that_cannot_be_served() -> None:
    local = torch.zeros(3, 4, dtype=torch.int64)
    arguments = (
        Ref(local, (8, 4)), Mesh((0, 1), (2,)), (Shard(0),), Ref(local, (9, 4)), Mesh((1, 0), (2,)), (Partial(),),
        SimpleNamespace(rank=0), object(),
    )  # fmt: skip
    with pytest.raises(RefitError) as raised:
        xferdtensor(*arguments)
    lines = str(raised.value).splitlines()
    assert lines[0] == "xferdtensor() cannot serve this call:"
    beginnings = [line.strip()[:34] for line in lines[1:]]
    assert beginnings[-1].endswith("(sum) holds terms ") or beginnings[-1].endswith("Partial(sum) holds ")
    assert beginnings[:-1] == [
        "ranks [0, 1] are in both meshes: t",
        "a CUDA stream: tensors of the CPU ",
        "the tensors differ in shape: [8, 4",
        "src_tensor is int64, known: bfloat",
        "src_tensor: its placement gives th",
        "dst_tensor is int64, known: bfloat",
    ]


def disagree(rank: int, folder: Path) -> str:
    store = dist.FileStore(str(folder / "store"))
    shape = (8, 4) if rank == 0 else (8, 2)
    tensor = Ref(torch.zeros(shape), shape)
    try:
        xferdtensor(
            tensor if rank == 0 else None, Mesh((0,), (1,)), (Replicate(),),
            tensor if rank == 1 else None, Mesh((1,), (1,)), (Replicate(),), ProcessGroup(rank, store),
        )  # fmt: skip
    except RefitError as error:
        return str(error)
    return ""


def test_ranks_that_disagree_on_the_tensor_say_so_before_a_byte_moves(tmp_path: Path) -> None:
    told = run_processes(2, disagree, (tmp_path,), timeout_s=60.0)
    message = "called xferdtensor() with another shape, dtype, mesh or placement"
    assert told == [f"train:0: gen:0 {message}", f"gen:0: train:0 {message}"]
