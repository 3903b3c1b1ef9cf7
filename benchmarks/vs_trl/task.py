"""The task that both sides learn: sums as prompts, and a dense reward, the share of digits in the response.

Only the standard library: the TRL side imports this file in an environment of its own.
"""

from __future__ import annotations

import random


def rows(seed: int, size: int) -> list[dict[str, str]]:
    """`size` prompts such as `What is 7 + 5? Answer in digits: `."""
    rng = random.Random(seed)
    pairs = [(rng.randrange(10), rng.randrange(10)) for _ in range(size)]
    return [{"prompt": f"What is {a} + {b}? Answer in digits: ", "answer": str(a + b)} for a, b in pairs]


def digit_share(response: str) -> float:
    """Share of digits among the characters; 0 for an empty response."""
    return sum(char.isdigit() for char in response) / max(1, len(response))
