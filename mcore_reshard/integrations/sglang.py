"""Refits of a live SGLang through its own door: `--custom-weight-loader mcore_reshard.integrations.sglang.load`.

A weight update of SGLang carries one small tensor with a command. In every tensor-parallel rank SGLang hands it to `load`,
which runs it on the live model: the weights themselves come from the trainer, point to point.

    post = lambda route, body: requests.post(f"{url}/{route}", json=body).json()
    send(post, "connect", tp=2, store="10.0.0.1:29600")      # while the trainer's ranks connect
    send(post, "refit", tp=2, version=step)                  # while they refit
    send(post, "close", tp=2)

The client's half imports torch alone; it needs no SGLang.
"""

from __future__ import annotations

import base64
import json
import logging
import pickle
from collections.abc import Callable, Mapping, Sequence
from typing import Any
from uuid import uuid4

import torch

from mcore_reshard.engines.sglang.rank import SglangRank
from mcore_reshard.kernels.errors import RefitError

LOADER = "mcore_reshard.integrations.sglang.load"
COMMANDS = ("connect", "refit", "close")
_TENSOR = "mcore_reshard.command"  # the name of the tensor with the command
_UPDATER = "sglang.srt.model_executor.model_runner_components.weight_updater.WeightUpdater.update_weights_from_tensor"
_FORWARD = "sglang.srt.model_executor.model_runner.ModelRunner.forward"
_TARGET = {"selector": "target"}  # the model itself, and no draft model
_log = logging.getLogger(__name__)
_rank: SglangRank | None = None  # this process's part, kept between commands
_last_call = ""  # the number of the last command


# The client's half.


def command_tensors(command: str, **arguments: Any) -> list[tuple[str, torch.Tensor]]:
    """A command for `Engine.update_weights_from_tensor(named_tensors, load_format=LOADER)`: one tensor of JSON, uint8.

    - `connect`: those of `SglangRank.connect`, so `store`, `replica`, and fields of `Options`.
    - `refit`: `version`, and `everything`.
    - `close`: none.

    Raises ValueError for another command.
    """
    if command not in COMMANDS:
        raise ValueError(f"unknown command {command!r}, known: {', '.join(COMMANDS)}")
    text = json.dumps({"command": command, "call": uuid4().hex, **arguments})
    return [(_TENSOR, torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8))]


def command_request(command: str, tp: int, **arguments: Any) -> dict[str, Any]:
    """The body of a POST to /update_weights_from_tensor, as JSON. `tp` is the engine's `--tp-size`.

    The tensor's bytes are in the body. SGLang's own serializer sends a handle, which only the client's host can open.
    """
    tensors = base64.b64encode(pickle.dumps(command_tensors(command, **arguments), protocol=4)).decode()
    body = {
        "serialized_named_tensors": [tensors] * tp,
        "load_format": LOADER,
        "flush_cache": command == "refit",
        **_TARGET,
    }
    if arguments.get("version") is not None:
        body["weight_version"] = str(arguments["version"])
    return body


def send(post: Callable[[str, dict[str, Any]], Any], command: str, *, tp: int, **arguments: Any) -> None:
    """Run a command in an engine, between `begin_weight_update` and `end_weight_update`, which SGLang demands.

    `post(route, body)` sends a body as JSON and returns the answer: {"success": bool, "message": str}. Pause the engine
    before a refit. A refit also flushes the caches that the old weights have made, and sets SGLang's weight version.
    Raises RefitError with SGLang's message, which holds the error of its first rank.
    """
    _require_success("begin_weight_update", post("begin_weight_update", dict(_TARGET)))
    try:
        _require_success(command, post("update_weights_from_tensor", command_request(command, tp, **arguments)))
    finally:
        ended = post("end_weight_update", {})
    _require_success("end_weight_update", ended)


def _require_success(what: str, answer: Any) -> None:
    if not isinstance(answer, Mapping) or not answer.get("success"):
        message = answer.get("message") if isinstance(answer, Mapping) else answer
        raise RefitError(f"SGLang refused {what}: {message}")


# The engine's half.


def load(model: torch.nn.Module, named_tensors: Sequence[tuple[str, torch.Tensor]]) -> None:
    """Run the command that an update carries. SGLang calls it in every tensor-parallel rank, with the live model.

    Raises the errors of `SglangRank`; `register` makes answers of them. Raises ValueError for what is no command.
    """
    global _rank, _last_call
    arguments = _read_command(named_tensors)
    command, call = arguments.pop("command"), arguments.pop("call")
    if call == _last_call:
        _log.warning("refits leave the draft model of this engine as it is: SGLang was asked for all of its models")
        return
    _last_call = call
    if _rank is None or _rank.model is not model:
        close()
        _rank = SglangRank(model)
    if command == "connect":
        _rank.connect(**arguments)
    elif command == "refit":
        _rank.refit(arguments.get("version"), everything=bool(arguments.get("everything", False)))
    else:
        close()


def close() -> None:
    """Leave the session, if this process is in one."""
    if _rank is not None:
        _rank.close()


def _read_command(named_tensors: Sequence[tuple[str, torch.Tensor]]) -> dict[str, Any]:
    names = [name for name, _ in named_tensors]
    if names != [_TENSOR]:
        raise ValueError(
            f"{LOADER} takes one tensor, {_TENSOR}, with a command, not {len(names)} tensors (first"
            f" {next(iter(names), None)}): weights come from the trainer, see docs/integrations/sglang.md"
        )
    command = json.loads(bytes(named_tensors[0][1].cpu().numpy()))
    if not isinstance(command, dict) or command.get("command") not in COMMANDS or "call" not in command:
        raise ValueError(f"no command of {', '.join(COMMANDS)}: {command!r:.200}")
    return command


def register() -> None:
    """SGLang's plug-in (entry point group `sglang.srt.plugins`): errors of commands are answers, mixtures do not generate.

    Without it an error of `load` ends the engine, as any error in SGLang's scheduler does.
    """
    from sglang.srt.plugins.hook_registry import HookRegistry, HookType

    HookRegistry.register(_UPDATER, _answer_errors, HookType.AROUND)
    HookRegistry.register(_FORWARD, _refuse_mixture, HookType.BEFORE)


def _answer_errors(update: Callable[..., tuple[bool, str]], *args: Any, **kwargs: Any) -> tuple[bool, str]:
    """An update, whose error becomes its answer if the loader is ours: (success, message)."""
    try:
        return update(*args, **kwargs)
    except Exception as error:
        if LOADER not in (*args, kwargs.get("load_format")):
            raise
        _log.exception("a refit failed")
        return False, f"{type(error).__name__}: {error}"


def _refuse_mixture(*args: Any, **kwargs: Any) -> None:
    if _rank is not None:
        _rank.refuse_mixture()
