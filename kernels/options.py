"""The options of a session, in one record that every layer is handed whole. Imports nothing, so planning may load it."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

ALIGNMENT = 16  # bytes; where each segment starts in a bucket, so that kernels may use 16-byte loads
DEFAULT_BUCKET_BYTES = 8 << 20
MAX_BUCKET_BYTES = 1 << 30  # transports count message bytes in 32 bits
DEFAULT_SCRATCH_BYTES = 512 << 20
TRANSPORTS = ["auto", "direct", "nccl", "gloo", "golden"]  # `register` of transports/registry.py adds to them
SOURCE_CHECKS = ["sampled", "full", "off"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Options:
    """How a session runs. All ranks must be given the same, except for `timeout_s`, `max_lag`, `source_checks`, `ctas` and
    `token_file`.

    Raises ValueError, listing every wrong value.
    """

    transport: str = "auto"  # one of TRANSPORTS; MCORE_RESHARD_TRANSPORT in the environment overrides it
    session: str = "refit"  # its name on the store: sessions that share a store need different ones
    timeout_s: float = 60.0  # the deadline of every wait
    bucket_bytes: int = DEFAULT_BUCKET_BYTES  # the largest message of gloo; nccl derives its own from scratch_bytes
    scratch_bytes: int = DEFAULT_SCRATCH_BYTES  # the most for staging on a GPU: nccl, and direct where it casts
    checksums: bool = False  # nccl and direct: compare written bytes with read bytes; gloo always does
    source_checks: str = "sampled"  # one of SOURCE_CHECKS, on training ranks: weights written while they are read
    retries: int = 0  # how often a refit tries again by itself after a failure of a machine or the network
    # "in_place", or "staged": bytes land in a second buffer of the rank's whole share, and are copied in once all have them
    commit: str = "in_place"
    max_lag: int = 0  # training rank 0: for how many versions a refit may go on without a replica that is late
    token: str | None = field(default=None, repr=False)  # the secret of all ranks; or MCORE_RESHARD_TOKEN
    token_file: str | None = None  # a file with the token; or MCORE_RESHARD_TOKEN_FILE
    # direct: how many multiprocessors of its GPU a generation rank pulls with; None: 48, or all within one GPU
    ctas: int | None = None

    def __post_init__(self) -> None:
        bucket_rule = f"a multiple of {ALIGNMENT}, at most {MAX_BUCKET_BYTES}"
        bucket_sizes = range(ALIGNMENT, MAX_BUCKET_BYTES + 1, ALIGNMENT)
        timeout_is_number = isinstance(self.timeout_s, (int, float)) and not isinstance(self.timeout_s, bool)
        rules = {
            "transport": (f"one of {', '.join(TRANSPORTS)}", self.transport in TRANSPORTS),
            "session": ("a name", bool(self.session) and isinstance(self.session, str)),
            "timeout_s": ("above 0 and finite", timeout_is_number and 0 < self.timeout_s < math.inf),
            "bucket_bytes": (bucket_rule, _is_count(self.bucket_bytes) and self.bucket_bytes in bucket_sizes),
            "scratch_bytes": ("at least 1", _is_count(self.scratch_bytes)),
            "checksums": ("True or False", isinstance(self.checksums, bool)),
            "source_checks": (f"one of {', '.join(SOURCE_CHECKS)}", self.source_checks in SOURCE_CHECKS),
            "retries": ("at least 0", self.retries == 0 or _is_count(self.retries)),
            "commit": ("'in_place' or 'staged'", self.commit in ("in_place", "staged")),
            "max_lag": ("at least 0", self.max_lag == 0 or _is_count(self.max_lag)),
            "ctas": ("at least 1, or None", self.ctas is None or _is_count(self.ctas)),
        }
        wrong = [f"{name} must be {rule}, not {getattr(self, name)!r}" for name, (rule, ok) in rules.items() if not ok]
        if wrong:
            raise ValueError("\n  ".join(("these options are wrong:", *wrong)))


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 1
