# `make demo` and `make test` work from a bare clone: all they need is Linux, make, a C compiler, and Python 3.11 or 3.12 with
# its headers. Everything is installed into .venv, once; a changed pyproject.toml installs again.

PYTHON ?= $(shell command -v python3.11 || command -v python3.12 || command -v python3)
VENV := .venv
BIN := $(VENV)/bin
INSTALLED := $(VENV)/installed
EXTRAS := cpu,dev
OVERRIDES := deploy/cpu-overrides.txt
# The page's libraries, and axe-core for its tests.
MODULES := web/node_modules/.package-lock.json
SLOW := slow or matrix or e2e or chaos or compose or gpu or hosts or web
# Tests that run side by side: two workers for the cores, and two for the tests that mostly wait.
WORKERS ?= 4
# Torch's stores look up by name whoever connects, and a name server that drops a question costs five seconds by default.
RESOLVER := RES_OPTIONS="timeout:1 attempts:1"
PYTEST := $(RESOLVER) $(BIN)/python -m pytest --numprocesses $(WORKERS) --durations 15 --durations-min 5

# uv does not read pip's setting for a folder of wheels. Without one, torch's CPU build comes from its own index.
export UV_FIND_LINKS ?= $(PIP_FIND_LINKS)
ifeq ($(strip $(UV_FIND_LINKS)),)
export UV_TORCH_BACKEND ?= cpu
endif

# Hundreds of processes import torch: compiling its modules anew in each would take most of their time. The first ones
# start at the same time, and each would compile the same modules.
unexport PYTHONDONTWRITEBYTECODE
COMPILED := torch transformers vllm openai megatron peft sympy

# Nothing here looks for a display, a model hub or a place to report usage to.
export HF_HUB_OFFLINE ?= 1
export MPLBACKEND ?= Agg
export TOKENIZERS_PARALLELISM ?= false
export VLLM_NO_USAGE_STATS ?= 1

.PHONY: help docs install demo test tests test-all tests-all test-fast test-compose test-hosts test-cluster test-environments test-megatron test-web web lint style types format proto bench bench-learning chaos clean
.DEFAULT_GOAL := help

help: ## this list
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/^([a-z-]+):.*## /  make \1	/' | expand -t 22

install: $(INSTALLED) ## everything for this machine's CPU, into .venv

$(INSTALLED): pyproject.toml $(OVERRIDES)
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info[:2] not in ((3, 11), (3, 12)))' \
		|| { echo "Python 3.11 or 3.12 is needed; name it: make PYTHON=/path/to/python3.11"; exit 1; }
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python -m pip install --quiet uv
	$(BIN)/uv pip install --quiet --python $(BIN)/python --override $(OVERRIDES) -e ".[$(EXTRAS)]" \
		|| { echo "Where a build failed: some packages come as source and want gcc, g++ and Python's headers"; exit 1; }
	$(BIN)/python -m compileall -qq -j 0 $(addprefix $(VENV)/lib/python3*/site-packages/,$(COMPILED)) || true
	@touch $@

demo: $(INSTALLED) ## a small model learns through all three services (BACKEND=megatron, DEMO="--seed 1 --replicas 2")
	$(BIN)/python -m millrace.demo $(if $(BACKEND),--backend $(BACKEND)) $(DEMO)

test: style ## lint, types and tests: every claim, and of each matrix a covering part (TESTS=tests/rl, WORKERS=4 at a time)
	@$(MAKE) --no-print-directory --jobs 2 types tests

tests: $(INSTALLED)
	$(PYTEST) -m "not compose and not hosts and not web and not matrix" $(TESTS)

test-all: style ## before a release: `make test`, and each architecture, topology and fault of every matrix with real engines
	@$(MAKE) --no-print-directory --jobs 2 types tests-all

tests-all: $(INSTALLED)
	$(PYTEST) --hypothesis-profile default -m "not compose and not hosts and not web" $(TESTS)

# One thread a process: with tiny models, threads beyond the cores only wait for each other.
tests tests-all test-fast: export OMP_NUM_THREADS ?= 1

test-fast: $(INSTALLED) ## a minute or two: starts no service, no rank, no engine
	$(PYTEST) -m "not ($(SLOW))" $(TESTS)

test-compose: $(INSTALLED) ## the containers: builds them, trains, scales, kills (needs Docker)
	$(if $(strip $(UV_FIND_LINKS)),cp -u $(UV_FIND_LINKS)/*.whl deploy/wheels/)
	TORCH_BACKEND=$(UV_TORCH_BACKEND) $(BIN)/python -m pytest -m compose $(TESTS)

test-hosts: export OMP_NUM_THREADS ?= 1
test-hosts: $(INSTALLED) ## the demo's job over six hosts of network namespaces, with cut and slow links (needs root; minutes)
	$(RESOLVER) $(BIN)/python -m pytest -m hosts --capture=no $(or $(TESTS),tests/hosts)

test-cluster: export OMP_NUM_THREADS ?= 1
test-cluster: $(INSTALLED) ## a job on a real Slurm (Debian: slurmctld slurmd slurm-client munge; root), the chart by Helm (HELM=/path/to/helm)
	$(RESOLVER) $(BIN)/python -m pytest $(or $(TESTS),tests/cluster)

test-web: $(INSTALLED) $(MODULES) ## the page in headless Chromium (needs Node, and chromium or CHROMIUM=/path/to/one)
	@command -v "$${CHROMIUM:-chromium}" > /dev/null || { echo "chromium is missing: apt-get install chromium, or name one in CHROMIUM"; exit 1; }
	$(BIN)/python -c 'import playwright' 2> /dev/null || $(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[web-tests]"
	$(RESOLVER) $(BIN)/python -m pytest -m web $(or $(TESTS),tests/web)

$(MODULES): web/package.json
	@command -v npm > /dev/null || { echo "npm is missing: install Node 20 or later"; exit 1; }
	cd web && npm install --no-package-lock --no-fund --no-audit
	@touch $@

web: $(INSTALLED) $(MODULES) ## builds the page of web/ for the coordinator, and the script of reports for millrace/report (needs Node 20 or later)
	$(BIN)/python web/rest_types.py > web/src/rest.ts
	cd web && npm run build

# Packages of environments that clash with the engines have virtual environments of their own.
HOSTS := .environments
$(HOSTS)/%: $(INSTALLED)
	$(BIN)/python -m venv $@
	$@/bin/pip install --quiet $(PACKAGE_$*)
PACKAGE_openenv := openenv-core==0.3.0
PACKAGE_verifiers := verifiers==0.4.0 openenv==0.4.1 uv

test-environments: $(HOSTS)/openenv $(HOSTS)/verifiers ## environments of others: OpenEnv, verifiers (installs them into .environments)
	MILLRACE_OPENENV_PYTHON=$(CURDIR)/$(HOSTS)/openenv/bin/python \
	MILLRACE_VERIFIERS_PYTHON=$(CURDIR)/$(HOSTS)/verifiers/bin/python \
	$(BIN)/python -m pytest $(or $(TESTS),$(addprefix tests/services/rollout/,environments/test_openenv.py sessions/test_verifiers.py) $(addprefix tests/e2e/agents/test_,tool_servers.py verifiers_host.py))

# Megatron-Core 0.19 needs Python 3.12. pyenv finds one that is not its default by PYENV_VERSION.
MEGATRON := $(HOSTS)/megatron
$(MEGATRON)/installed: pyproject.toml $(OVERRIDES) | $(INSTALLED)
	PYENV_VERSION=3.12 $(BIN)/uv venv --quiet --clear --no-python-downloads --python 3.12 $(MEGATRON)
	$(BIN)/uv pip install --quiet --python $(MEGATRON)/bin/python --override $(OVERRIDES) -e ".[$(EXTRAS)]"
	@touch $@

test-megatron: export OMP_NUM_THREADS ?= 1
test-megatron: export MILLRACE_OTHER_MEGATRON ?= $(CURDIR)/$(BIN)/python
test-megatron: $(MEGATRON)/installed ## the trainer's tests with Megatron-Core 0.19 (needs Python 3.12; installs it into .environments)
	$(RESOLVER) $(MEGATRON)/bin/python -m pytest --numprocesses $(WORKERS) --durations 5 -m "not matrix" \
	  $(or $(TESTS),$(addprefix tests/services/trainer/,backends/megatron checkpoints ranks))

lint: style types ## ruff, mypy, and whether the stubs are those of proto/

style: $(INSTALLED)
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/python proto/generate.py --check
	$(BIN)/python proto/compatible.py

types: $(INSTALLED)
	$(BIN)/mypy

format: $(INSTALLED) ## what ruff can fix by itself
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

proto: $(INSTALLED) ## generates the stubs from proto/
	$(BIN)/python proto/generate.py

bench: $(INSTALLED) ## measures the coordinator and a replica on this machine, as BENCHMARKS.md tells
	$(BIN)/python -m benchmarks.coordinator
	$(BIN)/python -m benchmarks.replica

bench-learning: $(INSTALLED) ## the demo's task with seven algorithms, three seeds each, into BENCHMARKS.md (LEARNING="--seeds 0", or "--compare adapters")
	$(BIN)/python -m benchmarks.learning $(LEARNING)

docs: $(INSTALLED) ## the pages as a site, into build/site; ends with an error at a link that leads nowhere
	$(BIN)/uv pip install --quiet --python $(BIN)/python -e ".[docs]"
	NO_MKDOCS_2_WARNING=1 $(BIN)/python -m mkdocs build --strict

SEEDS ?= 5
chaos: export OMP_NUM_THREADS ?= 1
chaos: $(INSTALLED) ## kills and stops processes of a real job at random instants, and checks what must hold (SEEDS=5)
	$(RESOLVER) $(BIN)/python -m benchmarks.chaos --seeds $(SEEDS) $(CHAOS)

clean: ## removes the environment and what tools left; state/ stays
	rm -rf $(VENV) build dist *.egg-info .pytest_cache .ruff_cache .mypy_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
