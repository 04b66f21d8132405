"""Offline traces on disk: the second plan of a model on its meshes needs neither Megatron nor the engine.

A file of lines: the digest of the others, then plain JSON: a header, the checkpoint's tensors, and each distinct trace. Its
name is the digest of all that traces depend on: also the loaders' source files, as editable installs change under a version.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path

from mcore_reshard.planner.layout.condense import CondensedTrace, ParameterNames
from mcore_reshard.planner.layout.record_forms import canonical
from mcore_reshard.planner.layout.trace_file import (
    dump_checkpoint,
    dump_trace,
    parse_checkpoint,
    parse_trace,
    require_known,
)
from mcore_reshard.planning import TracedRequest

from .offline_traces import OfflineTraces

_VERSION = 1
_DISTRIBUTIONS = ("torch", "transformers", "megatron-core", "megatron-bridge")
# Folders whose files decide what a loader does; the engine's are by its package.
_LOADERS = {
    "mcore_reshard": ("planner/layout", "tracing", "engines", "trainers", "validation"),
    "megatron": ("core", "bridge/models"),
    "vllm": ("model_executor", "distributed", "config", "transformers_utils"),
    "sglang": ("srt/models", "srt/layers", "srt/model_loader", "srt/distributed", "srt/configs"),
}


@dataclass(frozen=True, slots=True)
class TraceCache:
    """The file of one request's traces. `key` says what they depend on, as JSON."""

    file: Path
    key: str

    @classmethod
    def of(cls, request: TracedRequest) -> TraceCache:
        packages = ("mcore_reshard", "megatron", request.engine)
        key = canonical(
            {
                "config": request.config,
                "train": asdict(request.train),
                "gen": asdict(request.gen),
                "engine": request.engine,
                "versions": {name: _version(name) for name in (*_DISTRIBUTIONS, request.engine)},
                "sources": {package: _digest_of(package) for package in packages},
            }
        )
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore-reshard" / "traces"
        return cls(folder / f"{hashlib.sha256(key.encode()).hexdigest()}.jsonl", key)

    def read(self) -> OfflineTraces | None:
        """The traces; None where there are none, or the file is damaged."""
        try:
            seal, _, content = self.file.read_bytes().partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode() != seal:
                return None
            header, tensors, *lines = content.decode().split("\n")
            fields, checkpoint = json.loads(header), parse_checkpoint(tensors)
            if fields["version"] != _VERSION or fields["key"] != self.key:
                return None
            names, traces = ParameterNames(checkpoint), [parse_trace(line) for line in lines]
            for trace in traces:
                require_known(trace, names)
            sides = [tuple(traces[number] for number in fields[side]) for side in ("train", "gen")]
            stages = [tuple(map(int, fields[f"{side}_stages"])) for side in ("train", "gen")]
            family = str(json.loads(self.key)["config"].get("model_type"))
            return OfflineTraces(family, checkpoint, sides[0], sides[1], stages[0], stages[1])
        except (OSError, ValueError, KeyError, TypeError, IndexError):  # a TraceFileError is a ValueError
            return None

    def write(self, traces: OfflineTraces) -> None:
        """Keep the traces, whole or not at all. A folder that cannot be written is no error."""
        distinct: dict[CondensedTrace, int] = {}
        numbers = [[distinct.setdefault(trace, len(distinct)) for trace in side] for side in (traces.train, traces.gen)]
        fields = {
            "version": _VERSION,
            "key": self.key,
            "train": numbers[0],
            "gen": numbers[1],
            "train_stages": traces.train_stages,
            "gen_stages": traces.gen_stages,
        }
        lines = [canonical(fields), dump_checkpoint(traces.checkpoint), *map(dump_trace, distinct)]
        content = "\n".join(lines).encode()
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.file.parent, prefix="partial-") as folder:
                partial = Path(folder) / self.file.name
                partial.write_bytes(b"%s\n%s" % (hashlib.sha256(content).hexdigest().encode(), content))
                os.replace(partial, self.file)


def _version(distribution: str) -> str:
    try:
        return metadata.version(distribution)
    except metadata.PackageNotFoundError:  # a plain checkout on the path
        return ""


def _digest_of(package: str) -> str:
    """The SHA-256 of the names and contents of a package's loaders. The package is not imported."""
    digest = hashlib.sha256()
    for file in _sources(package):
        digest.update(b"%s\0%d\0" % (str(file).encode(), file.stat().st_size))
        digest.update(file.read_bytes())
    return digest.hexdigest()


def _sources(package: str) -> Iterator[Path]:
    spec = find_spec(package)
    roots = spec.submodule_search_locations if spec is not None else None
    for root, folder in product(roots or (), _LOADERS[package]):
        for parent, folders, files in os.walk(Path(root) / folder):
            folders.sort()
            yield from (Path(parent) / name for name in sorted(files) if name.endswith(".py"))
