"""What a trace says: of which Hugging Face elements every tensor of a rank is made, read off the loaders that fill it.

A trace is plain data. The tracers (torch) write it, the planner (numpy alone) reads it, ranks send it to each other.
"""

from __future__ import annotations

from dataclasses import dataclass

from .geometry import LocalTensor
from .strided import StridedCopy


@dataclass(frozen=True, slots=True)
class HfTensor:
    """A tensor as the trainer exports it and the engine's loader takes it."""

    shape: tuple[int, ...]
    dtype: str


@dataclass(frozen=True, slots=True)
class TracedTensor:
    """One tensor of a rank, its name without patterns, and what fills it.

    `copies` are (HF name, copy from that tensor to this one), disjoint. `padding` are boxes of zeros beyond the HF
    extent, as copies from nowhere (source offset and strides are 0). Copies and padding fill the tensor, each element
    once, unless `computed` says why it is no rearrangement of HF elements; then `parameters` are those that it needs.
    """

    tensor: LocalTensor
    copies: tuple[tuple[str, StridedCopy], ...] = ()
    padding: tuple[StridedCopy, ...] = ()
    computed: str = ""
    parameters: tuple[str, ...] = ()

    @property
    def names(self) -> tuple[str, ...]:
        """The HF tensors that this one is made of."""
        return tuple(dict.fromkeys((*(name for name, _ in self.copies), *self.parameters)))


@dataclass(frozen=True, slots=True)
class RankTrace:
    """All tensors of one rank."""

    tensors: tuple[TracedTensor, ...]
