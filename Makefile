# What pip installs as torch, before everything else: a range that has a CPU build, so that a
# machine without a GPU does not fetch CUDA. On a GPU machine: make setup TORCH='torch>=2.11'
TORCH ?= torch==2.13.*
PYTHON ?= python3
MODEL ?= bundled
ARGS ?=
TESTS ?= tests
# cores: so many processes of the type checker, and one more of tests, of which some always wait
JOBS ?= 2

BIN := .venv/bin
IS_NEW := import sys; sys.version_info >= (3, 11) or sys.exit("Python 3.11 or newer is needed, and \
this is %d.%d: rm -rf .venv; make setup PYTHON=python3.12" % sys.version_info[:2])

# Every process compiles what it imports anew where this is set, as it is in many containers.
unexport PYTHONDONTWRITEBYTECODE

.PHONY: help setup serve test check format protos upgrade wheel

help:
	@echo 'make setup    .venv with the kvrelay command and all that the tests need'
	@echo 'make serve    serves the bundled model, or MODEL=..., with ARGS="--port 8001 ..."'
	@echo 'make test     all tests, or TESTS="tests/kv_cache -k pool"'
	@echo 'make check    ruff, mypy, the import rules, generated code is current'
	@echo 'make format   what ruff can mend by itself'
	@echo 'make protos   the code generated from protos/*.proto'
	@echo 'make upgrade  the newest of what it depends on, kept in constraints.txt'
	@echo 'make wheel    dist/kvrelay-VERSION-py3-none-any.whl, for other machines'

setup: .venv/installed

# An older Python is told of before torch is fetched for it. Where Debian's lacks python3-venv it
# leaves a .venv without pip, which is completed the next time.
#
# torch comes by pip, which knows where this machine has it from; the rest by uv, in a fifth of pip's
# time, or by pip where uv cannot reach what pip is told of. A quarter of the modules is ever
# imported, and compiled then. Kernels are compiled here, so that the first start finds them; where
# that fails, it does so itself.
.venv/installed: pyproject.toml constraints.txt
	@python=$(BIN)/python; test -x $$python || python='$(PYTHON)'; $$python -c '$(IS_NEW)'
	$(BIN)/python -m pip --version >/dev/null 2>&1 || $(PYTHON) -m venv .venv
	$(BIN)/python -m pip install --quiet --no-compile uv '$(TORCH)'
	$(BIN)/uv pip install --quiet --python $(BIN)/python -c constraints.txt --editable '.[dev]' || \
		$(BIN)/python -m pip install --quiet --no-compile -c constraints.txt --editable '.[dev]'
	-$(BIN)/python -m engine.compile_ahead
	touch $@

serve: setup
	$(BIN)/kvrelay serve $(MODEL) $(ARGS)

test: setup
	$(BIN)/python -m pytest -n $$(($(JOBS) + 1)) --dist worksteal $(TESTS)

# 2: the type checker's processes did not find each other, as on a machine that is very busy.
check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy --num-workers $(JOBS) . || { test $$? = 2 && $(BIN)/mypy .; }
	$(BIN)/python -m protos.generate --check
	$(BIN)/python -m pytest tests/test_imports.py

format: setup
	$(BIN)/ruff check --fix .
	$(BIN)/ruff format .

protos: setup
	$(BIN)/python -m protos.generate

# torch, and triton with it, are for each machine to choose.
upgrade: setup
	$(BIN)/python -m pip install --quiet --upgrade --upgrade-strategy eager \
		'$(TORCH)' --editable '.[dev]'
	sed -i '/^[^#]/d' constraints.txt
	$(BIN)/python -m pip freeze --exclude-editable | grep -v -E '^(torch|triton|uv)=' \
		>> constraints.txt

# setuptools packs what an earlier build has left in build/, too
wheel: setup
	rm -rf dist build
	$(BIN)/python -m pip wheel --quiet --no-deps --wheel-dir dist .
	rm -rf build
