"""What the ranks of a session must say alike before anything moves. `words` are what each rank said, by its name.

Every rank looks at the same words, so all of them raise, or none.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .kernels.errors import SessionError, VersionError

Words = Mapping[str, Mapping[str, Any]]

_ALIKE = ("protocol", "digest", "transport", "bucket_bytes", "checksums", "train_ranks", "gen_ranks")


def check_alike(words: Words) -> None:
    """All ranks must have been given the same; raises `SessionError` with who said what."""
    problems = []
    for field in _ALIKE:
        if len(ranks := _ranks_by(words, field)) > 1:
            problems.append(f"different {field}: {_who_said(ranks)}")
    if problems:
        raise SessionError("\n  ".join(("the ranks of this session do not fit together:", *problems)))


def check_versions(words: Words, rank: str, committed: int | None) -> None:
    """All ranks must refit one version, which follows the one committed last; raises `VersionError`. `rank` says so."""
    versions = _ranks_by(words, "version")
    if len(versions) > 1:
        raise VersionError(f"different versions are refitted at once: {_who_said(versions)}")
    (version,) = versions
    if committed is not None and version <= committed:
        raise VersionError(f"{rank}: version {version} does not follow {committed}")


def agreed_kv_scales(words: Words, sender: str) -> dict[str, float]:
    """The scales of the KV cache that training rank 0, `sender`, sends.

    Raises `SessionError` where a rank was given others, which would be lost, or takes none.
    """
    found: dict[str, float] = words[sender].get("kv_scales", {})
    if others := [rank for rank, word in words.items() if word.get("kv_scales", found) != found]:
        raise SessionError(
            f"scales of the KV cache travel from {sender}, which was given {len(found)}: others were given on"
            f" {', '.join(others)}; give all of them on {sender}"
        )
    deaf = [rank for rank, word in words.items() if word.get("takes_kv_scales") is False]
    if found and deaf:
        raise SessionError(
            f"{len(found)} scales of the KV cache came with the refit, and no function to set them was given on {', '.join(deaf)}"
        )
    return found


def _ranks_by(words: Words, field: str) -> dict[Any, list[str]]:
    """Ranks by what they said."""
    ranks: dict[Any, list[str]] = {}
    for rank, word in words.items():
        ranks.setdefault(word.get(field), []).append(rank)
    return ranks


def _who_said(ranks: Mapping[Any, list[str]]) -> str:
    return "; ".join(f"{said} on {', '.join(names)}" for said, names in ranks.items())
