"""Requests between the two sides: a driver on training rank 0, and an engine that answers them in turns."""

from __future__ import annotations

import functools
from http.server import HTTPServer
from pathlib import Path
from typing import Any

from helpers.sglang_server import _handler, post

from .trainer import Trainer


class Driver:
    """One training rank, of which the first one also tells the engine what to do."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer, self.version = trainer, 0

    def tell(self, route: str, **body: Any) -> None:
        """A request, from training rank 0 alone. Raises RuntimeError where the engine refuses it."""
        if self.trainer.rank == 0:
            answer = post(self.url, route, body)
            if not answer["success"]:
                raise RuntimeError(f"{route}: {answer['message']}")

    @functools.cached_property
    def url(self) -> str:
        return f"http://127.0.0.1:{(self.trainer.folder / 'port').read_text()}"


class Answers:
    """An engine's server: `answer` requests until one is `done`. It listens at the port in `folder/port`."""

    def __init__(self, folder: Path) -> None:
        self.http = HTTPServer(("127.0.0.1", 0), _handler(self))
        (folder / "port").write_text(str(self.http.server_port))
        self._over = False

    def turn(self) -> tuple[int, int] | None:
        self._over = False
        while not self._over:
            self.http.handle_request()
        return None

    def handle(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        self._over = route == "done"
        return {"success": True, "message": ""} if self._over else self.answer(route, body)

    def answer(self, route: str, body: dict[str, Any]) -> dict[str, Any]:
        raise NotImplementedError

    def _share(self, request: Any) -> Any:
        return request
