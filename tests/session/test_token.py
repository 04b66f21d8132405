"""Who may speak in a session: holders of its token alone, each in its own name, at its own place."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from helpers.handmade import allocate, random_transfers, raw_bytes, schedule_of
from helpers.plans import Case
from helpers.ranks import StoreProcess, run_ranks, values

from mcore_reshard.kernels.errors import SessionClosed, SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous import seal
from mcore_reshard.kernels.rendezvous import store as store_module
from mcore_reshard.kernels.rendezvous.rendezvous import Rendezvous
from mcore_reshard.kernels.rendezvous.seal import Sealer, find_token
from mcore_reshard.kernels.rendezvous.store import SessionStore, connect_store
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.plan_exchange import fetch_plan, publish_plan

TOKEN = "a secret of these tests"
OPTIONS = Options(session="s", timeout_s=5.0, token=TOKEN)
PLAN = Case("tiny-llama", "tp=1", "tp=1").plan()


def unsealed(store: SessionStore) -> SessionStore:
    """An attacker's: it has a connection, and no key. So would be a store that its host has taken over."""
    store.sealer = Sealer()
    return store


@pytest.mark.parametrize(
    "others",
    [Options(session="s", timeout_s=2.0, token="another secret of tests"), Options(session="s", timeout_s=2.0)],
)
def test_two_jobs_with_one_name_are_told_apart(host: StoreProcess, others: Options) -> None:
    with connect_store(host.address, OPTIONS), pytest.raises(SessionError, match=r"was begun with (another|a) token"):
        connect_store(host.address, others)


def test_a_session_begun_without_a_token_takes_none(host: StoreProcess) -> None:
    with connect_store(host.address, Options(session="s")), pytest.raises(SessionError, match="begun without a token"):
        connect_store(host.address, OPTIONS)


def test_a_signature_of_another_key_opens_nothing(host: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect_store(host.address, OPTIONS) as store:
        owner = store.sealer.proof("")["owner"]
        liar = Sealer.of(find_token("another secret of tests"), "s")
        monkeypatch.setattr(liar, "proof", lambda nonce: {"owner": owner, "proof": "00" * 64})
        monkeypatch.setattr(store_module.Sealer, "of", staticmethod(lambda *_: liar))
        with pytest.raises(SessionError, match="its token is another one"):
            connect_store(host.address, OPTIONS)


def test_nothing_that_is_said_can_be_read_on_the_way_or_at_the_store(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store:
        store.set("handle", "the address of all weights")
        assert store.get("handle") == b"the address of all weights"
        sealed = unsealed(store).get("handle")
        assert b"weights" not in sealed and len(sealed) > 26


def test_a_forged_value_is_refused_by_its_reader(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store, connect_store(host.address, OPTIONS) as attacker:
        unsealed(attacker).set("a/1/outcome", '{"agreed": true}')
        with pytest.raises(
            SessionError, match=r"'a/1/outcome' on the store does not come from a holder of this session's token"
        ):
            store.get("a/1/outcome")


def test_a_value_that_was_moved_to_another_key_is_refused(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store, connect_store(host.address, OPTIONS) as attacker:
        store.take_seat("gen:0", {})
        store.set("a/1/commit/gen:0", "{}")
        unsealed(attacker).set("a/2/commit/gen:0", attacker.get("a/1/commit/gen:0"))
        with pytest.raises(SessionError, match="or was moved there from another key"):
            store.get("a/2/commit/gen:0")


def test_a_word_in_anothers_name_is_refused(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store, connect_store(host.address, OPTIONS) as other:
        other.take_seat("gen:1", {})
        other.set("a/1/commit/gen:0", "{}")
        with pytest.raises(SessionError, match="was written by gen:1, not by gen:0"):
            store.get("a/1/commit/gen:0", writer="gen:0")


def replay(address: str, key: str, sealed: bytes) -> None:
    with connect_store(address, OPTIONS) as attacker:
        unsealed(attacker).set(key, sealed)


def sealed_value(address: str, key: str) -> bytes:
    with connect_store(address, OPTIONS) as attacker:
        return unsealed(attacker).get(key)


def test_an_older_value_of_a_key_is_refused_by_who_has_read_a_newer_one(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as reader, connect_store(host.address, OPTIONS) as leader:
        leader.take_seat("train:0", {})
        leader.set("head", "5")
        older = sealed_value(host.address, "head")
        leader.set("head", "8")
        assert reader.get("head", writer="train:0") == reader.get("head") == b"8"
        replay(host.address, "head", older)
        for read in (reader.get, reader.peek, lambda key: reader.compare_set(key, "", "9")):
            with pytest.raises(SessionError, match="the value of 'head' on the store is an older one of train:0"):
                read("head")
        leader.set("head", "9")
        assert reader.get("head") == b"9"


def test_a_value_that_another_writer_has_replaced_is_refused(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as reader:
        with connect_store(host.address, OPTIONS) as trainer:
            trainer.take_seat("train:0", {})
            trainer.set("other", "")
            trainer.set("head", "5")
            assert reader.get("head") == b"5"
            older = sealed_value(host.address, "head")
        with connect_store(host.address, OPTIONS) as restarted:  # its counter begins anew
            restarted.set("head", "6")
            assert reader.get("head") == b"6"
        replay(host.address, "head", older)
        with pytest.raises(SessionError, match="is an older one of train:0"):
            reader.get("head")


def test_a_reader_forgets_keys_that_it_read_long_ago(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "_REMEMBERED", 3)
    seen = seal._Seen()
    assert all(seen.is_news(f"key {number}", 1, number + 1) for number in range(5))
    assert [*seen._of_key] == ["key 2", "key 3", "key 4"]
    assert not seen.is_news("key 4", 1, 4)


def test_a_seat_that_is_taken_is_refused_with_its_holder(host: StoreProcess) -> None:
    with connect_store(host.address, OPTIONS) as store, connect_store(host.address, OPTIONS) as other:
        store.take_seat("gen:0", {"pid": 77, "host": "node3"})
        with pytest.raises(
            SessionError, match=r"another process \(77 on node3, since .* has been gen:0 of this session"
        ):
            other.take_seat("gen:0", {"pid": 78})


def test_a_forged_plan_is_refused(host: StoreProcess) -> None:
    publish_plan(PLAN, host.address, OPTIONS)
    assert fetch_plan(host.address, OPTIONS).digest == PLAN.digest
    with connect_store(host.address, OPTIONS) as attacker:
        unsealed(attacker).set("plan/newest", "forged")
        with pytest.raises(SessionError, match="does not come from a holder of this session's token"):
            fetch_plan(host.address, OPTIONS)


def refit_with_token(rank: int, address: str, forged: str) -> Any:
    """A refit of two ranks with a token, and what an outsider's value at `forged` does to it."""
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=3, stages=1)
    world = ("train", "gen")[rank]
    schedule = schedule_of(transfers, world, 0, (1, 1))  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=1 if rank == 0 else None)
    kind: Any = (TrainEndpoint, GenerationEndpoint)[rank]
    endpoint = kind(schedule, tensors, store=address, options=OPTIONS)
    endpoint.prepare()
    endpoint.refit(1)
    before = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    if forged and rank == 0:
        attacker = unsealed(connect_store(address, OPTIONS))
        keys = attacker.keys()
        number = next(key for key in keys if key.startswith("a/2-")).split("/")[1].partition("-")[2]
        attacker.set(f"a/3-{number}/{forged}", '{"agreed": true}')
    time.sleep(0.5)
    try:
        endpoint.refit(2)
    except SessionError as error:
        assert {name: raw_bytes(tensor) for name, tensor in tensors.items()} == before, "weights have moved"
        return str(error)
    finally:
        endpoint.close()
    return "committed"


def test_a_session_with_a_token_refits() -> None:
    assert values(run_ranks(2, refit_with_token, "")) == ["committed", "committed"]


def test_a_forged_call_moves_no_weight() -> None:
    told = values(run_ranks(2, refit_with_token, "call"))
    assert all("does not come from a holder of this session's token" in each for each in told), told


def refit_with_a_forged_commit(rank: int, address: str, forge: str) -> tuple[list[str], str]:
    """What the refit of version 2 tells, whose commit somebody else writes to; then version 3 is refitted.

    train:0 is the last to acknowledge. The attacker, a client of its own, has all that the network has and, where `forge`
    says so, the token. Returns the outcomes of both refits, and the state after the first.
    """
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=3, stages=1)
    schedule = schedule_of(transfers, ("train", "gen")[rank], 0, (1, 1))  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=1 if rank == 0 else None)
    endpoint: Any = (TrainEndpoint, GenerationEndpoint)[rank](schedule, tensors, store=address, options=OPTIONS)
    endpoint.prepare()
    endpoint.refit(1)
    before = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    if rank == 0:
        attacker = connect_store(address, OPTIONS)
        keys = unsealed(attacker).keys()
        word = next(key for key in keys if key.startswith("a/2-") and key.endswith("commit/gen:0"))
        earlier = attacker.get(word)
        arrive = Rendezvous._arrive

        def forged(self: Rendezvous, phase: str, *args: Any) -> bool:
            if phase != "commit":
                return arrive(self, phase, *args)
            Rendezvous._arrive = arrive  # type: ignore[method-assign]
            assert self.store.wait_all(["commit/gen:0"], 5.0)
            prefix = self.store._prefix
            if forge == "a word":
                attacker.set(f"{prefix}commit/gen:0", "{}")
            elif forge == "a replayed word":
                attacker.set(f"{prefix}commit/gen:0", earlier)
            elif forge == "an outcome":
                attacker.set(f"{prefix}commit/outcome", '{"agreed": true}')
            else:
                holder = connect_store(address, OPTIONS)
                holder.take_seat("gen:7", {})
                holder.set(f"{prefix}commit/gen:0", "{}")
            return arrive(self, phase, *args)

        Rendezvous._arrive = forged  # type: ignore[method-assign]
        for name, tensor in allocate(schedule, seed=2).items():
            tensors[name].copy_(tensor)
    told, state = [], ""
    for version in (2, 3):
        try:
            endpoint.refit(version)
            told.append("committed")
        except SessionError as error:
            told.append(str(error))
        if rank == 1 and version == 2:
            assert {name: raw_bytes(tensor) for name, tensor in tensors.items()} != before, "nothing has moved"
        state = state or str(endpoint.state)
    endpoint.close()
    return told, state


@pytest.mark.parametrize(
    ("forge", "said"),
    [
        ("a word", "commit/gen:0' on the store does not come from a holder of this session's token"),
        (
            "a replayed word",
            "commit/gen:0' on the store does not come from a holder of this session's token, or was moved",
        ),
        ("an outcome", "commit/outcome' on the store does not come from a holder of this session's token"),
        ("an acknowledgement", "commit/gen:0' on the store was written by gen:7, not by gen:0"),
    ],
)
def test_a_forged_commit_is_refused_by_all_and_the_next_refit_mends_it(forge: str, said: str) -> None:
    (trainer, _), (engine, state) = values(run_ranks(2, refit_with_a_forged_commit, forge))
    assert said in trainer[0] and said in engine[0]
    assert state.startswith("mixed(1, 2")
    assert [trainer[1], engine[1]] == ["committed", "committed"]


def refit_with_an_older_head(rank: int, address: str) -> str:
    """An outsider shows again which attempt had begun before."""
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=3, stages=1)
    schedule = schedule_of(transfers, ("train", "gen")[rank], 0, (1, 1))  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=1 if rank == 0 else None)
    endpoint: Any = (TrainEndpoint, GenerationEndpoint)[rank](schedule, tensors, store=address, options=OPTIONS)
    endpoint.prepare()
    attacker = unsealed(connect_store(address, OPTIONS)) if rank == 0 else None
    older = b"" if attacker is None else attacker.get("head")
    endpoint.refit(1)
    before = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    if attacker is not None:
        attacker.set("head", older)
        attacker.set("replayed", "")
        time.sleep(0.5)
        endpoint.close()
        return "left"
    assert endpoint._store.wait_all(["replayed"], 5.0)
    with pytest.raises(SessionError) as refused:
        endpoint.refit(2)
    assert {name: raw_bytes(tensor) for name, tensor in tensors.items()} == before, "weights have moved"
    assert str(endpoint.state) == "complete(1)"
    return str(refused.value)


def test_a_replayed_head_is_refused_by_who_has_read_the_newer_one() -> None:
    told = values(run_ranks(2, refit_with_an_older_head))
    assert "the value of 'head' on the store is an older one of train:0" in told[1], told


def refit_with_a_changed_word(rank: int, address: str, victim: int) -> Any:
    """One rank's word is another one in the call than it said."""
    from mcore_reshard.session.leader import Leader

    whose = ("train:0", "gen:0")[victim]
    if rank == 0:
        read = Leader._call

        def call(self: Leader, *args: Any) -> Any:
            publish = self.store.compare_set

            def changed(key: str, expected: str, desired: str | bytes) -> bytes:
                said = json.loads(desired)
                said["words"][whose]["everything"] = not said["words"][whose].get("everything", False)
                return publish(key, expected, json.dumps(said))

            self.store.compare_set = changed  # type: ignore[method-assign]
            try:
                return read(self, *args)
            finally:
                self.store.compare_set = publish  # type: ignore[method-assign]

        Leader._call = call  # type: ignore[method-assign]
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=3, stages=1)
    schedule = schedule_of(transfers, ("train", "gen")[rank], 0, (1, 1))  # type: ignore[arg-type]
    tensors = allocate(schedule, seed=1 if rank == 0 else None)
    before = {name: raw_bytes(tensor) for name, tensor in tensors.items()}
    endpoint: Any = (TrainEndpoint, GenerationEndpoint)[rank](schedule, tensors, store=address, options=OPTIONS)
    with pytest.raises(SessionError) as refused:
        endpoint.prepare()
        endpoint.refit(1)
    assert {name: raw_bytes(tensor) for name, tensor in tensors.items()} == before, "weights have moved"
    return str(refused.value)


@pytest.mark.parametrize("victim", [0, 1], ids=["train:0", "gen:0"])
def test_a_rank_checks_that_its_own_word_stands_as_it_said_it(victim: int) -> None:
    told = values(run_ranks(2, refit_with_a_changed_word, victim))
    whose = ("train:0", "gen:0")[victim]
    assert f"the word of {whose} does not stand in the call as it was said" in told[victim], told


def test_without_a_token_a_process_warns_once(host: StoreProcess, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(seal, "_warned", False)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        with connect_store(host.address, OPTIONS):
            assert told == []
        for session in ("a", "b", "b"):
            connect_store(host.address, Options(session=session, timeout_s=5.0)).close()
    assert len(told) == 1 and told[0].category is UserWarning
    assert "this session has no token: whoever reaches its store's port can join it" in str(told[0].message)
    assert told[0].filename == __file__  # who connects


def test_a_token_comes_from_one_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "token"
    file.write_text(TOKEN + "\n")
    assert find_token() is None
    assert find_token(TOKEN) == find_token(token_file=file) == find_token(TOKEN, file)
    monkeypatch.setenv("MCORE_RESHARD_TOKEN_FILE", str(file))
    assert find_token() == find_token(TOKEN)
    with pytest.raises(SessionError, match="give different tokens: give one"):
        find_token("another secret of tests")
    monkeypatch.delenv("MCORE_RESHARD_TOKEN_FILE")
    with pytest.raises(SessionError, match="at least 16 characters"):
        find_token("short", None)
    with pytest.raises(SessionError, match="cannot be read"):
        find_token(token_file=tmp_path / "none")
    assert TOKEN not in repr(OPTIONS) and TOKEN not in repr(find_token(TOKEN))


WAITS = """
import os, signal, sys, time, torch
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.session.goodbye import say_goodbye_at_exit
store = connect_store(sys.argv[1], Options(session="s", timeout_s=5.0))
store.take_seat("gen:0", {"pid": os.getpid()})
say_goodbye_at_exit(store)
print("here", flush=True)
until = time.monotonic() + float(sys.argv[2])
while time.monotonic() < until:  # Python runs a handler between two naps, also of a signal just before one
    time.sleep(0.05)
"""


@pytest.mark.parametrize(("end", "status"), [("exit", "left"), (signal.SIGTERM, "left"), (signal.SIGKILL, "gone")])
def test_a_process_that_ends_by_itself_says_goodbye(host: StoreProcess, end: Any, status: str) -> None:
    watcher = connect_store(host.address, Options(session="s", timeout_s=5.0))
    command = [sys.executable, "-W", "ignore", "-c", WAITS, host.address, "0" if end == "exit" else "60"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        if end != "exit":
            os.kill(process.pid, end)
        start = time.monotonic()
        process.wait(10.0)
        while watcher.seats["gen:0"].status == "here":
            assert time.monotonic() - start < 3.0
            time.sleep(0.01)
    assert watcher.seats["gen:0"].status == status
    assert process.returncode == (0 if end == "exit" else -end)


SENDS = WAITS.partition("until =")[0] + "time.sleep(0.5); store.set('plan', bytes(12 << 20))"


def test_sigterm_ends_a_process_at_once_that_sends_to_a_frozen_store(host: StoreProcess) -> None:
    command = [sys.executable, "-W", "ignore", "-c", SENDS, host.address]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "here\n"
        host.freeze()
        time.sleep(1.0)
        process.terminate()
        try:
            assert process.wait(2.0) == -signal.SIGTERM
        finally:
            process.kill()


def test_an_engine_that_waits_hears_at_once_that_the_trainer_left() -> None:
    kinds = values(run_ranks(2, leaves))
    assert kinds[1][0] == "SessionClosed" and kinds[1][1] < 2.0


def leaves(rank: int, address: str) -> tuple[str, float]:
    transfers = random_transfers(np.random.default_rng(7), (1, 1), parameters=3, stages=1)
    schedule = schedule_of(transfers, ("train", "gen")[rank], 0, (1, 1))  # type: ignore[arg-type]
    kind: Any = (TrainEndpoint, GenerationEndpoint)[rank]
    endpoint = kind(schedule, allocate(schedule), store=address, options=Options(timeout_s=20.0))
    endpoint.prepare()
    endpoint.refit(1)
    if rank == 0:
        time.sleep(1.0)
        endpoint.close()
        return "", 0.0
    start = time.monotonic()
    with pytest.raises(SessionClosed) as closed:
        endpoint.refit(2)
    assert str(endpoint.state) == "complete(1)"
    return closed.typename, time.monotonic() - start - 1.0
