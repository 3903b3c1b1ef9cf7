"""Fixtures shared by all areas."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

ANY_MACHINE = {"deadline": None, "suppress_health_check": list(HealthCheck), "print_blob": True}
SAME = {"derandomize": True, "database": None, "stateful_step_count": 40}
settings.register_profile("usual", max_examples=60, **SAME, **ANY_MACHINE)
settings.register_profile("glance", max_examples=6, **SAME, **ANY_MACHINE)  # beside a whole run (`make test-base`)
settings.register_profile("soak", max_examples=148, stateful_step_count=150, **ANY_MACHINE)  # a shard of `make soak`
settings.load_profile(os.environ.get("HYPOTHESIS_PROFILE", "usual"))


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random 1M-parameter Qwen3-shaped byte-level model folder."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from gruppetto.demo.model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))


@pytest.fixture(scope="session")
def shared_vllm(tmp_path_factory):
    """One vLLM server for all test processes of a run, used by one test at a time."""
    pytest.importorskip("torch")
    from engines.contract.vllm_server import SharedVLLM

    own = tmp_path_factory.getbasetemp()
    shared = SharedVLLM(own.parent if "PYTEST_XDIST_WORKER" in os.environ else own)
    yield shared
    shared.close()


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """Of `pytest -n 2`: what needs the one vLLM, which its id says, runs in one process and first, so that nobody waits
    for another's test. (xdist 3.8's own groups do not work with pytest 9.2.)"""
    if config.getvalue("dist") != "load":
        return None
    from xdist.scheduler import LoadScopeScheduling

    class OneByOne(LoadScopeScheduling):
        def _split_scope(self, nodeid):
            return "vllm" if "vllm" in nodeid else nodeid

    return OneByOne(config, log)


def pytest_collection_modifyitems(items):
    unsaid = [item.nodeid for item in items if "shared_vllm" in item.fixturenames and "vllm" not in item.nodeid]
    assert not unsaid, f"tests that need vLLM have it in their names, by which they are kept in one process: {unsaid}"
