"""The refusal of engines whose kernels read weights in another layout than their loaders leave."""

from __future__ import annotations

from collections.abc import Mapping


def refuse_kernel_layouts(changed: Mapping[str, str], remedy: str) -> None:
    """Raise RuntimeError if there are such parameters; `changed` has the reason for each, `remedy` says what to do."""
    if changed:
        reasons = dict.fromkeys(changed.values())
        lines = [f"{reason}: {', '.join(name for name in changed if changed[name] == reason)}" for reason in reasons]
        heading = f"a refit cannot write {len(changed)} parameters of this engine in place:"
        raise RuntimeError("\n  ".join((heading, *lines)) + f"\n{remedy}")
