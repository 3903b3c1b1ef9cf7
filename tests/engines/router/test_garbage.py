"""Engines that answer what no engine should, and clients that send it: one clear answer, no 500, nothing that lasts."""

import asyncio
import json

import aiohttp
import pytest
from engines.router.conftest import until

from gruppetto.engines.router.front import Front
from gruppetto.engines.router.settings import RouteLimits, RouteSettings
from gruppetto.engines.router.upstream import Upstream
from gruppetto.engines.router.watch import sglang_reading, vllm_reading
from gruppetto.errors import UserError

HUGE = "9" * 5000
LARGE = int("9" * 400)
"""More than a float holds."""
OK = b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\n"
STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n"
ASKED = {"input_ids": [1, 2, 3], "sampling_params": {"max_new_tokens": 2}}
LOADS = json.dumps({"loads": [{"num_running_reqs": 0, "max_running_requests": 8}]}).encode()


def whole(body, head=OK):
    return head + b"Content-Length: %d\r\n\r\n" % len(body) + body


class Bytes:
    """An engine that is a socket: `answer` is what comes for `/generate`, byte for byte; then it closes, or `keeps`."""

    def __init__(self):
        self.answer, self.keeps, self.asked = whole(b"{}"), False, 0

    async def start(self):
        self.server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{self.server.sockets[0].getsockname()[1]}"
        return self

    async def _serve(self, reader, writer):
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = head.lower().partition(b"content-length: ")[2].partition(b"\r")[0]
                await reader.readexactly(int(length or 0))
                if b" /generate " in head:
                    self.asked += 1
                    writer.write(self.answer)
                    await writer.drain()
                    if not self.keeps:
                        return
                else:
                    writer.write(whole(LOADS if b"/v1/loads" in head else b"{}"))
        except (asyncio.IncompleteReadError, ConnectionError):
            pass
        finally:
            writer.close()


@pytest.fixture
async def routed():
    """A router before such an engine: (engine, client, front)."""
    engine = await Bytes().start()
    front = Front(RouteSettings(engines=(engine.url,), port=0, limits=RouteLimits(request_s=1.0)))
    await front.open()
    async with aiohttp.ClientSession(f"http://127.0.0.1:{front.port}") as client:
        await until(lambda: front.fleet.up)
        yield engine, client, front
    await front.close()
    engine.server.close()


@pytest.mark.parametrize(
    "answer",
    [
        OK + b"Content-Length: -5\r\n\r\nx",
        OK + b"Content-Length: " + HUGE.encode() + b"\r\n\r\nx",
        b"HTTP/1.1 000 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 -20 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 999 OK\r\nContent-Length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nContent-Type: a\nb: c\r\nContent-Length: 2\r\n\r\n{}",
        b"HTTP/1.1 200 OK\r\nContent-Type: a\x01\r\nContent-Length: 2\r\n\r\n{}",
        OK + b"Content-Length: 100\r\n\r\n{",
        b"\x00\xff\xfe\r\n\r\n",
    ],
)
async def test_what_is_no_answer_is_a_502_and_never_an_empty_200(routed, answer):
    engine, client, _ = routed
    engine.answer = answer
    async with client.post("/generate", json=ASKED) as response:
        assert response.status == 502
        assert "it may have been run" in (await response.json())["error"]["message"]
    assert engine.asked == 1
    engine.answer = whole(b'{"text": "x"}')
    async with client.post("/generate", json=ASKED) as response:
        assert (response.status, await response.json()) == (200, {"text": "x"})


async def test_any_number_of_informational_answers_is_passed_over(routed):
    engine, client, _ = routed
    engine.answer = b"HTTP/1.1 100 Continue\r\n\r\n" * 20_000 + whole(b'{"text": "x"}')
    async with client.post("/generate", json=ASKED) as response:
        assert (response.status, await response.json()) == (200, {"text": "x"})


@pytest.mark.parametrize("count", [HUGE, "9" * 400])
async def test_counts_that_nothing_can_be_are_not_counted_and_pass(routed, count):
    engine, client, front = routed
    said = b'{"meta_info":{"completion_tokens":%b,"cached_tokens":%b}}' % (count.encode(), count.encode())
    engine.answer = whole(said)
    async with client.post("/generate", json=ASKED) as response:
        assert (response.status, await response.read()) == (200, said)
    engine.answer = STREAM + b"\r\ndata: " + said + b"\n\ndata: [DONE]\n\n"
    async with client.post("/generate", json=ASKED | {"stream": True}) as response:
        assert (await response.read()).endswith(b"data: [DONE]\n\n")
    assert front.fleet.router.lengths.mean < 1e6


async def test_a_stream_that_takes_too_long_says_so_before_it_ends(routed):
    engine, client, front = routed
    engine.answer, engine.keeps = STREAM + b"\r\ndata: {}\n\n", True
    async with client.post("/generate", json=ASKED | {"stream": True}) as response:
        said = await response.read()
    assert b"took more than 1 s" in said
    assert said.endswith(b"data: [DONE]\n\n")
    assert not front.fleet.live


@pytest.mark.parametrize(
    "body",
    [
        ASKED | {"sampling_params": {"max_new_tokens": LARGE}},
        {"prompt": "a", "max_tokens": LARGE},
        {"messages": [], "max_completion_tokens": LARGE},
        ASKED | {"sampling_params": [{"max_new_tokens": LARGE}]},
        ASKED | {"n": LARGE},
    ],
)
async def test_budgets_beyond_all_numbers_are_the_engines_to_refuse(open_front, body):
    front, client, engines = await open_front(count=1)
    engines[0].mode = "bad"
    async with client.post("/generate", json=body) as response:
        assert response.status == 400
    assert front.fleet.router.engine(engines[0].url).expected == 0


@pytest.mark.parametrize(
    "url",
    [
        "http://[", "http://[::1", "http://x..y:1", "http://" + "a" * 5000, "http://a b:1", "http://h:1/a b",
        "http://h:1/a\r\nb", 'http://h:1/"', "http://é.example", "ftp://h:1", "http://h:99999", "",
    ],
)  # fmt: skip
async def test_what_is_no_address_is_refused_and_not_looked_after(open_front, url):
    with pytest.raises(UserError, match="is no address of an engine; write one like"):
        Upstream(url)
    front, client, _ = await open_front(count=1)
    for path, how in (("/workers", {"json": {"url": url}}), ("/add_worker", {"params": {"url": url}})):
        async with client.post(path, **how) as response:
            assert response.status == 400
    assert len(front.fleet.engines) == 1


def test_addresses_that_engines_have():
    for url in ("http://127.0.0.1:1", "https://[::1]:8000/v2/", "http://engine_0.svc.local", "http://localhost"):
        assert Upstream(url).url == url.rstrip("/")


async def test_a_body_without_a_bottom(open_front):
    _, client, _ = await open_front(count=1)
    deep = b'{"x":' + b"[" * 10_000
    for path in ("/workers", "/generate"):
        async with client.post(path, data=deep) as response:
            assert response.status in (200, 400)


@pytest.mark.parametrize(
    "load",
    [
        {"max_running_requests": -5}, {"max_running_requests": 10**30}, {"num_running_reqs": -1},
        {"num_waiting_reqs": 10**30}, {"token_usage": -1e300}, {"max_total_num_tokens": -1}, {"gen_throughput": -1.0},
    ],
)  # fmt: skip
def test_a_load_that_no_engine_can_have_is_no_reading(load):
    """A limit made from it would last."""
    assert sglang_reading(json.dumps({"loads": [load]}).encode(), 0.0) is None
    assert sglang_reading(LOADS, 0.0).slots == 8


@pytest.mark.parametrize("value", ["e", "1e999", "-1", "+-", "."])
def test_gauges_that_no_engine_can_have_are_no_reading(value):
    assert vllm_reading(f"vllm:num_requests_running {value}\n", 0.0) is None
    assert vllm_reading("vllm:num_requests_running 3.0\nvllm:kv_cache_usage_perc 0.5\n", 0.0).running == 3


def test_loads_without_a_bottom():
    assert sglang_reading(b"[" * 100_000, 0.0) is None
