"""Without the train extra there is no torch, and nothing here to collect."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session")
def holding(tmp_path_factory):
    """The file of `held`, of which server processes are told."""
    return tmp_path_factory.mktemp("holding") / "now"


@pytest.fixture
def held(holding, monkeypatch):
    """A file; while it is there engines decode few steps only (`few_steps`), so that what a test began goes on."""
    from engines.few_steps import few_steps

    from gruppetto.engines.embedded.core import Core

    monkeypatch.setattr(Core, "step", few_steps(holding))
    holding.touch()
    yield holding
    holding.unlink(missing_ok=True)


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
