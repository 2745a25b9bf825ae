# make setup       .venv with the package, its tests' needs, and torch (TORCH="torch==..." for another build,
#                  EXTRAS=bench for the peers that the benchmarks compare with)
# make data        the quickstart's corpus, tokenizer and token files, in data/quickstart
# make quickstart  all of the above, then trains a GPT of 10M parameters and shows a sample
# make test        the tests; make test-all: with the full matrices; make check: ruff and pyright

PYTHON ?= python3
TORCH ?= torch==2.13.0
EXTRAS ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup data quickstart test test-all check

setup: $(VENV)/.ready

# The stamp holds what was installed. Naming TORCH or EXTRAS installs again when that differs; not naming them
# leaves an environment made with others alone.
REQUEST := $(if $(filter command environment,$(origin TORCH) $(origin EXTRAS)),$(strip $(TORCH) $(EXTRAS)))
INSTALLED := $(strip $(shell cat $(VENV)/.ready 2>/dev/null))

$(VENV)/.ready: pyproject.toml constraints.txt $(if $(REQUEST),$(if $(filter-out $(INSTALLED),$(REQUEST)),FORCE))
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	grep -v '^torch==' constraints.txt > $(VENV)/constraints.txt
	@echo "installing $(TORCH) and what the project needs: a minute or more, without further output"
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt $(TORCH)
	$(BIN)/pip install --quiet --constraint $(VENV)/constraints.txt --editable '.[test$(if $(EXTRAS),$(comma)$(EXTRAS))]'
	echo '$(strip $(TORCH) $(EXTRAS))' > $@

FORCE:
comma := ,

data: setup
	$(BIN)/python scripts/quickstart_data.py

quickstart: setup
	$(BIN)/python scripts/quickstart.py

test: setup
	$(BIN)/python -m pytest -m 'not full'

test-all: setup
	$(BIN)/python -m pytest

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright
