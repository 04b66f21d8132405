"""JSON of unknown origin: sizes are checked before anything is built of it, so that a hostile text costs little.

    value = parse_json(text, "the plan", max_bytes=MAX_PLAN_BYTES)

A parsed value takes up to 30 times its text. So a text of at most `max_bytes` may hold at most `MAX_VALUES` values, and of
lists and of strings, which take most, fewer still. A hostile text then costs less than a second and 100 MB.
"""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from reprlib import Repr
from typing import Any

# The largest plan that was measured, DeepSeek-V3 from 2,048 ranks to expert parallelism over 256, has 0.9 MB, 88,000 lists
# and 375,000 values. Kimi-K2 from 2,048 to 1,024 ranks has 0.6 MB.
MAX_PLAN_BYTES = 12 << 20  # of a plan, a trace, a list of tensors, or a model's config
MAX_WORD_BYTES = 12 << 20  # of what ranks say; the longest has the words of all ranks, some 300 bytes each
MAX_LISTS = 1 << 19  # an empty list takes 3 bytes of text, and 64 of memory
MAX_STRINGS = 1 << 18  # names of an object's fields too: each takes 60 bytes, and its field 100; a plan has some 500
MAX_VALUES = 3 << 19
MAX_DEPTH = 32  # a plan has 9 levels; Python's own limit of about 1,000 would fail later, in whatever writes the value
MAX_DIGITS = 20  # 2^64 has 20; time and memory of an integer grow with the square of its digits

_DIGITS = str.maketrans("123456789", "0" * 9)
_REPR = Repr()
_REPR.maxstring = _REPR.maxother = 60


class BoundsError(ValueError):
    """A text is larger, deeper or stranger than anything that this package writes, or it is no JSON."""


def parse_json(
    text: str | bytes,
    what: str,
    *,
    max_bytes: int,
    max_lists: int = MAX_LISTS,
    max_values: int = MAX_VALUES,
    max_strings: int = MAX_STRINGS,
) -> Any:
    """The value of a JSON text (bytes: UTF-8). Raises `BoundsError`, which names `what`, for no JSON or beyond a bound.

    NaN and infinities are no JSON. Integers have at most `MAX_DIGITS` digits. Counts include marks within strings.
    """
    if len(text) > max_bytes:
        raise BoundsError(f"{what} has {len(text):,} bytes, more than {max_bytes:,}")
    if len(text) <= min(max_lists, max_values, max_strings):  # the usual message: it cannot have more of anything
        lists = text.count(b"[") + text.count(b"{") if isinstance(text, bytes) else text.count("[") + text.count("{")
    else:
        lists = check_counts([text], what, max_lists=max_lists, max_values=max_values, max_strings=max_strings)
    try:
        text = text.decode() if isinstance(text, bytes) else text
    except UnicodeDecodeError as error:
        raise BoundsError(f"{what} is not JSON (it is not text: {error})") from error
    has_long_digits = "0" * (MAX_DIGITS + 1) in text.translate(_DIGITS)
    parse_int = _short_integer if has_long_digits else None  # they may be in a string, as in a digest
    try:
        value = json.loads(text, parse_constant=_refuse, parse_float=_finite, parse_int=parse_int)
        if lists > MAX_DEPTH:
            _check_depth(value)
    except RecursionError as error:
        raise BoundsError(f"{what} is nested deeper than {MAX_DEPTH} levels") from error
    except BoundsError as error:
        raise BoundsError(f"{what} {error}") from None
    except ValueError as error:
        raise BoundsError(f"{what} is not JSON ({error})") from error
    return value


def check_counts(
    texts: Sequence[str | bytes],
    what: str,
    *,
    max_lists: int = MAX_LISTS,
    max_values: int = MAX_VALUES,
    max_strings: int = MAX_STRINGS,
) -> int:
    """How many lists and objects JSON texts have in all. Raises `BoundsError` where they have too many, values or strings."""

    def count(mark: str) -> int:
        return sum(text.count(mark) if isinstance(text, str) else text.count(mark.encode()) for text in texts)

    lists = count("[") + count("{")
    if lists > max_lists:
        raise BoundsError(f"{what} has {lists:,} lists and objects, more than {max_lists:,}")
    if (values := lists + count(",")) > max_values:
        raise BoundsError(f"{what} has {values:,} values, more than {max_values:,}")
    # A mark after one backslash is within a string; after two of them it may end one.
    marks = count('"') - count('\\"') + count('\\\\"')
    if marks > 2 * max_strings:
        raise BoundsError(f"{what} has {marks // 2:,} strings, more than {max_strings:,}")
    return lists


def read_bounded(path: str | Path, max_bytes: int) -> str:
    """The text of a file (UTF-8). Raises `BoundsError` beyond `max_bytes`, as OSError and UnicodeDecodeError do themselves."""
    with Path(path).open("rb") as file:  # a device has no size: read a little more than allowed, never all of it
        content = file.read(max_bytes + 1)
    if len(content) > max_bytes:
        raise BoundsError(f"it has more than {max_bytes:,} bytes")
    return content.decode()


def shown(value: Any) -> str:
    """A value for a message: its repr, shortened."""
    return _REPR.repr(value)


def _check_depth(value: Any) -> None:
    level, depth = [value], 0
    while level:
        if (depth := depth + 1) > MAX_DEPTH:
            raise BoundsError(f"is nested deeper than {MAX_DEPTH} levels")
        level = [
            child
            for holder in level
            for child in (holder.values() if type(holder) is dict else holder)
            if type(child) is list or type(child) is dict
        ]


def _short_integer(digits: str) -> int:
    if len(digits) > MAX_DIGITS + 1:  # and a sign
        raise BoundsError(f"has an integer of {len(digits):,} digits, more than {MAX_DIGITS}")
    return int(digits)


def _finite(digits: str) -> float:
    if len(digits) > 400 or not math.isfinite(number := float(digits)):
        raise BoundsError(f"has the number {digits[:40]}, which is not finite or far too long")
    return number


def _refuse(constant: str) -> float:
    raise BoundsError(f"has {constant}, which is no JSON number")
