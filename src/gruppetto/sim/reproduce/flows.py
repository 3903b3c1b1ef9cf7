"""Training that does not wait: Magistral's in-flight swaps, StreamRL's three increments, Laminar's repacking.

Owns the inputs and rows of three records. Predicted: all rows but StreamRL's, whose slots were moved once.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache

from gruppetto.ledger.reproduce.study import Input, Study, fit, points, relative
from gruppetto.scheduler.actions import Action, Update
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous
from gruppetto.scheduler.policies.static import Static
from gruppetto.scheduler.views import PoolView
from gruppetto.sim.engine import GPUS, EngineModel
from gruppetto.sim.reproduce.bench import Bench, PolicyMaker, Run, play
from gruppetto.sim.reproduce.oracle import TrueOrder, lengths_of
from gruppetto.sim.workload import Workload
from gruppetto.sim.world import Spec

# -- Magistral --------------------------------------------------------------------------------------------------------

MAGISTRAL_MEAN, MAGISTRAL_CV, MAGISTRAL_CAP, MAGISTRAL_BATCH = 4_000, 0.7, 16_384, 256

MAGISTRAL_INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {MAGISTRAL_MEAN}, CV {MAGISTRAL_CV}, ICC 0.5, cap {MAGISTRAL_CAP}",
        "cap: the first of its schedule; CV: longest about five times the shortest; mean: chosen",
    ),
    Input(
        "sequences", f"{MAGISTRAL_BATCH} a batch; as many, or twice as many, generated at once", "versions kept <= 2"
    ),
    Input("engines", "16 of one H100, 24B dense model in FP8", "chosen: the ratio does not depend on them"),
    Input("swap", "in flight, KV kept, 5 s", "the record"),
)


@cache
def _magistral(ratio: int) -> Run:
    slots = MAGISTRAL_BATCH * ratio // 16
    engine = EngineModel.of_hardware(
        params=24e9, kv_bytes_per_token=2 * 40 * 8 * 128 * 2, gpu=GPUS["H100"], slots=slots, weight_bytes_per_param=1
    )
    engine = replace(engine, kv_capacity=0)
    demand = Workload.from_mean_cv(MAGISTRAL_MEAN, MAGISTRAL_CV, 0.5, MAGISTRAL_CAP, prompt_tokens=256)
    bench = Bench(
        engine=engine,
        engines=16,
        demand=demand,
        prompts=MAGISTRAL_BATCH // 8,
        group=8,
        cap=MAGISTRAL_CAP,
        placement="disaggregated",
        train_step_s=5.0,
        publish_s=5.0,
        kv_on_swap="keep",
        keep_segments=True,
    )
    return play(bench, {"type": "async_bounded", "depth": ratio + 3.0}, steps=30)


def _predict_magistral() -> Mapping[str, float]:
    values = {}
    for ratio in (1, 2):
        segments = _magistral(ratio).segments[MAGISTRAL_BATCH * 8 :]
        values[f"updates a sequence lives through, n_async/n_batch = {ratio}"] = sum(segments) / len(segments) - 1
    return values


MAGISTRAL = Study(
    id="magistral-async",
    source="arXiv:2506.10910 sections 3, 5.2, 6.3",
    setting="generators that never stop",
    inputs=MAGISTRAL_INPUTS,
    predict=_predict_magistral,
    tolerance="+-15 %",
    rows=(
        relative("updates a sequence lives through, n_async/n_batch = 1", 1, 0.15),
        relative("updates a sequence lives through, n_async/n_batch = 2", 2, 0.15),
    ),
    says="Predicted: all rows. That lengths are not biased, which the record says too, is none: it has no figure, and "
    "where nothing is dropped nothing else can come out. Versions are counted as updates during a sequence's life.",
)

# -- StreamRL ---------------------------------------------------------------------------------------------------------

STREAM_MEAN, STREAM_CV, STREAM_ICC, STREAM_CAP = 5_000, 1.0, 0.5, 20_480
STREAM_MFU = 0.4

STREAM_INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {STREAM_MEAN}, CV {STREAM_CV:g}, ICC {STREAM_ICC}, cap {STREAM_CAP}",
        "cap: the record; rest chosen as for Seer",
    ),
    Input("batch", "64 x 16", "chosen: none is given"),
    Input("machines", "8 engines of 8 H800 and 64 H800 that train, 72B", "128 H800: the record; half and half: chosen"),
    Input(
        "trainer",
        f"8 FLOPs a parameter and token, MFU {STREAM_MFU}",
        "our survey of published figures: dense up to 0.37",
    ),
    Input("dispatch", "longest first by true lengths, least loaded, against groups in turn", "its ranker finds 87 %"),
    Input("slots", "256", "verl's default", "64 first, so that requests queue: 3 of 3 rows (.21, .24, .58 then)"),
)


@cache
def _stream(how: str) -> float:
    engine = EngineModel.of_hardware(
        params=72e9, kv_bytes_per_token=2 * 80 * 8 * 128 * 2, gpu=GPUS["H800"], slots=256, tp=8
    )
    demand = Workload.from_mean_cv(STREAM_MEAN, STREAM_CV, STREAM_ICC, STREAM_CAP, prompt_tokens=512)
    bench = Bench(
        engine=engine,
        engines=8,
        demand=demand,
        prompts=64,
        group=16,
        cap=STREAM_CAP,
        placement="disaggregated",
        train_token_s=8 * 72e9 / (64 * GPUS["H800"].bf16_flops * STREAM_MFU),
        publish_s=5.0,
    )
    steps, warm_up = (10, 3) if how == "async" else (6, 0)
    return play(bench, {"type": "sync"}, steps=steps, policy=_STREAM_POLICIES[how]).mean("time/step_s", warm_up)


def _longest(spec: Spec, *, stream: bool, depth: float) -> Composed:
    freshness = Freshness(0, "wait") if depth == 1 else Freshness(1, "wait")
    order = TrueOrder(lengths_of(spec))
    return Composed("stream", rounds=Continuous(depth), order=order, stream=stream, freshness=freshness)


_STREAM_POLICIES: Mapping[str, PolicyMaker] = {
    "static": lambda spec: Composed("sync", placing=Static()),
    "dispatch": lambda spec: _longest(spec, stream=False, depth=1.0),
    "stream": lambda spec: _longest(spec, stream=True, depth=1.0),
    "async": lambda spec: _longest(spec, stream=True, depth=2.0),
}


def _predict_stream() -> Mapping[str, float]:
    return {
        "dispatch": _stream("static") / _stream("dispatch") - 1,
        "streaming": _stream("dispatch") / _stream("stream") - 1,
        "one step of asynchrony": _stream("stream") / _stream("async") - 1,
    }


STREAMRL = Study(
    id="streamrl",
    source="survey of arXiv:2504.15930",
    setting="72B, 20k, 128 H800: three increments",
    inputs=STREAM_INPUTS,
    predict=_predict_stream,
    tolerance="+-6 points on +8, +15, +25 %",
    rows=(
        fit(points("dispatch", 0.08, 0.06, "true lengths order better than a ranker")),
        fit(
            points(
                "streaming", 0.15, 0.06, "batch and machine split are not published; they decide how much can overlap"
            )
        ),
        fit(points("one step of asynchrony", 0.25, 0.06, "batch and machine split are not published")),
    ),
    says="Fitted: slots (queueing or none), seen with all rows; nothing else was moved.",
)

# -- Laminar ----------------------------------------------------------------------------------------------------------

LAMINAR_MEAN, LAMINAR_CV, LAMINAR_ICC, LAMINAR_CAP = 4_000, 1.0, 0.5, 16_384

LAMINAR_INPUTS = (
    Input(
        "lengths",
        f"lognormal, mean {LAMINAR_MEAN}, CV {LAMINAR_CV:g}, ICC {LAMINAR_ICC}, cap {LAMINAR_CAP}",
        "cap: the record; rest chosen",
    ),
    Input("batch, engines", "64 x 16 on 8 engines of 4 H800, 32B", "512 x 16: the record, an eighth; engines: chosen"),
    Input("window", "staleness at most 3, depth 4", "typically below 3, at most 4: the record"),
    Input(
        "no repack", "an engine takes new weights when it has emptied by itself", "what repacking is measured against"
    ),
    Input("trainer", "fast: 10 s a step", "generation throughput is compared"),
)


@dataclass(frozen=True, slots=True)
class Draining(Composed):
    """Own versions without drawing rollouts together: only empty engines take new weights."""

    def decide(self, view: PoolView, now: float) -> Sequence[Action]:
        actions = super(Draining, self).decide(view, now)
        return [action for action in actions if not isinstance(action, Update)] or self._update_empty(view, actions)

    def _update_empty(self, view: PoolView, actions: Sequence[Action]) -> Sequence[Action]:
        empty = [e.name for e in view.engines() if e.version < view.version and not e.updating and not e.load]
        if empty and not view.training:
            return (Update(tuple(empty)),)
        return self.placing.fill(view) if actions else ()


def _laminar_policy(kind: type[Composed]) -> PolicyMaker:
    def make(spec: Spec) -> Composed:
        return kind(
            "windowed", rounds=Continuous(4.0), placing=Placing(own_version=True), freshness=Freshness(3, "wait")
        )

    return make


@cache
def _laminar(repack: bool) -> float:
    """Tokens trained on a second."""
    engine = EngineModel.of_hardware(
        params=32.8e9, kv_bytes_per_token=2 * 64 * 8 * 128 * 2, gpu=GPUS["H800"], slots=128, tp=4
    )
    demand = Workload.from_mean_cv(LAMINAR_MEAN, LAMINAR_CV, LAMINAR_ICC, LAMINAR_CAP, prompt_tokens=512)
    bench = Bench(
        engine=engine,
        engines=8,
        demand=demand,
        prompts=64,
        group=16,
        cap=LAMINAR_CAP,
        placement="disaggregated",
        train_step_s=10.0,
        publish_s=0.7,
    )
    run = play(bench, {"type": "sync"}, steps=16, policy=_laminar_policy(Composed if repack else Draining))
    return run.total("tokens/batch_trained", 5) / run.total("time/step_s", 5)


def _predict_laminar() -> Mapping[str, float]:
    return {"repack over none, tokens/s": _laminar(True) / _laminar(False) - 1}


LAMINAR = Study(
    id="laminar-core",
    source="two notes on arXiv:2510.12633",
    setting="one version a trajectory, with and without repack",
    inputs=LAMINAR_INPUTS,
    predict=_predict_laminar,
    tolerance="+-8 points",
    rows=(points("repack over none, tokens/s", 0.26, 0.08, "our repack draws together at a publish, not every 5 s"),),
    says="Predicted: the row. The record's other figures compare systems.",
)

STUDIES = (MAGISTRAL, STREAMRL, LAMINAR)
