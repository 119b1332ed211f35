# Two commands do all the set-up on a machine with git, Python and make:
#   make predict    the answer for an H100, in a virtual environment of its own
#   make test       lint, types, import contract, unit tests, doctests, the first notebook
# make slow runs the slow tests and the other notebooks, make docs builds the site into build/docs.
PYTHON ?= python3
VENV ?= .venv
BIN := $(VENV)/bin
STEP := .ci/step
FIRST_NOTEBOOK := notebooks/01_first_look.ipynb
NOTEBOOK_TESTS = $(BIN)/python -m pytest -q --nbmake --nbmake-timeout=600 -p no:cacheprovider -W default

.NOTPARALLEL:

.PHONY: predict test setup lint unit first-notebook slow slow-tests notebooks docs figures accuracy clean

predict: $(VENV)/.runtime
	$(BIN)/specmodel predict --gpu h100

test: setup lint unit first-notebook

slow: setup slow-tests notebooks

setup:
	@$(STEP) "set-up" 240 $(MAKE) --no-print-directory $(VENV)/.dev

lint: $(VENV)/.dev
	@$(STEP) "lint and types" 60 $(MAKE) --no-print-directory lint-all

.PHONY: lint-all
lint-all:
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy
	$(BIN)/lint-imports

unit: $(VENV)/.dev
	@$(STEP) "unit tests and doctests" 120 $(BIN)/python -m pytest -q -n 2 --dist loadfile -m "not slow and not gpu"

slow-tests: $(VENV)/.dev
	@$(STEP) "slow tests" 900 $(BIN)/python -m pytest -q -m "slow and not gpu" tests

first-notebook: $(VENV)/.dev
	@$(STEP) "first notebook" 120 $(NOTEBOOK_TESTS) $(FIRST_NOTEBOOK)

notebooks: $(VENV)/.dev
	@$(STEP) "other notebooks" 600 $(NOTEBOOK_TESTS) $(filter-out $(FIRST_NOTEBOOK),$(wildcard notebooks/*.ipynb))

docs: $(VENV)/.docs
	@$(STEP) "documentation" 90 $(BIN)/python -m sphinx -q -W --keep-going -n docs build/docs

accuracy: $(VENV)/.runtime
	$(BIN)/specmodel validate --plot docs/accuracy.png --report docs/accuracy.md

figures: $(VENV)/.runtime
	$(BIN)/specmodel predict --gpu h100 --batch 1,8,32,128 --context 1k --plot docs/h100.png

$(VENV)/bin/python:
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.runtime: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e .
	@touch $@

# torch first and pinned: a looser request pulls a CUDA build of several GB.
$(VENV)/.dev: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check torch==2.13.0
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[engine,sweep,notebooks,dev]"
	@touch $@ $(VENV)/.runtime

$(VENV)/.docs: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --disable-pip-version-check -e ".[docs]"
	@touch $@ $(VENV)/.runtime

clean:
	rm -rf $(VENV) dist build .pytest_cache .mypy_cache .ruff_cache .import_linter_cache .hypothesis
