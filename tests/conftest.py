"""Fixtures shared by all areas."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """A random 1M-parameter Qwen3-shaped byte-level model folder."""
    pytest.importorskip("torch")
    pytest.importorskip("transformers")
    from gruppetto.demo.model import make_tiny_model

    return make_tiny_model(tmp_path_factory.mktemp("tiny_model"))
