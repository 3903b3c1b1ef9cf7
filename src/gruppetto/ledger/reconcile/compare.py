"""Forecast and measured side by side, and in words which assumption was off.

Decoding is taken apart exactly: measured = forecast x (steps with other rows than forecast) x (a step's price). The
first factor is what the decode steps that were measured cost at the forecast's prices, over the forecast; the second
what they did take, over that.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from gruppetto.ledger.reconcile.forecast import Assumed, Phase, StepForecast, forecast
from gruppetto.ledger.reconcile.losses import IDLE, RunLoss, losses
from gruppetto.ledger.reconcile.measured import STAGES, MeasuredRun
from gruppetto.ledger.units import show_seconds, show_share

WORTH = 0.02
"""Stages that differ by less than this share of the run are not spoken of."""
NOTHING = 1e-3
"""Of a forecast, what counts as none of it."""
ALIKE = 0.10
"""Ratios that are nearer to 1 than this say nothing."""


def ratio(measured_s: float, forecast_s: float) -> float | None:
    """Measured over forecast; None where nothing was forecast."""
    return measured_s / forecast_s if forecast_s > 1e-12 else None


@dataclass(frozen=True, slots=True)
class Pair:
    """One stage over the whole run, seconds. `ratio` measured over forecast; None where nothing was forecast."""

    forecast_s: float
    measured_s: float

    @property
    def ratio(self) -> float | None:
        return ratio(self.measured_s, self.forecast_s)


@dataclass(frozen=True, slots=True, kw_only=True)
class Reconciled:
    """The whole comparison. `mfu` of the whole step, None where the model is not known."""

    run: MeasuredRun
    assumed: Assumed
    phase: Phase
    steps: tuple[StepForecast, ...]
    losses: tuple[RunLoss, ...]
    mfu: float | None
    train_mfu: float | None
    """FLOP of training over its own seconds at the peak."""
    assumed_train_mfu: float | None

    @property
    def stages(self) -> dict[str, Pair]:
        """Over the whole run, by `STAGES`."""
        return {name: Pair(sum(s.seconds[name] for s in self.steps), self.run.total(name)) for name in STAGES}

    @property
    def off(self) -> tuple[str, ...]:
        """What was off, the largest difference first."""
        said = [(abs(pair.measured_s - pair.forecast_s), name) for name, pair in self._spoken().items()]
        return tuple(_SAY[name](self, self.stages[name]) for _, name in sorted(said, reverse=True))

    def _spoken(self) -> dict[str, Pair]:
        """Stages that say something; `generate` and `step` are sums of others."""
        stages = self.stages
        whole = max(stages["step"].measured_s, stages["step"].forecast_s)
        return {
            name: pair
            for name, pair in stages.items()
            if name in _SAY
            and abs(pair.measured_s - pair.forecast_s) > WORTH * whole
            and (pair.ratio is None or abs(pair.ratio - 1) > ALIKE)
        }

    def decode_factors(self) -> tuple[float, float] | None:
        """(more or fewer, emptier or fuller steps; price of a step), whose product is the decode ratio."""
        at_prices, pair = self._decode_at_prices(), self.stages["decode"]
        if not at_prices or not pair.forecast_s:
            return None
        return at_prices / pair.forecast_s, pair.measured_s / at_prices

    def _decode_at_prices(self) -> float:
        """Seconds of the measured decode steps at the forecast's prices, by the mean engine."""
        rollouts, model = self.assumed.rollouts, self.assumed.engines.model
        context = rollouts.kv_steps / rollouts.tokens
        spent = 0.0
        for step in self.run.steps:
            spent += sum(count * model.step_s(rows, round(rows * context)) for rows, count in step.work.batch_steps)
        return spent / self.run.engines

    @property
    def forecast_rows(self) -> float:
        """Live rows of a decode step as forecast, over all steps: tokens over decode steps."""
        steps = sum(real.work.tokens / step.rows for step, real in zip(self.steps, self.run.steps, strict=True))
        return self.run.work("tokens") / steps if steps else 0.0

    @property
    def rows(self) -> float | None:
        """Live rows of a decode step as measured; None where the record does not say."""
        steps = self.run.work("decode_steps")
        made = sum(rows * count for step in self.run.steps for rows, count in step.work.batch_steps)
        return made / steps if steps else None


def reconcile(
    run: MeasuredRun, assumed: Assumed, *, peak: float | None = None, train_mfu: float | None = None
) -> Reconciled:
    """Compares. `peak`: FLOP/s of one machine where the model is known; `train_mfu`: what was assumed of it."""
    steps, phase = forecast(run, assumed)
    found = losses(run, peak)
    known = peak is not None and run.work("train_flops") > 0
    seconds = run.total("train") * (1 if run.apart else run.engines)
    return Reconciled(
        run=run,
        assumed=assumed,
        phase=phase,
        steps=steps,
        losses=found,
        mfu=found[0].share if found and peak else None,
        train_mfu=run.work("train_flops") / seconds / peak if known and peak and seconds else None,
        assumed_train_mfu=train_mfu,
    )


# -- in words ---------------------------------------------------------------------------------------------------------


def _none(pair: Pair) -> bool:
    """Whether what was forecast did not happen at all."""
    return pair.ratio is not None and pair.ratio < NOTHING


def _times(pair: Pair) -> str:
    if pair.ratio is None or pair.ratio > 1 / NOTHING:
        return f"measured {show_seconds(pair.measured_s)}, forecast none"
    if _none(pair):
        return f"measured none, forecast {show_seconds(pair.forecast_s)}"
    return f"measured {pair.ratio:.2g} x the forecast"


def _decode(found: Reconciled, pair: Pair) -> str:
    factors, rows = found.decode_factors(), found.rows
    if factors is None or rows is None or _none(pair):
        return f"decode: {_times(pair)}"
    steps, price = factors
    each = pair.measured_s * found.run.engines / found.run.work("decode_steps")
    why = f"rows were {rows:.3g}, forecast {found.forecast_rows:.3g}"
    if steps > 1 + ALIKE and rows < found.forecast_rows:
        why += ": engines idle behind the tail or admission"
    return (
        f"decode: {_times(pair)}: {steps:.2g} x by its steps ({why}), {price:.2g} x by the price of one "
        f"({show_seconds(each)} measured, {show_seconds(each / price)} assumed at these rows)"
    )


def _prefill(found: Reconciled, pair: Pair) -> str:
    tokens = found.run.work("prefill_tokens")
    each = show_seconds(pair.measured_s * found.run.engines / tokens) if tokens else "-"
    price = show_seconds(found.assumed.engines.model.prefill_token_s)
    return f"prefill: {_times(pair)}: {each} a token, {price} assumed"


def _train(found: Reconciled, pair: Pair) -> str:
    if found.train_mfu is None or found.assumed_train_mfu is None:
        return f"train: {_times(pair)}"
    return f"train: {_times(pair)}: MFU {found.train_mfu:.2g} measured, {found.assumed_train_mfu:.2g} assumed"


def _publish(found: Reconciled, pair: Pair) -> str:
    each = show_seconds(pair.measured_s / len(found.run.steps))
    return f"publish: {_times(pair)}: {each} each, {show_seconds(found.assumed.publish_s)} assumed"


def _switch(found: Reconciled, pair: Pair) -> str:
    each = show_seconds(pair.measured_s / len(found.run.steps))
    return f"switch: {_times(pair)}: {each} a step, {show_seconds(found.assumed.switch_s)} assumed"


def _score(found: Reconciled, pair: Pair) -> str:
    return f"score: {_times(pair)}: engines waited for rewards with nothing else to run"


def _waiting(found: Reconciled, pair: Pair) -> str:
    if _none(pair):
        return f"waiting: {_times(pair)}"
    run = found.run
    causes: Mapping[str, float] = {name: run.cause(name) for name in ("tail", "queue", "kv_full", "tool")}
    if run.apart:
        causes = {**causes, "trainer": run.cause("trainer")}
    most = max(causes, key=lambda name: causes[name])
    share = causes[most] / max(run.cause("total"), 1e-12)
    why = IDLE.get(most, "all that may be launched is finished")
    return f"waiting: {_times(pair)}: {show_share(share)} of the engines' seconds went to {most} ({why})"


_SAY = {
    "decode": _decode,
    "prefill": _prefill,
    "score": _score,
    "waiting": _waiting,
    "train": _train,
    "publish": _publish,
    "switch": _switch,
}


def rows_of(found: Reconciled) -> Iterator[tuple[str, float, float, float | None, float]]:
    """(stage, forecast, measured, ratio, share of the measured step), in the order of `STAGES`."""
    whole = found.stages["step"].measured_s
    for name, pair in found.stages.items():
        yield name, pair.forecast_s, pair.measured_s, pair.ratio, pair.measured_s / whole if whole else 0.0
