"""A chooser between steps that never ran: lengths, seconds and forecasts are what a test says they are."""

from controlled import Run

from gruppetto.auto.chooser import AutoSettings, Chooser
from gruppetto.auto.forecast import Forecast
from gruppetto.clock import run_virtual
from gruppetto.rng import stream
from gruppetto.scheduler.beliefs.rule import Limits
from gruppetto.scheduler.meter import CAUSES, EngineWork, StepWork
from gruppetto.scheduler.policies.rounds import ShortLong

GROUPS, SIZE, CAP = 16, 4, 2000


def kind(policy):
    """A candidate in a word: how it treats what is long, and how deep it goes."""
    if isinstance(policy.rounds, ShortLong):
        return f"rounds {policy.rounds.over_prompts:g}"
    return f"{policy.freshness.over_age} {policy.rounds.depth:g}"


class ByHand:
    """`answer` is tokens a second by candidate, `others` for those it does not have; a `Forecast`'s fields where they
    are a dict. One rollout of each step is `long` times as long as usual: with k = 1 the rule waits at 1.25 where all
    are alike, at depth 2 for one ten times as long, and masks at depth 2 for one 200 times as long."""

    def __init__(self, tmp_path, answer, *, others=1.0, long=1.0, max_candidates=8, **limits):
        self.answer, self.others, self.long = answer, others, long
        self.run = Run(tmp_path, batch_groups=GROUPS, group_size=SIZE, max_tokens=CAP)
        settings = AutoSettings(limits=Limits(**limits), max_candidates=max_candidates)
        self.asked, self.followed = [], []
        """(step, candidates in words, steps, steps left out) of each question; what the loop was told to follow."""
        self.chooser = Chooser(settings, self._ask, self.run.loop)
        self.policies = []
        self.run.loop.follow = self._follow
        self.steps = 0
        self.chooser.begin()

    def _follow(self, policy):
        self.policies.append(policy)
        self.followed.append((self.steps, kind(policy)))

    @property
    def present(self):
        return self.followed[-1][1]

    def asked_at(self):
        return [step for step, *_ in self.asked]

    def events(self, name):
        return self.run.kinds(name)

    async def _ask(self, question, candidates, steps, skip):
        self.asked.append((self.steps, [kind(one) for one in candidates], steps, skip))
        return [self._forecast(candidate) for candidate in candidates]

    def _forecast(self, candidate):
        found = self.answer.get(kind(candidate), self.others)
        fields = found if isinstance(found, dict) else {"tokens_s": found}
        return Forecast(**{"candidate": candidate, "tokens_s": 1.0, "step_s": 10.0, "waste": 0.0, **fields})

    def step(self, times=1, *, trained=10.0, seconds=10.0):
        """So many steps of so many trained tokens."""
        for _ in range(times):
            self.steps += 1
            self._learn()
            metrics = {
                "time/train_s": 1.0,
                "time/publish_s": 1.0,
                "time/step_s": seconds,
                "tokens/batch_trained": trained,
            }
            run_virtual(self.chooser.after_step(metrics, work(), 100))

    def _learn(self):
        """Lengths of a step: alike, but for one rollout."""
        draw = stream(0, "lengths", self.steps)
        memory = self.run.loop.memory
        for group in range(GROUPS):
            lengths = [draw.choice((5, 6)) for _ in range(SIZE)]
            if group == 0:
                lengths[-1] = min(CAP, round(6 * self.long))
            memory.estimator.add(lengths, [length == CAP for length in lengths])
        memory.close_step()


def work():
    """Engines at 2 s a step and half a second a row."""
    steps, seconds = {1: 10, 8: 10}, {1: 25.0, 8: 60.0}
    engines = tuple(
        EngineWork(
            engine=f"e{i}", slots=8, batch_steps=steps, queued_steps={}, decode_s=85.0, prefill_s=0.0,
            prefill_tokens=0, batch_s=seconds,
        )
        for i in range(2)
    )  # fmt: skip
    return StepWork(engines=engines, ticks=dict.fromkeys(CAUSES, 0), wall_ticks=0, generate_ticks=0, evaluated=())
