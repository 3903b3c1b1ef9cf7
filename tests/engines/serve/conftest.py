"""Servers for these tests: one real process for all, and servers in this process with settings of their own."""

import contextlib
import importlib.util
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest

collect_ignore_glob = [] if importlib.util.find_spec("torch") else ["test_*.py"]
ROOT = Path(__file__).parents[3]
FEW_STEPS = Path(__file__).parents[1] / "few_steps.py"


@contextlib.contextmanager
def serving(*arguments: str, few_steps: Path | None = None):
    """A real server process: (its url, the process). Its engine waits while a file `few_steps` is there."""
    program = ["-m", "gruppetto"] if few_steps is None else [str(FEW_STEPS), str(few_steps)]
    command = [sys.executable, *program, "serve", *arguments, "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            line = process.stdout.readline()
            assert "serving" in line, (line, process.stderr.read() if process.stderr else "")
            yield re.search(r"http://\S+:\d+", line)[0], process
        finally:
            if process.poll() is None:
                process.kill()


@pytest.fixture(scope="session")
def process_url(tiny_model, holding):
    sizes = ("--slots", "4", "--context", "512")
    with serving(str(tiny_model), *sizes, "--served-model-name", "tiny", few_steps=holding) as (url, _):
        yield url


@pytest.fixture
async def http(process_url):
    """A client of the real process, which every test leaves serving."""
    async with aiohttp.ClientSession(process_url) as session:
        yield session
        await session.post("/continue_generation")
        async with session.get("/ready") as answer:
            assert answer.status == 200


@pytest.fixture
async def open_server(tiny_model):
    """Starts servers in this process and gives a client of each; `server.client` and `server.url`."""
    from gruppetto.engines.serve.build import EngineChoice, build
    from gruppetto.engines.serve.settings import Limits, ServeSettings

    async with contextlib.AsyncExitStack() as stack:

        async def start(limits=None, choice=None, **settings):
            engine = EngineChoice(**{"slots": 4, "context": 512, "device": "cpu"} | (choice or {}))
            chosen = ServeSettings(port=0, limits=replace(Limits(drain_s=0.0), **(limits or {})), **settings)
            server = build(str(tiny_model), engine, chosen, {})
            stack.push_async_callback(server.close)
            await server.open()
            await server.start()
            url = f"http://127.0.0.1:{server.port}"
            return server, await stack.enter_async_context(aiohttp.ClientSession(url))

        yield start
