# make install      the environment in .venv, with the `k3rl` command in it
# make quickstart   install, then the main job: SFT, RL, distillation and export of a tiny K3 on this machine
# make test         install what the tests need, then run them all
# make lint         style and types
#
# TORCH_INDEX   a pip index to take torch from, such as PyTorch's CPU index on a machine without a GPU
# PYTHON        the interpreter to build the environment with, 3.11 or newer
# ARGS          more words for the command that runs: make quickstart ARGS="--seed 1 --clean"

PYTHON ?= python3
VENV ?= .venv
TORCH_INDEX ?=
ARGS ?=

BIN := $(VENV)/bin
PIP := $(BIN)/python -m pip install --disable-pip-version-check --no-compile
# pip would compile 20,000 files on one core; this uses all cores. Packages hold templates that do not compile.
COMPILE := $(BIN)/python -m compileall -qq -j 0 $(VENV)/lib || true

# `kernels`, `actors`, ... must never be imported by the accident of the working directory.
export PYTHONSAFEPATH := 1
# Bytecode is kept even where the surroundings forbid it: runs and tests start many processes that import the same files.
export PYTHONDONTWRITEBYTECODE :=

.DELETE_ON_ERROR:
.PHONY: help install install-dev quickstart test lint system clean

help:
	@sed -n '/^#/!q; s/^# \{0,1\}//p' Makefile

install: $(VENV)/.installed

install-dev: $(VENV)/.installed-dev

quickstart: install
	$(BIN)/k3rl rl quickstart $(ARGS)

# One thread a process: the tests start many, and spinning threads starve each other on two cores. Three workers for two
# cores, because many tests wait: for the time limit of a sandbox, for a Ray to start. A file stays with one worker,
# because what is costly to set up (a finished run) is set up once a file; tests/conftest.py says which files go together.
test: install-dev
	@PYTHON="$(PYTHON)" .ci/debian-packages all
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/python -m pytest -q -n 3 --dist loadfile --no-loadscope-reorder $(ARGS)

lint: install-dev
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy -p k3rl

# Debian packages: installed where this user may, otherwise named. Nothing to do costs nothing.
system:
	@PYTHON="$(PYTHON)" .ci/debian-packages

$(VENV)/bin/python: | system
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11))' || { \
	  echo "k3rl needs Python 3.11 or newer; $(PYTHON) is $$($(PYTHON) -V 2>&1)." >&2; \
	  echo "Name a newer one: make PYTHON=python3.12 $(MAKECMDGOALS)" >&2; exit 1; }
	$(PYTHON) -m venv $(VENV)

# torch first and from its own index where one is named: once it is there, the next step keeps it.
$(VENV)/.torch: pyproject.toml | $(VENV)/bin/python
	@test -n "$(TORCH_INDEX)" || command -v nvidia-smi >/dev/null || echo "No GPU found. \
	If several GB of CUDA libraries begin to download, stop and name PyTorch's CPU index: make TORCH_INDEX=... $(MAKECMDGOALS)"
	@test -z "$(TORCH_INDEX)" || $(PIP) --index-url "$(TORCH_INDEX)" "$$($(BIN)/python .ci/requirement torch)"
	@touch $@

$(VENV)/.installed: pyproject.toml $(VENV)/.torch | system
	$(PIP) --editable .
	@$(COMPILE)
	@touch $@

$(VENV)/.installed-dev: pyproject.toml $(VENV)/.torch | system
	$(PIP) --editable '.[dev]'
	@$(COMPILE)
	@touch $(VENV)/.installed $@

clean:
	rm -rf $(VENV) build dist k3rl.egg-info
