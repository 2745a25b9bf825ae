# make setup       .venv with the package, its tests' needs, and torch: the versions and hashes of locks/
#                  (TORCH="torch==..." for another build, not locked; TORCH=locked goes back;
#                  EXTRAS=bench for the peers that the benchmarks compare with, EXTRAS=docs for `make docs`)
# make data        the quickstart's corpus, tokenizer and token files, in data/quickstart
# make quickstart  all of the above, then trains a GPT of 1M parameters and shows a sample
# make test        the quick tests, WORKERS (2) at a time
# make test-all    with the full matrices; PART=zero: those of tests/zero only
# make check       ruff and pyright
# make docs        the documents as a site, in build/site; after make setup EXTRAS=docs

PYTHON ?= python3
TORCH ?= locked
WORKERS ?= 2
EXTRAS ?=
PART ?=
VENV := .venv
BIN := $(VENV)/bin

.PHONY: setup data quickstart test test-all check docs

setup: $(VENV)/.ready

# The stamp holds what was installed. Naming TORCH or EXTRAS installs again when that differs; not naming them
# leaves an environment made with others alone.
REQUEST := $(if $(filter command environment,$(origin TORCH) $(origin EXTRAS)),$(strip $(TORCH) $(EXTRAS)))
INSTALLED := $(strip $(shell cat $(VENV)/.ready 2>/dev/null))

$(VENV)/.ready: pyproject.toml scripts/install.py $(wildcard locks/*.txt) $(if $(REQUEST),$(if $(filter-out $(INSTALLED),$(REQUEST)),FORCE))
	$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed, this is " + sys.version.split()[0])'
	test -x $(BIN)/python || $(PYTHON) scripts/install.py --environment $(VENV)
	@echo "installing torch and what the project needs: one to five minutes"
	$(if $(filter-out locked bench docs,$(INSTALLED)),$(BIN)/pip uninstall --quiet --yes torch)
	$(BIN)/python scripts/install.py --torch '$(TORCH)' $(EXTRAS)
	echo '$(strip $(TORCH) $(EXTRAS))' > $@

FORCE:

data: setup
	$(BIN)/python scripts/quickstart_data.py

quickstart: setup
	$(BIN)/python scripts/quickstart.py

test: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal -m 'not full' --durations=10

test-all: setup
	$(BIN)/python -m pytest -n $(WORKERS) --dist worksteal --durations=10 tests/$(PART)

check: setup
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/pyright

docs: setup
	@test -x $(BIN)/mkdocs || { echo "mkdocs is missing: make setup EXTRAS=docs"; exit 2; }
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict --quiet
	@echo "open build/site/index.html"
