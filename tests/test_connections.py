"""What a user is told of a server that was not reached: one line, whichever library found it, wherever it is shown."""

import asyncio
import contextlib
import re
import socket

import aiohttp
import pytest

from gruppetto.cli.main import main
from gruppetto.connections import ENDED, in_words, nobody_listens
from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.errors import Lost
from gruppetto.engines.router.upstream import Broken, NotSent, Upstream

OF_A_LIBRARY = re.compile(r"ssl:|_ssl|Errno|errno|Connect call|Cannot connect|Error\b|None|url=|\n|aiohttp")
NOBODY = "nobody listens there"


async def asked_by_client(url):
    client = HttpClient("e", url)
    await client.open()
    try:
        await client.call("GET", "/x", within_s=20.0)
    except Lost as error:
        return str(error)
    finally:
        await client.close()


async def asked_by_router(url):
    with contextlib.closing(Upstream(url)) as upstream:
        try:
            await upstream.call("GET", "/x", within_s=20.0)
        except (NotSent, Broken) as error:
            return str(error)


async def asked_by_weights(url):
    pytest.importorskip("torch", reason="needs the train extra")
    from gruppetto.weights.channels.port import RemotePort, Unreachable

    class Engine:
        name, control_key, control_url = "e", "", url

    try:
        await RemotePort(Engine()).state()
    except Unreachable as error:
        return str(error)


ASKERS = [asked_by_client, asked_by_router, asked_by_weights]


def unused():
    """A port that nobody listens at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return taken.getsockname()[1]


@contextlib.asynccontextmanager
async def answering(with_bytes, *, reset=False):
    """A server that sends this and ends the connection."""

    async def serve(reader, writer):
        await reader.read(1 << 16)
        writer.write(with_bytes)
        await writer.drain()
        writer.transport.abort() if reset else writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


@pytest.mark.parametrize("ask", ASKERS)
@pytest.mark.parametrize("host", ["127.0.0.1", "localhost"])
async def test_nobody_listens(ask, host):
    """Also where a name has several addresses, and each of them refused."""
    line = await ask(f"http://{host}:{unused()}")
    assert "nobody listens" in line
    assert not OF_A_LIBRARY.search(line)


@pytest.mark.parametrize("ask", ASKERS)
async def test_a_name_that_no_host_has(ask):
    line = await ask("http://no.such.host.invalid:8000")
    assert re.search("no host has that name|cannot be looked up now", line)
    assert not OF_A_LIBRARY.search(line)


@pytest.mark.parametrize("ask", ASKERS)
@pytest.mark.parametrize(
    ("sent", "reset"),
    [
        (b"", False),
        (b"", True),
        (b"HTTP/1.1 200 OK\r\nContent-Length: 100\r\n\r\nabc", False),
        (b"SSH-2.0-OpenSSH\r\n\r\n", False),
    ],
)
async def test_what_is_no_whole_answer(ask, sent, reset):
    async with answering(sent, reset=reset) as port:
        line = await ask(f"http://127.0.0.1:{port}")
    assert re.search("broke off|whole|HTTP", line)
    assert not OF_A_LIBRARY.search(line)


@pytest.mark.parametrize("ask", ASKERS)
async def test_a_server_without_tls(ask):
    async with answering(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n") as port:
        line = await ask(f"https://127.0.0.1:{port}")
    assert line.endswith("it does not speak TLS; write http:// instead of https://")


def test_doctor_says_so_in_one_line(capsys):
    url = f"http://127.0.0.1:{unused()}"
    assert main(["doctor", "--engine", url]) == 2
    assert capsys.readouterr().err == f"error: --engine {url}: GET /model_info at {url}: {NOBODY}\n"


def several(*numbers):
    """As asyncio raises it where a name has several addresses."""
    said = ", ".join(f"[Errno {number}] Connect call failed ('::{at}', 9)" for at, number in enumerate(numbers))
    return OSError(f"Multiple exceptions: {said}")


def test_addresses_that_failed_in_several_ways_are_not_all_refused():
    assert nobody_listens(several(111, 111))
    assert in_words(several(111, 111)) == NOBODY
    assert not nobody_listens(several(111, 113))
    assert not nobody_listens(several(99, 111))  # where it listens there may be no free port
    assert not nobody_listens(TimeoutError())


@pytest.mark.parametrize(
    ("numbers", "words"),
    [
        (
            (111, 99),
            "nobody listens there; another address of it: this machine has no address towards it, or no free port",
        ),
        ((111, 71), "nobody listens there; another address of it: Protocol error"),
        ((101, 113, 111), "there is no way to it from here; another address of it: nobody listens there"),
    ],
)
def test_addresses_that_failed_in_several_ways_are_told_in_words(numbers, words):
    """A machine without IPv6 whose localhost has an address of it, for one."""
    assert in_words(several(*numbers)) == words


def test_what_the_http_library_raises():
    assert in_words(aiohttp.ServerDisconnectedError()) == ENDED
    assert in_words(aiohttp.ClientConnectionResetError("Cannot write to closing transport")) == ENDED
    assert in_words(aiohttp.ConnectionTimeoutError("Connection timeout to host")) == "no connection came about in time"
    assert in_words(TimeoutError()) == "no answer came in time"
    assert in_words(OSError(113, "No route to host")) == "there is no way to it from here"
    assert "ulimit" in in_words(OSError(24, "Too many open files"))
    assert in_words(OSError("two\nlines")) == "two lines"
