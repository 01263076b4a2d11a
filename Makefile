# `make serve` and `make test` work from a clean clone: each makes .venv and installs what it needs.
#   ARGS=...     passed on to the server or to pytest, e.g. make serve ARGS="--mesh tp8"
#   EXTRAS=...   extras to install as well, e.g. make serve EXTRAS=cuda12
#   PYTHON=...   the interpreter that makes .venv; found by itself if not given

VENV := .venv
BIN := $(VENV)/bin
ARGS ?=
EXTRAS ?=
PYTHON ?=
comma := ,

# A user's pip settings for other projects (a forced --user, say) must not reach into .venv.
PIP := PIP_USER=0 $(BIN)/python -m pip -qq --disable-pip-version-check --no-input
SERVE_STAMP := $(VENV)/.installed-serve$(addprefix -,$(EXTRAS))
TEST_STAMP := $(VENV)/.installed-test$(addprefix -,$(EXTRAS))

.DEFAULT_GOAL := help
.DELETE_ON_ERROR:
.PHONY: help serve test lint lint-quick clean

help:
	@echo "make serve [ARGS=...]   start the server on 127.0.0.1:50051; it prints 'ready'"
	@echo "make test [ARGS=...]    run the default tests"
	@echo "make lint               ruff, import-linter, pyright"
	@echo "make clean              remove .venv and tool caches"

serve: $(SERVE_STAMP)
	@exec $(BIN)/python scripts/serve.py $(ARGS)

test: $(TEST_STAMP) lint-quick
	@$(BIN)/python -m pytest -n 2 --dist loadfile $(ARGS)

lint: $(TEST_STAMP) lint-quick
	@$(BIN)/lint-imports --no-cache
	@$(BIN)/pyright

lint-quick: $(TEST_STAMP)
	@$(BIN)/ruff check --quiet --output-format concise
	@$(BIN)/ruff format --check --quiet || \
		{ echo "some files are not formatted: run $(BIN)/ruff format" >&2; exit 1; }

clean:
	rm -rf $(VENV) .pytest_cache .ruff_cache .import_linter_cache .hypothesis

$(BIN)/pip:
	@python="$(PYTHON)"; found=; \
	for candidate in $${python:-python3.12 python3.13 python3.14 python3}; do \
		if $$candidate -c 'import sys, venv, ensurepip; sys.exit(sys.version_info < (3, 12))' \
			>/dev/null 2>&1; then found=$$candidate; break; fi; \
	done; \
	if [ -z "$$found" ]; then \
		echo "no usable Python: tried $${python:-python3.12, python3.13, python3.14, python3};" \
			"expected 3.12 or newer with venv and ensurepip;" \
			"install one or pass PYTHON=/path/to/python" >&2; \
		exit 1; \
	fi; \
	echo "creating $(VENV) with $$($$found -V 2>&1)"; \
	$$found -m venv --clear $(VENV)

$(SERVE_STAMP): pyproject.toml | $(BIN)/pip
	@echo "installing k3jax$(if $(EXTRAS), with $(EXTRAS)) (first time or pyproject.toml changed)"
	@$(PIP) install --editable ".$(if $(EXTRAS),[$(EXTRAS)])"
	@touch $@

$(TEST_STAMP): pyproject.toml | $(BIN)/pip
	@echo "installing k3jax with dev$(if $(EXTRAS), and $(EXTRAS)) (first time or pyproject.toml changed)"
	@$(PIP) install --editable ".[dev$(addprefix $(comma),$(EXTRAS))]"
	@touch $@ $(SERVE_STAMP)
