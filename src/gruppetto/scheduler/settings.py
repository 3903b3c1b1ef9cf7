"""What the loop needs to know of a run, as plain numbers."""

from __future__ import annotations

from dataclasses import dataclass

from gruppetto.engines.base import Sampling


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopSettings:
    """`sampling` is the template of every request (its budget and seed are set per request)."""

    batch_groups: int
    group_size: int
    max_tokens: int
    context: int
    sampling: Sampling
    seed: int = 0
    lockstep: bool = False
    colocated: bool = True
    """Engines and trainer share their machines."""
    timeout_s: float = 600.0
    """A generate call that has not come back after this is aborted and its rollout failed."""
    abort_s: float = 30.0
    """An abort that the engine has not answered after this is taken as the engine's death."""
    tool_timeout_s: float = 600.0
    """An environment that has not answered a turn after this is cancelled and its rollout failed."""
    stall_s: float = 900.0
    """No event at all for this long ends the run with a report."""
    engine_queue: int = 0
    """Rollouts an engine may hold beyond its slots, which hides the way to the scheduler."""
    max_engine_losses: int = 3
    """Engines a rollout may lose, and requests of it that may break off, together, before it is failed."""
    min_usable: int = 2
    """Members with a reward below which a group has no baseline, so weight 0, and is replaced."""
    drop_zero_variance: bool = False
    max_filtered_groups: int = 256
    max_failed_groups: int = 8
    """Groups in a row without enough rewards after which the reward or the engine is taken to be broken."""
    when_starved_train: bool = False

    def budget(self, prompt: int, made: int) -> int:
        """Model tokens a rollout may still make: its own budget and the context, whichever ends first."""
        return min(self.max_tokens - made, self.context - prompt - made)
