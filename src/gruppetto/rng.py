"""Randomness, by name. The one place that makes random streams.

Promise: a stream depends on the seed and its names only, so one more draw somewhere never shifts another stream.
"""

from __future__ import annotations

import hashlib
import random

Stream = random.Random
"""A seeded stream of draws."""


def seed_for(seed: int, *names: object) -> int:
    """A 63-bit seed mixed from `seed` and any names; stable across processes and Python versions."""
    text = "\x1f".join([str(seed), *map(str, names)])
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little") >> 1


def stream(seed: int, *names: object) -> Stream:
    """A `Stream` for the named purpose, e.g. `stream(seed, "data", epoch)`."""
    return Stream(seed_for(seed, *names))
