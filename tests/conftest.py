"""Fixtures shared by all areas."""

import os
from pathlib import Path

import pytest


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


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    """What needs the one vLLM runs in one process: under `--dist loadgroup` nobody waits for another's test."""
    for item in items:
        chosen = getattr(item, "callspec", None)
        kind = "" if chosen is None else chosen.params.get("kind_name", "")
        if kind.startswith("vllm") or "shared_vllm" in item.fixturenames:
            item.add_marker(pytest.mark.xdist_group("vllm"))
