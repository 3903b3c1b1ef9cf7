"""A trainer that offers weights and then hangs, and offers that nobody should send: the server says so, and ends."""

import asyncio
import contextlib
import signal
import socket

import aiohttp
import pytest
from engines.serve.conftest import serving
from engines.serve.wire import get, ok, post

from gruppetto.weights.channels import gloo

OFFER = {"version": 3, "kind": "full", "places": [], "deadline_s": 80_000.0}
WAY = "/gruppetto/weights/"


@pytest.fixture
async def paused(tiny_model):
    """A real server, paused: (its client, its process)."""
    with serving(str(tiny_model), "--slots", "2", "--context", "64", "--skip-tokenizer-init") as (url, process):
        async with aiohttp.ClientSession(url) as http:
            await ok(http, "/pause_generation", {"mode": "retract"})
            yield http, process


def shm(tmp_path):
    """A sender that listens and does nothing more."""
    listening = socket.socket(socket.AF_UNIX)
    listening.bind(str(tmp_path / "weights"))
    listening.listen(1)
    return listening, {"channel": "shm", "address": {"path": str(tmp_path / "weights"), "name": "e"}}


def deaf(tmp_path):
    """One whose store takes connections, and answers nothing."""
    listening = socket.create_server(("127.0.0.1", 0))
    return listening, gloo_offer(listening.getsockname()[1])


def wordless(tmp_path):
    """One whose store answers, and never says go."""
    store = gloo._store("127.0.0.1", 600.0)
    return contextlib.nullcontext(store), gloo_offer(store.port)


def gloo_offer(port):
    return {"channel": "gloo", "address": {"host": "127.0.0.1", "port": port, "rank": 1, "size": 2}}


async def transferring(http, offer):
    """The offer, once the server is busy with it: until then it would read the digests of its weights at once."""
    task = asyncio.ensure_future(post(http, WAY + "prepare", OFFER | offer))
    async with asyncio.timeout(60):
        while (await post(http, WAY + "state"))[1]["version"] is not None:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
    return task


@pytest.mark.parametrize("sender", [shm, deaf, wordless])
async def test_a_server_ends_though_its_sender_hangs(paused, tmp_path, sender):
    http, process = paused
    listening, offer = sender(tmp_path)
    with listening:
        task = await transferring(http, offer)
        process.send_signal(signal.SIGTERM)
        assert await asyncio.to_thread(process.wait, 100) == 0
    with pytest.raises(aiohttp.ClientError) if sender is deaf else contextlib.nullcontext():
        status, said = await task
        assert status == 400, said
    assert "Traceback" not in process.stderr.read()


@pytest.mark.parametrize("sender", [shm, wordless])
async def test_a_transfer_that_hangs_is_dropped_and_the_next_one_is_taken(paused, tmp_path, tiny_model, sender):
    http, _ = paused
    listening, offer = sender(tmp_path)
    with listening:
        task = await transferring(http, offer)
        await ok(http, WAY + "drop")
        assert (await task)[0] == 400
    await ok(http, "/update_weights_from_disk", {"model_path": str(tiny_model)})
    await ok(http, "/continue_generation")


async def test_a_sender_that_is_gone_is_seen_at_once(paused):
    http, _ = paused
    with socket.create_server(("127.0.0.1", 0)) as listening:
        port = listening.getsockname()[1]
    status, said = await post(http, WAY + "prepare", OFFER | gloo_offer(port))
    assert status == 400
    assert "the sender is gone" in said["error"]["message"]


async def test_strange_offers_are_refused_by_what_is_strange(paused):
    http, _ = paused
    there = gloo_offer(1)["address"]
    for offer, says in (
        ({"channel": "nccl", "address": {}}, "knows shm, disk and gloo"),
        ({"channel": "shm", "address": {"path": "/x"}}, "with name = None"),
        ({"channel": "shm", "address": {"path": 5, "name": "e"}}, "with path = 5"),
        ({"channel": "disk", "address": {}}, "with folder = None"),
        ({"channel": "gloo", "address": there | {"port": "x"}}, "with port = 'x'"),
        ({"channel": "gloo", "address": there | {"port": 99_999}}, "port = 99999"),
        ({"channel": "gloo", "address": there | {"rank": 2}}, "rank = 2 of 2"),
        ({"channel": "gloo", "address": there, "deadline_s": 1e308}, "deadline_s = 1e+308"),
        ({"channel": "gloo", "address": there, "deadline_s": -1.0}, "deadline_s = -1"),
        ({"channel": "gloo", "address": there, "deadline_s": 0}, "deadline_s = 0"),
    ):
        status, said = await post(http, WAY + "prepare", OFFER | offer)
        assert status == 400, said
        assert says in said["error"]["message"]
    status, said = await post(http, "/update_weights_from_disk", {"model_path": "x" * 5000})
    assert status == 400
    assert "cannot be read" in said["message"]
    assert (await get(http, "/model_info"))[0] == 200
