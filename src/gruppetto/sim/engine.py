"""A simulated engine: slots, a decode step whose time grows with the batch, and one timer however many rollouts run.

Owns no tokens: lengths come from a function of the request, ids are a `range`. Promises the engine contract on a
virtual clock: partial tokens on abort, versions per token across a swap, every call ends, same seed same run.
Time of one decode step with b rows is `base_s + row_s * b`. All running rows advance together, so the engine counts
decode steps and a row is two numbers on that count, where it came in and where it ends: O(log rows) a rollout.
"""

from __future__ import annotations

import asyncio
import math
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush

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
        if isinstance(index, slice):
            return Zeros(len(range(self._n)[index]))
        range(self._n)[index]  # refuses an index past the end, which is what ends an iteration
        return 0.0


@dataclass(slots=True, eq=False)
class _Row:
    rid: str
    future: asyncio.Future[GenerateResult]
    target: int
    """Tokens it will make in this call."""
    stops: bool
    """It ends by itself there, not by its budget."""
    begin: int = 0
    """The engine's decode steps when it came in."""


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
        self._ends: list[tuple[int, int, _Row]] = []
        """Heap of (decode step at which it ends, entry number, row); rows that left early stay in it until they top."""
        self._entries = 0
        self._waiting: OrderedDict[str, _Row] = OrderedDict()
        self._swaps: list[tuple[int, int]] = [(0, 0)]
        """(decode steps when it was committed, version), ascending."""
        self._update: int | None = None
        self._paused = False
        self._dead: str | None = None
        self._since = 0.0
        self._timer: asyncio.TimerHandle | None = None
        self._turn_due: asyncio.Handle | None = None
        self._steps = 0
        self._tokens = 0
        self._busy_s = 0.0
        self._batch_steps: dict[int, int] = {}

    async def start(self) -> None:
        self._since = now()

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        self._check_alive()
        if request.rid in self._running or request.rid in self._waiting:
            raise EngineError(self.name, f"request {request.rid} is already here")
        left = max(1, self._length_of(request) - request.made)
        budget = request.sampling.max_tokens
        loop = asyncio.get_running_loop()
        row = _Row(request.rid, loop.create_future(), min(left, budget), left <= budget)
        self._waiting[row.rid] = row
        if self._turn_due is None:  # one turn for all that come in at the same instant
            self._turn_due = loop.call_soon(self._turn)
        return await row.future

    async def abort(self, rid: str | None = None) -> int:
        self._check_alive()
        self._turn()
        rows = [*self._running.values(), *self._waiting.values()] if rid is None else self._find(rid)
        for row in rows:
            self._leave(row, EngineFinish.ABORT)
        self._turn()
        return len(rows)

    async def pause(self, mode: PauseMode) -> None:
        if mode == "abort":
            await self.abort()
        self._turn()
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
        self._swaps.append((self._steps, version))
        self._update = None

    def stats(self) -> EngineStats:
        self._catch_up()
        return EngineStats(
            version=self._swaps[-1][1],
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
        for row in (*self._running.values(), *self._waiting.values()):
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

    def _find(self, rid: str) -> list[_Row]:
        row = self._running.get(rid) or self._waiting.get(rid)
        return [row] if row else []

    def _step_s(self) -> float:
        return self._base_s + self._row_s * len(self._running)

    def _catch_up(self) -> None:
        """Books the whole decode steps that fit between the last look and now."""
        if not self._running or self._paused:
            self._since = now()
            return
        steps = math.floor((now() - self._since) / self._step_s() + 1e-6)
        steps = min(steps, self._steps_to_next_end())
        if steps <= 0:
            return
        rows = len(self._running)
        self._since += steps * self._step_s()
        self._busy_s += steps * self._step_s()
        self._steps += steps
        self._tokens += steps * rows
        self._batch_steps[rows] = self._batch_steps.get(rows, 0) + steps

    def _steps_to_next_end(self) -> int:
        """Decode steps until the first running row ends. There is at least one."""
        while self._running.get(self._ends[0][2].rid) is not self._ends[0][2]:
            heappop(self._ends)
        return self._ends[0][0] - self._steps

    def _turn(self) -> None:
        """Catches up, lets finished rows go and waiting ones in, and sets the one timer."""
        if self._turn_due is not None:
            self._turn_due.cancel()
            self._turn_due = None
        self._catch_up()
        while self._running and self._steps_to_next_end() <= 0:
            row = heappop(self._ends)[2]
            self._leave(row, EngineFinish.STOP if row.stops else EngineFinish.LENGTH)
        while self._waiting and len(self._running) < self._slots and not self._paused:
            self._admit(self._waiting.popitem(last=False)[1])
        self._schedule()

    def _admit(self, row: _Row) -> None:
        row.begin = self._steps
        self._running[row.rid] = row
        self._entries += 1
        heappush(self._ends, (row.begin + row.target, self._entries, row))

    def _leave(self, row: _Row, finish: EngineFinish) -> None:
        """Takes the row off the engine and returns what it made, cut where the weights changed."""
        segments = self._segments(row) if self._running.pop(row.rid, None) else ()
        self._waiting.pop(row.rid, None)
        if not row.future.done():
            row.future.set_result(GenerateResult(rid=row.rid, segments=segments, finish=finish, stop=None))

    def _segments(self, row: _Row) -> tuple[Segment, ...]:
        segments, first = [], bisect_right(self._swaps, (row.begin, math.inf)) - 1
        ends = [step for step, _ in self._swaps[first + 1 :]] + [self._steps]
        begin = row.begin
        for (_, version), end in zip(self._swaps[first:], ends, strict=True):
            if end > begin:
                ids = range(begin - row.begin, end - row.begin)
                segments.append(Segment(TokenKind.MODEL, version, ids, Zeros(end - begin)))
            begin = end
        return tuple(segments)

    def _schedule(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        if self._running and not self._paused:
            due = self._since + self._steps_to_next_end() * self._step_s()
            self._timer = asyncio.get_running_loop().call_at(due, self._turn)
