"""The simulated engine against a reference that plays one decode step at a time and keeps one version per token."""

import asyncio
from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from sim.engine_reference import Reference

from gruppetto.clock import now, run_virtual
from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.rng import stream
from gruppetto.sim.engine import EngineModel, SimEngine

# -- scripts ----------------------------------------------------------------------------------------------------------

MODELS = st.builds(
    EngineModel,
    slots=st.integers(1, 5),
    base_s=st.sampled_from([0.25, 1.0, 0.1]),
    weights_s=st.sampled_from([0.0, 0.5]),
    kv_token_s=st.sampled_from([0.0, 0.01, 0.003]),
    compute_row_s=st.sampled_from([0.0, 0.3]),
    row_s=st.sampled_from([0.0, 0.05]),
    prefill_token_s=st.sampled_from([0.0, 0.02, 0.25]),
    kv_capacity=st.sampled_from([0, 20, 30, 40, 60]),
    move_token_s=st.sampled_from([0.0, 0.01]),
    prefill_elsewhere=st.sampled_from([False, False, False, True]),
    shares_prompts=st.booleans(),
    speculation=st.sampled_from([(), ((1, 2.5, 1.25), (3, 1.5, 1.25))]),
)
RIDS = [f"r{i}" for i in range(6)]
PROMPTS = (4, 7)
"""Of the first three and of the others."""
WAIT = st.one_of(st.just(0.0), st.floats(0.001, 8), st.sampled_from([0.25, 0.5, 1.0, 2.0, 10.0]))
ARRIVAL = st.tuples(st.just("arrive"), st.sampled_from(RIDS), st.integers(0, 12), st.integers(1, 30), st.booleans())
VERBS = st.one_of(
    ARRIVAL,
    ARRIVAL,
    ARRIVAL,
    st.tuples(st.just("abort"), st.sampled_from(RIDS)),
    st.tuples(st.sampled_from(["abort_all", "pause", "resume", "swap", "look", "release"])),
    st.tuples(st.just("slow"), st.sampled_from([0.5, 1.0, 3.0])),
)
SCRIPTS = st.lists(st.tuples(WAIT, VERBS), min_size=4, max_size=40)


class Play:
    """The same script on the engine and on the reference."""

    def __init__(self, model, keep):
        self.engine = SimEngine(
            "e",
            model=model,
            length_of=lambda r: self.lengths[r.rid],
            kv_on_swap="keep" if keep else "recompute",
            prompt_of=(lambda r: self.prompt(r.rid)) if model.shares_prompts else None,
        )
        self.reference = Reference(model, keep)
        self.lengths, self.contexts, self.made = {}, {}, Counter()
        self.futures, self.ended = {}, {}

    async def go(self, script):
        await self.engine.start()
        for wait, verb in script:
            await asyncio.sleep(wait)
            self.reference.advance(now())
            await getattr(self, verb[0])(*verb[1:])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            self.compare()
        await self.resume()
        await asyncio.wait_for(asyncio.gather(*self.futures.values()), 1e6)
        await asyncio.sleep(1.0)
        self.reference.advance(now())
        self.compare()
        self.at_the_end()

    @staticmethod
    def prompt(rid):
        group = RIDS.index(rid) // 3
        return group, PROMPTS[group]

    async def arrive(self, rid, grows, tokens, stops):
        if rid in self.reference.live() or (rid in self.futures and not self.futures[rid].done()):
            return
        group, prompt = self.prompt(rid) if self.engine.model.shares_prompts else (None, 1)
        context = self.contexts.get(rid, prompt) + grows
        self.lengths[rid] = self.made[rid] + (tokens if stops else tokens + 5)
        self.reference.done.pop(rid, None)
        sampling = Sampling(max_tokens=tokens)
        request = GenerateRequest(rid=rid, token_ids=range(context), sampling=sampling, made=self.made[rid])
        future = self.engine.submit(request)
        future.add_done_callback(lambda f: self.came_back(rid, context, f.result()))
        self.futures[rid] = future
        self.reference.arrive(rid, context, tokens, stops, group, prompt)

    def came_back(self, rid, context, result):
        self.contexts[rid] = context + result.num_tokens
        self.made[rid] += result.num_tokens
        self.ended[rid] = (now(), result)

    async def abort(self, rid):
        expected = rid in self.reference.live()
        assert await self.engine.abort(rid) == expected
        self.reference.abort({rid})

    async def abort_all(self):
        await self.engine.abort()
        self.reference.abort(set(self.reference.live()))

    async def pause(self):
        await self.engine.pause("keep")
        self.reference.frozen = True

    async def resume(self):
        await self.engine.resume()
        self.reference.frozen = False
        self.reference.settle()

    async def swap(self):
        await self.pause()
        version = self.reference.version + 1
        await self.engine.begin_update(version)
        await self.engine.commit_update(version, 0)
        self.reference.swap()

    async def release(self):
        await self.engine.release_memory(["kv"])
        self.reference.idle = []

    async def slow(self, factor):
        self.engine.slow(factor)
        self.reference.slow(factor)

    async def look(self):
        pass

    def compare(self):
        stats, ref = self.engine.stats(), self.reference
        ref.advance(now())
        assert (stats.running, stats.waiting) == (len(ref.running), len(ref.waiting) + len(ref.side))
        assert (stats.version, stats.kv_tokens) == (ref.version, ref.held)
        assert stats.decode_steps_total == ref.count["steps"]
        assert stats.decode_tokens_total == ref.count["tokens"]
        assert stats.prefill_tokens_total == ref.count["prefill"]
        assert stats.cached_tokens_total == ref.count["cached"]
        assert stats.preemptions_total == ref.count["preemptions"]
        assert stats.batch_steps == dict(ref.batch_steps)
        near = {"rel": 1e-9, "abs": 1e-7}
        assert dict(stats.batch_s) == pytest.approx(dict(ref.batch_s), **near)
        assert stats.decode_s_total == pytest.approx(ref.seconds["decode"], **near)
        assert stats.prefill_s_total == pytest.approx(ref.seconds["prefill"], **near)
        assert stats.paused_s == pytest.approx(ref.seconds["paused"], **near)
        assert stats.kv_wait_row_s == pytest.approx(ref.seconds["kv_wait"], **near)
        for rid in RIDS:
            assert self.engine.held(rid) == ref.kept(rid), rid
        assert self.engine.idle_kv == sum(n for _, n in ref.idle)
        capacity = self.engine.model.kv_capacity
        if capacity and len(ref.running) > 1:
            assert stats.kv_tokens + self.engine.idle_kv <= capacity

    def at_the_end(self):
        for rid, (at, finish, made) in self.reference.done.items():
            seen_at, result = self.ended[rid]
            assert (str(result.finish), result.num_tokens) == (finish, len(made)), rid
            assert seen_at == pytest.approx(at, rel=1e-9, abs=1e-7)
            assert [s.version for s in result.segments for _ in s.token_ids] == made
            assert [i for s in result.segments for i in s.token_ids] == list(range(len(made)))
            assert all(len(s.logprobs) == len(s) for s in result.segments)
            versions = [s.version for s in result.segments]
            assert versions == sorted(set(versions))
        stats, idle = self.engine.stats(), self.engine._clockwork.meters.idle_s
        whole = stats.decode_s_total + stats.prefill_s_total + stats.paused_s + idle
        assert whole == pytest.approx(now(), rel=1e-9)
        assert sum(stats.batch_s.values()) == pytest.approx(stats.decode_s_total, rel=1e-9)


@settings(max_examples=250, deadline=None)
@given(MODELS, st.booleans(), SCRIPTS)
def test_the_engine_does_what_a_step_by_step_reference_does(model, keep, script):
    run_virtual(Play(model, keep).go(script))


def busy_play(seed):
    """A long script on a crowded engine, drawn from a stream: deeper than what shrinks well."""
    draw = stream(seed, "busy")
    model = EngineModel(
        slots=draw.randint(2, 6),
        base_s=0.5,
        kv_token_s=draw.choice([0.0, 0.01]),
        compute_row_s=draw.choice([0.0, 0.2]),
        prefill_token_s=draw.choice([0.0, 0.01, 0.1]),
        kv_capacity=draw.choice([30, 60, 90]),
        move_token_s=draw.choice([0.0, 0.02]),
        prefill_elsewhere=draw.random() < 0.3,
        shares_prompts=draw.random() < 0.5,
    )
    script = []
    for _ in range(60):
        wait = draw.choice([0.0, 0.0, 0.5, 2.0, draw.expovariate(0.3)])
        verb = draw.choice(
            ["arrive"] * 9 + ["abort", "abort", "look", "pause", "resume", "resume", "swap", "abort_all"]
        )
        rid = draw.choice(RIDS)
        details = {"arrive": (rid, draw.randint(0, 9), draw.randint(1, 25), draw.random() < 0.5), "abort": (rid,)}
        script.append((wait, (verb, *details.get(verb, ()))))
    return Play(model, draw.random() < 0.5), script


def test_a_crowded_engine_does_what_the_reference_does():
    totals = Counter()
    for seed in range(200):
        play, script = busy_play(seed)
        run_virtual(play.go(script))
        totals.update({name: count > 0 for name, count in play.reference.count.items()})
        totals["kv_wait"] += play.reference.seconds["kv_wait"] > 0
    assert min(totals[name] for name in ("preemptions", "cached", "kv_wait")) > 50, totals
