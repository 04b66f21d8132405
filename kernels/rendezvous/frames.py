"""Frames between a store and its clients: a JSON header, then blobs of bytes. The server imports it: no torch, no numpy.

frame     length of the rest, u32 | length of the header, u32 | header | blobs
header    {"id": 7, "op": "set", "keys": ["head"], "blobs": [12]}: the blobs' lengths are in it
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

from mcore_reshard.planner.bounded_json import MAX_VALUES, parse_json

LENGTHS = struct.Struct(">II")
MAX_FRAME_BYTES = 24 << 20  # the longest answer has a word of every rank
MAX_VALUE_BYTES = (12 << 20) + 1024  # what ranks read of one key, and its seal; the largest plan measured has 0.9 MB
MAX_OPENING_BYTES = 16 << 10  # of the first frame, before its sender is known
MAX_REQUEST_BYTES = 4 << 20  # of a request's header: names of many keys
MAX_HEADER_BYTES = 16 << 20  # of an answer's header: all seats of a session
MAX_KEY = 1000  # characters
MAGIC = "mcore-reshard store 1"


class FrameError(ValueError):
    """What arrived is no frame of a store, or is too long."""


def pack(header: Mapping[str, Any], blobs: Sequence[bytes] = (), header_limit: int = MAX_HEADER_BYTES) -> bytes:
    """One frame. Raises FrameError where it is longer than the other side reads."""
    text = json.dumps({**header, "blobs": [len(blob) for blob in blobs]}).encode()
    size = LENGTHS.size - 4 + len(text) + sum(map(len, blobs))
    if size - 4 > MAX_FRAME_BYTES or len(text) > header_limit:
        raise FrameError(
            f"{size} bytes, {len(text)} of them names, are more than a store takes at once:"
            f" {MAX_FRAME_BYTES}, and {header_limit} of names"
        )
    return b"".join((LENGTHS.pack(size, len(text)), text, *blobs))


def body_bytes(lengths: bytes | bytearray, limit: int, header_limit: int = MAX_HEADER_BYTES) -> tuple[int, int]:
    """(bytes of the header, bytes of header and blobs) of a frame that begins with these 8 bytes. Raises FrameError."""
    size, header_bytes = LENGTHS.unpack(lengths)
    body = size - 4
    if not 0 < header_bytes <= min(body, header_limit) or body > limit:
        raise FrameError(
            f"a frame of {size} bytes with a header of {header_bytes}; at most {limit} bytes are read here,"
            f" {min(limit, header_limit)} of a header"
        )
    return header_bytes, body


def unpack(header_bytes: int, body: bytes | bytearray) -> tuple[dict[str, Any], list[bytes]]:
    """The header and the blobs of a frame. Raises FrameError."""
    try:
        view = memoryview(body)
        text = bytes(view[:header_bytes])
        header = parse_json(text, "its header", max_bytes=MAX_HEADER_BYTES, max_strings=MAX_VALUES)
        lengths, at, blobs = header.pop("blobs"), header_bytes, []
        if not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise ValueError("a blob has no length")
        if sum(lengths) != len(body) - header_bytes:
            raise ValueError("the blobs are longer or shorter than the header says")
        for length in lengths:
            blobs.append(bytes(view[at : at + length]))
            at += length
        return header, blobs
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise FrameError(f"a malformed frame: {error}") from error


def watch_host(connection: socket.socket, silence_s: float) -> None:
    """Let the kernel close a connection whose host has been silent for so long. Frozen processes still answer."""
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    probe_s = max(1, int(silence_s / 4))
    limits = {"TCP_KEEPIDLE": probe_s, "TCP_KEEPINTVL": probe_s, "TCP_KEEPCNT": 3}
    limits["TCP_USER_TIMEOUT"] = max(1000, int(1000 * silence_s))
    for name, limit in limits.items():
        if hasattr(socket, name):
            with suppress(OSError):  # a longer time than this kernel allows
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, name), min(limit, 32767_000))


def receive(connection: socket.socket, limit: int) -> tuple[dict[str, Any], list[bytes]]:
    """The next frame of a connection, of at most `limit` bytes. Raises OSError and FrameError."""
    header_bytes, body = body_bytes(_read(connection, LENGTHS.size), limit)
    return unpack(header_bytes, _read(connection, body))


def _read(connection: socket.socket, count: int) -> bytes | bytearray:
    if count <= 1 << 16:
        content = connection.recv(count)
        if len(content) == count:
            return content
    else:
        content = b""
    buffer = bytearray(content)
    while len(buffer) < count:
        more = connection.recv(min(count - len(buffer), 1 << 20))
        if not more:
            raise ConnectionResetError("the store has closed the connection")
        buffer += more
    return buffer
