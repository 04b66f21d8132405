"""What a box of a storage is made of, and where a loader is: the records that a recorder keeps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.geometry import LocalTensor
from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import TracedTensor

_WIDE = {"float32", "float64"}  # hold every value of the dtypes below
_HELD_BY_WIDE = {"float32", "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2", "uint8", "int8", "bool"}
_OWN_FOLDER = str(Path(__file__).parent)
_TORCH_FOLDER = str(Path(torch.__file__).parent)
_PACKAGES = ("vllm", "megatron", "sglang", "transformers")


@dataclass(frozen=True, slots=True)
class Write:
    """What a box of a storage is made of. Of `parameter`, `fill` and `computed` one is set; none: nobody wrote it.

    The source of `copy` counts in elements of the Hugging Face tensor `parameter`. `stored` is the dtype that the bits are
    of, `dtypes` are all that the values had after the first.
    """

    copy: StridedCopy
    parameter: str = ""
    fill: float | None = None
    computed: str = ""
    parameters: tuple[str, ...] = ()  # that a computed box depends on
    stored: str = ""
    dtypes: frozenset[str] = frozenset()

    @property
    def names(self) -> tuple[str, ...]:
        """The Hugging Face tensors that the box is made of."""
        return (*((self.parameter,) if self.parameter else ()), *self.parameters)

    def moved(self, src_dtype: str, dst_dtype: str) -> Write:
        """The same after a copy from a view as `src_dtype` to one as `dst_dtype`: a cast, or bits that are moved as they are."""
        if self.computed or not (self.parameter or self.fill):  # zero is zero in every dtype
            return replace(self, stored=dst_dtype)
        if src_dtype == self.stored:
            dtypes = self.dtypes | {dst_dtype}
            return Write(self.copy, self.parameter, self.fill, self.computed, self.parameters, dst_dtype, dtypes)
        if src_dtype == dst_dtype:
            return self
        return self.made_of_bits(src_dtype)

    def shifted(self, by: int) -> Write:
        """The same so many elements further on."""
        c = self.copy
        copy = StridedCopy(c.extents, c.src_offset, c.src_strides, c.dst_offset + by, c.dst_strides)
        return Write(copy, self.parameter, self.fill, self.computed, self.parameters, self.stored, self.dtypes)

    def made_of_bits(self, dtype: str) -> Write:
        """The same if its bits are taken for numbers of another dtype."""
        return Write(self.copy, computed=f"bits of {self.stored} as {dtype}, at {caller()}", parameters=self.names)


def storage_of(tensor: torch.Tensor) -> int:
    """A storage by its address: whoever keeps it as a key keeps the tensor alive."""
    return tensor.untyped_storage()._cdata


def onto(tensor: torch.Tensor) -> StridedCopy:
    """A copy from nowhere onto all elements of a tensor."""
    shape = tuple(tensor.shape)
    return StridedCopy(shape, 0, (0,) * len(shape), int(tensor.storage_offset()), tensor.stride())


def constant(src: torch.Tensor, then: StridedCopy) -> Write:
    """Real values that a loader copies: one number throughout, or something that no trace can name."""
    first = src.reshape(-1)[:1]
    if bool((src == first).all()):
        from_nowhere = replace(then, src_offset=0, src_strides=(0,) * len(then.extents))
        return Write(from_nowhere, fill=float(first), stored=dtype_name(src.dtype))
    return Write(then, computed=f"values that the loader makes itself, at {caller()}")


def caller() -> str:
    """File and line of the loader: the innermost frame outside of torch and this package."""
    frame: Any = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename.startswith((_OWN_FOLDER, _TORCH_FOLDER, "<")):
        frame = frame.f_back
    if frame is None:
        return "an unknown place"
    path = Path(frame.f_code.co_filename)
    known = [part for part in _PACKAGES if part in path.parts]
    start = len(path.parts) - 1 - path.parts[::-1].index(known[0]) if known else len(path.parts) - 2
    return f"{'/'.join(path.parts[max(start, 0) :])}:{frame.f_lineno}"


def traced_tensor(local: LocalTensor, writes: Sequence[Write], dtypes: Mapping[str, str]) -> TracedTensor:
    """What disjoint writes say of a tensor; `dtypes` are those of Hugging Face tensors."""
    writes = [w.made_of_bits(local.dtype) if (w.parameter or w.fill) and w.stored != local.dtype else w for w in writes]
    parameters = tuple(dict.fromkeys(name for write in writes for name in write.names))
    problem = next((write.computed for write in writes if write.computed), "")
    copies = tuple((write.parameter, write.copy) for write in writes if write.parameter)
    padding = tuple(write.copy for write in writes if write.fill is not None)
    if not problem and copies:
        missing = sum(write.copy.elements for write in writes if not write.parameter and write.fill is None)
        ends = [(write.dtypes, _kept(dtypes[write.parameter], local.dtype)) for write in writes if write.parameter]
        rounded = sorted({dtype for passed, kept in ends for dtype in passed - kept})
        values = sorted({write.fill for write in writes if write.fill})
        if missing:
            problem = f"{missing} of {prod(local.shape)} elements are not loaded"
        elif rounded:
            problem = f"rounded to {', '.join(rounded)} on the way"
        elif values:
            problem = f"filled with {', '.join(map(str, values))} beside what is loaded"
        elif any(0 in write.copy.src_strides for write in writes if write.parameter):
            problem = "elements that are repeated"
    if problem:
        return TracedTensor(local, computed=problem, parameters=parameters)
    only_zeros = bool(writes) and all(write.fill == 0 for write in writes)  # a rank of padding rows alone
    return TracedTensor(local, copies, padding if copies or only_zeros else ())


def _kept(src: str, dst: str) -> set[str]:
    """The dtypes on the way that lose nothing: a value cast through them is the value cast at once."""
    return {src, dst, *(_WIDE if src in _HELD_BY_WIDE else ())}
