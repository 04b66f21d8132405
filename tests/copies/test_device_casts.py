"""The kernels that cast do what the CPU interpreter says of the same table, and compute torch's scales, bit for bit."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from helpers.casting import train_schedule, trainer_tensors, transfers_with_casts
from helpers.gpu import needs_gpus
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.buckets import cut_buckets
from mcore_reshard.kernels.copies.cast_arithmetic import AMAX_FLOOR, block_scales
from mcore_reshard.kernels.copies.casts import Casts
from mcore_reshard.kernels.copies.copy_table import SCRATCH
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.copies.tensors import byte_array
from mcore_reshard.kernels.cuda.cast_tiles import GatherTables, cut_gather, cut_rounds

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
device_copies = pytest.importorskip(
    "mcore_reshard.kernels.cuda.copy_kernel", reason="needs cuda-core", exc_type=ImportError
)

CUDA = torch.device("cuda", 0)
POISON = 0xEE


def bound_of(seed: int) -> BoundSchedule:
    schedule = train_schedule(transfers_with_casts(np.random.default_rng(seed), (1, 2)), 0, (1, 2))
    return bind(schedule, {k: t.to(CUDA) for k, t in trainer_tensors(schedule, seed).items()})


def compute(bound: BoundSchedule) -> None:
    """The scales of all casts, by the kernel."""
    device_copies.device_scales(bound.casts, bound.tensors, CUDA).launch(torch.cuda.current_stream())


def forget(bound: BoundSchedule, weights: list[int]) -> None:
    for index in weights:
        if (scales := bound.casts[index].scales) is not None:
            bound.tensors[scales].fill_(torch.nan)


def tables_of(
    copies: NDArray[np.void], bases: Sequence[int], casts: Casts, tile_bytes: int, computed: Sequence[torch.Tensor]
) -> GatherTables:
    """With the scales of what it casts, where there are tensors that are `computed`."""
    addresses = np.array(bases, np.uint64)
    if not computed:
        return cut_gather(copies, addresses, casts, tile_bytes)
    (tables,) = cut_rounds([copies], addresses, casts, tile_bytes, [tensor.numel() for tensor in computed])
    return tables


@pytest.mark.parametrize("at_once", [False, True], ids=["scales before", "scales at once"])
@pytest.mark.parametrize("shape", [(1, 32, 1), (7, 256, 2), (132, 512, 8)], ids=str)
@pytest.mark.parametrize(
    ("bucket_bytes", "tile_bytes", "shift"), [(4096, 256, 0), (1 << 20, 1 << 14, 4), (1 << 20, 1 << 17, 0)]
)
def test_a_gather_agrees_with_the_interpreter(
    shape: tuple[int, int, int], bucket_bytes: int, tile_bytes: int, shift: int, at_once: bool
) -> None:
    parts = set()
    for seed in range(3):
        bound = bound_of(seed)
        compute(bound)
        tensors = [byte_array(tensor.cpu()) for tensor in bound.tensors]
        of_peer = [
            [each for each in cut_buckets(bound.schedule, bucket_bytes) if each.peer == peer] for peer in range(2)
        ]
        for bucket in (bucket for buckets in of_peer for bucket in buckets[:8]):
            copies = bucket.copies.copy()
            wanted = np.full(bucket.nbytes, POISON, np.uint8)
            run_copies(copies, [*tensors, wanted], bound.casts)
            scratch = torch.full((bucket.nbytes + 2 * shift,), POISON, dtype=torch.uint8, device=CUDA)
            bases = [tensor.data_ptr() for tensor in bound.tensors] + [scratch.data_ptr() + shift]
            copies["dst"][copies["dst"] == SCRATCH] = len(bases) - 1
            weights = np.intersect1d(copies["src"], [*bound.casts]).tolist() if at_once else []
            gather = device_copies.DeviceGather(
                tables_of(copies, bases, bound.casts, tile_bytes, bound.tensors if at_once else ()),
                CUDA,
                device_copies.KernelShape(*shape),
            )
            parts |= {*gather._parts}
            forget(bound, weights)
            gather.launch(torch.cuda.current_stream())
            for tensor, bits in zip(bound.tensors, tensors, strict=True):
                np.testing.assert_array_equal(byte_array(tensor.cpu()), bits)  # the scales are there again
            found = scratch.cpu().numpy()
            np.testing.assert_array_equal(found[shift : shift + bucket.nbytes], wanted)
            assert (found[:shift] == POISON).all() and (found[shift + bucket.nbytes :] == POISON).all()
    assert ("blocks" in parts) == (at_once and not shift) and ("scales" in parts) == at_once


@pytest.mark.parametrize("seed", range(3))
def test_scales_are_those_of_torch_on_the_gpu(seed: int) -> None:
    bound = bound_of(seed)
    compute(bound)
    for index, cast in bound.casts.items():
        if cast.scales is not None:
            wanted = block_scales(bound.tensors[index], cast.form.block)
            assert torch.equal(bound.tensors[cast.scales].view(torch.int32), wanted.view(torch.int32))


def special(name: str) -> torch.Tensor:
    bits = torch.arange(1 << 16, dtype=torch.int32)
    finite = bits[bits & 0x7FFF < 0x7F80].to(torch.int16).view(torch.bfloat16)
    return {
        "every finite value": finite.reshape(510, 128),
        "one magnitude a block": finite.sort().values.reshape(-1, 1).expand(-1, 32).reshape(-1, 128),
        "zeros": torch.zeros(130, 260, dtype=torch.bfloat16),
        "NaN": torch.linspace(-3, 3, 64 * 128).reshape(64, 128).bfloat16().index_fill(0, torch.tensor([5]), torch.nan),
        "around the floor": torch.linspace(0.9, 1.1, 256 * 128).mul(AMAX_FLOOR).reshape(256, 128).bfloat16(),
    }[name].contiguous()


@pytest.mark.parametrize("at_once", [False, True], ids=["scales before", "scales at once"])
@pytest.mark.parametrize("name", ["every finite value", "one magnitude a block", "zeros", "around the floor", "NaN"])
def test_special_values(name: str, at_once: bool) -> None:
    from mcore_reshard.kernels.copies.casts import CastForm, TensorCast, band_copies

    weight, block = special(name).to(CUDA), (32, 32)
    form = CastForm("bfloat16", "float8_e4m3fn", tuple(weight.shape), block)  # type: ignore[arg-type]
    scales = torch.zeros(form.blocks, device=CUDA)
    casts = {0: TensorCast(form, 1)}
    copies = band_copies(form, 0, tuple(weight.shape), (weight.shape[1], 1), (weight.shape[1], 1))
    copies["dst"] = 2
    target = torch.zeros(weight.numel(), dtype=torch.uint8, device=CUDA)
    bases = [tensor.data_ptr() for tensor in (weight, scales, target)]
    tables = tables_of(copies, bases, casts, 1 << 14, (weight, scales) if at_once else ())
    gather = device_copies.DeviceGather(tables, CUDA, device_copies.KernelShape())
    assert ("blocks" in gather._parts) == (at_once and name != "zeros")  # whose rows are not aligned for wide words
    if not at_once:
        device_copies.device_scales(casts, [weight, scales], CUDA).launch(torch.cuda.current_stream())
    gather.launch(torch.cuda.current_stream())
    assert torch.equal(scales.view(torch.int32), block_scales(weight, block).view(torch.int32))
    wanted = np.zeros(weight.numel(), np.uint8)
    run_copies(copies, [byte_array(weight.cpu()), byte_array(scales.cpu()), wanted], casts)
    np.testing.assert_array_equal(target.cpu().numpy(), wanted)


@pytest.mark.parametrize(("src", "to"), [("float32", "bfloat16"), ("bfloat16", "float32")])
def test_every_rounding_of_float32_and_every_bfloat16(src: str, to: str) -> None:
    """NaNs too: the kernel and the interpreter give them the same bits."""
    from mcore_reshard.kernels.copies.casts import CastForm, TensorCast
    from mcore_reshard.kernels.copies.copy_table import COPY

    upper = np.arange(1 << 16, dtype=np.uint32)
    if src == "float32":
        lower = np.array([0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFFF], np.uint32)
        values = (upper[:, None] << 16 | lower).reshape(-1).view(np.uint8)
    else:
        values = upper.astype(np.uint16).view(np.uint8)
    casts = {0: TensorCast(CastForm(src, to), None)}
    nbytes = len(values) // 2 if to == "bfloat16" else len(values) * 2
    ones = ((1, 1, 1), (0, 0, 0), (0, 0, 0))
    copies = np.array([(0, 1, 0, 0, *ones, nbytes)], COPY)
    wanted = np.zeros(nbytes, np.uint8)
    run_copies(copies, [values, wanted], casts)
    for skipped in (0, 2):  # 2 elements: off the alignment of wide words
        source = torch.from_numpy(values.copy()).to(CUDA)
        target = torch.zeros(nbytes, dtype=torch.uint8, device=CUDA)
        at, to_at = (skipped * torch.empty((), dtype=getattr(torch, name)).element_size() for name in (src, to))
        copies = np.array([(0, 1, at, to_at, *ones, nbytes - to_at)], COPY)
        tables = tables_of(copies, [source.data_ptr(), target.data_ptr()], casts, 1 << 14, ())
        device_copies.DeviceGather(tables, CUDA, device_copies.KernelShape()).launch(torch.cuda.current_stream())
        np.testing.assert_array_equal(target.cpu().numpy()[to_at:], wanted[to_at:])
