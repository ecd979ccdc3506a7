# Everything that a person does here, as one word. Needs make, bash and Python 3.11 or newer;
# whatever else is missing, tools/setup puts into .venv (or says which command does).

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
.ONESHELL:
# Targets that are asked for together run one after the other: they share .venv and the two cores.
.NOTPARALLEL:

# The interpreter that .venv is made from; empty means: python3.11, or any newer one in PATH.
PYTHON ?=
# More words for pytest, as in: make test PYTEST_ARGS="-k gang -x"
PYTEST_ARGS ?=
# More words for every benchmark, as in: make bench BENCH_ARGS=--quick
BENCH_ARGS ?=
# How many simulated clusters `make simulate` runs.
SEEDS ?= 200
# How many worker processes the demo has.
RANKS ?= 4

SETUP := tools/setup --python '$(PYTHON)'
BIN := .venv/bin
# What is checked shall not depend on who does it. The set-up alone has the whole environment: pip
# and apt may need much of it.
CLEAN = umask 022 && exec env -i PATH="$$PATH" HOME="$${HOME:-/}"
LOGS := rankwise-logs
DEMO = rankwise run --standalone --nproc-per-node $(RANKS) --tee 3 --log-dir $(LOGS) examples/train_digits.py
REHEARSAL = rankwise run --on sim --nnodes 8 --nproc-per-node 8 examples/train_digits.py
SIMULATED_ALL_REDUCE = rankwise sim bench ccl_allreduce
SIMULATED_MLP = rankwise sim bench tp_mlp --report $(LOGS)/simulated.html --trace $(LOGS)/simulated.json.gz

define SAY_ALL
echo "First .venv gets what the tests need, unless it has it: PyTorch, Ray, pytest and their like, in two minutes"
echo "or more; how much that is depends on the build of PyTorch that pip finds. Then all tests take about 25"
echo "minutes on two idle cores."
endef
define SAY_SOME
echo "First .venv gets pytest and its like, unless it has them: 30 MB, in about a minute. Tests that need PyTorch"
echo "are skipped unless it is there; a plain 'make test' installs it."
endef

.PHONY: help
help: ## List the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / { printf "  make %-13s %s\n", $$1, $$2 }' Makefile

.PHONY: demo
demo: ## Train on handwritten digits with 4 supervised processes, on simulated chips, and on 64 simulated ranks
	@$(SETUP) demo
	echo "$(RANKS) worker processes train a network on 1,797 handwritten digits and average their gradients:"
	echo "$$ $(DEMO)"
	$(BIN)/$(DEMO)
	echo
	echo "The simulator runs an all-reduce and a tensor-parallel MLP on modelled chips, in virtual time:"
	echo "$$ $(SIMULATED_ALL_REDUCE)"
	$(BIN)/$(SIMULATED_ALL_REDUCE)
	echo "$$ $(SIMULATED_MLP)"
	$(BIN)/$(SIMULATED_MLP)
	echo
	echo "The same program as at the beginning, on 64 simulated ranks; it reads the digits as well:"
	echo "$$ $(REHEARSAL)"
	exec $(BIN)/$(REHEARSAL)

# Four at a time on two cores: a third of the time tests wait, for a lease or a grace to end. CI, which
# nobody waits for, runs two, so that its slowest moments are those of a user's machine.
.PHONY: test
test: ## Run all tests (installs PyTorch for the comparisons); PYTEST_ARGS="-k gang" runs some (without)
	@$(if $(PYTEST_ARGS),$(SAY_SOME),$(SAY_ALL))
	$(SETUP) $(if $(PYTEST_ARGS),some-tests,test)
	$(CLEAN) $(BIN)/python -m pytest -n $(if $(CI),2,4) --dist loadfile --no-loadscope-reorder --durations=$(if $(CI),30,10) $(PYTEST_ARGS)

.PHONY: corpus-busy
corpus-busy: ## Run the programs with known culprits, and the healthy ones, beside four busy loops
	@$(SETUP) test
	$(CLEAN) RANKWISE_CORPUS_BUSY=4 $(BIN)/python -m pytest tests/corpus $(PYTEST_ARGS)

.PHONY: test-as-users
test-as-users: ## Run what touches PyTorch, Triton and pickled functions with the build for CUDA that users have (5 GB)
	@$(SETUP) some-tests
	exec tools/as_users $(PYTEST_ARGS)

.PHONY: test-clients
test-clients: ## Run trainers that nobody here wrote on simulated ranks (installs Lightning, accelerate, torchtitan, ...)
	@$(SETUP) test-clients
	$(CLEAN) $(BIN)/python -m pytest tests/clients $(PYTEST_ARGS)

.PHONY: slurm
slurm: ## Run the tests on a real SLURM, of three nodes in namespaces, and a spare one (as root; installs Debian's SLURM)
	@$(SETUP) slurm
	$(CLEAN) $(BIN)/python -m pytest -n 2 --durations=10 $(PYTEST_ARGS) tests/system/cluster/test_on_slurm.py

.PHONY: pythons
pythons: ## Run what depends on the interpreter under the system's Python, 3.12 and 3.13, if they are here
	@$(SETUP) test
	exec tools/pythons $(PYTEST_ARGS)

.PHONY: dist
dist: ## Build wheel and sdist into dist/, and try them in empty environments with every Python that is here
	@$(SETUP) dist
	$(CLEAN) tools/dist

.PHONY: docs
docs: ## Build the documentation's site into build/site, and say how to read it
	@$(SETUP) docs
	($(CLEAN) NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet)
	echo "to read it, with its search: $(BIN)/python -m http.server --bind localhost --directory build/site"

.PHONY: lint
lint: ## Check formatting, style, types and who imports whom
	@$(SETUP) lint
	status=0
	check() { echo "+ $$*"; ($(CLEAN) "$(BIN)/$$@") || status=1; }
	check ruff format --check .
	check ruff check .
	check mypy
	check lint-imports --no-logo
	exit $$status

.PHONY: format
format: ## Rewrite the code in the house's format and mend what can be mended by itself
	@$(SETUP) lint
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

.PHONY: bench
bench: ## Run the benchmarks, each against its peer (hours; leave the machine alone); BENCH_ARGS=--quick shows that they work (some ten minutes)
	@$(SETUP) test
	trap 'exit 130' INT
	failed=""
	for script in $$(grep -l '^if __name__ == "__main__"' benchmarks/*.py); do
	  echo "+ $$script $(BENCH_ARGS)"
	  $(BIN)/python "$$script" $(BENCH_ARGS) || failed+=" $$script"
	done
	[ -z "$$failed" ] || { echo "failed:$$failed" >&2; exit 1; }

.PHONY: simulate
simulate: ## Run SEEDS simulated clusters and nodes that are alone (20000: a night's worth); a failing seed is printed with its command
	@$(SETUP) test
	$(BIN)/rankwise sim cluster --standalone --random --seeds $(SEEDS)
	exec $(BIN)/rankwise sim cluster --random --seeds $(SEEDS)

.PHONY: clean
clean: ## Remove .venv and everything else that can be made again
	@rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis .import_linter_cache build dist $(LOGS)
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
