"""A heavy-tailed multi-turn load on simulated engines, on virtual time: placing is worth what it says."""

import asyncio
import math

import pytest

from gruppetto.clock import now, run_virtual
from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.router.router import Router
from gruppetto.engines.router.tickets import Ask, Outcome
from gruppetto.ledger.engine import EngineModel
from gruppetto.rng import stream
from gruppetto.routing.concurrency import Reading
from gruppetto.sim.engine import SimEngine

TIGHT, AMPLE = 12_000, 400_000


def sessions(seed):
    """Turns of (response, observation, tool seconds) of each; turns and responses lognormal."""
    rng = stream(seed, "load")
    return [
        [
            (max(8, int(60 * math.exp(rng.gauss(0, 1)))), rng.randrange(50, 300), rng.expovariate(5))
            for _ in range(min(20, max(1, round(6 * math.exp(rng.gauss(0, 0.9))))))
        ]
        for _ in range(48)
    ]


def engines(kv):
    lengths = {}
    model = EngineModel(slots=8, base_s=0.006, row_s=1.5e-4, kv_token_s=5e-8, prefill_token_s=6e-5, kv_capacity=kv)
    made = [SimEngine(f"e{i}", length_of=lambda r: lengths[r.rid], model=model) for i in range(2)]
    return {engine.name: engine for engine in made}, lengths


class LeastLoaded:
    """By count; sticky or not. Sends at once."""

    def __init__(self, by_name, sticky):
        self.load, self.home, self.sticky = dict.fromkeys(by_name, 0), {}, sticky

    async def send(self, name, context, call):
        engine = self.home.get(name) if self.sticky else None
        engine = engine or min(self.load, key=self.load.get)
        self.home[name] = engine
        self.load[engine] += 1
        await call(engine)
        self.load[engine] -= 1


class Ours:
    """The router, with a look at the engines every second."""

    def __init__(self, by_name, sticky=None):
        self.router, self.engines, self.waiting, self.looking = Router(), by_name, {}, None

    def hand_out(self):
        for ticket in self.router.placed():
            if ticket.number in self.waiting:
                self.waiting.pop(ticket.number).set_result(None)

    async def look(self):
        while True:
            for name, engine in self.engines.items():
                stats = engine.stats()
                reading = Reading(
                    at=now(),
                    kv=stats.kv_tokens / stats.kv_capacity,
                    running=stats.running,
                    preemptions=stats.preemptions_total,
                    kv_capacity=stats.kv_capacity,
                    slots=stats.slots,
                )
                self.router.add(name, now(), reading)
                self.router.read(name, reading, now())
            self.router.tick(now())
            self.hand_out()
            await asyncio.sleep(1.0)

    async def send(self, name, context, call):
        if self.looking is None:
            self.looking = asyncio.ensure_future(self.look())
            await asyncio.sleep(0)
        ticket = self.router.submit(Ask(session=name, context=context, budget=2000), now())
        self.hand_out()
        if ticket.engine is None:
            self.waiting[ticket.number] = asyncio.get_running_loop().create_future()
            await self.waiting[ticket.number]
        cached = min(self.engines[ticket.engine].held(name), context)
        made = await call(ticket.engine)
        self.router.release(ticket, Outcome(tokens=made, cached=cached), now())
        self.hand_out()


async def makespan(kv, seed, make):
    by_name, lengths = engines(kv)
    for engine in by_name.values():
        await engine.start()
    router = make(by_name)

    async def session(name, turns):
        context = 300
        for tokens, observation, tool_s in turns:

            async def call(engine, tokens=tokens, context=context):
                lengths[name] = tokens
                request = GenerateRequest(rid=name, token_ids=range(context), sampling=Sampling(max_tokens=2000))
                return (await by_name[engine].generate(request)).num_tokens

            await router.send(name, context, call)
            context += tokens + observation
            await asyncio.sleep(tool_s)

    await asyncio.gather(*(session(f"s{i}", turns) for i, turns in enumerate(sessions(seed))))
    end = now()
    if isinstance(router, Ours):
        router.looking.cancel()
        assert router.router.num_waiting == 0
    return end, sum(engine.stats().prefill_tokens_total for engine in by_name.values())


def mean(kv, make):
    runs = [run_virtual(makespan(kv, seed, make)) for seed in range(4)]
    return [sum(column) / len(runs) for column in zip(*runs, strict=True)]


@pytest.mark.parametrize("sticky", [True, False])
def test_where_kv_is_scarce_ours_is_a_tenth_shorter_and_prefills_half(sticky):
    seconds, prefilled = mean(TIGHT, Ours)
    theirs, again = mean(TIGHT, lambda by_name: LeastLoaded(by_name, sticky))
    assert seconds < 0.9 * theirs
    assert prefilled < 0.5 * again


def test_where_every_context_fits_nothing_is_lost():
    seconds, prefilled = mean(AMPLE, Ours)
    theirs, sticky = mean(AMPLE, lambda by_name: LeastLoaded(by_name, sticky=True))
    assert seconds < 1.05 * theirs
    assert prefilled < 1.25 * sticky, "some move, which costs prefill"
