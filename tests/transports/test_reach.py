"""What ranks say of the memory that they can read: half a million pairs fit into one answer of the store."""

from __future__ import annotations

import json
from functools import partial

import pytest
from helpers.ranks import store_of, store_process

from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.rendezvous.exchange import StoreExchange
from mcore_reshard.kernels.transports.peer_access import _parse_reach

TRAIN, GEN = 1024, 512
EVERYBODY = (1 << TRAIN) - 1


def test_from_1024_to_512_ranks_each_hears_of_all_pairs() -> None:
    names = [*(f"train:{rank}" for rank in range(TRAIN)), *(f"gen:{rank}" for rank in range(GEN))]
    with store_process() as process, store_of(process.address) as store:
        for number, name in enumerate(names):
            near = 0xFF << 8 * (number % 128)
            word = [(0, "on different hosts", f"{EVERYBODY & ~near:x}"), (0, None, f"{near:x}")]
            store.set_soon({f"reach/{name}": json.dumps(word if number >= TRAIN else [])})
        said = StoreExchange(store, names[0], names, 10.0).values("reach", partial(_parse_reach, TRAIN))
    pairs = {
        (source, reader): why
        for reader, groups in enumerate(said[TRAIN:])
        for _, why, sources in groups
        for source in sources
    }
    assert len(pairs) == TRAIN * GEN
    assert [source for source in range(TRAIN) if pairs[source, 3] is None] == [*range(24, 32)]


@pytest.mark.parametrize("sources", ["1" + "0" * 256, "not hexadecimal"])
def test_a_word_of_other_sources_is_refused(sources: str) -> None:
    with store_process() as process, store_of(process.address) as store:
        store.set("reach/gen:0", json.dumps([(0, None, sources)]))
        with pytest.raises(SessionError, match="reach/gen:0"):
            StoreExchange(store, "gen:0", ["gen:0"], 10.0).values("reach", partial(_parse_reach, TRAIN))
