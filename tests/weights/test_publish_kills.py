"""Publishes under load while server processes are killed: no version mixed, no request lost or run twice, no hang.

Real `gruppetto serve` processes behind the run's own publisher and readmission. Every token is compared with what the
weights of the version that it names make. `GRUPPETTO_PUBLISHES=100` does it a hundred times and says what it counted.
"""

import asyncio
import os
import signal
import sys
from collections import Counter
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoModelForCausalLM

from gruppetto.clock import now
from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.http.build import Servers, http_engines
from gruppetto.engines.http.requests import HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.errors import EngineError
from gruppetto.publishing import Publisher
from gruppetto.rng import stream
from gruppetto.weights.channels.order import Order, Ordered
from gruppetto.weights.channels.probe import Probe
from gruppetto.weights.publish import PublishSettings, TwoPhase

PUBLISHES = int(os.environ.get("GRUPPETTO_PUBLISHES", "20"))
SERVERS, CLIENTS, TOKENS, CONTEXT = 3, 4, 30, 64
KILLED = 0.4
"""Share of publishes with a kill at about their time."""
LATEST_S = 0.12
"""A kill comes at most so long after its publish has begun, which takes about as long."""
SERVE = [sys.executable, "-m", "gruppetto", "serve", "{model}", "--port", "{port}", "--skip-tokenizer-init"]
SIZES = ["--slots", "4", "--context", str(CONTEXT)]
CHANNELS = (("shm", "delta"), ("shm", "full"), ("disk", "delta"), ("gloo", "full"))


class Fleet:
    """Servers, the requests on them, and what the run's publisher needs of a scheduler's loop."""

    def __init__(self, engines) -> None:
        self.engines = {engine.name: engine for engine in engines}
        self.serving = set(self.engines)
        self.seating = {name: SimpleNamespace(version=0) for name in self.engines}
        self.settings = SimpleNamespace(abort_s=30.0, stall_s=120.0)
        self.colocated, self.recover, self.updater = False, None, None
        self.rollouts, self.calls = {}, SimpleNamespace(abort=list)
        self.probe = None
        self.losses = self.pool = self
        self.kills = self.returns = self.lost = 0
        self.told, self.done, self.base = [], {}, dict.fromkeys(self.engines, 0)
        self.news = asyncio.Event()
        for engine in engines:
            engine.restart = self.counted_anew(engine, engine.restart)

    def counted_anew(self, engine, restart):
        """A new process counts from zero, also what it is sent before it is let in: a call that was on its way."""

        async def counted():
            self.base[engine.name] = engine._account.tokens
            await restart()

        return counted

    # -- of the loop --

    def engine_lost(self, name, why) -> None:
        if name in self.serving:
            self.serving.discard(name)
            self.lost += 1
            self.probe.last.pop(name, None)
            assert self.recover(name)

    def back(self, name) -> None:
        self.serving.add(name)
        self.returns += 1

    def given_up(self, name, why) -> None:
        raise AssertionError(f"{name} did not come back: {why}")

    def tell(self, kind, **fields) -> None:
        self.told.append((kind, fields))

    # -- load and kills --

    def kill(self, first) -> None:
        """The process of this one, or of the next that has one: serving, taking weights, or just starting."""
        names = sorted(self.engines)
        for name in names[first:] + names[:first]:
            process = self.engines[name]._process
            if process._process is not None and process.ended() is None:
                self.kills += 1
                os.kill(process.pid, signal.SIGKILL)
                return

    async def client(self, number, rng, end) -> None:
        """Requests one after the other, each going on elsewhere from its tokens when its server dies."""
        for index in range(10**9):
            if end.is_set():
                return
            rid, prompt, made = f"{number}-{index}", [3 + number, 4 + index % 50, 5], []
            while len(made) < TOKENS:
                if names := sorted(self.serving):
                    made += await self.on(self.engines[rng.choice(names)], rid, prompt, made)
                else:
                    await asyncio.sleep(0.01)
            assert rid not in self.done
            self.done[rid] = (prompt, made)
            self.news.set()

    async def on(self, engine, rid, prompt, made):
        """(token, logprob, version) of what one call makes."""
        sampling = Sampling(max_tokens=TOKENS - len(made), temperature=0)
        so_far = prompt + [token for token, _, _ in made]
        try:
            result = await engine.generate(
                GenerateRequest(rid=rid, token_ids=so_far, sampling=sampling, made=len(made))
            )
        except EngineError as error:
            self.engine_lost(engine.name, str(error))
            return []
        return [
            (token, logprob, part.version)
            for part in result.segments
            for token, logprob in zip(part.token_ids, part.logprobs, strict=True)
        ]

    async def until(self, true) -> None:
        """Looks again whenever a request is done."""
        while not true():
            self.news.clear()
            await self.news.wait()

    def versions_done(self):
        return {version for _, made in self.done.values() for _, _, version in made}


class Trainer:
    """A model that changes a little; all its versions are kept."""

    def __init__(self, path) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.version, self.kept, self.asked = 0, {0: self.copy()}, 0

    def copy(self):
        return {name: tensor.clone() for name, tensor in self.model.state_dict().items()}

    def export(self):
        return self.model.state_dict().items()

    async def token_logprobs(self, tokens, last):
        """Of the newest version, as a probe asks for them."""
        self.asked += 1
        with torch.no_grad():
            table = self.model(torch.tensor([tokens])).logits[0, :-1].log_softmax(-1)
        return table.gather(1, torch.tensor(tokens[1:])[:, None])[-last:, 0].tolist()

    def step(self) -> None:
        self.version += 1
        generator = torch.Generator().manual_seed(self.version)
        with torch.no_grad():
            for p in self.model.parameters():
                noise = torch.randn(p.shape, generator=generator)
                p.add_(0.1 * noise * (torch.rand(p.shape, generator=generator) < 0.05))
        self.kept[self.version] = self.copy()


@pytest.fixture(scope="module")
def small(tmp_path_factory):
    from gruppetto.demo.model import make_tiny_model

    sizes = {"layers": 2, "hidden": 48, "intermediate": 96, "heads": 2, "kv_heads": 1, "head_dim": 24}
    return make_tiny_model(tmp_path_factory.mktemp("small"), context=256, scale=0.2, **sizes)


@pytest.fixture
async def fleet(small, tmp_path):
    servers = Servers(kind="sglang", model=str(small), logs=tmp_path / "logs", count=SERVERS, command=[*SERVE, *SIZES])
    engines = http_engines(servers, HttpSettings(slots=4, context=CONTEXT), Staging(tmp_path / "staged", small))
    await asyncio.gather(*(engine.start() for engine in engines))
    yield Fleet(engines)
    await asyncio.gather(*(engine.close() for engine in engines))


def channel(kind, mode, fleet, tmp_path):
    settings = PublishSettings(
        channel=kind, mode=mode, bucket_bytes=1 << 16, folder=tmp_path / "weights", deadline_s=30, verify_every=7
    )
    return Ordered(TwoPhase(settings), Order(), fleet.tell, probe=fleet.probe, verify_every=7)


@pytest.mark.timeout(120 + 12 * PUBLISHES)
async def test_publishes_with_kills_mix_no_version_and_lose_no_request(small, fleet, tmp_path):
    rng, trainer, begin = stream(7, "kills"), Trainer(small), now()
    fleet.probe = Probe([[5, 6, 7], [9, 8, 7, 6, 5]], trainer.token_logprobs, tokens=4, most_kl=1e-5)
    stages = SimpleNamespace(loop=fleet, engines=list(fleet.engines.values()), trainer=trainer, restarts=10**6)
    channels = [channel(kind, mode, fleet, tmp_path) for kind, mode in CHANNELS]
    stages.channel = channels[0]
    publisher = Publisher(stages, asyncio.Lock())
    await publisher.to_serving(0)
    end = asyncio.Event()
    clients = [asyncio.create_task(fleet.client(n, stream(n, "client"), end)) for n in range(CLIENTS)]
    for turn in range(PUBLISHES):
        stages.channel = channels[turn * len(channels) // PUBLISHES]
        async with publisher._weights:
            trainer.step()
        victim, seconds = rng.randrange(SERVERS), rng.random() * LATEST_S
        killer = asyncio.create_task(kill_later(fleet, victim, seconds, turn == 1 or rng.random() < KILLED))
        await publisher.to_serving(trainer.version)
        await killer
        await fleet.until(lambda: trainer.version in fleet.versions_done() or any(c.done() for c in clients))
    await publisher.settled()
    end.set()
    await asyncio.gather(*clients)
    await same_counts(fleet)
    await publisher.close()
    line = booked(fleet, check(trainer, fleet))
    probed(fleet)
    assert fleet.kills > PUBLISHES // 6
    print(f"\n{line}; {now() - begin:.0f} s")


async def kill_later(fleet, first, seconds, due) -> None:
    await asyncio.sleep(seconds)
    if due:
        fleet.kill(first)


async def same_counts(fleet) -> None:
    """Of each process that lives: what it made is what came from it, so nothing was run twice or thrown away."""
    for name, engine in fleet.engines.items():
        told = await engine.wire.told()
        assert (told.running, told.waiting) == (0, 0)
        assert told.generated == engine._account.tokens - fleet.base[name] + 1  # one when it was connected


def check(trainer, fleet):
    """Every token is its own version's, by value; how many there are of each."""
    rows = list(fleet.done.values())
    ids = torch.tensor([prompt + [token for token, _, _ in made] for prompt, made in rows])
    logprobs = torch.tensor([[logprob for _, logprob, _ in made] for _, made in rows])
    owners = torch.tensor([[own for _, _, own in made] for _, made in rows])
    counts, others = {}, Counter()
    for version, weights in trainer.kept.items():
        trainer.model.load_state_dict(weights)
        some = (owners == version).any(1)
        if not some.any():
            continue
        with torch.no_grad():
            table = trainer.model(ids[some]).logits[:, -TOKENS - 1 : -1].log_softmax(-1)
        of_token = table.gather(2, ids[some, -TOKENS:, None])[..., 0]
        fits = (of_token - logprobs[some]).abs() < 1e-3
        own = owners[some] == version
        assert fits[own].all()
        assert (of_token[own] > table.amax(2)[own] - 1e-3).all()
        counts[version] = int(own.sum())
        others.update(fits[~own].tolist())
    assert others[False] > 9 * others[True]  # another version's weights would have been seen
    return counts


def probed(fleet) -> None:
    """Every engine, and each time that one came back (`Fleet.back` has looked); none computed with other weights."""
    probes = [fields for kind, fields in fleet.told if kind == "probe"]
    right = Counter(fields["engine"] for fields in probes if "failed" not in fields)
    assert not [fields for fields in probes if "mismatch_kl" in fields.get("failed", "")]
    assert right.keys() == fleet.engines.keys()
    assert sum(right.values()) >= fleet.returns + len(fleet.engines)


def booked(fleet, counts) -> str:
    """Of the whole run, in one line; and that it adds up."""
    made = [made for _, made in fleet.done.values()]
    assert {len(tokens) for tokens in made} == {TOKENS}
    versions = [[version for _, _, version in tokens] for tokens in made]
    assert all(a <= b for row in versions for a, b in pairwise(row))
    assert sum(counts.values()) == TOKENS * len(made)
    assert counts.keys() >= set(range(1, PUBLISHES + 1))
    assert fleet.lost == fleet.returns
    mixed = sum(len(set(row)) > 1 for row in versions)
    assert mixed
    published = [fields for kind, fields in fleet.told if kind == "published"]
    kinds = Counter(kind for fields in published for kind in fields["kinds"].values())
    broken = sum(bool(fields["failed"]) for fields in published)
    return (
        f"{PUBLISHES} publishes, {fleet.kills} kills, {fleet.returns} returns; {len(made)} requests done once each, "
        f"{mixed} over several versions, {sum(counts.values())} tokens, each of its version's weights; "
        f"{len(published)} transfers ({broken} with a failure): {dict(kinds)}"
    )
