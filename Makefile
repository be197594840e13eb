# Two commands do everything on a fresh machine: `make demo` and `make test`.
PYTHON ?= python3
BIN := .venv/bin
INSTALLED := .venv/.installed

.DEFAULT_GOAL := help

help:  ## this list
	@awk -F':.*## ' '/^[a-z-]+:.*## / {printf "make %-12s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

demo: $(INSTALLED)  ## install, train a small GPT on Python's own library for 89 seconds, generate, draw the loss
	rm -rf runs/demo
	$(BIN)/anyformer train gpt-mini --data stdlib --seconds 89 --steps 100000 --length 80 --batch-size 16 --optimizer muon --out runs/demo
	$(BIN)/anyformer generate runs/demo "def main(" --temperature 0.6 --top-p 0.95 --max-new-tokens 120 --seed 1

test: check test-fast laws  ## everything that CI runs

check: $(INSTALLED)  ## format, lint and types
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

test-fast: $(INSTALLED)  ## the tests, but for the slow lane
	$(BIN)/python -m pytest -n auto --ignore-glob="*/test_check_*.py"
	UNCHECKED=1 OMP_NUM_THREADS=1 NUMBA_NUM_THREADS=1 $(BIN)/python -m pytest -n auto tests/test_check_*.py

laws: $(INSTALLED)  ## hold a pairwise cover of all parts to the laws: a few minutes
	$(BIN)/anyformer check --all --cover

test-slow: $(INSTALLED)  ## the slow lane: tests that take minutes, and every legal combination of parts
	$(BIN)/python -m pytest -n auto -m slow
	$(BIN)/anyformer check --all

bench: $(INSTALLED)  ## speed, as ratios to peers measured in the same run; results in benchmarks/results
	$(BIN)/pip install -q -c constraints.txt -e .[bench]
	$(BIN)/python benchmarks/training.py --compile
	$(BIN)/python benchmarks/loss.py
	$(BIN)/python benchmarks/loading.py
	$(BIN)/python benchmarks/imports.py

bench-attention: $(INSTALLED)  ## long and sparse attention against its peers: some ten minutes; results in benchmarks/results
	$(BIN)/pip install -q -c constraints.txt -e .[bench]
	$(BIN)/python benchmarks/attention.py
	$(BIN)/python benchmarks/linear_attention.py

bench-decode: $(INSTALLED)  ## generation against llama.cpp and transformers: some ten minutes; results in benchmarks/results
	$(BIN)/pip install -q -c constraints.txt -e .[bench]
	$(BIN)/python benchmarks/decode.py

bench-check: $(INSTALLED)  ## what the laws find in transformers, x-transformers and torch; results in benchmarks/results
	$(BIN)/pip install -q -c constraints.txt -e .[findings]
	$(BIN)/python benchmarks/findings.py

docs: $(INSTALLED)  ## write what the code says of itself: docs/combinations.md, the laws in docs/check.md
	$(BIN)/python -m anyformer.check.document docs

format: $(INSTALLED)  ## format and mend what can be mended
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:  ## remove what was built, and runs/demo
	rm -rf .venv runs/demo build dist .pytest_cache .mypy_cache .ruff_cache

# torch comes first, and pinned: what depends on it then finds it there.
$(INSTALLED): pyproject.toml constraints.txt
	test -d .venv || $(PYTHON) -m venv .venv
	$(BIN)/pip install -q -c constraints.txt torch==2.13.0
	$(BIN)/pip install -q -c constraints.txt -e .[dev]
	touch $(INSTALLED)

.PHONY: help demo test check test-fast laws test-slow bench bench-attention bench-decode bench-check docs format clean
