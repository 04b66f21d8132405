"""Operators that move elements and change none, and what a recorder notes of each. All others are computed.

`VIEWS` need no note: their results lie in the storage of their input. `RECORDED` is by operator.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._pytree import tree_leaves

from mcore_reshard.kernels.copies.tensors import dtype_name

from .writes import Write, onto

if TYPE_CHECKING:
    from .recorder import Recorder

_aten = torch.ops.aten


def _record_copy(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    dst, src = args[0], args[1]
    if not isinstance(src, torch.Tensor):
        return _record_fill(recorder, func, args, kwargs)
    if not (dst.is_meta or src.is_meta):
        return recorder.run(func, args, kwargs)  # real integers, as of masks and indices
    recorder.copy(dst, src)
    return dst  # nothing is copied: there is no data


def _record_fill(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    dst, value = args[0], args[1] if len(args) > 1 else 0
    if isinstance(value, torch.Tensor):
        return _record_copy(recorder, func, args, kwargs)
    if not dst.is_meta:
        return recorder.run(func, args, kwargs)
    recorder.write(dst, [Write(onto(dst), fill=float(value), stored=dtype_name(dst.dtype))])
    return dst


def _record_new(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """zeros, ones, full, scalar_tensor, empty and their like."""
    like = [leaf for leaf in tree_leaves(args) if isinstance(leaf, torch.Tensor)]
    if any(tensor.is_meta for tensor in like):
        kwargs = {name: value for name, value in kwargs.items() if name != "device"}
    result = func(*args, **kwargs)
    if not result.is_meta:
        if not result.dtype.is_floating_point or result.numel() < 2:
            return result
        result = torch.empty_strided(
            result.shape, result.stride(), dtype=result.dtype, device="meta"
        )  # a place for weights
    name = func.__name__.partition(".")[0]
    value = 0.0 if "zeros" in name else 1.0 if "ones" in name else None
    if "full" in name or name == "scalar_tensor":
        given = args[{"new_full": 2, "scalar_tensor": 0}.get(name, 1)]
        value = float(given) if isinstance(given, int | float) else None
    fill = Write(onto(result), fill=value, stored=dtype_name(result.dtype))
    recorder.write(result, [] if value is None else [fill])
    if not result.dtype.is_floating_point and value is not None:
        recorder.set_values(result, torch.full((result.numel(),), int(value), dtype=result.dtype))
    return result


def _record_clone(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    src = args[0]
    known = recorder.values(src) if src.is_meta and not src.dtype.is_floating_point else None
    result = func(*args, **{name: value for name, value in kwargs.items() if name != "device" or not src.is_meta})
    if known is not None and not result.dtype.is_floating_point and result.is_contiguous():
        recorder.set_values(result, known.to(result.dtype))
    elif result.is_meta:
        recorder.copy(result, src)
    return result


def _record_item(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    known = recorder.values(args[0]) if args[0].is_meta else None
    return recorder.run(func, args, kwargs) if known is None else known.item()


def _record_cat(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not _moves_weights(recorder, parts):
        return recorder.run(func, args, kwargs)
    result = _joined(parts, dim)
    if result is None:
        result = func([part.to("meta") for part in parts], dim)
    start = 0
    for part in parts:
        if part.dim() == result.dim():
            recorder.copy(result.narrow(dim, start, part.shape[dim]), part)
            start += part.shape[dim]
    return result


def _joined(parts: Sequence[torch.Tensor], dim: int) -> torch.Tensor | None:
    """A place for parts of one kind behind each other; None for others. torch's own `cat` on meta takes ten times as long."""
    first = parts[0]
    dims = first.dim()
    if not 0 < dims < 4 or not -dims <= dim < dims:  # from four dims on, torch may keep channels last
        return None
    dim %= dims
    around = first.shape[:dim], first.shape[dim + 1 :]
    for part in parts:
        if not part.is_meta or part.dtype != first.dtype or (part.shape[:dim], part.shape[dim + 1 :]) != around:
            return None
    size = sum(part.shape[dim] for part in parts)
    return torch.empty((*around[0], size, *around[1]), dtype=first.dtype, device="meta")


def _record_stack(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    parts, dim = args[0], args[1] if len(args) > 1 else kwargs.get("dim", 0)
    if not _moves_weights(recorder, parts):
        return recorder.run(func, args, kwargs)
    result = func([part.to("meta") for part in parts], dim)
    for index, part in enumerate(parts):
        recorder.copy(result.select(dim, index), part)
    return result


def _moves_weights(recorder: Recorder, parts: Sequence[torch.Tensor]) -> bool:
    """Whether any of the tensors is on meta and no integers that are known."""
    return any(part.is_meta and recorder.values(part) is None for part in parts)


def _record_index_select(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    src, dim, index = args
    known = recorder.values(index)
    if known is None or not _moves_weights(recorder, [src]) or not src.dim():
        return recorder.run(func, args, kwargs)
    return _selected(recorder, src, dim % src.dim(), known.reshape(-1))


def _selected(recorder: Recorder, src: torch.Tensor, dim: int, indices: torch.Tensor) -> torch.Tensor:
    result = src.new_empty([*src.shape[:dim], indices.numel(), *src.shape[dim + 1 :]])
    recorder.write(result, [])
    for start, first, count, step in _runs(indices.tolist()):
        recorder.copy(result.narrow(dim, start, count), _every(src, dim, first, count, step))
    return result


def _record_flip(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    src, dims = args
    if not _moves_weights(recorder, [src]):
        return recorder.run(func, args, kwargs)
    for dim in dims:
        src = _selected(recorder, src, dim % src.dim(), torch.arange(src.shape[dim] - 1, -1, -1))
    return src


def _record_index(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    """`tensor[..., indices, ...]` with one tensor of known integers, or a mask of one dim; several tensors are computed."""
    src, indices = args
    if not _moves_weights(recorder, [src]):
        return recorder.run(func, args, kwargs)
    found = _known_index(recorder, src, indices)
    if found is None:
        return recorder.run(func, (src, _without_masks(recorder, indices)), kwargs)
    dim, known = found
    flat = _selected(recorder, src, dim, known.reshape(-1))
    return flat.view(*src.shape[:dim], *known.shape, *src.shape[dim + 1 :])


def _known_index(
    recorder: Recorder, tensor: torch.Tensor, indices: Sequence[torch.Tensor | None]
) -> tuple[int, torch.Tensor] | None:
    """The dim that one tensor of known indices is for, and its values from 0 on; None for other ways to index."""
    given = [(dim, index) for dim, index in enumerate(indices) if index is not None]
    if len(given) != 1:
        return None
    dim, index = given[0]
    known = recorder.values(index)
    if known is None or (_is_mask(known) and known.dim() != 1):
        return None
    return dim, known.nonzero().reshape(-1) if _is_mask(known) else known % tensor.shape[dim]


def _without_masks(recorder: Recorder, indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Known masks as the indices that they stand for: the shape of what they choose is in their values alone."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        known = None if index is None or not _is_mask(index) else recorder.values(index)
        found += [index] if known is None else [t.to("meta") for t in known.nonzero(as_tuple=True)]
    return found


def _is_mask(index: torch.Tensor) -> bool:
    return index.dtype in (torch.bool, torch.uint8)


def _record_index_copy(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    dst, dim, index, src = args
    known = recorder.values(index)
    if known is None or not (dst.is_meta or src.is_meta) or not dst.dim() or not src.dim():
        return recorder.run(func, args, kwargs)
    return _put(recorder, dst, dim % dst.dim(), known.reshape(-1), src)


def _record_index_put(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    dst, indices, src = args[:3]
    found = _known_index(recorder, dst, indices)
    accumulates = args[3] if len(args) > 3 else kwargs.get("accumulate", False)
    if found is None or found[1].dim() != 1 or accumulates or not (dst.is_meta or src.is_meta):
        return recorder.run(func, args, kwargs)
    dim, known = found
    return _put(recorder, dst, dim, known, src.expand([*dst.shape[:dim], known.numel(), *dst.shape[dim + 1 :]]))


def _put(recorder: Recorder, dst: torch.Tensor, dim: int, indices: torch.Tensor, src: torch.Tensor) -> torch.Tensor:
    for start, first, count, step in _runs(indices.tolist()):
        recorder.copy(_every(dst, dim, first, count, step), src.narrow(dim, start, count))
    return dst


def _record_repeat(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    src, repeats = args
    if not _moves_weights(recorder, [src]):
        return recorder.run(func, args, kwargs)
    result = func(*args, **kwargs)
    source = src.view(*(1,) * (len(repeats) - src.dim()), *src.shape)
    target = result.view(*(size for pair in zip(repeats, source.shape, strict=True) for size in pair))
    recorder.write(result, [])
    recorder.copy(target, source.view(*(size for extent in source.shape for size in (1, extent))))
    return result


def _record_pad(recorder: Recorder, func: Any, args: Any, kwargs: Any) -> Any:
    src, pad = args[0], args[1]
    if not _moves_weights(recorder, [src]) or any(width < 0 for width in pad):
        return recorder.run(func, args, kwargs)
    value = args[2] if len(args) > 2 else kwargs.get("value", 0)
    result = inner = func(*args, **kwargs)
    recorder.write(result, [Write(onto(result), fill=float(value or 0), stored=dtype_name(result.dtype))])
    for number in range(len(pad) // 2):
        dim = src.dim() - 1 - number
        inner = inner.narrow(dim, pad[2 * number], src.shape[dim])
    recorder.copy(inner, src)
    return result


def _runs(indices: Sequence[int]) -> list[tuple[int, int, int, int]]:
    """Indices as (place of the first, first, count, step) of rising runs: [4, 5, 6, 0, 2] -> (0, 4, 3, 1), (3, 0, 2, 2)."""
    runs: list[tuple[int, int, int, int]] = []
    start = 0
    while start < len(indices):
        stop = start + 1
        step = indices[stop] - indices[start] if stop < len(indices) else 1
        if step > 0:
            while stop < len(indices) and indices[stop] - indices[stop - 1] == step:
                stop += 1
        if stop == start + 1 or step <= 0:
            stop, step = start + 1, 1
        runs.append((start, indices[start], stop - start, step))
        start = stop
    return runs


def _every(tensor: torch.Tensor, dim: int, first: int, count: int, step: int) -> torch.Tensor:
    return _aten.slice.Tensor(tensor, dim, first, first + (count - 1) * step + 1, step)


def _overloads(*names: str) -> set[Any]:
    """The operators of these names that this torch has."""
    found = set()
    for name in names:
        operator, _, overload = name.partition(".")
        packet = getattr(_aten, operator, None)
        if packet is not None and (overload or "default") in packet.overloads():
            found.add(getattr(packet, overload or "default"))
    return found


VIEWS = _overloads(
    "view", "_unsafe_view", "t", "transpose.int", "permute", "slice.Tensor", "select.int", "unsqueeze", "squeeze",
    "squeeze.dim", "squeeze.dims", "expand", "split.Tensor", "split_with_sizes", "unbind.int", "detach", "alias",
    "as_strided", "_reshape_alias", "view.dtype", "diagonal", "unfold", "lift_fresh",
)  # fmt: skip

RECORDED: dict[Any, Callable[[Recorder, Any, Any, Any], Any]] = {
    **dict.fromkeys(_overloads("copy_"), _record_copy),
    **dict.fromkeys(_overloads("fill_.Scalar", "fill_.Tensor", "zero_"), _record_fill),
    **dict.fromkeys(
        _overloads(
            "zeros", "ones", "empty.memory_format", "empty_strided", "full", "new_zeros", "new_ones", "new_empty",
            "new_empty_strided", "new_full", "zeros_like", "ones_like", "empty_like", "full_like", "scalar_tensor",
        ),
        _record_new,
    ),
    **dict.fromkeys(_overloads("clone", "_to_copy", "contiguous"), _record_clone),
    **dict.fromkeys(_overloads("_local_scalar_dense"), _record_item),
    **dict.fromkeys(_overloads("cat"), _record_cat),
    **dict.fromkeys(_overloads("stack"), _record_stack),
    **dict.fromkeys(_overloads("index_select"), _record_index_select),
    **dict.fromkeys(_overloads("flip"), _record_flip),
    **dict.fromkeys(_overloads("index.Tensor"), _record_index),
    **dict.fromkeys(_overloads("index_copy_"), _record_index_copy),
    **dict.fromkeys(_overloads("index_put_", "_index_put_impl_"), _record_index_put),
    **dict.fromkeys(_overloads("repeat"), _record_repeat),
    **dict.fromkeys(_overloads("constant_pad_nd"), _record_pad),
}  # fmt: skip
