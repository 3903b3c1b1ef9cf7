"""The crossing between the event loop and the engine's thread.

Commands go over in a queue and are run between steps, in order; answers come back by `call_soon_threadsafe`, in order.
Promises: a command waits for one step at most; an exception that is not the caller's fault ends the thread, and then
every outstanding and later command fails with an `EngineError` that names the cause. Nothing waits for a dead thread,
and `close` waits `CLOSE_S` for one that hangs: it is a daemon and ends with the process.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import queue
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from typing import Any, TypeVar

from gruppetto.engines.base import GenerateResult
from gruppetto.engines.embedded.serving import Serving
from gruppetto.errors import EngineError, GruppettoError, UserError

log = logging.getLogger(__name__)

CLOSE_S = 5.0
"""Seconds that `close` waits for the step under way; many steps, so that only a thread that hangs is left behind."""

T = TypeVar("T")
Results = Callable[[list[GenerateResult], int], None]
"""Called on the event loop with the requests that ended, and the number of the advance that ended, or 0."""


class EngineThread:
    """Runs one `Serving`. `build` makes it on the thread; `on_results` and `on_death` are called on `loop`."""

    def __init__(
        self, name: str, build: Callable[[], Serving], on_results: Results, on_death: Callable[[GruppettoError], None]
    ) -> None:
        self._name, self._build = name, build
        self._on_results, self._on_death = on_results, on_death
        self._loop = asyncio.get_running_loop()
        self._commands: queue.SimpleQueue[tuple[Callable[[Serving], Any], asyncio.Future[Any] | None]]
        self._commands = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._ended: GruppettoError | None = None
        self._stopping = False
        self.serving: Serving | None = None
        self._done: Future[None] = Future()
        self._thread = threading.Thread(target=self._main, name=f"engine-{name}", daemon=True)
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Nothing of it runs any more."""
        return self._done.done()

    def check(self) -> None:
        """Raises what the thread ended with, if it has."""
        if self._ended is not None:
            raise self._ended

    def post(self, call: Callable[[Serving], None]) -> None:
        """Runs `call` between steps. Raises `EngineError` when the thread has ended."""
        with self._lock:
            self.check()
            self._commands.put((call, None))

    async def ask(self, call: Callable[[Serving], T]) -> T:
        """Runs `call` between steps and returns what it returns, or raises what it raises."""
        answer: asyncio.Future[T] = self._loop.create_future()
        with self._lock:
            self.check()
            self._commands.put((call, answer))
        return await answer

    def tell(self, results: list[GenerateResult], advanced: int = 0) -> None:
        """Brings results to the event loop. Called on the thread, also by commands that end requests."""
        self._on_loop(self._on_results, results, advanced)

    async def close(self) -> None:
        """Ends the thread after the commands before this; may be called twice. One that hangs is left behind."""
        with contextlib.suppress(GruppettoError):
            self.post(self._stop)
        # no executor: asyncio.run would join its thread, which would wait for the one that hangs
        await asyncio.wait([asyncio.wrap_future(self._done)], timeout=CLOSE_S)
        if self._done.done():
            self._thread.join()
        elif not self._stopping:
            self._stopping = True
            log.warning("engine %s: its thread did not end within %g s and is left behind", self._name, CLOSE_S)
            self._end(EngineError(self._name, f"hangs: its thread did not end within {CLOSE_S:g} s"))

    def _stop(self, serving: Serving) -> None:
        self.tell(serving.core.abort())
        self._stopping = True

    def _main(self) -> None:
        try:
            self.serving = serving = self._build()
            while not self._stopping:
                self._run_commands(serving, wait=not serving.ready())
                results, advanced = serving.turn()
                if results or advanced:
                    self.tell(results, advanced)
            self._end(EngineError(self._name, "is closed"))
        except UserError as error:
            self._end(error)
        except BaseException as error:
            cause = error if isinstance(error, EngineError) else None
            self._end(cause or EngineError(self._name, f"its thread died of {type(error).__name__}: {error}"))
        finally:
            self._done.set_result(None)

    def _run_commands(self, serving: Serving, wait: bool) -> None:
        while not self._stopping:
            try:
                call, answer = self._commands.get(block=wait)
            except queue.Empty:
                return
            wait = False
            self._run_command(serving, call, answer)

    def _run_command(
        self, serving: Serving, call: Callable[[Serving], Any], answer: asyncio.Future[Any] | None
    ) -> None:
        try:
            value = call(serving)
        except GruppettoError as error:
            if answer is None:
                raise
            self._on_loop(_fail, answer, error)
            return
        except BaseException as error:
            if answer is not None:
                self._on_loop(_fail, answer, EngineError(self._name, f"{type(error).__name__}: {error}"))
            raise
        if answer is not None:
            self._on_loop(_answer, answer, value)

    def _end(self, error: GruppettoError) -> None:
        """No command can be posted after this; those in the queue and all calls fail."""
        with self._lock:
            self._ended = self._ended or error
        self.serving = None
        for answer in self._unanswered():
            self._on_loop(_fail, answer, error)
        self._on_loop(self._on_death, error)

    def _unanswered(self) -> Iterator[asyncio.Future[Any]]:
        """Empties the queue; its callers' futures."""
        with contextlib.suppress(queue.Empty):
            while True:
                _, answer = self._commands.get_nowait()
                if answer is not None:
                    yield answer

    def _on_loop(self, call: Callable[..., object], *args: Any) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            self._loop.call_soon_threadsafe(call, *args)


def _answer(future: asyncio.Future[T], value: T) -> None:
    if not future.done():
        future.set_result(value)


def _fail(future: asyncio.Future[Any], error: Exception) -> None:
    if not future.done():
        future.set_exception(error)
