"""A recorder with a fault says of some small loader what does not happen: the cases and random programs can fail."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from helpers.traced_loaders import elements_of, traced
from test_random_loaders import FIRST, run_both
from test_recorder import COMPUTED, MOVED

from mcore_reshard.planner.layout.strided import StridedCopy, compose, unread
from mcore_reshard.tracing import operators, recorder, writes

Patch = Callable[[pytest.MonkeyPatch], None]
_compose, _moved = compose, writes.Write.moved


def _changed_compose(change: Callable[[list[StridedCopy]], list[StridedCopy]]) -> Patch:
    return lambda patch: patch.setattr(recorder, "compose", lambda *ends: change(_compose(*ends)))


def _shifted(copy: StridedCopy) -> StridedCopy:
    return replace(copy, src_offset=copy.src_offset + 1)


def _other_stride(copy: StridedCopy) -> StridedCopy:
    return replace(copy, src_strides=tuple(stride + (stride > 1) for stride in copy.src_strides))


def _recorded(name: str, record: Any) -> Patch:
    operator = getattr(torch.ops.aten, name.partition(".")[0])
    return lambda patch: patch.setitem(
        operators.RECORDED, getattr(operator, name.partition(".")[2] or "default"), record
    )


MUTANTS: dict[str, Patch] = {
    "a piece is dropped": _changed_compose(lambda copies: copies[:-1] if len(copies) > 1 else copies),
    "a composed box is shifted by one": _changed_compose(lambda copies: [_shifted(copy) for copy in copies]),
    "a view has a wrong stride": _changed_compose(lambda copies: [_other_stride(copy) for copy in copies]),
    "what was overwritten stays": lambda patch: patch.setattr(recorder, "reversed", iter, raising=False),
    "what is left is forgotten": lambda patch: patch.setattr(recorder, "unread", lambda *ends: unread(*ends)[:-1]),
    "a computed value is taken for a copy": _recorded("mul.Tensor", operators._record_clone),
    "a flip is taken for a copy": _recorded("flip", operators._record_clone),
    "an in-place operator goes unseen": lambda patch: patch.setattr(
        recorder.Recorder, "_run_in_place", lambda self, func, args, kwargs, inputs: func(*args, **kwargs)
    ),
    "bits are taken for numbers": lambda patch: patch.setattr(
        writes.Write, "moved", lambda self, src, dst: _moved(self, self.stored or src, dst)
    ),
    "elements of another size are counted as they are": lambda patch: patch.setattr(
        recorder.Recorder, "_unit_fault", lambda self, tensor: ""
    ),
    "dtypes on the way are forgotten": lambda patch: patch.setattr(
        writes.Write, "moved", lambda self, src, dst: replace(_moved(self, src, dst), dtypes=frozenset())
    ),
    "random integers are taken for known ones": lambda patch: patch.setattr(
        torch.Tag, "nondeterministic_seeded", torch.Tag.inplace_view, raising=False
    ),
    "indices from the end are not wrapped": lambda patch: patch.setattr(
        operators, "_known_index", _unwrapped(operators._known_index)
    ),
    "a cast is taken for something new": _recorded("_to_copy", lambda r, func, args, kwargs: r.run(func, args, kwargs)),
    "padding is taken for data": _recorded("zero_", lambda r, func, args, kwargs: args[0]),
    "a fill is taken for padding": lambda patch: patch.setattr(operators, "float", lambda value: 0.0, raising=False),
}


def _unwrapped(known_index: Callable[..., Any]) -> Callable[..., Any]:
    def of(rec: Any, tensor: torch.Tensor, indices: Any) -> Any:
        found = known_index(rec, tensor, indices)
        given = [index for index in indices if index is not None]
        if found is None or given[0].dtype == torch.bool:
            return found
        return found[0], rec.values(given[0]).clamp(min=0)

    return of


def failures() -> list[str]:
    """The literal cases and random programs of which the recorder says something wrong."""
    failed = []
    for name, (shape, load, expected) in MOVED.items():
        try:
            tensor, _ = traced(shape, load, run=False)
            wrong = tensor.computed or elements_of(tensor) != expected
        except (AssertionError, RuntimeError, IndexError, TypeError, ValueError):
            wrong = True
        failed += [name] * bool(wrong)
    for name, (shape, load, _) in COMPUTED.items():
        try:
            tensor, _ = traced(shape, load, run=False)
            failed += [name] * (not tensor.computed)
        except (RuntimeError, IndexError, TypeError, ValueError):
            failed.append(name)
    for seed in range(60):
        try:
            traced_tensor, real = run_both(seed, plain=False)
            said = None if traced_tensor.computed or not traced_tensor.copies else elements_of(traced_tensor, FIRST)
            wrong = said not in (None, real.flatten().tolist())
        except (AssertionError, RuntimeError, IndexError, TypeError, ValueError):
            wrong = True
        failed += [f"program {seed}"] * bool(wrong)
    return failed


def test_the_recorder_itself_fails_nothing() -> None:
    assert failures() == []


@pytest.mark.parametrize("mutant", MUTANTS)
def test_a_fault_of_the_recorder_is_found(mutant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTANTS[mutant](monkeypatch)
    assert failures()
