"""Live refits: every training rank and every generation rank holds an endpoint, and they all refit together.

    train = TrainEndpoint(schedule, parameters, store="10.0.0.1:29600", export=bridge_export)
    train.prepare()                      # once: bind, meet the other ranks, compare plans, connect
    train.refit(version=step)            # after each optimizer step, on every rank of both worlds

A version is committed when every member of the refit has acknowledged it. If any member fails, all raise the same cause.
The session goes on: the next refit connects anew, without replicas that are gone, and repairs what the failed one mixed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports.broadcast import MAX_TENSOR_BYTES, broadcast, receive
from mcore_reshard.planner.plan.plan import Plan
from mcore_reshard.planner.plan.schedule import Schedule, World

from .connection import Connection, Program
from .endpoint import Endpoint
from .member import LiveTensors
from .part import Part
from .refitter import Attempt, KvScaleNames, SetKvScales
from .report import RefitHandle as RefitHandle
from .report import RefitReport as RefitReport
from .staged import StagedTensors
from .state import WeightState
from .whole_tensors import NamedTensors, check_stream, exhaust

Export = Callable[[Sequence[str] | None], NamedTensors]
_WIDENED = 8  # an export may yield float64 where the plan counts FP8


class TrainEndpoint(Endpoint):
    """A training rank's end of a session.

    - `tensors`: the rank's parameters by the names of `schedule.tensors`, or a function that returns them, for a model
      that may replace its parameters.
    - `export(names)` yields (HF name, whole tensor) for each of `names`, or for the whole model if None. All training
      ranks call it together, so it may run collectives. It must yield everything on training rank 0.
    - `schedule`: the rank's schedule, or a `RankOfPlan`, with which replicas of the engine may come and go.
    - `store`: what `serve_store` returned, or its "host:port".
    - `before_reads()` derives some of `tensors` from others. Each refit calls it once all ranks have begun, but not under
      golden, which exports. All training ranks call it together, so it may run collectives.
    - `check_layout()` raises where the rank keeps its tensors otherwise than the plan says; `prepare` calls it.
    - `rank_name` is as in "train:0"; `committed_version` the last version that all ranks acknowledged, None before it.

    On CUDA, weights must be complete on the current stream of their device when `refit` is called. A generation rank's
    current stream must be done with the old weights, or wait for the streams that use them. When `refit` returns, all
    streams see the new bytes.
    """

    world: World = "train"
    by_name = "export"

    def __init__(
        self,
        schedule: Schedule | Part,
        tensors: LiveTensors,
        *,
        store: Any,
        export: Export | None = None,
        before_reads: Callable[[], Any] | None = None,
        check_layout: Callable[[], None] | None = None,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        super().__init__(schedule, tensors, store, options, check_layout)
        self._export = export
        self._before_reads = before_reads
        self._moves_by_name = export is not None

    def refit_async(
        self,
        version: int,
        *,
        kv_scales: Mapping[str, float] | None = None,
        everything: bool = False,
        rollback: bool = False,
    ) -> RefitHandle:
        """As `refit`, but return once this rank's bytes have been read: weights may change, the outcome is to come.

        An error before that is raised here, one after it by the handle's `wait`. The next refit waits for this one.
        """
        return RefitHandle(self._refit(version, kv_scales, everything, rollback, in_background=True))

    def _move_by_name(
        self, connection: Connection, names: Sequence[str] | None, attempt: Attempt, afterwards: ExitStack
    ) -> int:
        assert self._export is not None, "prepare() has checked it"
        exported = iter(self._export(names))
        # An export runs collectives: a rank that left it half-way would hang the others.
        afterwards.callback(exhaust, exported)
        if self.rank_name == "train:0":
            group, tree = connection.group, connection.tree()
            return broadcast(group, tree, check_stream(names, exported, self._pairs, "export yielded"))
        exhaust(exported)
        return 0

    def _copy_in(self, staged: StagedTensors, program: Program, attempt: Attempt) -> None:
        raise NotImplementedError("only generation ranks stage")


class GenerationEndpoint(Endpoint):
    """A generation rank's end of a session.

    - `tensors`: the live engine's parameters by the names of `schedule.tensors`, written in place. A parameter that
      nothing in the plan fills is refused.
    - `load_weights(pairs)`: the engine's own loader. It gets (HF name, whole CPU tensor) pairs and must read them all.
    - `after_direct_writes()` derives tensors from new weights. Each refit calls it once all weights are there, under
      golden too.
    - `kv_scale_names()`: the names of this rank's scales of the KV cache. `set_kv_scales(scales)` puts scales of these
      names where attention reads them. A refit that brings scales calls it last.
    - `on_state(state)`: called at every change of `state`, on the thread that refits. An engine whose state is mixed must
      not generate.
    - `state`: that of an earlier endpoint of these tensors. What it left mixed is mixed until a refit succeeds.
    - `adopt_plan(plan)`: this rank's part in the plan of a trainer that started anew, perhaps on another mesh. It raises
      where the engine does not fit. Without it, such a trainer is refused.

    The rest is as for `TrainEndpoint`.
    """

    world: World = "gen"
    by_name = "load_weights"

    def __init__(
        self,
        schedule: Schedule | Part,
        tensors: LiveTensors,
        *,
        store: Any,
        load_weights: Callable[[NamedTensors], Any] | None = None,
        after_direct_writes: Callable[[], Any] | None = None,
        set_kv_scales: SetKvScales | None = None,
        kv_scale_names: KvScaleNames | None = None,
        check_layout: Callable[[], None] | None = None,
        on_state: Callable[[WeightState], Any] | None = None,
        adopt_plan: Callable[[Plan], Part] | None = None,
        state: WeightState | None = None,
        options: Options = Options(),  # noqa: B008
    ) -> None:
        if (set_kv_scales is None) != (kv_scale_names is None):
            raise ValueError("give set_kv_scales and kv_scale_names together: a rank gets the scales that it names")
        super().__init__(schedule, tensors, store, options, check_layout, on_state, adopt_plan)
        if state is not None and state.kind == "mixed":
            self._state = self._record.state = state
        self._load_weights = load_weights
        self._moves_by_name = load_weights is not None
        self._after_direct_writes = after_direct_writes
        self._set_kv_scales = set_kv_scales
        self._kv_scale_names = kv_scale_names

    def _move_by_name(
        self, connection: Connection, names: Sequence[str] | None, attempt: Attempt, afterwards: ExitStack
    ) -> int:
        planned = self._part.bytes_by_name(everything=names is None)
        max_bytes = min(MAX_TENSOR_BYTES, _WIDENED * planned) if planned else MAX_TENSOR_BYTES
        received = receive(connection.group, connection.tree(), max_bytes=max_bytes)
        arriving = check_stream(names, received, self._pairs, "there arrived")
        if self._staged is None:
            self._load(arriving, names, attempt)
            return attempt.written_by_name
        attempt.kept = [*arriving]
        attempt.kept_bytes = sum(tensor.nbytes for _, tensor in attempt.kept)
        return attempt.kept_bytes

    def _copy_in(self, staged: StagedTensors, program: Program, attempt: Attempt) -> None:
        if program.bound is not None:
            staged.copy_in(program.bound)
        if attempt.kept is not None:
            kept, attempt.kept = attempt.kept[::-1], None
            self._load((kept.pop() for _ in range(len(kept))), program.names, attempt)

    def _load(self, tensors: NamedTensors, names: Sequence[str] | None, attempt: Attempt) -> None:
        """Hand tensors to the engine's loader, and count what it may have written."""
        assert self._load_weights is not None, "prepare() has checked it"

        def count_bytes() -> Iterator[tuple[str, torch.Tensor]]:
            for count, (name, tensor) in enumerate(tensors, 1):
                attempt.written_by_name += tensor.nbytes
                attempt.share_by_name = 1.0 if names is None else count / len(names)
                yield name, tensor

        counted = count_bytes()
        self._load_weights(counted)
        if unread := [name for name, _ in counted]:
            left = f"load_weights left {len(unread)} tensors unread, first {unread[0]}"
            raise SessionError(f"{self.rank_name}: {left}; it must read them all")
