"""The answer is the same however the bytes are cut; what is no HTTP, or breaks off, is said."""

import asyncio

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from gruppetto.engines.router.http1 import Broken, Connection

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/plain\r\n"


class Wire:
    """What a transport is to a connection."""

    def __init__(self):
        self.sent, self.closed, self.paused = b"", False, 0

    def write(self, data):
        self.sent += data

    def writelines(self, parts):
        self.sent += b"".join(parts)

    def is_closing(self):
        return self.closed

    def abort(self):
        self.closed = True

    def pause_reading(self):
        self.paused += 1

    def resume_reading(self):
        self.paused -= 1


async def talk(data, cuts=(), end=None):
    """(head, body) of an answer that comes in pieces; `end`: the connection closes behind it."""
    connection = Connection()
    connection.connection_made(Wire())
    task = asyncio.ensure_future(connection.ask(b"POST / HTTP/1.1\r\n\r\n", b"x"))
    await asyncio.sleep(0)
    at = 0
    for cut in [*sorted(cuts), len(data)]:
        if cut > at:
            connection.data_received(data[at:cut])
            await asyncio.sleep(0)
            at = cut
    if end is not None:
        connection.connection_lost(end or None)
    head = await task
    return head, await connection.whole(), connection


def at(cuts, data):
    return [c % len(data) for c in cuts]


def chunked(pieces):
    return b"".join(b"%x;a=b\r\n%b\r\n" % (len(p), p) for p in pieces if p) + b"0\r\n\r\n"


bodies = st.binary(max_size=300)
cuts = st.lists(st.integers(1, 10_000), max_size=12)
"""Taken modulo the length of what is cut."""


@settings(deadline=None)  # a busy machine is no failure
@given(body=bodies, cuts=cuts)
def test_a_body_of_known_length(body, cuts):
    data = HEAD + b"Content-Length: %d\r\n\r\n" % len(body) + body
    head, found, connection = asyncio.run(talk(data, at(cuts, data)))
    assert (head.status, head.get(b"content-type"), found) == (200, "text/plain", body)
    assert connection.keeps


@settings(deadline=None)  # a busy machine is no failure
@given(pieces=st.lists(bodies, max_size=5), cuts=cuts)
@example(pieces=[b"abcdefgh"], cuts=[len(HEAD) + 40])
@example(pieces=[b"abcdefgh"], cuts=list(range(1, 100)))
def test_a_body_in_chunks(pieces, cuts):
    data = HEAD + b"Transfer-Encoding: chunked\r\n\r\n" + chunked(pieces)
    _, found, connection = asyncio.run(talk(data, at(cuts, data)))
    assert found == b"".join(pieces)
    assert connection.keeps


@settings(deadline=None)  # a busy machine is no failure
@given(body=bodies, cuts=cuts)
def test_a_body_until_the_end(body, cuts):
    data = HEAD + b"\r\n" + body
    _, found, connection = asyncio.run(talk(data, at(cuts, data), end=b""))
    assert found == body
    assert not connection.keeps


@settings(deadline=None)  # a busy machine is no failure
@given(data=st.binary(min_size=1, max_size=200), cuts=cuts)
def test_noise_is_broken_or_waits_and_never_an_answer(data, cuts):
    async def run():
        try:
            async with asyncio.timeout(5):
                head, _, _ = await talk(data, at(cuts, data), end=ConnectionResetError())
        except Broken:
            return
        assert data.startswith(b"HTTP/1."), head

    asyncio.run(run())


@pytest.mark.parametrize(
    "answer",
    [
        HEAD + b"Content-Length: 3\r\n\r\nabcd",
        HEAD + b"Content-Length: -1\r\n\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\nzz\r\n",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n1\r\nabc",
        HEAD + b"Transfer-Encoding: chunked\r\n\r\n-1\r\n",
        b"SSH-2.0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nno colon\r\n\r\n",
        b"x" * (1 << 17),
    ],
)
async def test_what_is_no_http(answer):
    with pytest.raises(Broken):
        await talk(answer)


@pytest.mark.parametrize("begun", [True, False])
async def test_breaking_off_tells_whether_it_had_begun(begun):
    data = HEAD + b"Content-Length: 9\r\n\r\nabc" if begun else b""
    with pytest.raises(Broken) as broken:
        await talk(data, end=ConnectionResetError())
    assert broken.value.begun is begun


async def test_informational_answers_are_passed_over_and_close_is_heeded():
    data = b"HTTP/1.1 100 Continue\r\n\r\n" + HEAD + b"Connection: close\r\nContent-Length: 1\r\n\r\na"
    head, found, connection = await talk(data)
    assert (head.status, found, connection.keeps) == (200, b"a", False)


async def test_an_answer_nobody_asked_for_ends_the_connection():
    _, _, connection = await talk(HEAD + b"Content-Length: 0\r\n\r\n")
    connection.data_received(b"HTTP/1.1 408 Timeout\r\n\r\n")
    assert not connection.usable


async def test_a_slow_reader_stops_the_reading():
    connection = Connection()
    wire = Wire()
    connection.connection_made(wire)
    task = asyncio.ensure_future(connection.ask(b"", b""))
    await asyncio.sleep(0)
    connection.data_received(HEAD + b"Content-Length: 1000000\r\n\r\n")
    await task
    connection.data_received(b"x" * 300_000)
    assert wire.paused == 1
    assert len(await connection.piece()) == 300_000
    assert wire.paused == 0
