"""NVSHMEM 3 from the host, for two processes of one host: its library by ctypes, and memory that both allocate together.

Structures and constants are those of its headers nvshmem_uniqueid.h, nvshmem_types.h, nvshmem_constants.h,
nvshmem_common_transport.h and nvshmemx_api.h.
"""

from __future__ import annotations

import ctypes
import os
from importlib import metadata

import torch

SIGNAL_SET, AT_LEAST = 9, 5  # NVSHMEM_SIGNAL_SET, NVSHMEM_CMP_GE
_WITH_UNIQUE_ID = 1 << 3  # NVSHMEMX_INIT_WITH_UNIQUEID
_V1 = 1 << 16  # a structure's version, to which its size in bytes is added


class _UniqueId(ctypes.Structure):
    """nvshmemx_uniqueid_v1."""

    _fields_ = (("version", ctypes.c_int), ("internal", ctypes.c_byte * 124))


class _UniqueIdArgs(ctypes.Structure):
    """nvshmemx_uniqueid_args_v1."""

    _fields_ = (
        ("version", ctypes.c_int),
        ("id", ctypes.POINTER(_UniqueId)),
        ("rank", ctypes.c_int),
        ("ranks", ctypes.c_int),
    )


class _InitArgs(ctypes.Structure):
    """nvshmemx_init_args_v1."""

    _fields_ = (("version", ctypes.c_int), ("unique_id", _UniqueIdArgs), ("content", ctypes.c_byte * 96))


class _InitAttributes(ctypes.Structure):
    """nvshmemx_init_attr_v1."""

    _fields_ = (("version", ctypes.c_int), ("mpi_comm", ctypes.c_void_p), ("args", _InitArgs))


def load() -> ctypes.CDLL:
    """The library that torch has loaded, else that of its package; with the types of the calls that are used."""
    try:
        library = ctypes.CDLL("libnvshmem_host.so.3")
    except OSError:
        package = metadata.distribution("nvidia-nvshmem-cu13")
        library = ctypes.CDLL(str(package.locate_file("nvidia/nvshmem/lib/libnvshmem_host.so.3")))
    pointer, size, number, word = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_uint64
    for name, result, arguments in (
        ("nvshmemx_vendor_get_version_info", None, [pointer, pointer, pointer]),
        ("nvshmemx_get_uniqueid", number, [pointer]),
        ("nvshmemx_hostlib_init_attr", number, [ctypes.c_uint, pointer]),
        ("nvshmem_malloc", pointer, [size]),
        ("nvshmemx_putmem_signal_on_stream", None, [pointer, pointer, size, pointer, word, number, number, pointer]),
        ("nvshmemx_signal_wait_until_on_stream", None, [pointer, number, word, pointer]),
    ):
        call = getattr(library, name)
        call.restype, call.argtypes = result, arguments
    return library


def version(library: ctypes.CDLL) -> str:
    parts = [ctypes.c_int() for _ in range(3)]
    library.nvshmemx_vendor_get_version_info(*map(ctypes.byref, parts))
    return ".".join(str(part.value) for part in parts)


def unique_id(library: ctypes.CDLL) -> str:
    """A new session's, in hexadecimal. Rank 0 makes it, and serves those that join."""
    _set_environment()
    made = _UniqueId(version=_V1 + ctypes.sizeof(_UniqueId))
    if status := library.nvshmemx_get_uniqueid(ctypes.byref(made)):
        raise RuntimeError(f"nvshmemx_get_uniqueid: status {status}")
    return bytes(made).hex()


def initialize(library: ctypes.CDLL, rank: int, session: str, ranks: int = 2) -> None:
    """Join a session with the current GPU; all GPUs must be reachable without a network."""
    _set_environment()
    id_of_session = _UniqueId.from_buffer_copy(bytes.fromhex(session))
    attributes = _InitAttributes(version=_V1 + ctypes.sizeof(_InitAttributes))
    attributes.args.version = _V1 + ctypes.sizeof(_InitArgs)
    version_of_args = _V1 + ctypes.sizeof(_UniqueIdArgs)
    attributes.args.unique_id = _UniqueIdArgs(version_of_args, ctypes.pointer(id_of_session), rank, ranks)
    if status := library.nvshmemx_hostlib_init_attr(_WITH_UNIQUE_ID, ctypes.byref(attributes)):
        raise RuntimeError(f"nvshmemx_hostlib_init_attr: status {status}")


def _set_environment() -> None:
    """The library reads it at its first call."""
    os.environ.update(
        NVSHMEM_BOOTSTRAP_UID_SOCK_IFNAME="lo",
        NVSHMEM_REMOTE_TRANSPORT="none",
        NVSHMEM_DISABLE_NCCL="1",  # only its collectives would use it
        NVSHMEM_DISABLE_NVLS="1",
        NVSHMEM_SYMMETRIC_SIZE=str(4 << 30),  # bytes; a heap of virtual memory grows beyond it
    )


class SymmetricMemory:
    """`nbytes` that all ranks allocate together, never freed; `tensor`, uint8 [nbytes], shows this rank's."""

    def __init__(self, library: ctypes.CDLL, nbytes: int) -> None:
        address = library.nvshmem_malloc(nbytes)
        if not address:
            raise torch.OutOfMemoryError(f"nvshmem_malloc has no {nbytes} bytes")
        self.__cuda_array_interface__ = {"shape": (nbytes,), "typestr": "|u1", "data": (address, False), "version": 3}
        self.tensor: torch.Tensor = torch.as_tensor(self, device="cuda")
