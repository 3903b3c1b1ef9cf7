"""`auto` in a run: it drains before it censors, learns nothing from what censors, and holds up nobody who may go on."""

import asyncio
import json
from dataclasses import asdict, replace
from itertools import pairwise

import pytest
from controlled import STREAMED, Run

from gruppetto.auto.chooser import EVERY, AutoSettings, Chooser
from gruppetto.auto.forecast import Forecast
from gruppetto.clock import run_virtual
from gruppetto.scheduler.beliefs.rule import Choice, Limits
from gruppetto.scheduler.policies.rounds import ShortLong


def run_with(tmp_path, limits, answer, *, steps, takes_s=0.0, **settings):
    """A run whose forecasts are `answer(candidate)` and take so long; returns it, its chooser and the steps after which
    it asked."""
    run, asked = Run(tmp_path, batch_groups=8), []

    async def ask(question, candidates, steps, skip):
        asked.append(run.controller.version)
        await asyncio.sleep(takes_s)
        return [answer(candidate) for candidate in candidates]

    chooser = Chooser(AutoSettings(limits=limits, **settings), ask, run.loop)
    run.controller.stages.chooser, run.controller.steps = chooser, steps
    return run, chooser, asked


def test_forecasts_that_fail_are_not_asked_for_again_at_every_step(tmp_path):
    run, chooser, asked = run_with(
        tmp_path, Limits(), lambda candidate: Forecast(candidate=candidate, failed="no"), steps=14
    )
    before = chooser.choice
    run_virtual(run.controller.run())
    assert chooser.choice == before
    assert len(asked) >= 3
    later = [step for step in asked if step > 4]
    assert all(b - a >= EVERY for a, b in pairwise(later))
    assert all("no candidate keeps the limits" in event["reason"] for event in run.kinds("notice"))


def short_and_long_first(candidate):
    """Whatever censors is twice as fast."""
    return Forecast(candidate=candidate, tokens_s=1.0 + isinstance(candidate.rounds, ShortLong), waste=0.0)


def test_it_drains_before_it_censors_and_asks_nobody_meanwhile(tmp_path):
    limits = Limits(max_staleness=1, allow_censoring=True)
    run, chooser, asked = run_with(tmp_path, limits, short_and_long_first, steps=12)
    seen, follow = [], run.loop.follow

    def followed(policy):
        seen.append((run.controller.version, policy.name, policy.censors, len(run.loop.pool.groups)))
        follow(policy)

    run.loop.follow = followed
    run_virtual(run.controller.run())
    names = [name for _, name, _, _ in seen]
    assert names[:3] == ["auto", "drain", "auto"]
    (began, _, _, live), (ended, _, censors, left) = seen[1:3]
    assert live > left == 0  # it had groups on their way, and all of them were trained on whole
    assert censors
    assert not [step for step in asked if began < step < ended]
    assert chooser.choice.tail_batch is not None


def test_a_later_decision_replaces_one_that_waits_for_the_pool_to_drain(tmp_path):
    limits = Limits(max_staleness=1, allow_censoring=True)
    run, chooser, _ = run_with(tmp_path, limits, short_and_long_first, steps=3)
    run_virtual(run.controller.run())
    plain = chooser.choice
    chooser._next = chooser._candidates()[-1]
    chooser._follow(plain)
    run.loop.pool.groups.clear()
    chooser._drained()
    assert chooser.choice == plain


def test_a_run_learns_no_lengths_from_what_a_censoring_policy_consumed(tmp_path):
    learned = {}
    for name, policy in {
        "plain": STREAMED,
        "censors": replace(STREAMED, rounds=ShortLong(), unfinished="drop"),
    }.items():
        for followed in (False, True):
            run = Run(tmp_path / name, batch_groups=8, policy=STREAMED if followed else policy)
            if followed:
                run.loop.follow(policy)
            run_virtual(run.controller.run())
            learned[name, followed] = len(run.loop.memory.estimator.recent_groups())
    assert learned["plain", False] >= 6 * 8 <= learned["plain", True]
    assert learned["censors", False] == learned["censors", True] == 0


def deeper(candidate):
    """What is deepest is fastest."""
    return Forecast(candidate=candidate, tokens_s=candidate.rounds.depth, waste=0.0)


@pytest.mark.parametrize(("deterministic", "followed_after"), [(True, 1), (False, 3)])
def test_a_run_that_may_goes_on_while_its_question_is_answered(tmp_path, deterministic, followed_after):
    """An answer that takes a step and a half is taken after the step in which it came."""
    run, *_ = run_with(tmp_path, Limits(max_staleness=1), deeper, steps=4, deterministic=deterministic)
    run_virtual(run.controller.run())
    step_s = run.record.steps[1]["time/step_s"]
    run, _, asked = run_with(
        tmp_path, Limits(max_staleness=1), deeper, steps=4, takes_s=1.5 * step_s, deterministic=deterministic
    )
    run_virtual(run.controller.run())
    assert asked == [1]
    (event,) = run.kinds("choice")
    assert event["switch"]
    assert event["after_step"] == followed_after


def test_a_run_resumed_under_tighter_limits_does_not_go_on_with_a_choice_that_they_forbid(tmp_path):
    loose, tight = Limits(max_staleness=1, allow_mask=True), Limits(max_staleness=1)
    masked = Choice(depth=2.0, max_staleness=1, over_age="mask", order="fifo")
    for limits, kept in ((loose, True), (tight, False), (replace(loose, max_staleness=0), False)):
        _, resumed, _ = run_with(tmp_path, limits, deeper, steps=1)
        own = resumed.choice
        resumed.load_state(asdict(masked))
        assert resumed.choice == (masked if kept else own)


def test_a_resumed_run_goes_on_with_its_choice_and_measures_prices_anew(tmp_path):
    run, chooser, _ = run_with(tmp_path, Limits(max_staleness=1), deeper, steps=3)
    run_virtual(run.controller.run())
    assert chooser.choice.depth == 2
    again, resumed, asked = run_with(tmp_path, Limits(max_staleness=1), deeper, steps=1)
    resumed.load_state(json.loads(json.dumps(chooser.state())))
    assert resumed.choice == chooser.choice
    resumed.begin()
    assert again.loop.policy.rounds.depth == 2
    assert asked == []
