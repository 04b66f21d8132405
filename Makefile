# make demo / make test: each is enough on a fresh machine with Python 3.10 or newer.
PYTHON ?= $(firstword $(foreach p,python3 python3.13 python3.12 python3.11 python3.10,$(shell $(p) -c 'import sys; sys.version_info >= (3, 10) and print(sys.executable)' 2>/dev/null)))
VENV ?= .venv
VENV_VLLM ?= .venv-vllm
VENV_SGLANG ?= .venv-sglang
VENV_NEWEST ?= .venv-newest
VENV_FRAMEWORKS ?= .venv-frameworks
BIN := $(VENV)/bin
# Only used where the machine has no torch: a GPU machine keeps the build it has. Without a GPU the CPU build is taken
# from PyTorch's own index where that can be reached (PyPI's build for Linux brings CUDA).
TORCH ?= torch==2.13.0
CPU_INDEX := https://download.pytorch.org/whl/cpu
HAS_TORCH := $(shell $(PYTHON) -c 'import torch' 2>/dev/null && echo --system-site-packages)
# Megatron-Bridge is installed without its requirements: Transformer Engine, mamba-ssm and causal-conv1d build on CUDA only.
MEGATRON := megatron-core==0.16.1 "transformers<5" omegaconf einops accelerate rich
BRIDGE := megatron-bridge==0.3.1
# The demo: 4 training processes (TP2, EP2, PP2) to 2 generation processes (TP2).
DEMO := tiny-qwen3-moe --train tp=2,pp=2,ep=2 --gen tp=2

# `make test` runs these folders beside all others: mostly ranks that wait for each other.
HALF := session integrations
# `make test-fast` runs these folders beside all others.
FAST_HALF := copies transports proof attack
# `make test-newest` runs these.
NEWEST := $(addprefix tests/,$(addprefix validation/test_,adapters.py megatron_source.py te_standin.py trainer_trace.py validate.py \
	zoo.py) $(addprefix engine/test_,newest_bridge.py tiny_models.py) session/test_lora.py)

.PHONY: help setup setup-vllm demo test-fast test test-faults soak nightly test-vllm test-newest test-frameworks test-gpu test-memcheck validate-all validate-gpu lint docs docs-check types bench bench-gpu test-live clean

help:
	@sed -n 's/^\([a-z-]*\):.*## /  make \1\t/p' Makefile

setup: $(VENV)/.ready

$(VENV)/.ready: pyproject.toml Makefile
	@test -n "$(PYTHON)" || { echo "no Python 3.10 or newer found; set PYTHON=/path/to/python"; exit 1; }
	$(PYTHON) -m venv $(HAS_TORCH) $(VENV)
	$(BIN)/python -m pip install -q --disable-pip-version-check --upgrade pip
	$(BIN)/python -c 'import torch' 2>/dev/null || $(BIN)/python -m pip install -q "$(TORCH)" \
		$$(command -v nvidia-smi >/dev/null || $(BIN)/python -c "import urllib.request as r; r.urlopen('$(CPU_INDEX)/torch/', timeout=5); print('--extra-index-url $(CPU_INDEX)')" 2>/dev/null)
	$(BIN)/python -m pip install -q $(MEGATRON)
	$(BIN)/python -m pip install -q --no-deps $(BRIDGE)
	PYTHONWARNINGS=ignore $(BIN)/python -m pip install -q -e ".[dev]" "transformers<5"
	@touch $@

demo: $(VENV)/.ready ## refit a real tiny MoE model from 4 training processes to 2 generation processes
	@$(BIN)/mcore-reshard plan $(DEMO)
	@$(BIN)/mcore-reshard validate $(DEMO) --refits 2

test-fast: $(VENV)/.ready ## the default tests without those that start processes or import Megatron or transformers: for the inner loop
	@$(BIN)/python -m pytest --fast $(addprefix tests/,$(FAST_HALF)) & half=$$!; \
	$(BIN)/python -m pytest --fast $(addprefix --ignore=tests/,$(FAST_HALF)); rest=$$?; wait $$half && exit $$rest

test: $(VENV)/.ready ## the default tests, half of them beside the others: no GPU, no vLLM
	@mkdir -p build; $(BIN)/python -m pytest $(addprefix tests/,$(HALF)) > build/test-half.txt 2>&1 & half=$$!; \
	$(BIN)/python -m pytest $(addprefix --ignore=tests/,$(HALF)); rest=$$?; wait $$half; half=$$?; \
	cat build/test-half.txt; exit $$(( rest | half ))

test-faults: $(VENV)/.ready ## sessions of real processes in which something breaks, every cell; writes tools/results/faults.json (under 30 minutes on 2 cores)
	$(BIN)/python tools/fault_matrix.py --out tools/results/faults.json

soak: $(VENV)/.ready ## 2,000 refits of a tiny model: nothing may grow; writes tools/results/soak.json
	$(BIN)/python tools/soak.py --out tools/results/soak.json

nightly: $(VENV)/.ready ## what is too slow for every change: tests marked slow, and the attack with more damage
	$(BIN)/python -m pytest -m slow
	$(BIN)/python tools/mutation_score.py --out build/mutation_score.json
	$(BIN)/python tools/fault_matrix.py --out build/faults.json
	$(BIN)/python tools/soak.py --out build/soak.json
	$(MAKE) test-newest
	$(VENV_NEWEST)/bin/python -m pytest -m slow tests/engine/test_newest_bridge.py
	$(MAKE) test-frameworks
	$(VENV_FRAMEWORKS)/bin/python -m pytest -m slow tests/integrations/test_vllm.py tests/integrations/test_nemo_rl.py
	$(MAKE) test-vllm
	$(VENV_VLLM)/bin/python -m pytest -m slow tests/engine tests/tools/test_compare.py
	$(MAKE) test-sglang

setup-vllm: ## the environment of test-vllm: real vLLM on CPU, built on first use (8 minutes)
	PYTHON=$(PYTHON) bash tools/make_vllm_cpu.sh $(VENV_VLLM)
	PYTHONWARNINGS=ignore $(VENV_VLLM)/bin/python -m pip install -q --no-deps -e .

test-vllm: setup-vllm ## the tests against real vLLM on CPU
	@mkdir -p build; $(VENV_VLLM)/bin/python -m pytest tests/engine/test_[a-r]*.py > build/test-vllm-half.txt 2>&1 & first=$$!; \
	$(VENV_VLLM)/bin/python -m pytest tests/engine/test_[s-z]*.py tests/trainers; rest=$$?; wait $$first; first=$$?; \
	cat build/test-vllm-half.txt; exit $$(( rest | first ))

test-newest: ## the newest Megatron-Core and Megatron-Bridge, beside vLLM (Python 3.12; builds it on first use, 4 minutes)
	PYTHON=$(PYTHON) bash tools/make_newest_bridge.sh $(VENV_NEWEST)
	$(VENV_NEWEST)/bin/python -m pytest $(NEWEST)

test-frameworks: ## the adapters through the frameworks' own classes on a CPU (Python 3.12; builds them on first use; NeMo-RL and AReaL want paths)
	PYTHON=$(PYTHON) bash tools/make_frameworks_cpu.sh $(VENV_FRAMEWORKS)
	$(VENV_FRAMEWORKS)/bin/python -m pytest -rs $(addprefix tests/integrations/test_,verl_engine.py verl.py skyrl.py ray.py nemo_rl.py xferdtensor.py areal.py)

test-sglang: ## the tests against real SGLang on CPU (installs it on first use, about 3 minutes)
	PYTHON=$(PYTHON) bash tools/make_sglang_cpu.sh $(VENV_SGLANG)
	PYTHONWARNINGS=ignore $(VENV_SGLANG)/bin/python -m pip install -q --no-deps -e .
	$(VENV_SGLANG)/bin/python -m pytest tests/engine_sglang tests/integrations/test_sglang.py tests/integrations/test_slime.py tests/tools/test_compare.py

test-gpu: ## the tests that need CUDA devices, with the torch that is on the machine
	$(PYTHON) -m pytest -m gpu -rs

test-memcheck: ## the copy kernel under compute-sanitizer (cuda.bindings asks the driver for symbols that it may lack)
	compute-sanitizer --tool memcheck --report-api-errors no --error-exitcode 9 $(PYTHON) -m pytest -m gpu tests/copies/test_device_copies.py

validate-gpu: ## golden vs real on the GPUs, every family and mesh that fits; writes tools/results/validate-xN.json
	PYTHONPATH=. $(PYTHON) tools/validate_gpus.py --out tools/results/validate-x$$($(PYTHON) -c 'import torch; print(torch.cuda.device_count())').json

test-live: ## refits into vLLM engines that generate, on this machine's GPUs (needs vLLM there); writes tools/results/live-xN.json
	$(PYTHON) tools/validate_live.py --out tools/results/live-x$$(nvidia-smi -L | wc -l).json

validate-all: $(VENV)/.ready ## golden vs real over every family and mesh
	$(BIN)/python -m pytest -m "slow or not slow" tests/validation/test_validate.py tests/validation/test_validate_fp8.py

lint: $(VENV)/.ready ## ruff, and that the pages hold: data, figures, links (no code runs)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python tools/docs.py --check --no-run

docs: $(VENV)/.ready ## fill the pages from data, draw figures, run their code, check links
	$(BIN)/python tools/docs.py

docs-check: $(VENV)/.ready ## the same, but change nothing and fail if a page is stale
	$(BIN)/python tools/docs.py --check

types: $(VENV)/.ready ## mypy
	$(BIN)/mypy -p mcore_reshard
	MYPYPATH=tools $(BIN)/mypy --explicit-package-bases tools

bench: $(VENV)/.ready ## planning time and memory; writes tools/results/planner.json
	$(BIN)/python tools/bench_planner.py

bench-gpu: ## refits side by side on this machine's GPUs, with its torch; writes tools/results/refit-x*.json (BENCH="--nemo-rl PATH")
	PYTHONPATH=. $(PYTHON) tools/bench_refit.py $(BENCH)

clean: ## remove what the targets made
	rm -rf build dist $(VENV) $(VENV_VLLM) $(VENV_SGLANG) $(VENV_NEWEST) $(VENV_FRAMEWORKS) .pytest_cache .mypy_cache .ruff_cache
