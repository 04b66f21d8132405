"""The bug classes, and what stands in their way."""

from __future__ import annotations

BUGS: dict[int, str] = {
    1: "rank 0's slicing applied to every rank",
    2: "what is sent in one order is received in another",
    3: "router bias narrowed to bf16",
    4: "dtype changes during training",
    5: "non-gated experts lose up_proj",
    6: "gate and up exchanged or interleaved",
    7: "expert ranks taken from the dense mesh",
    8: "KV heads cut or replicated wrongly",
    9: "layers default to pipeline stage 0",
    10: "parameters dropped without a word",
    11: "routes decided twice, names of one world used in the other",
    12: "the two ends disagree on bytes",
    13: "generation TP taken from the world size",
    14: "memory without bound while planning or fusing",
    15: "memory kept after a refit",
    16: "non-contiguous tensors viewed as if contiguous",
    17: "a dtype that the transport does not know",
    18: "prediction layers and shared copies miscounted",
    19: "one rank works from a stale plan",
    20: "ranks wait for each other in a circle",
    21: "messages too large for their counters",
    22: "tensors rebound after binding",
    23: "parameters that alias or miss their place in a composed loader",
    24: "a failed refit reported as done",
    25: "weights and scales, or fused sections, cut apart",
    26: "fused groups complete only in part",
    27: "buffers reused while in flight",
    28: "weights written while they are read",
    29: "uneven sizes divided differently on both paths",
    30: "padding rows and small buckets",
    31: "planning in every refit",
    32: "scales taken from another part, expert or replica",
    33: "weights paired with scales that are not theirs, or with none",
    34: "padding of scales taken for scales",
    35: "router bias narrowed by a declared cast",
    36: "casts missing or unknown",
    37: "bf16 sent into fp8 tensors",
}

# Parts of a class that cannot be attacked yet, or that are not refused while they happen.
NOTES: dict[int, str] = {
    14: "memory while planning is measured by the planner's benchmark, not refused",
    15: "CUDA's caching allocator is not involved on CPU",
    17: "transports move bytes, so no dtype needs their support; attacked on the CPU transport",
    27: "slots of the CPU transport; streams and slots on GPUs have tests of their own",
    28: "writes that torch does not count (through .data) are not seen",
}

LAYERS: dict[str, str] = {
    "proof": "the plan is refused before any process starts",
    "file": "the plan file is refused when it is read",
    "binding": "the rank refuses to bind its schedule to its tensors",
    "limits": "the value is refused where it is given",
    "session": "the session refuses, and every rank is told the cause",
    "transport": "the bucket is refused where it arrives",
    "golden": "shown by validation against golden, not refused in a refit",
    "watch": "shown by tests that watch several refits, not refused in one",
}
