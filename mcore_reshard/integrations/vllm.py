"""Refits as vLLM's own weight transfer, under the name "mcore_reshard": the engine in its workers, and the trainer's side.

    vllm serve MODEL --weight-transfer-config '{"backend": "mcore_reshard"}'

    init = ReshardTrainerInit(rank=rank, connect=partial(mr.megatron.connect, chunks, bridge, config, gen="tp=2"), store=...)
    engine = WeightTransferTrainerFactory.trainer_init(init, client=HTTPVLLMWeightSyncClient("http://10.0.0.1:8000"))
    engine.send_weights(step)                                         # both lines on every training rank

Source: vllm/distributed/weight_transfer/base.py and v1/worker/gpu_worker.py, 0.26 to 0.33.
"""

from __future__ import annotations

import inspect
import logging
import math
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, fields
from typing import Any, ClassVar, TypeVar

import torch
from vllm.distributed.weight_transfer.base import (
    TrainerWeightTransferEngine,
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from mcore_reshard.engines.vllm.rank import VllmRank
from mcore_reshard.engines.vllm.worker import is_last
from mcore_reshard.kernels.errors import SessionError
from mcore_reshard.kernels.options import Options
from mcore_reshard.session.endpoints import RefitReport
from mcore_reshard.trainers.refit_trainer import RefitTrainer

from .common import options_for_engine
from .vllm_plugin import BACKEND, register

_CLIENT_S = 5.0  # how long an error of the trainer's waits for the engine's own, to be told together
Result = TypeVar("Result")

register()  # a trainer's process loads no plug-ins


@dataclass(kw_only=True)
class InitInfo(WeightTransferInitInfo):
    """What a worker needs to connect; the fields are the arguments of `RefitWorker.connect_refit`.

    Raises ValueError, listing everything wrong.
    """

    store: str = ""
    replica: int = 0
    connect_timeout_s: float = 600.0
    generate_while_mixed: bool = False
    options: dict[str, Any] = field(default_factory=dict)  # fields of `Options`

    def __post_init__(self) -> None:
        is_number = isinstance(self.connect_timeout_s, (int, float)) and not isinstance(self.connect_timeout_s, bool)
        rules = {
            "store": ('"host:port"', isinstance(self.store, str) and ":" in self.store),
            "replica": ("a count", type(self.replica) is int and self.replica >= 0),
            "connect_timeout_s": ("above 0 and finite", is_number and 0 < self.connect_timeout_s < math.inf),
            "generate_while_mixed": ("True or False", isinstance(self.generate_while_mixed, bool)),
            "options": ("an object", isinstance(self.options, dict)),
        }
        wrong = [f"{name} must be {rule}, not {getattr(self, name)!r}" for name, (rule, ok) in rules.items() if not ok]
        if isinstance(self.options, dict):
            known = {each.name for each in fields(Options)}
            wrong += [f"options has no field {name!r}" for name in self.options if name not in known]
            try:
                Options(**{name: value for name, value in self.options.items() if name in known})
            except ValueError as error:
                wrong.append(f"options: {error}")
        if wrong:
            raise ValueError("\n  ".join(("this init_info is wrong:", *wrong)))

    @classmethod
    def read(cls, given: dict[str, Any]) -> InitInfo:
        """The record of a JSON object. Raises ValueError, listing everything wrong and all unknown keys."""
        known = {each.name for each in fields(cls)}
        unknown = [f"there is no {name!r}; keys: {', '.join(sorted(known))}" for name in given if name not in known]
        try:
            info = cls(**{name: value for name, value in given.items() if name in known})
        except ValueError as error:
            raise ValueError("\n  ".join((str(error), *unknown))) from None
        if unknown:
            raise ValueError("\n  ".join(("this init_info is wrong:", *unknown)))
        return info


@dataclass(kw_only=True)
class UpdateInfo(WeightTransferUpdateInfo):
    """One refit. `version` is checked against the trainer's; `everything` asks for frozen parameters too."""

    version: int | None = None
    everything: bool = False


class ReshardEngine(WeightTransferEngine):
    """A vLLM worker's side. Of an engine of several workers the last one raises, and the others log: see `is_last`."""

    init_info_cls, update_info_cls = InitInfo, UpdateInfo
    supports_draft_weight_update = False  # each refit writes a draft model too that is made of the trainer's layers
    last_report: RefitReport | None = None
    _rank: VllmRank | None = None

    def parse_init_info(self, init_dict: dict[str, Any]) -> InitInfo | None:
        with self._raising_on_last():
            return InitInfo.read(init_dict)
        return None  # the last worker raises

    def init_transfer_engine(self, init_info: InitInfo | None) -> None:
        """Connect, as `RefitWorker.connect_refit`; anew if it is connected."""
        if init_info is None:
            return
        with self._raising_on_last():
            if self._rank is None:
                self._rank = VllmRank(_worker_of(self))
            self._rank.connect(
                init_info.store,
                replica=init_info.replica,
                connect_timeout_s=init_info.connect_timeout_s,
                generate_while_mixed=init_info.generate_while_mixed,
                **init_info.options,
            )

    def start_weight_update(self, *_: Any, **__: Any) -> None:
        """Nothing: a refit writes in place. A worker that is not connected says so in `update_weights`."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Take part in the trainer's next refit; returns once it is committed. Errors are those of `VllmRank.refit`."""
        try:
            with self._raising_on_last(and_then=self._end_update):
                self.receive_weights(self.parse_update_info(update_info))
        finally:
            if torch.accelerator.is_available():
                torch.accelerator.synchronize()

    def receive_weights(self, update_info: UpdateInfo, *_: Any, **__: Any) -> None:
        if self._rank is None:
            raise SessionError("this worker is in no session: call init_weight_transfer_engine first")
        self.last_report = self._rank.refit(update_info.version, everything=update_info.everything)

    def finish_weight_update(self, *_: Any, **__: Any) -> None:
        """Nothing: the refit is committed. vLLM does not reset its prefix cache here."""

    def shutdown(self) -> None:
        if self._rank is not None:
            self._rank.close()

    @staticmethod
    def trainer_send_weights(*_: Any, **__: Any) -> None:  # abstract up to vLLM 0.26
        raise NotImplementedError("the trainer's side is ReshardTrainer")

    def _end_update(self) -> None:
        """What vLLM's worker does when an update raises: the next one may start."""
        _worker_of(self)._weight_update_active = False

    @contextmanager
    def _raising_on_last(self, and_then: Callable[[], None] = lambda: None) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            if is_last(self.vllm_config):
                raise
            logging.getLogger(__name__).warning("%s: %s", type(error).__name__, error)
            and_then()


def _worker_of(engine: ReshardEngine) -> Any:
    """vLLM's worker that is calling `engine`; vLLM gives an engine its model, but not the model runner."""
    frame = inspect.currentframe()
    while frame is not None:
        caller = frame.f_locals.get("self")
        if getattr(caller, "weight_transfer_engine", None) is engine:
            return caller
        frame = frame.f_back
    raise SessionError("this engine serves vLLM's workers: call their init_weight_transfer_engine")


@dataclass(kw_only=True)
class ReshardTrainerInit:
    """What a training rank needs. `store`, `options` and the time limit go to the engine too, but for the token.

    `connect` is called with store=, connect_timeout_s= and options=: `mr.megatron.connect` or `mr.dtensor.connect`, with
    their other arguments bound by functools.partial. `rank` 0 talks to vLLM.
    """

    backend: ClassVar[str] = BACKEND

    rank: int
    connect: Callable[..., RefitTrainer]
    store: str
    replica: int = 0
    connect_timeout_s: float = 600.0
    generate_while_mixed: bool = False
    options: Options = field(default_factory=Options)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0

    def for_engine(self) -> dict[str, Any]:
        """The `InitInfo` of the engine's workers, as plain data."""
        names = ("store", "replica", "connect_timeout_s", "generate_while_mixed")
        return {name: getattr(self, name) for name in names} | {"options": options_for_engine(self.options)}


class ReshardTrainer(TrainerWeightTransferEngine):
    """The trainer's side: a `RefitTrainer` on every training rank, and vLLM's client on rank 0."""

    init_info_cls = ReshardTrainerInit

    def __init__(self, init_info: ReshardTrainerInit, client: Any) -> None:
        self.is_sender, self.client, self.source = init_info.is_sender, client, None
        self._version = 0
        self.trainer: RefitTrainer = self._beside(
            lambda: client.init_weight_transfer_engine(init_info.for_engine()),
            lambda: init_info.connect(
                store=init_info.store, connect_timeout_s=init_info.connect_timeout_s, options=init_info.options
            ),
        )

    @classmethod
    def trainer_init(
        cls, init_info: ReshardTrainerInit, *, client: Any, source: Any = None, config: Any = None
    ) -> ReshardTrainer:
        """Connect both sides; on every training rank. `source` stays None: refits read the trainer's own parameters."""
        if source is not None:
            raise ValueError("mcore_reshard reads the trainer's parameters itself: leave source out")
        return cls(init_info, client)

    def send_weights(self, version: int | None = None) -> None:
        """Refit the engine with the weights of this step; on every training rank. None: the version after the last one.

        Raises RefitError, with vLLM's answer added on rank 0. Call it again after an error: see `RefitTrainer.refit`.
        """
        version = self._version + 1 if version is None else version
        if self.is_sender:
            self.client.start_weight_update()
        self._beside(lambda: self.client.update_weights({"version": version}), lambda: self.trainer.refit(version))
        self._version = version
        if self.is_sender:
            finish = self.client.finish_weight_update
            finish(str(version)) if inspect.signature(finish).parameters else finish()  # vLLM 0.26 has no versions

    def shutdown(self) -> None:
        self.trainer.close()

    def _beside(self, ask: Callable[[], None], own: Callable[[], Result]) -> Result:
        """Run this rank's part while the sender asks vLLM for the engine's: its routes answer once the workers are done."""
        if not self.is_sender:
            return own()
        failed: list[Exception] = []

        def ask_vllm() -> None:
            try:
                ask()
            except Exception as error:
                failed.append(error)
                logging.getLogger(__name__).error("vLLM answers: %s", _told(error))

        asked = threading.Thread(target=ask_vllm, daemon=True)
        asked.start()
        try:
            result = own()
        except Exception as error:
            asked.join(_CLIENT_S)
            if failed and sys.version_info >= (3, 11):
                error.add_note(f"vLLM answers: {_told(failed[0])}")
            raise
        asked.join()
        if failed:
            raise SessionError(f"vLLM answers: {_told(failed[0])}") from failed[0]
        return result


def _told(error: Exception) -> str:
    """An error of vLLM's client, with the body of the HTTP answer, which has the worker's own message."""
    body = getattr(getattr(error, "response", None), "text", "")
    return f"{error}: {body}" if body else str(error)
