"""The options of a session, in one record that every layer is handed whole. Imports nothing, so planning may load it."""

from __future__ import annotations

import math
from dataclasses import dataclass

ALIGNMENT = 16  # bytes; where each segment starts in a bucket, so that kernels may use 16-byte loads
DEFAULT_BUCKET_BYTES = 32 << 20
MAX_BUCKET_BYTES = 1 << 30  # transports count message bytes in 32 bits
DEFAULT_SCRATCH_BYTES = 512 << 20


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a session runs. All ranks must be given the same, except for `timeout_s` and `ctas`.

    Raises ValueError, listing every wrong value.
    """

    transport: str = "auto"  # or gloo, nccl, direct, golden; MCORE_RESHARD_TRANSPORT in the environment overrides it
    session: str = "refit"  # the session's name on the store; each name serves once
    timeout_s: float = 60.0  # the deadline of every wait
    bucket_bytes: int = DEFAULT_BUCKET_BYTES  # the largest message of gloo; nccl derives its own from scratch_bytes
    scratch_bytes: int = (
        DEFAULT_SCRATCH_BYTES  # the most device memory on each rank for staging: nccl, and direct where it casts
    )
    checksums: bool = False  # nccl and direct: compare written bytes with read bytes; gloo always does
    ctas: int | None = None  # direct: how many multiprocessors of its GPU a generation rank pulls with; None: 48

    def __post_init__(self) -> None:
        bucket_rule = f"a multiple of {ALIGNMENT}, at most {MAX_BUCKET_BYTES}"
        bucket_holds = _is_count(self.bucket_bytes) and not self.bucket_bytes % ALIGNMENT
        rules = {
            "transport": ("a name", bool(self.transport) and isinstance(self.transport, str)),
            "session": ("a name", bool(self.session) and isinstance(self.session, str)),
            "timeout_s": ("above 0 and finite", _is_number(self.timeout_s) and 0 < self.timeout_s < math.inf),
            "bucket_bytes": (bucket_rule, bucket_holds and self.bucket_bytes <= MAX_BUCKET_BYTES),
            "scratch_bytes": ("at least 1", _is_count(self.scratch_bytes)),
            "checksums": ("True or False", isinstance(self.checksums, bool)),
            "ctas": ("at least 1, or None", self.ctas is None or _is_count(self.ctas)),
        }
        wrong = [
            f"{name} must be {rule}, not {getattr(self, name)!r}" for name, (rule, holds) in rules.items() if not holds
        ]
        if wrong:
            raise ValueError("\n  ".join(("these options are wrong:", *wrong)))


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
