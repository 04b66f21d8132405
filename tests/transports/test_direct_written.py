"""What a reader of the direct transport counts as written when a source fails, without a GPU: parts of it are stand-ins."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mcore_reshard.kernels.errors import DeadlineError, PeerLostError, Waiting

reason = "needs cuda-core"
ends = pytest.importorskip("mcore_reshard.kernels.transports.direct.ends", reason=reason, exc_type=ImportError)
slots = pytest.importorskip("mcore_reshard.kernels.transports.direct.slots", reason=reason, exc_type=ImportError)
pushes = pytest.importorskip("mcore_reshard.kernels.transports.direct.pushes", reason=reason, exc_type=ImportError)
NBYTES = 4096


class Signals:
    """A source that is lost once it has sent so many signals."""

    peers = (0,)

    def __init__(self, heard: int) -> None:
        self.left = heard

    def hear(self, run: int, signal: Any, peers: Any = ()) -> None:
        if not self.left:
            raise PeerLostError(Waiting("gen:0", "train:0", 0, "w", False), "its connection closed")
        self.left -= 1

    def tell(self, run: int, signal: Any, peers: Any = ()) -> None:
        pass


def reader(heard: int, launched: list[int]) -> Any:
    """A reader of the rest, then of two rounds of casts. `launched`: what it counted as written at each launch."""
    made, of_casts = ends.Reader.__new__(ends.Reader), slots.SlotReader.__new__(slots.SlotReader)
    copies = SimpleNamespace(launch=lambda *_: launched.append(made.written_bytes))
    event = SimpleNamespace(record=lambda stream: None)
    stream: Any = SimpleNamespace(
        wait_event=lambda event: None, wait_stream=lambda stream: None, record_event=lambda: None
    )
    of_casts.shares_gpu = False
    of_casts._rounds = [SimpleNamespace(buckets=[SimpleNamespace(peer=0)], copies=copies)] * 2
    of_casts._taken, of_casts._cast = [event] * 2, {0: [event] * 2}
    of_casts._slot_streams = [stream] * 2
    made._signals = of_casts._signals = Signals(heard)
    made._stream = of_casts._stream = stream
    made._slots, made._copies = of_casts, copies
    made._target = None
    made._bound, made._device = SimpleNamespace(nbytes=NBYTES), torch.device("cpu")
    return made


@pytest.mark.parametrize(("heard", "launches"), [(0, 0), (1, 1), (2, 2)])
def test_bytes_count_as_written_from_the_first_launch_on(
    monkeypatch: pytest.MonkeyPatch, heard: int, launches: int
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    launched: list[int] = []
    failing = reader(heard, launched)
    with pytest.raises(PeerLostError):
        failing.run(1)
    assert launched == [NBYTES] * launches, "all count before the GPU may write one"
    assert failing.written_bytes == (NBYTES if launches else 0)


@pytest.mark.parametrize(("is_settled", "written"), [(False, 0), (True, NBYTES)])
def test_bytes_count_as_written_once_sources_may_write(
    monkeypatch: pytest.MonkeyPatch, is_settled: bool, written: int
) -> None:
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: None)
    failing, target = reader(0, []), pushes.Target.__new__(pushes.Target)

    def settle(events: Any) -> None:
        assert failing.written_bytes == 0
        if not is_settled:
            raise DeadlineError(Waiting("gen:0", "train:0", 0, "w", False), "the engine is busy")

    failing._slots._rounds, failing._target = [], target
    target._signals, target._device, target._peers = failing._signals, failing._device, failing._signals.peers
    target._settling, target._settled = SimpleNamespace(wait=settle), SimpleNamespace(record=lambda stream: None)
    with pytest.raises((DeadlineError, PeerLostError)):
        failing.run(1)
    assert failing.written_bytes == written


def test_pushes_whose_event_cannot_be_published_are_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[bool] = []
    schedule = SimpleNamespace(peers=frozenset(), tables=[])

    def publish(value: str, *, prefix: str) -> None:
        raise PeerLostError(Waiting("train:0", "gen:0", 0, "w", True), "the store has gone")

    monkeypatch.setattr(pushes.Pushes, "__init__", lambda made, *_, **__: vars(made).update(_pushed=0, _stream=made))
    monkeypatch.setattr(pushes.Pushes, "device", torch.device("cpu"), raising=False)
    monkeypatch.setattr(pushes.Pushes, "close", lambda made: closed.append(True))
    monkeypatch.setattr(pushes, "export_event", lambda event, device: "")
    monkeypatch.setattr(pushes, "waves_of", lambda parts, counts: [])
    with pytest.raises(PeerLostError, match="has gone"):
        pushes.Pushes.at_once(
            SimpleNamespace(), (schedule, schedule), SimpleNamespace(publish=publish), SimpleNamespace(),
            pushes.DirectOptions(), prefix="",
        )  # type: ignore[arg-type]  # fmt: skip
    assert closed == [True]
