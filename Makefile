# `make demo` and `make test` work on a fresh clone: Python 3.11 or newer, make, and the package registry.

PYTHON ?= $(shell for p in python3.13 python3.12 python3.11 python3 python; do \
	$$p -c 'import sys; sys.exit(sys.version_info < (3, 11))' 2>/dev/null && { echo $$p; break; }; done)
BENCH ?= benchmarks/bench_*.py
# A worker that has nothing left takes tests from another: one long file does not hold up the end.
SPREAD := --max-worker-restart 0 --dist worksteal
VENV := .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip --disable-pip-version-check --quiet

# The tests start hundreds of processes; without its compiled modules each would compile all of spotd anew.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help demo quick test system check format docs lengthy swarm frameworks clients bench soak clean

# The lines beginning with `##@` name the groups.
help: ## list what make can do
	@grep -E '^(##@|[a-z]+:.*##)' $(MAKEFILE_LIST) | sed -E 's/^##@ (.*)/\n\1/; s/^([a-z]+):[^#]*## /  \1\t/' | expand -t 14

##@ Try it
demo: $(VENV)/.demo ## watch real training processes being bought, taken away and resumed (two minutes, no account)
	@$(BIN)/spotd demo $(ARGS)

##@ Before a commit
quick: $(VENV)/.dev ## run the tests that start no process and wait for nothing (a minute)
	@$(BIN)/python -m pytest -n 2 $(SPREAD) -m quick $(ARGS)

check: $(VENV)/.dev ## lint, types, direction of imports
	@$(BIN)/ruff check .
	@$(BIN)/ruff format --check .
	@$(BIN)/mypy
	@$(BIN)/lint-imports

format: $(VENV)/.dev ## put the code into its format
	@$(BIN)/ruff check --fix .
	@$(BIN)/ruff format .

##@ Before a merge
test: $(VENV)/.dev ## run the test suite (several minutes on two cores)
	@echo "running the tests; long stories are 'make lengthy', longer swarms 'make swarm'"
	@$(BIN)/python -m pytest -n 6 $(SPREAD) --durations=25 --durations-min=1 -m "not lengthy and not slow and not system" $(ARGS)

system: $(VENV)/.dev ## the tests that need programs of the system: Chromium, Slurm, docker, PostgreSQL (those that lack one are skipped)
	@$(BIN)/python -m pytest -m system $(ARGS)
	@$(BIN)/python -m tests.system.engines.postgres $(BIN)/python -m pytest -m quick tests/unit/store

docs: $(VENV)/.dev ## build the documentation as a site, into site/; any warning is an error
	@NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open site/index.html, or serve it: $(BIN)/mkdocs serve"

##@ Longer
# PART=2/4 runs every fourth of them, from the third on.
PART ?= 0/1
lengthy: $(VENV)/.dev ## long stories and searches: jobs across three clouds, recorded weeks, rare worlds
	@$(BIN)/python -m pytest -n 4 $(SPREAD) --durations=10 --timeout=900 -m "lengthy and not slow and not system" --part $(PART) $(ARGS)

swarm: $(VENV)/.dev ## the longer random runs: many seeds, many kills, new examples of each property
	@HYPOTHESIS_PROFILE=search $(BIN)/python -m pytest --timeout=3600 -m "slow or hypothesis" $(ARGS)

frameworks: $(VENV)/.frameworks ## real checkpoints of real training frameworks, killed and resumed (installs torch)
	@$(BIN)/python -m pytest --timeout=1800 tests/integration/frameworks $(ARGS)

# Each client lives in an environment of its own in the user's cache: dstack wants other versions of what we use.
clients: $(VENV)/.dev ## drive other people's clients against the fake clouds (installs azure-mgmt-compute, dstack, openstacksdk, prime, vastai and verda)
	@$(BIN)/python -m pytest --timeout=1800 tests/unit/providers/*/test_*_client.py $(ARGS)

bench: $(VENV)/.dev ## print the benchmarks, as ratios against a peer in the same run
	@for b in $(BENCH); do echo "== $$b"; $(BIN)/python $$b $(ARGS) || exit 1; done

# HOURS=0.1 shows whether it works; what is flat is judged from half an hour on.
HOURS ?= 2
soak: $(VENV)/.dev ## a real daemon with 1,000 jobs for HOURS=2: memory, descriptors, threads and state must stay flat
	@$(BIN)/python benchmarks/soak.py --hours $(HOURS) $(ARGS)

##@ Housekeeping
clean: ## remove what make made
	rm -rf $(VENV) .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache

$(VENV)/.base:
	@test -n "$(PYTHON)" || { echo "error: no Python 3.11 or newer found; install one, or: make PYTHON=/path/to/python3"; exit 1; }
	@echo "making $(VENV) with $$($(PYTHON) --version)"
	@$(PYTHON) -m venv $(VENV) || { echo "error: cannot make $(VENV); on Debian and Ubuntu: apt-get install python3-venv"; exit 1; }
	@touch $@

$(VENV)/.demo: $(VENV)/.base pyproject.toml constraints.txt
	@echo "installing spotd and what the demo needs into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[demo]'
	@touch $@

$(VENV)/.dev: $(VENV)/.base pyproject.toml constraints.txt
	@echo "installing spotd and what its tests need into $(VENV)"
	@$(PIP) install -c constraints.txt -e '.[dev]'
	@touch $@ $(VENV)/.demo

# Its own environment would cost another gigabyte; with SPOTD_FRAMEWORKS_PYTHON an interpreter that has them is used.
$(VENV)/.frameworks: $(VENV)/.dev
	@test -n "$$SPOTD_FRAMEWORKS_PYTHON" || $(PIP) install -c constraints.txt -e '.[dev,frameworks]'
	@touch $@
