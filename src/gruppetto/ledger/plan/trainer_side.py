"""The trainer's side of a run: a layout that fits, what its stages compute, and what the layout takes beside that.

The assumed MFU of a stage is that of one rank's own work: matrix products, attention, what is computed again, and the
weights it reads. Charged beside it, each by its formula: the pipeline's bubble, what does not hide of the traffic
between ranks, fixed seconds of micro-batches, an optimizer in host memory, models that take turns with the policy. The
published MFU that the shares come from have some traffic of their own layouts in them, so a forecast is rather too long
than too short.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from functools import cached_property
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts import traffic
from gruppetto.ledger.layouts.layout import TrainLayout
from gruppetto.ledger.layouts.memory import Memory, TrainWork, held, train_memory
from gruppetto.ledger.layouts.search import Rejection, Search, train_layout, train_layouts
from gruppetto.ledger.layouts.shares import Shares, shares_of
from gruppetto.ledger.layouts.shares import stages as stages_of
from gruppetto.ledger.machines.training import train_seconds
from gruppetto.ledger.plan import stages
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.plan.seats import STATE_BYTES, Seat, in_turn, seats, turn_s
from gruppetto.ledger.plan.stages import Stage
from gruppetto.ledger.units import show_seconds

PASSES = 3
"""Of an update: forward, and the backward pass that is twice as much. A forward alone is one."""
_TRAFFIC = {
    "tensor": "all-gather and reduce-scatter of tensor parallelism",
    "context": "KV round the ring of context parallelism",
    "expert": "tokens to their experts and back",
    "data": "gradients and weights over data parallelism, beyond what computing hides",
}


class Cost(NamedTuple):
    """Seconds of a batch beside what the stages compute."""

    name: str
    seconds: Figure


class TrainerSide(NamedTuple):
    """A trainer on at most `gpus` GPUs. Seconds of a whole batch."""

    gpus: int
    layout: TrainLayout
    memory: Memory
    stages: tuple[tuple[Stage, float], ...]
    """Stages in their order, with the seconds they compute on this side."""
    costs: tuple[Cost, ...]
    """What the layout takes beside them; none is zero."""
    seats: tuple[Seat, ...]
    search: Search[TrainLayout] | None

    @property
    def used(self) -> int:
        return self.layout.gpus

    @property
    def computing(self) -> float:
        """Seconds of the stages at the assumed share of the peak."""
        return sum(seconds for _, seconds in self.stages)

    @property
    def seconds(self) -> float:
        """Of all stages, and what the layout takes beside them."""
        return self.computing + sum(cost.seconds.value for cost in self.costs)

    @property
    def gpu_s(self) -> float:
        """GPU-seconds that the stages need; what the layout adds is a loss."""
        return self.computing * self.used

    @property
    def total(self) -> Figure:
        """`seconds` with their arithmetic."""
        parts = [f"{stage.name} {show_seconds(seconds)}" for stage, seconds in self.stages]
        parts += [f"{cost.name} {show_seconds(cost.seconds.value)}" for cost in self.costs]
        return Figure(self.seconds, "s", f"{' + '.join(parts)} on {self.used} GPUs")


class Trainers:
    """Makes the trainer's side of one ask."""

    def __init__(self, ask: Ask) -> None:
        self.ask = ask

    @cached_property
    def beside(self) -> tuple[Stage, ...]:
        """What the trainer does with a batch."""
        return tuple(stages.beside_training(self.ask))

    @cached_property
    def work(self) -> TrainWork:
        """A batch as layouts are judged by it."""
        ask = self.ask
        return TrainWork(
            tokens_per_micro_batch=ask.micro_tokens,
            longest=ask.context,
            tokens=ask.rollouts.trained_tokens,
            sequences=ask.rollouts.count,
        )

    def least_s(self, gpus: int) -> float:
        """What `seconds` of a side on `gpus` GPUs are at least, whatever its layout."""
        return sum(stage.gpu_s.value for stage in self.beside) / gpus

    def make(self, gpus: int, reserved: float) -> TrainerSide:
        """On `gpus` GPUs, of each of which `reserved` bytes are taken. Raises `UserError` where none fits."""
        if not seats(self.ask, gpus):
            return self._laid(gpus, reserved, resident=True)
        try:
            return self._laid(gpus, reserved, resident=True)
        except UserError:
            return self._laid(gpus, reserved, resident=False)

    def _laid(self, gpus: int, reserved: float, *, resident: bool) -> TrainerSide:
        search, layout = None, self._chosen(gpus)
        if layout is None:
            search = self._search(gpus, reserved, resident)
            layout = search.best.layout
        else:
            self._check(layout, reserved, resident)
        ask, beside = self.ask, self._seats(layout.gpus, reserved, resident)
        memory = train_memory(ask.model, layout, self.work, ask.gpu.memory)
        parts = memory.parts | {seat.name: seat.held for seat in beside if seat.resident}
        away = sum(seat.host for seat in beside)
        host = memory.host._replace(value=memory.host.value + away) if away else memory.host
        return TrainerSide(
            gpus=gpus,
            layout=layout,
            memory=memory._replace(parts=parts, host=host),
            stages=tuple((stage, stage.gpu_s.value / layout.gpus) for stage in self.beside),
            costs=tuple(cost for cost in self._costs(layout, beside) if cost.seconds.value > 0),
            seats=beside,
            search=search,
        )

    # -- layouts ------------------------------------------------------------------------------------------------------

    def _seats(self, gpus: int, reserved: float, resident: bool) -> tuple[Seat, ...]:
        found = seats(self.ask, gpus)
        return found if resident or not found else in_turn(self.ask, found, gpus, reserved)

    def _taken(self, gpus: int, reserved: float, resident: bool) -> float:
        """Bytes of each GPU that the policy's trainer cannot have."""
        return reserved + sum(seat.reserved for seat in self._seats(gpus, reserved, resident))

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

    def _check(self, layout: TrainLayout, reserved: float, resident: bool) -> None:
        """Refuses a trainer that the user chose and that cannot be."""
        taken = self._taken(layout.gpus, reserved, resident)
        judged = train_layout(self.ask.model, self.ask.gpu, layout, self.work, reserved=taken)
        if isinstance(judged, Rejection):
            best = self._search(layout.gpus, reserved, resident).best.layout
            raise UserError(
                f"--train tp{layout.tp} pp{layout.pp} cp{layout.cp} ep{layout.ep} on {layout.gpus} GPUs: "
                f'{judged.reason}; leave it out or write --train "tp{best.tp} pp{best.pp} cp{best.cp} ep{best.ep}"'
            )

    def _search(self, gpus: int, reserved: float, resident: bool) -> Search[TrainLayout]:
        """Over the GPUs there are, else as many below as a layout has; with the optimizer in host memory at last."""
        ask, first = self.ask, None
        for offload in (False, True):
            for count in usable(gpus):
                taken = self._taken(count, reserved, resident)
                found = train_layouts(ask.model, ask.gpu, count, self.work, offload=offload, reserved=taken)
                if found.candidates:
                    return found
                first = first or found
        assert first is not None
        return first

    # -- seconds ------------------------------------------------------------------------------------------------------

    def _costs(self, layout: TrainLayout, beside: tuple[Seat, ...]) -> Iterator[Cost]:
        ask, work = self.ask, self.work
        micro = work.micro_batches(layout.dp)
        yield from self._between_ranks(layout, micro)
        fixed_s = ask.efficiency.micro_batch_s
        text = f"{micro:,} micro-batches x {show_seconds(fixed_s)}"
        yield Cost("micro-batch overhead", Figure(micro * fixed_s, "s", text, ask.efficiency.source("micro_batch_s")))
        if layout.offload:
            host = train_seconds(
                0.0, ask.gpu, layout.gpus, host_state=STATE_BYTES * ask.model.params, efficiency=ask.efficiency
            )
            yield Cost("optimizer in host memory", host._replace(source=ask.efficiency.source("host_optimizer")))
        for seat in beside:
            if not seat.resident:
                yield Cost(f"turns of the {seat.name}", turn_s(ask, seat, layout.gpus))

    def _between_ranks(self, layout: TrainLayout, micro: int) -> Iterator[Cost]:
        """The bubble over all that is computed in this layout, and traffic by the passes that make it."""
        ask, work = self.ask, self.work
        spent = {stage.name: stage.gpu_s.value / layout.gpus for stage in self.beside if stage.passes}
        updates = sum(stage.passes == PASSES for stage in self.beside)
        forwards = sum(stage.passes == 1 for stage in self.beside)
        computing = sum(spent.values())
        bubble = computing * (layout.pp - 1) / micro
        text = f"({layout.pp} - 1) / {micro:,} micro-batches x {show_seconds(computing)} of {', '.join(spent)}"
        yield Cost("pipeline bubble", Figure(bubble, "s", text, "Narayanan et al. 2021, arXiv:2104.04473"))
        links, shares = traffic.Links.of(ask.gpu), shares_of(ask.model)
        passed = traffic.boundary_s(shares, layout, work, links) * (updates + forwards / 2)
        yield Cost("pipeline traffic", Figure(passed, "s", "activations to the next stage, gradients back"))
        each = self._traffic(shares, layout, links)
        for kind, what in _TRAFFIC.items():
            once = kind == "data" and layout.shard != "full"  # only an update reduces gradients
            times = updates + (0 if once else forwards / PASSES)
            text = f"{what}: {show_seconds(each[kind])} an update x {times:.3g}"
            yield Cost(f"{kind} traffic", Figure(each[kind] * times, "s", text, ask.gpu.source))

    def _traffic(self, shares: Shares, layout: TrainLayout, links: traffic.Links) -> dict[str, float]:
        """Seconds by kind of one update, on the stage that holds most."""
        every = [held(shares, layout, stage) for stage in stages_of(shares.layers, layout.pp)]
        return traffic.seconds(shares, layout, self.work, self.ask.gpu, links, max(every, key=sum))


def usable(gpus: int) -> tuple[int, ...]:
    """Numbers of GPUs to try: all, then as many as whole nodes of 8 or powers of two leave."""
    powers = [1 << power for power in range(gpus.bit_length()) if 1 << power < gpus]
    eights = [gpus // 8 * 8] if gpus > 8 else []
    return tuple(dict.fromkeys([gpus, *eights, *reversed(powers)]))[:3]
