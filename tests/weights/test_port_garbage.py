"""A server that answers on our weight routes what is none of our answers fails by its name, in one line."""

import pytest
from aiohttp import web

from gruppetto.errors import EngineError
from gruppetto.weights.channels.base import Offer
from gruppetto.weights.channels.port import RemotePort

OFFER = Offer(version=1, kind="full", channel="shm", address={}, places=())


class Remote:
    name, control_key = "odd", ""

    def __init__(self, port):
        self.control_url = f"http://127.0.0.1:{port}"

    def weights_label(self, version):
        return str(version)

    def weights_taken(self, version):
        raise AssertionError("it was not")


@pytest.fixture
async def answering():
    """answering(status, body) -> the port to a server that always answers so."""
    runners = []

    async def start(status, body):
        async def answer(request):
            return web.Response(status=status, body=body)

        app = web.Application()
        app.router.add_route("*", "/{path:.*}", answer)
        runners.append(web.AppRunner(app))
        await runners[-1].setup()
        await web.TCPSite(runners[-1], "127.0.0.1", 0).start()
        return RemotePort(Remote(runners[-1].addresses[0][1]))

    yield start
    for runner in runners:
        await runner.cleanup()


@pytest.mark.parametrize(
    "body",
    [b"", b"<html>", b'{"boot": {}}', b"[1, 2]", b'"\xff"', b"[" * 100_000, b'{"a": "b"}', b'{"a": {}}', b"5", b"null"],
)
async def test_what_is_none_of_our_answers(answering, body):
    port = await answering(200, body)
    for call in (port.state, lambda: port.prepare(OFFER), port.audit):
        with pytest.raises(EngineError, match=r"^engine odd: weights .*: the answer is none of gruppetto serve's: "):
            await call()


@pytest.mark.parametrize("body", [b"", b"<html>", b"[" * 100_000, b'{"error": "x"}', b"[]", b'"\xff"'])
async def test_a_failure_that_is_not_explained_has_its_status(answering, body):
    port = await answering(500, body)
    for call in (port.state, lambda: port.commit(1)):
        with pytest.raises(EngineError, match=r"HTTP 500$"):
            await call()
    port = await answering(500, b'{"error": {"message": "%s"}}' % (b"long " * 10_000))
    with pytest.raises(EngineError) as caught:
        await port.state()
    assert len(str(caught.value)) < 400
