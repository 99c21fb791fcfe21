# Everything a user or a developer runs. `make` alone lists it.
#
#   RUNTIME=local|docker|auto   where `make train` runs: .venv, the image, or the image where a
#                               Docker engine answers and it can be had (default: auto)
#   VARIANT=cpu|cu126|cu129     which image `make image` builds (default: by what this machine has)
#   PYTHON=/path/to/python3.11  which Python makes .venv (default: the first 3.11 found)
#   ARGS="epochs=1 …"           more overrides for `make train`, or options for `make parity`

SHELL := bash
.SHELLFLAGS := -euo pipefail -c
.DEFAULT_GOAL := help
MAKEFLAGS += --no-print-directory

RUNTIME ?= auto
ARGS ?=
export VARIANT PYTHON

TRAIN := train.py recipe=digits_resnet18 topology=1x2 $(ARGS)
BIN := .venv/bin

.PHONY: help setup train test test-faults test-clusters test-starts chaos parity bench records lint format lock base image clean

help:  ## list the targets
	@awk -F ':.*## ' '/^[a-z-]+:.*## / {printf "  make %-14s %s\n", $$1, $$2}' $(MAKEFILE_LIST)

setup:  ## make .venv from the hash-locked requirements (nothing to do if it is up to date)
	@docker/venv.sh

train:  ## train ResNet-18 on the embedded digits with two processes: the quick start
	@docker/train.sh --runtime $(RUNTIME) $(TRAIN)

test: setup lint  ## run the linters, the type checker and the tests
	@echo "test: running the tests"
	@$(BIN)/python -m pytest

test-faults: setup  ## break real containers in every way, and print how each node ended; strange conversations
	@$(BIN)/python -m pytest -q -m faults tests/container tests/test_conversations.py

test-clusters: setup  ## runs under real Slurm, over real SSH, and with Compose
	@$(BIN)/python -m pytest -q -m clusters tests/cluster tests/container tests/integration

chaos: setup  ## kill a training at random moments, resume it on random topologies, and compare
	@$(BIN)/python -m benchmarks.chaos $(ARGS)

test-starts: setup  ## start four processes thirty times in a row
	@FLEET_RECIPES_STARTS=30 $(BIN)/python -m pytest -q -s tests/integration/test_starts.py --timeout 1800

parity: setup  ## train on every topology and compare the losses step by step (FULL=1: accuracy too)
	@$(BIN)/python -m benchmarks.parity --matrix $(ARGS)
	@$(if $(FULL),$(BIN)/python -m benchmarks.accuracy --setting "topology=1x1 sync_bn=true" \
		--setting "topology=1x2 sync_bn=true" recipe=digits_resnet18)

bench: setup  ## measure every claimed speed beside its peer; write benchmarks/results (10 minutes)
	@docker/bench-packages.sh
	@$(BIN)/python -m benchmarks.bench $(ARGS)

records: setup  ## measure this machine's CPU anew, and render benchmarks/RESULTS.md (8 minutes)
	@$(BIN)/python -m benchmarks.record $(ARGS)

lint: setup  ## check style, format and types
	@echo "lint: ruff and mypy"
	@$(BIN)/ruff check
	@$(BIN)/ruff format --check
	@$(BIN)/mypy

format: setup  ## rewrite the sources in the house format
	@$(BIN)/ruff check --fix-only --quiet
	@$(BIN)/ruff format

lock:  ## resolve docker/*.in into docker/*.lock (UPGRADE=1: take the newest versions)
	@docker/lock.sh $(if $(UPGRADE),--upgrade)

base:  ## build the base image from the Debian mirror, where no registry can be reached
	@docker/base.sh

image:  ## build the image fleet-recipes:VARIANT
	@docker/build.sh

clean:  ## remove .venv and all caches; outputs/, data/ and images stay
	rm -rf .venv .bench-packages .pytest_cache .mypy_cache .ruff_cache .hypothesis
	find . -name __pycache__ -type d -prune -exec rm -rf {} +
