#!/usr/bin/env bash
# A virtual environment with SGLang and Megatron side by side on a CPU, for `make test-sglang`.
#
#   tools/make_sglang_cpu.sh VENV      PYTHON=... names the interpreter to start from, python3 otherwise
#
# SGLang is installed without its requirements, which pin CUDA kernels. Models construct and load weights; forward does
# not run. Packages that only forward imports are replaced by stand-ins (validation/standins.py).
# Needs Python 3.11 to 3.13 and PyPI; about 1.5 GB of disk.
set -euo pipefail

ENGINE="SGLang 0.5.23"
TORCH=2.13.0  # SGLang pins 2.14.1; its model classes import and load on this one, which has a CPU build
MEGATRON_CORE=0.16.1
MEGATRON_BRIDGE=0.3.1
source "$(dirname "${BASH_SOURCE[0]}")/cpu_environment.sh"

if begins_anew; then
    install_torch
    say "$ENGINE, Megatron-Core $MEGATRON_CORE, Megatron-Bridge $MEGATRON_BRIDGE and what they import"
    # Kernels in triton are declared when modules are imported. The others would bring torch builds for CUDA.
    install --no-deps "sglang==${ENGINE#* }" "megatron-bridge==$MEGATRON_BRIDGE" triton==3.8.0 compressed-tensors==0.18.0 \
        xgrammar==0.2.7 apache-tvm-ffi==0.1.11 openai-harmony==0.0.4
    # Not SGLang's own list, which brings servers and kernels: what constructing and loading models imports.
    install "torch==$TORCH" "megatron-core==$MEGATRON_CORE" "transformers>=5.16.1,<5.20" numpy accelerate \
        aiohttp anthropic cloudpickle datasets decorator distro easydict einops "fastapi>=0.133,<0.137" gguf \
        interegular ipython "llguidance>=1.7,<1.8" loguru msgspec omegaconf openai==2.8.0 orjson partial-json-parser \
        pillow prometheus_client psutil pybase64 pydantic python-multipart pyzmq regex requests rich scipy cryptography \
        sentencepiece setproctitle soundfile uvicorn uvloop hypothesis pytest ray==2.60.0 httpx tqdm
    imports_together sglang_engine
fi
say "ready: $python"
