"""What a forecast counts, where it begins, and that all candidates meet the same rollouts."""

from dataclasses import replace

import pytest

from gruppetto.auto.candidates import composed
from gruppetto.auto.forecast import Question, forecast, forecast_all
from gruppetto.auto.learned import lengths_of
from gruppetto.auto.present import LiveGroup, Member, Present
from gruppetto.engines.base import Sampling
from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.rule import Choice
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.workload import Workload
from gruppetto.sim.world import TrainerModel

CAP = 400
BELIEF = LengthBelief(
    mu=3.0, s_b=0.1, s_w=0.5, cap=CAP, cap_share=0.1, runaway_groups=0.3, capped_groups=0.3, clustered=False,
    mean=60.0, groups=64, steps=4,
)  # fmt: skip
WAIT, MASK = Choice(), Choice(over_age="mask", depth=2.0)
K1_WAIT, CENSOR = Choice(max_staleness=1, depth=2.0, order="fifo"), Choice(tail_batch=1.5)
EMPTY = Present(0, (), 0, 8)


class Asked:
    """One rollout in ten runs to the cap; it keeps what it was asked for."""

    def __init__(self):
        self.demand = Workload.from_median(20, sigma=0.5, icc=0.1, cap=CAP, q0=0.1, prompt_tokens=8)
        self.lengths = {}

    def prompt(self, *key):
        return self.demand.prompt(*key)

    def length(self, *key):
        self.lengths[key] = self.demand.length(*key)
        return self.lengths[key]

    def turns(self, *key):
        return self.demand.turns(*key)


def question(**changed):
    settings = LoopSettings(batch_groups=4, group_size=4, max_tokens=CAP, context=1000, sampling=Sampling(max_tokens=1))
    fields = {
        "present": EMPTY,
        "settings": settings,
        "demand": Asked(),
        "belief": BELIEF,
        "model": EngineModel(slots=16, base_s=1.0),
        "engines": 2,
        "trainer": TrainerModel(step_s=3.0, publish_s=2.0),
        "turns": False,
        "kv_kept": True,
        "seed": 3,
    }
    return Question(**fields | changed)


def policy(choice):
    return composed(choice, kv_known=False, pool=False)


def answers(choice, steps=6, skip=0, **changed):
    return forecast(question(**changed), policy(choice), steps, skip)


# -- what it counts ----------------------------------------------------------------------------------------------------


def test_masked_tokens_are_waste_and_none_of_the_speed():
    """Whoever masks has shorter steps; only what is trained counts."""
    waits, masks = answers(K1_WAIT, 8), answers(MASK, 8)
    assert waits.waste == 0.0
    assert 0.2 < masks.waste < 0.8
    trained = sum(tokens for tokens, _ in masks.per_step)
    assert masks.tokens_s == pytest.approx(trained / sum(seconds for _, seconds in masks.per_step))
    consumed = trained / (1 - masks.waste)  # all of it was generated, of so many rollouts of such a mean
    assert consumed == pytest.approx(8 * 16 * question().demand.demand.mean, rel=0.25)


def test_dropped_tokens_are_waste():
    found = answers(CENSOR)
    assert found.waste > 0.1
    assert not found.failed


def test_what_waits_is_as_old_as_its_bound_at_most_and_only_what_is_trained_counts():
    assert answers(K1_WAIT, 8).staleness == 1
    assert answers(WAIT).staleness == 0
    assert answers(MASK, 8).staleness == 0


def test_a_step_has_the_seconds_of_trainer_and_publish():
    slower = TrainerModel(step_s=13.0, publish_s=22.0)
    plain, more = answers(WAIT), answers(WAIT, trainer=slower)
    assert [b - a for (_, a), (_, b) in zip(plain.per_step, more.per_step, strict=True)] == pytest.approx([30.0] * 6)


def test_the_steps_that_lead_into_it_are_left_out():
    assert answers(K1_WAIT, 3, 3).per_step == answers(K1_WAIT, 6).per_step[3:]
    assert len(answers(K1_WAIT, 3, 3).per_step) == 3


# -- where it begins ---------------------------------------------------------------------------------------------------


def group(*tokens, done, ready):
    members = tuple(Member(((5, made),) if made else (), 0, done) for made in tokens)
    return LiveGroup(members, len(tokens), False, 5 if any(tokens) else None, ready, 8, None)


def test_it_begins_with_what_is_ready_and_at_the_version_of_now():
    ready = tuple(group(10, 10, 10, 10, done=True, ready=True) for _ in range(4))
    begun = answers(replace(K1_WAIT, stream=False), 1, present=Present(6, ready, 0, 8))
    assert begun.per_step == ((160, 5.0),)  # nobody is awaited
    assert begun.staleness == 1


@pytest.mark.parametrize(("made", "seconds"), [(100, 305.0), (380, 25.0)])
def test_rollouts_on_their_way_go_on_from_their_tokens(made, seconds):
    """After 100 tokens, five times the median, they run to the cap of 400 by all that is believed."""
    on_way = tuple(group(made, made, made, made, done=False, ready=False) for _ in range(4))
    found = answers(replace(K1_WAIT, depth=1.0, stream=False), 1, present=Present(6, on_way, 0, 8))
    assert found.per_step == ((16 * CAP, seconds),)


# -- the same for all --------------------------------------------------------------------------------------------------


def test_all_candidates_meet_the_same_rollouts_and_the_same_question_has_the_same_answer():
    asked = question()
    first = forecast_all(asked, [policy(WAIT), policy(MASK), policy(WAIT)], 4, 1)
    assert first[0] == first[2]
    seen = asked.demand.lengths
    for choice in (WAIT, MASK):
        alone = question()
        assert forecast(alone, policy(choice), 4, 1) in first
        assert alone.demand.lengths.items() <= seen.items()


def test_the_lengths_are_whole_groups_once_there_are_512():
    """Siblings stay together: of such groups every member is a multiple of the same number."""
    groups = [tuple((2 + i) * member for member in (1, 2, 3)) for i in range(512)]
    drawn, fitted = lengths_of(groups, 10_000), lengths_of(groups[1:], 10_000)

    def whole(demand):
        return [tuple(demand.length(0, g, m, None) for m in range(3)) in set(groups) for g in range(50)]

    assert all(whole(drawn))
    assert not any(whole(fitted))
    assert lengths_of([(5, 5)], 100) is None
