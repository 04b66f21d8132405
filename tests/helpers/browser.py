"""A headless Chromium, driven over a pipe: the DevTools protocol, NUL between its messages, no package needed."""

from __future__ import annotations

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
_FLAGS = (
    "--headless",
    "--no-sandbox",
    "--disable-gpu",
    "--hide-scrollbars",
    "--no-first-run",
    "--remote-debugging-pipe",
)


class Tab:
    """One tab. `requests` are the addresses that it asked for, `errors` what its scripts failed with."""

    def __init__(self, requests: int, answers: int) -> None:
        self._to, self._from = requests, answers
        self._left, self._number, self._session = b"", 0, ""
        self.requests: list[str] = []
        self.errors: list[str] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """One command; raises RuntimeError where Chromium refuses it, TimeoutError after a minute."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": params}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        deadline = time.monotonic() + 60
        while True:
            answer = self._message(deadline)
            if answer.get("id") == self._number:
                if "error" in answer:
                    raise RuntimeError(f"{method}: {answer['error']}")
                return dict(answer["result"])
            self._note(answer)

    def evaluate(self, expression: str) -> Any:
        """The value of an expression in the page; promises are awaited."""
        answer = self.call("Runtime.evaluate", expression=expression, awaitPromise=True, returnByValue=True)
        if "exceptionDetails" in answer:
            raise RuntimeError(str(answer["exceptionDetails"]))
        return answer["result"].get("value")

    def open(self, page: Path, *, dark: bool = False) -> None:
        """Open a page; its scripts may still be at work."""
        scheme = [{"name": "prefers-color-scheme", "value": "dark" if dark else "light"}]
        self.call("Emulation.setEmulatedMedia", features=scheme)
        self.call("Page.navigate", url=page.resolve().as_uri())

    def wait_for(self, condition: str) -> None:
        """Wait until an expression is true in the page."""
        deadline = time.monotonic() + 60
        while not self.evaluate(f"Boolean({condition})"):
            if time.monotonic() > deadline:
                raise TimeoutError(f"never true: {condition}")
            time.sleep(0.05)

    def picture(self, path: Path, width: int = 1240, height: int = 0) -> None:
        """Write what is seen as a PNG: the whole page, or the first `height` pixels of it."""
        height = height or self.evaluate("document.documentElement.scrollHeight")
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=height, deviceScaleFactor=1, mobile=False)
        time.sleep(0.5)  # charts follow the width
        path.write_bytes(base64.b64decode(self.call("Page.captureScreenshot")["data"]))

    def _message(self, deadline: float) -> dict[str, Any]:
        while b"\0" not in self._left:
            if not select.select([self._from], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise TimeoutError("Chromium does not answer")
            if not (data := os.read(self._from, 1 << 20)):
                raise RuntimeError("Chromium has exited")
            self._left += data
        message, _, self._left = self._left.partition(b"\0")
        return dict(json.loads(message))

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        if event.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif event.get("method") == "Runtime.exceptionThrown":
            self.errors.append(str(params["exceptionDetails"]))
        elif event.get("method") == "Log.entryAdded" and params["entry"]["level"] == "error":
            self.errors.append(params["entry"]["text"])


@contextmanager
def chromium_tab(profile: Path) -> Iterator[Tab]:
    """A tab of a Chromium of its own, which is gone afterwards."""
    assert CHROMIUM is not None
    (in_reads, in_writes), (out_reads, out_writes) = os.pipe(), os.pipe()

    def as_3_and_4() -> None:  # the descriptors at which Chromium reads and writes
        low, high = os.dup(in_reads), os.dup(out_writes)
        os.dup2(low, 3)
        os.dup2(high, 4)

    process = subprocess.Popen(
        [CHROMIUM, *_FLAGS, f"--user-data-dir={profile}"],
        preexec_fn=as_3_and_4,
        close_fds=False,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    os.close(in_reads)
    os.close(out_writes)
    try:
        yield Tab(in_writes, out_reads)
    finally:
        process.kill()
        process.wait()
        os.close(in_writes)
        os.close(out_reads)
