"""The two sides of a run on so many GPUs: engines that generate, and a trainer, each in a layout that fits.

Owns the choice of layouts and the prices that follow. Promises: a side is made once for a number of GPUs; where no
layout has exactly that many, the most below it that one has are used, and the rest stand idle and are counted.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.generation import Engines, Trainer
from gruppetto.ledger.layouts.layout import ServeLayout, TrainLayout
from gruppetto.ledger.layouts.memory import Memory, TrainWork, train_memory
from gruppetto.ledger.layouts.search import (
    Rejection,
    Search,
    ServeWork,
    serve_layout,
    serve_layouts,
    train_layout,
    train_layouts,
)
from gruppetto.ledger.layouts.serving import ServeMemory, serve_memory
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.storage import kv_element_bytes
from gruppetto.ledger.plan import stages
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.stages import Stage

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


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainerSide:
    """A trainer on at most `gpus` GPUs. Seconds of a whole batch."""

    gpus: int
    layout: TrainLayout
    memory: Memory
    stages: tuple[tuple[Stage, float], ...]
    """Stages in their order, with the seconds they take on this side."""
    micro_s: float
    search: Search[TrainLayout] | None

    @property
    def used(self) -> int:
        return self.layout.gpus

    @property
    def seconds(self) -> float:
        """Of all its stages."""
        return sum(seconds for _, seconds in self.stages) + self.micro_s

    @property
    def gpu_s(self) -> float:
        return self.seconds * self.used


class Sides:
    """Both sides of one ask, made once for each number of GPUs."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask
        self._rollout: dict[int, RolloutSide] = {}
        self._trainer: dict[tuple[int, float], TrainerSide] = {}

    @cached_property
    def beside(self) -> tuple[Stage, ...]:
        """What the trainer does with a batch."""
        return tuple(stages.beside_training(self.ask))

    @cached_property
    def mean_context(self) -> float:
        """Tokens that a live rollout holds on average, over its own steps."""
        rollouts = self.ask.rollouts
        return rollouts.kv_steps / rollouts.tokens

    def rollout(self, gpus: int) -> RolloutSide:
        """Engines on `gpus` GPUs. Raises `UserError` where none fits."""
        if gpus not in self._rollout:
            self._rollout[gpus] = self._engines(gpus)
        return self._rollout[gpus]

    def trainer(self, gpus: int, reserved: float = 0.0) -> TrainerSide:
        """A trainer on `gpus` GPUs, of each of which `reserved` bytes are taken. Raises `UserError` where none fits."""
        if (gpus, reserved) not in self._trainer:
            self._trainer[gpus, reserved] = self._train(gpus, reserved)
        return self._trainer[gpus, reserved]

    # -- engines ------------------------------------------------------------------------------------------------------

    def _engines(self, gpus: int) -> RolloutSide:
        ask, search = self.ask, None
        kv_bytes = kv_element_bytes(ask.kv_dtype)
        layout = ask.serve
        if layout is None:
            search = self._serve_search(gpus, kv_bytes)
            layout = search.best.layout
        else:
            self._check_engine(layout, gpus, kv_bytes)
        memory = serve_memory(ask.model, layout, ask.gpu.memory, dtype=ask.serve_dtype, kv_bytes=kv_bytes)
        prices = engine_model(
            ask.model,
            ask.gpu,
            layout,
            slots=ask.slots,
            dtype=ask.serve_dtype,
            kv_dtype=ask.kv_dtype,
            efficiency=ask.efficiency,
            prompt_tokens=ask.prompt_tokens,
        )
        if prices.kv_capacity:  # in sequences of the mean length: windows and states of each are taken off
            prices = replace(prices, kv_capacity=max(1, int(memory.kv_tokens(self.mean_context))))
            self._check_kv(layout, prices)
        self._check_batch(gpus // layout.gpus)
        return RolloutSide(
            gpus=gpus, layout=layout, count=gpus // layout.gpus, prices=prices, memory=memory, search=search
        )

    def _serve_work(self, gpus: int) -> ServeWork:
        ask = self.ask
        return ServeWork(
            sequences=min(ask.rollouts.count, ask.slots * gpus),
            context=self.mean_context,
            longest=ask.context,
            slots=ask.slots,
        )

    def _check_engine(self, layout: ServeLayout, gpus: int, kv_bytes: float) -> None:
        """Refuses an engine that the user chose and that cannot be."""
        ask = self.ask
        if layout.gpus > gpus:
            raise UserError(
                f"one engine of tp = {layout.tp} and dp = {layout.dp} takes {layout.gpus} GPUs, and there are {gpus} "
                f"for generation; write --serve tp{gpus} or more GPUs"
            )
        work, whole = self._serve_work(gpus), gpus // layout.gpus * layout.gpus
        judged = serve_layout(ask.model, ask.gpu, layout, whole, work, dtype=ask.serve_dtype, kv_bytes=kv_bytes)
        if isinstance(judged, Rejection):
            best = self._serve_search(gpus, kv_bytes).best.layout
            raise UserError(
                f"--serve tp{layout.tp} ep{layout.ep} dp{layout.dp}: {judged.reason}; leave it out or write "
                f'--serve "tp{best.tp} ep{best.ep} dp{best.dp}"'
            )

    def _serve_search(self, gpus: int, kv_bytes: float) -> Search[ServeLayout]:
        """Over the GPUs there are, or as many below as divide evenly."""
        ask, work, first = self.ask, self._serve_work(gpus), None
        for count in _usable(gpus):
            search = serve_layouts(ask.model, ask.gpu, count, work, dtype=ask.serve_dtype, kv_bytes=kv_bytes)
            if search.candidates:
                return search
            first = first or search
        assert first is not None
        return first

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

    # -- trainer ------------------------------------------------------------------------------------------------------

    def _train(self, gpus: int, reserved: float) -> TrainerSide:
        ask = self.ask
        work = TrainWork(
            tokens_per_micro_batch=ask.micro_tokens,
            longest=ask.context,
            tokens=ask.rollouts.trained_tokens,
            sequences=ask.rollouts.count,
        )
        search, layout = None, self._chosen(gpus)
        if layout is None:
            search = self._train_search(gpus, work, reserved)
            layout = search.best.layout
        else:
            self._check_trainer(layout, work, reserved)
        memory = train_memory(ask.model, layout, work, ask.gpu.memory)
        spent = tuple((stage, stage.gpu_s.value / layout.gpus) for stage in self.beside)
        micro_s = work.micro_batches(layout.dp) * ask.efficiency.micro_batch_s
        return TrainerSide(gpus=gpus, layout=layout, memory=memory, stages=spent, micro_s=micro_s, search=search)

    def _chosen(self, gpus: int) -> TrainLayout | None:
        """The user's layout with data parallelism over the GPUs there are."""
        layout = self.ask.train
        if layout is None:
            return None
        cut = layout.tp * layout.pp * layout.cp
        if cut > gpus:
            raise UserError(
                f"tp {layout.tp} x pp {layout.pp} x cp {layout.cp} = {cut} GPUs for one copy of the model, and there "
                f"are {gpus} for training; write a smaller --train layout or more GPUs"
            )
        return replace(layout, dp=gpus // cut)

    def _check_trainer(self, layout: TrainLayout, work: TrainWork, reserved: float) -> None:
        """Refuses a trainer that the user chose and that cannot be."""
        judged = train_layout(self.ask.model, self.ask.gpu, layout, work, reserved=reserved)
        if isinstance(judged, Rejection):
            best = self._train_search(layout.gpus, work, reserved).best.layout
            raise UserError(
                f"--train tp{layout.tp} pp{layout.pp} cp{layout.cp} ep{layout.ep} on {layout.gpus} GPUs: "
                f'{judged.reason}; leave it out or write --train "tp{best.tp} pp{best.pp} cp{best.cp} ep{best.ep}"'
            )

    def _train_search(self, gpus: int, work: TrainWork, reserved: float) -> Search[TrainLayout]:
        """Over the GPUs there are, else as many below as a layout has; with the optimizer in host memory at last."""
        ask, first = self.ask, None
        for offload in (False, True):
            for count in _usable(gpus):
                search = train_layouts(ask.model, ask.gpu, count, work, offload=offload, reserved=reserved)
                if search.candidates:
                    return search
                first = first or search
        assert first is not None
        return first

    # -- prices -------------------------------------------------------------------------------------------------------

    def engines(self, side: RolloutSide) -> Engines:
        """As the forecast of generation takes them."""
        return Engines(model=side.prices, count=side.count)

    def timing(self, side: TrainerSide, publish_s: float, switch_s: float) -> Trainer:
        """As the forecast of generation takes it."""
        tokens = self.ask.rollouts.trained_tokens
        return Trainer(token_s=side.seconds / tokens, publish_s=publish_s, switch_s=switch_s)


def _usable(gpus: int) -> tuple[int, ...]:
    """Numbers of GPUs to try: all, then as many as whole nodes of 8 or powers of two leave."""
    powers = [1 << power for power in range(gpus.bit_length()) if 1 << power < gpus]
    eights = [gpus // 8 * 8] if gpus > 8 else []
    return tuple(dict.fromkeys([gpus, *eights, *reversed(powers)]))[:3]


def total_seconds(side: TrainerSide) -> Figure:
    """Seconds of the trainer's stages on its GPUs, with their arithmetic."""
    text = " + ".join(f"{stage.name} {seconds:,.1f}" for stage, seconds in side.stages)
    if side.micro_s:
        text += f" + {side.micro_s:,.1f} for micro-batches"
    return Figure(side.seconds, "s", f"{text} s on {side.used} GPUs")
