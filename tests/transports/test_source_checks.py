"""Weights that are written while they are read are found by checksums, as often as the docs say, whoever wrote them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from helpers.handmade import End, HandTransfer, schedule_of
from numpy.typing import NDArray

from mcore_reshard.kernels.copies.bind import BoundSchedule, bind
from mcore_reshard.kernels.copies.cpu_tile_sums import CpuTileSums
from mcore_reshard.kernels.copies.strata import FULL_TILE_BYTES, SAMPLED_TILE_BYTES, Strata, strata_of
from mcore_reshard.kernels.errors import TornWeightsError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.source_checks import SourceChecks
from mcore_reshard.planner.plan.schedule import LocalTensor

TILE = SAMPLED_TILE_BYTES


def strata(nbytes: list[int], samples: list[int], tile_bytes: int = TILE) -> Strata:
    columns = (np.array(column, np.int64) for column in ([64] * len(nbytes), nbytes, samples))
    return Strata.of(*columns, tile_bytes)


def sent(name: str, tensor: torch.Tensor) -> HandTransfer:
    """The whole of a tensor, from training rank 0 to generation rank 0."""
    shape = tuple(tensor.shape)
    ends = (End(0, at, shape, (0,) * len(shape), tuple(range(len(shape)))) for at in (name, f"gen.{name}"))
    return HandTransfer(0, f"model.{name}", str(tensor.dtype).removeprefix("torch."), shape, *ends)


def bound_to(tensors: dict[str, torch.Tensor], unsent: tuple[str, ...] = ()) -> BoundSchedule:
    transfers = [sent(name, tensor) for name, tensor in tensors.items() if name not in unsent]
    extra = [LocalTensor(name, tuple(tensors[name].shape), "float32") for name in unsent]
    return bind(schedule_of(transfers, "train", 0, (1, 1), extra=extra), tensors)


def checked(
    tensors: dict[str, torch.Tensor], write: Callable[[], object], checks: str, **more: tuple[str, ...]
) -> None:
    """A refit of which the reading is `write`."""
    SourceChecks(bound_to(tensors, **more), Options(source_checks=checks)).around(write)()


# --- which tiles ---------------------------------------------------------------------------------------------------


def test_samples_lie_in_equal_parts_of_each_tensor() -> None:
    cut = strata([8 * TILE, 0, 100, 3 * TILE + 1], [2, 1, 1, 4])
    assert cut.tensor.tolist() == [0, 0, 2, 3, 3, 3, 3]
    for seed in range(50):
        start, end = cut.chosen(seed)
        tile = start // TILE
        assert 0 <= tile[0] < 4 <= tile[1] < 8
        assert (start[2], end[2]) == (0, 100)
        assert tile[3:].tolist() == [0, 1, 2, 3] and end[6] == 3 * TILE + 1  # each of the four


@pytest.mark.parametrize(("tiles", "samples"), [(1, 1), (5, 1), (7, 3), (1000, 999), (16 << 20, 3), (1 << 20, 1 << 20)])
def test_every_tile_is_within_the_tensor_and_full_samples_are_every_tile(tiles: int, samples: int) -> None:
    cut = strata([tiles * TILE - 1], [samples])
    start, end = cut.chosen(7)
    assert (start >= 0).all() and (start < end).all() and end.max() <= tiles * TILE - 1
    if tiles == samples:
        assert np.array_equal(start, np.arange(tiles, dtype=np.int64) * TILE)


def test_every_tile_is_chosen_equally_often() -> None:
    tiles, samples, seeds = 10, 4, 20_000  # 2.5 tiles to a stratum: tiles 2, 5 and 7 belong to two
    cut = strata([tiles * TILE], [samples])
    counts = np.bincount(np.concatenate([cut.chosen(seed)[0] // TILE for seed in range(seeds)]), minlength=tiles)
    wanted = seeds * samples / tiles
    assert abs(counts - wanted).max() < 5 * wanted**0.5


def test_one_percent_of_what_is_sent_is_checked_and_a_tile_of_each_tensor() -> None:
    tensors = {f"t{n}": torch.zeros(elements) for n, elements in enumerate([1 << 20, 3 << 20, 10, 0])}
    cut = strata_of(bound_to(tensors).schedule, [64] * 4, "sampled")
    assert np.bincount(cut.tensor, minlength=4).tolist() == [11, 31, 1, 0]  # of 1,024, 3,072, 1 and 0 tiles
    whole = strata_of(bound_to(tensors).schedule, [64] * 4, "full")
    assert np.bincount(whole.tensor, minlength=4).tolist() == [32, 96, 1, 0] and whole.tile_bytes == FULL_TILE_BYTES
    assert not len(strata_of(bound_to(tensors).schedule, [64] * 4, "off").table)


def test_tensors_that_are_not_sent_are_not_checked() -> None:
    tensors = {"sent": torch.zeros(100), "kept": torch.zeros(100)}
    checked(tensors, lambda: tensors["kept"].data.fill_(1), "full", unsent=("kept",))


# --- writes that torch does not count --------------------------------------------------------------------------------


def through_data(weight: torch.Tensor) -> None:
    weight.data.mul_(3)


def through_numpy(weight: torch.Tensor) -> None:
    weight.detach().view(torch.int16).numpy()[:] ^= 5


def to_other_nans(weight: torch.Tensor) -> None:
    """A NaN differs from itself: here the bytes count."""
    weight.data.view(torch.int16).bitwise_or_(0x7F81 if weight.data.view(torch.int16)[0, 0] != 0x7F81 else 0x7F82)


UNCOUNTED = [through_data, through_numpy, to_other_nans]


def model() -> dict[str, torch.Tensor]:
    """Parameters that were pointed into one flat buffer, as Megatron's DDP does."""
    shapes = {"qkv": (300, 256), "norm": (256,), "fc1": (1024, 256), "fc2": (256, 1024)}
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.nn.Parameter(torch.randn(shape, generator=generator).bfloat16()) for name, shape in shapes.items()
    }


def flattened(tensors: dict[str, torch.Tensor]) -> torch.Tensor:
    flat = torch.cat([tensor.detach().reshape(-1) for tensor in tensors.values()])
    for tensor, part in zip(tensors.values(), flat.split([t.numel() for t in tensors.values()]), strict=True):
        tensor.data = part.view(tensor.shape)
    return flat


@pytest.mark.parametrize("checks", ["sampled", "full"])
@pytest.mark.parametrize("write", UNCOUNTED, ids=lambda write: write.__name__)
def test_writes_that_torch_does_not_count_are_found(write: Callable[[torch.Tensor], None], checks: str) -> None:
    tensors = model()
    bound = bound_to(tensors)
    writes = bound.check_fresh(tensors)
    with pytest.raises(TornWeightsError, match=r"train:0: weights were written while they were read: .* in fc1 \(mod"):
        checked(tensors, lambda: write(tensors["fc1"]), checks)
    bound.check_unwritten(writes)  # torch saw nothing


@pytest.mark.parametrize("checks", ["sampled", "full"])
def test_an_optimizer_step_on_the_flat_buffer_is_found_in_every_tensor(checks: str) -> None:
    tensors = model()
    flat = flattened(tensors)
    bound = bound_to(tensors)
    writes = bound.check_fresh(tensors)
    with pytest.raises(TornWeightsError) as error:
        checked(tensors, lambda: flat.add_(1), checks)
    assert "tiles changed, in qkv (model.qkv) and 3 other tensors; change weights only after" in str(error.value)
    bound.check_unwritten(writes)


@pytest.mark.parametrize("checks", ["sampled", "full"])
def test_nothing_is_found_where_nothing_was_written(checks: str) -> None:
    tensors = model()
    for _ in range(20):
        checked(tensors, lambda: tensors["fc1"].detach().float().sum(), checks)


def test_full_checks_find_any_bit() -> None:
    tensors = {"weight": torch.zeros(300_000, dtype=torch.uint8)}
    rng = np.random.default_rng(3)
    for place in [0, FULL_TILE_BYTES - 1, FULL_TILE_BYTES, 299_999, *rng.integers(0, 300_000, 20).tolist()]:
        with pytest.raises(TornWeightsError, match=r"1 of 3 checked tiles changed, in weight \(model.weight\); "):
            checked(tensors, lambda place=place: tensors["weight"].data[place].bitwise_xor_(0x80), "full")


def test_full_checks_find_values_that_changed_places() -> None:
    tensors = {"weight": torch.arange(1000.0)}

    def exchange() -> None:
        tensors["weight"].data[[3, 500]] = tensors["weight"].data[[500, 3]]

    with pytest.raises(TornWeightsError):
        checked(tensors, exchange, "full")


def test_off_finds_nothing_and_an_error_of_the_reading_stays_what_it_is() -> None:
    tensors = model()
    checked(tensors, lambda: through_data(tensors["fc1"]), "off")

    def fail() -> None:
        through_data(tensors["fc1"])
        raise KeyError("lost")

    with pytest.raises(KeyError):
        checked(tensors, fail, "full")


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.uint8, torch.int64, torch.complex64, torch.bool], ids=str)
def test_any_dtype_and_an_odd_address_will_do(dtype: torch.dtype) -> None:
    raw = torch.zeros(5000 * dtype.itemsize + 8, dtype=torch.uint8)
    weight = raw[dtype.itemsize :][: 5000 * dtype.itemsize].view(dtype)
    for start, end in ((0, 1), (4999 * dtype.itemsize, None)):
        cut = Strata.of(*(np.array([n], np.int64) for n in (weight.data_ptr(), weight.nbytes, 10**6)), 64)
        sums = CpuTileSums(cut, [weight])
        sums.take(1)
        raw[dtype.itemsize :][: weight.nbytes][start:end] ^= 1
        sums.take_again()
        assert sums.changed().tolist() == [0 if end else len(cut.table) - 1]


# --- how often a write is missed -------------------------------------------------------------------------------------


def misses(write: NDArray[np.int64], tiles: int, samples: int, seeds: int) -> int:
    """How many of `seeds` refits miss a write of some tiles."""
    cut = strata([tiles * TILE], [samples])
    return sum(not np.isin(cut.chosen(seed)[0] // TILE, write).any() for seed in range(seeds))


@pytest.mark.parametrize("written", [1, 5, 20, 60])
def test_a_write_of_some_tiles_is_missed_as_often_as_stated(written: int) -> None:
    """Tiles spread evenly: (1 - f) ** k is then the very probability."""
    tiles, samples, seeds = 400, 20, 2000
    write = np.linspace(0, tiles, written, endpoint=False).astype(np.int64)
    each = 1 - np.bincount(write * samples // tiles, minlength=samples) / (tiles / samples)
    probability = float(each.prod())
    assert probability <= (1 - written / tiles) ** samples * (1 + 1e-9)
    missed = misses(write, tiles, samples, seeds)
    assert abs(missed - seeds * probability) < 4.5 * max(1.0, (seeds * probability * (1 - probability)) ** 0.5)


def test_tiles_side_by_side_are_missed_less_often_and_a_whole_part_never() -> None:
    tiles, samples, seeds = 400, 20, 2000
    bound = seeds * (1 - 30 / tiles) ** samples
    assert misses(np.arange(10, 40), tiles, samples, seeds) < bound / 2
    assert misses(np.arange(11, 51), tiles, samples, seeds) == 0  # it contains tiles 20 to 39, a stratum


def test_one_tensor_of_many_that_is_rewritten_is_always_found() -> None:
    tensors = {f"t{n}": torch.zeros(2000 if n % 3 else 20_000) for n in range(40)}
    checks = SourceChecks(bound_to(tensors), Options())
    for name, tensor in tensors.items():
        with pytest.raises(TornWeightsError, match=rf"in {name} \(model.{name}\); "):
            checks.around(lambda tensor=tensor: tensor.data.add_(1))()


def test_sparse_updates_of_one_element_in_a_hundred_are_found() -> None:
    """In bf16, steps of a small learning rate leave most elements as they are; a tile of 2,048 keeps them all once in 1e9."""
    tensors = {"weight": torch.zeros(1 << 20, dtype=torch.bfloat16)}
    few = torch.randperm(1 << 20, generator=torch.Generator().manual_seed(5))[: (1 << 20) // 100]
    with pytest.raises(TornWeightsError) as error:
        checked(tensors, lambda: tensors["weight"].data.index_fill_(0, few, 1.0), "sampled")
    assert "6 of 6 checked tiles changed" in str(error.value)
    assert 0.99**2048 < 2e-9
