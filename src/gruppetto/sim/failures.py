"""What breaks in a simulated run, and when."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.clock import now
from gruppetto.errors import UserError
from gruppetto.sim.engine import SimEngine

_FORM = re.compile(r"(dead|slow|mute):(\d+)@(\d+(?:\.\d+)?)(?:x(\d+(?:\.\d+)?))?")


@dataclass(frozen=True, slots=True)
class Failure:
    """`kind` dead (loses all), slow (by `factor`), mute (answers nothing) strikes engine number `engine` at `at_s`."""

    kind: str
    engine: int
    at_s: float
    factor: float = 10.0


def read_failures(texts: Sequence[str], engines: int) -> list[Failure]:
    """From `kind:engine@second` (and `xFACTOR` for slow). Raises `UserError`."""
    failures = []
    for text in texts:
        found = _FORM.fullmatch(text)
        if found is None or int(found[2]) >= engines:
            raise UserError(
                f'sim.failures: "{text}" is no failure of one of {engines} engines; write "dead:0@600", '
                f'"slow:{engines - 1}@60x10" or "mute:0@600"'
            )
        if found[4] is not None and (found[1] != "slow" or float(found[4]) <= 1):
            raise UserError(
                f'sim.failures: "{text}": x{found[4]} says how many times slower an engine gets, above 1 and for slow '
                f'only; write "slow:{found[2]}@{found[3]}x10" or "{found[1]}:{found[2]}@{found[3]}"'
            )
        failures.append(Failure(found[1], int(found[2]), float(found[3]), float(found[4] or 10.0)))
    return failures


def plan(failures: Sequence[Failure], engines: Sequence[SimEngine]) -> None:
    """Sets them off on the running loop's clock."""
    loop = asyncio.get_running_loop()
    for failure in failures:
        loop.call_later(max(0.0, failure.at_s - now()), _strike, failure, engines[failure.engine])


def _strike(failure: Failure, engine: SimEngine) -> None:
    if failure.kind == "dead":
        engine.kill("power cut")
    elif failure.kind == "slow":
        engine.slow(failure.factor)
    else:
        engine.hang()
