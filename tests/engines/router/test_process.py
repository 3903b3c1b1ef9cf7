"""The command: its line, its signals, what it refuses."""

import asyncio
import re
import signal
import subprocess
import sys

import aiohttp
import pytest
from engines.router.scripted import Scripted
from engines.router.test_proxy import body, post

from gruppetto.cli.main import main


async def started(*arguments):
    """(process, url) of a real router."""
    command = [sys.executable, "-m", "gruppetto", "route", "--port", "0", *arguments]
    process = await asyncio.create_subprocess_exec(*command, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    line = (await process.stdout.readline()).decode()
    assert "routing to" in line, (line, await process.stderr.read())
    return process, re.search(r"http://\S+:\d+", line)[0]


@pytest.mark.parametrize(("kind", "code"), [(signal.SIGTERM, 0), (signal.SIGINT, 130)])
async def test_it_routes_and_ends_by_signal(kind, code):
    engine = await Scripted().start()
    process, url = await started("--engine", engine.url)
    try:
        async with aiohttp.ClientSession(url) as http:
            assert (await post(http, "/generate", body(rid="r")))[0] == 200
            engine.mode = "hold"
            runs = asyncio.ensure_future(post(http, "/generate", body(rid="runs")))
            while len(engine.seen) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.01)
            process.send_signal(kind)
            engine.gate.set()
            assert (await runs)[0] == 200
        assert await process.wait() == code
        assert await process.stderr.read() == b""
    finally:
        if process.returncode is None:
            process.kill()
            await process.wait()
        await engine.stop()


async def test_it_says_what_becomes_of_engines():
    engine = await Scripted().start()
    process, url = await started("--engine", engine.url, "--health-interval", "0.1")

    async def said():
        async with asyncio.timeout(60):
            return (await process.stdout.readline()).decode()

    try:
        assert await said() == f"{engine.url}: up\n"
        await engine.stop()
        assert (await said()).startswith(f"{engine.url}: fenced: nobody listens at {engine.url}")
        await engine.start()
        while (line := await said()) != f"{engine.url}: up\n":
            assert line.startswith(f"{engine.url}: fenced: ")
        async with aiohttp.ClientSession() as http:
            await http.delete(f"{url}/workers/{engine.url}")
        assert await said() == f"{engine.url}: draining\n"
        assert await said() == f"{engine.url}: removed\n"
    finally:
        process.kill()
        await process.wait()
        await engine.stop()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "no engine is given; write --engine http://HOST:PORT"),
        (["--engine", "localhost:1"], "is no address of an engine"),
        (["--engine", "http://a:99999"], "is no address of an engine"),
        (["--engine", "http://a:1", "--engine", "http://a:1/"], "is given twice"),
        (["--engine", "http://a:1", "--host", "0.0.0.0"], "give --api-key too"),
        (["--engine", "http://a:1", "--port", "70000"], "is no port"),
        (["--engine", "http://a:1", "--port", "5", "--control-port", "5"], "is --port too"),
        (["--engine", "http://a:1", "--concurrency", "0"], "--concurrency 0; write more than 0"),
        (["--engine", "http://a:1", "--hold", "2"], "hold = 2 is no share"),
    ],
)
def test_what_is_refused(arguments, says, capsys):
    assert main(["route", *arguments]) == 2
    complaint = capsys.readouterr().err
    assert says in complaint
    assert complaint.count("\n") == 1
