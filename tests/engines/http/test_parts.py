"""The small parts: streams, errors, the account, staged folders, command lines, processes."""

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections import Counter

import pytest
from aiohttp import web
from engines.kit import other_weights, request
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.clock import run_virtual
from gruppetto.engines.base import EngineFinish
from gruppetto.engines.http.account import Account, Told
from gruppetto.engines.http.answers import result_of
from gruppetto.engines.http.client import HttpClient, message_of
from gruppetto.engines.http.errors import Lost, NoRoute, Refused, Unavailable
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.streams import events
from gruppetto.engines.http.wire import Made, parse_metrics
from gruppetto.engines.launch import EngineProcess, Launch, command_of, flags
from gruppetto.errors import EngineError
from gruppetto.weights.base import Bucket
from gruppetto.weights.checksum import checksum

# -- streams ----------------------------------------------------------------------------------------------------------


class Pieces:
    def __init__(self, raw, cuts):
        self._pieces = [raw[a:b] for a, b in zip([0, *cuts], [*cuts, len(raw)], strict=True)]

    async def iter_any(self):
        for piece in self._pieces:
            yield piece


@given(st.lists(st.text(st.characters(blacklist_characters="\r\n", codec="utf-8"), max_size=20), max_size=6), st.data())
def test_events_come_whole_whatever_the_network_cuts(texts, data):
    sent = [json.dumps(text) for text in texts]
    raw = "".join(f"data: {text}\n\n" for text in sent).encode() + b": comment\n\ndata: [DONE]\n\n"
    cuts = sorted(data.draw(st.lists(st.integers(0, len(raw)), max_size=8)))

    async def collect():
        return [event.decode() async for event in events(Pieces(raw, cuts))]

    assert asyncio.run(collect()) == sent


def test_a_stream_without_its_end_was_broken_off():
    async def collect():
        return [event async for event in events(Pieces(b"data: 1\n\ndata: 2\n", []))]

    with pytest.raises(ConnectionError):
        asyncio.run(collect())


# -- the client -------------------------------------------------------------------------------------------------------


@pytest.fixture
async def answering():
    """answering(handler) -> a client of a server with that handler at every path."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(handler):
            app = web.Application()
            app.router.add_route("*", "/{path:.*}", handler)
            runner = web.AppRunner(app, shutdown_timeout=0.1)
            await runner.setup()
            stack.push_async_callback(runner.cleanup)
            await web.TCPSite(runner, "127.0.0.1", 0).start()
            client = HttpClient("e", f"http://127.0.0.1:{runner.addresses[0][1]}/", api_key="secret")
            await client.open()
            stack.push_async_callback(client.close)
            return client

        yield start


@pytest.mark.parametrize(
    ("status", "kind"),
    [(400, Refused), (404, NoRoute), (405, NoRoute), (422, Refused), (429, Unavailable), (503, Unavailable)],
)
async def test_errors_have_types(answering, status, kind):
    seen = []

    async def handler(request):
        seen.append(request.headers["Authorization"])
        return web.json_response({"error": {"message": "why it is so"}}, status=status)

    client = await answering(handler)
    with pytest.raises(kind, match="why it is so"):
        await client.ask("POST", "/x", {}, within_s=2.0)
    assert seen[0] == "Bearer secret"
    assert (len(seen) > 1) == (kind is Unavailable)


async def test_500_is_the_engines_and_401_asks_for_the_key(answering):
    async def handler(request):
        return web.Response(status=int(request.path[1:]), text="broken")

    client = await answering(handler)
    with pytest.raises(EngineError, match="500: broken"):
        await client.ask("GET", "/500", within_s=5)
    with pytest.raises(Refused, match="GRUPPETTO_ENGINE_API_KEY"):
        await client.ask("GET", "/401", within_s=5)


async def test_a_deadline_holds_for_the_whole_answer(answering):
    async def handler(request):
        response = web.StreamResponse()
        await response.prepare(request)
        with contextlib.suppress(ConnectionError):
            while True:
                await response.write(b" ")
                await asyncio.sleep(0.01)

    client = await answering(handler)
    with pytest.raises(Lost, match=r"within 0\.3 s"):
        await client.ask("GET", "/x", within_s=0.3)


async def test_nobody_there_is_lost():
    client = HttpClient("e", "http://127.0.0.1:9")
    await client.open()
    with pytest.raises(Lost):
        await client.ask("GET", "/x", within_s=5)
    await client.close()


def test_messages_are_short_and_found_where_servers_put_them():
    assert message_of(b'{"error": {"message": "a\\n b"}}') == "a b"
    assert message_of(b'{"detail": "c"}') == "c"
    assert message_of(b"plain") == "plain"
    assert len(message_of(b"x" * 5000)) < 400


# -- account, metrics, answers ----------------------------------------------------------------------------------------


@given(st.lists(st.tuples(st.integers(0, 12), st.integers(0, 50)), max_size=30))
def test_the_account_loses_no_token(moves):
    account = Account(slots=8)
    for live, tokens in moves:
        account.rows(live)
        account.made(tokens)
    told = sum(tokens for _, tokens in moves)
    booked = sum(rows * steps for rows, steps in account.batch_steps.items())
    assert account.tokens == told
    assert booked <= told
    assert booked >= told - sum(range(1, 9)) - 8  # what is less than a step is owed
    assert all(1 <= rows <= 8 for rows in account.batch_steps)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.integers(0, 80)), max_size=30))
def test_what_a_server_tells_before_its_answers_is_booked_once(moves):
    """Steps when they are told, tokens when an answer brings them; what is told while nothing is open is for others."""
    account, decoded, ours, answered = Account(slots=1), 0, 0, 0
    account.heard(0)
    for live, tells, brings in moves:
        brings = min(brings, ours - answered) if live else ours - answered  # all of them, before nothing is open
        account.made(brings)
        answered += brings
        account.rows(int(live))
        decoded += tells
        ours += tells * live
        account.heard(decoded)
        assert (account.tokens, account.steps) == (answered, ours)


def test_a_server_that_tells_is_timed_before_anything_ends():
    async def main():
        account = Account(slots=4)
        account.heard(1000)
        account.rows(2)
        await asyncio.sleep(5.0)
        account.heard(1100)
        seen = dict(account.batch_steps), dict(account.batch_s), account.tokens
        account.heard(None)
        account.heard(7)  # it was started anew
        account.made(100)
        return seen, account.steps, account.tokens

    assert run_virtual(main()) == (({2: 50}, {2: 5.0}, 0), 50, 100)


@given(st.lists(st.tuples(st.booleans(), st.integers(0, 50), st.sampled_from(["prefilled", "cached"])), max_size=30))
def test_counters_go_on_where_a_server_is_started_anew(moves):
    """All that it has counted counts, unless it has counted more before it is asked than ever before."""
    account, server, ours = Account(slots=1), dict.fromkeys(("prefilled", "cached"), 0), Counter()
    for anew, more, name in moves:
        if anew and server[name] > more:
            server[name] = 0
        server[name] += more
        ours[name] += more
        account.count_on(Told(**server))
        account.count_on(Told())
        assert account.counted == ours


async def test_what_an_engine_has_prefilled_does_not_fall_when_it_comes_back(open_scripted, connect):
    engine = await connect(await open_scripted())
    engine._heard(Told(prefilled=900, cached=100, preemptions=3))
    engine._heard(Told(prefilled=50, cached=20, preemptions=1))
    stats = engine.stats()
    assert (stats.prefill_tokens_total, stats.cached_tokens_total, stats.preemptions_total) == (830, 120, 4)


def test_a_metric_with_a_label_is_only_for_it():
    text = 'a{mode="prefill",x="1"} 2\na{x="1",mode="decode"} 3\nb{x="1"} 4\n'
    names = {"a": "all", 'a{mode="decode"}': "one", 'b{mode="decode"}': "other"}
    assert parse_metrics(text, names) == {"all": 5.0, "one": 3.0, "other": 4.0}


def test_metrics_are_summed_over_labels():
    text = '# TYPE a counter\na_total{x="1"} 2.0\na_total{x="2 {"} 3.0\nb 1e3\nc{y="z"} 7\n'
    assert parse_metrics(text, {"a_total": "a", "b": "b"}) == {"a": 5.0, "b": 1000.0}


def result(made, **more):
    chosen = {"labels": {"0": 0, "1": 1}, "sent_at": 0, "decode": None} | more
    return result_of("e", request("a", [1, 2], max_tokens=10), made, **chosen)


def test_spans_become_segments():
    spans = [("0", 0, 2), ("0", 2, 3), ("1", 3, 5)]
    found = result(Made(ids=[5, 6, 7, 8, 9], logprobs=[-1.0] * 5, spans=spans, finish=EngineFinish.LENGTH))
    assert [(s.version, list(s.token_ids)) for s in found.segments] == [(0, [5, 6, 7]), (1, [8, 9])]


@pytest.mark.parametrize(
    "spans", [[("0", 0, 2)], [("0", 1, 3)], [("0", 0, 1), ("1", 2, 3)], [("0", 2, 3), ("1", 0, 2)]]
)
def test_spans_that_do_not_cover_the_tokens_are_refused(spans):
    with pytest.raises(EngineError, match="do not cover"):
        result(Made(ids=[5, 6, 7], logprobs=[-1.0] * 3, spans=spans, finish=EngineFinish.STOP))


def test_answers_against_the_contract_are_refused():
    for made, why in (
        (Made(ids=[5] * 11, logprobs=[-1.0] * 11, finish=EngineFinish.STOP), "budget"),
        (Made(ids=[5, 6], logprobs=[-1.0], finish=EngineFinish.STOP), "2 tokens and 1 logprobs"),
        (Made(ids=[5], logprobs=[float("nan")], finish=EngineFinish.STOP), "a logprob is nan"),
        (Made(ids=[5], logprobs=[0.5], finish=EngineFinish.STOP), "a logprob is 0.5"),
        (Made(ids=[5], logprobs=[-1.0]), "without a finish"),
    ):
        with pytest.raises(EngineError, match=why):
            result(made)
    cut = result(Made(ids=[5, 6], logprobs=[-1.0], finish=EngineFinish.ABORT))
    assert cut.num_tokens == 1


# -- staged folders ---------------------------------------------------------------------------------------------------


async def test_engines_share_a_folder_and_old_ones_go(tiny_model, tmp_path):
    staging = Staging(tmp_path / "w", tiny_model)
    pairs = list(other_weights(tiny_model).named_parameters())
    halves = [pairs[: len(pairs) // 2], pairs[len(pairs) // 2 :]]
    buckets = [Bucket(index=n, tensors=half, checksum=checksum(half)) for n, half in enumerate(halves)]
    for version in range(1, 5):
        folders = set()
        for engine in ("a", "b"):
            await staging.begin(version, engine)
        for bucket in buckets:
            await asyncio.gather(*(staging.add(version, bucket, engine) for engine in ("a", "b")))
        for engine in ("a", "b"):
            folders.add(await staging.finish(version, 2, engine))
            await staging.loaded(version, engine)
        assert len(folders) == 1
        folder = folders.pop()
        assert [path.name for path in folder.parent.iterdir()] == [f"version_{version}"]
        index = json.loads((folder / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"]) == {name for name, _ in pairs}
        assert (folder / "config.json").exists()


async def test_a_folder_that_is_not_whole_has_no_name(tiny_model, tmp_path):
    staging = Staging(tmp_path / "w", tiny_model)
    pairs = list(other_weights(tiny_model).named_parameters())
    await staging.begin(1, "a")
    await staging.add(1, Bucket(index=0, tensors=pairs, checksum=checksum(pairs)), "a")
    with pytest.raises(EngineError, match="1 of 2 buckets"):
        await staging.finish(1, 2, "a")
    with pytest.raises(EngineError, match="two forms"):
        await staging.add(1, Bucket(index=0, tensors=pairs, checksum=1), "a")
    assert not (tmp_path / "w" / "version_1").exists()


# -- processes --------------------------------------------------------------------------------------------------------


def test_arguments_are_passed_verbatim():
    args = {"max_num_seqs": 4, "enforce_eager": True, "off": False, "stop": ["a", "b"], "kv": {"x": 1}, "--raw": "{y}"}
    expected = ["--max-num-seqs", "4", "--enforce-eager", "--stop", "a", "b", "--kv", '{"x": 1}', "--raw", "{y}"]
    assert flags(args) == expected


def test_our_own_names_are_filled_in():
    launch = Launch(name="e", index=3, model="m", command=["run", "{model}", "{host}:{port}"], args={"seed": "{index}"})
    assert command_of(launch, 81) == ["run", "m", "127.0.0.1:81", "--seed", "3"]


def process_of(tmp_path, code, **more):
    command = [sys.executable, "-c", code]
    return EngineProcess(Launch(name="e", index=0, model="m", command=command, log=tmp_path / "e.log", **more))


async def test_the_last_words_of_a_process_are_in_the_message(tmp_path):
    process = process_of(tmp_path, "import sys; print('no such model'); sys.exit(3)")
    await process.start()
    await process.ends_within(100)
    assert "exited with 3" in process.ended()
    assert "no such model" in process.ended()
    await process.stop()


async def test_the_first_error_of_the_last_start_is_in_the_message(tmp_path):
    (tmp_path / "e.log").write_text("--- before\nOSError: of an earlier start\n")
    logged = "print('(Worker pid=7) ERROR 11-30 07:50 [executor.py:953] ValueError: too little memory, 9 of 17 GB')"
    later = "[print('  File', n) for n in range(99)]; raise RuntimeError('see root cause above')"
    process = process_of(tmp_path, f"{logged}; {later}")
    await process.start()
    await process.ends_within(100)
    said = process.ended()
    assert "its first error: ValueError: too little memory, 9 of 17 GB; " in said
    assert said.endswith("RuntimeError: see root cause above")
    assert "earlier start" not in said
    await process.stop()


async def test_a_kill_is_noticed_at_once_and_the_group_ends(tmp_path):
    code = (
        "import subprocess, sys, time; p = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)']); "
    )
    code += "print(p.pid, flush=True); time.sleep(600)"
    process = process_of(tmp_path, code)
    await process.start()
    log = tmp_path / "e.log"
    async with asyncio.timeout(100):
        while not log.read_text().splitlines()[-1].isdigit():  # noqa: ASYNC110
            await asyncio.sleep(0.05)
    child = int(log.read_text().splitlines()[-1])
    assert process.ended() is None
    os.kill(process.pid, signal.SIGKILL)
    await process.ends_within(100)
    assert "SIGKILL" in process.ended()
    await process.stop()
    async with asyncio.timeout(100):
        while alive(child):  # noqa: ASYNC110
            await asyncio.sleep(0.05)


def alive(pid):
    """Running, and no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


async def test_a_flag_that_a_release_does_not_know_is_left_out(tmp_path):
    code = "import argparse, time; p = argparse.ArgumentParser(); p.add_argument('--known', action='store_true'); "
    code += "print(p.parse_args()); time.sleep(600)"
    process = process_of(tmp_path, code, optional=["--known", "--newer"])
    await process.start()
    await process.ends_within(100)
    assert process.forgives()
    await process.start()
    assert process.ended() is None
    assert not process.forgives()
    await process.stop()


async def test_a_program_that_is_not_there_is_said(tmp_path):
    launch = Launch(name="e", index=0, model="m", command=["/no/such/program"], log=tmp_path / "e.log")
    with pytest.raises(EngineError, match="/no/such/program cannot be started"):
        await EngineProcess(launch).start()
