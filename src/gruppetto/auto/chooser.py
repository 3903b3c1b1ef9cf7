"""`auto`: after each step, which scheduling policy comes next.

    step 1        the rule, from the first estimates; nothing that masks or censors before four steps are in
    step 1, 4 …   a forecast of the rule's choice, the present one, one of each kind and neighbours, from the present
                  state; then every 5 steps, more rarely while the choice is confirmed
    switch        where the gain is above 3 % and twice its standard error, twice running, or above 3 % three times
                  running (up to step 4 at once)
    every 5 steps the forecast's error; three in a row above 15 %, and the rule decides until the next good one

What would discard more than .85 of `max_waste` (the present choice: more than all of it), or age beyond the bound, is
no candidate. Changing to what censors
drains first: groups on their way are trained whole. Each decision is an event with its forecast. Source: our scheduling
study, section 4; the online loop is ours.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from gruppetto.auto.ask import Ask
from gruppetto.auto.candidates import candidates, composed, warm_up
from gruppetto.auto.estimates import Estimates, engine_model
from gruppetto.auto.forecast import Forecast, Question
from gruppetto.auto.foretold import foreknown
from gruppetto.auto.learned import Learned, lengths_of
from gruppetto.auto.present import take
from gruppetto.auto.smaller import Extent, extent, larger, smaller
from gruppetto.presets import CHUNK
from gruppetto.scheduler.beliefs.rule import STEPS_UNBIASED, Choice, Limits, allowed, choose
from gruppetto.scheduler.loop import RolloutLoop
from gruppetto.scheduler.meter import StepWork
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.rounds import Continuous

FIRST = (1, 4)
"""Steps after which a forecast is made for certain."""
EVERY = 5
"""Steps to the next one; once the run is settled, twice as many each time that the present choice is confirmed."""
SETTLED = 14
"""Steps before which a confirmed choice is asked about again as soon as any other."""
MAX_PAUSE = 20
ASK_ALL = 4
"""Every so many forecasts nobody sits out."""
FAR_BEHIND = 0.75
MAX_OVER = 1.2
"""Times `max_waste` beyond which a candidate sits out too."""
GAIN = 0.03
MARGIN = 0.85
"""Share of `max_waste` that a forecast may use up; without it one case in fifteen ended just over the limit."""
WRONG = 0.15
STEPS_WRONG = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class AutoSettings:
    """`limits` of the user; `deterministic`: a decision waits for its forecast, whenever it comes."""

    limits: Limits
    turns: bool = False
    kv_kept: bool = False
    seed: int = 0
    deterministic: bool = True
    max_candidates: int = 8


class Chooser:
    """One run's decisions. `after_step` is awaited between two steps."""

    def __init__(self, settings: AutoSettings, ask: Ask, loop: RolloutLoop) -> None:
        self._settings, self._ask, self._loop = settings, ask, loop
        self._estimates = Estimates()
        self._choice = choose(settings.limits, None)
        self._ruled = self._choice
        """What the rule would have."""
        self._next: Choice | None = None
        """Waits for the pool to drain."""
        self._pending: asyncio.Task[list[Forecast]] | None = None
        self._asked: list[Choice] = []
        self._extent = Extent(0, 0, 0)
        self._ahead: tuple[tuple[Choice, float, float], ...] = ()
        """(best, gain over the present choice, its error) of the last forecasts that named another one."""
        self._forecast: Forecast | None = None
        self._seen: list[tuple[float, float]] = []
        """(trained tokens, seconds) of the steps since the last look at the forecast's error."""
        self._errors = 0
        self._pause, self._next_at, self._rounds = EVERY, FIRST[0], 1
        self._out: set[Choice] = set()
        """Far behind in an earlier forecast."""
        self.decisions: list[dict[str, Any]] = []

    @property
    def choice(self) -> Choice:
        """What the run follows."""
        return self._choice

    def begin(self) -> None:
        """Before the first step: what is safe when nothing is known."""
        self._follow(self._choice)

    async def after_step(self, metrics: Mapping[str, Any], work: StepWork, processed: int) -> None:
        """Learns from a step, asks for forecasts when they are due, follows them when they are in."""
        self._estimates.add(metrics, work, processed)
        self._check_forecast(metrics)
        if self._next is not None:
            self._drained()
        if self._pending is not None and (self._pending.done() or self._settings.deterministic):
            await self._consider()
        if self._due() and self._pending is None and self._next is None:
            question = self._question()
            if question is None:
                return
            tried = self._candidates()
            self._extent = extent(question, len(tried), *warm_up(tried), self._events())
            self._asked = tried[: self._extent.candidates]
            self._pending = asyncio.get_running_loop().create_task(self._answer(question, self._asked, self._extent))
            if self._settings.deterministic:
                await self._consider()

    def state(self) -> dict[str, Any]:
        """JSON-able: what the run follows. What was measured is measured anew after a resume."""
        return asdict(replace(self._choice, why=()))

    def load_state(self, state: Mapping[str, Any]) -> None:
        """Goes on with the choice of `state()`, unless today's limits forbid it."""
        choice = Choice(**{**state, "why": ()})
        if allowed(choice, self._settings.limits):
            self._choice = choice

    async def close(self) -> None:
        """Ends what is under way."""
        if self._pending is not None:
            self._pending.cancel()
            await asyncio.gather(self._pending, return_exceptions=True)

    # -- asking -------------------------------------------------------------------------------------------------------

    def _due(self) -> bool:
        count = self._estimates.count
        return count in FIRST or count >= self._next_at

    def _limits(self) -> Limits:
        limits = self._settings.limits
        if self._estimates.count < STEPS_UNBIASED:
            return replace(limits, allow_mask=False, allow_censoring=False)
        return limits

    def _candidates(self) -> list[Choice]:
        ruled = self._ruled = self._rule()
        history = self._loop.memory.defer_above is not None
        tried = candidates(ruled, self._choice, self._limits(), history=history)
        kept = [choice for choice in tried if choice not in self._out or choice in (ruled, self._choice)]
        return kept[: self._settings.max_candidates]

    def _events(self) -> float:
        """Starts and tool calls of a rollout."""
        memory, belief = self._loop.memory, self._loop.memory.estimator.belief()
        mean = belief.mean if belief is not None else 0.0
        if self._settings.turns and memory.turns.tokens_a_turn:
            return 2 * max(1.0, mean / memory.turns.tokens_a_turn)
        return 1 + mean / CHUNK

    def _rule(self) -> Choice:
        loop = self._loop
        belief = loop.memory.estimator.belief()
        rates = self._estimates.rates(loop.pool.engines()[0].slots, len(loop.pool.engines()))
        if belief is None or rates is None:
            return choose(self._limits(), None)
        measured = self._estimates.measured(loop.memory, belief, loop.pool, rates, self._prompt())
        return choose(self._limits(), measured)

    def _prompt(self) -> int:
        prompts = [group.prompt for group in self._loop.pool.groups.values()]
        return sum(prompts) // len(prompts) if prompts else self._loop.memory.prompt_tokens

    def _question(self) -> Question | None:
        loop, memory = self._loop, self._loop.memory
        engines = loop.pool.engines()
        belief = memory.estimator.belief()
        rates = self._estimates.rates(engines[0].slots, len(engines)) if engines else None
        lengths = lengths_of(memory.estimator.recent_groups(), loop.pool.max_tokens)
        if belief is None or rates is None or lengths is None:
            return None
        model = engine_model(rates, engines[0].kv_capacity)
        turns = self._settings.turns
        prompt = self._prompt()
        demand = Learned(
            lengths,
            prompt,
            memory.turns.tokens_a_turn if turns else 0,
            memory.turns.tokens_an_answer if turns else 0,
            memory.turns.seconds if turns else (),
        )
        rows = max(1, loop.pool.num_running // max(1, len(engines)))
        present = take(loop.pool, model.step_s(rows, 0))
        return Question(
            present=present if present.groups else replace(present, prompt=prompt),
            settings=loop.settings,
            demand=demand,
            belief=belief,
            model=model,
            engines=len(engines),
            trainer=self._estimates.trainer(),
            turns=turns,
            kv_kept=self._settings.kv_kept,
            seed=self._settings.seed + self._estimates.count,
            tool_s=memory.turns.seconds_a_token if turns else 0.0,
            trainer_share=loop.pool.line.trainer_share,
            known=foreknown(loop),
        )

    async def _answer(self, question: Question, asked: list[Choice], within: Extent) -> list[Forecast]:
        tried = [self._compose(choice) for choice in asked]
        answers = await self._ask(smaller(question, within.times), tried, within.steps, within.skip)
        return [larger(answer, within.times) for answer in answers]

    # -- deciding -----------------------------------------------------------------------------------------------------

    async def _consider(self) -> None:
        assert self._pending is not None
        pending, self._pending = self._pending, None
        try:
            answers = await pending
        except Exception as error:  # a broken forecast costs a decision, not the run
            self._stay(f"no forecast, the scheduling policy stays: {error!r}")
            return
        known = dict(zip(self._asked, answers, strict=True))
        usable = {choice: answer for choice, answer in known.items() if self._usable(choice, answer)}
        if not usable:
            self._stay("no candidate keeps the limits by its forecast, the scheduling policy stays")
            return
        best = self._best(usable)
        present = usable.get(self._choice)
        gain, doubt = usable[best].better_than(present) if present is not None else (float("inf"), 0.0)
        if best != self._choice:
            self._ahead = (*self._ahead, (best, gain, doubt))[-3:]
        switch = best != self._choice and (present is None or self._distrusted or self._convinced(best, gain))
        self._note(known, best, gain, switch)
        if switch:
            self._go_to(best)
        self._pace(known, best, switch)
        self._expect(usable.get(self._choice))

    def _stay(self, why: str) -> None:
        self._next_at = self._estimates.count + EVERY
        self._tell("notice", reason=why)

    def _pace(self, known: Mapping[Choice, Forecast], best: Choice, switch: bool) -> None:
        """When to ask next, and whom not to ask: who was far behind sits out, until everybody is asked again."""
        settled = best == self._choice and not switch and self._estimates.count >= SETTLED
        self._pause = min(2 * self._pause, MAX_PAUSE) if settled else EVERY
        self._next_at = self._estimates.count + (self._pause if self._estimates.count >= FIRST[-1] else 3)
        lead = known[best].tokens_s
        wasteful = MAX_OVER * self._settings.limits.max_waste
        far = {c for c, answer in known.items() if answer.tokens_s < FAR_BEHIND * lead or answer.waste > wasteful}
        self._out = set() if self._rounds % ASK_ALL == 0 else self._out | far
        self._rounds += 1

    def _expect(self, forecast: Forecast | None) -> None:
        """What the coming steps are held against."""
        self._forecast, self._seen = forecast, []

    def _best(self, usable: Mapping[Choice, Forecast]) -> Choice:
        """The fastest; where forecasts are distrusted the rule's, else the present one: they are no reason to leave."""
        fastest = max(usable, key=lambda choice: usable[choice].tokens_s)
        trusted = (self._ruled, self._choice) if self._distrusted else ()
        return next((choice for choice in trusted if choice in usable), fastest)

    def _convinced(self, best: Choice, gain: float) -> bool:
        """A gain above 3 % and twice its standard error, twice running; or above 3 % three times running. Before that
        many steps are in, at once: what the run began with was not chosen by a forecast."""
        if self._estimates.count <= FIRST[-1]:
            return gain > GAIN
        running = [gain for choice, gain, _ in self._ahead if choice == best and gain > GAIN]
        certain = [gain for choice, gain, error in self._ahead[-2:] if choice == best and gain > max(GAIN, error)]
        return len(running) == 3 or len(certain) == 2

    def _usable(self, choice: Choice, answer: Forecast) -> bool:
        limits = self._settings.limits
        fresh = choice.over_age == "mask" or answer.staleness <= limits.max_staleness
        room = 1.0 if choice == self._choice else MARGIN
        return not answer.failed and fresh and answer.waste <= room * limits.max_waste

    def _go_to(self, choice: Choice) -> None:
        if choice.tail_batch is not None and self._choice.tail_batch is None and self._loop.pool.groups:
            self._next = choice
            draining = self._compose(self._choice)
            self._loop.follow(replace(draining, name="drain", rounds=Continuous(1.0)))
            return
        self._follow(choice)

    def _drained(self) -> None:
        if self._next is not None and not self._loop.pool.groups:
            self._follow(self._next)

    def _follow(self, choice: Choice) -> None:
        self._choice, self._next = choice, None
        self._loop.follow(self._compose(choice))

    def _compose(self, choice: Choice) -> Composed:
        pool = self._loop.pool
        return composed(
            choice, kv_known=any(seat.kv_capacity for seat in pool.engines()), pool=self._settings.limits.pool
        )

    # -- looking back -------------------------------------------------------------------------------------------------

    def _check_forecast(self, metrics: Mapping[str, Any]) -> None:
        """Compares what was forecast with what came, every few steps. Steps alternate between long and short, so that
        only what is beyond twice the standard error counts as wrong."""
        if self._forecast is None or not metrics["time/step_s"]:
            return
        self._seen.append((metrics["tokens/batch_trained"], metrics["time/step_s"]))
        if len(self._seen) < EVERY:
            return
        made = sum(tokens for tokens, _ in self._seen) / sum(seconds for _, seconds in self._seen)
        error = self._forecast.tokens_s / made - 1 if made else float("inf")
        doubt = self._forecast.doubt(EVERY)
        wrong = abs(error) > max(WRONG, doubt)
        self._errors = self._errors + 1 if wrong else 0
        self._tell("forecast_error", error=round(error, 4), doubt=round(doubt, 4), wrong=wrong)
        self._seen = []
        if self._errors == STEPS_WRONG:
            self._tell("notice", reason=f"forecasts were off by more than {WRONG:.0%} three times; the rule decides")

    @property
    def _distrusted(self) -> bool:
        return self._errors >= STEPS_WRONG

    def _note(self, known: Mapping[Choice, Forecast], best: Choice, gain: float, switch: bool) -> None:
        rows = [
            {
                "choice": describe(choice),
                "tokens_s": round(answer.tokens_s, 3),
                "step_s": round(answer.step_s, 3),
                "waste": round(answer.waste, 4),
                **({"failed": answer.failed} if answer.failed else {}),
            }
            for choice, answer in known.items()
        ]
        decision = {
            "after_step": self._estimates.count,
            "present": describe(self._choice),
            "best": describe(best),
            "gain": round(gain, 4) if gain != float("inf") else None,
            "switch": switch,
            "why": list(best.why),
            "steps": self._extent.steps,
            "times_smaller": self._extent.times,
            "forecasts": rows,
        }
        self.decisions.append(decision)
        self._tell("choice", **decision)

    def _tell(self, kind: str, **fields: Any) -> None:
        self._loop.tell(kind, **fields)


def describe(choice: Choice) -> str:
    """A choice in a few words."""
    if choice.tail_batch is not None:
        return f"tail_batch over_prompts={choice.tail_batch:g}"
    parts = [f"depth={choice.depth:g}", f"k={choice.max_staleness}", choice.over_age, choice.order]
    parts += [name for name in ("defer", "stream", "hold", "finish_first") if getattr(choice, name)]
    return " ".join(parts)
