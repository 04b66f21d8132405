"""Send whole named tensors, of any number and size, from one training rank to every generation rank.

The tensors are one stream of bytes: for each a length, a JSON header (name, dtype, shape) and its bytes; a zero length
ends the stream. The stream travels in frames of at most `frame_bytes`, each with a CRC-32, down a binary tree whose
root is the source. Nothing read from the network is ever unpickled. Scratch is two frames on every rank.
"""

from __future__ import annotations

import json
import struct
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod

import torch

from mcore_reshard.kernels.copies.tensors import byte_view, dtype_name
from mcore_reshard.kernels.errors import ChecksumError, SessionError, Waiting
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup, GlooMessage
from mcore_reshard.planner.bounded_json import parse_json
from mcore_reshard.planner.model.name_patterns import MAX_NAME

DEFAULT_FRAME_BYTES = 8 << 20
_FRAME = struct.Struct("<III")  # CRC-32 of the frame, its bytes, its number
_LENGTH = struct.Struct("<I")
_LONGEST_HEADER = 1 << 14  # a name of at most 512 characters, a dtype, and a shape
_MOST_DIMS = 16
MAX_TENSOR_BYTES = 1 << 36  # 64 GiB: a vocabulary of 1,000,000 by 16,384 in float32; larger headers are damage
_FLOATS = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
_DTYPES = {name: getattr(torch, name) for name in (*_FLOATS, "int64", "int32", "int16", "int8", "uint8", "bool")}


@dataclass(frozen=True, slots=True)
class Tree:
    """A binary tree of ranks. Position 0 is the source; position p passes the stream on to 2 p + 1 and 2 p + 2."""

    position: int
    ranks: tuple[int, ...]  # group rank of each position
    names: tuple[str, ...]  # of each position, as "gen:1"

    @property
    def children(self) -> range:
        return range(2 * self.position + 1, min(2 * self.position + 3, len(self.ranks)))


def broadcast(
    group: GlooGroup, tree: Tree, tensors: Iterable[tuple[str, torch.Tensor]], *, frame_bytes: int = DEFAULT_FRAME_BYTES
) -> int:
    """Send `tensors`, one at a time, from the tree's source to all others; any device, any strides. Returns their bytes."""
    frames = _FrameWriter(group, tree, frame_bytes)
    nbytes = 0
    for name, tensor in tensors:
        dtype = dtype_name(tensor.dtype)
        if dtype not in _DTYPES:
            raise SessionError(f"{name}: tensors of {dtype} cannot be broadcast, only {', '.join(_DTYPES)}")
        header = json.dumps({"name": name, "dtype": dtype, "shape": list(tensor.shape)}).encode()
        frames.write(name, torch.frombuffer(bytearray(_LENGTH.pack(len(header)) + header), dtype=torch.uint8))
        payload = byte_view(tensor.detach().contiguous())
        frames.write(name, payload)
        nbytes += payload.numel()
    frames.write("the end", torch.zeros(_LENGTH.size, dtype=torch.uint8))
    frames.close()
    return nbytes


def receive(
    group: GlooGroup, tree: Tree, *, frame_bytes: int = DEFAULT_FRAME_BYTES, max_bytes: int = MAX_TENSOR_BYTES
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield (name, CPU tensor with memory of its own). Read it to its end: frames are passed on as they are read.

    Raises `SessionError` for a tensor of more than `max_bytes` before it allocates it, and where memory does not suffice.
    """
    frames = _FrameReader(group, tree, frame_bytes)
    while length := _LENGTH.unpack(frames.read("the next tensor", _LENGTH.size).numpy().tobytes())[0]:
        if length > _LONGEST_HEADER:
            raise SessionError(f"a tensor header of {length} bytes: this is not a stream of tensors")
        name, dtype, shape = _parse_header(frames.read("the next tensor", length).numpy().tobytes())
        if (nbytes := prod(shape) * dtype.itemsize) > max_bytes:
            raise SessionError(
                f"{name} is announced with {nbytes:,} bytes, more than the {max_bytes:,} that are read here"
            )
        yield name, frames.read(name, nbytes).view(dtype).reshape(shape)
    frames.close()


def _parse_header(header: bytes) -> tuple[str, torch.dtype, tuple[int, ...]]:
    try:
        fields = parse_json(header, "it", max_bytes=_LONGEST_HEADER)
        name, dtype, shape = fields["name"], _DTYPES[fields["dtype"]], tuple(fields["shape"])
        if not isinstance(name, str) or not all(type(extent) is int and extent >= 0 for extent in shape):
            raise ValueError("a name is a string, an extent an integer from 0")
        if len(name) > MAX_NAME or len(shape) > _MOST_DIMS:
            raise ValueError(f"a name of {len(name)} characters, {len(shape)} dims")
    except (ValueError, KeyError, TypeError) as error:
        raise SessionError(f"not a tensor header: {header[:200]!r}") from error
    return name, dtype, shape


class _Slot:
    """A frame's memory. It is free again when the sends in `passed_on`, which read it, are done."""

    def __init__(self, frame_bytes: int) -> None:
        self.header = torch.empty(_FRAME.size, dtype=torch.uint8)
        self.frame = torch.empty(frame_bytes, dtype=torch.uint8)
        self.passed_on: list[GlooMessage] = []

    def reclaim(self) -> None:
        for message in self.passed_on:
            message.wait()
        self.passed_on.clear()


class _Frames:
    """Two frames in turn: one is read or filled while the other is on its way to the children."""

    def __init__(self, group: GlooGroup, tree: Tree, frame_bytes: int) -> None:
        self._group = group
        self._tree = tree
        self._slots = (_Slot(frame_bytes), _Slot(frame_bytes))
        self._slot = self._slots[0]
        self._number = 0
        self._used = 0  # bytes of the current frame already written or read

    def _pass_on(self, nbytes: int, parameter: str) -> None:
        for child in self._tree.children:
            peer, waiting = self._tree.ranks[child], self._waiting(child, parameter, sends=True)
            self._slot.passed_on += (
                self._group.send(self._slot.header, peer, waiting),
                self._group.send(self._slot.frame[:nbytes], peer, waiting),
            )

    def _turn(self) -> None:
        self._number += 1
        self._used = 0
        self._slot = self._slots[self._number % 2]
        self._slot.reclaim()

    def _waiting(self, position: int, parameter: str, *, sends: bool) -> Waiting:
        names = self._tree.names
        return Waiting(names[self._tree.position], names[position], None, parameter, sends)

    def close(self) -> None:
        for slot in self._slots:
            slot.reclaim()


class _FrameWriter(_Frames):
    def write(self, parameter: str, payload: torch.Tensor) -> None:
        """Append bytes (uint8 [n], any device)."""
        while payload.numel():
            room = self._slot.frame[self._used :][: payload.numel()]
            room.copy_(payload[: room.numel()])
            payload = payload[room.numel() :]
            self._used += room.numel()
            if self._used == self._slot.frame.numel():
                self._flush(parameter)

    def close(self) -> None:
        if self._used:
            self._flush("the end")
        super().close()

    def _flush(self, parameter: str) -> None:
        crc = zlib.crc32(self._slot.frame[: self._used].numpy().data)
        _FRAME.pack_into(self._slot.header.numpy().data, 0, crc, self._used, self._number)
        self._pass_on(self._used, parameter)
        self._turn()


class _FrameReader(_Frames):
    def __init__(self, group: GlooGroup, tree: Tree, frame_bytes: int) -> None:
        super().__init__(group, tree, frame_bytes)
        self._filled = 0  # bytes of the current frame; none before the first one

    def read(self, parameter: str, nbytes: int) -> torch.Tensor:
        """The next bytes of the stream, uint8 [nbytes]."""
        try:
            payload = left = torch.empty(nbytes, dtype=torch.uint8)
        except RuntimeError as error:  # torch's for no memory
            raise SessionError(f"no memory for the {nbytes:,} bytes of {parameter}") from error
        while left.numel():
            if self._used == self._filled:
                self._next(parameter)
            part = self._slot.frame[self._used : self._filled][: left.numel()]
            left[: part.numel()] = part
            left = left[part.numel() :]
            self._used += part.numel()
        return payload

    def _next(self, parameter: str) -> None:
        if self._filled:
            self._turn()
        parent = (self._tree.position - 1) // 2
        peer, waiting = self._tree.ranks[parent], self._waiting(parent, parameter, sends=False)
        self._group.recv(self._slot.header, peer, waiting).wait()
        crc, nbytes, number = _FRAME.unpack_from(self._slot.header.numpy().data)
        if number != self._number or not 0 < nbytes <= self._slot.frame.numel():
            raise ChecksumError(waiting, f"frame {number} of {nbytes} bytes arrived in place of frame {self._number}")
        frame = self._slot.frame[:nbytes]
        self._group.recv(frame, peer, waiting).wait()
        if (computed := zlib.crc32(frame.numpy().data)) != crc:
            raise ChecksumError(waiting, f"frame {number} arrived damaged: CRC-32 {computed:08x}, sent with {crc:08x}")
        self._filled = nbytes
        self._pass_on(nbytes, parameter)
