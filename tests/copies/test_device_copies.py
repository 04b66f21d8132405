"""The kernel does what the CPU interpreter says of the same table; memory it has no business with stays as it was.

`make test-memcheck` runs this under compute-sanitizer.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from helpers.gpu import needs_gpus
from numpy.typing import NDArray
from test_tiles import random_copies

from mcore_reshard.kernels.copies.copy_table import COPY
from mcore_reshard.kernels.copies.cpu import run_copies
from mcore_reshard.kernels.cuda.tiles import cut_tiles, interleaved

pytestmark = [pytest.mark.gpu, needs_gpus(1)]
device_copies = pytest.importorskip(
    "mcore_reshard.kernels.cuda.copy_kernel", reason="needs cuda-core", exc_type=ImportError
)

SHAPES = [(1, 32, 1), (3, 256, 2), (64, 512, 8), (132, 1024, 4)]
POISON = 0xEE


def on_gpu(array: NDArray[np.uint8], margin: int = 64) -> torch.Tensor:
    """The array's bytes on the GPU, with poisoned bytes around them. Its own first byte is at `margin`."""
    around = np.full(margin, POISON, np.uint8)
    return torch.from_numpy(np.concatenate([around, array, around])).cuda()


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("tile_bytes", [16, 1 << 10, 128 << 10])
@pytest.mark.parametrize("checksums", [False, True])
def test_it_agrees_with_the_interpreter(shape: tuple[int, int, int], tile_bytes: int, checksums: bool) -> None:
    for seed in range(6):
        rng = np.random.default_rng(seed)
        copies, used = random_copies(rng, 3, 20_000)
        bases = [rng.integers(0, 256, 20_000, np.uint8) for _ in range(3)]
        wanted = np.full(used, POISON, np.uint8)
        run_copies(copies, [*bases, wanted])

        margin = 64 + int(rng.integers(0, 3)) * 8  # bases at various alignments
        tensors = [on_gpu(base, margin) for base in [*bases, np.full(used, POISON, np.uint8)]]
        addresses = np.array([tensor.data_ptr() + margin for tensor in tensors], np.uint64)
        tiles = cut_tiles(copies, addresses, tile_bytes)
        tiles = tiles[interleaved(copies["src"].astype(np.int64)[tiles["copy"]], seed % 3)]
        kernel = device_copies.DeviceCopies(
            tiles, torch.device("cuda", 0), device_copies.KernelShape(*shape), checksums=checksums
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        for _ in range(2):
            kernel.launch(stream)
        stream.synchronize()
        assert kernel.damaged().tolist() == []
        np.testing.assert_array_equal(tensors[-1].cpu().numpy(), on_gpu(wanted, margin).cpu().numpy())
        for tensor, base in zip(tensors, bases, strict=False):
            np.testing.assert_array_equal(tensor.cpu().numpy(), on_gpu(base, margin).cpu().numpy())


def launched(copies: NDArray[np.void], tensors: list[torch.Tensor], **options: object) -> NDArray[np.int64]:
    """Run a table between tensors; the copies whose checksums differ."""
    addresses = np.array([tensor.data_ptr() for tensor in tensors], np.uint64)
    tiles = cut_tiles(copies, addresses, 128 << 10)
    kernel = device_copies.DeviceCopies(tiles, torch.device("cuda", 0), **options)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    kernel.launch(stream)
    stream.synchronize()
    return kernel.damaged()


@pytest.mark.parametrize("word_bytes", [1, 2, 4, 8, 16])
def test_checksums_name_the_copy_that_was_damaged(word_bytes: int) -> None:
    row = 1024 * word_bytes
    loops = ((1, 1, 3), (0, 0, row), (0, 0, row))
    copies = np.array([(0, 1, n * 3 * row, n * 3 * row + word_bytes % 16, *loops, row) for n in range(5)], COPY)
    source = torch.randint(0, 256, (15 * row,), dtype=torch.uint8, device="cuda")
    target = torch.zeros(15 * row + word_bytes, dtype=torch.uint8, device="cuda")
    assert launched(copies, [source, target], checksums=True).tolist() == []
    damaged = launched(copies, [source, target], checksums=True, defines=(("FAULTY_COPY", 3),))
    assert damaged.tolist() == [3]


def test_a_region_of_more_than_four_gib() -> None:
    nbytes = (4 << 30) + (1 << 20) + 6
    if torch.cuda.mem_get_info()[0] < 3 * nbytes:
        pytest.skip("needs 13 GB of free GPU memory")
    source = torch.randint(0, 256, (nbytes,), dtype=torch.uint8, device="cuda")
    target = torch.full((nbytes + 16,), POISON, dtype=torch.uint8, device="cuda")
    copies = np.array([(0, 1, 0, 2, (1, 1, 1), (0, 0, 0), (0, 0, 0), nbytes)], COPY)
    launched(copies, [source, target])
    assert torch.equal(target[2 : 2 + nbytes], source)
    assert (target[:2] == POISON).all() and (target[2 + nbytes :] == POISON).all()


def test_rows_more_than_four_gib_apart() -> None:
    apart = (4 << 30) + 48
    if torch.cuda.mem_get_info()[0] < 6 << 30:
        pytest.skip("needs 6 GB of free GPU memory")
    source = torch.empty(apart + 4096, dtype=torch.uint8, device="cuda")
    source[:4096].random_(0, 256)
    source[apart:].random_(0, 256)
    target = torch.full((8192,), POISON, dtype=torch.uint8, device="cuda")
    copies = np.array([(0, 1, 0, 0, (1, 1, 2), (0, 0, apart), (0, 0, 4096), 4096)], COPY)
    launched(copies, [source, target])
    assert torch.equal(target, torch.cat([source[:4096], source[apart:]]))


def test_shapes_that_no_kernel_has_are_refused() -> None:
    with pytest.raises(ValueError, match="no kernel has this shape"):
        device_copies.KernelShape(threads=100)


def test_an_empty_table_is_nothing_to_do() -> None:
    assert launched(np.empty(0, COPY), [torch.zeros(1, device="cuda")], checksums=True).tolist() == []


def test_what_is_launched_begins_only_while_the_host_has_not_stopped_it() -> None:
    copies = np.array([(0, 1, 0, 0, (1, 1, 1), (0, 0, 0), (0, 0, 0), 4096)], COPY)
    source, target = (torch.full((4096,), value, dtype=torch.uint8, device="cuda") for value in (1, POISON))
    tiles = cut_tiles(copies, np.array([source.data_ptr(), target.data_ptr()], np.uint64), 1024)
    stop = torch.zeros(1, dtype=torch.int32, pin_memory=True)
    kernel = device_copies.DeviceCopies(tiles, torch.device("cuda", 0), stop=stop)
    stream = torch.cuda.current_stream()
    kernel.launch(stream)
    assert torch.equal(target, source)
    target.fill_(POISON)
    torch.cuda._sleep(200_000_000)  # type: ignore[no-untyped-call]  # what is queued begins after the host has stopped it
    kernel.launch(stream)
    stop.fill_(1)
    assert (target == POISON).all()
