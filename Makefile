# make demo   set-up, then the whole product on CPU processes: profile, plan, train, compare
# make lint   set-up, then format, lint, strict types, and the layers of imports
# make test   set-up, then all tests but those of every night: of many types of models a sample stands for all
# make quick  the part of these that starts no processes and whose tests take less than a second each
# make docs   set-up, then the site in build/site, offline and strict
# make traces  how packaged models split, and their traces: what is missing or out of date
# make gpu    the cost model against one GPU, ten minutes or less; fails where there is none
# make fuzz   CASES damaged files and commands (100,000), from SEED (by the clock); those that end badly are kept
# make nightly  make fuzz, the types of models that make test leaves out, and the quick tests with other examples

PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --quiet --disable-pip-version-check --constraint constraints.txt

# Workers, each with whole files of tests: what a file sets up, it sets up once. Their order is that of
# tests/conftest.py, long ones first; xdist's own puts files of few tests last, which are the long ones.
WORKERS := -n 2 --dist loadfile --no-loadscope-reorder
# Three on two cores where processes are started: tests that wait for them leave a core idle, which collecting a third
# time (10 s) takes less of.
BESIDE_PROCESSES := -n 3 --dist loadfile --no-loadscope-reorder

# Engines that read their own configuration in tests, with what that takes; they depend on far more.
ENGINES := torchtitan torchdata tyro spmd_types docstring-parser typeguard shtab axolotl nemo-automodel

CASES ?= 100000
SEED ?= $(shell date +%s)

# Modules stay compiled even where Python is told to write none: each process of a test would compile all of them anew.
export PYTHONDONTWRITEBYTECODE :=

.PHONY: demo lint test quick docs traces gpu fuzz nightly clean

demo: $(VENV)/installed
	$(BIN)/steelyard demo

lint: $(VENV)/installed-dev
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy
	$(BIN)/lint-imports

test: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(BESIDE_PROCESSES) -m "not nightly"

quick: $(VENV)/installed-dev
	$(BIN)/python -m pytest $(WORKERS) -m "not processes and not slow and not nightly"

docs: $(VENV)/installed-dev
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --quiet

traces: $(VENV)/installed
	$(BIN)/python benchmarks/package_traces.py --jobs 2

gpu: $(VENV)/installed
	$(BIN)/python benchmarks/gpu.py --json benchmarks/gpu.json

fuzz: $(VENV)/installed-dev
	$(BIN)/python -m tests.damage --cases $(CASES) --seed $(SEED) --keep .damage

nightly: fuzz
	$(BIN)/python -m pytest $(WORKERS) -m nightly
	$(BIN)/python -m pytest $(WORKERS) -m "not processes and not slow and not nightly" --hypothesis-profile nightly

# torch goes first and alone: pip then takes the one build that the constraints name.
$(VENV)/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv $(VENV)
	$(PIP) torch
	$(PIP) --editable ".[train]"
	touch $@

$(VENV)/installed-dev: $(VENV)/installed
	$(PIP) --editable ".[dev]"
	$(PIP) --no-deps $(ENGINES)
	touch $@

clean:
	rm -rf $(VENV) demo-run .damage .hypothesis
