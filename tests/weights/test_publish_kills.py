"""A hundred publishes under load while engines die: no version mixed, no request lost or run twice, no hang."""

import asyncio

import pytest
import torch
from transformers import AutoModelForCausalLM

from gruppetto.engines.base import GenerateRequest, Sampling, pause_all
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.errors import EngineError
from gruppetto.rng import stream
from gruppetto.weights.publish import PublishSettings, TwoPhase

PUBLISHES = 100
SAMPLED = Sampling(max_tokens=6, temperature=0)


class Fleet:
    """Engines that are killed and started anew under the same name, and the requests on them."""

    def __init__(self, path, names) -> None:
        self.path, self.names = path, names
        self.engines, self.serving, self.kills = {}, set(), 0
        self.done, self.tries = {}, {}

    async def start(self, name) -> None:
        """A new process would come up with the weights of the folder and take no requests yet."""
        if name in self.engines:
            await self.engines[name].close()
        self.engines[name] = engine = EmbeddedEngine(name, self.path, slots=4, context=64, device="cpu", version=-1)
        await engine.start()

    def kill(self, name) -> None:
        """Its thread dies at once, wherever it is."""
        self.kills += 1
        self.serving.discard(name)

        def die(serving):
            raise SystemError("killed")

        try:
            self.engines[name]._thread.post(die)
        except EngineError:
            pass

    async def client(self, number, rng, end) -> None:
        """Requests one after the other, each tried again elsewhere when its engine dies."""
        index = 0
        while not end.is_set():
            rid, prompt = f"{number}-{index}", [3 + number, 4 + index % 50, 5]
            index += 1
            tokens, versions = [], []
            while len(tokens) < SAMPLED.max_tokens:
                names = sorted(self.serving)
                if not names:
                    await asyncio.sleep(0.005)
                    continue
                engine = self.engines[rng.choice(names)]
                left = Sampling(max_tokens=SAMPLED.max_tokens - len(tokens), temperature=0)
                request = GenerateRequest(rid=rid, token_ids=prompt + tokens, sampling=left, made=len(tokens))
                try:
                    result = await engine.generate(request)
                except EngineError:
                    await asyncio.sleep(0)
                    continue
                for segment in result.segments:
                    tokens += segment.token_ids
                    versions += [segment.version] * len(segment)
            assert rid not in self.done
            self.done[rid] = (prompt, tokens, versions)


def step(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.03 * torch.randn(p.shape, generator=generator) * (torch.rand(p.shape, generator=generator) < 0.05))


@pytest.mark.timeout(150)
async def test_a_hundred_publishes_with_kills_mix_no_version_and_lose_no_request(tiny_model, tmp_path):
    rng = stream(7, "kills")
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    fleet = Fleet(tiny_model, ["a", "b", "c"])
    for name in fleet.names:
        await fleet.start(name)
    channels = [
        TwoPhase(
            PublishSettings(channel=c, mode=m, bucket_bytes=1 << 20, folder=tmp_path, deadline_s=5, verify_every=7)
        )
        for c, m in (("shm", "delta"), ("shm", "full"), ("disk", "delta"), ("gloo", "full"))
    ]
    weights, end = {}, asyncio.Event()
    clients = [asyncio.create_task(fleet.client(n, stream(n, "client"), end)) for n in range(6)]
    for version in range(PUBLISHES):
        step(model, version)
        if version % 10 == 0:
            weights[version] = {name: tensor.clone() for name, tensor in model.state_dict().items()}
        await publish(fleet, channels[version // 25], version, model, rng)
        assert fleet.serving
        served = [fleet.engines[name].stats().version for name in fleet.serving]
        assert served == [version] * len(served)
        await asyncio.sleep(0)
    end.set()
    async with asyncio.timeout(30):
        await asyncio.gather(*clients)
    for engine in fleet.engines.values():
        await engine.close()
    assert fleet.kills >= 20
    assert len(fleet.done) > 50
    for _, tokens, versions in fleet.done.values():
        assert len(tokens) == SAMPLED.max_tokens
        assert versions == sorted(versions)
        assert all(0 <= version < PUBLISHES for version in versions)
    check_tokens(model, weights, fleet)


async def publish(fleet, channel, version, model, rng) -> None:
    """As a controller does it: who fails is out and is started anew; the rest take the version."""
    kill_in = [name for name in fleet.names if rng.random() < 0.12]
    for name in kill_in[: rng.randrange(2)]:
        fleet.kill(name)
    waiting = set(fleet.names)
    killer = asyncio.create_task(kill_meanwhile(fleet, kill_in[1:2], rng))
    while True:
        names = sorted(waiting)
        try:
            engines = [fleet.engines[name] for name in names]
            await pause_all(engines, "keep", 5)
            await channel.publish(version, model.state_dict().items(), engines)
            for engine in engines:
                await engine.resume()
                fleet.serving.add(engine.name)
            break
        except EngineError as error:
            fleet.serving.discard(error.engine)
            await fleet.start(error.engine)
    await killer


async def kill_meanwhile(fleet, names, rng) -> None:
    for name in names:
        await asyncio.sleep(rng.random() * 0.03)
        fleet.kill(name)


def check_tokens(model, weights, fleet) -> None:
    """Greedy tokens made whole under one kept version are that version's own."""
    checked = 0
    for version, state in weights.items():
        model.load_state_dict(state)
        for prompt, tokens, versions in fleet.done.values():
            if set(versions) == {version} and checked < 40:
                ids = torch.tensor([prompt])
                with torch.no_grad():
                    want = model.generate(ids, max_new_tokens=len(tokens), do_sample=False, eos_token_id=None)
                assert want[0, len(prompt) :].tolist() == tokens
                checked += 1
    assert checked >= 5
