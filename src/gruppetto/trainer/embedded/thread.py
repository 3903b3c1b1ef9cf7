"""The trainer's own thread: one call at a time, in order, never on the event loop.

Promises: a call that waits and is cancelled is never begun; `close` drops what waits, gives the call under way
`CLOSE_S`, then leaves it behind: the thread is a daemon, so that one call that hangs cannot hold the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any, TypeVar

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that `close` waits for the call under way."""

T = TypeVar("T")


class CallThread:
    """Runs functions one after another on a daemon thread, which begins with the first call."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._calls: queue.SimpleQueue[tuple[Callable[[], Any], Future[Any]] | None] = queue.SimpleQueue()
        self._thread: threading.Thread | None = None
        self._done: Future[None] = Future()

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What `function` returns or raises. Cancelling leaves a call that has begun to itself."""
        if self._thread is None:
            self._thread = threading.Thread(target=self._main, name=self._name, daemon=True)
            self._thread.start()
        result: Future[T] = Future()
        self._calls.put((functools.partial(function, *arguments), result))
        return await asyncio.wrap_future(result)

    async def close(self) -> None:
        """Ends the thread after the call under way; may be called twice."""
        if self._thread is None:
            return
        self._drop_waiting()
        self._calls.put(None)
        await asyncio.wait([asyncio.wrap_future(self._done)], timeout=CLOSE_S)
        if self._done.done():
            self._thread.join()
        else:
            log.warning("%s: its thread did not end within %g s and is left behind", self._name, CLOSE_S)

    def _drop_waiting(self) -> None:
        with contextlib.suppress(queue.Empty):
            while True:
                if (call := self._calls.get_nowait()) is not None:
                    call[1].cancel()

    def _main(self) -> None:
        while (call := self._calls.get()) is not None:
            function, result = call
            if result.set_running_or_notify_cancel():
                _settle(function, result)
            del call, function, result  # an idle thread holds no samples
        self._done.set_result(None)


def _settle(function: Callable[[], T], result: Future[T]) -> None:
    try:
        value = function()
    except BaseException as error:
        result.set_exception(error)
    else:
        result.set_result(value)
