"""How large a question may be: what is given up first, and that a smaller run is the same run, smaller."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.auto.candidates import composed
from gruppetto.auto.forecast import Forecast, Question
from gruppetto.auto.foretold import Foreknown
from gruppetto.auto.present import LiveGroup, Member, Present
from gruppetto.auto.smaller import FEW, MAX_EVENTS, ROLLOUTS, STEPS, TIMES, extent, larger, smaller
from gruppetto.engines.base import Sampling
from gruppetto.scheduler.beliefs.history import Pasts
from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.rule import Choice
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.workload import Workload
from gruppetto.sim.world import TrainerModel

BELIEF = LengthBelief(
    mu=6.4,
    s_b=0.3,
    s_w=0.5,
    cap=4096,
    cap_share=0.0,
    runaway_groups=0.0,
    capped_groups=0.0,
    clustered=False,
    mean=700.0,
    groups=64,
    steps=4,
)


def group(number):
    member = Member(((0, 10 + number),), 0, done=False)
    return LiveGroup((member,), 1, False, 0, False, 8, None)


def question(groups=128, size=8, engines=16):
    settings = LoopSettings(
        batch_groups=groups, group_size=size, max_tokens=4096, context=8192, sampling=Sampling(max_tokens=1)
    )
    return Question(
        present=Present(3, tuple(group(i) for i in range(100)), 9, 8),
        settings=settings,
        demand=Workload.from_median(600, sigma=0.6, icc=0.3, cap=4096),
        belief=BELIEF,
        model=EngineModel(slots=64),
        engines=engines,
        trainer=TrainerModel(step_s=2.0, token_s=1e-5, publish_s=3.0),
        turns=False,
        kv_kept=False,
        seed=1,
    )


def cost(asked, found, events):
    rollouts = asked.settings.batch_groups * asked.settings.group_size / found.times
    return rollouts * events * (found.steps + found.skip) * found.candidates


def test_what_is_cheap_is_asked_whole():
    found = extent(question(groups=16), 8, 8, 2, 1.5)
    assert (found.candidates, found.steps, found.skip, found.times) == (8, 8, 2, 1)


def test_candidates_go_first_then_the_size_then_more_candidates_then_steps():
    asked = question()
    found = [extent(asked, 8, 8, 2, events) for events in (1.5, 2.5, 4.0, 12.0, 40.0)]
    assert [f.times for f in found] == [1, 1, 2, TIMES, TIMES]
    assert found[0].candidates > found[1].candidates >= FEW
    assert found[2].candidates >= FEW > found[3].candidates >= 2 == found[4].candidates
    assert [f.steps for f in found[:4]] == [8] * 4
    assert STEPS <= found[4].steps < 8


@given(
    groups=st.integers(1, 1024),
    size=st.sampled_from((4, 8, 16)),
    engines=st.integers(1, 64),
    candidates=st.integers(2, 8),
    steps=st.integers(8, 24),
    skip=st.integers(1, 8),
    events=st.floats(1.0, 60.0),
)
def test_an_extent_keeps_the_bar_or_is_the_smallest(groups, size, engines, candidates, steps, skip, events):
    asked = question(groups, size, engines)
    found = extent(asked, candidates, steps, skip, events)
    assert 2 <= found.candidates <= candidates
    assert min(STEPS, steps) <= found.steps <= steps
    assert engines % found.times == 0 == groups % found.times
    assert found.times == 1 or groups * size / found.times >= ROLLOUTS
    if cost(asked, found, events) > MAX_EVENTS:
        assert (found.candidates, found.steps) == (2, STEPS)


def test_a_smaller_run_has_the_same_work_an_engine_and_the_same_share_of_its_trainer():
    asked = question()
    less = smaller(asked, 4)
    assert (less.engines, less.settings.batch_groups) == (4, 32)
    whole, part = asked.settings.batch_groups, less.settings.batch_groups
    assert part * less.trainer.token_s == pytest.approx(whole * asked.trainer.token_s)
    assert less.trainer == replace(asked.trainer, token_s=less.trainer.token_s)
    assert less.present.deferred == 2
    kept = [live.members[0].tokens - 10 for live in less.present.groups]
    assert kept == list(range(2, 100, 4))
    assert smaller(asked, 1) is asked
    assert less.known is None
    pasts = Pasts(4096, 0.8, 0.3, (5.0, 6.0), (0.0, 1.0), 0.5)
    known = Foreknown(pasts, 900.0, 0.7, tuple((i, 1000.0) for i in range(9)))
    fewer = smaller(replace(asked, known=known), 4).known
    assert fewer == replace(known, deferred=((3, 1000.0), (7, 1000.0)))


def test_a_smaller_runs_forecast_speaks_of_the_whole():
    tried = composed(Choice(), kv_known=False, pool=False)
    answer = Forecast(candidate=tried, tokens_s=10.0, groups_s=2.0, step_s=5.0, per_step=((50, 5.0),))
    whole = larger(answer, 4)
    assert (whole.tokens_s, whole.groups_s, whole.step_s) == (40.0, 8.0, 5.0)
    assert whole.per_step == ((200, 5.0),)
