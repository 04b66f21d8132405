"""Which transport a session takes, and what it says when there is none."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mcore_reshard.kernels.errors import TransportUnavailable
from mcore_reshard.kernels.transports import registry
from mcore_reshard.kernels.transports.registry import TRANSPORT_VARIABLE, register, resolve, transports


@pytest.fixture(autouse=True)
def own_registry(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = {name: registry._transports[name] for name in ("gloo", "golden")}
    monkeypatch.setattr(registry, "_transports", kept)
    monkeypatch.setattr(registry, "TRANSPORTS", [])
    monkeypatch.delenv(TRANSPORT_VARIABLE, raising=False)


def test_auto_takes_gloo_for_cpu_tensors() -> None:
    assert resolve("auto", "cpu").name == "gloo"


def test_one_variable_forces_golden(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(TRANSPORT_VARIABLE, "golden")
    assert resolve("gloo", "cpu").name == "golden"
    assert resolve("auto", "cuda").name == "golden"


def test_auto_never_falls_back_to_golden() -> None:
    with pytest.raises(TransportUnavailable, match=r"no transport can move cuda tensors here \(gloo: it moves cpu"):
        resolve("auto", "cuda")


def test_unknown_and_unfit_transports_say_why() -> None:
    with pytest.raises(TransportUnavailable, match="unknown transport 'pigeon'; known: auto, gloo, golden"):
        resolve("pigeon", "cpu")
    with pytest.raises(TransportUnavailable, match="gloo cannot be used: it moves cpu tensors, these are on cuda"):
        resolve("gloo", "cuda")


def test_an_unavailable_transport_is_not_taken_and_says_what_is_missing() -> None:
    register(replace(transports()[0], name="fast", unavailable_reason=lambda: "the fast library is not installed"))
    assert resolve("auto", "cpu").name == "gloo"
    with pytest.raises(TransportUnavailable, match="fast cannot be used: the fast library is not installed"):
        resolve("fast", "cpu")


@pytest.mark.parametrize(
    ("name", "packages"),
    [("direct", "cuda-core and cuda-bindings"), ("nccl", "nccl4py and cuda-core and cuda-bindings")],
)
def test_transports_on_gpus_name_every_package_that_is_missing(
    monkeypatch: pytest.MonkeyPatch, name: str, packages: str
) -> None:
    transport = {"direct": registry._DIRECT, "nccl": registry._NCCL}[name]
    monkeypatch.setattr("torch.cuda.is_available", lambda: True)
    monkeypatch.setattr("mcore_reshard.kernels.host.find_spec", lambda module: None)
    install = "from a clone of mcore-reshard: pip install '.[gpu]'"
    assert transport.unavailable_reason() == f"{packages} not installed; {install}"
    monkeypatch.setattr(
        "mcore_reshard.kernels.host.find_spec", lambda module: None if module == "cuda.bindings" else object()
    )
    assert transport.unavailable_reason() == f"cuda-bindings not installed; {install}"


def test_names_are_registered_once() -> None:
    with pytest.raises(ValueError, match="'gloo' is already registered"):
        register(transports()[0])
