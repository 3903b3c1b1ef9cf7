"""A heavy-tailed multi-turn load, the same for every router: who asks for what is drawn from a seed.

Sessions come in a burst, as a training step's rollouts do. A session has a prompt, turns with a response, a tool call
and its observation; the number of turns and the length of responses are heavy-tailed. Prompts are text of four
characters a token, each session's own, so that routers which look at text see what is shared and what is not.
"""

from __future__ import annotations

import hashlib
import math
import random
from dataclasses import dataclass

CHARS = 4


@dataclass(frozen=True, slots=True)
class Turn:
    """One call: tokens of the response, of the observation that follows, and seconds of the tool between."""

    tokens: int
    observation: int
    tool_s: float


@dataclass(frozen=True, slots=True)
class Session:
    """One rollout."""

    name: str
    prompt: int
    turns: tuple[Turn, ...]


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of the load and of the engines it is for. Lognormal by median and sigma."""

    sessions: int = 96
    prompt: int = 300
    turns_median: float = 3.0
    turns_sigma: float = 0.9
    turns_most: int = 24
    tokens_median: float = 90.0
    tokens_sigma: float = 1.0
    tokens_most: int = 2000
    observation: int = 120
    tool_s: float = 0.3
    slots: int = 16
    base_s: float = 0.006
    row_s: float = 1.5e-4
    kv_token_s: float = 5e-8
    prefill_token_s: float = 6e-5
    kv_capacity: int = 24_000


def plan(sizes: Sizes, seed: int) -> list[Session]:
    """All sessions of one load."""
    rng = random.Random(seed)
    found = []
    for i in range(sizes.sessions):
        count = min(sizes.turns_most, max(1, round(_lognormal(rng, sizes.turns_median, sizes.turns_sigma))))
        turns = tuple(
            Turn(
                min(sizes.tokens_most, max(8, int(_lognormal(rng, sizes.tokens_median, sizes.tokens_sigma)))),
                int(rng.uniform(0.3, 1.7) * sizes.observation),
                min(6 * sizes.tool_s, rng.expovariate(1 / sizes.tool_s)),
            )
            for _ in range(count)
        )
        found.append(Session(f"s{seed}-{i}", int(rng.uniform(0.5, 1.5) * sizes.prompt), turns))
    return found


def _lognormal(rng: random.Random, median: float, sigma: float) -> float:
    return median * math.exp(rng.gauss(0, sigma))


def text(name: str, begin: int, tokens: int) -> str:
    """So many tokens of a session's text from a place in it; the same for the same arguments."""
    chars, parts = CHARS * tokens, []
    block = CHARS * begin
    while chars > 0:
        piece = hashlib.blake2b(f"{name}/{block}".encode(), digest_size=32).hexdigest()[:chars]
        parts.append(piece)
        chars -= len(piece)
        block += len(piece)
    return "".join(parts)
