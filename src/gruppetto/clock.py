"""Time. The one place that reads a clock, and the event loop whose time is virtual.

Promises: `now()` is the running loop's time, so code that waits through the loop runs unchanged in virtual time; under
`run_virtual` no wall time passes while everything sleeps, and a program in which nothing can ever run again raises
`StallError` at once instead of hanging.
"""

from __future__ import annotations

import asyncio
import selectors
import time
from collections.abc import Coroutine
from typing import Any, TypeVar

from gruppetto.errors import StallError

T = TypeVar("T")


def now() -> float:
    """Seconds on the running loop's clock (virtual under `run_virtual`), else the process's monotonic clock."""
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def monotonic() -> float:
    """Seconds on the machine's monotonic clock, for code on threads of its own."""
    return time.monotonic()


def cpu() -> float:
    """CPU seconds used by this process so far; 0 on virtual time, where records must not depend on the machine."""
    try:
        virtual = isinstance(asyncio.get_running_loop(), VirtualLoop)
    except RuntimeError:
        virtual = False
    return 0.0 if virtual else time.process_time()


def wall() -> float:
    """Seconds since 1970, for records that people read."""
    return time.time()


class _JumpingSelector(selectors.SelectSelector):
    """A selector that adds the timeout to a number instead of waiting for it."""

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready and timeout is None:
            raise StallError("virtual time: every task waits and no timer is left; nothing can ever run again")
        if not ready and timeout and timeout > 0:
            self.time += timeout
        return ready


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time. Threads and real I/O must not be awaited under it."""

    def __init__(self) -> None:
        self._jumping = _JumpingSelector()
        super().__init__(self._jumping)
        self._clock_resolution = 1e-9

    def time(self) -> float:
        return self._jumping.time


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh virtual loop."""
    with asyncio.Runner(loop_factory=VirtualLoop) as runner:
        return runner.run(main)
