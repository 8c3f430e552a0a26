# The same targets here and in CI. PYTHON is the interpreter of an environment with the test extra.
PYTHON ?= $(if $(wildcard .venv/bin/python),.venv/bin/python,python3)
BIN := $(dir $(shell command -v $(PYTHON)))
PYTEST := $(PYTHON) -m pytest -q

.PHONY: check lint types imports spelling unit mount crash crash-long acceptance loader loader-all loader-ci bench docs

check: lint types imports spelling unit ## everything that needs no mount, in about a minute

lint:
	$(PYTHON) -m ruff check .
	$(PYTHON) -m ruff format --check .

types:
	$(PYTHON) -m mypy

imports:
	$(BIN)lint-imports

spelling:
	$(BIN)codespell

unit:
	$(PYTEST) tests/unit tests/property tests/quant

mount: ## kernel behaviour, through real mounts
	$(PYTEST) tests/contract tests/mount tests/security

crash: ## power loss, kill -9, full disks, hostile bytes
	$(PYTEST) tests/crash tests/fuzz

crash-long: ## the same, every call of every flow and thousands of inputs: half an hour where TMPDIR is in memory, hours on a slow disk; says how much was tried
	FP8FS_LONG=1 $(PYTEST) tests/crash tests/fuzz tests/contract/test_view_machine.py tests/mount/test_endings.py

acceptance: ## what a user was promised, through the command line
	$(PYTEST) tests/acceptance tests/checkpoints

loader: ## real loaders on real mounts; each skips where its package is missing
	$(PYTEST) tests/loader

loader-all: ## install the engines, then every loader test; a missing engine fails
	scripts/engines install all
	FP8FS_REQUIRE=fuse,engines $(PYTEST) tests/loader

loader-ci: ## the named subset of loader-all: DLO with MiniMax-H3, one vLLM and one transformers model
	$(PYTEST) tests/loader -m engine_ci

bench: ## speed and memory against peers and the machine, written to docs/BENCHMARKS.md
	$(PYTHON) scripts/bench

docs: ## the examples in the documentation, run
	$(PYTEST) tests/docs
