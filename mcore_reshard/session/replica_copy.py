"""Copy all weights of an engine rank to the same rank of a new replica. The trainer takes no part in it.

    take(store, "gen:5", "gen:1", tensors, options)                # gen:5 is new, and gets what gen:1 has
    offer(store, "gen:1", "gen:5", tensors, options, version=7)    # gen:1 holds version 7, and keeps it unwritten

Both ends first compare the names, shapes, dtypes and memory orders of their tensors, by a digest. Then the bytes move as
they lie in memory: bulk, padding and what came by the misc route alike. They take the transport of the session, between
two ranks, with checksums. `take` returns once every byte is in place and the donor has said that none changed meanwhile.

1.3 GB to a new replica of two ranks, over gloo on two cores: 1.7 s from another replica, 1.6 s from the trainer to it
alone, 3.6 s in a refit of both. Only the first lets the trainer go on.
"""

from __future__ import annotations

import hashlib
import json
import re
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, nullcontext, suppress
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, TypeVar

import numpy as np
import torch

from mcore_reshard.kernels.copies.bind import WriteCounts, bind
from mcore_reshard.kernels.copies.tensors import byte_view, dtype_name
from mcore_reshard.kernels.errors import (
    BindError,
    DeadlineError,
    PeerLostError,
    SessionError,
    TornWeightsError,
    TransferError,
    Waiting,
)
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import parse_stored, publish
from mcore_reshard.kernels.rendezvous.gloo_group import GlooGroup
from mcore_reshard.kernels.rendezvous.store_keys import FailFastStore, StoreView
from mcore_reshard.kernels.transports.base import Transport, TransportContext, connect_group
from mcore_reshard.kernels.transports.broadcast import Tree, broadcast, receive
from mcore_reshard.kernels.transports.group_ranks import group_names
from mcore_reshard.kernels.transports.registry import resolve
from mcore_reshard.planner.plan.schedule import (
    LocalTensor,
    MemberNames,
    OtherEnd,
    OtherEndView,
    Schedule,
    StageSchedule,
    StridedBox,
    TransferTable,
)

T = TypeVar("T")

_FAILED = "failed"  # the key at which an end says why it gave up
_SHOWN = 10  # differences in a message
_SEAT = re.compile("gen:(0|[1-9][0-9]*)")


@dataclass(frozen=True, slots=True)
class CopyReport:
    """What one end did in one copy."""

    version: int  # of the weights
    nbytes: int
    seconds: float
    transport: str  # one or several, as in "direct+nccl"


class ListedTensor(NamedTuple):
    """A tensor as both ends must have it."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    order: tuple[int, ...]  # its dims of more than one element, from the largest stride to the smallest
    tied_to: str  # an earlier tensor of the list that lies at the same place; "": none


def offer(
    store: StoreView,
    own_name: str,
    peer_name: str,
    tensors: Mapping[str, torch.Tensor],
    options: Options,
    *,
    version: int,
) -> CopyReport:
    """Send all `tensors` of this rank, which hold `version`, to `peer_name`, which must call `take` at this time.

    Nothing may write the tensors meanwhile. `store` is a view that both ends have, with keys of this one copy alone; the
    caller deletes them. Names are those of seats, as in "gen:1". On CUDA, the weights must be complete on the current
    stream of their device.

    Raises SessionError where the ends differ, BindError for tensors that cannot be copied, DeadlineError naming a silent
    peer, PeerLostError for one that died, and TornWeightsError if a tensor was written. If one end raises, so does the
    other, within the deadline.
    """
    return _Copy(store, own_name, peer_name, tensors, options, version).run()


def take(
    store: StoreView,
    own_name: str,
    peer_name: str,
    tensors: Mapping[str, torch.Tensor],
    options: Options,
    before_writes: Callable[[int], Any] = lambda version: None,
) -> CopyReport:
    """Fill all `tensors` of this rank from `peer_name`, which must call `offer` at this time. The report has the version.

    `before_writes(version)` is called before the first byte is written. After an error that follows it the tensors may hold
    anything. The caller derives what follows from the weights. The rest is as for `offer`.
    """
    return _Copy(store, own_name, peer_name, tensors, options, None, before_writes).run()


class _Copy:
    """One end of a copy: the donor is rank 0 of two, the joiner rank 1."""

    def __init__(
        self,
        store: StoreView,
        own_name: str,
        peer_name: str,
        tensors: Mapping[str, torch.Tensor],
        options: Options,
        version: int | None,  # None: this is the joiner
        before_writes: Callable[[int], Any] = lambda version: None,
    ) -> None:
        ends = (own_name, peer_name) if version is not None else (peer_name, own_name)
        if own_name == peer_name or not all(map(_SEAT.fullmatch, ends)):
            raise ValueError(f"a copy is between two ranks of the engine, such as gen:1 and gen:5, not {ends}")
        self._own, self._peer, self._version = own_name, peer_name, version
        self._store, self._tensors, self._before_writes = store, tensors, before_writes
        self._keys = FailFastStore("copy", store, _FAILED)
        self._options = replace(options, checksums=True)
        self._seats = tuple(int(name.partition(":")[2]) for name in ends)
        self._start = time.perf_counter()

    def run(self) -> CopyReport:
        with ExitStack() as closing:
            try:
                return self._run(closing)
            except BaseException as error:
                if isinstance(error, TransferError) and (cause := self._peers_cause()):
                    raise SessionError(cause) from error
                with suppress(Exception):  # before connections close: the peer then looks for the cause
                    if not self._store.check([_FAILED]):
                        self._store.set(_FAILED, f"{self._own}: {type(error).__name__}: {error}")
                raise

    def _run(self, closing: ExitStack) -> CopyReport:
        listed, views = list_tensors(self._own, self._tensors)
        devices = {view.device.type for view in views.values()} or {"cpu"}
        transport = resolve(self._options.transport, min(devices))
        version = self._agree(listed, transport)
        schedule = _schedule(self._seats, listed, views, sends=self._version is not None)
        writes = WriteCounts.of([*self._tensors.values()])
        group = connect_group(FailFastStore("group", self._keys), schedule, self._options.timeout_s)
        closing.callback(group.close)
        if transport.connect is None:
            self._before_writes(version)
            self._move_by_name(group, schedule, views)
            moved_by = transport.name
        else:
            bound = bind(schedule, views)
            context = TransportContext(FailFastStore(transport.name, self._keys), group, bound, self._options)
            on_device: AbstractContextManager[object] = nullcontext()
            if bound.device is not None and bound.device.type == "cuda":
                on_device = torch.cuda.device(bound.device)
            with on_device:
                executor = transport.connect(context)
                closing.callback(executor.close)
                self._before_writes(version)
                executor.run()
                moved_by = executor.name
        self._conclude(writes)
        nbytes = sum(view.numel() for view in views.values())
        return CopyReport(version, nbytes, time.perf_counter() - self._start, moved_by)

    def _agree(self, listed: Sequence[ListedTensor], transport: Transport) -> int:
        """Compare both ends, and return the version that the donor has."""
        own: dict[str, Any] = {
            "tensors": hashlib.sha256(json.dumps(listed).encode()).hexdigest(),
            "transport": transport.name,
            "bucket_bytes": self._options.bucket_bytes,
            "scratch_bytes": self._options.scratch_bytes,
        }
        theirs = self._exchange("word", {**own, "version": self._version}, _parse_word)
        if theirs["tensors"] != own["tensors"]:
            self._refuse(_differences(listed, self._exchange("tensors", listed, _parse_list), self._peer))
        self._refuse(
            [f"{key}: {own[key]} here, {theirs[key]} at {self._peer}" for key in own if theirs[key] != own[key]]
        )
        version: int | None = theirs["version"] if self._version is None else self._version
        if version is None or None not in (theirs["version"], self._version):
            self._refuse([f"both want to {'take' if version is None else 'offer'}"])
        assert version is not None
        return version

    def _refuse(self, differences: Sequence[str]) -> None:
        if not differences:
            return
        shown = [*differences[:_SHOWN], *[f"and {len(differences) - _SHOWN} more"] * (len(differences) > _SHOWN)]
        title = f"{self._own}: nothing can be copied between it and {self._peer}, which differ:"
        raise SessionError("\n  ".join((title, *shown)))

    def _move_by_name(self, group: GlooGroup, schedule: Schedule, views: Mapping[str, torch.Tensor]) -> None:
        """As golden moves whole tensors: through the memory of the CPU."""
        tree = Tree(0 if self._version is not None else 1, (0, 1), tuple(group_names(schedule)))
        if self._version is not None:
            broadcast(group, tree, views.items())
            return
        arriving = receive(group, tree, max_bytes=max((view.nbytes for view in views.values()), default=0))
        for name, view in views.items():
            came, content = next(arriving, ("nothing", view[:0]))
            if came != name or content.numel() != view.numel():
                raise SessionError(f"{self._own}: {came} of {content.numel()} bytes arrived in place of {name}")
            view.copy_(content)
        if extra := [name for name, _ in arriving]:
            raise SessionError(f"{self._own}: {extra[0]} arrived after the last tensor")

    def _conclude(self, writes: WriteCounts) -> None:
        """Tell each other that all bytes are in place, and that none changed while they were read."""
        if self._version is None:
            publish(self._keys, f"arrived/{self._own}", True)
            self._fetch("verdict", bool)
            return
        self._fetch("arrived", bool)
        now = WriteCounts.of(writes.tensors).counts
        counts = zip(self._tensors, writes.counts, now, strict=True)
        if written := [name for name, before, after in counts if before != after]:
            raise TornWeightsError(
                f"{self._own}: {written[0]} was written while it was copied, so {self._peer} holds a mixture"
            )
        publish(self._keys, f"verdict/{self._own}", True)

    def _exchange(self, topic: str, value: Any, parse: Callable[[Any], T]) -> T:
        publish(self._keys, f"{topic}/{self._own}", value)
        return self._fetch(topic, parse)

    def _fetch(self, topic: str, parse: Callable[[Any], T]) -> T:
        key, timeout_s = f"{topic}/{self._peer}", self._options.timeout_s
        waiting = Waiting(self._own, self._peer, 0, f"its {topic} for a copy of its weights", sends=False)

        def require_peer() -> None:
            seat = self._store.seats.get(self._peer)
            if seat is not None and seat.status != "here":
                left = seat.status == "left"
                raise PeerLostError(waiting, "it has left the session" if left else "its process has ended")

        found = self._store.wait_any([f"copy/{key}", _FAILED], timeout_s, require_peer)
        if not found:
            raise DeadlineError(waiting, f"nothing within {timeout_s:g} s")
        if f"copy/{key}" not in found:
            raise SessionError(self._peers_cause())
        return parse_stored(key, self._keys.get(key, writer=self._peer), parse, written_by=self._peer)

    def _peers_cause(self) -> str:
        """Why the peer gave up, if it said so."""
        with suppress(Exception):
            if self._store.check([_FAILED]):
                return self._store.get(_FAILED).decode(errors="replace")
        return ""


def list_tensors(
    rank_name: str, tensors: Mapping[str, torch.Tensor]
) -> tuple[list[ListedTensor], dict[str, torch.Tensor]]:
    """All tensors by name, and the bytes of each, uint8 [nbytes], that share its memory; tied and empty ones have none.

    Raises BindError for tensors whose elements do not fill their memory.
    """
    listed: list[ListedTensor] = []
    views: dict[str, torch.Tensor] = {}
    problems: list[str] = []
    first_at: dict[tuple[int, int], str] = {}
    for name, tensor in sorted(tensors.items()):
        if tensor.layout is not torch.strided or tensor.is_meta:
            problems.append(f"{name}: it is a {tensor.layout} tensor on {tensor.device}, without bytes of its own")
            continue
        shape, strides = tuple(tensor.shape), tensor.stride()
        by_stride = np.lexsort((-np.array(strides, np.int64), np.array(shape, np.int64) != 1)).tolist()
        in_memory = tensor.detach().permute(by_stride)
        if not in_memory.is_contiguous():
            problems.append(f"{name}: strides {strides} of shape {shape} skip or repeat memory")
            continue
        order = tuple(dim for dim in by_stride if shape[dim] != 1)
        tied_to = first_at.setdefault((tensor.data_ptr(), tensor.nbytes), name) if tensor.nbytes else name
        if tied_to == name and tensor.nbytes:
            views[name] = byte_view(in_memory)
        listed.append(ListedTensor(name, dtype_name(tensor.dtype), shape, order, tied_to if tied_to != name else ""))
    if problems:
        raise BindError(rank_name, problems)
    return listed, views


def _schedule(
    seats: tuple[int, ...], listed: Sequence[ListedTensor], views: Mapping[str, torch.Tensor], *, sends: bool
) -> Schedule:
    """One end of a schedule of two ranks, in which every tensor is one transfer of its bytes."""
    nbytes = np.array([view.numel() for view in views.values()], np.int64)
    sizes, box = np.unique(nbytes, return_inverse=True)
    number = np.arange(len(views), dtype=np.int32)
    zeros = np.zeros(len(views), np.int32)
    table = TransferTable(zeros, number, box.astype(np.int32), zeros.astype(np.int64), nbytes, number, zeros, zeros)
    none = table.rows(np.zeros(len(views), bool))
    tensors = tuple(LocalTensor(name, (view.numel(),), "uint8") for name, view in views.items())
    boxes = tuple(StridedBox((size,), (1,)) for size in sizes.tolist())
    digest = hashlib.sha256(json.dumps(listed).encode()).hexdigest()
    return Schedule(
        world="train" if sends else "gen",
        rank=0,
        digest=digest,
        train_ranks=1,
        gen_ranks=1,
        tensors=tensors,
        strided_boxes=boxes,
        stages=(StageSchedule(0, table, none) if sends else StageSchedule(0, none, table),),
        padding=(),
        misc=(),
        names={index: MemberNames(name) for index, name in enumerate(views)},
        later_hops=("relay",),
        hop=1,
        view=OtherEndView(OtherEnd(0, digest, tensors, boxes, (table,))),
        relay_seats=seats[:1],
        gen_seats=seats[1:],
    )


def _differences(own: Sequence[ListedTensor], theirs: Sequence[ListedTensor], peer: str) -> list[str]:
    """What differs between the tensors of both ends, by name."""
    here, there = ({each.name: each for each in listed} for listed in (own, theirs))
    lines = [f"{name}: {peer} has no such tensor" for name in here if name not in there]
    lines += [f"{name}: only {peer} has it" for name in there if name not in here]
    differing = [name for name in here if name in there and here[name] != there[name]]
    return lines + [f"{name}: {_text(here[name])} here, {_text(there[name])} at {peer}" for name in differing]


def _text(tensor: ListedTensor) -> str:
    order = "" if list(tensor.order) == sorted(tensor.order) else f" with dims in memory order {tensor.order}"
    return f"{tensor.dtype} {tensor.shape}{order}" + (f" tied to {tensor.tied_to}" if tensor.tied_to else "")


def _parse_word(said: Any) -> dict[str, Any]:
    version = said["version"]
    if version is not None and not isinstance(version, int):
        raise ValueError(f"version is {version!r}")
    texts = {key: str(said[key]) for key in ("tensors", "transport")}
    sizes = {key: int(said[key]) for key in ("bucket_bytes", "scratch_bytes")}
    return {"version": version, **texts, **sizes}


def _parse_list(said: Any) -> list[ListedTensor]:
    return [
        ListedTensor(str(name), str(dtype), tuple(map(int, shape)), tuple(map(int, order)), str(tied_to))
        for name, dtype, shape, order, tied_to in said
    ]
