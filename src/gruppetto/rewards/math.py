"""Mathematical equality by math-verify (extra `math`).

Promise: its own timeouts, which are signals, are off; the deadline is the process pool's. Runs in killable processes
only, since symbolic comparison may never end.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

from gruppetto.rewards.rules import Ungradable, golds


def math_verifier(response: str, answer: Any, extra: Mapping[str, Any]) -> float:
    """1.0 when the response's final expression equals the answer (or one of several), else 0.0.

    Raises `Ungradable` for an answer that math-verify cannot read.
    """
    from math_verify import parse, verify

    wanted = [_gold(str(gold)) for gold in golds(answer)]
    got = parse(response, parsing_timeout=None)
    return float(any(verify(gold, got, timeout_seconds=None) for gold in wanted))


@lru_cache(maxsize=4096)
def _gold(text: str) -> Any:
    """A gold answer parsed; bare LaTeX needs an environment around it to be found."""
    from math_verify import parse

    logging.getLogger("math_verify").setLevel(logging.ERROR)  # it warns about the switched-off timeouts at each call
    parsed = parse(text if "\\boxed" in text or "$" in text else f"\\boxed{{{text}}}", parsing_timeout=None)
    if not parsed:
        raise Ungradable(f"math-verify cannot read the answer {text[:60]!r}")
    return parsed
