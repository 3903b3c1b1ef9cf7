"""The two sides of a run on so many GPUs: engines that generate, and a trainer, each in a layout that fits.

Owns the choice of layouts and the prices that follow. Promises: a side is made once for a number of GPUs; where no
layout has exactly that many, the most below it that one has are used, and the rest stand idle and are counted.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import cached_property

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.generation import LAYERED, Engines, Forecast, Schedule, Trainer, expected
from gruppetto.ledger.layouts.engines import EQUAL
from gruppetto.ledger.layouts.engines import Engine as EngineLayouts
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.layouts.search import (
    Rejection,
    Search,
    ServeWork,
    serve_layout,
)
from gruppetto.ledger.layouts.serving import ServeMemory, ServeOverheads, serve_memory
from gruppetto.ledger.layouts.throughput import Batch
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.storage import kv_element_bytes
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.trainer_side import Trainers, TrainerSide, usable
from gruppetto.ledger.units import show_size

MOST_EVENTS = 20_000
"""Rollouts, or turns of them, of one engine that a plan follows: some ten seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RolloutSide:
    """Engines on `gpus` GPUs, all alike."""

    gpus: int
    layout: ServeLayout
    count: int
    prices: EngineModel
    memory: ServeMemory
    search: Search[ServeLayout] | None
    """None where the user chose the layout."""

    @property
    def used(self) -> int:
        return self.count * self.layout.gpus

    @property
    def kv_tokens(self) -> int | None:
        """Tokens of context that the KV of one engine takes; None where KV ends at a window or is a state, so that how
        many there are depends on how they are cut into rollouts."""
        return self.prices.kv_capacity or None

    def kv_rollouts(self, length: float) -> float | None:
        """Rollouts of `length` tokens that the KV of one engine takes; None where a rollout keeps none."""
        found = self.memory.sequences(length)
        return found if math.isfinite(found) else None


class Sides:
    """Both sides of one ask, made once for each number of GPUs."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self.trainers = Trainers(ask)
        self._rollout: dict[tuple[int, bool, ServeWork], RolloutSide] = {}
        self._trainer: dict[tuple[int, float], TrainerSide] = {}
        self._searches: dict[tuple[int, ServeWork, ServeOverheads], Search[ServeLayout]] = {}
        self._laid: dict[ServeOverheads, EngineLayouts] = {}
        self._priced: dict[tuple[ServeLayout, bool], tuple[ServeMemory, EngineModel]] = {}

    @cached_property
    def mean_context(self) -> float:
        """Tokens that a live rollout holds on average, over its own steps."""
        rollouts = self.ask.rollouts
        return rollouts.kv_steps / rollouts.tokens

    def rollout(self, gpus: int, colocated: bool = False, schedule: Schedule = LAYERED) -> RolloutSide:
        """Engines on `gpus` GPUs, which they share with a trainer where `colocated`, for batches that follow each other
        as `schedule` says. Raises `UserError` where none fits."""
        work = self._serve_work(gpus, schedule)
        key = gpus, colocated, work
        if key not in self._rollout:
            self._rollout[key] = self._engines(gpus, colocated, work)
        return self._rollout[key]

    def trainer(self, gpus: int, reserved: float = 0.0) -> TrainerSide:
        """A trainer on `gpus` GPUs, of each of which `reserved` bytes are taken. Raises `UserError` where none fits."""
        if (gpus, reserved) not in self._trainer:
            self._trainer[gpus, reserved] = self.trainers.make(gpus, reserved)
        return self._trainer[gpus, reserved]

    # -- engines ------------------------------------------------------------------------------------------------------

    def _engines(self, gpus: int, colocated: bool, work: ServeWork) -> RolloutSide:
        ask, search = self.ask, None
        kv_bytes = kv_element_bytes(ask.kv_dtype)
        over = ServeOverheads.of(ask.efficiency, ask.gpu.memory if colocated else None)
        layout = ask.serve
        if layout is None:
            search = self._serve_search(gpus, work, kv_bytes, over)
            layout = search.best.layout
        else:
            self._check_engine(layout, gpus, work, kv_bytes, over)
        memory, prices = self._prices(layout, colocated, kv_bytes, over)
        self._check_batch(gpus // layout.gpus)
        return RolloutSide(
            gpus=gpus, layout=layout, count=gpus // layout.gpus, prices=prices, memory=memory, search=search
        )

    def _prices(
        self, layout: ServeLayout, colocated: bool, kv_bytes: float, over: ServeOverheads
    ) -> tuple[ServeMemory, EngineModel]:
        """What an engine keeps and takes, however many of it there are."""
        ask, key = self.ask, (layout, colocated)
        if key in self._priced:
            return self._priced[key]
        memory = serve_memory(ask.model, layout, ask.gpu.memory, dtype=ask.serve_dtype, kv_bytes=kv_bytes, over=over)
        prices = engine_model(
            ask.model,
            ask.gpu,
            layout,
            slots=ask.slots,
            dtype=ask.serve_dtype,
            kv_dtype=ask.kv_dtype,
            efficiency=ask.efficiency,
            over=over,
            prompt_tokens=ask.prompt_tokens,
        )
        if prices.kv_capacity:  # in sequences of the mean length: windows and states of each are taken off
            prices = replace(prices, kv_capacity=max(1, int(memory.kv_tokens(self.mean_context))))
            self._check_kv(layout, prices)
        self._priced[key] = memory, prices
        return memory, prices

    def _serve_work(self, gpus: int, schedule: Schedule) -> ServeWork:
        ask = self.ask
        return ServeWork(
            sequences=min(schedule.depth * ask.rollouts.count, ask.slots * gpus),
            context=self.mean_context,
            longest=ask.context,
            slots=ask.slots,
            batch=self.batch._replace(steps=schedule.max_staleness + 1),
        )

    @cached_property
    def batch(self) -> Batch:
        """The rollouts of a step, as an engine is chosen for them."""
        ask = self.ask
        longest = ask.lengths.longest(ask.groups, ask.group_size)
        return Batch(
            rollouts=ask.rollouts.count,
            mean=ask.lengths.mean,
            longest=longest,
            prompt=ask.prompt_tokens,
            away_s=ask.tools.expected_calls(longest) * ask.tools.mean_s if ask.tools else 0.0,
        )

    def _check_engine(
        self, layout: ServeLayout, gpus: int, work: ServeWork, kv_bytes: float, over: ServeOverheads
    ) -> None:
        """Refuses an engine that the user chose and that cannot be."""
        ask = self.ask
        if layout.gpus > gpus:
            raise UserError(
                f"one engine of tp = {layout.tp} and dp = {layout.dp} takes {layout.gpus} GPUs, and there are {gpus} "
                f"for generation; write --serve tp{gpus} or more GPUs"
            )
        whole = gpus // layout.gpus * layout.gpus
        judged = serve_layout(
            ask.model,
            ask.gpu,
            layout,
            whole,
            work,
            dtype=ask.serve_dtype,
            kv_bytes=kv_bytes,
            over=over,
            efficiency=ask.efficiency,
        )
        if isinstance(judged, Rejection):
            best = self._serve_search(gpus, work, kv_bytes, over).best.layout
            raise UserError(
                f"--serve tp{layout.tp} ep{layout.ep} dp{layout.dp}: {judged.reason}; leave it out or write "
                f'--serve "tp{best.tp} ep{best.ep} dp{best.dp}"'
            )

    def _serve_search(self, gpus: int, work: ServeWork, kv_bytes: float, over: ServeOverheads) -> Search[ServeLayout]:
        """Over the GPUs there are, or fewer where engines of a size that does not divide them make the batch clearly
        sooner, though some stand idle; where none fits over as many below as divide evenly."""
        best, best_s = None, math.inf
        for count in _divisible(gpus, self.ask.gpu.gpus_per_node):
            search = self._searched(count, work, kv_bytes, over)
            if search.candidates and (token_s := search.best.score / count) * (1 + EQUAL) < best_s:
                best, best_s = search, token_s
        if best is not None:
            return best
        found = [self._searched(count, work, kv_bytes, over) for count in usable(gpus)]
        return next((search for search in found if search.candidates), found[0])

    def _searched(self, gpus: int, work: ServeWork, kv_bytes: float, over: ServeOverheads) -> Search[ServeLayout]:
        """Made once: numbers of GPUs that do not divide fall back to the same ones below."""
        ask, key = self.ask, (gpus, work, over)
        if key not in self._searches:
            if over not in self._laid:
                self._laid[over] = EngineLayouts.of(
                    ask.model, ask.gpu, work, ask.serve_dtype, kv_bytes, None, over, False, ask.efficiency
                )
            self._searches[key] = self._laid[over]._replace(work=work).layouts(gpus)
        return self._searches[key]

    def _check_kv(self, layout: ServeLayout, prices: EngineModel) -> None:
        if prices.kv_capacity < self.ask.context:
            raise UserError(
                f"the KV of an engine (tp = {layout.tp}) takes {prices.kv_capacity:,} tokens, fewer than one rollout "
                f"of {self.ask.context:,}; write --serve tp{2 * layout.tp}, --kv-dtype fp8 or a smaller --max-tokens"
            )

    def _check_batch(self, engines: int) -> None:
        """Refuses a batch that would take minutes: each rollout, and each of its turns, is an event of a timeline."""
        ask = self.ask
        turns = ask.tools.expected_calls(ask.lengths.mean) + 1 if ask.tools else 1.0
        each = ask.rollouts.count * turns / engines
        if each > MOST_EVENTS:
            raise UserError(
                f"{ask.groups:,} prompts x {ask.group_size:,} x {turns:,.3g} turns on {engines} engines are "
                f"{each:,.0f} for each, more than the {MOST_EVENTS:,} that are followed one by one; write --prompts "
                f"{max(1, int(ask.groups * MOST_EVENTS / each))} (a batch n times as large takes about n times as "
                "long), or more --gpus"
            )

    # -- prices -------------------------------------------------------------------------------------------------------

    def engines(self, side: RolloutSide) -> Engines:
        """As the forecast of generation takes them."""
        return Engines(model=side.prices, count=side.count)

    def expected(self, side: RolloutSide, timing: Trainer, schedule: Schedule) -> Forecast:
        """The forecast of generation; where KV ends at a window or is a state, so that a short rollout has more of it a
        token than a long one, its waves are counted in rollouts."""
        found = expected(self.ask.rollouts, self.engines(side), timing, schedule)
        rollouts, memory = self.ask.rollouts, side.memory
        if side.prices.kv_capacity and not memory.share.windows and not memory.share.state:
            return found
        each = memory.share.sequence(self.ask.sequence(self.ask.lengths.mean))
        room = side.count * side.layout.dp * memory.pool
        text = (
            f"{rollouts.count:,} rollouts x {show_size(each)} of a GPU / ({side.count} engines x {side.layout.dp} x "
            f"{show_size(memory.pool)})"
        )
        return found._replace(kv_waves=Figure(rollouts.count * each / room if room else 0.0, "", text))

    def timing(self, side: TrainerSide, publish_s: float, switch_s: float) -> Trainer:
        """As the forecast of generation takes it."""
        tokens = self.ask.rollouts.trained_tokens
        return Trainer(token_s=side.seconds / tokens, publish_s=publish_s, switch_s=switch_s)


def _divisible(gpus: int, node: int) -> tuple[int, ...]:
    """All GPUs, and the most of them that engines of 2, 4, … up to a node's divide."""
    sizes = (1 << power for power in range(node.bit_length()))
    return tuple(dict.fromkeys([gpus, *(gpus - gpus % size for size in sizes if size <= min(node, gpus))]))
