"""Staged refits in real processes: bytes land beside the live tensors, which change once all members have everything."""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from helpers.gloo import connecting
from helpers.plans import Case
from helpers.ranks import Outcome, run_ranks, values
from test_refit_session import Engine, Trainer, bytes_of, seat, whole_tensor
from test_trainable_only import Rank

from mcore_reshard.kernels import host
from mcore_reshard.kernels.errors import BindError
from mcore_reshard.kernels.host import available_memory
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.gloo import GlooExecutor
from mcore_reshard.session import staged
from mcore_reshard.session.state import WeightState

WORLDS = (2, 2)
RELAYED = Case("tiny-llama", "tp=2", "tp=1,dp=3")
CAST = Case("tiny-qwen3-moe", "ep=2,dp=2", "tp=2", dtypes=("bf16", "fp8"), block=(8, 16))


class StagedRank(Rank):
    """A rank of a plan with frozen parameters, whose session commits as `commit` says."""

    commit = "staged"

    def options(self, session: str) -> Options:
        return replace(super().options(session), commit=self.commit)


def plan_bits(number: int, address: str, case: Case) -> list[dict[str, bytes]]:
    """What a rank of a plan holds after each refit, staged and in place: the second one leaves frozen parameters out."""
    held = []
    for commit in ("in_place", "staged"):
        me = StagedRank(number, address, case)
        me.commit = commit
        endpoint = me.join(commit)
        for version in (1, 2, 3):
            me.train(version)
            endpoint.refit(version)
            held.append({name: bits.tobytes() for name, bits in me.bits().items()})
        endpoint.close()
        assert endpoint.scratch_bytes == 0
    return held


@pytest.mark.parametrize("case", [RELAYED, CAST], ids=["replicas relay", "casts to FP8"])
def test_staged_refits_bring_what_others_do(case: Case) -> None:
    plan = case.plan()
    for held in values(run_ranks(plan.train.world + plan.gen.world, plan_bits, case, timeout_s=90.0)):
        assert held[:3] == held[3:]


def hand_bits(rank: int, address: str, transport: str) -> Any:
    """As `plan_bits`, of tensors that are filled in part, padded ones, and some that move by name."""
    held = []
    for commit in ("in_place", "staged"):
        me = seat(rank, address, WORLDS, transport=transport, commit=commit, session=commit)
        me.endpoint.prepare()
        for version in (1, 2):
            if isinstance(me, Trainer):
                me.step(version)
            report = me.endpoint.refit(version)
            loaded = {} if isinstance(me, Trainer) else dict(me.loaded)
            held.append((bytes_of(me.tensors), loaded, report.nbytes, report.misc_bytes, report.state))
        me.endpoint.close()
    return held


@pytest.mark.parametrize("transport", ["gloo", "golden"])
def test_what_no_transfer_fills_stays_and_what_moves_by_name_is_loaded(transport: str) -> None:
    outcomes = values(run_ranks(4, hand_bits, transport))
    assert all(held[:2] == held[2:] for held in outcomes)
    assert outcomes[2][1][1] == {
        name: whole_tensor(name, 2).tolist() for name in ("model.odd.weight", "model.odd.bias")
    }


# --- failures ----------------------------------------------------------------------------------------------------


class KilledLater(GlooExecutor):
    """Dies before the third bucket of the second refit."""

    def _pack(self, bucket: Any, message: Any) -> None:
        if self._runs == 2 and self._buckets.index(bucket) == 2:
            os.kill(os.getpid(), 9)
        super()._pack(bucket, message)


def fail_in_second(function: Callable[..., Any], after: int = 0) -> Callable[..., Any]:
    """`function`, which raises in the second refit, at its call number `after` there."""

    def failing(*args: Any, **kwargs: Any) -> Any:
        if Failing.armed:
            Failing.calls += 1
            if Failing.calls > after:
                raise OSError("on fire")
        return function(*args, **kwargs)

    return failing


class Failing:
    armed, calls = False, 0


def kill_in_bulk(me: Trainer | Engine, rank: int) -> None:
    """The trainer's rank 1, half-way through what it sends."""


def fail_export(me: Trainer | Engine, rank: int) -> None:
    """On training rank 0, after all bulk has landed."""
    if rank == 0:
        me.endpoint._export = fail_in_second(me.endpoint._export)  # type: ignore[union-attr]


def fail_keeping(me: Trainer | Engine, rank: int) -> None:
    """On generation rank 1, as tensors that move by name arrive."""
    if rank == 3:
        me.endpoint._move_by_name = fail_in_second(me.endpoint._move_by_name)  # type: ignore[method-assign]


def fail_copy(me: Trainer | Engine, rank: int) -> None:
    """On generation rank 0, after it has copied three tensors into place."""
    if rank == 2:
        staged._copy_bytes = fail_in_second(staged._copy_bytes, after=FIRST_COPIES + 3)


def fail_load(me: Trainer | Engine, rank: int) -> None:
    """On generation rank 0, after all bulk is in place."""
    if rank == 2:
        me.endpoint._load_weights = fail_in_second(me.endpoint._load_weights)  # type: ignore[union-attr]


FIRST_COPIES = 0  # set in `refit_thrice`: how many tensors are copied out before transfers begin


class FailingLater(GlooExecutor):
    """In the second refit: fails at once."""

    def _pack(self, *args: Any) -> None:
        if Failing.armed:
            raise OSError("on fire")
        super()._pack(*args)


class StayingLater(GlooExecutor):
    """In the second refit: stays in its run for longer than anyone waits for it."""

    def _finish(self, *args: Any) -> None:
        try:
            super()._finish(*args)
        finally:
            if Failing.armed:
                time.sleep(4.0)


def stay_in_bulk(me: Trainer | Engine, rank: int) -> None:
    """Generation rank 0's transfer goes on after training rank 1's has failed."""


def refit_thrice(rank: int, address: str, harm: Callable[..., None]) -> Any:
    """Versions 1, 2, which fails, and 3: this rank's bytes after each, its states, and what the second refit raised."""
    global FIRST_COPIES
    kinds = {(kill_in_bulk, 1): KilledLater, (stay_in_bulk, 1): FailingLater, (stay_in_bulk, 2): StayingLater}
    kind: type[GlooExecutor] = kinds.get((harm, rank), GlooExecutor)
    gloo = registry.resolve("gloo", "cpu")
    registry.register(replace(gloo, name="gloo-test", connect=connecting(kind)))
    me = seat(rank, address, WORLDS, transport="gloo-test", commit="staged", timeout_s=10.0)
    fills = staged._bytes_by_tensor(me.schedule).values()
    FIRST_COPIES = sum(0 < filled != whole for filled, whole in fills)
    harm(me, rank)
    states: list[WeightState] = []
    me.endpoint._on_state = states.append
    me.endpoint.prepare()
    held, error = [], ""
    for version in (1, 2, 3):
        if isinstance(me, Trainer):
            me.step(version)
        if version == 2:
            Failing.armed = True
            with pytest.raises(Exception, match=r".") as caught:
                me.endpoint.refit(version)
            Failing.armed = False
            error = str(caught.value)
            held.append((bytes_of(me.tensors), dict(getattr(me, "loaded", {}))))
            if harm is kill_in_bulk:
                break
        else:
            me.endpoint.refit(version)
            held.append((bytes_of(me.tensors), dict(getattr(me, "loaded", {}))))
    me.endpoint.close()
    return held, [str(state) for state in states], [state.share for state in states], error


@pytest.mark.parametrize("harm", [kill_in_bulk, stay_in_bulk, fail_export, fail_keeping])
def test_a_failure_before_the_copy_leaves_every_bit_of_the_old_version(harm: Callable[..., None]) -> None:
    outcomes = run_ranks(4, refit_thrice, harm, timeout_s=60.0)
    if harm is kill_in_bulk:
        assert outcomes.pop(1).died
    for name, (held, states, _, error) in zip(("gen:0", "gen:1"), values(outcomes)[-2:], strict=True):
        assert held[1] == held[0]
        assert states[:2] == ["complete(1)", "intact(1)"]
        assert error.endswith(f"; {name} holds version 1, its state is intact(1)")
        if len(held) > 2:
            assert states[2:] == ["complete(3)"] and held[2][0] != held[1][0]


@pytest.mark.parametrize("harm", [fail_copy, fail_load])
def test_a_failure_during_the_copy_is_a_mixture_that_says_so(harm: Callable[..., None]) -> None:
    first, second = values(run_ranks(4, refit_thrice, harm, timeout_s=60.0))[2:]
    for held, states, _, _ in (first, second):
        assert (states[0], states[2]) == ("complete(1)", "complete(3)") and len(states) == 3
        assert held[0][0] != held[1][0] != held[2][0]
    held, states, shares, error = first
    assert states[1].startswith("mixed(1, 2, 0.") and 0 < shares[1] < 1
    assert error.startswith("on fire; gen:0 holds a mixture of versions 1 and 2 (")
    changed = [name for name, content in held[1][0].items() if content != held[0][0][name]]
    everything = [name for name, content in held[2][0].items() if content != held[0][0][name]]
    assert len(changed) > 0 and (len(changed) < len(everything)) == (harm is fail_copy)
    assert second[1][1] == "mixed(1, 2, 1.00)"


# --- memory ------------------------------------------------------------------------------------------------------


def without_memory(rank: int, address: str) -> None:
    if rank == 3:
        staged.available_memory = lambda: 1000
    me = seat(rank, address, WORLDS, commit="staged")
    me.endpoint.prepare()


def test_without_the_memory_the_option_is_refused_and_says_how_much_is_missing() -> None:
    outcomes = run_ranks(4, without_memory)
    assert outcomes[3].kind == BindError.__name__
    told = r"commit='staged' needs 0.00 GB on cpu for a second buffer of the rank's weights, and 0.00 GB are free there"
    assert all(told in str(outcome.error) for outcome in outcomes), outcomes


def test_gigabytes_that_are_missing_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(staged, "available_memory", lambda: 20_250_000_000)
    with pytest.raises(BindError, match=r"needs 61\.10 GB on cpu .* 20\.25 GB are free there: 40\.85 GB are missing"):
        staged.require_memory("gen:0", torch.device("cpu"), 61_100_000_000, "tests")
    staged.require_memory("gen:0", torch.device("cpu"), 20_250_000_000, "tests")


def test_free_memory_is_at_most_what_the_host_has() -> None:
    pages = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    free = available_memory()
    assert free is not None and 0 < free <= pages


def test_a_limit_of_the_control_group_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "own").write_text("0::/job/rank\n")
    for folder, most, taken in (("", "max", 0), ("job", 5000, 4500), ("job/rank", "max", 100)):
        group = tmp_path / "fs" / folder
        group.mkdir(exist_ok=True, parents=True)
        (group / "memory.max").write_text(f"{most}\n")
        (group / "memory.current").write_text(f"{taken}\n")
        (group / "memory.stat").write_text("anon 4000\ninactive_file 200\n")
    monkeypatch.setattr(host, "_GROUPS", tmp_path / "own")
    monkeypatch.setattr(host, "_CONTROLLERS", tmp_path / "fs")
    assert available_memory() == 700


def commits_otherwise(rank: int, address: str) -> None:
    me = seat(rank, address, WORLDS, commit="in_place" if rank == 3 else "staged")
    me.endpoint.prepare()


def test_ranks_that_commit_otherwise_do_not_fit_together() -> None:
    outcomes: Sequence[Outcome] = run_ranks(4, commits_otherwise)
    told = "different commit: staged on train:0, train:1, gen:0; in_place on gen:1"
    assert all(told in str(outcome.error) for outcome in outcomes), outcomes
