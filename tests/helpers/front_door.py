"""The README's lines, to be run as they stand there, and a trainer and an engine for them to run on."""

from __future__ import annotations

import random
import re
import socket
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from mcore_reshard.validation.engine.slices import poison
from mcore_reshard.validation.trainer.build import Trainer

README = Path(__file__).parents[2] / "README.md"


def lines_with(call: str, address: str) -> str:
    """The README's import and the paragraph of its code that has `call`, with this address in place of the one there."""
    code = "\n\n".join(re.findall(r"```python\n(.*?)```", README.read_text(), re.DOTALL))
    paragraphs = [paragraph for paragraph in code.split("\n\n") if call in paragraph]
    assert len(paragraphs) == 1, f"paragraphs of the README's code that have {call}: {len(paragraphs)}"
    (stated,) = set(re.findall(r"[\d.]+:\d{4,5}", code))
    return f"import mcore_reshard as mr\n{paragraphs[0]}".replace(stated, address)


def free_address() -> str:
    """An address where nothing listens, outside the range from which the kernel gives ports to gloo's listeners."""
    first = max(20_000, int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0]))
    for port in random.sample(range(10_000, first), 100):
        try:
            socket.create_server(("127.0.0.1", port)).close()
        except OSError:
            continue
        return f"127.0.0.1:{port}"
    raise RuntimeError(f"100 ports below {first} are all taken")


def listens(address: str) -> bool:
    host, _, port = address.partition(":")
    try:
        socket.create_connection((host, int(port)), timeout=1.0).close()
    except OSError:
        return False
    return True


def goes_on_listening(address: str) -> bool:
    """Whether a store at `address` outlives its session by more than 5 s."""
    deadline = time.monotonic() + 5.0
    while listens(address):
        if time.monotonic() > deadline:
            return True
        time.sleep(0.2)
    return False


@dataclass
class Optimizer:
    """Steps a trainer's weights, and writes golden of each step: Megatron-Bridge's export."""

    trainer: Trainer
    folder: Path
    rank: int
    steps: int = 0

    def step(self) -> None:
        from safetensors.torch import save_file

        self.trainer.step()
        self.steps += 1
        golden = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in self.trainer.export()}
        if self.rank == 0:
            save_file(golden, golden_file(self.folder, self.steps))


def golden_file(folder: Path, step: int) -> Path:
    return folder / f"golden{step}.safetensors"


def refill(tensors: Iterable[torch.Tensor]) -> None:
    for tensor in tensors:
        poison(tensor)
