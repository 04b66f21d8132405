"""Record what every storage is made of while a loader runs on meta tensors: no weights, no memory, no rules.

    recorder = Recorder()
    tensor = recorder.source("model.norm.weight", HfTensor((64,), "bfloat16"))
    with torch.no_grad(), recorder:
        parameter.copy_(tensor * 2)
    recorder.read("norm.weight", parameter).computed    # "aten.mul.Tensor at loader.py:12"

Copies are followed through views, clones, casts, concatenations and indexing with known indices, as boxes (operators.py).
Any other operator makes its results *computed*. Later writes win, as they do in memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

from mcore_reshard.kernels.copies.tensors import dtype_name
from mcore_reshard.planner.layout.geometry import LocalTensor, row_major_strides
from mcore_reshard.planner.layout.strided import NotNestedError, StridedCopy, compose, unread
from mcore_reshard.planner.layout.traces import HfTensor, TracedTensor

from .operators import RECORDED, VIEWS
from .writes import Write, caller, constant, onto, storage_of, traced_tensor

_LARGEST_CONSTANT = 1 << 22  # elements of index tensors whose values are followed


class TraceError(RuntimeError):
    """A loader did what a trace cannot follow: it raised, or it wrote into the live model."""


class Recorder(TorchDispatchMode):
    """A dispatch mode under which a loader runs. Storages are told apart by address, so all of them are kept alive."""

    def __init__(self, live: Sequence[torch.Tensor] = ()) -> None:
        """`live`: tensors with real weights; a loader that writes into one raises TraceError."""
        super().__init__()
        self._dtypes: dict[str, str] = {}  # of the Hugging Face tensors
        self._writes: dict[int, list[Write]] = {}  # by storage; that of a Hugging Face tensor begins with itself
        self._sources: dict[int, Write] = {}  # by storage of a Hugging Face tensor: this first write
        self._sizes: dict[int, int] = {}  # bytes of the elements that the writes of a storage count in
        self._mixed: dict[int, str] = {}  # storages written in elements of several sizes, and where
        self._values: dict[int, torch.Tensor] = {}  # integers that the loader made, on the CPU: indices
        self._live = {storage_of(tensor) for tensor in live}
        self._kept: list[torch.Tensor] = [*live]

    def source(self, name: str, tensor: HfTensor) -> torch.Tensor:
        """A meta tensor that stands for a Hugging Face tensor."""
        with torch._C._DisableTorchDispatch():  # loaders may ask for a source while the mode is on
            standin = torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
        size = standin.numel()
        itself = Write(StridedCopy((size,), 0, (1,), 0, (1,)), name, stored=tensor.dtype)
        self._sources[storage_of(standin)] = itself
        self.write(standin, [itself])
        self._dtypes[name] = tensor.dtype
        return standin

    def read(self, name: str, tensor: torch.Tensor) -> TracedTensor:
        """What a tensor is made of once the loader has run."""
        shape = tuple(tensor.shape)
        local = LocalTensor(name, shape, dtype_name(tensor.dtype))
        whole = StridedCopy(shape, int(tensor.storage_offset()), tensor.stride(), 0, row_major_strides(shape))
        try:
            writes = self._gather(tensor, whole)
        except NotNestedError as error:
            computed = f"its boxes are no layout: {error}"
            return TracedTensor(local, computed=computed, parameters=self._parameters_of(tensor))
        return traced_tensor(local, [write for write in writes if write.copy.elements], self._dtypes)

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # nothing is compiled here, and the wrapper that torch would add takes longer than a record

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in VIEWS:
            return func(*args, **(kwargs or {}))
        if (record := RECORDED.get(func)) is not None:
            return record(self, func, args, kwargs or {})
        return self.run(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """An operator without a rule. It may make views; all else that it makes is computed, or has known integer values."""
        inputs = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
        if torch.Tag.inplace_view in func.tags:
            return func(*args, **kwargs)
        if func._schema.is_mutable:
            return self._run_in_place(func, args, kwargs, inputs)
        if (values := self._constants(func, inputs, args, kwargs)) is not None:
            return tree_map(self._known, values)
        before = {storage_of(tensor) for tensor in inputs}
        result = func(*args, **on_meta(kwargs, inputs))
        for output in tree_leaves(result):
            if isinstance(output, torch.Tensor) and output.is_meta and storage_of(output) not in before:
                self.write(output, [self._computed(func, inputs, output)])
        return result

    def _run_in_place(self, func: Any, args: Any, kwargs: Any, inputs: Sequence[torch.Tensor]) -> Any:
        """An operator that changes what it is given: not only what it returns, which may be nothing."""
        given = {**dict(zip((argument.name for argument in func._schema.arguments), args, strict=False)), **kwargs}
        changed = [
            leaf
            for argument in func._schema.arguments
            if argument.alias_info is not None and argument.alias_info.is_write
            for leaf in tree_leaves(given.get(argument.name))
            if isinstance(leaf, torch.Tensor)
        ]
        if any(storage_of(tensor) in self._live for tensor in changed):
            raise TraceError(f"the loader runs {func} on the live model, at {caller()}")
        computed = [(tensor, self._computed(func, inputs, tensor)) for tensor in changed if tensor.is_meta]
        result = func(*args, **kwargs)
        for tensor, write in computed:
            self.write(tensor, [write])
        return result

    def _computed(self, func: Any, inputs: Sequence[torch.Tensor], output: torch.Tensor) -> Write:
        parameters = dict.fromkeys(name for tensor in inputs for name in self._parameters_of(tensor))
        return Write(onto(output), computed=f"{func} at {caller()}", parameters=tuple(parameters))

    def _parameters_of(self, tensor: torch.Tensor) -> tuple[str, ...]:
        return tuple(dict.fromkeys(name for w in self._writes.get(storage_of(tensor), ()) for name in w.names))

    def _constants(self, func: Any, inputs: Sequence[torch.Tensor], args: Any, kwargs: Any) -> Any:
        """The results of an operator on integers that are all known, run on the CPU; None where it is no such operator."""
        meta = [tensor for tensor in inputs if tensor.is_meta]
        if not meta and str(kwargs.get("device")) != "meta":
            return None  # it runs on the CPU anyway
        if torch.Tag.nondeterministic_seeded in func.tags:
            return None
        if any(tensor.dtype.is_floating_point or tensor.numel() > _LARGEST_CONSTANT for tensor in inputs):
            return None
        if any(self.values(tensor) is None for tensor in meta):
            return None

        def known(leaf: Any) -> Any:
            return self.values(leaf) if isinstance(leaf, torch.Tensor) else leaf

        on_cpu = {name: "cpu" if name == "device" else known(value) for name, value in kwargs.items()}
        try:
            result = func(*tree_map(known, args), **on_cpu)
        except (RuntimeError, TypeError, NotImplementedError):
            return None
        outputs = [leaf for leaf in tree_leaves(result) if isinstance(leaf, torch.Tensor)]
        return None if any(tensor.dtype.is_floating_point for tensor in outputs) else result

    def _known(self, leaf: Any) -> Any:
        """A meta tensor whose integers are known, for a tensor of integers; anything else as it is."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        tensor = torch.empty(leaf.shape, dtype=leaf.dtype, device="meta")
        self.set_values(tensor, leaf)
        return tensor

    def set_values(self, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Note the integers that a new, contiguous meta tensor would have."""
        self._values[storage_of(tensor)] = values.contiguous().reshape(-1)
        self._kept.append(tensor)

    def values(self, tensor: torch.Tensor) -> torch.Tensor | None:
        """The values of an integer tensor: its own, or those it would have were it not on meta; None where unknown."""
        if not tensor.is_meta:
            return tensor.cpu()
        base = self._values.get(storage_of(tensor))
        if base is None or base.dtype != tensor.dtype:
            return None
        return base.as_strided(tensor.shape, tensor.stride(), tensor.storage_offset())

    def write(self, tensor: torch.Tensor, writes: Sequence[Write]) -> None:
        """Record writes into the storage of a tensor, after all others."""
        key = storage_of(tensor)
        if key in self._live:
            raise TraceError(f"the loader writes into the live model, at {caller()}")
        if not tensor.is_meta:
            raise TraceError(f"the loader puts weights into a tensor of its own that is not on meta, at {caller()}")
        self._values.pop(key, None)
        if key not in self._writes:
            self._kept.append(tensor)
        if key not in self._writes or _fills_its_storage(tensor):
            self._writes[key], self._sizes[key] = [], tensor.element_size()
            self._mixed.pop(key, None)
        elif self._sizes[key] != tensor.element_size():
            sizes = f"{self._sizes[key]} and {tensor.element_size()} bytes"
            self._mixed[key] = f"written in elements of {sizes}, at {caller()}"
        self._writes[key] += [write for write in writes if write.copy.elements]

    def _unit_fault(self, tensor: torch.Tensor) -> str:
        """Why the boxes of a storage cannot be counted in the elements of a tensor; "" where they can."""
        key = storage_of(tensor)
        if key in self._mixed or self._sizes.get(key, tensor.element_size()) == tensor.element_size():
            return self._mixed.get(key, "")
        return f"bits of elements of {self._sizes[key]} bytes as {dtype_name(tensor.dtype)}, at {caller()}"

    def _gather(self, src: torch.Tensor, then: StridedCopy) -> list[Write]:
        """What a copy brings that reads the storage of `src`: its last writes, composed with the copy."""
        if not src.is_meta:
            return [constant(src, then)]
        if fault := self._unit_fault(src):
            return [Write(then, computed=fault, parameters=self._parameters_of(src))]
        if (known := self.values(src)) is not None:
            return [constant(known, then)]
        key = storage_of(src)
        writes = self._writes.get(key, ())
        if len(writes) == 1 and writes[0] is self._sources.get(key):  # a Hugging Face tensor as it is
            return [replace(writes[0], copy=then.coalesced())]
        if (moved := _moved_in_a_row(writes, then)) is not None:
            return moved
        gathered: list[Write] = []
        remaining = [then]
        for write in reversed(writes):
            low, high = write.copy.dst_span
            still: list[StridedCopy] = []
            for copy in remaining:
                start, stop = copy.inverse.dst_span
                if stop <= low or high <= start:
                    still.append(copy)
                elif parts := compose(write.copy, copy):
                    gathered += [replace(write, copy=part) for part in parts]
                    still += unread(copy, write.copy)
                else:
                    still.append(copy)
            remaining = still
            if not remaining:
                break
        return gathered + [Write(copy) for copy in remaining]

    def copy(self, dst: torch.Tensor, src: torch.Tensor) -> None:
        """Record that `src`, broadcast to the shape of `dst`, is written into it."""
        if src.numel() == 0 or dst.numel() == 0:
            return
        source = src.expand(dst.shape)
        starts = int(source.storage_offset()), int(dst.storage_offset())
        if source.is_contiguous() and dst.is_contiguous():
            then = StridedCopy((dst.numel(),), starts[0], (1,), starts[1], (1,))
        else:
            then = StridedCopy(tuple(dst.shape), starts[0], source.stride(), starts[1], dst.stride())
        dtypes = dtype_name(src.dtype), dtype_name(dst.dtype)
        try:
            writes = [write.moved(*dtypes) for write in self._gather(source, then)]
        except NotNestedError as error:
            computed = f"boxes that are no layout ({error}), at {caller()}"
            writes = [Write(onto(dst), computed=computed, parameters=self._parameters_of(src))]
        self.write(dst, writes)


def _moved_in_a_row(writes: Sequence[Write], then: StridedCopy) -> list[Write] | None:
    """What a contiguous copy brings if the writes lie one behind the other in what it reads, which is quick to see; else None."""
    then = then.coalesced()
    if then.src_strides != (1,) or then.dst_strides != (1,):
        return None
    end = then.src_offset
    ordered = sorted(writes, key=lambda write: write.copy.dst_offset)
    for write in ordered:
        start, stop = write.copy.dst_span
        if start != end:
            return None
        end = stop
    if end != then.src_offset + then.elements or sum(write.copy.elements for write in writes) != then.elements:
        return None
    by = then.dst_offset - then.src_offset
    return [write.shifted(by) for write in ordered] if by else ordered


def _fills_its_storage(tensor: torch.Tensor) -> bool:
    return (
        not tensor.storage_offset()
        and tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
        and tensor.is_contiguous()
    )


def on_meta(kwargs: dict[str, Any], inputs: Sequence[torch.Tensor]) -> dict[str, Any]:
    """Keyword arguments without a device if the inputs are on meta: their elements cannot go anywhere."""
    if any(tensor.is_meta for tensor in inputs):
        return {name: value for name, value in kwargs.items() if name != "device"}
    return kwargs
