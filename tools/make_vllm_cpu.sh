#!/usr/bin/env bash
# A virtual environment with vLLM and Megatron side by side on a CPU, for `make test-vllm` and golden-vs-real validation.
#
#   tools/make_vllm_cpu.sh VENV        PYTHON=... names the interpreter to start from, python3 otherwise
#
# MEGATRON_CORE and MEGATRON_BRIDGE name other releases than those that Python 3.11 gets: tools/make_newest_bridge.sh.
# vLLM is built from its source distribution without kernels (VLLM_TARGET_DEVICE=empty). Models construct and load
# weights; forward does not run. Needs Python 3.11 to 3.13 and PyPI; about 1.5 GB of disk. A complete environment is
# reused as it is; an interrupted one is completed.
set -euo pipefail

VLLM=0.32.0
TORCH=2.13.0  # what vLLM 0.27 to 0.32 pin
MEGATRON_CORE=${MEGATRON_CORE:-0.16.1}
MEGATRON_BRIDGE=${MEGATRON_BRIDGE:-0.3.1}

[ $# -eq 1 ] || { echo "usage: $0 VENV" >&2; exit 2; }
root=$(cd "$(dirname "${BASH_SOURCE[0]}")/.." && pwd)
mkdir -p "$1"
venv=$(cd "$1" && pwd)
python=$venv/bin/python
stamp=$venv/.complete
recipe="$(cksum < "${BASH_SOURCE[0]}") $MEGATRON_CORE $MEGATRON_BRIDGE"

say() { echo "[make_vllm_cpu] $*" >&2; }

find_python() {
    local candidate
    for candidate in "${PYTHON:-python3}" python3 python3.12 python3.13 python3.11; do
        if "$candidate" -c 'import sys; sys.exit(not (3, 11) <= sys.version_info[:2] <= (3, 13))' 2> /dev/null; then
            echo "$candidate"
            return
        fi
    done
    say "vLLM $VLLM wants Python 3.11, 3.12 or 3.13, and none is on PATH"
    exit 1
}

# Modules are compiled when first imported, which saves compiling all of them.
install() { "$python" -m pip install --quiet --disable-pip-version-check --no-warn-conflicts --no-compile "$@"; }

install_torch() {
    # PyPI's torch for Linux brings CUDA; the CPU index is taken where it can be reached.
    local cpu=https://download.pytorch.org/whl/cpu
    local probe="import urllib.request as r; r.urlopen('$cpu/torch/', timeout=5)"
    if "$python" -c "$probe" 2> /dev/null; then
        install --extra-index-url "$cpu" "torch==$TORCH" "$@"
    else
        install "torch==$TORCH" "$@"
    fi
}

build_vllm() {
    # CARGO: without a Rust compiler the optional Rust frontend is left out.
    VLLM_VERSION_OVERRIDE=$VLLM VLLM_TARGET_DEVICE=empty CARGO=/bin/false "$python" -m pip wheel --quiet \
        --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm -w "$venv/wheels" "vllm==$VLLM"
}

if [ "$(cat "$stamp" 2> /dev/null)" != "$recipe" ]; then
    rm -f "$stamp"
    if ! "$python" -m pip --version > /dev/null 2>&1; then
        base=$(find_python)
        "$base" -m venv --clear "$venv"
    fi

    say "torch $TORCH and build tools"
    install_torch "setuptools>=77.0.3,<81" wheel setuptools-scm setuptools-rust packaging jinja2

    if ! compgen -G "$venv/wheels/vllm-$VLLM-*.whl" > /dev/null; then
        say "vLLM $VLLM from source, without kernels"
        build_vllm
    fi

    say "vLLM, Megatron-Core $MEGATRON_CORE, Megatron-Bridge $MEGATRON_BRIDGE and what they import"
    install --no-deps "$venv"/wheels/vllm-"$VLLM"-*.whl compressed-tensors==0.17.0 xgrammar==0.2.8 \
        "megatron-bridge==$MEGATRON_BRIDGE"
    # Not vLLM's own list, which brings servers and kernels: what constructing and loading models imports.
    install "torch==$TORCH" "megatron-core==$MEGATRON_CORE" "transformers>=5.16.1,<5.20" numpy accelerate \
        aiohttp apache-tvm-ffi cachetools cbor2 cloudpickle einops "fastapi>=0.133,<0.137" "llguidance>=1.7,<1.8" \
        loguru msgspec omegaconf openai oss-harmony partial-json-parser pillow prometheus_client psutil py-cpuinfo \
        pybase64 pydantic pyzmq regex requests rich urllib3 uvloop hypothesis pytest
    install --no-deps --editable "$root"

    say "checking that vLLM and Megatron import together"
    "$python" -W ignore - << 'PYTHON'
from mcore_reshard.validation.engine import vllm_engine
from mcore_reshard.validation.trainer import te_standin

te_standin.install()
vllm_engine.prepare()
import megatron.bridge  # noqa: E402, F401
PYTHON
    echo "$recipe" > "$stamp"
fi
say "ready: $python"
