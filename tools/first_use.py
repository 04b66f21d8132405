"""Measure the device memory that a process takes once: for the first kernel of ours, for NCCL's first communicator and message.

    python tools/first_use.py                    # one GPU; writes tools/results/first-use-x1.json

A session takes this in a process that has used neither; `plan` says so beside the memory that it counts. What a closed
communicator leaves behind is NCCL's kernels.
"""

from __future__ import annotations

import argparse
import json
import sys
from datetime import date
from pathlib import Path

import numpy as np
import torch
from nccl.bindings import nccl as bindings
from nccl.core import Communicator, get_unique_id

from mcore_reshard.kernels.cuda.copy_kernel import DeviceCopies
from mcore_reshard.kernels.cuda.tiles import TILE

sys.path.insert(0, str(Path(__file__).parent))
from bench import machine

RESULTS = Path(__file__).parent / "results"
ELEMENTS = 1 << 20


def held() -> int:
    """Bytes of the device that are not free."""
    torch.cuda.synchronize()
    free, total = torch.cuda.mem_get_info()
    return total - free


def use_nccl(payload: tuple[torch.Tensor, torch.Tensor] | None) -> int:
    """Bytes that a communicator of one rank leaves behind when it is closed, after one message to itself or none."""
    before = held()
    communicator = Communicator.init(1, 0, get_unique_id())
    if payload is not None:
        source, destination = payload
        handle, stream = bindings.Comm(communicator.ptr), torch.cuda.current_stream().cuda_stream
        bindings.group_start()
        bindings.send(source.data_ptr(), ELEMENTS, bindings.DataType.Uint8, 0, handle, stream)
        bindings.recv(destination.data_ptr(), ELEMENTS, bindings.DataType.Uint8, 0, handle, stream)
        bindings.group_end()
        torch.cuda.synchronize()
        assert torch.equal(source, destination)
    communicator.destroy()
    return held() - before


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=RESULTS / "first-use-x1.json")
    arguments = parser.parse_args()
    device = torch.device("cuda", 0)
    ones = torch.ones(ELEMENTS, dtype=torch.uint8, device=device)
    payload = ones, torch.zeros_like(ones)
    torch.equal(*payload)  # loads kernels of torch
    before = held()
    DeviceCopies(np.zeros(1, TILE), device)
    nbytes = {"first kernel": held() - before, "first communicator": use_nccl(None), "first message": use_nccl(payload)}
    again = use_nccl(payload)
    name, driver = machine.gpus()[0]
    document = {
        "what": "bytes of device memory that a process takes once",
        "date": date.today().isoformat(),
        "hardware": f"1 x {name}",
        "driver": driver,
        "versions": machine.versions("nccl4py", "cuda-core", nccl=".".join(map(str, torch.cuda.nccl.version()))),
        "bytes": nbytes,
        "bytes_of_a_second_communicator_with_a_message": again,
    }
    arguments.out.write_text(json.dumps(document, indent=1) + "\n")
    print(json.dumps(document, indent=1))


if __name__ == "__main__":
    main()
