"""The controller while engines run on beside the trainer: parts of a batch, interruptions, single engines updated."""

import asyncio
import contextlib
from collections import Counter

import pytest
from controlled import PARTIAL, STREAMED, WINDOWED, Run

from gruppetto.clock import now, run_virtual
from gruppetto.controller import Interrupted
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimChannel, SimTrainer
from gruppetto.types import TokenKind


class Watching(SimTrainer):
    """Keeps the groups it was given, and what was dropped of them."""

    def __init__(self, step_s=5.0):
        super().__init__(step_s)
        self.parts, self.dropped, self.before_part = [], 0, lambda: None

    async def forward_backward(self, samples, *, share=1.0):
        self.before_part()
        self.parts.append((self.version, share, {s.group_id for s in samples}))
        await asyncio.sleep(1.0)

    async def drop_gradients(self):
        self.dropped += 1


def versions_of(run):
    """Of each trained rollout: (version it was trained at, versions of its tokens)."""
    found = {}

    def build_batch(groups, version, freshness, advantages):
        for group in groups:
            for m in group.usable():
                found[m.id] = (version, [s.version for s in m.segments if s.kind is TokenKind.MODEL], m.parks)
        return built(groups, version, freshness, advantages)

    built, run.controller.stages.build_batch = run.controller.stages.build_batch, build_batch
    return found


def go(tmp_path, prepare=lambda run: None, **choices):
    """A finished disaggregated run (or interrupted), the versions of what it trained on, and when it ended."""

    async def main():
        run = Run(tmp_path, colocated=False, **choices)
        found = versions_of(run)
        prepare(run)
        with contextlib.suppress(Interrupted):
            await run.controller.run()
        return run, found, now()

    return run_virtual(main())


def test_rollouts_go_on_while_the_trainer_works_and_keep_each_tokens_version_over_a_swap(tmp_path):
    run, found, _ = go(tmp_path, policy=PARTIAL, trainer=Watching(20.0))
    begins = [event["t"] for event in run.kinds("publish_begin")]
    stops = [event["t"] for event in run.kinds("stop")]
    assert all(any(begin - 20 < stop < begin for stop in stops) for begin in begins)
    assert any(len(versions) > 1 and not parks for _, versions, parks in found.values())
    assert all(versions == sorted(set(versions)) for _, versions, _ in found.values())
    assert run.loop.pool.census.dropped == {}
    assert len(run.record.steps) == 6


def test_the_trainer_has_the_parts_of_a_batch_while_its_tail_runs(tmp_path):
    trainer = Watching()
    _, found, _ = go(tmp_path, policy=STREAMED, trainer=trainer)
    by_step = [[ids for version, _, ids in trainer.parts if version == step] for step in range(6)]
    assert all(len(set().union(*parts)) == 3 for parts in by_step)
    assert max(map(len, by_step)) > 1
    trained = [group for _, _, ids in trainer.parts for group in ids]
    assert len(trained) == len(set(trained)) == 18
    assert all(version - min(versions) <= 1 for version, versions, _ in found.values())


@pytest.mark.parametrize("colocated", [False, True])
@pytest.mark.parametrize("at_part", [1, 2, 5, 8])
def test_an_interruption_in_a_streamed_step_gives_all_its_parts_back(tmp_path, at_part, colocated):
    trainer = Watching()

    def interrupt():
        if len(trainer.parts) == at_part - 1:
            run.controller.interrupt()

    async def main():
        nonlocal run
        run = Run(tmp_path, policy=STREAMED, trainer=trainer, colocated=colocated)
        run.controller.stages.evaluator = None
        trainer.before_part = interrupt
        with pytest.raises(Interrupted):
            await run.controller.run()

    run = None
    run_virtual(main())
    saved = run.saved()["scheduler"]["pool"]
    assert saved["census"]["trained"] == 9 * trainer.version
    assert trainer.dropped == 1
    last = set().union(*(ids for version, _, ids in trainer.parts if version == trainer.version))
    assert last
    assert last <= set(saved["ready"])

    async def resumed():
        again = Run(tmp_path, policy=STREAMED, trainer=Watching(), colocated=colocated)
        again.trainer.version = trainer.version
        await again.controller.restore(run.saved())
        await again.controller.run()
        return again

    again = run_virtual(resumed())
    assert len(again.record.steps) == 6 - trainer.version
    assert again.loop.pool.census.trained == 6 * 9
    assert again.loop.pool.census.dropped == {}


def test_an_evaluation_in_a_disaggregated_run_is_of_one_version_and_loses_no_rollout(tmp_path):
    run, found, _ = go(tmp_path, policy=STREAMED, eval_every=1)
    assert [event["version"] for event in run.kinds("eval")] == list(range(7))
    assert all(event["failed"] == 0 for event in run.kinds("eval"))
    assert any(parks for _, _, parks in found.values())
    assert run.loop.pool.census.dropped == {}


def test_engines_go_over_one_by_one_where_rollouts_keep_their_version(tmp_path):
    run, found, _ = go(tmp_path, policy=WINDOWED, engines=3)
    assert {len(set(versions)) for _, versions, _ in found.values()} == {1}
    assert {version - versions[0] for version, versions, _ in found.values()} == {0, 1}
    assert len(run.record.steps) == 6


@pytest.mark.parametrize("policy", [PARTIAL, STREAMED, WINDOWED], ids=lambda policy: policy.name)
@pytest.mark.parametrize("at_s", [3.0, 14.0, 22.5, 30.0])
def test_an_engine_that_dies_while_others_go_on_loses_no_rollout(tmp_path, policy, at_s):
    run, found, _ = go(
        tmp_path,
        lambda run: asyncio.get_running_loop().call_later(at_s, run.engines[0].kill, "power cut"),
        policy=policy,
        engines=3,
        trainer=Watching(),
    )
    assert len(run.record.steps) == 6
    assert len(found) == 6 * 9
    assert run.loop.pool.census.dropped == {}
    if policy.freshness.max_staleness is not None:
        assert all(version - min(versions) <= 1 for version, versions, _ in found.values())


def test_an_engine_that_does_not_answer_an_update_is_out_and_the_others_go_on(tmp_path):
    run, _, ended = go(
        tmp_path,
        lambda run: asyncio.get_running_loop().call_later(14.0, run.engines[1].hang),
        policy=WINDOWED,
        engines=3,
        timeout_s=60.0,
        stall_s=100.0,
    )
    assert [event["engine"] for event in run.kinds("error")] == ["e1"]
    assert len(run.record.steps) == 6
    assert ended < 1000


def test_in_lockstep_engines_that_stand_still_wait_for_the_trainer(tmp_path, monkeypatch):
    monkeypatch.setattr(SimEngine, "advance", lambda engine: asyncio.sleep(0.5), raising=False)

    async def main():
        run = Run(tmp_path, policy=STREAMED, trainer=Watching(), lockstep=True)
        await run.controller.run()
        return run

    run = run_virtual(main())
    parts = Counter(event["step"] for event in run.kinds("train_begin"))
    streamed = [row for row in run.record.steps if parts[row["version"]] > 1]
    assert streamed
    closed_s = len(run.engines) * (1.0 + 5.0)  # the last part and the optimizer step, in which engines rest anyway
    assert all(row["engine_s/trainer"] > closed_s + 1 for row in streamed)
    assert run.loop.pool.rates is None  # no decision may depend on a measured time


def test_the_scheduling_policy_is_told_how_fast_the_engines_were_measured_to_be(tmp_path):
    run = Run(tmp_path, colocated=False, policy=PARTIAL)
    run_virtual(run.controller.run())
    rates = run.loop.pool.rates
    assert rates.step_s(8) == pytest.approx(1.0)  # SimEngine: a second a step, whatever its rows


def test_what_was_sent_is_counted_in_the_step_in_which_it_was(tmp_path):
    """Engines take the weights when they come to it, several times in a step or not at all."""

    class Counting(SimChannel):
        calls = taken = 0

        async def publish(self, version, tensors, engines):
            self.calls += 1
            return await super().publish(version, tensors, engines)

        def take_counts(self):
            before, self.taken = self.taken, self.calls
            return {"publish/calls": self.calls - before}

    def prepare(run):
        run.controller.stages.channel = Counting(1.0)

    run, _, _ = go(tmp_path, prepare, policy=WINDOWED)
    channel = run.controller.stages.channel
    assert sum(row["publish/calls"] for row in run.record.steps) == channel.taken
    assert 6 <= channel.taken <= channel.calls
