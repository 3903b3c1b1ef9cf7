"""What the front is made with: addresses, keys, limits, deadlines. Checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from gruppetto.engines.router.rules import Rules
from gruppetto.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteLimits:
    """The most of everything, and how long anything may take (seconds)."""

    body_bytes: int = 64 << 20
    weights_bytes: int = 4 << 30
    """A body of a weight update."""
    batch: int = 4096
    """Rows of one call, samples included."""
    open_requests: int = 65536
    """Beyond it: 503."""
    engines: int = 4096
    body_s: float = 120.0
    queue_s: float = 1800.0
    """For an engine with room; then 503."""
    request_s: float = 3600.0
    """From an engine's taking a request to the end of its answer."""
    control_s: float = 600.0
    """For one engine's answer to a control call."""
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
class RouteSettings:
    """One front. Ports 0 are chosen by the system."""

    engines: tuple[str, ...]
    host: str = "127.0.0.1"
    port: int = 30000
    control_port: int | None = None
    """Where control routes are, alone; None = on `port`, with all others."""
    api_key: str = ""
    admin_api_key: str = ""
    engine_key: str = ""
    """Sent to engines; "" = what the client sent is passed on, where the front itself has no key."""
    find_prefixes: bool = True
    """Make sessions of prompts that go on from each other, for clients that send no key."""
    rules: Rules = field(default_factory=Rules)
    health: HealthRules = field(default_factory=HealthRules)
    limits: RouteLimits = field(default_factory=RouteLimits)

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.api_key:
            raise UserError(
                f"--host {self.host} can be reached from outside, where everyone could pause the engines and change "
                "their weights; give --api-key too (or GRUPPETTO_API_KEY), or write --host 127.0.0.1"
            )
        for name, port in (("--port", self.port), ("--control-port", self.control_port or 0)):
            if not 0 <= port <= 65535:
                raise UserError(f"{name} {port} is no port; write 0 (any that is free) to 65535")
        if self.control_port is not None and self.control_port == self.port != 0:
            raise UserError(f"--control-port {self.port} is --port too; write another one, or leave it out")
        if twice := next((url for url in self.engines if self.engines.count(url) > 1), None):
            raise UserError(f"--engine {twice} is given twice; write each engine once")
