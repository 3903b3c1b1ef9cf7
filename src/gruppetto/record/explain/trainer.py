"""How much of the steps the trainer computed, and whether it is what the run waits for.

Promise: nothing is claimed of a record that does not say how long the trainer computed and waited.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from gruppetto.record.explain.means import Row, having, total

WAITS, COMPUTES, IDLE = 0.1, 0.5, 0.1
"""A trainer beside the engines is the bottleneck when it waits for batches for at most the first share of the steps'
seconds and computes for at least the second, and the engines are empty for it for at least the third of theirs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Shares of the steps' seconds, and of the engine-seconds in which the engines waited for it."""

    computed: float
    waited: float
    """For a batch; where it shares its machines, what generation took."""
    engines_waited: float
    engines_empty: float
    """The same with the tail: slots that nothing filled while rollouts of a batch that nobody waited for ran."""
    colocated: bool

    @property
    def bottleneck(self) -> bool:
        """More of it, and no scheduling policy, makes steps shorter; where it shares its machines, it takes the larger
        part of them."""
        if self.colocated:
            return self.computed > self.waited
        return self.waited <= WAITS and self.computed >= COMPUTES and self.engines_empty >= IDLE

    @property
    def binds(self) -> bool:
        """It is the bottleneck beside the engines: how they generate changes nothing."""
        return self.bottleneck and not self.colocated

    @property
    def times_faster(self) -> float:
        """How many times as fast it could be before it waited for these engines."""
        return 1 / max(0.01, 1 - self.engines_waited)

    def engines_enough(self, count: int) -> int:
        """Engines of so many that would keep it busy."""
        return max(1, ceil(count * (1 - self.engines_waited) - 1e-9))


def measure(rows: Sequence[Row], shares: Mapping[str, float], placement: str | None) -> Trainer | None:
    """`shares` of the engine-seconds by cause."""
    names = [f"time/{name}_s" for name in ("step", "train", "wait_for_batch")]
    step, computed, waited = (total(having(rows, *names), name) for name in names)
    if not step or computed is None or waited is None or placement is None:
        return None
    idle = shares.get("trainer", 0.0)
    return Trainer(
        computed=computed / step,
        waited=waited / step,
        engines_waited=idle,
        engines_empty=idle + shares.get("tail", 0.0),
        colocated=placement == "colocated",
    )


def section(trainer: Trainer | None) -> dict[str, Any]:
    """JSON-able; sentences where it is the bottleneck."""
    if trainer is None:
        return {"bottleneck": None, "says": []}
    found = {**asdict(trainer), "bottleneck": trainer.bottleneck}
    if not trainer.bottleneck:
        return found | {"says": []}
    computed, waited = f"{trainer.computed:.0%} of the steps' seconds", f"{trainer.waited:.0%}"
    if trainer.colocated:
        return found | {
            "says": [f"The trainer is the larger part: it computed for {computed}, generation took {waited}."]
        }
    theirs = f"the engines waited for it for {trainer.engines_waited:.0%} of theirs"
    said = f"The trainer is the bottleneck: it computed for {computed} and waited for a batch for {waited}; {theirs}."
    return found | {"says": [said]}
