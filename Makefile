# make demo: a small model learns while you watch. make test: every check and test. Both work on a fresh machine.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
export HF_HUB_OFFLINE ?= 1

.PHONY: demo test check install soak clean

install: .venv/installed

.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[train,parquet,math,gym,tensorboard,smollm2,dev]'
	touch $@

demo: install
	.venv/bin/gruppetto demo

check: install
	scripts/check

test: install check
	.venv/bin/pytest

clean:
	rm -rf .venv .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
