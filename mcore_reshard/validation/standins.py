"""Modules that stand in for packages which do not install on a CPU: code that imports them loads, and runs none of it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import sys
import types
from collections.abc import Mapping
from typing import Any

import torch


class InertModule(types.ModuleType):
    """A module in which every name is an inert class."""

    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        return inert(name)


def inert(name: str, base: type = object) -> type:
    """A class that can be named, subclassed and made, and does nothing."""
    return type(name, (base,), {"__init__": lambda self, *args, **kwargs: None})


def inert_classes(*names: str, base: type = object) -> dict[str, type]:
    """Inert classes by their names."""
    return {name: inert(name, base) for name in names}


def register(contents: Mapping[str, Mapping[str, Any]], kind: type[types.ModuleType] = types.ModuleType) -> None:
    """Put modules of these contents into `sys.modules`, and empty ones for their parents."""
    for full_name, members in contents.items():
        parts = full_name.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(parts[:depth])
            if name in sys.modules:
                continue
            module = sys.modules[name] = kind(name)
            module.__path__ = []
            module.__spec__ = importlib.machinery.ModuleSpec(name, None, is_package=True)
            vars(module)["__standin__"] = True
            parent, _, child = name.rpartition(".")
            if parent:
                setattr(sys.modules[parent], child, module)
        vars(sys.modules[full_name]).update(members)


def register_inert(package: str) -> None:
    """Let every module of a package be imported, as inert ones."""
    sys.meta_path.append(_InertFinder(package))


def hide_amx() -> None:
    """Let torch say that this CPU has no AMX: an engine built without kernels would call those for AMX as it loads weights."""
    torch.cpu._is_amx_tile_supported = lambda: False


class _InertFinder(importlib.abc.MetaPathFinder, importlib.abc.Loader):
    def __init__(self, package: str) -> None:
        self.package = package

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> importlib.machinery.ModuleSpec | None:
        return (
            importlib.machinery.ModuleSpec(name, self, is_package=True) if name.split(".")[0] == self.package else None
        )

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType:
        return InertModule(spec.name)

    def exec_module(self, module: types.ModuleType) -> None: ...
