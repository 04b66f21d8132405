"""One process of a cell: it refits, breaks or watches another one break, and refits until the session has recovered."""

from __future__ import annotations

import faulthandler
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import torch
from helpers.gpu import device_of

from mcore_reshard.kernels.errors import RefitError
from mcore_reshard.kernels.options import Options
from mcore_reshard.session import member
from mcore_reshard.session.endpoints import GenerationEndpoint, TrainEndpoint
from mcore_reshard.session.part import RankOfPlan
from mcore_reshard.session.places import own_place

from .inject import CallbackError, Injector, faulty_transport, install
from .matrix import DEADLINE_S, STORE, Cell
from .model import Weights, plan_of

START_S = 20.0  # for all ranks to come
RECOVERY_S = 30.0
TOKEN = "the fault matrix is the only one who knows this token"
RECOVERED = 10  # the version that all refit to recover, also those that started anew
_PACE_S = 0.5  # between refits while a replica is still away
_BUCKET_BYTES = 8192
_SCRATCH_BYTES = 1 << 18  # nccl then moves the weights in five rounds


@dataclass(frozen=True)
class Step:
    """What one rank saw of one part of a session."""

    name: str  # set up, fault, recovery, close
    start_s: float  # time.monotonic()
    end_s: float
    error: str | None = None
    kind: str | None = None  # of the error
    version: int | None = None  # of the report
    replicas: tuple[int, ...] = ()  # of the report
    committed: int | None = None
    state: tuple[str, int | None, int | None, float] | None = None  # kind, version, next, share
    held: int | None = None  # version of the bytes that the engine holds; 0 before the first, None: of none
    tries: int = 1


@dataclass
class Member:
    """One rank of a cell."""

    cell: Cell
    seat: str
    address: str
    tell: Callable[..., None]
    restarted: bool = False
    version: int = 0

    def __post_init__(self) -> None:
        world, _, rank = self.seat.partition(":")
        self.train = world == "train"
        self.weights = Weights(
            plan_of(*self.cell.ranks),
            "train" if self.train else "gen",
            int(rank),
            golden=self.cell.transport == "golden",
            device=_device(self.cell, self.seat),
        )
        self.injector = Injector(self.cell, self.seat, int(self.address.rpartition(":")[2]), self.tell)
        install(self.injector)
        self.transport = faulty_transport(self.injector, self.cell.transport)
        self.breaks_first = False  # this rank's callback fails once, so that the session has something to recover from
        self.recovers = self.restarted
        self.report: Any = None  # of the last refit
        self.endpoint: Any = None

    # --- the part of the user --------------------------------------------------------------------------------------

    def live(self) -> dict[str, torch.Tensor]:
        if self.cell.fault == "exception":
            self.injector.at("waiting for the call")
        return self.weights.tensors

    def before_reads(self) -> None:
        self.injector.at("before reads")

    def export(self, names: Sequence[str] | None) -> Iterator[tuple[str, torch.Tensor]]:
        for number, (name, tensor) in enumerate(self.weights.export(names, self.version)):
            if number == len(self.weights.names) // 2:
                self.injector.at("in export")
            yield name, tensor

    def load_weights(self, tensors: Any) -> None:
        for number, (name, tensor) in enumerate(tensors):
            self.weights.load(name, tensor)
            if number == len(self.weights.names) // 2:
                self.injector.at("in load_weights")

    def after_direct_writes(self) -> None:
        self.injector.at("in after_direct_writes")
        if self.breaks_first:
            self.breaks_first = False
            raise CallbackError("a failure to recover from")

    def connect(self) -> None:
        part = RankOfPlan(self.weights.plan, "train" if self.train else "gen", self.weights.rank)
        options = Options(
            commit="staged" if self.cell.staged else "in_place",
            transport=self.transport,
            timeout_s=DEADLINE_S,
            bucket_bytes=_BUCKET_BYTES,
            scratch_bytes=_SCRATCH_BYTES,
            token=TOKEN,
            session="faults",
        )
        common: dict[str, Any] = {
            "store": self.address,
            "options": options,
            "check_layout": lambda: self.injector.at("binding"),
        }
        if self.train:
            self.endpoint = TrainEndpoint(part, self.live, export=self.export, before_reads=self.before_reads, **common)
        else:
            self.endpoint = GenerationEndpoint(
                part,
                self.live,
                load_weights=self.load_weights,
                after_direct_writes=self.after_direct_writes,
                **common,
            )
        self.endpoint.prepare(timeout_s=None if self.cell.preparing or self.recovers else START_S)

    def refit(self, version: int) -> Any:
        """Training ranks say which version; ranks of the engine take what comes."""
        if self.train:
            self.version = version
            self.weights.step(version)
        return self.endpoint.refit(version if self.train else None)

    # --- what is done ----------------------------------------------------------------------------------------------

    def run(self, live_replicas: Sequence[int], takes_part: bool) -> None:
        """`live_replicas`: those that must have recovered in the end. `takes_part`: whether this rank's replica is one."""
        if not self.restarted:
            version = self._set_up()
            fault = self.cell.phase == "closing" and self.seat == self.cell.victim
            self.injector.arm("closing" if fault else "recovering")
            if not self.cell.preparing and not self.injector.armed:
                self.injector.arm("refit")
            if fault:
                self._step("fault", self.endpoint.close)
                return
            if not self.cell.preparing:
                self._step("fault", lambda: self._refit_or_break(version))
        if takes_part:
            self.recovers = True
            self._recover(RECOVERED, live_replicas)
        if self.cell.phase == "closing" and self.cell.victim == STORE:
            self.injector.arm("closing")  # of a rank that is to break the store
        self._step("close", self.endpoint.close)

    def _refit_or_break(self, version: int) -> Any:
        self.injector.at("between refits")
        return self.refit(version)

    def _set_up(self) -> int:
        """A first good refit; the version of the one in which something breaks."""
        self.injector.arm("preparing")
        self._step("fault" if self.cell.preparing else "set up", self.connect)
        if self.cell.preparing:
            return 1
        self._step("set up", lambda: self.refit(1))
        if self.cell.phase != "recovering":
            return 2
        self.breaks_first = self.seat == (
            "gen:0" if self.cell.replicas == 1 or self.cell.victim == "gen:1" else "gen:1"
        )
        self._step("failure", lambda: self.refit(2))
        return 3

    def _recover(self, version: int, live_replicas: Sequence[int]) -> None:
        """Refit until all live replicas have got one version."""

        def has_come(report: Any) -> bool:
            return report.version >= RECOVERED and set(live_replicas) <= set(report.replicas)

        def until_all_have_it() -> Any:
            nonlocal tries, version
            deadline = time.monotonic() + RECOVERY_S
            if self.report is not None and has_come(self.report):  # a rank that woke late
                return self.report
            while True:
                tries += 1
                try:
                    if self.endpoint is None or self.endpoint._attendance is None:
                        if self.endpoint is not None:
                            self.endpoint.close()
                        self.connect()
                    report = self.refit(version)
                    if has_come(report):
                        return report
                    if self.train:
                        version += 1
                        time.sleep(_PACE_S)
                except (RefitError, CallbackError, KeyboardInterrupt) as error:
                    _log(f"{self.seat} recovering: {error!r:.300}")
                    if time.monotonic() > deadline:
                        raise
                if time.monotonic() > deadline:
                    raise TimeoutError(f"version {version} has not come to all of the replicas {list(live_replicas)}")
                time.sleep(0.1)

        tries = 0
        self._step("recovery", until_all_have_it, lambda: tries)

    def _step(self, name: str, act: Callable[[], Any], tries: Callable[[], int] = lambda: 1) -> None:
        start, error, report = time.monotonic(), None, None
        try:
            report = self.report = act()
        except (Exception, KeyboardInterrupt) as raised:
            error = raised
        end = time.monotonic()
        endpoint, state = self.endpoint, None
        if endpoint is not None and not self.train:
            said = endpoint.state
            state = (said.kind, said.version, said.next, said.share)
        self.tell(
            "step",
            Step(
                name,
                start,
                end,
                None if error is None else str(error),
                None if error is None else type(error).__name__,
                getattr(report, "version", None),
                tuple(getattr(report, "replicas", ())),
                None if endpoint is None else endpoint.committed_version,
                state,
                None if self.train else self.weights.held(),
                tries(),
            ),
        )
        if error is not None:
            _log(f"{self.seat} {name}: {error!r:.600}")
        if error is not None and name == "set up":
            raise error


def _device(cell: Cell, seat: str) -> torch.device:
    if cell.transport in ("gloo", "golden"):
        return torch.device("cpu")
    # Each says that it has a GPU of its own: where all share one, each would take everything from there, and none relay.
    member.own_place = lambda own_seat, _: own_place(own_seat, None)
    return device_of(cell.seats.index(seat))


def _log(text: str) -> None:
    print(f"{time.monotonic():.2f} {text}", file=sys.stderr, flush=True)


def main(
    pipe: Any, cell: Cell, seat: str, address: str, log: str, live: Sequence[int], takes_part: bool, restarted: bool
) -> None:
    """The process: what it prints goes to `log`, what it sees to the pipe."""
    descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(descriptor, 2)
    os.dup2(descriptor, 1)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    faulthandler.enable(file=2)  # type: ignore[arg-type]
    faulthandler.register(signal.SIGUSR1, file=2, all_threads=True)  # type: ignore[arg-type]
    torch.set_num_threads(1)

    def tell(what: str, fact: Any) -> None:
        pipe.send((what, fact))
        if what == "store":
            pipe.recv()

    code = 0
    try:
        Member(cell, seat, address, tell, restarted).run(live, takes_part)
    except BaseException as error:
        code = 1
        _log(f"{seat} ends: {error!r}")
        faulthandler.dump_traceback(file=2)  # type: ignore[arg-type]
        with suppress(OSError):
            pipe.send(("died", f"{type(error).__name__}: {error}"))
    with suppress(OSError):
        pipe.send(("end", code))
    os._exit(code)
