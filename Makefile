# Every target sets up its own environment in .venv; Python 3.11 to 3.13 and make are all that a machine needs.
.DEFAULT_GOAL := help
.PHONY: help setup lint test demo bench mutants replay campaign gpu clean

PYTHON ?= python3 python3.11 python3.12 python3.13
WORKERS ?= 2
TOPOLOGY ?= all
CHECKPOINT ?=

BIN := .venv/bin
PYTEST := $(BIN)/python -m pytest
# One thread a rank, and no network: what the tests prove must not depend on either.
CPU_PYTEST := OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(PYTEST)
# Named after what the environment was made from, and where: an editable install does not survive a move.
STAMP := .venv/ready-$(shell { pwd; cat pyproject.toml constraints.txt; } | cksum | cut -d ' ' -f 1)

help: ## show this list
	@sed -n 's/^\([a-z]*\):.*## /  make \1	/p' Makefile

setup: $(STAMP) ## create .venv, or see that it is up to date

lint: $(STAMP) ## ruff and mypy
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy

test: lint ## lint, types, the cpu tests, and the gpu tests in rehearsal on the CPU
	$(CPU_PYTEST) -n $(WORKERS) -m cpu --junitxml artifacts/junit/cpu.xml
	$(CPU_PYTEST) -m gpu --rehearse --junitxml artifacts/junit/rehearsal.xml

demo: $(STAMP) ## videos in every topology, compared, and the oracle's page of them; see artifacts/demo
	$(BIN)/python -m suites.demo --artifacts artifacts/demo

bench: $(STAMP) ## measure against diffusers; see artifacts/bench.json
	$(BIN)/python -m suites.bench --output artifacts/bench.json

mutants: $(STAMP) ## plant every fault, run benign variants, and score the oracle; see artifacts/mutants.json
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/wanref mutants --single fixtures/micro --dual fixtures/micro-dual \
	    --workers $(WORKERS) --output artifacts/mutants.json

replay: $(STAMP) ## the oracle on releases before and after real fixes, from a package index; see docs/replay.md
	$(BIN)/python -m suites.replay --output artifacts/replay.json

campaign: $(STAMP) ## qualify cache profiles on the micro checkpoint in four topologies; resumed where it was
	OMP_NUM_THREADS=1 HF_HUB_OFFLINE=1 $(BIN)/wanref campaign run fixtures/campaigns/micro.toml artifacts/campaign/micro

gpu: $(STAMP) ## the gpu tests: make gpu CHECKPOINT=folder-or-hub-id [TOPOLOGY=pp2cfg2]
	$(if $(CHECKPOINT),,$(error make gpu needs CHECKPOINT=folder-or-hub-id))
	$(PYTEST) -m gpu --topology $(TOPOLOGY) --checkpoint $(CHECKPOINT) --junitxml artifacts/junit/gpu.xml

clean: ## remove .venv, artifacts and caches
	rm -rf .venv artifacts .mypy_cache .pytest_cache .ruff_cache .hypothesis
	find . -name __pycache__ -prune -exec rm -rf {} +

# Always from nothing, so that no package of an earlier set-up lingers. The stamp comes last: interrupted is not ready.
$(STAMP):
	@rm -rf .venv; \
	for python in $(PYTHON); do \
	    if $$python -c 'import sys, ensurepip; sys.exit(not (3, 11) <= sys.version_info < (3, 14))' 2>/dev/null; then \
	        echo "setting up .venv with $$($$python --version)"; \
	        exec $$python -m venv .venv; \
	    fi; \
	done; \
	echo "none of these is a Python 3.11, 3.12 or 3.13 with venv: $(PYTHON)" >&2; \
	echo "install one (on Debian or Ubuntu: python3.12 and python3.12-venv), or: make PYTHON=/path/to/python3.12" >&2; \
	exit 1
	$(BIN)/python -m pip install --quiet --constraint constraints.txt --editable '.[reference,test]'
	@touch $@
