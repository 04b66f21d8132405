"""Checksums of sampled tiles on the GPU: the sums that numpy computes of the very tiles that the CPU chooses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.gpu import needs_gpus
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.strata import Strata

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
tile_sums = pytest.importorskip("mcore_reshard.kernels.cuda.tile_sums", reason="needs cuda-core", exc_type=ImportError)

DEVICE = torch.device("cuda", 0)
ODD = 0x9E3779B97F4A7C15
WORD = 16


def mixed(number: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Murmur3's finalizer, written out once more."""
    for factor in (0xFF51AFD7ED558CCD, 0xC4CEB9FE1A85EC53):
        number = number ^ (number >> np.uint64(33))
        number = number * np.uint64(factor)
    return number ^ (number >> np.uint64(33))


def expected_sum(tile: NDArray[np.uint8], address: int, tile_bytes: int, seed: int) -> int:
    """Of a tile's bytes at `address`: those before and after its aligned words are mixed one by one."""
    head = min(len(tile), -address % WORD)
    words = tile[head : head + (len(tile) - head) // WORD * WORD].view(np.uint64)
    tail = tile[head + words.nbytes :]
    parts = [(words, 0), (tile[:head], 2 * tile_bytes), (tail, 2 * tile_bytes + WORD)]
    keys = [(np.arange(first, first + len(part), dtype=np.uint64) * np.uint64(ODD)) for part, first in parts]
    shares = [
        mixed(part.astype(np.uint64) ^ (np.uint64(seed) + key)) for (part, _), key in zip(parts, keys, strict=True)
    ]
    return int(np.concatenate(shares).sum(dtype=np.uint64))


def on_gpu(sizes: list[int], seed: int) -> list[torch.Tensor]:
    """Tensors of bytes that begin anywhere."""
    rng = np.random.default_rng(seed)
    tensors = []
    for size in sizes:
        offset = int(rng.integers(0, 33))
        memory = torch.from_numpy(rng.integers(0, 256, size + offset + 64, np.uint8)).cuda()
        tensors.append(memory[offset : offset + size])
    return tensors


def strata_over(tensors: list[torch.Tensor], samples: list[int], tile_bytes: int) -> Strata:
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.int64)
    nbytes = np.array([tensor.nbytes for tensor in tensors], np.int64)
    return Strata.of(addresses, nbytes, np.array(samples, np.int64), tile_bytes)


@pytest.mark.parametrize("tile_bytes", [64, 4 << 10, 128 << 10])
def test_sums_are_those_of_the_tiles_that_the_cpu_chooses(tile_bytes: int) -> None:
    sizes = [1, 15, 16, 17, 0, tile_bytes, tile_bytes + 3, 5 * tile_bytes, 40 * tile_bytes - 1, 300_000]
    for seed in (0, 1, 2**63 + 12345, 2**64 - 1):
        tensors = on_gpu(sizes, seed % 1000)
        cut = strata_over(tensors, [3] * len(sizes), tile_bytes)
        sums = tile_sums.DeviceTileSums(cut, DEVICE)
        sums.take(seed)
        torch.cuda.synchronize()
        start, end = cut.chosen(seed)
        wanted = []
        for tensor, first, last in zip(cut.tensor.tolist(), start.tolist(), end.tolist(), strict=True):
            tile = tensors[tensor][first:last].cpu().numpy()
            wanted.append(expected_sum(tile, tensors[tensor].data_ptr() + first, tile_bytes, seed))
        assert sums._sums[0].cpu().numpy().view(np.uint64).tolist() == wanted


def found(tensors: list[torch.Tensor], cut: Strata, write: object, seed: int = 11) -> list[int]:
    """The strata in which `write` was seen."""
    sums = tile_sums.DeviceTileSums(cut, DEVICE)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(2):  # in the first of two refits nothing is written
            sums.take(seed)
            sums.take_again()
            stream.synchronize()
            assert sums.is_done() and not len(sums.changed())
        sums.take(seed)
        write()  # type: ignore[operator]
        sums.take_again()
        stream.synchronize()
        return sums.changed().tolist()


def test_any_flipped_bit_is_seen_in_its_tile() -> None:
    tile_bytes = 256
    (tensor,) = tensors = on_gpu([10_001], 3)
    cut = strata_over(tensors, [1000], tile_bytes)
    rng = np.random.default_rng(8)
    for place in [0, 1, 9_999, 10_000, *rng.integers(0, 10_001, 40).tolist()]:
        bit = 1 << int(rng.integers(8))
        assert found(tensors, cut, lambda place=place, bit=bit: tensor[place].bitwise_xor_(bit)) == [
            place // tile_bytes
        ]


def test_values_that_change_places_are_seen() -> None:
    """Also those that differ in their highest bit alone, at which a sum of products would fail half the time."""
    weight = torch.zeros(1 << 15, dtype=torch.int64, device=DEVICE)
    cut = strata_over([weight], [1], weight.nbytes)
    rng = np.random.default_rng(4)
    for _ in range(60):
        one, other = (int(n) for n in rng.choice(1 << 15, 2, replace=False))
        weight.zero_()[one] = -(2**63)

        def exchange(one: int = one, other: int = other) -> None:
            weight[[one, other]] = weight[[other, one]]

        assert found([weight], cut, exchange) == [0]


def test_other_nans_and_data_writes_are_seen_and_writes_of_the_same_bytes_are_not() -> None:
    weight = torch.full((3000,), float("nan"), dtype=torch.bfloat16, device=DEVICE)
    cut = strata_over([weight], [1], 8192)
    assert found([weight], cut, lambda: weight.view(torch.int16).data.bitwise_xor_(1)) == [0]
    assert found([weight], cut, lambda: weight.data.copy_(weight.clone())) == []


def test_a_tensor_of_more_than_four_gib() -> None:
    nbytes = (4 << 30) + 4097
    if torch.cuda.mem_get_info()[0] < 2 * nbytes:
        pytest.skip("needs 9 GB of free GPU memory")
    weight = torch.zeros(nbytes, dtype=torch.uint8, device=DEVICE)
    cut = strata_over([weight], [1 << 40], 128 << 10)
    assert found([weight], cut, lambda: weight[-1:].add_(1)) == [len(cut.table) - 1]
    assert found([weight], cut, lambda: weight[4 << 30].add_(1)) == [len(cut.table) - 1]
    assert found([weight], cut, lambda: weight[(4 << 30) - 1].add_(1)) == [len(cut.table) - 2]
