"""Whether a refitted engine is the engine that loaded the same checkpoint. Plain data in, plain data out.

Engines that compile differ among themselves in log-probabilities, also without any refit: Inductor picks the order of a sum
by measuring when an engine starts. So log-probabilities must be equal, bit for bit, in eager mode alone.
"""

from __future__ import annotations

from typing import Any

from .checkpoints import VERSIONS

Loaded = dict[int, dict[str, Any]]  # by checkpoint: what `engine.load` returned


def judge(mode: str, refitted: dict[str, Any], loaded: Loaded) -> dict[str, Any]:
    """One row for each refit, and under `problems` everything that is not as it must be."""
    problems = []
    if _tokens(loaded[1]["answers"]) == _tokens(loaded[2]["answers"]) != []:
        problems.append("the checkpoints give the same answers: equal ones would say nothing")
    for checkpoint, engine in loaded.items():
        if engine["answers"] != engine["again"]:
            problems.append(f"the engine that loaded checkpoint {checkpoint} answers differently the second time")
        if refitted["before"] and _tokens(refitted["before"]) == _tokens(engine["answers"]):
            problems.append(f"random weights answer as checkpoint {checkpoint} does")
    rows = []
    for version, (checkpoint, after) in enumerate(zip(VERSIONS, refitted["refits"], strict=True), 1):
        expected = loaded[checkpoint]
        wrong = sorted(name for name, value in expected["sums"].items() if after["sums"].get(name) != value)
        wrong += sorted(after["sums"].keys() - expected["sums"].keys())
        tokens, logprobs = (_equal(after["answers"], expected["answers"], part) for part in ("tokens", "logprobs"))
        asked = len(expected["answers"])
        if wrong:
            problems.append(f"refit {version}: {len(wrong)} tensors have other bytes, first {wrong[0]}")
        if tokens < asked:
            problems.append(f"refit {version}: {asked - tokens} of {asked} answers have other tokens")
        if mode == "eager" and logprobs < asked:
            problems.append(f"refit {version}: {asked - logprobs} of {asked} answers have other log-probabilities")
        if after.get("from_cache"):
            problems += [
                f"refit {version}: {problem}" for problem in _cache_problems(after["answers"], after["from_cache"])
            ]
        rows.append(
            {
                "checkpoint": checkpoint, "tensors": len(expected["sums"]), "wrong_tensors": len(wrong), "answers": asked,
                "equal_tokens": tokens, "equal_logprobs": logprobs,
                "largest_difference": _largest_difference(after["answers"], expected["answers"]),
                "transport": after["transport"], "bytes": after["nbytes"], "misc_bytes": after["misc_bytes"],
                "seconds": round(after["seconds"], 4),
            }
        )  # fmt: skip
    first, *_, last = refitted["refits"]
    if first["answers"] != last["answers"]:
        problems.append("the answers after the last refit are not those after the first, though the weights are")
    return {"kernels": refitted["kernels"], "refits": rows, "problems": problems}


def _cache_problems(answers: list[dict[str, Any]], again: list[dict[str, Any]]) -> list[str]:
    """Of an engine whose prefix cache was reset after a refit, and that answered twice then."""
    first, second = (sum(answer["cached_tokens"] for answer in asked) for asked in (answers, again))
    stale = [f"{first} tokens of its prompts came from the cache of before"] if first else []
    return stale if second else [*stale, "the prefix cache was not used: its reset shows nothing"]


def _tokens(answers: list[dict[str, Any]]) -> list[list[int]]:
    return [answer["tokens"] for answer in answers]


def _equal(one: list[dict[str, Any]], other: list[dict[str, Any]], part: str) -> int:
    return sum(a[part] == b[part] for a, b in zip(one, other, strict=True))


def _largest_difference(one: list[dict[str, Any]], other: list[dict[str, Any]]) -> float:
    """Between log-probabilities of the same tokens."""
    return max(
        (
            abs(a - b)
            for left, right in zip(one, other, strict=True)
            for x, y, a, b in zip(left["tokens"], right["tokens"], left["logprobs"], right["logprobs"], strict=True)
            if x == y
        ),
        default=0.0,
    )
