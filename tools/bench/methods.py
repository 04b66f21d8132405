"""The methods by name, with their options: `direct`, `direct:ctas=32`, `nccl:scratch_mib=256,checksums=1`.

A method is a function (rank, options) -> `Prepared`, called on all ranks at once. It raises `Unavailable`, on all
ranks alike and before it communicates, where it cannot run or cannot express the workload.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from .ranks import Rank

Options = Mapping[str, str]


class Unavailable(RuntimeError):
    """A method cannot run here; the message is the reason that the results give."""


@dataclass(slots=True)
class Prepared:
    """A method that is ready to move the workload's bytes, as often as wanted, on one rank."""

    run: Callable[[], Any]
    close: Callable[[], Any]
    nbytes: int | None = None  # that this rank receives; None: the bytes of the workload's destination tensors
    wrong: Callable[[], int] | None = None  # elements; None: the workload's destination tensors are compared
    facts: Callable[[], dict[str, Any]] = dict  # further columns of the row, asked for after the runs
    weight_bytes: int = 0  # device memory of weights, or of a limit's buffer, that `prepare` allocated: not counted
    building_s: float = 0.0  # time that `prepare` took to import another stack or build its model: not counted


@dataclass(frozen=True, slots=True)
class Kind:
    """`where` is "module:function" in this package, imported where it runs: what other stacks need may be missing."""

    where: str
    options: tuple[str, ...] = ()
    alone: bool = False  # in ranks of its own, after all methods that are not: it may hang or crash
    repeats: int | None = None  # steady runs, where the run's own number would take too long
    holds: bool = True  # it moves the workload's own tensors


KINDS = {
    "copy-engine": Kind("limits:copy_engine", ("gib",), holds=False),
    "nccl-alone": Kind("limits:nccl_alone", ("message_mib",), holds=False),
    "direct": Kind(
        "ours:direct", ("ctas", "threads", "batch", "tile_kib", "scratch_mib", "checksums", "engine_percent")
    ),
    "nccl": Kind("ours:nccl", ("ctas", "scratch_mib", "streams", "slots", "checksums")),
    "auto": Kind("ours:auto"),
    "gloo": Kind("ours:gloo"),
    "session": Kind("ours:session", ("transport", "source_checks")),
    "nemo-rl": Kind("nemo_rl:point_to_point", alone=True),
    "nemo-rl-golden": Kind("nemo_rl:golden", alone=True, repeats=2),
    "isend-irecv": Kind("isend_irecv:per_tensor", ("layers",), alone=True, repeats=2),
    "megatron-core": Kind("megatron_core:swap_weights", alone=True, holds=False),
    "nccl-m2n": Kind("nccl_m2n:reshard", holds=False),
    "golden": Kind("golden:broadcast", alone=True, repeats=0),
}


@dataclass(frozen=True, slots=True)
class Method:
    name: str
    options: Options = field(default_factory=dict)

    @property
    def text(self) -> str:
        given = ",".join(f"{name}={value}" for name, value in self.options.items())
        return f"{self.name}:{given}" if given else self.name

    @property
    def kind(self) -> Kind:
        return KINDS[self.name]

    def prepare(self, rank: Rank) -> Prepared:
        module, _, function = self.kind.where.partition(":")
        prepared: Prepared = getattr(import_module(f".{module}", __package__), function)(rank, self.options)
        return prepared


def parse_method(text: str) -> Method:
    """Raises ValueError saying everything that is wrong with `text`."""
    name, _, given = text.partition(":")
    if name not in KINDS:
        raise ValueError(f"unknown method {name!r}, known: {', '.join(KINDS)}")
    pairs = [item.partition("=") for item in given.split(",") if item]
    known = KINDS[name].options
    problems = [
        f"{option!r} is not an option of {name}, which has {', '.join(known) or 'none'}"
        for option, _, _ in pairs
        if option not in known
    ]
    problems += [
        f"{option} wants a value, write {option}=N" for option, _, value in pairs if option in known and not value
    ]
    problems += [
        f"{option} = {value!r} is not a number"
        for option, _, value in pairs
        if value and option in known and option not in {"transport", "source_checks"} and not value.isdigit()
    ]
    if problems:
        raise ValueError(f"{text}: " + "; ".join(problems))
    return Method(name, {option: value for option, _, value in pairs})
