"""`auto` and history deferral: a forecast tells what it gains, and a run takes it where prompts are long by nature."""

import pytest

from gruppetto.auto.ask import ask_here
from gruppetto.auto.candidates import composed
from gruppetto.auto.chooser import AutoSettings, Chooser
from gruppetto.auto.forecast import Question, StepTotals, forecast
from gruppetto.auto.foretold import Foreknown
from gruppetto.auto.present import Present
from gruppetto.clock import run_virtual
from gruppetto.engines.base import Sampling
from gruppetto.record.base import NullRecorder
from gruppetto.scheduler.beliefs.history import PromptHistory
from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.rule import Choice, Limits
from gruppetto.scheduler.memory import LONG_SHARE
from gruppetto.scheduler.settings import LoopSettings
from gruppetto.sim.demand import AGAIN, Plans
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.workload import Workload
from gruppetto.sim.world import Spec, TrainerModel, World

CAP, GROUPS, SIZE, SEED = 4000, 8, 4, 3
SETTINGS = LoopSettings(
    batch_groups=GROUPS, group_size=SIZE, max_tokens=CAP, context=2 * CAP, sampling=Sampling(max_tokens=1)
)
TAIL = EngineModel(slots=32, base_s=1.0)
"""All rows cost nothing: a step lasts as long as its longest rollout."""
WAIT, DEFER = Choice(), Choice(defer=True)


def workload(icc):
    return Workload.from_median(60, sigma=1.2, icc=icc, cap=CAP, prompt_tokens=8)


def known_of(load, share=1.0, put_off=0):
    """What a run knows after two epochs of 256 prompts, with so many of them put off."""
    history = PromptHistory(CAP)
    for epoch in range(2):
        for prompt in range(256):
            lengths = [load.length(SEED, 1000 * epoch + prompt, member, prompt) for member in range(SIZE)]
            history.record(f"t{prompt}", lengths, [length >= CAP for length in lengths])
    limit = history.threshold(LONG_SHARE)
    return Foreknown(history.pasts(), limit, share, tuple((5, 2 * limit) for _ in range(put_off)))


def answers(choice, load, known, deferred=0, steps=20, skip=1):
    belief = LengthBelief(
        mu=load.mu, s_b=load.s_b, s_w=load.s_w, cap=CAP, cap_share=0.0, runaway_groups=0.0, capped_groups=0.0,
        clustered=False, mean=load.mean, groups=64, steps=4,
    )  # fmt: skip
    question = Question(
        present=Present(5, (), deferred, 8), settings=SETTINGS, demand=load, belief=belief, model=TAIL, engines=1,
        trainer=TrainerModel(publish_s=1.0), turns=False, kv_kept=True, seed=SEED, known=known,
    )  # fmt: skip
    return forecast(question, composed(choice, kv_known=False, pool=False), steps, skip)


# -- a forecast --------------------------------------------------------------------------------------------------------


def gain(icc, known):
    load = workload(icc)
    plain, deferred = (answers(choice, load, known_of(load) if known else None) for choice in (WAIT, DEFER))
    return deferred.better_than(plain)[0]


def test_deferral_is_better_where_prompts_are_long_by_nature_and_not_where_chance_makes_them_so():
    assert gain(0.9, known=True) > 0.3
    assert gain(0.6, known=True) > 0.1
    assert gain(0.15, known=True) < 0.05  # as reliable as it must be to be tried
    assert gain(0.9, known=False) == 0.0  # who knows no past puts nothing off


def test_who_puts_nothing_off_meets_the_same_rollouts_with_a_past_as_without():
    load = workload(0.9)
    with_past, without = (answers(WAIT, load, known) for known in (known_of(load), None))
    assert with_past.per_step == without.per_step


def test_prompts_that_were_never_seen_are_not_put_off():
    load = workload(0.9)
    none_back = known_of(load, share=0.0)
    assert answers(DEFER, load, none_back).per_step == answers(DEFER, load, None).per_step
    assert answers(DEFER, load, known_of(load, share=0.5)).per_step != answers(DEFER, load, None).per_step


def test_nothing_is_put_off_by_a_past_that_tells_too_little():
    load = workload(0.9)
    known = known_of(load)
    unreliable = Foreknown(known.pasts._replace(reliability=0.2), known.threshold, 1.0)
    assert answers(DEFER, load, unreliable).per_step == answers(DEFER, load, None).per_step


def test_the_first_step_puts_off_what_is_predicted_to_be_long():
    load = workload(0.9)
    known = known_of(load)
    every, short = (answers(choice, load, known, steps=1, skip=0).per_step[0] for choice in (WAIT, DEFER))
    assert short[1] < 0.5 * every[1]


class Asked:
    """A workload that keeps which members were asked for."""

    def __init__(self, load):
        self.load, self.members = load, set()
        self.mu, self.s_b, self.s_w, self.mean = load.mu, load.s_b, load.s_w, load.mean

    def prompt(self, *key):
        return self.load.prompt(*key)

    def length(self, *key):
        self.members.add(key[2])
        return self.load.length(*key)


def test_what_is_put_off_makes_what_its_past_was_drawn_for_and_what_starts_again_does_not():
    load = workload(0.9)
    deferred, rounds = Asked(load), Asked(load)
    assert not answers(DEFER, deferred, known_of(load, put_off=GROUPS), GROUPS).failed
    assert deferred.members == set(range(SIZE))
    assert not answers(Choice(tail_batch=1.5), rounds, known_of(load)).failed
    assert max(rounds.members) >= AGAIN


def test_a_list_that_is_full_is_the_next_step_and_is_as_long_as_predicted():
    load = workload(0.9)
    first = forecast_first(load, known_of(load, put_off=GROUPS), GROUPS)
    usual = forecast_first(load, known_of(load), 0)
    assert first[0] > 2 * usual[0]  # tokens of the step
    assert first[0] > 1.5 * forecast_first(load, None, GROUPS)[0]  # without a past, any prompts


def forecast_first(load, known, deferred):
    """(tokens, seconds) of the first step that defers."""
    return answers(DEFER, load, known, deferred, steps=1, skip=0).per_step[0]


# -- a run -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("icc", "tasks", "defers"), [(0.9, 32, True), (0.02, 32, False), (0.9, 0, False)])
def test_a_run_defers_from_its_second_epoch_on_where_that_is_faster(icc, tasks, defers):
    begun = composed(WAIT, kv_known=False, pool=False)
    steps = 20
    plans = Plans(workload(icc), SEED, turns=False)
    spec = Spec(
        settings=SETTINGS, policy=begun, plans=plans, model=TAIL, engines=1, steps=steps, seed=SEED, tasks=tasks,
        trainer=TrainerModel(publish_s=1.0),
    )  # fmt: skip

    async def main():
        world = World.of(spec, NullRecorder())
        chooser = world.stages.chooser = Chooser(AutoSettings(limits=Limits()), ask_here, world.loop)
        chooser.begin()
        await world.run(StepTotals(world.stages, steps, learns=True))
        return chooser

    chooser = run_virtual(main())
    assert chooser.choice.defer == defers
    asked = {row["choice"] for decision in chooser.decisions for row in decision["forecasts"]}
    assert any("defer" in choice for choice in asked) == (tasks > 0 and icc > 0.5)
