"""A digest of a live model, but for its weights: loaders of models with equal digests do the same.

It covers every module's class, methods and attributes, every parameter's and buffer's class, shape, dtype, strides and
attributes, and the values of integer buffers, in which loaders look experts up. Objects in attributes count with their own
attributes, some levels deep; what lies deeper, and what only C++ sees, counts by its type. So do a compiler's objects, of
which an engine with CUDA graphs is full: they compute what was loaded. Functions count with their compiled code, because
frameworks replace some of an engine's at run time.
"""

from __future__ import annotations

import enum
import functools
import hashlib
import json
from collections.abc import Iterable, Mapping
from types import CodeType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

_LEVELS = 7  # a module's attributes, its quant_method, its attributes, its config, its attributes, lists in them
_PRIVATE = ("_parameters", "_buffers", "_modules")
_COMPILERS = ("torch._dynamo", "torch._inductor", "torch._functorch", "torch.fx", "vllm.compilation")
_TEXT = (torch.dtype, torch.device, torch.Size, enum.Enum)


def fingerprint(model: torch.nn.Module, opaque: tuple[type, ...] = ()) -> str:
    """The SHA-256 of a model's structure. Two processes that build a model alike get the same digest.

    Objects of `opaque` types count by their type: those that hold what differs from process to process.
    """
    digest = hashlib.sha256()
    for path, module in model.named_modules():
        attributes = {name: value for name, value in vars(module).items() if name not in _PRIVATE}
        own = {"class": _name_of(type(module)), "attributes": _state(attributes, _LEVELS, opaque)}
        for kind in ("_parameters", "_buffers"):
            own[kind] = _state(vars(module)[kind], _LEVELS, opaque)
        digest.update(json.dumps([path, own], sort_keys=True).encode())
    digest.update(digest_of_code(type(module) for module in model.modules()).encode())
    return digest.hexdigest()


def digest_of_code(classes: Iterable[type]) -> str:
    """The SHA-256 of all methods of classes and of what these inherit from, as they are now."""
    digest = hashlib.sha256()
    inherited = {base for kind in {*classes} for base in kind.__mro__[:-1] if base is not torch.nn.Module}
    for base in sorted(inherited, key=_name_of):
        methods = {name: _name_of(value) for name, value in vars(base).items() if isinstance(value, FunctionType)}
        digest.update(json.dumps([_name_of(base), methods], sort_keys=True).encode())
    return digest.hexdigest()


def digest_of(value: Any) -> str:
    """The SHA-256 of an object and its attributes, as of a config."""
    return hashlib.sha256(json.dumps(_state(value, _LEVELS, ()), sort_keys=True).encode()).hexdigest()


def _state(value: Any, levels: int, opaque: tuple[type, ...]) -> Any:
    """A value as JSON. Addresses and other things that differ from process to process are in none.

    Floats count by their type: no layout depends on one, and timers have some.
    """
    if value is None or isinstance(value, bool | int | str):
        return repr(value)
    if isinstance(value, _TEXT):
        return str(value)
    if isinstance(value, FunctionType | type):
        return _name_of(value)
    if isinstance(value, ModuleType):  # torch.classes and torch.ops are some, and make up any attribute
        return repr(type(value))
    of_compiler = type(value).__module__.startswith(_COMPILERS)
    if not levels or of_compiler or isinstance(value, (float, CodeType, torch.nn.Module, *opaque)):
        return _name_of(type(value))
    inner = levels - 1
    if isinstance(value, torch.Tensor):
        return _state_of_tensor(value, inner, opaque)
    if isinstance(value, Mapping):
        return {str(key): _state(item, inner, opaque) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_state(item, inner, opaque) for item in value]
    if isinstance(value, set | frozenset):
        return sorted(json.dumps(_state(item, inner, opaque), sort_keys=True) for item in value)
    if isinstance(value, functools.partial):
        return [_state(part, inner, opaque) for part in (value.func, value.args, value.keywords)]
    if isinstance(value, MethodType | classmethod | staticmethod):
        return _name_of(value.__func__)
    return [_name_of(type(value)), _state(getattr(value, "__dict__", {}), inner, opaque)]


def _state_of_tensor(tensor: torch.Tensor, levels: int, opaque: tuple[type, ...]) -> Any:
    state = [_name_of(type(tensor)), str(tensor.dtype), [*tensor.shape], [*tensor.stride()]]
    state.append(_state(vars(tensor), levels, opaque))
    if not (tensor.dtype.is_floating_point or tensor.is_meta or isinstance(tensor, torch.nn.Parameter)):
        values = tensor.detach().cpu().contiguous()
        state.append(hashlib.sha256(values.view(torch.uint8).numpy().tobytes()).hexdigest())
    return state


def _name_of(named: Any) -> str:
    """A class or a function by its name; a function also by what it was compiled to."""
    name = f"{getattr(named, '__module__', '')}.{getattr(named, '__qualname__', type(named).__qualname__)}"
    code = getattr(named, "__code__", None)
    if not isinstance(code, CodeType):  # a class of functions has a descriptor there
        return name
    return f"{name} {code.co_firstlineno} {hashlib.sha256(code.co_code).hexdigest()}"
