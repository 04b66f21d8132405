"""Command lines that several tests run, and the record of what a command answered."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any, NamedTuple

MOE = ["tiny-qwen3-moe", "--train", "tp=2,pp=2,ep=2,dp=2", "--gen", "tp=2,dp=2"]
HYBRID = ["tiny-nemotron-h", "--train", "tp=2,pp=2,ep=2", "--gen", "tp=2"]
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [8, 8]}


class Outcome(NamedTuple):
    code: int
    out: str
    err: str

    @property
    def json(self) -> Any:
        return json.loads(self.out)


Run = Callable[..., Outcome]
