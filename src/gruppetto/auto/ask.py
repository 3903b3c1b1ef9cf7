"""Who answers a question about the next steps: this process, on virtual time, or another one beside the trainer."""

from __future__ import annotations

import asyncio
import multiprocessing
import os
import threading
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import BrokenExecutor, ProcessPoolExecutor

from gruppetto.auto.forecast import Forecast, Question, forecast_all
from gruppetto.scheduler.policies.composed import Composed

Ask = Callable[[Question, Sequence[Composed], int, int], Awaitable[list[Forecast]]]
"""(question, candidates, steps to forecast, steps to leave out before them) -> one forecast a candidate."""


async def ask_here(question: Question, candidates: Sequence[Composed], steps: int, skip: int) -> list[Forecast]:
    """At once, which on virtual time takes none."""
    return forecast_all(question, candidates, steps, skip)


class AskBeside:
    """A process of its own, started with the first question: the engines' and the trainer's threads are not held up.

    Promises: it ends with this process, however that ends; where it was killed, the question fails and the next one has
    a new process.
    """

    def __init__(self) -> None:
        self._process: ProcessPoolExecutor | None = None

    async def __call__(
        self, question: Question, candidates: Sequence[Composed], steps: int, skip: int
    ) -> list[Forecast]:
        if self._process is None:
            spawn = multiprocessing.get_context("spawn")
            self._process = ProcessPoolExecutor(1, spawn, initializer=_end_with_parent)
        loop = asyncio.get_running_loop()
        try:
            return await loop.run_in_executor(self._process, forecast_all, question, list(candidates), steps, skip)
        except BrokenExecutor:
            self.close()
            raise

    def close(self) -> None:
        """Ends the process, whatever it is at."""
        if self._process is not None:
            for child in self._process._processes.values():
                child.kill()
            self._process.shutdown(wait=False, cancel_futures=True)
            self._process = None


def _end_with_parent() -> None:
    """A pool's process waits for work for ever where its parent was killed, since it holds both ends of its pipe."""
    threading.Thread(target=_wait_for_parent, name="parent", daemon=True).start()


def _wait_for_parent() -> None:
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)
