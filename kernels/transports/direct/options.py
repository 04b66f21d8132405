"""How generation ranks pull in the direct transport."""

from __future__ import annotations

from dataclasses import dataclass

from mcore_reshard.kernels.cuda.copy_kernel import KernelShape
from mcore_reshard.kernels.cuda.tiles import check_tile_bytes

DEFAULT_TILE_BYTES = 128 << 10


@dataclass(frozen=True, slots=True)
class DirectOptions:
    """How generation ranks pull. What training ranks are given does not matter."""

    shape: KernelShape = KernelShape()  # noqa: RUF009  `ctas` bounds what it takes of a GPU that generates meanwhile
    tile_bytes: int = DEFAULT_TILE_BYTES
    turn_bytes: int | None = (
        None  # taken from one source before it is the next one's turn; None: as `interleaved` chooses
    )
    checksums: bool = False  # sum every tile as it is read and as it was written, and compare

    def __post_init__(self) -> None:
        check_tile_bytes(self.tile_bytes)
