"""Malformed values on the store: no rank ends with a raw exception, and none outlives its deadline."""

from __future__ import annotations

import re
import time
import warnings
import zlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from helpers.handmade import allocate, random_transfers, schedule_of
from helpers.plans import Case
from helpers.ranks import run_ranks, store_of, store_process, values

from mcore_reshard.kernels.errors import RefitError, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store_keys import StoreKeys
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan

TIMEOUT_S = 3.0
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
    "an infinity": b'{"version": Infinity}',
    "digits": b"1" * 1_000_000,
    "huge": b'{"rank_name": "' + b"x" * (1 << 20) + b'"}',
}
UNREADABLE = ("nothing", "no text", "truncated", "a number", "deep", "an infinity", "digits")


class Spoiler:
    """Writes a malformed value for the key `spoilt`; notes all keys. Names of attempts lose what is random in them."""

    def __init__(self) -> None:
        self.spoilt, self.content = "", b""
        self.keys: list[str] = []
        for name in ("set", "compare_set"):
            setattr(StoreKeys, name, self._spoil(name, getattr(StoreKeys, name)))
        StoreKeys.set_soon = lambda store, values: [store.set(*item) for item in values.items()]  # type: ignore

    def _spoil(self, name: str, true_call: Any) -> Any:
        def call(store: StoreKeys, key: str, *values: Any) -> Any:
            full = re.sub(r"[0-9a-f]{8,}", "*", store._prefix + key)
            self.keys.append(full)
            if full != self.spoilt:
                return true_call(store, key, *values)
            true = values[-1] if isinstance(values[-1], bytes) else str(values[-1]).encode()
            content = true[: len(true) // 2] if self.content is None else self.content
            return true_call(store, key, *values[:-1], content)

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
        publish_plan(PLAN, address, options)
        endpoint = TrainEndpoint(schedule, tensors, store=address, options=options, export=export)
    else:
        fetch_plan(address, options)
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


def kinds_of(key: str, count: int) -> list[str]:
    """So many kinds in turn."""
    kinds, first = [*MALFORMED], zlib.crc32(key.encode())
    return [kinds[(first + turn) % len(kinds)] for turn in range(count)]


def meddle(rank: int, address: str, kinds: int) -> tuple[list[str], list[tuple[str, str, str, float]]]:
    """The keys of a session, and how it ends for this rank when each of them is malformed: (key, kind, how, seconds)."""
    warnings.simplefilter("ignore")
    plain = store_of(address, "the test's own")
    spoiler = Spoiler()
    take_part(rank, address, "whole")
    plain.set(f"keys/{rank}", "\n".join(dict.fromkeys(spoiler.keys)))
    keys = sorted({key for each in range(2) for key in plain.get(f"keys/{each}").decode().splitlines()})
    ends = []
    for number, (key, kind) in enumerate((each, kind) for each in keys for kind in kinds_of(each, kinds)):
        plain.set(f"next/{number}/{rank}", "")
        plain.wait([f"next/{number}/0", f"next/{number}/1"])
        spoiler.spoilt, spoiler.content = key, MALFORMED[kind]  # type: ignore[assignment]
        start = time.monotonic()
        try:
            take_part(rank, address, f"s{number}")
            how = "done"
        except RefitError as error:
            how = f"refused: {error}"
        except BaseException as error:
            how = f"raw: {error!r}"
        ends.append((key, kind, how, time.monotonic() - start))
        spoiler.spoilt = ""
    return keys, ends


@pytest.mark.parametrize("kinds", [1, pytest.param(len(MALFORMED), marks=pytest.mark.slow)])
def test_a_session_with_a_malformed_value_ends_with_an_error_of_ours_and_in_time(kinds: int) -> None:
    (keys, train), (_, gen) = values(run_ranks(2, meddle, kinds, timeout_s=200.0 * kinds))
    assert {"plan/newest", "head", "a/1-*/word/gen:0", "a/1-*/call"} <= {*keys}
    assert [end for end in (*train, *gen) if end[2].startswith("raw") or end[3] > 3 * TIMEOUT_S + SLOW_S] == []
    for (key, kind, *trains), (_, _, *gens) in zip(train, gen, strict=True):
        if kind in UNREADABLE and (key == "head" or re.search("/(outcome|call|word/.*)$", key)):
            told = f"{trains[0]} {gens[0]}"
            assert "malformed" in told and key.rpartition("/")[2] in told, (key, kind, told)


@pytest.mark.parametrize("content", [b"\xff", b"{", b"[]", b'{"format": 1}', b"[" * 100_000, b"1" * 10_000_000])
def test_a_malformed_plan_is_named(content: bytes) -> None:
    options = Options(timeout_s=TIMEOUT_S, session="test")
    with store_process() as process, store_of(process.address) as store:
        store.set("plan/newest", "abc")
        store.set("plan/abc", content)
        with pytest.raises(SessionError, match=r"the value of 'plan/abc' on the store is malformed: .{,2000}$"):
            fetch_plan(process.address, options)
