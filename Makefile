# make demo | test | test-all | lint | clean.   Every step's exit code counts.

SHELL := /bin/bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help

PYTHON ?= python3.11
BIN := .venv/bin
STAMP := .venv/.installed
# Without OMP_NUM_THREADS=1, test workers and ranks fight for the same cores. Without bytecode, each of the hundred processes
# that the tests start would read every source anew.
TEST_ENVIRONMENT := HF_HUB_OFFLINE=1 OMP_NUM_THREADS=1 PYTHONDONTWRITEBYTECODE=

.PHONY: help environment demo test test-all lint types clean

help:
	@echo "make demo      install into .venv, then train a small language model on 4 ranks"
	@echo "make test      lint, types and tests: what CI runs"
	@echo "make test-all  the same with the slow tests and more random examples"
	@echo "make lint      ruff, then mypy --strict of the built wheel"
	@echo "make clean     remove all that these made"

environment: $(STAMP)

$(STAMP): setup.cfg pyproject.toml
	$(PYTHON) -m venv .venv
	$(BIN)/pip install -qq -e '.[test]'
	@touch $@

demo: $(STAMP)
	OMP_NUM_THREADS=1 $(BIN)/torchrun --standalone --nproc-per-node 4 examples/language_model.py

# $(1): more of a marker expression; $(2): more options. Process groups get the machine to themselves.
# pytest exits 5 when it selects no test; that passes only for process tests, and only until tests/processes exists.
define run_tests
	$(TEST_ENVIRONMENT) $(BIN)/python tests/compile_loops.py
	$(TEST_ENVIRONMENT) $(BIN)/pytest -q -n 2 --dist worksteal -m "not processes$(1)" $(2)
	$(TEST_ENVIRONMENT) $(BIN)/pytest -q -p no:xdist -m "processes$(1)" $(2) || { code=$$?; \
	[ $$code -eq 5 ] && [ ! -d tests/processes ] && echo "there are no process tests yet" || exit $$code; }
endef

test: lint
	$(call run_tests, and not full)

test-all: lint
	$(call run_tests,,--hypothesis-profile=full)

lint: $(STAMP)
	$(BIN)/ruff check .
	@$(MAKE) --no-print-directory types

# The installed wheel is checked, from another folder: in the checkout, passes/ is not inside pdcompiler/.
# build/ goes first, because setuptools would pack deleted modules that lie there.
types: $(STAMP)
	rm -rf build
	@root=$$PWD; folder=$$(mktemp -d); trap 'rm -rf "$$folder"' EXIT; \
	$(BIN)/pip wheel -qq --no-deps --no-build-isolation --wheel-dir "$$folder/wheel" .; \
	$(BIN)/pip install -qq --no-deps --target "$$folder/site" "$$folder"/wheel/pdcompiler-*.whl; \
	cd "$$folder/site"; \
	test -f pdcompiler/py.typed || { echo "the wheel lacks pdcompiler/py.typed"; exit 1; }; \
	echo "mypy --strict -p pdcompiler, in $$PWD"; \
	"$$root/$(BIN)/mypy" --strict --config-file "$$root/setup.cfg" --cache-dir "$$root/.mypy_cache" -p pdcompiler

clean:
	rm -rf .venv build dist *.egg-info .hypothesis .mypy_cache .ruff_cache .pytest_cache
	find . -name __pycache__ -type d -not -path './.git/*' -prune -exec rm -rf {} +
