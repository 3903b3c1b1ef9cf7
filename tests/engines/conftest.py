"""Without the train extra there is no torch, and nothing here to collect."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture
async def open_engine(tiny_model):
    """Starts engines and closes them at the end."""
    from engines.kit import make_engine

    made = []

    async def start(**settings):
        engine = make_engine(tiny_model, **settings)
        made.append(engine)
        await engine.start()
        return engine

    yield start
    for engine in made:
        await engine.close()
