"""The parts of one server, and how a set of requests is run for an HTTP call.

Promises: a client that leaves takes its requests with it; every request of an HTTP call has ended, or been aborted,
when the call is over.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from gruppetto.clock import now
from gruppetto.engines.base import EngineFinish
from gruppetto.engines.serve.calls import Call, Calls
from gruppetto.engines.serve.control import Control
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.served import ServedEngine
from gruppetto.engines.serve.settings import ModelCard, ServeSettings
from gruppetto.engines.serve.text import ChatTokenizer
from gruppetto.engines.serve.totals import Totals
from gruppetto.engines.serve.updates import WeightUpdates
from gruppetto.errors import UserError
from gruppetto.rng import Stream


class Rate:
    """Tokens a second, of the last few seconds in which somebody asked."""

    SHORTEST_S = 1.0

    def __init__(self) -> None:
        self._at, self._count, self._value = now(), 0, 0.0

    def of(self, count: int) -> float:
        """Told how many tokens there are in all."""
        seconds = now() - self._at
        if seconds >= self.SHORTEST_S:
            self._value = (count - self._count) / seconds
            self._at, self._count = now(), count
        return self._value


@dataclass(slots=True, kw_only=True)
class Hub:
    """What handlers need. `tokenizer` is None when only token ids come and go."""

    settings: ServeSettings
    card: ModelCard
    engine: ServedEngine
    tokenizer: ChatTokenizer | None
    calls: Calls
    control: Control
    updates: WeightUpdates
    totals: Totals
    seeds: Stream
    begin_s: float
    served_name: str
    rate: Rate
    startup_s: float = 0.0
    http_active: int = 0

    def new_seed(self) -> int:
        """For a request that names none."""
        return self.seeds.getrandbits(63)

    async def encode(self, texts: Sequence[str], name: str) -> list[Sequence[int]]:
        """Token ids of texts; others get their turn between two. Raises `Refusal` for one that cannot fit."""
        if self.tokenizer is None:
            raise Refusal(
                f"{name} as text needs a tokenizer, which --skip-tokenizer-init left out; send ids", param=name
            )
        found: list[Sequence[int]] = []
        for text in texts:
            self.check_length(len(text), name)
            found.append(self.tokenizer.encode(text))
            await asyncio.sleep(0)
        return found

    def check_length(self, chars: int, name: str) -> None:
        """Raises `Refusal` for more characters than a context can hold."""
        most = self.card.context * self.settings.limits.chars_a_token
        if chars > most:
            raise Refusal(f"{name} has {chars} characters; send at most {most}", param=name)

    async def finish(self, calls: Sequence[Call]) -> None:
        """Runs requests to their end. Raises `Refusal` when one ended as an error."""
        async for _ in self.follow(calls):
            pass
        for call in calls:
            raise_failure(call)

    async def follow(self, calls: Sequence[Call]) -> AsyncGenerator[Call]:
        """Runs requests; yields one whenever it has made more (where it has `on_move`), and when it has ended."""
        self.control.admit()
        self.calls.register(calls)
        moved: dict[str, Call] = {}
        news = asyncio.Event()

        def note(call: Call) -> None:
            moved[call.rid] = call
            news.set()

        streamed = any(call.on_move is not None for call in calls)
        tasks = []
        for call in calls:
            call.on_move = note if streamed else None
            task = asyncio.create_task(self.calls.run(call))
            task.add_done_callback(partial(_note_end, note, call))
            tasks.append(task)
        left = {call.rid for call in calls}
        try:
            while left:
                await news.wait()
                news.clear()
                batch = list(moved.values())
                moved.clear()
                for call in batch:
                    if call.rid not in left:
                        continue
                    if call.ended:
                        left.remove(call.rid)
                    yield call
        finally:
            await _end(tasks)
            for call in calls:
                self.calls.forget(call)


def _note_end(note: Callable[[Call], None], call: Call, _: asyncio.Task[None]) -> None:
    note(call)


async def _end(tasks: Sequence[asyncio.Task[None]]) -> None:
    open_tasks = [task for task in tasks if not task.done()]
    for task in open_tasks:
        task.cancel()
    if open_tasks:
        with contextlib.suppress(asyncio.CancelledError):
            await asyncio.gather(*open_tasks, return_exceptions=True)


def raise_failure(call: Call) -> None:
    """Raises `Refusal` for a request that failed, or was aborted with an HTTP status."""
    if isinstance(call.error, UserError):
        raise Refusal(str(call.error))
    if call.error is not None:
        raise Refusal(str(call.error), 500)
    if call.finish is EngineFinish.ABORT and call.abort is not None and call.abort.status is not None:
        raise Refusal(f"request {call.rid}: {call.abort.message}", call.abort.status)


def new_rid(prefix: str = "") -> str:
    """A rid nobody else has."""
    return prefix + uuid.uuid4().hex
