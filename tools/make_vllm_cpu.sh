#!/usr/bin/env bash
# A virtual environment with vLLM and Megatron side by side on a CPU, for `make test-vllm` and golden-vs-real validation.
#
#   tools/make_vllm_cpu.sh VENV        PYTHON=... names the interpreter to start from, python3 otherwise
#
# MEGATRON_CORE and MEGATRON_BRIDGE name other releases than those that Python 3.11 gets: tools/make_newest_bridge.sh.
# vLLM is built from its source distribution without kernels (VLLM_TARGET_DEVICE=empty). Models construct and load
# weights; forward does not run. Needs Python 3.11 to 3.13 and PyPI; about 1.5 GB of disk.
set -euo pipefail

VLLM=0.32.0
ENGINE="vLLM $VLLM"
TORCH=2.13.0  # what vLLM 0.27 to 0.32 pin
MEGATRON_CORE=${MEGATRON_CORE:-0.16.1}
MEGATRON_BRIDGE=${MEGATRON_BRIDGE:-0.3.1}
source "$(dirname "${BASH_SOURCE[0]}")/cpu_environment.sh"

build_vllm() {
    # CARGO: without a Rust compiler the optional Rust frontend is left out.
    VLLM_VERSION_OVERRIDE=$VLLM VLLM_TARGET_DEVICE=empty CARGO=/bin/false "$python" -m pip wheel --quiet \
        --disable-pip-version-check --no-deps --no-build-isolation --no-binary vllm -w "$venv/wheels" "vllm==$VLLM"
}

if begins_anew; then
    install_torch "setuptools>=77.0.3,<81" wheel setuptools-scm setuptools-rust packaging jinja2
    if ! compgen -G "$venv/wheels/vllm-$VLLM-*.whl" > /dev/null; then
        say "$ENGINE from source, without kernels"
        build_vllm
    fi
    say "$ENGINE, Megatron-Core $MEGATRON_CORE, Megatron-Bridge $MEGATRON_BRIDGE and what they import"
    install --no-deps "$venv"/wheels/vllm-"$VLLM"-*.whl compressed-tensors==0.17.0 xgrammar==0.2.8 \
        "megatron-bridge==$MEGATRON_BRIDGE"
    # Not vLLM's own list, which brings servers and kernels: what constructing and loading models imports.
    install "torch==$TORCH" "megatron-core==$MEGATRON_CORE" "transformers>=5.16.1,<5.20" numpy accelerate \
        aiohttp apache-tvm-ffi cachetools cbor2 cloudpickle einops "fastapi>=0.133,<0.137" "llguidance>=1.7,<1.8" \
        loguru msgspec omegaconf openai oss-harmony partial-json-parser pillow prometheus_client psutil py-cpuinfo \
        pybase64 pydantic pyzmq regex requests rich urllib3 uvloop hypothesis pytest cryptography
    imports_together vllm_engine
fi
say "ready: $python"
