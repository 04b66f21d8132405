"""One process of a live case: `python -m live.process KIND JOB.json`, which writes JOB.result.json or ends with an error."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from .cases import Case


def main() -> None:
    kind, file = sys.argv[1], Path(sys.argv[2])
    job = json.loads(file.read_text())
    case, root = Case(**job["case"]), Path(job["root"])
    result = _run(kind, case, root, job)
    partial = file.with_suffix(".partial")
    partial.write_text(json.dumps(result))
    partial.rename(file.with_suffix(".result.json"))


def _run(kind: str, case: Case, root: Path, job: dict[str, Any]) -> Any:
    if kind == "load":
        from .engine import load

        return load(case, job["checkpoint"], root)
    if kind == "refit":
        from .engine import refit

        return refit(case, root, job["store"])

    import torch

    cpu = os.environ.get("LIVE_DEVICE") == "cpu"
    if kind == "checkpoints":
        from .checkpoints import write_checkpoints

        return write_checkpoints(root, case, torch.device("cpu" if cpu else "cuda"))
    from .trainer import train

    device = torch.device("cpu") if cpu else torch.device("cuda", job["rank"])
    return train(case, job["rank"], root, job["store"], device)


if __name__ == "__main__":
    main()
