"""Two-phase publish into embedded engines of this process, over each channel."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.channels.order import Order, Ordered
from gruppetto.weights.channels.probe import Probe
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


def publisher(channel: str, tmp_path, probe=None, **settings) -> TwoPhase:
    folder = tmp_path / "weights" if channel == "disk" else None
    chosen = {"channel": channel, "bucket_bytes": 1 << 20, "folder": folder, "deadline_s": 60.0} | settings
    return TwoPhase(PublishSettings(**chosen), probe=probe)


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


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_engine_and_trainer_agree_after_a_publish(dtype, engines, trainer, tmp_path):
    (engine,) = await engines("a", dtype=dtype)
    probe = Probe(PROMPTS, trainer.token_logprobs)
    publish = publisher("shm", tmp_path, probe=probe)
    step(trainer._model, 1)
    await publish.publish(1, trainer.export(), [engine])
    found = probe.last["a"]
    assert found.tokens == 16
    assert found.mismatch_kl < (1e-6 if dtype == "float32" else 0.02)
    await engine.resume()
    with pytest.raises(EngineError, match="the engine is running; pause it first"):
        await engine.open_weights()


async def test_the_probe_is_after_the_first_and_every_nth_publish_only(engines, trainer, tmp_path):
    (engine,) = await engines("a")
    probe = Probe(PROMPTS, trainer.token_logprobs)
    publish = publisher("shm", tmp_path, probe=probe, verify_every=3)
    probed = []
    for version in range(1, 8):
        probe.last.clear()
        step(trainer._model, version)
        await publish.publish(version, trainer.export(), [engine])
        probed += [version] if probe.last else []
    assert probed == [1, 4, 7]


async def test_a_swap_that_no_digest_sees_sounds_the_alarm_and_fences(engines, trainer, tmp_path):
    """The engine computes with gate and up exchanged, behind tensors that hold what they should."""
    (engine,) = await engines("a")
    probe = Probe(PROMPTS, trainer.token_logprobs, most_kl=1e-4)
    publish = publisher("shm", tmp_path, probe=probe)

    def exchange(serving):
        for layer in serving.weights._forward._base.layers:
            gate, up = layer.mlp.gate_proj.weight, layer.mlp.up_proj.weight
            up.data, gate.data = gate.data.clone(), up.data.clone()
        serving.weights._forward.rebind()

    await publish.publish(1, trainer.export(), [engine])
    publish.last.audited = True
    await engine._thread.ask(exchange)
    await engine.resume()
    with pytest.raises(EngineError, match=r"engine a: probe of version 1: mismatch_kl .* is over 0.0001"):
        await publish.verify(1, [engine])
    assert "a" in publish.fenced


@pytest.mark.parametrize(
    "order", [Order(pause="keep"), Order(pause="abort"), Order(pause="abort", release_kv=True)],
    ids=["keep", "abort", "release"],
)  # fmt: skip
async def test_the_whole_order_leaves_no_old_kv_and_loses_no_request(order, engines, trainer, tmp_path):
    (engine,) = await engines("a", context=256, kv_on_swap="recompute")
    await engine.resume()
    probe, told = Probe(PROMPTS, trainer.token_logprobs), []
    publish = Ordered(publisher("shm", tmp_path, probe=probe), order, lambda kind, **fields: told.append(fields))
    request = GenerateRequest(rid="r", token_ids=[5, 6, 7], sampling=Sampling(max_tokens=200))
    running = asyncio.create_task(engine.generate(request))
    await until(lambda: engine.stats().decode_tokens_total)
    step(trainer._model, 1)
    steps = watched(engine)
    await engine.pause(publish.pause)
    await publish.publish(1, trainer.export(), [engine])
    await engine.resume()
    result = await running
    around = (["release_memory"], ["restore_memory"]) if order.release_kv else ([], [])
    before_the_probe = [order.pause, *around[0], "open_weights", "close_weights", *around[1], "flush", "resume"]
    assert steps == [*before_the_probe, "keep", "resume"]
    assert [(row["version"], row["kinds"], row["failed"]) for row in told] == [(1, {"a": "full"}, [])]
    assert told[0]["bytes"] == sum(tensor.nbytes for _, tensor in trainer.export())
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
