"""What the front is made with: addresses, keys, limits, deadlines. Checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from gruppetto.engines.serve.listening import InputLimits, Listening
from gruppetto.errors import UserError
from gruppetto.routing.rules import Rules


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLimits(InputLimits):
    """`request_s` counts from an engine's taking a request to the end of its answer; `control_s` is for one engine's
    answer to a control call."""

    engines: int = 4096
    queue_s: float = 1800.0
    """For an engine with room; then 503."""
    connect_s: float = 5.0
    refusal_s: float = 1.0
    """An answer of 429 or 503 that comes sooner is a refusal: nothing was run, another engine may be asked."""
    attempts: int = 4
    """Engines that one request may be sent to."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HealthRules:
    """When an engine is left out, and when it is taken back."""

    probe_s: float = 10.0
    """Between two looks at `/health`."""
    timeout_s: float = 20.0
    load_s: float = 1.0
    """Between two looks at `/v1/loads`."""
    load_timeout_s: float = 5.0
    failures: int = 3
    """In a row, after which an engine is fenced. A refused connection fences at once."""
    passes: int = 2
    """In a row, after which it is taken back."""
    hung_s: float = 60.0
    """After which an engine that has been fenced and silent is given up: its requests are answered 504."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteSettings(Listening):
    """One front."""

    engines: tuple[str, ...]
    engine_key: str = ""
    """Sent to engines; "" = what the client sent is passed on, where the front itself has no key."""
    find_prefixes: bool = True
    """Make sessions of prompts that go on from each other, for clients that send no key."""
    rules: Rules = field(default_factory=Rules)
    health: HealthRules = field(default_factory=HealthRules)
    limits: RouteLimits = field(default_factory=RouteLimits)

    def __post_init__(self) -> None:
        Listening.__post_init__(self)
        hold, slow, margin = self.rules.hold, self.rules.slow, self.rules.margin
        if not 0 < hold <= 1:
            raise UserError(f"hold = {hold:g} is no share of an engine's KV; write 0.9 (more than 0, at most 1)")
        if slow <= 1 or margin < 1:
            raise UserError(
                f"slow = {slow:g} and margin = {margin:g} are times something; write slow more than 1 and margin at "
                "least 1"
            )
        if twice := next((url for url in self.engines if self.engines.count(url) > 1), None):
            raise UserError(f"--engine {twice} is given twice; write each engine once")
