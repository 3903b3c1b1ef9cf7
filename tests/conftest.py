"""Fixtures shared by all areas."""

import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

GLANCE = os.environ.get("HYPOTHESIS_PROFILE") == "glance"
"""A few examples only: where all of them are run as well (`make test-base`)."""

settings.register_profile(
    "any machine", max_examples=10 if GLANCE else 100, deadline=None, suppress_health_check=[HealthCheck.too_slow]
)
settings.load_profile("any machine")


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
