# Everything a machine needs is installed by these targets; `make help` lists them.
SHELL := bash
.SHELLFLAGS := -eu -o pipefail -c
VENV ?= .venv
PY := $(VENV)/bin/python
.DEFAULT_GOAL := help

.PHONY: help
help: ## list the targets
	@grep -hE '^[a-z-]+:.*##' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 24

.PHONY: install
install: $(VENV)/.installed ## make $(VENV) with SGLang, the plugin and the tools

$(VENV)/.installed: pyproject.toml platform_dist/pyproject.toml
	@bash scripts/install.sh "$(VENV)"
