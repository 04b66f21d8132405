"""What a recorder says of each operator it knows: literal small cases. Sources are numbered through, from `FIRST` on."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from helpers.traced_loaders import FIRST, elements_of, traced

from mcore_reshard.planner.layout.strided import StridedCopy
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.tracing.loading import record_loading
from mcore_reshard.tracing.recorder import Recorder, TraceError

A, B = "a", "b"  # [4, 6] and [2, 6], elements FIRST[A] + 0 .. 23 and FIRST[B] + 0 .. 11
Given = dict[str, torch.Tensor]
Loader = Callable[[torch.Tensor, Given], None]


def a(*elements: int) -> list[float]:
    return [FIRST[A] + element for element in elements]


def b(*elements: int) -> list[float]:
    return [FIRST[B] + element for element in elements]


# name: (shape of the parameter, loader, what its elements are)
MOVED: dict[str, tuple[tuple[int, ...], Loader, list[float]]] = {
    "copy_": ((4, 6), lambda p, w: p.copy_(w[A]), a(*range(24))),
    "copy_ into a row range": ((2, 6), lambda p, w: p.copy_(w[A][1:3]), a(*range(6, 18))),
    "copy_ by columns": ((4, 2), lambda p, w: p.copy_(w[A][:, 2:4]), a(2, 3, 8, 9, 14, 15, 20, 21)),
    "copy_ transposed": ((6, 2), lambda p, w: p.copy_(w[B].t()), b(0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11)),
    "clone": ((2, 6), lambda p, w: p.copy_(w[B].clone()), b(*range(12))),
    "clone of a part": ((2,), lambda p, w: p.copy_(w[B][1, 4:].clone()), b(10, 11)),
    "contiguous of a permuted view": (
        (3, 4),
        lambda p, w: p.copy_(w[B].view(2, 2, 3).permute(2, 1, 0).contiguous().view(3, 4)),
        b(0, 6, 3, 9, 1, 7, 4, 10, 2, 8, 5, 11),
    ),
    "reshape that copies": ((12,), lambda p, w: p.copy_(w[B].t().reshape(-1)), b(0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11)),
    "_to_copy to a wider dtype and back": ((2, 6), lambda p, w: p.copy_(w[B].float().bfloat16()), b(*range(12))),
    "cat of rows": ((3, 6), lambda p, w: p.copy_(torch.cat([w[B], w[A][3:]])), b(*range(12)) + a(*range(18, 24))),
    "cat of columns": (
        (2, 3),
        lambda p, w: p.copy_(torch.cat([w[B][:, :1], w[A][:2, 4:]], dim=-1)),
        [*b(0), *a(4, 5), *b(6), *a(10, 11)],
    ),
    "stack": (
        (6, 2),
        lambda p, w: p.copy_(torch.stack([w[B][0], w[A][1]], dim=1)),
        [x for pair in zip(b(*range(6)), a(*range(6, 12)), strict=True) for x in pair],
    ),
    "index_select": (
        (3, 6),
        lambda p, w: p.copy_(w[A].index_select(0, torch.tensor([2, 0, 1]))),
        a(*range(12, 18), *range(12)),
    ),
    "flip": ((2, 6), lambda p, w: p.copy_(w[B].flip(0, -1)), b(*range(11, -1, -1))),
    "flip of halves": (
        (2, 6),
        lambda p, w: p.copy_(w[B].reshape(-1, 2, 2, 3).flip(dims=[2]).reshape(2, 6)),
        b(3, 4, 5, 0, 1, 2, 9, 10, 11, 6, 7, 8),
    ),
    "index with a tensor": ((2, 6), lambda p, w: p.copy_(w[A][torch.tensor([3, 1])]), a(*range(18, 24), *range(6, 12))),
    "index from the end": (
        (2, 6),
        lambda p, w: p.copy_(w[A][torch.tensor([-1, -3])]),
        a(*range(18, 24), *range(6, 12)),
    ),
    "index by a range on meta": (
        (2, 3),
        lambda p, w: p.copy_(w[B][:, torch.arange(0, 6, 2, device="meta")]),
        b(0, 2, 4, 6, 8, 10),
    ),
    "index by computed integers on meta": (
        (2, 6),
        lambda p, w: p.copy_(w[A][(torch.arange(2, device="meta") * 2 + 1) % 4]),
        a(*range(6, 12), *range(18, 24)),
    ),
    "index by a grid": (
        (2, 2, 6),
        lambda p, w: p.copy_(w[A][torch.tensor([[0, 2], [1, 3]])]),
        a(*range(6), *range(12, 18), *range(6, 12), *range(18, 24)),
    ),
    "index by a mask": (
        (2, 6),
        lambda p, w: p.copy_(w[A][torch.tensor([True, False, False, True])]),
        a(*range(6), *range(18, 24)),
    ),
    "index by a mask made of indices": (
        (2, 6),
        lambda p, w: p.copy_(w[A][torch.arange(4, device="meta") >= 2]),
        a(*range(12, 24)),
    ),
    "index by a mask that the loader writes": ((2, 6), lambda p, w: p.copy_(w[A][_mask()]), a(*range(6, 18))),
    "index_copy_": ((2, 6), lambda p, w: p.index_copy_(0, torch.tensor([1, 0]), w[B]), b(*range(6, 12), *range(6))),
    "index_put_": (
        (2, 6),
        lambda p, w: p.__setitem__((slice(None), torch.tensor([1, 0, 2, 3, 5, 4])), w[B]),
        b(1, 0, 2, 3, 5, 4, 7, 6, 8, 9, 11, 10),
    ),
    "repeat of nothing": ((2, 6), lambda p, w: p.copy_(w[B].repeat(1, 1)), b(*range(12))),
    "constant_pad_nd": (
        (2, 8),
        lambda p, w: p.copy_(torch.nn.functional.pad(w[B], (0, 2))),
        [*b(*range(6)), 0, 0, *b(*range(6, 12)), 0, 0],
    ),
    "zero_ and a part": ((3, 6), lambda p, w: (p.zero_(), p[:2].copy_(w[B])), [*b(*range(12)), *[0] * 6]),
    "fill_ with zero": ((3, 6), lambda p, w: (p.fill_(0), p[1:].copy_(w[B])), [*[0] * 6, *b(*range(12))]),
    "new_zeros": ((3, 6), lambda p, w: p.copy_(_filled(w[B].new_zeros(3, 6), w[B])), [*b(*range(12)), *[0] * 6]),
    "zeros of the loader's own": (
        (3, 6),
        lambda p, w: p.copy_(_filled(torch.zeros(3, 6), w[B])),
        [*b(*range(12)), *[0] * 6],
    ),
    "empty, filled whole": (
        (2, 6),
        lambda p, w: p.copy_(_filled(torch.empty(2, 6, dtype=torch.bfloat16), w[B])),
        b(*range(12)),
    ),
    "a slice with steps": ((4, 2), lambda p, w: p.copy_(w[A][:, 1::3]), a(1, 4, 7, 10, 13, 16, 19, 22)),
    "into a slice with steps": (
        (4, 6),
        lambda p, w: (p[::2].copy_(w[B]), p[1::2].copy_(w[A][:2])),
        b(*range(6)) + a(*range(6)) + b(*range(6, 12)) + a(*range(6, 12)),
    ),
    "narrow, select, chunk, split, unbind": (
        (5, 6),
        lambda p, w: [
            row.copy_(part)
            for row, part in zip(
                p,
                [
                    w[A].narrow(0, 1, 1)[0],
                    w[A].select(0, 3),
                    w[A].chunk(2)[1][0],
                    w[B].split([1, 1])[1][0],
                    w[B].unbind()[0],
                ],
                strict=True,
            )
        ],
        a(*range(6, 12), *range(18, 24), *range(12, 18)) + b(*range(6, 12), *range(6)),
    ),
    "unfold": ((2, 3, 2), lambda p, w: p.copy_(w[B].unfold(1, 2, 2)), b(*range(12))),
    "view, unsqueeze, squeeze, flatten, movedim": (
        (6, 2),
        lambda p, w: p.copy_(w[B].unsqueeze(0).squeeze(0).view(2, 3, 2).flatten(1).movedim(0, 1)),
        b(0, 6, 1, 7, 2, 8, 3, 9, 4, 10, 5, 11),
    ),
    "param.data = other": (
        (2, 6),
        lambda p, w: setattr(p, "data", torch.cat([w[B][1:], w[B][:1]])),
        b(*range(6, 12), *range(6)),
    ),
    "the last write wins": ((2, 6), lambda p, w: (p.copy_(w[A][:2]), p.copy_(w[B])), b(*range(12))),
    "the last write wins in part": (
        (2, 6),
        lambda p, w: (p.copy_(w[B]), p[:, 4:].copy_(w[A][:2, :2])),
        [*b(0, 1, 2, 3), *a(0, 1), *b(6, 7, 8, 9), *a(6, 7)],
    ),
    "a source that is written": ((2, 6), lambda p, w: (w[B][1].zero_(), p.copy_(w[B])), [*b(*range(6)), *[0] * 6]),
    "a cast that the parameter declares": ((2, 6), lambda p, w: p.copy_(w[B].double()), b(*range(12))),
    "bits of one dtype on both sides": (
        (2, 6),
        lambda p, w: p.view(torch.int16).copy_(w[B].view(torch.int16)),
        b(*range(12)),
    ),
    "bits of one dtype through a clone": (
        (2, 6),
        lambda p, w: p.copy_(w[B].view(torch.int16).clone().view(torch.bfloat16)),
        b(*range(12)),
    ),
    "swapped in place": (
        (2, 6),
        lambda p, w: (p.copy_(w[B]), p.copy_(torch.cat([p[1:], p[:1]]))),
        b(*range(6, 12), *range(6)),
    ),
    "a row by the integer in a tensor": (
        (6,),
        lambda p, w: p.copy_(w[A][int(torch.arange(4, device="meta")[2])]),
        a(*range(12, 18)),
    ),
}

COMPUTED: dict[str, tuple[tuple[int, ...], Loader, str]] = {
    "index with a list, whose values torch loses on meta": (
        (2, 6),
        lambda p, w: p.copy_(w[A][[3, 1]]),
        "aten.index.Tensor",
    ),
    "arithmetic": ((2, 6), lambda p, w: p.copy_(w[B] * 2), r"aten.mul.Tensor at tracing/test_recorder.py:\d+"),
    "in-place arithmetic": (
        (2, 6),
        lambda p, w: p.copy_(w[B]).add_(1),
        r"aten.add_.Tensor at tracing/test_recorder.py:\d+",
    ),
    "arithmetic on the source": ((2, 6), lambda p, w: (w[B].neg_(), p.copy_(w[B])), "aten.neg_.default"),
    "arithmetic on many at once": (
        (2, 6),
        lambda p, w: (p.copy_(w[B]), torch._foreach_mul_([p], 2.0)),
        "_foreach_mul_",
    ),
    "arithmetic on a part": ((2, 6), lambda p, w: (p.copy_(w[B]), p[0, :1].exp_()), "aten.exp_"),
    "arithmetic into an output": ((2, 6), lambda p, w: torch.add(w[B], 1, out=p), "aten.add.out"),
    "rounding on the way": ((2, 6), lambda p, w: p.copy_(w[B].half()), "rounded to float16 on the way"),
    "repeat": ((4, 6), lambda p, w: p.copy_(w[B].repeat(2, 1)), "elements that are repeated"),
    "copy_ with broadcast": ((4, 6), lambda p, w: p.copy_(w[B][0]), "elements that are repeated"),
    "expand": ((2, 6), lambda p, w: p.copy_(w[B][:, :1].expand(2, 6)), "elements that are repeated"),
    "repeat_interleave": ((4, 6), lambda p, w: p.copy_(w[B].repeat_interleave(2, dim=0)), "elements that are repeated"),
    "a part that nobody writes": ((3, 6), lambda p, w: p[:2].copy_(w[B]), "6 of 18 elements are not loaded"),
    "a part of something empty": (
        (3, 6),
        lambda p, w: p.copy_(_filled(torch.empty(3, 6, device="meta"), w[B])),
        "6 of 18 elements",
    ),
    "ones beside weights": ((3, 6), lambda p, w: (p.fill_(1), p[:2].copy_(w[B])), "filled with 1.0 beside"),
    "padding with two": (
        (2, 7),
        lambda p, w: p.copy_(torch.nn.functional.pad(w[B], (0, 1), value=2)),
        "filled with 2.0 beside",
    ),
    "real numbers of its own": (
        (3, 6),
        lambda p, w: (p.copy_(torch.arange(18.0).view(3, 6)), p[:2].copy_(w[B])),
        "values that the loader makes itself",
    ),
    "random numbers": ((3, 6), lambda p, w: (p.copy_(torch.rand(3, 6, device="meta")), p[:2].copy_(w[B])), "aten.rand"),
    "a random order": ((4, 6), lambda p, w: p.copy_(w[A][torch.randperm(4, device="meta")]), "aten.index.Tensor"),
    "an order that weights decide": ((2, 6), lambda p, w: p.copy_(w[B][w[A][:2, 0].argsort()]), "aten.index.Tensor"),
    "indices in two dims": ((2,), lambda p, w: p.copy_(w[B][[0, 1], [2, 3]]), "aten.index.Tensor"),
    "a mask of two dims": ((2,), lambda p, w: p.copy_(w[B][_mask(2, 6)]), "aten.index.Tensor"),
    "accumulating": (
        (2, 6),
        lambda p, w: (p.zero_(), p.index_put_((torch.tensor([0, 1]),), w[B], accumulate=True)),
        "index_put",
    ),
    "bits taken for numbers": ((2, 6), lambda p, w: p.copy_(w[B].view(torch.int16)), "bits of bfloat16 as int16"),
    "numbers put in as bits": ((2, 6), lambda p, w: p.view(torch.int16).copy_(w[B]), "bits of int16 as bfloat16"),
    "bytes of elements": (
        (2, 12),
        lambda p, w: p.copy_(w[B].view(torch.uint8)),
        "bits of elements of 2 bytes as uint8",
    ),
    "bytes into elements": (
        (2, 6),
        lambda p, w: (p.copy_(w[B]), p.view(torch.uint8)[:, 0].copy_(w[A][:2, 0])),
        "written in elements of 2 and 1 bytes",
    ),
    "zero bytes in elements": (
        (2, 6),
        lambda p, w: (p.copy_(w[B]), p.view(torch.uint8)[:, :2].zero_()),
        "elements of 2 and 1 bytes",
    ),
    "half as many columns": (
        (2, 3),
        lambda p, w: p.copy_(w[B].view(torch.float32)),
        "bits of elements of 2 bytes as float32",
    ),
}


def _mask(*shape: int) -> torch.Tensor:
    """A real mask that a loader makes step by step."""
    mask = torch.zeros(shape or (4,), dtype=torch.bool)
    if shape:
        mask[:, 1] = True
    else:
        mask[[1, 2]] = True
    return mask


def _filled(tensor: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    tensor[: rows.shape[0]] = rows
    return tensor


@pytest.mark.parametrize("case", MOVED)
def test_what_moves_is_followed_element_by_element(case: str) -> None:
    shape, load, expected = MOVED[case]
    tensor, real = traced(shape, load)
    assert not tensor.computed
    assert elements_of(tensor) == expected
    assert real.flatten().tolist() == expected


@pytest.mark.parametrize("case", COMPUTED)
def test_what_is_no_rearrangement_is_computed_and_says_where(case: str) -> None:
    shape, load, reason = COMPUTED[case]
    tensor, _ = traced(shape, load, run=False)
    assert tensor.computed and re.search(reason, tensor.computed), tensor.computed
    assert not tensor.copies


def test_a_computed_tensor_names_all_parameters_that_it_needs() -> None:
    tensor, _ = traced((2, 6), lambda p, w: p.copy_(w[B] + w[A][:2]), run=False)
    assert set(tensor.names) == {A, B}


def test_a_tensor_of_zeros_alone_is_padding() -> None:
    tensor, _ = traced((2, 3), lambda p, w: p.zero_())
    assert [box.coalesced() for box in tensor.padding] == [StridedCopy((6,), 0, (0,), 0, (1,))]
    assert not tensor.copies and not tensor.computed


def test_a_tensor_that_nobody_writes_has_neither_copies_nor_padding() -> None:
    tensor, _ = traced((2, 3), lambda p, w: None)
    assert (tensor.copies, tensor.padding, tensor.computed) == ((), (), "")


@pytest.mark.parametrize("write", ["copy_", "zero_", "mul_"])
def test_writing_into_the_live_model_raises(write: str) -> None:
    live = torch.zeros(2, 3)
    with pytest.raises(TraceError, match=r"live model, at tracing/test_recorder\.py"), Recorder([live]):
        getattr(live[0], write)(
            *() if write == "zero_" else (torch.ones(3, device="cpu"),) if write == "mul_" else (2,)
        )


def test_weights_in_a_tensor_that_is_not_followed_raise() -> None:
    own = torch.tensor([1.0, 2.0])

    def load(parameter: torch.Tensor, weights: Given) -> None:
        own.copy_(weights[B][0, :2])

    with pytest.raises(TraceError, match="not on meta"):
        traced((2,), load, run=False)


def test_tensors_that_a_layer_derives_are_no_live_ones_in_a_twin() -> None:
    """SGLang's attention keeps products of kv_b_proj as plain tensors, which its loader writes in place."""

    class Derives(torch.nn.Linear):
        def load_weights(self, weights: Any) -> None:
            for name, tensor in weights:
                self.get_parameter(name).copy_(tensor)
            self.derived.copy_(self.weight[:1])

    model = Derives(3, 2, bias=False)
    model.derived = torch.ones(1, 3)
    recorder, twin = record_loading(model, {"weight": HfTensor((2, 3), "float32")}, "the engine")
    assert recorder.read("weight", twin.weight).copies and twin.derived.is_meta
    assert model.derived.equal(torch.ones(1, 3))
