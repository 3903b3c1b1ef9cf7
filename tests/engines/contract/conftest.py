"""One engine kind a parameter; servers are started once."""

import importlib.util

import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]


@pytest.fixture(scope="session")
def served_url(tiny_model, holding):
    from engines.contract.kinds import CONTEXT, SLOTS, served

    with served(tiny_model, "--slots", str(SLOTS), "--context", str(CONTEXT), few_steps=holding) as url:
        yield url


@pytest.fixture
def vllm_url(tiny_model, shared_vllm):
    from engines.contract.vllm_server import need_vllm

    need_vllm()
    with shared_vllm.serving(tiny_model) as url:
        yield url


def pytest_generate_tests(metafunc):
    if "kind" in metafunc.fixturenames:
        from engines.contract.kinds import KINDS

        metafunc.parametrize("kind_name", KINDS)


@pytest.fixture
async def kind(request, kind_name, tiny_model, tmp_path):
    """Engines of one kind; all that were opened are closed at the end."""
    from engines.contract.kinds import CONTEXT, Kind
    from engines.contract.scripted import Scripted

    found = Kind(kind_name, tiny_model, tmp_path)
    if kind_name.startswith("served"):
        found.url = request.getfixturevalue("served_url")
    elif kind_name.startswith("vllm"):
        found.url = request.getfixturevalue("vllm_url")
    elif kind_name == "scripted":
        server = await Scripted(context=CONTEXT).open()
        found.url = server.url
    yield found
    for engine in found.made:
        await engine.close()
    if kind_name == "scripted":
        await server.close()


@pytest.fixture
async def engine(kind):
    """One started engine."""
    return await kind.open()


@pytest.fixture
async def open_scripted():
    """Opens scripted servers with traps of the test's choice."""
    from engines.contract.scripted import Scripted

    made = []

    async def start(**settings):
        server = Scripted(**settings)
        made.append(server)
        return await server.open()

    yield start
    for server in made:
        await server.close()
