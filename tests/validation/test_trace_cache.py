"""The cache of offline traces: what is kept is read, and nothing else is."""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path

import pytest
from helpers.traces import CHECKPOINT, trace

from mcore_reshard.planner.layout.condense import CondensedTrace
from mcore_reshard.planner.layout.mesh import GenMesh, TrainMesh
from mcore_reshard.planner.layout.traces import HfTensor
from mcore_reshard.planning import TracedRequest
from mcore_reshard.tracing import kept
from mcore_reshard.validation.offline_traces import OfflineTraces
from mcore_reshard.validation.trace_cache import TraceCache

CONFIG = {"model_type": "made", "hidden_size": 4}
REQUEST = TracedRequest("made", CONFIG, TrainMesh(tp=2), GenMesh(tp=1))
NOTHING = CondensedTrace((), (), ())
TRACES = OfflineTraces("made", CHECKPOINT, (trace(), trace()), (NOTHING,), (0, 0), (0,))


@pytest.fixture(autouse=True)
def cache_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "mcore-reshard" / "traces"


def test_traces_are_kept_once_for_all_ranks_that_share_them(cache_folder: Path) -> None:
    cache = TraceCache.of(REQUEST)
    assert cache.read() is None
    cache.write(TRACES)
    assert cache.read() == TRACES == TraceCache.of(REQUEST).read()
    assert [*cache_folder.iterdir()] == [cache.kept.file]
    _, _, header, checkpoint, *traces = cache.kept.file.read_text().split("\n")
    assert json.loads(header)["train"] == [0, 0] and json.loads(header)["gen"] == [1] and len(traces) == 2
    assert json.loads(checkpoint)["format"] == "mcore-reshard checkpoint"


@pytest.mark.parametrize(
    "other",
    [
        replace(REQUEST, config={**CONFIG, "hidden_size": 5}),
        replace(REQUEST, train=TrainMesh(tp=4)),
        replace(REQUEST, gen=GenMesh(tp=2)),
        replace(REQUEST, engine="sglang"),
    ],
)
def test_another_request_has_another_file(other: TracedRequest) -> None:
    TraceCache.of(REQUEST).write(TRACES)
    assert TraceCache.of(other).read() is None


def test_a_config_is_the_same_in_any_order_and_under_any_name() -> None:
    TraceCache.of(REQUEST).write(TRACES)
    same = replace(REQUEST, model="renamed", config=dict(reversed(CONFIG.items())))
    assert TraceCache.of(same).read() == TRACES


def test_a_changed_line_of_a_loader_is_another_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loader = tmp_path / "madeengine" / "model_executor" / "models" / "made.py"
    loader.parent.mkdir(parents=True)
    (tmp_path / "madeengine" / "__init__.py").write_text("raise AssertionError('this was imported')\n")
    loader.write_text("shard = rank\n")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setitem(kept._LOADERS, "madeengine", ("model_executor",))
    request = replace(REQUEST, engine="madeengine")
    TraceCache.of(request).write(TRACES)
    assert TraceCache.of(request).read() == TRACES
    loader.write_text("shard = size\n")
    assert TraceCache.of(request).read() is None


def test_a_file_with_any_byte_changed_is_ignored() -> None:
    cache = TraceCache.of(REQUEST)
    cache.write(TRACES)
    content = cache.kept.file.read_bytes()
    for place in range(0, len(content), 37):
        cache.kept.file.write_bytes(content[:place] + bytes([content[place] ^ 1]) + content[place + 1 :])
        assert cache.read() is None, place
    for damaged in (b"", content[:-1], content + b"\n", b"[]", content.split(b"\n")[0], b"\xff" + content):
        cache.kept.file.write_bytes(damaged)
        assert cache.read() is None
    cache.write(TRACES)
    assert cache.read() == TRACES


def test_a_sealed_file_of_what_cannot_be_is_ignored() -> None:
    cache = TraceCache.of(REQUEST)
    for wrong in (
        replace(TRACES, checkpoint={"other": HfTensor((1,), "bfloat16")}),
        replace(TRACES, train_stages=("first", "last")),  # type: ignore[arg-type]
    ):
        cache.write(wrong)
        assert cache.kept.file.exists() and cache.read() is None


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    cache = TraceCache.of(REQUEST)
    cache.write(TRACES)
    assert cache.read() is None


def test_a_file_is_written_whole_or_not_at_all(cache_folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cache = TraceCache.of(REQUEST)
    cache.write(TRACES)
    before = cache.kept.file.read_bytes()

    def fail(*_: object) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(os, "replace", fail)
    cache.write(replace(TRACES, gen=(trace(),)))
    assert cache.kept.file.read_bytes() == before
    assert [*cache_folder.iterdir()] == [cache.kept.file]


def test_a_file_that_nobody_reads_for_a_month_goes_when_another_is_written(cache_folder: Path) -> None:
    read, forgotten = TraceCache.of(REQUEST), TraceCache.of(replace(REQUEST, engine="sglang"))
    for cache in (read, forgotten):
        cache.write(TRACES)
    for cache in (read, forgotten):
        os.utime(cache.kept.file, (0, 0))
    assert read.read() == TRACES
    other = TraceCache.of(replace(REQUEST, train=TrainMesh(tp=4)))
    other.write(TRACES)
    assert {*cache_folder.iterdir()} == {read.kept.file, other.kept.file}
