"""One simulated run of a published setting: the real controller and scheduler, nothing written to disk.

Owns the way from a setting to figures. Promise: what a rollout asks for depends on the seed, its prompt and its member
alone, so that the scheduling policies of one setting are compared on the same rollouts.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gruppetto.clock import run_virtual
from gruppetto.config.schema import Config
from gruppetto.record.base import Recorder
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.sim.engine import EngineModel, share_kv
from gruppetto.sim.simulate import spec_of
from gruppetto.sim.workload.base import Demand
from gruppetto.sim.world import Spec, World

PolicyMaker = Callable[[Spec], Composed]
"""A scheduling policy for a run that is about to be built."""

FOR_EVER_S = 1e7
"""No rollout of a reproduction is failed for the time it takes."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Bench:
    """A setting. Seconds and tokens; `cap` model tokens of the longest rollout, `context` all that an engine takes."""

    engine: EngineModel
    engines: int
    demand: Demand
    prompts: int
    group: int
    cap: int
    context: int = 0
    placement: str = "colocated"
    train_token_s: float = 0.0
    train_step_s: float = 0.0
    publish_s: float = 0.0
    score_s: float = 0.0
    kv_on_swap: str = "recompute"
    tasks: int = 0
    seed: int = 1
    keep_segments: bool = False
    """Count the weights versions of each rollout that is trained on."""

    def config(self, scheduler: Mapping[str, Any], steps: int) -> Config:
        """The same as a config of `gruppetto simulate`."""
        model = self.engine
        return Config.model_validate(
            {
                "run": {"steps": steps, "seed": self.seed, "placement": self.placement},
                "rollout": {
                    "prompts_per_step": self.prompts,
                    "group_size": self.group,
                    "max_tokens": self.cap,
                    "timeout_s": FOR_EVER_S,
                },
                "scheduler": dict(scheduler),
                "engine": {
                    "count": self.engines,
                    "slots": model.slots,
                    "context": self.context or 4 * self.cap + 65_536,
                },
                "log": {"rollouts": self.keep_segments},
                "sim": {
                    "tasks": self.tasks,
                    "decode_base_s": model.base_s,
                    "decode_weights_s": model.weights_s,
                    "decode_experts_s": model.experts_s,
                    "decode_expert_share": model.expert_share,
                    "decode_compute_s": model.compute_row_s,
                    "decode_kv_s": model.kv_token_s,
                    "decode_row_s": model.row_s,
                    "prefill_token_s": model.prefill_token_s,
                    "kv_tokens": model.kv_capacity,
                    "kv_on_swap": self.kv_on_swap,
                    "speculation": {str(rows): [made, cost] for rows, made, cost in model.speculation},
                    "score_s": self.score_s,
                    "train_token_s": self.train_token_s,
                    "train_step_s": self.train_step_s,
                    "publish_s": self.publish_s,
                },
            }
        )


@dataclass(slots=True)
class Run(Recorder):
    """What a run left behind: the metrics of each step, and when each rollout first started and finished."""

    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    first_start: dict[str, float] = field(default_factory=dict)
    finished: dict[str, tuple[float, int]] = field(default_factory=dict)
    """Rollout -> (when, model tokens)."""
    engine_last: dict[str, float] = field(default_factory=dict)
    """Engine -> when a rollout last finished on it."""
    segments: list[int] = field(default_factory=list)
    """Weights versions of each rollout that was trained on, in the order of the batches."""
    preemptions: int = 0
    prefill_tokens: int = 0

    def event(self, kind: str, t: float, **fields: Any) -> None:
        if kind == "start":
            self.first_start.setdefault(fields["rollout"], t)
        elif kind == "stop":
            self.engine_last[fields["engine"]] = t
        elif kind == "finish":
            self.finished[fields["rollout"]] = (t, fields["tokens"])

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.metrics.append(metrics)

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        self.segments += [len({version for version, _ in row["segments"]}) for row in rows if row["fate"] == "trained"]

    def close(self) -> None:
        return

    def mean(self, name: str, skip: int = 0) -> float:
        """Mean of a metric over the steps after the first `skip`."""
        values = [row[name] or 0.0 for row in self.metrics[skip:]]
        return sum(values) / len(values)

    def total(self, name: str, skip: int = 0) -> float:
        """Sum of a metric over the steps after the first `skip`."""
        return float(sum(row[name] or 0.0 for row in self.metrics[skip:]))

    @property
    def end_s(self) -> float:
        """When the last rollout finished."""
        return max(t for t, _ in self.finished.values())

    @property
    def idle_share(self) -> float:
        """Mean share of the run that was left when an engine's last rollout finished. For runs of one step."""
        return 1 - mean(list(self.engine_last.values())) / self.end_s

    def tail_share(self, share: float = 0.1) -> float:
        """The part of the run that the last `share` of its rollouts to finish took. For runs of one step."""
        ends = sorted(t for t, _ in self.finished.values())
        last = ends[-1]
        return (last - ends[int(len(ends) * (1 - share)) - 1]) / last


def play(
    bench: Bench,
    scheduler: Mapping[str, Any],
    *,
    steps: int = 1,
    policy: PolicyMaker | None = None,
    pool_kv: bool = False,
) -> Run:
    """Runs `steps` steps under a preset and what `scheduler` replaces of it, or under a scheduling policy made by hand.

    `pool_kv`: KV that a rollout left behind is found by every engine and takes no room on any.
    """
    run = Run()
    spec = spec_of(bench.config(scheduler, steps), bench.demand)
    spec = replace(spec, model=bench.engine, policy=policy(spec) if policy else spec.policy)
    run_virtual(_play(spec, run, pool_kv))
    return run


async def _play(spec: Spec, run: Run, pool_kv: bool) -> None:
    world = World.of(spec, run)
    if pool_kv:
        share_kv(world.engines)
    await world.run()
    stats = [engine.stats() for engine in world.engines]
    run.preemptions = sum(engine.preemptions_total for engine in stats)
    run.prefill_tokens = sum(engine.prefill_tokens_total for engine in stats)


def mean(values: Sequence[float]) -> float:
    """Arithmetic mean."""
    return sum(values) / len(values)
