"""Random programs of a loader's operators, run on numbered tensors and traced on meta: both say the same of every element."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import prod

import pytest
import torch
from helpers.traced_loaders import elements_of

from mcore_reshard.planner.layout.traces import HfTensor, TracedTensor
from mcore_reshard.tracing.recorder import Recorder

PROGRAMS = 400
SHAPES = {"a": (4, 6), "b": (2, 3, 4), "c": (24,), "d": (8, 3)}
FIRST = {name: 1000.0 * (number + 1) for number, name in enumerate(SHAPES)}  # float32 holds every number

Step = Callable[[list[torch.Tensor]], torch.Tensor | None]  # from all tensors so far to one more


def views(rng: random.Random, tensor: torch.Tensor) -> Callable[[torch.Tensor], torch.Tensor]:
    """One random view of a tensor, as a function."""
    if not tensor.dim() or not tensor.numel():
        return lambda t: t.reshape(1) if t.numel() else t
    dim = rng.randrange(tensor.dim())
    size = tensor.shape[dim]
    start = rng.randrange(size)
    length = rng.randint(1, size - start)
    step = rng.choice((1, 1, 2, 3))
    order = rng.sample(range(tensor.dim()), tensor.dim())
    halves = [n for n in (2, 3, 4) if size % n == 0]
    choices: list[Callable[[torch.Tensor], torch.Tensor]] = [
        lambda t: t.narrow(dim, start, length),
        lambda t: t[(slice(None),) * dim + (slice(start, start + length, step),)],
        lambda t: t.permute(order),
        lambda t: t.unsqueeze(dim),
        lambda t: t.flatten(),
        lambda t: t.unflatten(dim, (halves[0], -1)) if halves else t,
        lambda t: t.chunk(2, dim)[0],
        lambda t: t.split([start, size - start], dim)[1],
        lambda t: t.view(torch.int32).view(torch.float32) if t.dtype == torch.float32 else t,
    ]
    if tensor.dim() > 1:
        choices += [lambda t: t.select(dim, start), lambda t: t.unbind(dim)[start], lambda t: t.transpose(0, dim)]
    return rng.choice(choices)


def new_tensor(rng: random.Random, tensors: Sequence[torch.Tensor], *, plain: bool) -> Step:
    """One random operator that makes a tensor out of those so far; `plain`: one that only moves elements."""
    at = rng.randrange(len(tensors))
    tensor = tensors[at]
    if not tensor.dim() or not tensor.numel():
        return lambda ts: ts[at].clone()
    dim = rng.randrange(tensor.dim())
    picks = [rng.randrange(-tensor.shape[dim], tensor.shape[dim]) for _ in range(rng.randint(1, 5))]
    mask = [rng.random() < 0.5 for _ in range(tensor.shape[dim])]
    widths = [rng.randint(0, 2), rng.randint(0, 1)]
    others = [i for i, t in enumerate(tensors) if t.dim() == tensor.dim() and _fits(t, tensor, dim)]
    other = rng.choice(others)
    before = (slice(None),) * dim
    choices: list[Step] = [
        lambda ts: ts[at].clone(),
        lambda ts: ts[at].contiguous(),
        lambda ts: ts[at].double().float(),
        lambda ts: ts[at].to(torch.float64),
        lambda ts: torch.cat([ts[at], ts[other]], dim),
        lambda ts: torch.stack([ts[at], ts[at].clone()], dim),
        lambda ts: ts[at].index_select(dim, torch.tensor([p % ts[at].shape[dim] for p in picks])),
        lambda ts: ts[at][(*before, torch.tensor(picks))],
        lambda ts: ts[at][(*before, torch.tensor(mask))],
        lambda ts: torch.nn.functional.pad(ts[at], widths),
        lambda ts: ts[at].new_zeros(ts[at].shape),
        lambda ts: torch.zeros(ts[at].shape, dtype=ts[at].dtype),
        lambda ts: ts[at].reshape(-1),
        lambda ts: ts[at].unfold(dim, 1, 1).squeeze(-1),
    ]
    if not plain:
        choices += [
            lambda ts: ts[at] * 2,
            lambda ts: ts[at].flip(dim),
            lambda ts: ts[at].repeat(*(2 for _ in range(ts[at].dim()))),
            lambda ts: ts[at].half().float(),
            lambda ts: torch.where(ts[at] > 2000, ts[at], 0),
            lambda ts: ts[at].unsqueeze(dim).expand(*ts[at].shape[:dim], 2, *ts[at].shape[dim:]),
        ]
    return rng.choice(choices)


def in_place(rng: random.Random, tensors: Sequence[torch.Tensor], *, plain: bool) -> Step:
    """One random operator that writes into a tensor; a view of what is left of a write stays a view."""
    at, src = rng.randrange(len(tensors)), rng.randrange(len(tensors))
    dst, source = tensors[at], tensors[src]
    if not dst.numel() or not source.numel() or not dst.dim() or not source.dim() or 0 in dst.stride():
        return lambda ts: None
    dim = rng.randrange(dst.dim())
    count = rng.randint(1, dst.shape[dim])
    places = rng.sample(range(dst.shape[dim]), count)
    target = (*dst.shape[:dim], count, *dst.shape[dim + 1 :])

    def part(ts: list[torch.Tensor]) -> torch.Tensor:
        """As many elements of the source as the places hold, from its beginning, again and again."""
        flat = ts[src].reshape(-1).to(ts[at].dtype)
        copies = -(-prod(target) // flat.numel())
        return torch.cat([flat] * copies)[: prod(target)].view(target)

    choices: list[Step] = [
        lambda ts: ts[at].narrow(dim, min(places), 1).zero_(),
        lambda ts: ts[at].narrow(dim, 0, count).copy_(part(ts)),
        lambda ts: ts[at].index_copy_(dim, torch.tensor(places), part(ts)),
        lambda ts: ts[at].index_put_((*(None,) * dim, torch.tensor(places)), part(ts)) if dim == 0 else None,
        lambda ts: ts[at].__setitem__((slice(None),) * dim + (torch.tensor(places),), part(ts)),
        lambda ts: ts[at].__setitem__((slice(None),) * dim + (places[0],), 0),
    ]
    if not plain:
        choices += [
            lambda ts: ts[at].narrow(dim, 0, count).mul_(2),
            lambda ts: ts[at].fill_(3),
            lambda ts: torch._foreach_add_([ts[at].select(dim, 0)], 1),
        ]
    return rng.choice(choices)


def _fits(one: torch.Tensor, other: torch.Tensor, dim: int) -> bool:
    return all(a == b for d, (a, b) in enumerate(zip(one.shape, other.shape, strict=True)) if d != dim)


def run_both(seed: int, *, plain: bool) -> tuple[TracedTensor, torch.Tensor]:
    """A random program's parameter, traced and real."""
    rng, recorder = random.Random(seed), Recorder()
    sources = {name: recorder.source(name, HfTensor(shape, "float32")) for name, shape in SHAPES.items()}
    meta = [*sources.values()]
    real = [torch.arange(FIRST[n], FIRST[n] + prod(s), dtype=torch.float32).view(s) for n, s in SHAPES.items()]
    with torch.no_grad():
        for _ in range(rng.randint(2, 12)):
            kind = rng.random()
            at = rng.randrange(len(real))
            if kind < 0.5:
                view = views(rng, real[at])
                step: Step = lambda ts, at=at, view=view: view(ts[at])  # noqa: E731
            elif kind < 0.8:
                step = new_tensor(rng, real, plain=plain)
            else:
                step = in_place(rng, real, plain=plain)
            with recorder:
                made = step(meta)
            expected = step(real)
            if kind < 0.8 and made is not None and expected is not None:
                assert made.shape == expected.shape and made.dtype == expected.dtype
                meta.append(made)
                real.append(expected)
        chosen = rng.randrange(len(SHAPES), len(real)) if len(real) > len(SHAPES) else 0
        shape = tuple(real[chosen].shape)
        parameter = torch.empty(shape, device="meta")
        with recorder:
            parameter.copy_(meta[chosen])
    return recorder.read("parameter", parameter), real[chosen].float()


@pytest.mark.parametrize("plain", [True, False], ids=["moving", "anything"])
def test_a_trace_says_of_every_element_what_really_happens(plain: bool) -> None:
    followed = 0
    for seed in range(PROGRAMS):
        tensor, real = run_both(seed, plain=plain)
        if tensor.computed or not (tensor.copies or tensor.padding):
            continue
        followed += 1
        assert elements_of(tensor, FIRST) == real.flatten().tolist(), f"seed {seed}"
    assert followed > PROGRAMS * (0.5 if plain else 0.2), followed
