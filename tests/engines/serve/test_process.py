"""The process: signals, what a taken port says, and an end in which everybody is answered."""

import asyncio
import re
import signal
import socket

import aiohttp
import pytest
from engines.serve.conftest import serving
from engines.serve.wire import events, get, ok, post, running, start

from gruppetto.cli.main import main

LOADING = "loading {}, to serve it on {}"


async def gone(process):
    return await asyncio.to_thread(process.wait, 100)


async def test_sigterm_drains_then_aborts_and_answers_everybody(tiny_model, held):
    """It drains for longer than this test looks at it."""
    sizes = ("--slots", "2", "--context", "2048", "--drain", "5")
    with serving(str(tiny_model), *sizes, few_steps=held) as (url, process):
        async with aiohttp.ClientSession(url) as http:
            long = [start(http, f"r{i}", max_new_tokens=2000) for i in range(3)]
            body = {"input_ids": [1], "sampling_params": {"max_new_tokens": 2000, "ignore_eos": True}, "stream": True}
            stream = asyncio.ensure_future(events(http, "/generate", body))
            await running(http, 2, waiting=2)
            process.send_signal(signal.SIGTERM)
            async with asyncio.timeout(60):
                while (await get(http, "/ready"))[0] == 200:  # noqa: ASYNC110
                    await asyncio.sleep(0.005)
            status, found = await post(http, "/generate", {"input_ids": [1]})
            assert (status, found["error"]["retryable"]) == (503, True)
            assert (await get(http, "/health"))[0] == (await get(http, "/ready"))[0] == 503
            for status, found in await asyncio.gather(*long):
                assert status == 200
                assert found["meta_info"]["finish_reason"]["type"] == "abort"
            assert (await stream)[-1]["meta_info"]["finish_reason"]["type"] == "abort"
        assert await gone(process) == 0
        assert process.stderr.read().splitlines() == [LOADING.format(tiny_model, "a free port of 127.0.0.1")]


async def test_ctrl_c_ends_with_130_also_while_requests_are_held(tiny_model):
    with serving(str(tiny_model), "--slots", "2", "--drain", "30", "--api-key", "k") as (url, process):
        headers = {"Authorization": "Bearer k"}
        async with aiohttp.ClientSession(url, headers=headers) as http:
            await ok(http, "/pause_generation", {"mode": "retract"})
            held = start(http, "held")
            await running(http, 0, waiting=1)
            process.send_signal(signal.SIGINT)
            status, found = await held
            assert (status, found["output_ids"]) == (200, [])
        assert await gone(process) == 130


def test_a_taken_port_is_refused_before_the_model_is_loaded(tiny_model, capsys, monkeypatch):
    monkeypatch.setattr("gruppetto.engines.serve.server.Server.start", None)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        assert main(["serve", str(tiny_model), "--port", str(port)]) == 2
    loading, refused = capsys.readouterr().err.splitlines()
    assert loading == LOADING.format(tiny_model, f"http://127.0.0.1:{port}")
    assert re.fullmatch(rf"error: --port {port} on 127.0.0.1 cannot be had .*; write another", refused)


@pytest.mark.parametrize(
    ("where", "named"),
    [
        ((), "http://127.0.0.1:30000"),
        (("--port", "0", "--control-port", "9001"), "a free port of 127.0.0.1, control on http://127.0.0.1:9001"),
        (("--host", "::1", "--port", "8000"), "http://[::1]:8000"),
    ],
)
def test_what_is_loaded_and_where_it_will_listen_is_said_before_anything_is_read(where, named, capfd, monkeypatch):
    """Also before the libraries that read it are there, which takes seconds; standard output has the one line of a
    server that serves."""
    said = []

    def quiet(threads):
        said.append(capfd.readouterr())

    monkeypatch.setattr("gruppetto.cli.serve.quiet", quiet)
    assert main(["serve", "no-such-model", *where]) == 2
    assert [(out, err) for out, err in said] == [("", LOADING.format("no-such-model", named) + "\n")]
