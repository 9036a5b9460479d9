# Two commands on a fresh machine: `make demo` and `make test`. Both set themselves up.
PYTHON ?= python3
VENV   := .venv
BIN    := $(VENV)/bin
# Two processes share the tests; each gets one torch thread so that they do not fight over cores.
WORKERS ?= 2
FAMILY  ?= llada
# Files or directories of tests; empty means all of them.
TESTS   ?=

.PHONY: setup demo shell check-claims test test-all lint docs format clean
# `demo` needs the package alone, `test` and `lint` its light extras, `test-all` also the heavy ones.
setup: $(VENV)/.installed
EXTRAS-installed :=
EXTRAS-tested    := [dev,serve,eval,gguf]
EXTRAS-all       := [dev,serve,eval,gguf,ray,deepspeed,long]
EXTRAS-docs      := [docs]

$(VENV)/.installed $(VENV)/.tested $(VENV)/.all $(VENV)/.docs: $(VENV)/.%: pyproject.toml constraints.txt
	@test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	@$(BIN)/python -m pip install --quiet --upgrade pip setuptools
	@echo "Installing (the first time takes a few minutes) ..."
	@$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable ".$(EXTRAS-$*)"
	@touch $@

demo: setup
	@$(BIN)/python -m tad demo --family $(FAMILY)

# A shell in which `tad` is known; `source .venv/bin/activate` does the same in the shell at hand.
shell: setup
	@PATH="$(CURDIR)/$(BIN):$$PATH" $${SHELL:-/bin/sh}

# The bundled models against the rows in results/, problem by problem: about ten minutes of two cores.
check-claims: setup
	@$(BIN)/python -m tad_lab.claims

test: $(VENV)/.tested
	OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS) -m "not slow and not gpu" $(TESTS)

test-all: $(VENV)/.all
	-@(command -v chromium || command -v google-chrome) >/dev/null || $(BIN)/playwright install chromium
	TAD_EXAMPLES=60 OMP_NUM_THREADS=1 $(BIN)/python -m pytest -n $(WORKERS)

lint: $(VENV)/.tested
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

# The site in site/; a link that leads nowhere fails.
docs: $(VENV)/.docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --site-dir site

format: $(VENV)/.tested
	$(BIN)/ruff format .
	$(BIN)/ruff check --fix .

clean:
	rm -rf $(VENV) .pytest_cache .mypy_cache .ruff_cache .hypothesis site
