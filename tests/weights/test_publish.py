"""Two-phase publish into embedded engines of this process, over each channel."""

import asyncio
import re

import pytest
import torch
from engines.few_steps import few_steps
from transformers import AutoModelForCausalLM

from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.embedded.core import Core
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.channels.order import Order, Ordered
from gruppetto.weights.channels.probe import Probe
from gruppetto.weights.inprocess import InProcessChannel
from gruppetto.weights.publish import PublishSettings, TwoPhase


@pytest.fixture
async def engines(tiny_model):
    """Starts paused engines by name, closes them at the end."""
    made = []

    async def start(*names, **settings):
        for name in names:
            engine = EmbeddedEngine(name, tiny_model, **{"slots": 4, "context": 128, "device": "cpu"} | settings)
            made.append(engine)
            await engine.start()
            await engine.pause("keep")
        return made[-len(names) :]

    yield start
    for engine in made:
        await engine.close()


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def step(model, seed: int, share: float = 1.0) -> None:
    """A change of all tensors, or of a share of each one's elements."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            mask = torch.rand(p.shape, generator=generator) < share
            p.add_(0.01 * torch.randn(p.shape, generator=generator) * mask)


async def until(true) -> None:
    for _ in range(5000):
        if true():
            return
        await asyncio.sleep(0.001)
    raise AssertionError("it never came true")


def publisher(channel: str, tmp_path, **settings) -> TwoPhase:
    folder = tmp_path / "weights" if channel == "disk" else None
    chosen = {"channel": channel, "bucket_bytes": 1 << 20, "folder": folder, "deadline_s": 60.0} | settings
    return TwoPhase(PublishSettings(**chosen))


WAYS = ("shm", "inprocess")


def ordered(way: str, tmp_path, probe, order=None, tell=None, **settings) -> Ordered:
    """Over a two-phase channel, or by the contract's own calls as servers that read folders are published to."""
    channel = InProcessChannel(1 << 16) if way == "inprocess" else publisher(way, tmp_path, **settings)
    return Ordered(channel, order or Order(), tell, probe=probe, verify_every=settings.get("verify_every", 16))


async def bring(publish, version, tensors, engines, make_room=None):
    """As a run does it; what the probe finds wrong."""
    for engine in engines:
        await engine.pause(publish.pause or "keep")
    await publish.publish(version, tensors, engines)
    for engine in engines:
        await engine.resume()
    return await publish.verify(version, engines, make_room)


async def holds(engine, model) -> bool:
    served = await engine.weights()
    want = dict(model.named_parameters())
    return all(torch.equal(tensor, want[name]) for name, tensor in served.tensors.items())


@pytest.mark.parametrize("mode", ["full", "delta"])
@pytest.mark.parametrize("channel", ["shm", "disk", "gloo"])
async def test_every_channel_brings_every_version_bit_for_bit(channel, mode, engines, model, tmp_path):
    pair = await engines("a", "b")
    channel = publisher(channel, tmp_path, mode=mode)
    for version in (1, 2, 3):
        step(model, version, share=0.01)
        receipts = await channel.publish(version, model.state_dict().items(), pair)
        assert [(r.engine, r.version) for r in receipts] == [("a", version), ("b", version)]
        for engine in pair:
            assert await holds(engine, model)
            assert engine.stats().version == version
    assert set(channel.last.kinds.values()) == {mode}


# --- the probe and the order ---------------------------------------------------------------------------------------


@pytest.fixture
async def trainer(tiny_model):
    from gruppetto.config.schema import ModelSection, TrainSection
    from gruppetto.trainer.embedded.trainer import EmbeddedTrainer

    model = ModelSection(path=str(tiny_model), device="cpu")
    made = EmbeddedTrainer(
        tiny_model, model=model, train=TrainSection(), max_tokens=8, temperature=1.0, total_steps=4, seed=0
    )
    await made.start()
    yield made
    await made.close()


PROMPTS = ([5, 6, 7, 8], list(range(20, 60)))


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engine_and_trainer_agree_after_a_publish(dtype, way, engines, trainer, tmp_path):
    (engine,) = await engines("a", dtype=dtype)
    probe, told = Probe(PROMPTS, trainer.token_logprobs), []
    publish = ordered(way, tmp_path, probe, tell=lambda kind, **fields: told.append((kind, fields)))
    step(trainer._model, 1)
    assert await bring(publish, 1, trainer.export(), [engine]) == []
    found = probe.last["a"]
    assert found.tokens == 16
    assert found.mismatch_kl < (1e-6 if dtype == "float32" else 0.02)
    assert [kind for kind, _ in told] == ["published", "probe"]
    assert (told[1][1]["mismatch_kl"], told[1][1]["engine"]) == (found.mismatch_kl, "a")
    with pytest.raises(EngineError, match="the engine is running; pause it first"):
        await engine.open_weights()


@pytest.mark.parametrize("way", WAYS)
async def test_the_probe_is_after_the_first_and_every_nth_publish_only(way, engines, trainer, tmp_path):
    (engine,) = await engines("a")
    probe = Probe(PROMPTS, trainer.token_logprobs)
    publish = ordered(way, tmp_path, probe, verify_every=3)
    probed = []
    for version in range(1, 8):
        probe.last.clear()
        step(trainer._model, version)
        assert await bring(publish, version, trainer.export(), [engine]) == []
        probed += [version] if probe.last else []
    assert probed == [1, 4, 7]


@pytest.mark.parametrize("way", WAYS)
async def test_a_swap_that_no_digest_sees_sounds_the_alarm(way, engines, trainer, tmp_path):
    """The engine computes with gate and up exchanged, behind tensors that hold what they should; the other is right."""
    engine, right = await engines("a", "b")
    probe, told = Probe(PROMPTS, trainer.token_logprobs, most_kl=1e-4), []
    publish = ordered(way, tmp_path, probe, tell=lambda kind, **fields: told.append((kind, fields)))

    def exchange(serving):
        for layer in serving.weights._forward._base.layers:
            gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
            up.data, gate.data = gate.data.clone(), up.data.clone()
        serving.weights._forward.rebind()

    await publish.publish(1, trainer.export(), [engine, right])
    await engine._thread.ask(exchange)
    for one in (engine, right):
        await one.resume()
    (wrong,) = await publish.verify(1, [engine, right])
    assert re.match(r"engine a: probe of version 1: mismatch_kl .* is over 0.0001", str(wrong))
    assert {fields["engine"]: "failed" in fields for _, fields in told[1:]} == {"a": True, "b": False}
    if way == "shm":
        assert list(publish.channel.fenced) == ["a"]
    assert str((await publish.verify(1, [engine, right]))[0]) == str(wrong)  # it still owes; the other does not
    assert [fields["engine"] for kind, fields in told if kind == "probe"].count("b") == 1


async def test_a_probe_takes_the_place_of_the_rollouts_that_started_last(engines, trainer, tmp_path, monkeypatch):
    """All slots are held by requests that are kept over the publish, and more wait. None ends before that is seen."""
    monkeypatch.setattr("gruppetto.weights.channels.probe.ROOM_S", 1.0)
    monkeypatch.setattr(Core, "step", few_steps(tmp_path / "held"))
    (tmp_path / "held").touch()
    (engine,) = await engines("a", slots=2, context=2048)
    await engine.resume()
    probe = Probe(PROMPTS, trainer.token_logprobs)
    publish = ordered("shm", tmp_path, probe, Order(pause="keep"))
    sampling = Sampling(max_tokens=2000)
    running = [
        asyncio.create_task(engine.generate(GenerateRequest(rid=f"r{n}", token_ids=[5, 6, 7], sampling=sampling)))
        for n in range(4)
    ]
    await until(lambda: engine.stats().running == 2)
    asked = []

    def make_room(of, count):
        asked.append((of, count))
        (tmp_path / "held").unlink()
        for n in range(4 - count, 4):
            running[n].aborted = asyncio.create_task(engine.abort(f"r{n}"))

    step(trainer._model, 1)
    assert await bring(publish, 1, trainer.export(), [engine], make_room) == []
    assert asked == [(engine, 4)]  # two waited, and two ran where both prompts were to run
    assert probe.last["a"].tokens == 16
    assert {(await call).finish for call in running} == {"abort"}


async def test_a_probe_without_an_answer_is_the_engines_failure_and_nobody_elses(engines, trainer, tmp_path):
    engine, right = await engines("a", "b")

    async def hangs(request):
        await asyncio.Event().wait()

    engine.generate = hangs
    publish = ordered("shm", tmp_path, Probe(PROMPTS, trainer.token_logprobs, deadline_s=5.0))
    (wrong,) = await bring(publish, 1, trainer.export(), [engine, right])
    assert str(wrong) == "engine a: probe of version 1: no answer within 5 s"
    assert list(publish.channel.fenced) == ["a"]


@pytest.mark.parametrize("way", WAYS)
async def test_a_due_probe_stays_due_for_the_others_when_one_engine_misses(way, engines, trainer, tmp_path):
    engine, gone = await engines("a", "b")
    probe = Probe(PROMPTS, trainer.token_logprobs)
    publish = ordered(way, tmp_path, probe)

    async def lost(*_):
        raise EngineError("b", "is gone")

    gone.weights = gone.commit_update = lost
    with pytest.raises(EngineError, match="engine b: is gone"):
        await bring(publish, 1, trainer.export(), [engine, gone])
    assert await bring(publish, 1, trainer.export(), [engine]) == []
    assert list(probe.last) == ["a"]


@pytest.mark.parametrize("way", WAYS)
async def test_an_engine_that_is_readmitted_is_probed_and_moves_nobodys_turn(way, engines, trainer, tmp_path):
    one, other = await engines("a", "b")
    probe = Probe(PROMPTS, trainer.token_logprobs)
    publish, probed = ordered(way, tmp_path, probe, verify_every=3), []
    for version in range(1, 5):
        probe.last.clear()
        await bring(publish, version, trainer.export(), [one, other])
        if version == 2:
            probe.last.clear()
            publish.readmit("b")
            assert await bring(publish, version, trainer.export(), [other]) == []
        probed.append(sorted(probe.last))
    assert probed == [["a", "b"], ["b"], [], ["a"]]


async def test_in_lockstep_a_probe_waits_until_the_engine_is_idle(engines, trainer, tmp_path):
    """Its advances would carry others on outside of their scheduler's turns."""
    (engine,) = await engines("a", lockstep=True)
    probe = Probe(PROMPTS, trainer.token_logprobs)
    publish = ordered("inprocess", tmp_path, probe, Order(pause="keep"))
    request = GenerateRequest(rid="r", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=8))
    call = asyncio.create_task(engine.generate(request))
    await until(lambda: engine.stats().outstanding)
    assert await bring(publish, 1, trainer.export(), [engine]) == []
    assert not probe.last
    assert engine.stats().decode_steps_total == 0
    await engine.advance()
    await call
    assert await bring(publish, 2, trainer.export(), [engine]) == []
    assert probe.last["a"].version == 2


@pytest.mark.parametrize(
    "order", [Order(pause="keep"), Order(pause="abort"), Order(pause="abort", release_kv=True)],
    ids=["keep", "abort", "release"],
)  # fmt: skip
async def test_the_whole_order_leaves_no_old_kv_and_loses_no_request(order, engines, trainer, tmp_path):
    (engine,) = await engines("a", context=256, kv_on_swap="recompute")
    await engine.resume()
    probe, told = Probe(PROMPTS, trainer.token_logprobs), []
    publish = ordered("shm", tmp_path, probe, order, lambda kind, **fields: told.append((kind, fields)))
    request = GenerateRequest(rid="r", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=200))
    running = asyncio.create_task(engine.generate(request))
    await until(lambda: engine.stats().decode_tokens_total)
    step(trainer._model, 1)
    steps = watched(engine)
    await engine.pause(publish.pause)
    await publish.publish(1, trainer.export(), [engine])
    await engine.resume()
    assert await publish.verify(1, [engine]) == []
    result = await running
    around = (["release_memory"], ["restore_memory"]) if order.release_kv else ([], [])
    assert steps == [order.pause, *around[0], "open_weights", "close_weights", *around[1], "flush", "resume"]
    (_, row), (kind, _) = told
    assert (kind, row["version"], row["kinds"], row["failed"]) == ("probe", 1, {"a": "full"}, [])
    assert row["bytes"] == sum(tensor.nbytes for _, tensor in trainer.export())
    versions = [segment.version for segment in result.segments]
    assert versions == ([0, 1] if order.pause == "keep" else [0])
    assert probe.last["a"].mismatch_kl < 1e-6
    tokens = [5, 6, 7] + [token for segment in result.segments for token in segment.token_ids]
    if order.pause == "keep":
        last = result.segments[-1]
        own = await trainer.token_logprobs(tokens, len(last))
        assert max(abs(a - b) for a, b in zip(own, last.logprobs, strict=True)) < 1e-3


def watched(engine) -> list:
    """What is asked of an engine from now on, in order; a pause by its mode."""
    steps = []
    for name in ("pause", "release_memory", "open_weights", "close_weights", "restore_memory", "flush", "resume"):
        call = getattr(engine, name)

        async def asked(*args, name=name, call=call):
            steps.append(args[0] if name == "pause" else name)
            return await call(*args)

        setattr(engine, name, asked)
    return steps


async def test_memory_comes_back_also_where_another_engine_missed(engines, trainer, tmp_path):
    good, gone = await engines("a", "b")
    for engine in (good, gone):
        await engine.pause("abort")
    publish = Ordered(publisher("shm", tmp_path), Order(pause="abort", release_kv=True))

    async def lost():
        raise EngineError("b", "is gone")

    gone.weights = lost
    with pytest.raises(EngineError, match="engine b: is gone"):
        await publish.publish(1, trainer.export(), [good, gone])
    assert good.stats().version == 1
    await good.resume()
    request = GenerateRequest(rid="r", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=2))
    assert (await good.generate(request)).num_tokens == 2


def test_kv_is_not_released_under_kept_requests():
    with pytest.raises(UserError, match="pause = 'abort'"):
        Order(pause="keep", release_kv=True)
