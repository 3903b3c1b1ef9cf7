"""A whole run over each weight channel: the same rollouts and learning as with plain copies; and to servers."""

import asyncio
import threading

import aiohttp
import pytest
from engines.contract.scripted import Scripted
from engines.serve.conftest import serving

from e2e.conftest import events_of, metrics_of, rollouts_of
from e2e.test_servers import ASYNC, conserved, weights_fit
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.channels.port import RemotePort, Unreachable
from gruppetto.weights.channels.reach import Reach

SAME = ("reward/mean", "loss/policy", "optim/grad_norm", "rollout/tokens/mean")


def learned(folder):
    rows = [{key: row[key] for key in SAME if key in row} for row in metrics_of(folder)]
    assert all("reward/mean" in row and "optim/grad_norm" in row for row in rows)
    return rows, [(row["rollout"], row["segments"]) for row in rollouts_of(folder)]


@pytest.fixture
def copied(train):
    code, folder = train("run.deterministic=true", 'run.name="copied"')
    assert code == 0
    return learned(folder)


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("channel", ["shm", "disk", "gloo"])
def test_a_channel_changes_nothing_of_what_is_learned(train, copied, channel, mode):
    settings = (f'weights.channel="{channel}"', f'weights.mode="{mode}"', "weights.verify_every=2")
    code, folder = train("run.deterministic=true", 'run.name="other"', *settings)
    assert code == 0
    assert learned(folder) == copied
    assert {row["version"] for row in events_of(folder) if row["kind"] == "probe"} == {1, 3}
    if channel == "disk":
        assert sorted(path.name for path in (folder / "weights").iterdir()) == ["weights_v000003", "weights_v000004"]


def test_running_rollouts_take_new_weights_over_shared_memory(train):
    settings = ('run.placement="disaggregated"', 'weights.channel="shm"', "weights.verify_every=1", "engine.count=2")
    code, folder = train('scheduler.type="async_bounded"', *settings)
    assert code == 0
    measured = [row["mismatch_kl/mean"] for row in metrics_of(folder) if "mismatch_kl/mean" in row]
    assert measured
    assert max(measured) < 1e-6


# --- to servers ------------------------------------------------------------------------------------------------------

SIZES = ("--slots", "8", "--context", "96", "--skip-tokenizer-init")
BITS = 70400 // 4
"""Elements of the model, which is sent in the engine's type."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def dtype(request):
    return request.param


@pytest.fixture(scope="module")
def served(small_model, dtype, computing):
    """Its engine takes few decode steps while an `overlapping` run computes."""
    with serving(str(small_model), *SIZES, "--dtype", dtype, few_steps=computing) as (url, _):
        yield url


def on(url, *more):
    return ('engine.type="sglang"', f'engine.urls=["{url}"]', "engine.slots=8", "rollout.timeout_s=120.0", *more)


def published(folder):
    return [event for event in events_of(folder) if event["kind"] == "published"]


def chosen(folder):
    (event,) = [event for event in events_of(folder) if event["kind"] == "weights_channel"]
    return event["channel"], event["mode"], event["reason"]


def versions(folder):
    """Of every token that was trained on or dropped, rollout by rollout."""
    return [[version for version, _ in row["segments"]] for row in rollouts_of(folder)]


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("channel", ["auto", "shm", "gloo", "disk"])
def test_each_channel_brings_each_version_to_a_server(train, overlapping, served, dtype, channel, mode):
    """At bfloat16 a small step moves few elements, which is what a delta is for."""
    wanted = (f'weights.channel="{channel}"', f'weights.mode="{mode}"', "weights.verify_every=2")
    rate = 2e-5 if (dtype, mode) == ("bfloat16", "delta") else 1e-3
    code, folder = train(*on(served, *ASYNC, *wanted), f'model.dtype="{dtype}"', f"train.lr={rate}")
    assert code == 0
    assert chosen(folder)[:2] == ("shm" if channel == "auto" else channel, mode)
    assert chosen(folder)[2]
    rows, size = published(folder), BITS * (4 if dtype == "float32" else 2)
    assert [row["version"] for row in rows] == [0, 1, 2, 3, 4]
    assert not any(row["failed"] for row in rows)
    kinds = [row["kinds"] for row in rows]
    whole = [row.get("publish/full_engines") for row in metrics_of(folder)]
    if mode == "delta":
        assert rows[0]["why_full"] == {"sglang-0": "first"}
        assert [bool(row.get("why_full")) for row in rows[1:]] == [kind["sglang-0"] == "full" for kind in kinds[1:]]
        assert whole == [int(kind["sglang-0"] == "full") for kind in kinds[1:]]
    else:
        assert whole == [None] * 4
    if rate < 1e-3:
        assert kinds == [{"sglang-0": "full"}, *[{"sglang-0": "delta"}] * 4]
        assert rows[0]["bytes"] == size
        assert all(row["bytes"] < 0.5 * size for row in rows[1:])
    else:
        assert [row["bytes"] for row in rows] == [size] * 5
    assert dtype == "bfloat16" or weights_fit(folder)
    found = versions(folder)
    assert all(row == sorted(row) for row in found)
    assert {version for row in found for version in row} >= {0, 1}
    assert max(row["mismatch_kl/mean"] for row in metrics_of(folder) if "mismatch_kl/mean" in row) < 0.02
    conserved(folder)


def test_memory_of_the_kv_is_given_back_while_weights_come(train, served, dtype):
    """Aborted where requests would be kept; what they made is kept all the same."""
    order = ('weights.pause="abort"', "weights.release_kv=true")
    code, folder = train(*on(served, *ASYNC, *order), f'model.dtype="{dtype}"', "rollout.max_tokens=60")
    assert code == 0
    assert [row["version"] for row in published(folder)] == [0, 1, 2, 3, 4]
    assert metrics_of(folder)[-1]["dropped/failed"] == 0
    conserved(folder)


async def post(url, path, **body):
    async with aiohttp.ClientSession(url) as session, session.post(path, json=body) as answer:
        return answer.status


def test_a_server_left_without_weights_in_mid_update_is_mended_by_the_next_run(train, served, dtype):
    """As a trainer leaves it that dies while its weights are on their way."""
    assert asyncio.run(post(served, "/pause_generation", mode="abort")) == 200
    assert asyncio.run(post(served, "/release_memory_occupation", tags=["kv_cache"])) == 200
    offer = {"version": 9, "kind": "full", "channel": "disk", "address": {"folder": "/no/such"}, "places": []}
    assert asyncio.run(post(served, "/gruppetto/weights/prepare", **offer)) == 200
    assert asyncio.run(post(served, "/continue_generation")) == 400
    code, folder = train(*on(served), f'model.dtype="{dtype}"', "run.steps=1")
    assert code == 0
    conserved(folder)


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
@pytest.mark.parametrize("call", ["state", "commit"])
def test_a_server_at_a_url_comes_back_after_one_failed_call(train, served, dtype, mode, call, monkeypatch):
    """Its process is the one that it was: nobody here can start it anew."""
    answered, calls = getattr(RemotePort, call), []

    async def once_lost(port, *args):
        calls.append(call)
        if len(calls) == 4:
            raise Unreachable(port.name, "connection reset by peer")
        return await answered(port, *args)

    monkeypatch.setattr(RemotePort, call, once_lost)
    code, folder = train(*on(served, *ASYNC, f'weights.mode="{mode}"', "weights.verify_every=0"))
    assert code == 0
    events = [event for event in events_of(folder) if event["kind"] in ("error", "published", "probe", "engine_back")]
    (lost,) = [at for at, event in enumerate(events) if event["kind"] == "error"]
    assert "connection reset by peer" in events[lost]["reason"]
    came, probed, back = events[lost + 1 : lost + 4]
    assert (came["kind"], came["kinds"], came["failed"]) == ("published", {"sglang-0": "full"}, [])
    assert (probed["kind"], back["kind"]) == ("probe", "engine_back")
    assert came["version"] == probed["version"] == back["version"]
    assert probed["mismatch_kl"] < 1e-6
    assert [event["version"] for event in events if event["kind"] == "published"][-1] == 4
    conserved(folder)


@pytest.fixture(scope="module")
def foreign():
    """The URL of a server that speaks SGLang and has no routes of ours."""
    loop, server = asyncio.new_event_loop(), Scripted(context=96)
    thread = threading.Thread(target=loop.run_forever)
    thread.start()
    asyncio.run_coroutine_threadsafe(server.open(), loop).result(20)
    yield server.url
    asyncio.run_coroutine_threadsafe(server.close(), loop).result(20)
    loop.call_soon_threadsafe(loop.stop)
    thread.join()
    loop.close()


def probes(folder):
    return [event for event in events_of(folder) if event["kind"] == "probe"]


@pytest.mark.parametrize("dtype", ["float32"], indirect=True)
def test_a_server_that_reads_folders_is_probed_like_any_other(train, served, dtype, monkeypatch):
    """One without our routes, as SGLang and vLLM are: whole weights from disk, and the probe all the same."""

    async def without_routes(engine):
        return Reach(engine=engine.name, url=engine.control_url, lacks="it has no /gruppetto/weights (HTTP 404)")

    monkeypatch.setattr("gruppetto.weights.channels.reach.reach_of", without_routes)
    code, folder = train(*on(served, *ASYNC, "weights.verify_every=2"))
    assert code == 0
    assert chosen(folder) == (
        "disk",
        "full",
        "sglang-0 reads weights from disk only: it has no /gruppetto/weights (HTTP 404)",
    )
    assert [(row["version"], row["kinds"]) for row in published(folder)] == [
        (version, {"sglang-0": "full"}) for version in range(5)
    ]
    assert [row["version"] for row in probes(folder)] == [0, 2, 4]
    assert all(row["mismatch_kl"] < 1e-6 for row in probes(folder))


def test_a_server_that_computes_something_else_is_told_before_the_first_step(train, foreign):
    """Its tokens and logprobs are made up, whatever the weights are."""
    with pytest.raises(EngineError, match=r"engine sglang-0: probe of version 0: mismatch_kl .* weights.probe_kl"):
        train(*on(foreign), "run.steps=2")


def test_an_engine_that_is_not_probed_says_why(train, foreign):
    code, folder = train(*on(foreign), "run.steps=2", "weights.probe_kl=0")
    assert code == 0
    (event,) = [event for event in events_of(folder) if event["kind"] == "weights_channel"]
    assert event["probe"] == "none: weights.probe_kl = 0"
    assert [row["version"] for row in published(folder)] == [0, 1, 2]
    assert probes(folder) == []


@pytest.mark.parametrize(
    ("asked", "instead"),
    [
        ('weights.channel="shm"', "write weights.channel = 'auto'"),
        ('weights.channel="gloo"', "write weights.channel = 'auto'"),
        ('weights.mode="delta"', "write weights.channel = 'auto', weights.mode = 'full'"),
    ],
)
def test_what_a_foreign_server_cannot_is_one_line_before_the_first_step(train, foreign, asked, instead):
    with pytest.raises(UserError) as caught:
        train(*on(foreign, asked))
    said = str(caught.value)
    assert "\n" not in said
    assert said.startswith(asked.replace("=", " = ").replace('"', "'"))
    assert f"engine sglang-0 at {foreign} reads whole weights from disk only" in said
    assert instead in said
