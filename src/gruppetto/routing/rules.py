"""The figures: what is held back, when a session moves, how the limit of an engine grows and shrinks."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, kw_only=True)
class CapRules:
    """How many requests one engine is given at once, by its KV. Shares are of the KV, or of the limit.

    Source: the concurrency controller of prime-rl (orchestrator), whose figures these are.
    """

    start: int = 64
    """Where an engine does not say how many it runs at once."""
    ahead: float = 0.25
    """Share of what an engine says it runs at once that it is given beyond, so that no slot is empty for the time of a
    request's way."""
    least: int = 1
    most: int = 8192
    grow: float = 1.25
    grow_below: float = 0.6
    """KV in use below which the limit may grow, with nothing queued on the engine."""
    binding: float = 0.9
    """Share of the limit that must be in use for it to grow: a limit nobody feels is no reason for a higher one."""
    soft: float = 0.8
    """KV in use from which no more is sent than what brings it down to `target`."""
    target: float = 0.7
    hard: float = 0.9
    """KV in use from which the youngest are to be given back as well."""
    on_preemption: float = 0.8
    on_queue: float = 0.9
    escalated: float = 0.5
    """The cut where the queue is still there after another `queue_polls`."""
    queue_share: float = 0.5
    """Waiting over running from which an engine counts as queued."""
    queue_polls: int = 6
    ttl_s: float = 15.0
    """A reading older than that lets nothing grow, and after a cut nothing grows for as long."""
    burst_share: float = 0.1
    burst_s: float = 5.0
    """After a cut: at most so large a share of the limit is sent in so many seconds."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PriceRules:
    """What is believed of an engine's speed before anything was measured, in seconds; weak, measurements soon win."""

    prefill_s: float = 1e-4
    """One token of prefill."""
    base_s: float = 0.02
    """One decode step."""
    row_s: float = 2e-4
    """What one more row adds to it."""
    half_life: int = 512
    """Finished requests after which an observation counts half."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """All of them."""

    hold: float = 0.9
    """Share of an engine's KV that requests which bring none there and held contexts may fill together."""
    margin: float = 1.5
    """A prefill that moving costs counts so many times: rows of the other engine wait for it too."""
    gain: float = 0.03
    """A session moves only if that saves so large a share of the time it would take where it is, and"""
    gain_s: float = 0.05
    """so many seconds: what less is, the forecast cannot tell."""
    slow: float = 4.0
    """Times the pace of the fastest engine from which one gets no new work while there are others."""
    lost: float = 6.0
    """Times the usual pace of the fleet that an engine must take, and"""
    lost_looks: int = 5
    """so many observations in a row, to be lost like one that died: what runs there goes on elsewhere."""
    slow_s: float = 60.0
    """Half-life of that judgement where nothing new is measured, so that an engine gets another chance."""
    patience_s: float = 30.0
    """Seconds of waiting after which a request goes before those with more to lose."""
    sessions: int = 1 << 17
    """Sessions remembered; the ones unused for longest are forgotten first."""
    cap: CapRules = field(default_factory=CapRules)
    prices: PriceRules = field(default_factory=PriceRules)
