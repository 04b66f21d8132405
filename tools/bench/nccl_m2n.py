"""NCCL's own M2N reshard (nccl-extensions), where it is installed."""

from __future__ import annotations

from importlib import import_module

from .methods import Options, Prepared, Unavailable
from .ranks import Rank


def reshard(rank: Rank, options: Options) -> Prepared:
    """Never prepared: no way to run it is known.

    With nccl-extensions 0.1.0 and NCCL 2.30.7 `ncclDevCommCreate` failed with "invalid argument" on all hosts tried.
    """
    try:
        import_module("nccl.m2n")
    except ImportError as error:
        raise Unavailable(f"NCCL M2N is not installed (nccl-extensions): {error}") from error
    raise Unavailable("NCCL M2N is installed, but this benchmark has no tried way to run it")
