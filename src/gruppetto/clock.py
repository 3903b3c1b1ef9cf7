"""Time. The one place that reads a clock, and the event loop whose time is virtual.

Promises: `now()` is the running loop's time, so code that waits through the loop runs unchanged in virtual time; under
`run_virtual` no wall time passes while everything sleeps, and a program in which nothing can ever run again raises
`StallError` at once instead of hanging.
"""

from __future__ import annotations

import asyncio
import gc
import selectors
import sys
import threading
import time
from asyncio.format_helpers import extract_stack
from collections import deque
from collections.abc import Callable, Coroutine, Sequence
from contextvars import Context, copy_context
from heapq import heapify, heappop, heappush
from math import inf, nextafter
from traceback import StackSummary
from typing import Any, TypeVar, TypeVarTuple

from gruppetto.errors import StallError

T = TypeVar("T")
Ts = TypeVarTuple("Ts")


def now() -> float:
    """Seconds on the running loop's clock (virtual under `run_virtual`), else the process's monotonic clock."""
    if (loop := _running.loop) is not None:
        return loop.jumping.time
    try:
        return asyncio.get_running_loop().time()
    except RuntimeError:
        return time.monotonic()


def running_loop() -> asyncio.AbstractEventLoop:
    """`asyncio.get_running_loop`, for what is called at each event: on virtual time without its system call."""
    return _running.loop or asyncio.get_running_loop()


def monotonic() -> float:
    """Seconds on the machine's monotonic clock, for code on threads of its own."""
    return time.monotonic()


def cpu() -> float:
    """CPU seconds used by this process so far; 0 on virtual time, where records must not depend on the machine."""
    return 0.0 if is_virtual() else time.process_time()


def wall() -> float:
    """Seconds since 1970, for records that people read."""
    return time.time()


class _Running(threading.local):
    """The virtual loop that runs in this thread: asyncio finds a running loop by a system call, at each event."""

    loop: VirtualLoop | None = None


_running = _Running()

_LOOK_EVERY = 256
"""Turns of the virtual loop after which it looks whether a signal has come."""

_SWEEP_FROM = 50
"""Cancelled timers that may lie about in the heap."""


class _JumpingSelector(selectors.SelectSelector):
    """A selector that sets the clock forward instead of waiting.

    It looks at files (a system call) only where there are any beside the loop's own pipe, every `_LOOK_EVERY` turns,
    and before it says that nothing can run.
    """

    loop: VirtualLoop

    def __init__(self) -> None:
        super().__init__()
        self.time = 0.0
        self.files = 0
        self.turns = 0

    def register(self, fileobj: Any, events: int, data: Any = None) -> selectors.SelectorKey:
        key = super().register(fileobj, events, data)
        self.files = len(self.get_map())
        return key

    def unregister(self, fileobj: Any) -> selectors.SelectorKey:
        key = super().unregister(fileobj)
        self.files = len(self.get_map())
        return key

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        """`timeout` is 0 where something can run at once, None where no timer is left."""
        if self.files > 1 or timeout is None or self.turns >= _LOOK_EVERY:
            self.turns = 0
            if ready := super().select(0):
                return ready
        if timeout != 0 and not self.loop.has_ready():
            if timeout is None:
                raise StallError("virtual time: every task waits and no timer is left; nothing can ever run again")
            self.time = max(self.time, self.loop.next_due())
        return []


class _Handle(asyncio.Handle):
    """asyncio's handle without what it does for debugging, which is most of what a handle costs."""

    __slots__ = ()

    def __init__(
        self, callback: Callable[..., object], args: Sequence[Any], loop: VirtualLoop, context: Context | None
    ) -> None:
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = self._repr = None


class _Timer(asyncio.TimerHandle):
    """One of the virtual loop's timers, made in the same way."""

    __slots__ = ()

    _source_traceback: StackSummary | None

    def __init__(
        self,
        when: float,
        callback: Callable[..., object],
        args: Sequence[Any],
        loop: VirtualLoop,
        context: Context | None,
    ) -> None:
        self._when, self._scheduled = when, True
        self._callback, self._args, self._loop = callback, args, loop
        self._context = copy_context() if context is None else context
        self._cancelled = False
        self._source_traceback = None
        self._repr = None


class VirtualLoop(asyncio.SelectorEventLoop):
    """An asyncio loop on virtual time: where it would wait for the next timer, its clock jumps to it, exactly. Of
    timers due at the same time the one set first goes first, where asyncio's order depends on those cancelled before.

    Threads and real I/O must not be awaited under it: time would run away, or nothing would seem left to run.
    `call_soon_threadsafe` loses nothing: the loop never sleeps and so needs no waking, and what a thread has handed
    over is run before time moves and before `StallError`.
    """

    _ready: deque[asyncio.Handle]
    _scheduled: list[tuple[float, int, _Timer]]
    """A heap by (time, order of setting), which tuples compare without a call of Python code."""
    _timer_cancelled_count: int
    _stopping: bool
    _closed: bool
    _debug: bool

    def __init__(self) -> None:
        self.jumping = _JumpingSelector()
        self.jumping.loop = self
        super().__init__(self.jumping)
        self._clock_resolution = 1e-9
        self._timers = 0

    def call_soon(
        self, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.Handle:
        if self._debug or self._closed:
            slow = super().call_soon(callback, *args, context=context)
            slow._source_traceback = extract_stack(sys._getframe(1))  # type: ignore[attr-defined]
            return slow
        handle = _Handle(callback, args, self, context)
        self._ready.append(handle)
        return handle

    def call_at(
        self, when: float, callback: Callable[[*Ts], object], *args: *Ts, context: Context | None = None
    ) -> asyncio.TimerHandle:
        timer = _Timer(when, callback, args, self, context)
        if self._debug or self._closed:
            self._check_closed()  # type: ignore[attr-defined]
            timer._source_traceback = extract_stack(sys._getframe(1))
        self._timers += 1
        heappush(self._scheduled, (when, self._timers, timer))
        return timer

    def time(self) -> float:
        return self.jumping.time

    def run_forever(self) -> None:
        _running.loop = self
        try:
            super().run_forever()
        finally:
            _running.loop = None

    def _run_once(self) -> None:
        """Turns as asyncio does them, without what only real time needs, until the loop is told to stop."""
        ready, scheduled, jumping = self._ready, self._scheduled, self.jumping
        while True:
            jumping.turns += 1
            while scheduled and scheduled[0][2]._cancelled:
                heappop(scheduled)[2]._scheduled = False
                self._timer_cancelled_count -= 1
            if ready:
                if jumping.turns >= _LOOK_EVERY:
                    self._process_events(jumping.select(0.0))  # type: ignore[attr-defined]
            elif scheduled and jumping.files == 1 and jumping.turns < _LOOK_EVERY and not self._stopping:
                jumping.time = max(jumping.time, scheduled[0][0])
            else:
                timeout = 0.0 if self._stopping else 1.0 if scheduled else None
                self._process_events(jumping.select(timeout))  # type: ignore[attr-defined]
            end = max(jumping.time + self._clock_resolution, nextafter(jumping.time, inf))
            while scheduled and scheduled[0][0] < end:
                timer = heappop(scheduled)[2]
                timer._scheduled = False
                self._timer_cancelled_count -= timer._cancelled
                ready.append(timer)
            for _ in range(len(ready)):  # what these call in turn is for the next turn
                handle = ready.popleft()
                if not handle._cancelled:
                    handle._run()
            if self._stopping:
                return

    def _timer_handle_cancelled(self, handle: asyncio.TimerHandle) -> None:
        """asyncio tells of each before it marks it. Those marked leave the heap once they are more than half of it; one
        at its head leaves it in its turn."""
        scheduled = self._scheduled
        if handle._scheduled:  # type: ignore[attr-defined]
            if self._timer_cancelled_count > max(_SWEEP_FROM, len(scheduled) // 2):
                scheduled[:] = [item for item in scheduled if not item[2]._cancelled]
                heapify(scheduled)
                self._timer_cancelled_count = 0
            self._timer_cancelled_count += 1

    def has_ready(self) -> bool:
        """Something can run at once."""
        return bool(self._ready)

    def next_due(self) -> float:
        """The time of the next timer."""
        return self._scheduled[0][0]


def is_virtual() -> bool:
    """Whether the running loop, if any, is on virtual time."""
    return _running.loop is not None


def run_virtual(main: Coroutine[Any, Any, T]) -> T:
    """Runs `main` to its end on a fresh virtual loop.

    Futures, tasks and rollouts point at each other, so much is collected only in passes; they are made rarer meanwhile
    (a sixth of the time of a large simulation was spent on looking through what lives on anyway).
    """
    usual = gc.get_threshold()
    gc.set_threshold(50_000, 20, 100)
    try:
        with asyncio.Runner(loop_factory=VirtualLoop) as runner:
            return runner.run(main)
    finally:
        gc.set_threshold(*usual)
