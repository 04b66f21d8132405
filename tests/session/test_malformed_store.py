"""Malformed values on the store: no rank ends with a raw exception, and none outlives its deadline."""

from __future__ import annotations

import time
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.handmade import allocate, random_transfers, schedule_of
from helpers.plans import Case
from helpers.ranks import run_ranks, values
from torch.distributed import TCPStore

from mcore_reshard.kernels.errors import RefitError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import AnsweringStore
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan

TIMEOUT_S = 5.0
SLOW_S = 5.0  # what a busy machine adds
PLAN = Case("tiny-llama", "tp=1", "tp=1").plan()
MISC = "model.odd.weight"
SCALE = "model.layers.0.self_attn.attn.k_scale"
MALFORMED = {
    "nothing": b"",
    "no text": b"\xff\xfe\x00\x01",
    "truncated": None,  # the first half of the true value
    "a list": b"[]",
    "a number": b"1e999",
    "missing fields": b"{}",
    "other fields": b'{"agreed": false, "process": 1, "version": [1], "digest": {}, "lacks": 2, "kv_scales": 3}',
    "deep": b"[" * 100_000,
    "huge": b'{"rank_name": "' + b"x" * (1 << 20) + b'"}',
}


class Spoiler:
    """Writes a malformed value for each key that ends with `suffix`; notes all keys."""

    def __init__(self) -> None:
        self.suffix, self.content = " nowhere", b""
        self.keys: list[str] = []
        for name in ("set", "compare_set", "add"):
            setattr(AnsweringStore, name, self._spoilt(name, getattr(AnsweringStore, name)))

    def _spoilt(self, name: str, true_call: Any) -> Any:
        def call(store: AnsweringStore, key: str, *values: Any) -> Any:
            self.keys.append(key)
            if not key.endswith(self.suffix):
                return true_call(store, key, *values)
            true = values[-1] if isinstance(values[-1], bytes) else str(values[-1]).encode()
            content = true[: len(true) // 2] if self.content is None else self.content
            AnsweringStore._answer(store, lambda plain: plain.set(key, content))  # type: ignore[arg-type, misc]
            if name == "add":
                return true_call(store, key, *values)
            return true if name == "compare_set" else None

        return call


def take_part(rank: int, address: str, session: str) -> None:
    """A session with everything that one leaves on the store: the plan, misc weights, scales of the KV cache."""
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=3, stages=1)
    schedule = schedule_of(transfers, ("train", "gen")[rank], 0, (1, 1), misc=(MISC,))  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=1 if rank == 0 else None)
    options = Options(timeout_s=TIMEOUT_S, session=session)
    endpoint: TrainEndpoint | GenerationEndpoint

    def export(names: Any) -> Iterator[tuple[str, torch.Tensor]]:
        yield MISC, torch.ones(3)

    if rank == 0:
        publish_plan(PLAN, address, session=session, timeout_s=TIMEOUT_S)
        endpoint = TrainEndpoint(schedule, tensors, store=address, options=options, export=export)
    else:
        fetch_plan(address, session=session, timeout_s=TIMEOUT_S)
        endpoint = GenerationEndpoint(
            schedule, tensors, store=address, options=options,
            load_weights=list, set_kv_scales=lambda scales: None, kv_scale_names=lambda: [SCALE],
        )  # fmt: skip
    try:
        endpoint.prepare()
        endpoint.refit(1, kv_scales={SCALE: 0.5} if rank == 0 else None)
        endpoint.refit(2)
    finally:
        endpoint.close()


def kinds_of(suffix: str) -> list[str]:
    """Three kinds in turn; one for what TCPStore itself reads, or where the other rank waits for its deadline."""
    kinds, first = [*MALFORMED], zlib.crc32(suffix.encode())
    few = suffix.endswith(("/read", "/arrived")) or suffix.startswith("plan/")
    return [kinds[(first + turn) % len(kinds)] for turn in range(1 if few else 3)]


def meddle(rank: int, address: str) -> tuple[list[str], list[tuple[str, str, str, float]]]:
    """The keys of a session, and how it ends for this rank when each of them is malformed: (key, kind, how, seconds)."""
    host, port = address.split(":")
    plain = TCPStore(host, int(port), is_master=False, wait_for_workers=False)

    def meet(topic: str) -> None:
        plain.set(f"{topic}/{rank}", "")
        plain.wait([f"{topic}/0", f"{topic}/1"])

    spoiler = Spoiler()
    take_part(rank, address, "whole")
    plain.set(f"keys/{rank}", "\n".join(dict.fromkeys(spoiler.keys)))
    plain.wait(["keys/0", "keys/1"])
    keys = sorted({key for each in range(2) for key in plain.get(f"keys/{each}").decode().splitlines()})
    suffixes = [key.split("/", 2)[2] for key in keys]
    ends = []
    for number, (suffix, kind) in enumerate((each, kind) for each in suffixes for kind in kinds_of(each)):
        meet(f"next/{number}")
        spoiler.suffix, spoiler.content = f"s{number}/{suffix}", MALFORMED[kind]  # type: ignore[assignment]
        start = time.monotonic()
        try:
            take_part(rank, address, f"s{number}")
            how = "done"
        except RefitError as error:
            how = f"refused: {error}"
        except BaseException as error:
            how = f"raw: {error!r}"
        ends.append((suffix, kind, how, time.monotonic() - start))
    return suffixes, ends


def test_a_session_with_a_malformed_value_ends_with_an_error_of_ours_and_in_time() -> None:
    (keys, train), (_, gen) = values(run_ranks(2, meddle, timeout_s=240.0))
    assert {"plan/plan", "hello/gen:0", "hello/outcome", "gloo/0/1", "refit-1/kv_scales/gen:0"} <= {*keys}
    assert [end for end in (*train, *gen) if end[2].startswith("raw") or end[3] > 2 * TIMEOUT_S + SLOW_S] == []
    for (key, kind, *trains), (_, _, *gens) in zip(train, gen, strict=True):
        if key.endswith((":0", "/outcome")) and "here" not in key:
            told = f"{trains[0]} {gens[0]}"
            assert "malformed" in told and key.rpartition("/")[2] in told, (key, kind, told)


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[]", b'{"format": 1}'])
def test_a_malformed_plan_is_named(content: bytes) -> None:
    server = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    server.set("mcore-reshard/refit/plan/plan", content)  # type: ignore[arg-type]
    with pytest.raises(SessionError, match="the value of 'plan' on the store is malformed: "):
        fetch_plan(f"127.0.0.1:{server.port}", timeout_s=TIMEOUT_S)
