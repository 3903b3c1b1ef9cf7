"""Scripted servers, as the contract suite has them, with traps."""

import pytest


@pytest.fixture
async def open_scripted():
    """open_scripted(**traps) -> a scripted server."""
    from engines.contract.scripted import Scripted

    made = []

    async def start(**settings):
        server = Scripted(**settings)
        made.append(server)
        return await server.open()

    yield start
    for server in made:
        await server.close()


@pytest.fixture
async def connect(tiny_model, tmp_path):
    """connect(server, **settings) -> a started engine of the SGLang wire."""
    from gruppetto.engines.http.build import http_engine
    from gruppetto.engines.http.requests import HttpSettings
    from gruppetto.engines.http.staging import Staging
    from gruppetto.engines.http.wire import Deadlines

    made = []

    async def start(server, *, name="e", deadlines=None, start=True, **settings):
        chosen = HttpSettings(
            slots=8, context=256, deadlines=Deadlines(**{"beat": 0.1, "call": 5.0} | (deadlines or {})), **settings
        )
        engine = http_engine("sglang", name, chosen, Staging(tmp_path / name, tiny_model), url=server.url)
        made.append(engine)
        if start:
            await engine.start()
        return engine

    yield start
    for engine in made:
        await engine.close()
