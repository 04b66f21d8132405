"""Named tensors of any size arrive whole on every generation rank, and damage does not go unseen."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from helpers.gloo import connect
from helpers.handmade import raw_bytes
from helpers.ranks import run_ranks, values

from mcore_reshard.kernels.errors import Waiting
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup, GlooMessage
from mcore_reshard.kernels.transports.broadcast import _FRAME, Tree, _parse_header, broadcast, receive


def tensors() -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {
        "large": torch.randn(7, 11, 13, generator=generator),
        "scalar": torch.tensor(3.5, dtype=torch.bfloat16),
        "empty": torch.empty(0, 4),
        "transposed": torch.randn(5, 3, generator=generator, dtype=torch.float64).t(),
        "quantized": torch.randint(0, 255, (64,), generator=generator, dtype=torch.uint8).view(torch.float8_e4m3fn),
        "flags": torch.tensor([True, False, True]),
    }


def stream(rank: int, address: str, ranks: int, frame_bytes: int, kind: type[GlooGroup] = GlooGroup) -> Any:
    group = connect(address, rank, ranks, kind=kind)
    tree = Tree(rank, tuple(range(ranks)), ("train:0", *(f"gen:{n}" for n in range(ranks - 1))))
    if rank == 0:
        return broadcast(group, tree, tensors().items(), frame_bytes=frame_bytes)
    got = list(receive(group, tree, frame_bytes=frame_bytes))
    return [(name, str(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor)) for name, tensor in got]


@pytest.mark.parametrize(("ranks", "frame_bytes"), [(2, 64), (6, 100), (3, 1 << 20)])
def test_every_rank_gets_every_tensor_whatever_the_frame(ranks: int, frame_bytes: int) -> None:
    sent, *received = values(run_ranks(ranks, stream, ranks, frame_bytes))
    want = [
        (name, str(tensor.dtype), tuple(tensor.shape), raw_bytes(tensor.contiguous()))
        for name, tensor in tensors().items()
    ]
    assert received == [want] * (ranks - 1)
    assert sent == sum(tensor.nbytes for tensor in tensors().values())


class NoisyGroup(GlooGroup):
    """Damages a byte of every frame on its way out."""

    def send(self, buffer: torch.Tensor, peer: int, waiting: Waiting) -> GlooMessage:
        if buffer.numel() > _FRAME.size:
            buffer[0] ^= 1
        return super().send(buffer, peer, waiting)


def damaged_stream(rank: int, address: str) -> Any:
    return stream(rank, address, 2, 64, NoisyGroup)


def test_a_damaged_frame_is_reported() -> None:
    _, receiver = run_ranks(2, damaged_stream)
    assert receiver.kind == "ChecksumError"
    assert "misc route: gen:0 waiting for train:0 to send the next tensor: frame 0 arrived damaged" in str(
        receiver.error
    )


def test_a_header_that_is_not_one_is_refused() -> None:
    for header in (b"\x80\x04pickle", b"[1]", b'{"name": "a"}', b'{"name": "a", "dtype": "float32", "shape": [-1]}'):
        with pytest.raises(RuntimeError, match="not a tensor header"):
            _parse_header(header)
