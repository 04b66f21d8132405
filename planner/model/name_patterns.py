"""Names that differ in numbers alone, as one pattern: `model.layers.{layer}.mlp.experts.{expert}.up_proj.weight`.

Patterns come from files and from other processes. So they are no format strings: a place is `{layer}`, `{expert}` or, in
a trainer's tensors, `{vp}`, exactly so spelled and each at most once. Nothing else in a name has braces.
"""

from __future__ import annotations

MAX_NAME = 512  # characters; the longest published name has about 100
_PARAMETER_PLACES = ("{layer}", "{expert}")
_TENSOR_PLACES = ("{vp}", *_PARAMETER_PLACES)


def require_parameter_pattern(pattern: str) -> None:
    """Raise ValueError unless the pattern of a parameter's name has no braces but `{layer}` and `{expert}`."""
    _require(pattern, _PARAMETER_PLACES)


def require_tensor_pattern(pattern: str) -> None:
    """Raise ValueError unless the pattern of a local tensor's name has no braces but `{vp}`, `{layer}` and `{expert}`."""
    _require(pattern, _TENSOR_PLACES)


def fill(pattern: str, *, layer: int | None = None, expert: int | str | None = None, vp: int = 0) -> str:
    """The name with these numbers: `mlp.{layer}.{expert}`, layer=3, expert=7 -> `mlp.3.7`. Never raises."""
    return (
        pattern.replace("{layer}", str(layer)).replace("{expert}", str(expert)).replace("{vp}", str(vp))
        if "{" in pattern
        else pattern
    )


def places_in(pattern: str) -> set[str]:
    """The numbers that a pattern varies with, as {"layer", "expert"}."""
    return {place.strip("{}") for place in _TENSOR_PLACES if place in pattern}


def _require(pattern: str, places: tuple[str, ...]) -> None:
    if len(pattern) > MAX_NAME:
        raise ValueError(f"{pattern[:60]}...: a name of {len(pattern):,} characters, more than {MAX_NAME}")
    rest = pattern
    for place in places:
        rest = rest.replace(place, "", 1)
    if "{" in rest or "}" in rest:
        raise ValueError(f"{pattern}: a name has no braces but those of {' and '.join(places)}, each once")
    if not pattern.isascii() and any("\ud800" <= character <= "\udfff" for character in pattern):
        raise ValueError(f"{pattern!a}: a name that is no text (half of a surrogate pair)")
