"""`auto` decides between steps: whom it asks about and when, and how it changes to what censors."""

from itertools import pairwise

from controlled import Run

from gruppetto.auto.chooser import EVERY, AutoSettings, Chooser
from gruppetto.auto.forecast import Forecast
from gruppetto.clock import run_virtual
from gruppetto.scheduler.beliefs.rule import Limits
from gruppetto.scheduler.policies.rounds import ShortLong


def run_with(tmp_path, limits, answer, *, steps):
    """A run whose forecasts are `answer(candidate)`; returns it, its chooser and the steps after which it asked."""
    run, asked = Run(tmp_path, batch_groups=8), []

    async def ask(question, candidates, steps, skip):
        asked.append(run.controller.version)
        return [answer(candidate) for candidate in candidates]

    chooser = Chooser(AutoSettings(limits=limits), ask, run.loop)
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
