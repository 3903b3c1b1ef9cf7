"""A simulated engine: slots, a decode step whose time grows with the batch, and one timer however many rollouts run.

Owns no tokens: lengths come from a function of the request, ids are a `range`. Promises the engine contract on a
virtual clock: partial tokens on abort, versions per token across a swap, every call ends, same seed same run.
Time of one decode step with b rows is `base_s + row_s * b`; all running rows advance together.
"""

from __future__ import annotations

import asyncio
import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from gruppetto.clock import now
from gruppetto.engines.base import (
    Capabilities,
    Engine,
    EngineFinish,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    MemoryTag,
    PauseMode,
)
from gruppetto.errors import EngineError
from gruppetto.types import Segment, TokenKind
from gruppetto.weights.base import Bucket

LengthOf = Callable[[GenerateRequest], int]
"""Model tokens the whole rollout would make before it stops by itself (those already `made` included)."""


class Zeros(Sequence[float]):
    """`n` logprobs of 0.0 that take no memory."""

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int | slice) -> float | Zeros:  # type: ignore[override]
        return 0.0 if isinstance(index, int) else Zeros(len(range(*index.indices(self._n))))


@dataclass(slots=True, eq=False)
class _Row:
    request: GenerateRequest
    future: asyncio.Future[GenerateResult]
    target: int
    stops: bool
    made: int = 0
    spans: list[tuple[int, int]] = field(default_factory=list)
    """(version, tokens) runs."""


class SimEngine(Engine):
    """`length_of` decides where a rollout stops; the rest is arithmetic on the loop's clock."""

    def __init__(
        self,
        name: str,
        *,
        slots: int,
        length_of: LengthOf,
        context: int = 1 << 20,
        base_s: float = 1.0,
        row_s: float = 0.0,
    ) -> None:
        self.name = name
        self.capabilities = Capabilities(keep_kv_on_pause=True, context=context)
        self._slots, self._length_of = slots, length_of
        self._base_s, self._row_s = base_s, row_s
        self._running: dict[str, _Row] = {}
        self._waiting: deque[_Row] = deque()
        self._version = 0
        self._update: int | None = None
        self._paused = False
        self._dead: str | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._steps = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._batch_steps: dict[int, int] = {}

    async def start(self) -> None:
        self._since = now()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_alive()
        left = max(1, self._length_of(request) - request.made)
        budget = request.sampling.max_tokens
        row = _Row(request, asyncio.get_running_loop().create_future(), min(left, budget), left <= budget)
        self._waiting.append(row)
        self._turn()
        return await row.future

    async def abort(self, rid: str | None = None) -> int:
        self._check_alive()
        self._catch_up()
        rows = [r for r in (*self._running.values(), *self._waiting) if rid in (None, r.request.rid)]
        for row in rows:
            self._leave(row, EngineFinish.ABORT)
        self._turn()
        return len(rows)

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            await self.abort()
        self._catch_up()
        self._paused = True
        self._schedule()

    async def resume(self) -> None:
        self._paused = False
        self._since = now()
        self._turn()

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        return

    async def restore_memory(self, tags: Sequence[MemoryTag]) -> None:
        return

    async def begin_update(self, version: int) -> None:
        self._check_alive()
        if not self._paused:
            raise EngineError(self.name, f"update to version {version} while it is not paused")
        self._update = version

    async def load_bucket(self, bucket: Bucket) -> None:
        self._check_alive()

    async def commit_update(self, version: int, num_buckets: int) -> None:
        if version != self._update:
            raise EngineError(self.name, f"commit of version {version}, but {self._update} was begun")
        self._version, self._update = version, None

    def stats(self) -> EngineStats:
        return EngineStats(
            version=self._version,
            running=len(self._running),
            waiting=len(self._waiting),
            slots=self._slots,
            kv_tokens=0,
            kv_capacity=0,
            decode_steps_total=self._steps,
            decode_tokens_total=self._tokens,
            prefill_tokens_total=0,
            decode_s_total=self._busy_s,
            batch_steps=dict(self._batch_steps),
        )

    def kill(self, why: str) -> None:
        """The engine dies: every call fails, tokens that were not returned are lost."""
        self._dead = why
        for row in (*self._running.values(), *self._waiting):
            if not row.future.done():
                row.future.set_exception(EngineError(self.name, why))
        self._running.clear()
        self._waiting.clear()
        self._schedule()

    async def close(self) -> None:
        if self._dead is None:
            await self.abort()

    # -- inside -------------------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise EngineError(self.name, self._dead)

    def _step_s(self) -> float:
        return self._base_s + self._row_s * len(self._running)

    def _catch_up(self) -> None:
        """Books the whole decode steps that fit between the last look and now."""
        if not self._running or self._paused:
            self._since = now()
            return
        steps = math.floor((now() - self._since) / self._step_s() + 1e-6)
        steps = min(steps, min(row.target - row.made for row in self._running.values()))
        if steps <= 0:
            return
        self._since += steps * self._step_s()
        self._busy_s += steps * self._step_s()
        self._steps += steps
        self._tokens += steps * len(self._running)
        self._batch_steps[len(self._running)] = self._batch_steps.get(len(self._running), 0) + steps
        for row in self._running.values():
            row.made += steps
            if row.spans and row.spans[-1][0] == self._version:
                row.spans[-1] = (self._version, row.spans[-1][1] + steps)
            else:
                row.spans.append((self._version, steps))

    def _turn(self) -> None:
        """Catches up, lets finished rows go and waiting ones in, and sets the one timer."""
        self._catch_up()
        for row in [r for r in self._running.values() if r.made >= r.target]:
            self._leave(row, EngineFinish.STOP if row.stops else EngineFinish.LENGTH)
        while self._waiting and len(self._running) < self._slots and not self._paused:
            row = self._waiting.popleft()
            self._running[row.request.rid] = row
        self._schedule()

    def _leave(self, row: _Row, finish: EngineFinish) -> None:
        if self._running.pop(row.request.rid, None) is None:
            self._waiting.remove(row)
        segments, start = [], 0
        for version, count in row.spans:
            segments.append(Segment(TokenKind.MODEL, version, range(start, start + count), Zeros(count)))
            start += count
        if not row.future.done():
            row.future.set_result(
                GenerateResult(rid=row.request.rid, segments=tuple(segments), finish=finish, stop=None)
            )

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused:
            steps = min(row.target - row.made for row in self._running.values())
            loop = asyncio.get_running_loop()
            self._timer = loop.call_at(self._since + steps * self._step_s(), self._turn)
