"""Tables on a GPU are read back as they lie there: damage is named, and a session refuses it before a byte moves."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from copies.test_device_casts import CUDA, bound_of
from helpers.casting import places_of
from helpers.gpu import needs_gpus
from helpers.handmade import allocate, raw_bytes
from helpers.plans import Case
from helpers.ranks import run_ranks, values
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.cuda.cast_tiles import GatherTables, cut_gather, cut_rounds
from mcore_reshard.kernels.cuda.executed_tiles import PlacedCopies, computed_problems, names_of, scale_problems
from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.planner.plan.make_schedule import schedule_of
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
device_copies = pytest.importorskip(
    "mcore_reshard.kernels.cuda.copy_kernel", reason="needs cuda-core", exc_type=ImportError
)
CASES = {
    "plain": Case("tiny-qwen3", "tp=2", "tp=2"),
    "cast": Case("tiny-llama", "tp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 8)),
}


def changed(table: Any, first: int) -> None:
    """A stray write into a table on the device: the lowest bit of one byte."""
    table._table[first] ^= 1


@pytest.mark.parametrize("at_once", [False, True], ids=["scales before", "scales at once"])
def test_what_a_gather_with_casts_does_is_read_back_from_the_device(at_once: bool) -> None:
    bound = bound_of(0)
    own = [tensor.data_ptr() for tensor in bound.tensors]
    buckets = [each for each in cut_buckets(bound.schedule, 1 << 20) if each.peer == 0]
    bucket = next(each for each in buckets if np.isin(each.copies["src"], [*bound.casts]).any())
    scratch = torch.zeros(bucket.nbytes, dtype=torch.uint8, device=CUDA)
    addresses = [*own, scratch.data_ptr()]
    bases, elements = np.array(addresses, np.uint64), [tensor.numel() for tensor in bound.tensors]
    if at_once:
        (tables,) = cut_rounds([bucket.copies], bases, bound.casts, 1 << 14, elements)
    else:
        tables = cut_gather(bucket.copies, bases, bound.casts, 1 << 14)
    gather = device_copies.DeviceGather(tables, CUDA, device_copies.KernelShape())
    assert at_once == ("blocks" in gather._parts)
    placed = PlacedCopies.of(bucket.copies, addresses)
    name_of = names_of(bound.schedule, placed.copies["src"])

    def problems() -> list[str]:
        found = gather.problems(placed, bound.casts, own, name_of)
        return found or (computed_problems(bound, [bucket.copies], [gather.computed()]) if at_once else [])

    assert problems() == []
    for part in gather._parts.values():
        changed(part, 0)  # of the address of the first tile's source
        assert len(problems()) == 1
        changed(part, 0)
    assert problems() == []


def test_what_computes_scales_is_read_back_from_the_device() -> None:
    bound = bound_of(0)
    scales = device_copies.device_scales(bound.casts, bound.tensors, CUDA)
    assert scale_problems(scales.read_back(), bound.casts, *places_of(bound), str) == []
    changed(scales, 8)
    assert len(scale_problems(scales.read_back(), bound.casts, *places_of(bound), str)) == 1


def connect(number: int, address: str, case: str, damaged: int) -> tuple[str, bool]:
    """(why prepare raised, whether this rank's tensors are as they were). The damaged rank's tiles read 2 bytes later."""
    from mcore_reshard.kernels.cuda import engine_rows
    from mcore_reshard.kernels.transports.direct import pushes, slots

    world, rank = ("train", number) if number < 2 else ("gen", number - 2)
    schedule = schedule_of(CASES[case].plan(), world, rank)  # type: ignore[arg-type]
    tensors = {name: tensor.cuda() for name, tensor in allocate(schedule, seed=number).items()}
    before = {name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()}
    if number == damaged:

        def later(tiles: NDArray[np.void]) -> NDArray[np.void]:
            (tiles["box"] if "box" in (tiles.dtype.names or ()) else tiles)["src"][-1:] += np.uint64(2)
            return tiles

        def cut_rounds_later(*args: Any) -> Any:
            return [GatherTables(*map(later, tables)) for tables in cut_rounds(*args)]

        def cut_later(*args: Any, cut: Any = engine_rows.cut_tiles) -> Any:
            return later(cut(*args))

        pushes.cut_rounds = slots.cut_rounds = cut_rounds_later  # type: ignore[assignment]
        engine_rows.cut_tiles = cut_later  # type: ignore[attr-defined]
    kind: Any = TrainEndpoint if world == "train" else GenerationEndpoint
    endpoint = kind(schedule, tensors, store=address, options=Options(transport="direct", timeout_s=60.0))
    try:
        endpoint.prepare()
        endpoint.refit(1)
    except RefitError as error:
        return str(error), {name: raw_bytes(tensor.cpu()) for name, tensor in tensors.items()} == before
    finally:
        endpoint.close()
    return "", True


@pytest.mark.parametrize(("case", "damaged"), [("plain", -1), ("plain", 2), ("cast", -1), ("cast", 1), ("cast", 2)])
def test_a_session_refuses_a_damaged_table_before_a_byte_moves(case: str, damaged: int) -> None:
    outcomes = values(run_ranks(4, connect, case, damaged, timeout_s=120.0, method="spawn"))
    if damaged < 0:
        assert outcomes == [("", True)] * 4
        return
    name = ["train:0", "train:1", "gen:0", "gen:1"][damaged]
    assert all(name in reason and "the device's table is damaged" in reason for reason, _ in outcomes), outcomes
    assert all("weight" in reason and same for reason, same in outcomes), outcomes
