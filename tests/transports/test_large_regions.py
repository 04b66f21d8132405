"""Regions of more than 4 GiB, of odd sizes and at odd offsets, contiguous and in rows, by every transport for GPUs."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from helpers.gpu import device_of, needs_gpus
from helpers.handmade import End, HandTransfer, other_end_of, schedule_of
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.registry import transports
from mcore_reshard.planner.plan.schedule import OtherEndView
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint

pytestmark = [pytest.mark.gpu, needs_gpus(1)]

WORLDS = (1, 1)
GIB = 1 << 30
NEEDED_BYTES = 36 * GIB  # on a GPU that both share: the tensors of each, and those of the receiver twice
UNAVAILABLE = {each.name: each.unavailable_reason() for each in transports()}


def transfers() -> list[HandTransfer]:
    """Bytes from offset 3 to offset 1, and five rows of 1 GiB + 1 that lie further apart at either end."""
    whole, row = (4 * GIB + 5,), (5, GIB + 1)
    return [
        HandTransfer(0, "flat", "float8_e4m3fn", whole,
             End(0, "flat", (whole[0] + 9,), (3,), (0,)), End(0, "flat", (whole[0] + 2,), (1,), (0,))),
        HandTransfer(1, "rows", "float8_e4m3fn", row,
             End(0, "rows", (5, row[1] + 7), (0, 6), (0, 1)), End(0, "rows", (5, row[1] + 3), (0, 2), (0, 1))),
    ]  # fmt: skip


def refit(number: int, address: str, transport: str) -> dict[str, int]:
    """Bytes that are not what they should be, by tensor; the source's bytes are random and the receiver knows them."""
    device = device_of(number)
    schedule = schedule_of(transfers(), "train" if number == 0 else "gen", 0, WORLDS)
    if number == 1:
        schedule = replace(schedule, view=OtherEndView(other_end_of(transfers(), 0)))
    shapes = {local.name: local.shape for local in schedule.tensors}
    if number == 0:
        held = {name: source(name, device) for name in shapes}
    else:
        held = {name: torch.full(shape, 0xFF, dtype=torch.uint8, device=device) for name, shape in shapes.items()}
    tensors = {name: tensor.view(torch.float8_e4m3fn) for name, tensor in held.items()}
    endpoint = (TrainEndpoint if number == 0 else GenerationEndpoint)(
        schedule, tensors, store=address, options=Options(transport=transport, timeout_s=120.0)
    )
    endpoint.prepare()
    endpoint.refit(1)
    wrong = (
        {transfer.parameter: difference(transfer, held[transfer.dst.tensor]) for transfer in transfers()}
        if number == 1
        else {}
    )
    endpoint.close()
    return wrong


def source(name: str, device: torch.device) -> torch.Tensor:
    (shape,) = (transfer.src.shape for transfer in transfers() if transfer.src.tensor == name)
    generator = torch.Generator(device).manual_seed(len(shape))
    return torch.randint(0, 256, shape, dtype=torch.uint8, device=device, generator=generator)


def difference(transfer: HandTransfer, held: torch.Tensor) -> int:
    """Wrong bytes in the region and around it, where the poison must still be."""
    want = torch.full_like(held, 0xFF)
    box(want, transfer.dst, transfer.extents).copy_(
        box(source(transfer.src.tensor, held.device), transfer.src, transfer.extents)
    )
    parts = zip(held.reshape(-1).split(GIB // 4), want.reshape(-1).split(GIB // 4), strict=True)
    return sum(int((found != wanted).sum()) for found, wanted in parts)  # torch sums in 8 bytes an element


def box(tensor: torch.Tensor, end: End, extents: tuple[int, ...]) -> torch.Tensor:
    return tensor[tuple(slice(low, low + size) for low, size in zip(end.origin, extents, strict=True))]


@pytest.mark.parametrize("transport", ["direct", "nccl", "auto"])
def test_regions_of_more_than_four_gib(transport: str) -> None:
    if reason := UNAVAILABLE.get(transport):
        pytest.skip(reason)
    if torch.cuda.mem_get_info()[0] < NEEDED_BYTES:
        pytest.skip("needs 36 GiB of free GPU memory")
    outcomes = run_ranks(2, refit, transport, timeout_s=300.0, method="spawn")
    assert values(outcomes)[1] == {"flat": 0, "rows": 0}
