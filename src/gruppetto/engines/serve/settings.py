"""What a server is made with: names, keys, limits, deadlines. Checked once."""

from __future__ import annotations

from dataclasses import dataclass, field

from gruppetto.engines.serve.listening import InputLimits, Listening


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits(InputLimits):
    """`request_s` counts from a request's arrival, time held in a pause included; then it is aborted with 503. A
    control call may wait for what runs."""

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
    health_s: float = 20.0
    drain_s: float = 5.0
    """What runs may still take after SIGTERM; then it is aborted, and comes back with what it made."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ServeSettings(Listening):
    """One server."""

    incremental: bool = False
    """Stream chunks of `/generate` hold what is new, instead of everything so far."""
    truncate: bool = False
    """`max_new_tokens` beyond the context is cut instead of refused."""
    default_max_new_tokens: int = 128
    seed: int = 0
    """Of the stream that seeds requests without a seed."""
    limits: Limits = field(default_factory=Limits)


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
