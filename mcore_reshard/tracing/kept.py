"""What loaders were seen to do, on disk: files of lines, each named by the digest of all that its lines depend on.

    file = KeptFile.of("vllm", config=config, mesh="tp=2")
    lines = file.read()             # None where there is no such file, or it is damaged
    file.write(lines)

The installed versions and the source files of the loaders are in every name, as editable installs change under a version.
A file that is not read for 30 days is removed when another is written.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from importlib.util import find_spec
from itertools import product
from pathlib import Path
from typing import Any

from mcore_reshard.planner.layout.record_forms import canonical

_KEPT_S = 30 * 24 * 3600.0
_VERSION = 2
_MAX_BYTES = 1 << 28  # of a file; that of a model with 61 layers of 256 experts has 0.3 MB
_DISTRIBUTIONS = ("torch", "transformers", "megatron-core", "megatron-bridge")
# Folders whose files decide what a loader does; the engine's are by its package.
_LOADERS = {
    "mcore_reshard": ("planner", "tracing", "engines", "trainers", "validation"),
    "megatron": ("core", "bridge/models", "bridge/peft"),
    "vllm": ("model_executor", "distributed", "config", "transformers_utils"),
    "sglang": ("srt/models", "srt/layers", "srt/model_loader", "srt/distributed", "srt/configs"),
}


@dataclass(frozen=True, slots=True)
class KeptFile:
    """A file of lines. `key` says what they depend on, as JSON; it is the file's own first line."""

    file: Path
    key: str

    @classmethod
    def of(cls, package: str, **parts: Any) -> KeptFile:
        """The file for one loader, by its package, and all else that its lines depend on, which JSON must know."""
        packages = dict.fromkeys(("mcore_reshard", "megatron", package))
        key = canonical(
            {
                "version": _VERSION,
                "versions": {name: _version(name) for name in (*_DISTRIBUTIONS, package)},
                "sources": {package: _digest_of(package) for package in packages},
                **parts,
            }
        )
        folder = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "mcore-reshard" / "traces"
        return cls(folder / f"{hashlib.sha256(key.encode()).hexdigest()}.jsonl", key)

    def read(self) -> list[str] | None:
        try:
            if self.file.stat().st_size > _MAX_BYTES:
                return None
            seal, _, content = self.file.read_bytes().partition(b"\n")
            if hashlib.sha256(content).hexdigest().encode() != seal:
                return None
            key, *lines = content.decode().split("\n")
            os.utime(self.file)
            return lines if key == self.key else None
        except (OSError, ValueError):
            return None

    def write(self, lines: Sequence[str]) -> None:
        """Keep the lines, whole or not at all. A folder that cannot be written is no error."""
        content = "\n".join((self.key, *lines)).encode()
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            with tempfile.TemporaryDirectory(dir=self.file.parent, prefix="partial-") as folder:
                partial = Path(folder) / self.file.name
                partial.write_bytes(b"%s\n%s" % (hashlib.sha256(content).hexdigest().encode(), content))
                os.replace(partial, self.file)
            for other in self.file.parent.glob("*.jsonl"):
                if time.time() - other.stat().st_mtime > _KEPT_S:
                    other.unlink()


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
        for parent, folders, files in os.walk(Path(root) / folder, followlinks=True):
            folders.sort()
            yield from (Path(parent) / name for name in sorted(files) if name.endswith(".py"))
