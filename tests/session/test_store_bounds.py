"""Whatever lies on a store that takes everybody: who reads it is done within a second and 100 MB."""

from __future__ import annotations

from helpers.hostile import tried
from helpers.ranks import store_process

from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.frames import MAX_FRAME_BYTES, MAX_VALUE_BYTES
from mcore_reshard.kernels.rendezvous.store import connect_store

SETUP = """
import hashlib, json, warnings
warnings.simplefilter("ignore")
from datetime import timedelta
from mcore_reshard.kernels.options import Options
from mcore_reshard.kernels.rendezvous.exchange import Failure, StoreExchange, parse_stored
from mcore_reshard.kernels.rendezvous.store import connect_store
from mcore_reshard.session.plan_exchange import fetch_plan
from mcore_reshard.session.trace_exchange import answer_request, collect_traces
OPTIONS = Options(session="s", timeout_s=5.0)
AT = "{address}"

def word(key):
    with connect_store(AT, OPTIONS) as store:
        return parse_stored(key, store.get(key), Failure.from_json)

def words(*names):
    with connect_store(AT, OPTIONS) as store:
        return StoreExchange(store, "gen:0", names, 5.0).values("huge", str)
"""


def test_a_huge_value_is_refused_within_a_second_and_100_mb() -> None:
    largest = MAX_VALUE_BYTES - 1024
    values = {
        "spaces": b" " * largest,
        "integers": b"[" + b"257," * 1_500_000 + b"1]",
        "long": b"[" + b"257,    " * 1_500_000 + b"1]",
        "strings": b"[" + b'"' + b'aaa\\u4e00aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa","' * 262_000 + b'"]',
        "more": b" " * (MAX_VALUE_BYTES - 100),
        "bytes": b"\xff" * largest,
    }
    expected = {
        f"fetch_plan(AT, OPTIONS, digest={name!r})": f"SessionError: the value of 'plan/{name}' on the store is malformed"
        for name in values
    }
    expected |= {f"word('plan/{name}')": f"SessionError: the value of 'plan/{name}' on the store" for name in values}
    expected["words('0', '1')"] = (
        "SessionError: gen:0 reads no further: all that ranks say at 'huge' has 524,002 strings"
    )
    expected["answer_request(0, None, AT, OPTIONS, 5.0)"] = (
        "SessionError: the trainer's request on the store is malformed"
    )
    with store_process() as host, connect_store(host.address, Options(session="s", timeout_s=10.0)) as attacker:
        attacker.set("plan/newest", "spaces")
        attacker.set("traces/request", values["long"])
        for name, value in values.items():
            attacker.set(f"plan/{name}", value)
        for number in range(2):
            attacker.set(f"huge/{number}", values["strings"][: MAX_FRAME_BYTES // 2 - 1024])
        costs = tried({each: each for each in expected}, SETUP.replace("{address}", host.address))
    assert [
        (each, cost) for each, cost in costs.items() if not cost.is_bounded or expected[each] not in cost.answer
    ] == []
