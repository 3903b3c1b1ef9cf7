"""What a server is made with: names, keys, limits, deadlines. Checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from gruppetto.errors import UserError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """The most of everything that one input may hold, and how long anything may take (seconds)."""

    body_bytes: int = 64 << 20
    weights_bytes: int = 4 << 30
    """A body of `/update_weights_from_tensor`."""
    batch: int = 4096
    """Requests in one HTTP call, samples included."""
    open_requests: int = 65536
    """Requests that live at once; beyond it: 503."""
    stops: int = 64
    """Stop strings of one request."""
    stop_chars: int = 1024
    """Characters of one of them."""
    stop_ids: int = 1024
    chars_a_token: int = 64
    """Characters of a text for each token of the context; a longer one is refused before it is tokenised."""
    rid_chars: int = 256
    messages: int = 4096
    tools: int = 512
    body_s: float = 120.0
    request_s: float = 3600.0
    """From a request's arrival to its end, time held in a pause included; then it is aborted with 503."""
    control_s: float = 600.0
    """For a control call to take hold: an update that waits for what runs, a pause, a flush with `timeout`."""
    health_s: float = 20.0
    drain_s: float = 5.0
    """What runs may still take after SIGTERM; then it is aborted, and comes back with what it made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings:
    """One server. Ports 0 are chosen by the system."""

    host: str = "127.0.0.1"
    port: int = 30000
    control_port: int | None = None
    """Where control routes are, alone; None = on `port`, with all others."""
    api_key: str = ""
    admin_api_key: str = ""
    incremental: bool = False
    """Stream chunks of `/generate` hold what is new, instead of everything so far."""
    truncate: bool = False
    """`max_new_tokens` beyond the context is cut instead of refused."""
    default_max_new_tokens: int = 128
    seed: int = 0
    """Of the stream that seeds requests without a seed."""
    limits: Limits = field(default_factory=Limits)

    def __post_init__(self) -> None:
        if self.host not in LOOPBACK and not self.api_key:
            raise UserError(
                f"--host {self.host} can be reached from outside, where everyone could change the weights; "
                "give --api-key too (or GRUPPETTO_API_KEY), or write --host 127.0.0.1"
            )
        for name, port in (("--port", self.port), ("--control-port", self.control_port or 0)):
            if not 0 <= port <= 65535:
                raise UserError(f"{name} {port} is no port; write 0 (any that is free) to 65535")
        if self.control_port is not None and self.control_port == self.port != 0:
            raise UserError(f"--control-port {self.port} is --port too; write another one, or leave it out")


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelCard:
    """What is served, for checks and for `/model_info`. `context` in tokens, `vocab` ids."""

    path: str
    name: str
    context: int
    vocab: int
    eos_ids: tuple[int, ...]
    model_type: str = ""
    architectures: tuple[str, ...] = ()
    dtype: str = "float32"
    weight_version: str = "default"
    arguments: dict[str, object] = field(default_factory=dict)
    """The command line's, for `/server_info`."""
