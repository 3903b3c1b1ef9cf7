"""The record's estimate of the lengths launched, against those that the simulation really drew.

The run knows an unfinished rollout by the tokens it has; the workload knows how long it will be.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import pytest

from gruppetto.clock import run_virtual
from gruppetto.config.loader import load
from gruppetto.record.account import ks_of_counts, share_from, upper_point
from gruppetto.record.base import Recorder
from gruppetto.scheduler.entries import GroupEntry
from gruppetto.sim.compare import overrides
from gruppetto.sim.simulate import build_world, workload_of
from gruppetto.sim.world import World


@dataclass(slots=True)
class Truth(Recorder):
    """What was launched until each step's record, as drawn, and what was trained on."""

    world: World | None = None
    metrics: list[Mapping[str, Any]] = field(default_factory=list)
    groups: list[GroupEntry] = field(default_factory=list)
    consumed: Counter[int] = field(default_factory=Counter)
    true: list[dict[str, float]] = field(default_factory=list)

    def event(self, kind: str, t: float, **fields: Any) -> None:
        assert self.world is not None
        if kind == "launch":
            self.groups.append(self.world.loop.pool.groups[fields["group"]])

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        self.consumed.update(row["tokens"] for row in rows if row["fate"] == "trained")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        assert self.world is not None
        plans = self.world.spec.plans
        drawn = Counter(plans.of(member)[0][-1] for group in self.groups for member in group.members)
        longest = upper_point(drawn)
        self.metrics.append(metrics)
        self.true.append(
            {
                "length_ks": ks_of_counts(self.consumed, drawn),
                "length_ratio": _mean(self.consumed) / _mean(drawn),
                "p99_ratio": share_from(self.consumed, longest) / share_from(drawn, longest),
            }
        )

    def close(self) -> None:
        return


def _mean(counts: Mapping[int, int]) -> float:
    return sum(length * count for length, count in counts.items()) / sum(counts.values())


def simulated(entry: str, *, family: str = "a", steps: int = 24, seed: int = 0) -> Truth:
    """An eighth of a family."""
    whole = load([f"sim/family-{family}"]).config
    settings = [
        "log.rollouts=true",
        f"run.seed={seed}",
        f"run.steps={steps}",
        f"rollout.prompts_per_step={whole.rollout.prompts_per_step // 8}",
        f"engine.count={whole.engine.count // 8}",
        f"sim.train_token_s={whole.sim.train_token_s * 8}",
        *overrides(entry),
    ]
    config = load([f"sim/family-{family}"], settings).config
    truth = Truth()
    truth.world = build_world(config, workload_of(config), truth)
    run_virtual(truth.world.run())
    return truth


KEEP = (
    "partial:depth=2",
    "async_bounded",
    "windowed",
    "layered:max_staleness=1:depth=1.5:over_age=mask",
    "layered:max_staleness=1:depth=2",
)
"""Long answers come later, and come."""
CENSOR = ("tail_batch", "layered:max_staleness=1:depth=2:over_age=drop", "partial:depth=1.25:unfinished=drop")


def assert_true(truth: Truth) -> None:
    """KS distance of every step, and the other figures once there has been something to see."""
    for said, true in zip(truth.metrics, truth.true, strict=True):
        assert said["bias/length_ks"] == pytest.approx(true["length_ks"], abs=0.015)
    said, true = truth.metrics[-1], truth.true[-1]
    assert said["bias/p99_ratio"] == pytest.approx(true["p99_ratio"], abs=0.1)
    if said["bias/p99_ratio"] > 0.1:  # else nobody saw how long the longest become
        assert said["bias/length_ratio"] == pytest.approx(true["length_ratio"], abs=0.04)


@pytest.mark.parametrize("family", ["a", "d"])
def test_what_waits_for_all_is_exactly_unbiased(family):
    truth = simulated("sync", family=family, steps=3)
    names = ("length_ks", "length_ratio", "p99_ratio", "p99_kept", "outstanding", "ks_allowance")
    for said in truth.metrics:
        assert [said[f"bias/{name}"] for name in names] == [0, 1, 1, 1, 0, 0]
    assert truth.true == [{"length_ks": 0, "length_ratio": 1, "p99_ratio": 1}] * 3


@pytest.mark.parametrize(("family", "seed"), [("a", 0), ("r", 1)])
@pytest.mark.parametrize("entry", KEEP)
def test_what_trains_on_short_answers_first_says_so_and_makes_up_for_it(entry, family, seed):
    truth = simulated(entry, family=family, seed=seed)
    assert_true(truth)
    first, last = truth.metrics[0], truth.metrics[-1]
    assert first["bias/length_ks"] > 0.03
    assert first["bias/length_ratio"] < 0.9
    assert first["bias/p99_ratio"] == 0
    assert last["bias/length_ks"] < first["bias/length_ks"] / 5
    assert last["bias/p99_ratio"] > 0.6
    for said in truth.metrics:
        assert said["bias/length_ks"] <= said["bias/ks_allowance"]
        assert said["bias/p99_kept"] == pytest.approx(1)
        assert said["bias/censors"] is False


@pytest.mark.parametrize(("family", "seed"), [("a", 0), ("r", 1)])
@pytest.mark.parametrize("entry", CENSOR)
def test_what_drops_long_answers_is_caught(entry, family, seed):
    truth = simulated(entry, family=family, seed=seed)
    assert_true(truth)
    last = truth.metrics[-1]
    assert last["bias/length_ks"] > 1.2 * last["bias/ks_allowance"]
    assert last["bias/p99_kept"] < 0.5
    assert last["bias/p99_ratio"] < 0.5
    assert last["bias/censors"] is True
