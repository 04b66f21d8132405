"""A tensor-parallel SGLang of forked processes whose weight updates are SGLang's own, from the request's record down.

Real: the model classes, `SchedulerWeightUpdaterManager`, `WeightUpdater`, the decoding of requests, SGLang's groups over
gloo, its plug-in hooks. Stand-ins: the HTTP server, which here is Python's own and hands a request from rank 0 to the
others as SGLang's scheduler does; the scheduler and its tokenizer; forward, which no CPU here can run.
"""

from __future__ import annotations

import contextlib
import functools
import json
import logging
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist

from mcore_reshard.engines.sglang.model import load_weights
from mcore_reshard.integrations import sglang as adapter
from mcore_reshard.validation.engine import sglang_engine
from mcore_reshard.validation.engine.slices import GenSizes

GENERATION = ("pause_generation", "continue_generation", "flush_cache")


def prepare() -> None:
    """Import what ranks need, and apply the plug-in as SGLang does, in the process that forks them."""
    sglang_engine.prepare()
    with sglang_engine._standin_kernels():
        import sglang.srt.managers.scheduler_components.weight_updater
        import sglang.srt.managers.tp_worker
        import sglang.srt.model_executor.model_runner  # noqa: F401
    from sglang.srt.plugins.hook_registry import HookRegistry

    logging.getLogger("sglang").setLevel(logging.CRITICAL)
    adapter.register()
    HookRegistry.apply_hooks()


class Rank:
    """One rank's model and its update manager. `routes` are those that `serve` has been asked for, in order."""

    def __init__(self, folder: Path, sizes: GenSizes, rank: int, groups: Path, load: bool = True) -> None:
        from sglang.srt.managers.scheduler_components.weight_updater import SchedulerWeightUpdaterManager
        from sglang.srt.managers.tp_worker import BaseTpWorker
        from sglang.srt.model_executor.model_runner_components.weight_updater import WeightUpdater

        sglang_engine.stand_in_groups = functools.partial(_real_groups, groups)  # in this process alone
        self.model = sglang_engine.build_engine(folder, sizes, rank)
        if load:
            from safetensors.torch import load_file

            load_weights(self.model, load_file(folder / "model.safetensors").items())
        self.rank, self.sizes = rank, sizes
        self.routes: list[str] = []
        self.versions: list[Any] = []
        self.flushed = 0
        runner = SimpleNamespace(model=self.model)
        runner.weight_updater = WeightUpdater(
            tp_rank=rank,
            device="cpu",
            gpu_id=0,
            model_config=None,
            custom_weight_loaders=[adapter.LOADER],
            get_model=lambda: self.model,
            update_model_fields=None,
            recapture_cuda_graph=None,
            get_model_runner=lambda: runner,
        )
        worker = SimpleNamespace(model_runner=runner, weight_update_runners=lambda: [("target", runner)])
        worker.deserialize_own_rank = functools.partial(BaseTpWorker.deserialize_own_rank, worker)
        self.manager = SchedulerWeightUpdaterManager(
            tp_worker=worker,
            draft_worker=None,
            memory_saver_adapter=None,
            flush_cache=self._flush,
            is_fully_idle=lambda **_: True,
            scheduler=SimpleNamespace(
                record_weight_version_change=lambda new_version: self.versions.append(new_version)
            ),
        )

    def _flush(self, **_: Any) -> bool:
        self.flushed += 1
        return True

    def handle(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of this rank to a request, which all ranks must be given."""
        from sglang.srt.managers import io_struct
        from sglang.srt.utils.common import normalize_serialized_named_tensor_payloads

        self.routes.append(route)
        if route in GENERATION:
            return {"success": True, "message": ""}
        records = {
            "begin_weight_update": io_struct.BeginWeightUpdateReqInput,
            "update_weights_from_tensor": io_struct.UpdateWeightsFromTensorReqInput,
            "end_weight_update": io_struct.EndWeightUpdateReqInput,
        }
        record = records[route](**body)
        if route == "update_weights_from_tensor":
            payloads = normalize_serialized_named_tensor_payloads(record.serialized_named_tensors)
            record.serialized_named_tensors = payloads
        answer = getattr(self.manager, route)(record)
        return {"success": answer.success, "message": answer.message}

    def serve(self, port_file: Path, until: Callable[[], bool]) -> None:
        """Answer POSTs on rank 0, in step on all ranks, until `until()` is true on rank 0. Its port is written to a file."""
        if self.rank != 0:
            while (request := self._share(None)) is not None:
                self.handle(*request)
            return
        server = HTTPServer(("127.0.0.1", 0), _handler(self))
        server.timeout = 0.1
        partial = port_file.with_suffix(".partial")
        partial.write_text(str(server.server_port))
        partial.rename(port_file)
        with server:
            while not until():
                server.handle_request()
        self._share(None)

    def _share(self, request: Any) -> Any:
        shared = [request]
        if self.sizes.tp > 1:
            dist.broadcast_object_list(shared, src=0)
        return shared[0]


def _handler(rank: Rank) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            text = self.rfile.read(int(self.headers.get("Content-Length", 0)))
            route, body = self.path.strip("/"), json.loads(text or b"{}")
            answer = rank.handle(*rank._share((route, body)))
            self.send_response(200 if answer["success"] else 400)  # as entrypoints/http_server.py does
            content = json.dumps(answer).encode()
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        do_GET = do_POST

        def log_message(self, *_: Any) -> None:
            pass

    return Handler


def post(url: str, route: str, body: dict[str, Any]) -> dict[str, Any]:
    """A POST to a served rank; SGLang's answer also where it is a refusal."""
    from urllib.error import HTTPError
    from urllib.request import Request, urlopen

    try:
        with urlopen(Request(f"{url}/{route}", json.dumps(body).encode()), timeout=200) as answer:
            return json.loads(answer.read())
    except HTTPError as error:
        return json.loads(error.read())


@contextlib.contextmanager
def _real_groups(store: Path, world: int, rank: int) -> Iterator[None]:
    import sglang.srt.distributed.parallel_state as state

    sglang_engine.forget_groups()  # of the process that this one is forked from
    state.init_distributed_environment(world, rank, f"file://{store}", local_rank=rank, backend="gloo")
    state.initialize_model_parallel()
    yield
    dist.barrier()


def in_background(function: Callable[[], Any]) -> Callable[[], Any]:
    """Start a call on a thread; the returned function waits for it, and returns or raises what it did."""
    outcome: list[Any] = []

    def run() -> None:
        try:
            outcome.append((function(), None))
        except BaseException as error:
            outcome.append((None, error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()

    def wait() -> Any:
        thread.join()
        value, error = outcome[0]
        if error is not None:
            raise error
        return value

    return wait


def held(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Copies of all tensors that forward reads: parameters, and what multi-head latent attention derives."""
    from mcore_reshard.engines.sglang.model import local_tensors

    derived = {
        f"{prefix}.{name}": getattr(layer, name)
        for prefix, layer in model.named_modules()
        for name in ("w_kc", "w_vc")
        if getattr(layer, name, None) is not None
    }
    return {name: tensor.clone() for name, tensor in (local_tensors(model) | derived).items()}
