"""`mcore-reshard doctor`: what this machine can run, and why not the rest.

Versions are read from package metadata; of the packages looked for, only torch is imported.
"""

from __future__ import annotations

import argparse
import platform
import re
import sys
from collections.abc import Iterator
from importlib import metadata
from itertools import combinations
from typing import Any

from rich.console import RenderableType

from mcore_reshard import __version__
from mcore_reshard.kernels.host import is_importable

from .render import Cell, facts, print_report, size, styled, table, verdict

# distribution -> (module that shows it is really there, what it is for, extra that installs it)
_PACKAGES = {
    "numpy": ("numpy", "planning", None),
    "torch": ("torch", "moving bytes", None),
    "megatron-core": ("megatron.core", "the trainer", "megatron"),
    "megatron-bridge": ("megatron.bridge", "misc route, golden, validation", "megatron"),
    "transformers": ("transformers", "Megatron-Bridge", "megatron"),
    "transformer-engine": ("transformer_engine", "trainers on CUDA, fp8", "fp8"),
    "vllm": ("vllm", "the engine", "vllm"),
    "sglang": ("sglang", "the engine", "sglang"),
    "nccl4py": ("nccl", "the nccl transport", "gpu"),
    "cuda-core": ("cuda.core", "copy kernels of the direct and nccl transports", "gpu"),
    "cuda-bindings": ("cuda.bindings", "GPU memory of the direct and nccl transports", "gpu"),
    "plotly": ("plotly", "charts of a report", "report"),
}


def run(args: argparse.Namespace) -> int:
    requirements = _wanted_versions()
    packages: list[dict[str, Any]] = [
        {"name": n, "version": _version(n, module), "wanted": requirements.get(n), "purpose": purpose, "extra": extra}
        for n, (module, purpose, extra) in _PACKAGES.items()
    ]
    has = {package["name"] for package in packages if package["version"]}
    cuda = _cuda() if "torch" in has else {"available": False, "reason": "torch is not installed"}
    transports = _transports() if "torch" in has else []
    report = {
        "mcore_reshard": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "packages": packages,
        "cuda": cuda,
        "transports": transports,
        "auto": _auto(transports, cuda),
        "commands": _commands(has, bool(cuda["available"])),
    }
    print_report(args.json, report, _tables(report))
    return 0


def _version(name: str, module: str) -> str | None:
    try:
        return metadata.version(name) if is_importable(module) else None
    except metadata.PackageNotFoundError:
        return "unknown version"


def _wanted_versions() -> dict[str, str]:
    """The versions of other packages that this one requires, from its own metadata; none if it is not installed."""
    try:
        requirements = metadata.requires("mcore-reshard") or []
    except metadata.PackageNotFoundError:
        return {}
    matches = (re.match(r"([A-Za-z0-9._-]+)(?:\[[^\]]*\])?\s*([^;]*)", requirement) for requirement in requirements)
    return {m[1].lower().replace("_", "-"): m[2].strip() for m in matches if m and m[2].strip()}


def _cuda() -> dict[str, Any]:
    import torch

    if not torch.cuda.is_available():
        built = torch.version.cuda
        reason = f"torch is built for CUDA {built} and finds no device" if built else "this torch is built without CUDA"
        return {"available": False, "reason": reason, "devices": []}
    count = torch.cuda.device_count()
    devices = []
    for device in range(count):
        gpu = torch.cuda.get_device_properties(device)
        peers = [p for p in range(count) if p != device and torch.cuda.can_device_access_peer(device, p)]
        about = {"name": gpu.name, "memory_bytes": gpu.total_memory, "capability": f"{gpu.major}.{gpu.minor}"}
        devices.append({"device": device, **about, "peer_access": peers})
    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    return {"available": True, "cuda": torch.version.cuda, "nccl": nccl, "devices": devices}


def _transports() -> list[dict[str, Any]]:
    from mcore_reshard.kernels.transports.registry import transports

    return [
        {"name": t.name, "ok": reason is None, "reason": reason, "devices": sorted(t.devices), "reach": t.reach}
        for t, reason in ((transport, transport.unavailable_reason()) for transport in transports())
    ]


def _auto(transports: list[dict[str, Any]], cuda: dict[str, Any]) -> list[str]:
    """The transport that `auto` chooses here, and why."""
    reasons = {row["name"]: row["reason"] for row in transports}
    usable = [name for name, reason in reasons.items() if reason is None]
    lines = ["CPU tensors: gloo, the only transport that moves them point to point"] if "gloo" in usable else []
    if not cuda["available"]:
        return [*lines, "CUDA tensors: none, there is no CUDA device"]
    if "direct" not in usable:
        nccl, none = f"nccl for every pair of ranks (direct: {reasons['direct']})", f"none ({reasons['auto']})"
        return [*lines, f"CUDA tensors: {nccl if 'nccl' in usable else none}"]
    peers = {device["device"]: device["peer_access"] for device in cuda["devices"]}
    apart = [f"{device}-{other}" for device, other in combinations(peers, 2) if other not in peers[device]]
    elsewhere = "nccl" if "nccl" in usable else f"nothing (nccl: {reasons['nccl']})"
    within = f"direct, except between GPUs {', '.join(apart)}, which cannot access each other" if apart else "direct"
    rest = "to and from other hosts"
    return [*lines, f"CUDA tensors: {within}, for pairs of ranks on this host; {elsewhere} {rest}"]


def _commands(has: set[str], cuda: bool) -> list[dict[str, Any]]:
    """Which commands run here, and what the others lack."""
    lacking = [name for name in ("torch", "megatron-core", "megatron-bridge", "transformers") if name not in has]
    why_not = f"{', '.join(lacking)} not installed; from a clone: pip install '.[megatron]'" if lacking else ""
    if not lacking and not sys.platform.startswith("linux"):
        why_not = "ranks are forked processes, which only Linux is known to carry"
    engines = [name for name, (_, purpose, _) in _PACKAGES.items() if purpose == "the engine"]
    why_no_traces = why_not or ("" if has & {*engines} else f"none of {', '.join(engines)} is installed")
    slices = "plain slices of the golden tensors (vLLM is not installed)"
    destination = f"destination: {'a real vLLM model' if 'vllm' in has else slices}"
    trainer = "gloo: a Megatron model on the CPU, its Transformer Engine modules a parameters-only stand-in"
    if cuda and "transformer-engine" in has:
        trainer += "; direct, nccl, auto: one on the GPUs, with the real Transformer Engine, into plain slices"
    elif cuda:
        trainer += "; direct, nccl, auto: the same, copied to the GPUs (transformer-engine is not installed)"
    torch, charts = "torch" in has, "plotly" in has
    no_charts = "plotly is not installed; from a clone: pip install '.[report]'"
    return [
        {"command": "plan, show, explain, simulate, advise", "ok": True, "detail": "need numpy and rich only"},
        {"command": "report", "ok": charts, "detail": "needs numpy, rich and plotly only" if charts else no_charts},
        {
            "command": "plan --traced",
            "ok": not why_no_traces,
            "detail": why_no_traces or "runs the loaders that are here",
        },
        {"command": "validate", "ok": not why_not, "detail": why_not or f"{destination}; source with {trainer}"},
        {"command": "store", "ok": True, "detail": "needs Python only"},
        {"command": "watch", "ok": torch, "detail": "needs torch only" if torch else "torch is not installed"},
    ]


# --- text


def _tables(report: dict[str, Any]) -> Iterator[RenderableType]:
    yield facts((name, report[name.lower().replace("-", "_")]) for name in ("mcore-reshard", "Python", "platform"))
    rows: list[list[Cell]] = []
    for package in report["packages"]:
        version = package["version"] or styled("missing", "yellow")
        missing = package["extra"] and not package["version"]
        hint = f"from a clone: pip install '.[{package['extra']}]'" if missing else ""
        rows.append([package["name"], version, package["wanted"] or "any", package["purpose"], hint])
    yield table("Packages", "package, version, wanted, for, ", rows)
    cuda = report["cuda"]
    if cuda["available"]:
        gpus = []
        for gpu in cuda["devices"]:
            peers = ", ".join(map(str, gpu["peer_access"])) or "none"
            gpus.append([gpu["device"], gpu["name"], size(gpu["memory_bytes"]), gpu["capability"], peers])
        columns = ">device, name, >memory, capability, peer access to"
        yield table(f"CUDA {cuda['cuda']}, NCCL {cuda['nccl']}", columns, gpus)
    else:
        yield facts([("CUDA", f"none: {cuda['reason']}")])
    rows = [
        [row["name"], verdict(row["ok"], row["reason"] or "", bad="no"), ", ".join(row["devices"]), row["reach"]]
        for row in report["transports"]
        if row["name"] != "auto"  # the lines below say what auto comes to
    ]
    yield table("Transports", "transport, , tensors on, reach", rows)
    if report["auto"]:
        yield facts(("" if number else "auto", line) for number, line in enumerate(report["auto"]))
    rows = [[row["command"], verdict(row["ok"], row["detail"], bad="no")] for row in report["commands"]]
    yield table("Commands", "command, ", rows)
