"""What a server has counted since its start: requests, tokens, latencies. Read by `/metrics` and `/v1/loads`."""

from __future__ import annotations

from bisect import bisect_left
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from gruppetto.engines.base import EngineFinish

if TYPE_CHECKING:
    from gruppetto.engines.serve.calls import Call

LATENCY_S = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0, 1000.0, 3000.0)


@dataclass(slots=True)
class Histogram:
    """Counts below bounds, as Prometheus wants them."""

    bounds: tuple[float, ...] = LATENCY_S
    counts: list[int] = field(default_factory=list)
    total: float = 0.0

    def add(self, value: float) -> None:
        """One observation."""
        self.counts = self.counts or [0] * (len(self.bounds) + 1)
        self.counts[bisect_left(self.bounds, value)] += 1
        self.total += value


@dataclass(slots=True)
class Totals:
    """Counters; seconds in histograms."""

    requests: int = 0
    aborted: int = 0
    retracted: int = 0
    retracted_input: int = 0
    retracted_output: int = 0
    prompt_tokens: int = 0
    generated_tokens: int = 0
    cached_tokens: int = 0
    updates: dict[str, Histogram] = field(default_factory=dict)
    latency: Histogram = field(default_factory=Histogram)
    first_token: Histogram = field(default_factory=Histogram)
    per_token: Histogram = field(default_factory=Histogram)

    def end(self, call: Call) -> None:
        """Books one request that ended."""
        seconds = call.end_s - call.begin_s
        self.aborted += call.finish in (EngineFinish.ABORT, None)
        self.generated_tokens += len(call.ids)
        if call.entered:
            self.prompt_tokens += len(call.prompt)
        self.cached_tokens += call.cached
        self.latency.add(seconds)
        if call.on_move is not None and call.first_s:  # of others the first token is not seen before the last
            self.first_token.add(call.first_s - call.begin_s)
            if len(call.ids) > 1:
                self.per_token.add((call.end_s - call.first_s) / (len(call.ids) - 1))

    def retract(self, call: Call) -> None:
        """Books one request that left the engine to come back."""
        self.retracted += 1
        self.retracted_input += len(call.prompt)
        self.retracted_output += len(call.ids)

    def update(self, source: str, seconds: float) -> None:
        """Books one weight update by where it came from: disk or tensor."""
        self.updates.setdefault(source, Histogram()).add(seconds)
