"""vLLM's plug-in: it makes `--weight-transfer-config '{"backend": "mcore_reshard"}'` known. Imports neither torch nor vLLM.

vLLM calls `register` in each process that it starts, by the entry point of the group `vllm.general_plugins`.
"""

from __future__ import annotations

import logging

BACKEND = "mcore_reshard"
_ENGINES = {  # vLLM's factory -> the class that it shall load, when it is first asked for it
    "WeightTransferEngineFactory": "ReshardEngine",
    "WeightTransferTrainerFactory": "ReshardTrainer",
}


def register() -> None:
    """Make the backend known to vLLM's factories. May be called again; never raises, so that no other vLLM is broken."""
    try:
        from vllm.distributed import weight_transfer

        for factory, name in _ENGINES.items():
            _register_once(getattr(weight_transfer, factory), name)
    except Exception as error:
        logging.getLogger(__name__).warning("vLLM does not take the weight transfer backend %r: %s", BACKEND, error)


def _register_once(factory: type, name: str) -> None:
    if BACKEND not in factory._registry:  # type: ignore[attr-defined]
        factory.register_engine(BACKEND, "mcore_reshard.integrations.vllm", name)  # type: ignore[attr-defined]
