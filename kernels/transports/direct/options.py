"""How generation ranks pull in the direct transport."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_reshard.kernels.cuda.copy_kernel import KernelShape

DEFAULT_TILE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How generation ranks pull. Training ranks ignore it."""

    shape: KernelShape = KernelShape()  # noqa: RUF009  `ctas` leaves the rest of the GPU to generation
    tile_bytes: int = DEFAULT_TILE_BYTES
    checksums: bool = False  # sum every tile as it is read and as it was written, and compare
