# Everything runs in .venv, which the first command makes; see CONTRIBUTING.md.

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin

SEED := $(or $(SEED),$(shell od -An -N4 -tu4 /dev/urandom | tr -d ' '))

.PHONY: help demo bench reproduce real-gguf test soak lint types clean

help: ## list what can be made
	@grep -E '^[a-z-]+:.*##' Makefile | sed 's/:.*## /\t/' | expand -t 12

$(VENV)/installed: pyproject.toml ci/constraints.txt
	@echo "installing into $(VENV); this takes a minute"
	$(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet --upgrade pip
	$(BIN)/python -m pip install --quiet --constraint ci/constraints.txt --editable '.[test,lint]'
	@touch $@

demo: $(VENV)/installed ## write a small checkpoint, build it, change one layer, build again
	PATH="$(CURDIR)/$(BIN):$$PATH" sh ci/demo

bench: $(VENV)/installed ## measure builds, links and plans; see docs/performance.md
	$(BIN)/python ci/bench $(ARGS)

reproduce: $(VENV)/installed ## build every reference case again under other circumstances; expect the same bytes
	$(BIN)/python ci/reproduce $(ARGS)

real-gguf: $(VENV)/installed ## compile llama.cpp, and check what is made of the files that it writes
	$(BIN)/python ci/real_gguf $(ARGS)

test: $(VENV)/installed ## run the tests
	$(BIN)/python -m pytest -q -n auto $(ARGS)

soak: $(VENV)/installed ## 10,000 random edits, builds, kills and damages against clean builds; SEED=N repeats one
	@echo "SEED=$(SEED)"
	BUILD_MACHINE_SEED=$(SEED) BUILD_MACHINE_RUNS=100 BUILD_MACHINE_STEPS=100 \
		$(BIN)/python -m pytest -q -n auto $(ARGS) tests/test_build_machine.py

lint: $(VENV)/installed ## ruff
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/installed ## mypy
	$(BIN)/mypy

clean: ## remove what make made
	rm -rf $(VENV) demo
