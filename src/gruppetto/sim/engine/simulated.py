"""`SimEngine`: the engine contract over a `Clockwork`, on the event loop's time, with one timer however much runs.

Owns no tokens: lengths come from a function of the request, ids are a `range`, and of `token_ids` only the length is
looked at. Promises, besides those of `engines.base`: same requests at the same times, same results; requests that come
in at the same instant are taken in together, in their order. Cancelling a `generate` call aborts its request; whoever
cancels the future of a `submit` calls `abort` as well.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from typing import Literal

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
from gruppetto.ledger.engine import EngineModel
from gruppetto.sim.engine.clockwork import NEVER, Clockwork
from gruppetto.sim.engine.rows import PooledKV, Row
from gruppetto.weights.base import Bucket

_NO_STEPS: Mapping[int, int] = {}
_NO_SECONDS: Mapping[int, float] = {}

PromptOf = Callable[[GenerateRequest], tuple[int, int]]
"""Whose prompt a request begins with, and the tokens of that."""

LengthOf = Callable[[GenerateRequest], int]
"""Model tokens the whole rollout has made where this call stops by itself (those already `made` included)."""


class SimEngine(Engine):
    """`length_of` decides where a call stops; `model` what everything costs; the rest is arithmetic.

    With `prompt_of` the rows of a group share their prompt's KV, and its prefill.
    Without a `model` the engine has `slots`, a decode step of `base_s + rows * row_s`, and prefill and KV for free.
    """

    def __init__(
        self,
        name: str,
        *,
        length_of: LengthOf,
        model: EngineModel | None = None,
        slots: int = 1,
        context: int = 1 << 20,
        base_s: float = 1.0,
        row_s: float = 0.0,
        kv_on_swap: Literal["keep", "recompute"] = "recompute",
        prompt_of: PromptOf | None = None,
    ) -> None:
        self.name = name
        self.capabilities = Capabilities(keep_kv_on_pause=True, context=context)
        self.model = model or EngineModel(slots=slots, base_s=base_s, row_s=row_s)
        self._length_of, self._prompt_of = length_of, prompt_of
        self._clockwork = Clockwork(self.model, keep_on_swap=kv_on_swap == "keep")
        self._here: dict[str, Row] = {}
        self._entering: list[Row] = []
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_due = NEVER
        self._turn_due: asyncio.Handle | None = None
        self._update: int | None = None
        self._paused = False
        self._hung: asyncio.Event | None = None
        self._dead: str | None = None

    async def start(self) -> None:
        self._clock()

    # -- requests -----------------------------------------------------------------------------------------------------

    def submit(self, request: GenerateRequest) -> asyncio.Future[GenerateResult]:
        """`generate` without a task: the future of its result. Raises `EngineError` as `generate` does."""
        rid = request.rid
        if self._dead is not None:
            raise EngineError(self.name, self._dead)
        if rid in self._here:
            raise EngineError(self.name, f"request {rid} is already here")
        loop = self._loop or self._clock()
        left = self._length_of(request) - request.made
        if left < 1:
            left = 1
        budget = request.sampling.max_tokens
        future: asyncio.Future[GenerateResult] = loop.create_future()
        row = Row(rid, future, min(left, budget), left <= budget, len(request.token_ids))
        if self._prompt_of is not None:
            row.group, row.prompt = self._prompt_of(request)
        self._here[rid] = row
        self._entering.append(row)
        if self._turn_due is None:  # one turn for all that come in at the same instant
            self._turn_due = loop.call_soon(self._turn)
        return future

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        if self._hung is not None:
            await self._hung.wait()
        future = self.submit(request)
        try:
            return await future
        except asyncio.CancelledError:
            self._stop([row for row in self._find(request.rid) if row.future is future])
            raise

    async def abort(self, rid: str | None = None) -> int:
        await self._answering()
        return self._stop(list(self._here.values()) if rid is None else self._find(rid))

    def held(self, rid: str) -> int:
        """Context tokens of a request whose KV is on this engine, live or left behind: they need no prefill here."""
        self._run()
        return self._clockwork.held(rid)

    @property
    def idle_kv(self) -> int:
        """Context tokens of requests that have left; they make room when it is needed."""
        self._run()
        return self._clockwork.idle.total

    # -- pauses, memory, weights --------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        await self._answering()
        if mode == "abort":
            self._stop(list(self._here.values()))
        self._paused = True
        self._turn()
        self._clockwork.freeze()
        self._schedule()

    async def resume(self) -> None:
        await self._answering()
        self._paused = False
        self._run()
        self._clockwork.thaw()
        self._turn(changed=True)

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._answering()
        if "kv" in tags:
            self._clockwork.idle.clear()

    async def restore_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._answering()

    async def begin_update(self, version: int) -> None:
        await self._answering()
        if not self._paused:
            raise EngineError(self.name, f"update to version {version} while it is not paused")
        self._update = version

    async def load_bucket(self, bucket: Bucket) -> None:
        await self._answering()

    async def commit_update(self, version: int, num_buckets: int) -> None:
        await self._answering()
        if version != self._update:
            raise EngineError(self.name, f"commit of version {version}, but {self._update} was begun")
        if self.model.swap_s:
            await asyncio.sleep(self.model.swap_s * self._clockwork.scale)
            await self._answering()
        self._turn()
        self._clockwork.swap(version, self._clock().time())
        self._update = None

    # -- what may go wrong --------------------------------------------------------------------------------------------

    def kill(self, why: str) -> None:
        """The engine dies: every call fails, tokens that were not returned are lost. `stats` stays as it was last."""
        self._run()
        self._dead = why
        self._clockwork.take_out(list(self._here.values()), self._clock().time())
        for row in self._here.values():
            if row.future is not None and not row.future.done():
                row.future.set_exception(EngineError(self.name, why))
        self._here.clear()
        self._entering.clear()
        self._clockwork.freeze()
        self._schedule()
        if self._hung is not None:
            self._hung.set()

    def slow(self, factor: float) -> None:
        """Everything takes `factor` times what the model says from now on (1 = as the model says)."""
        self._turn()
        self._clockwork.slow(factor, self._clock().time())
        self._schedule()

    def hang(self) -> None:
        """Stops and answers nothing, neither requests nor aborts, until `unhang`."""
        if self._hung is None and self._dead is None:
            self._turn()
            self._hung = asyncio.Event()
            self._clockwork.freeze()
            self._schedule()

    def unhang(self) -> None:
        """Goes on where it hung, and answers what was asked meanwhile."""
        if self._hung is not None:
            self._run()
            self._hung.set()
            self._hung = None
            if not self._paused and self._dead is None:
                self._clockwork.thaw()
                self._turn(changed=True)

    async def close(self) -> None:
        if self._dead is None:
            self._stop(list(self._here.values()))

    def stats(self) -> EngineStats:
        self._run()
        return self._snapshot(*self._clockwork.meters.batches())

    def totals(self) -> EngineStats:
        self._run()
        return self._snapshot(_NO_STEPS, _NO_SECONDS)

    def _snapshot(self, batch_steps: Mapping[int, int], batch_s: Mapping[int, float]) -> EngineStats:
        work, meters = self._clockwork, self._clockwork.meters
        return EngineStats(
            version=work.swaps[-1][1],
            running=len(work.running),
            waiting=len(self._here) - len(work.running),
            slots=self.model.slots,
            kv_tokens=work.kv_held,
            kv_capacity=self.model.kv_capacity,
            decode_steps_total=work.steps,
            decode_tokens_total=meters.tokens,
            prefill_tokens_total=meters.prefill_tokens,
            decode_s_total=meters.decode_s,
            prefill_s_total=meters.prefill_s,
            batch_steps=batch_steps,
            batch_s=batch_s,
            kv_wait_row_s=meters.kv_wait_row_s,
            preemptions_total=meters.preemptions,
            cached_tokens_total=meters.cached_tokens,
            paused_s=meters.paused_s,
        )

    # -- inside -------------------------------------------------------------------------------------------------------

    def _clock(self) -> asyncio.AbstractEventLoop:
        """The loop whose time this engine lives on: that of its first call."""
        if self._loop is None:
            self._loop = asyncio.get_running_loop()
            self._clockwork.begin_at(self._loop.time())
        return self._loop

    async def _answering(self) -> None:
        while self._hung is not None and self._dead is None:
            await self._hung.wait()
        if self._dead is not None:
            raise EngineError(self.name, self._dead)

    def _find(self, rid: str) -> list[Row]:
        row = self._here.get(rid)
        return [] if row is None else [row]

    def _stop(self, rows: list[Row]) -> int:
        """Sends rows back with what they have made."""
        if rows and self._dead is None:
            self._turn()  # some may end by themselves at this very moment
            self._clockwork.take_out([row for row in rows if self._here.get(row.rid) is row], self._clock().time())
            for row in rows:
                if self._here.get(row.rid) is row:
                    self._hand_back(row, EngineFinish.ABORT)
            self._turn(changed=True)
        return len(rows)

    def _run(self) -> None:
        """Plays the time since the last look. An engine that died, or that has no loop yet, has none."""
        if self._loop is not None and self._dead is None:
            self._clockwork.run(self._loop.time())
            if self._clockwork.out:
                self._deliver()

    def _turn(self, changed: bool = False) -> None:
        """Plays the time since the last look, takes in who has come, and sets the one timer."""
        if self._turn_due is not None:
            self._turn_due.cancel()
            self._turn_due = None
        if self._dead is not None:
            return
        now, work = (self._loop or self._clock()).time(), self._clockwork
        work.run(now)
        if work.out:
            self._deliver()
        if self._entering:
            entering, self._entering = self._entering, []
            work.enter(entering, now)
            changed = True
        if changed:
            work.settle(now)
        self._schedule()

    def _deliver(self) -> None:
        out, self._clockwork.out = self._clockwork.out, []
        for row, finish in out:
            self._hand_back(row, finish)

    def _hand_back(self, row: Row, finish: EngineFinish) -> None:
        del self._here[row.rid]
        if row.future is not None and not row.future.done():
            row.future.set_result(GenerateResult(rid=row.rid, segments=row.parts, finish=finish, stop=None))

    def _schedule(self) -> None:
        due = NEVER if self._dead is not None else self._clockwork.next_due
        if self._timer is not None:
            if self._timer_due == due:
                return
            self._timer.cancel()
            self._timer = None
        if due < NEVER:
            self._timer, self._timer_due = (self._loop or self._clock()).call_at(due, self._on_timer), due

    def _on_timer(self) -> None:
        self._timer = None
        self._turn()


def share_kv(engines: Sequence[SimEngine]) -> None:
    """Gives engines that have not begun one pool for the KV of rollouts that left."""
    pool = PooledKV()
    for engine in engines:
        engine._clockwork.idle = pool
