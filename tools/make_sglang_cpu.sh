#!/usr/bin/env bash
# A virtual environment with SGLang and Megatron side by side on a CPU, for `make test-sglang`.
#
#   tools/make_sglang_cpu.sh VENV      PYTHON=... names the interpreter to start from, python3 otherwise
#
# SGLang is installed without its requirements, which pin CUDA kernels. Models construct and load weights; forward does
# not run. Packages that only forward imports are replaced by stand-ins (validation/engine/sglang_standins.py).
# Needs Python 3.11 to 3.13 and PyPI; about 1.5 GB of disk. A complete environment is reused as it is; an interrupted one
# is completed.
set -euo pipefail

SGLANG=0.5.23
TORCH=2.13.0  # SGLang pins 2.14.1; its model classes import and load on this one, which has a CPU build
MEGATRON_CORE=0.16.1
MEGATRON_BRIDGE=0.3.1

[ $# -eq 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
venv=$(cd "$1" && pwd)
python=$venv/bin/python
stamp=$venv/.complete
recipe=$(cksum < "${BASH_SOURCE[0]}")

say() { echo "[make_sglang_cpu] $*" >&2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.12 python3.13 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "SGLang $SGLANG wants Python 3.11, 3.12 or 3.13 here, and none is on PATH"
    exit 1
}

# Modules are compiled when first imported, which saves compiling all of them.
install() { "$python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-compile "$@"; }

install_torch() {
    # PyPI's torch for Linux brings CUDA; the CPU index is taken where it can be reached.
    local cpu=https://download.pytorch.org/whl/cpu
    local probe="import urllib.request as r; r.urlopen('$cpu/torch/', timeout=5)"
    if "$python" -c "$probe" 2> /dev/null; then
        install --extra-index-url "$cpu" "torch==$TORCH"
    else
        install "torch==$TORCH"
    fi
}

if [ "$(cat "$stamp" 2> /dev/null)" != "$recipe" ]; then
    rm -f "$stamp"
    if ! "$python" -m pip --version > /dev/null 2>&1; then
        base=$(find_python)
        "$base" -m venv --clear "$venv"
    fi

    say "torch $TORCH"
    install_torch

    say "SGLang $SGLANG, Megatron-Core $MEGATRON_CORE, Megatron-Bridge $MEGATRON_BRIDGE and what they import"
    # Kernels in triton are declared when modules are imported. The others would bring torch builds for CUDA.
    install --no-deps "sglang==$SGLANG" "megatron-bridge==$MEGATRON_BRIDGE" triton==3.8.0 compressed-tensors==0.18.0 \
        xgrammar==0.2.7 apache-tvm-ffi==0.1.11 openai-harmony==0.0.4
    # Not SGLang's own list, which brings servers and kernels: what constructing and loading models imports.
    install "torch==$TORCH" "megatron-core==$MEGATRON_CORE" "transformers>=5.16.1,<5.20" numpy accelerate \
        aiohttp anthropic cloudpickle datasets decorator distro easydict einops "fastapi>=0.133,<0.137" gguf \
        interegular ipython "llguidance>=1.7,<1.8" loguru msgspec omegaconf openai==2.8.0 orjson partial-json-parser \
        pillow prometheus_client psutil pybase64 pydantic python-multipart pyzmq regex requests rich scipy \
        sentencepiece setproctitle soundfile uvicorn uvloop hypothesis pytest
    install --no-deps --editable "$root"

    say "checking that SGLang and Megatron import together"
    "$python" -W ignore - << 'PYTHON'
from mcore_reshard.validation.engine import sglang_engine
from mcore_reshard.validation.trainer import te_standin

te_standin.install()
sglang_engine.prepare()
import megatron.bridge  # noqa: E402, F401
PYTHON
    echo "$recipe" > "$stamp"
fi
say "ready: $python"
