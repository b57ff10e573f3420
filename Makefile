# make quickstart: the whole chain in minutes.   make test: the tests.   make env: the environment alone.
# make bench: every benchmark, one report (some 20 minutes).   make gpu: the first hour on a GPU.
# make docs: the documentation as a site, in build/docs.
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
# Twice as many tests at once as there are cores, since many wait for processes of their own; not more than four.
PROCESSES = $(shell $(PYTHON) -c "import os; print(min(2 * os.cpu_count(), 4))")
# They start hundreds of processes. Where the environment lets Python keep no compiled modules, as in images of containers,
# each would compile thousands anew: 12 s of processor time instead of 5 for what tests/preloaded.py imports.
PYTEST = PYTHONDONTWRITEBYTECODE= $(BIN)/python -m pytest --numprocesses $(PROCESSES)

.PHONY: quickstart test test-slow bench gpu lint lint-style lint-types lint-benchmarks docs env lock clean

quickstart: env
	$(BIN)/cloze quickstart --output runs/quickstart

test: env
	$(PYTEST)

test-slow: env
	$(PYTEST) -m slow

bench: env
	$(BIN)/python benchmarks/run_all.py --output runs/bench $(if $(BENCH_DATA),--data $(BENCH_DATA))

gpu: env
	$(BIN)/python benchmarks/gpu.py --output runs/gpu

# Apart, so that `make --jobs 2 lint` runs the two slow ones at once.
lint: lint-style lint-types lint-benchmarks

lint-style: env
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .

lint-types: env
	$(BIN)/mypy

lint-benchmarks: env
	$(BIN)/mypy --cache-dir .mypy_cache/benchmarks --config-file benchmarks/mypy.ini

docs: env
	$(BIN)/sphinx-build --quiet --fail-on-warning --keep-going --fresh-env --jobs auto --conf-dir docs . build/docs
	cp build/docs/README.html build/docs/index.html
	@echo "open build/docs/index.html"

env: $(VENV)/.installed

# Rebuilt when what is to be installed changes; the mark is made last, so a broken installation is repeated. Modules are
# compiled when they are first imported, which most of 26,000 never are.
$(VENV)/.installed: setup.cfg pyproject.toml constraints.txt
	@$(PYTHON) -c "import sys; sys.exit(not (3, 10) <= sys.version_info < (3, 14) and 'cloze needs Python 3.10 to 3.13, found ' + sys.version.split()[0] + '; name one: make env PYTHON=python3.11')"
	@$(PYTHON) -m venv $(VENV)
	@$(BIN)/python .ci/install.py --no-compile --constraint constraints.txt --editable '.[test]'
	@touch $@

# Write down what is installed now, after trying newer versions by hand.
lock:
	$(BIN)/python .ci/lock.py > constraints.txt

clean:
	rm -rf $(VENV) build *.egg-info
