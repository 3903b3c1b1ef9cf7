"""`EmbeddedEngine`: the engine contract over a Hugging Face model folder, in this process, on CPU or CUDA.

Promises, besides those of `engines.base`: the event loop never waits for compute; an engine whose thread dies fails
every call with the cause; in lockstep nothing is decoded or delivered between `advance` calls, except by aborts.
A request that reaches the context's end comes back with finish `LENGTH`.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from msgspec import structs

from gruppetto.engines.base import (
    Capabilities,
    Engine,
    EngineStats,
    GenerateRequest,
    GenerateResult,
    MemoryTag,
    PauseMode,
)
from gruppetto.engines.embedded.rows import row_for
from gruppetto.engines.embedded.serving import Serving, load
from gruppetto.engines.embedded.settings import Settings
from gruppetto.engines.embedded.thread import EngineThread
from gruppetto.errors import EngineError, GruppettoError
from gruppetto.types import Segment
from gruppetto.weights.base import Bucket
from gruppetto.weights.channels.base import Served


class EmbeddedEngine(Engine):
    """Continuous batching with per-row positions (see `core`).

    `decode` is the tokenizer's, needed for stop strings only. `deterministic` makes a request's tokens and logprobs
    bitwise independent of its batch-mates, their order, the slot count, and of being parked and resumed (fp32, one
    thread); after `start`, `capabilities.deterministic` tells whether the self-test found this to hold here.
    """

    def __init__(
        self,
        name: str,
        model_path: str | Path,
        *,
        dtype: str = "float32",
        device: str = "auto",
        slots: int,
        context: int,
        admit_batch: int = 4,
        prefill_chunk: int = 256,
        kv_on_swap: Literal["keep", "recompute"] = "recompute",
        deterministic: bool = False,
        lockstep: bool = False,
        decode: Callable[[Sequence[int]], str] | None = None,
        version: int = 0,
    ) -> None:
        self.name = name
        self.capabilities = Capabilities(
            lockstep=lockstep,
            deterministic=deterministic,
            keep_kv_on_pause=True,
            context=context,
            restarts=not lockstep,  # an engine that comes back when it can would make runs differ
        )
        self._settings = Settings(
            name=name,
            slots=slots,
            context=context,
            admit_batch=admit_batch,
            prefill_chunk=prefill_chunk,
            kv_on_swap=kv_on_swap,
            deterministic=deterministic,
            decode=decode,
        )
        self._load = lambda: load(
            self._settings, Path(model_path), dtype=dtype, device=device, lockstep=lockstep, version=version
        )
        self._thread: EngineThread | None = None
        self._calls: dict[str, asyncio.Future[GenerateResult]] = {}
        self._advances: dict[int, asyncio.Future[None]] = {}
        self._advance_count = 0
        self._vocab = 0
        self._last: EngineStats | None = None

    async def start(self) -> None:
        """Loads the model on the engine's thread; in deterministic mode runs the self-test."""
        if self._thread is not None:
            raise EngineError(self.name, "was started before; make a new one")
        self._thread = EngineThread(self.name, self._load, self._on_results, self._on_death)
        self._vocab, invariant = await self._thread.ask(lambda serving: (serving.vocab, serving.invariant))
        self.capabilities = replace(self.capabilities, deterministic=invariant)

    async def restart(self) -> None:
        """The model anew on a thread of its own; counters go on. Raises `EngineError` while the old thread hangs."""
        before = self._started_once()
        with contextlib.suppress(EngineError):
            self.stats()
        await before.close()
        if not before.ended:
            raise EngineError(self.name, "hangs: its thread has not ended, and a second one is not started beside it")
        self._thread = thread = EngineThread(self.name, self._load, self._on_results, self._on_death)
        last = self._last
        if last is not None:
            await thread.ask(lambda serving: serving.core.count_on(last))

    async def generate(self, request: GenerateRequest) -> GenerateResult:
        """Samples until a stop, the budget or an abort. Cancelling the call aborts the request."""
        thread = self._started()
        if request.rid in self._calls:
            raise EngineError(self.name, f"request {request.rid} is already live; a rid is one call at a time")
        has_decode = self._settings.decode is not None
        row_for(request, 0, context=self._settings.context, vocab=self._vocab, has_decode=has_decode)
        thread.post(lambda serving: serving.core.submit(request))
        call: asyncio.Future[GenerateResult] = asyncio.get_running_loop().create_future()
        self._calls[request.rid] = call
        try:
            return await call
        except asyncio.CancelledError:
            with contextlib.suppress(GruppettoError):
                await self.abort(request.rid)
            raise
        finally:
            self._calls.pop(request.rid, None)

    async def abort(self, rid: str | None = None) -> int:
        """Stops one request or all between two steps; 0 when there is nothing to stop."""
        thread = self._started()

        def stop(serving: Serving) -> int:
            results = serving.core.abort(rid)
            thread.tell(results)
            return len(results)

        return await thread.ask(stop)

    async def pause(self, mode: PauseMode) -> None:
        """Holds decoding from the next step on; returns when it is held."""
        thread = self._started()
        await thread.ask(lambda serving: thread.tell(serving.pause(mode)))

    async def resume(self) -> None:
        """Goes on; `EngineError` while weights are not valid or KV is released."""
        await self._started().ask(lambda serving: serving.resume())

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._started().ask(lambda serving: serving.release(tags))

    async def restore_memory(self, tags: Sequence[MemoryTag]) -> None:
        await self._started().ask(lambda serving: serving.restore(tags))

    async def begin_update(self, version: int) -> None:
        await self._started().ask(lambda serving: serving.begin(version))

    async def load_bucket(self, bucket: Bucket) -> None:
        await self._started().ask(lambda serving: serving.weights.load(bucket))

    async def commit_update(self, version: int, num_buckets: int) -> None:
        await self._started().ask(lambda serving: serving.commit(version, num_buckets))

    async def weights(self) -> Served:
        """The tensors themselves, as served or not valid; `EngineError` while they are released."""
        return await self._started().ask(lambda serving: serving.served_weights())

    async def open_weights(self) -> Mapping[str, Any]:
        """The tensors by every name, to be written to in place while paused; `resume` is refused until they are
        closed, or a whole update is committed."""
        return await self._started().ask(lambda serving: serving.open_weights())

    async def close_weights(self, version: int) -> None:
        """What was written is `version`."""
        await self._started().ask(lambda serving: serving.close_weights(version))

    async def progress(self, have: Mapping[str, int]) -> dict[str, tuple[int, tuple[Segment, ...]]]:
        """What live requests have made in this call beyond `have[rid]` tokens, with that number: by rid, only those
        with more. `have` is read on the engine's thread, for requests in slots only."""
        return await self._started().ask(lambda serving: serving.core.progress(have))

    async def flush(self) -> bool:
        """Forgets kept KV; False, and nothing is done, while requests are in slots."""
        return await self._started().ask(lambda serving: serving.flush())

    async def weight_digests(self) -> dict[str, str]:
        """SHA-256 of every tensor's bytes as served, by the model's own name. Takes the engine's time."""
        return await self._started().ask(lambda serving: serving.weights.digests())

    async def advance(self) -> None:
        """Decodes until a request comes back, none is left, or the engine is paused; see `engines.base`."""
        if not self.capabilities.lockstep:
            await super().advance()
        self._advance_count = number = self._advance_count + 1
        self._started().post(lambda serving: serving.advance(number))
        done = self._advances[number] = asyncio.get_running_loop().create_future()
        await done

    def stats(self) -> EngineStats:
        """Counters read from the running thread: each is exact, together they may be one step apart. A dead engine's
        are its last, with the calls that have not been told yet as waiting."""
        serving = self._started_once().serving
        if serving is not None:
            self._last = _snapshot(serving, live=len(self._calls))
        elif self._last is not None:
            self._last = structs.replace(self._last, running=0, waiting=len(self._calls))
        if self._last is None:
            raise EngineError(self.name, "has no statistics: it ended before it served")
        return self._last

    async def close(self) -> None:
        """Ends every call with an abort result and the thread with it."""
        if self._thread is not None:
            await self._thread.close()

    def _started(self) -> EngineThread:
        thread = self._started_once()
        thread.check()
        return thread

    def _started_once(self) -> EngineThread:
        if self._thread is None:
            raise EngineError(self.name, "is not started; await start() first")
        return self._thread

    def _on_results(self, results: list[GenerateResult], advanced: int) -> None:
        for result in results:
            call = self._calls.get(result.rid)
            if call is not None and not call.done():
                call.set_result(result)
        self._end_advances(advanced, None)

    def _on_death(self, error: GruppettoError) -> None:
        for call in self._calls.values():
            if not call.done():
                call.set_exception(error)
        self._end_advances(self._advance_count, error)

    def _end_advances(self, last: int, error: GruppettoError | None) -> None:
        for number in [number for number in self._advances if number <= last]:
            done = self._advances.pop(number)
            if not done.done():
                done.set_exception(error) if error else done.set_result(None)


def _snapshot(serving: Serving, live: int) -> EngineStats:
    core = serving.core
    running = core.running
    return EngineStats(
        version=core.version,
        running=running,
        waiting=max(0, live - running),
        slots=core.settings.slots,
        kv_tokens=core.kv_tokens,
        kv_capacity=0,  # a slot has KV for a whole context: beyond the slots it never limits
        decode_steps_total=core.decode_steps,
        decode_tokens_total=core.decode_tokens,
        prefill_tokens_total=core.prefill_tokens,
        decode_s_total=core.decode_s,
        prefill_s_total=core.prefill_s,
        batch_steps=dict(core.batch_steps),
        batch_s=dict(core.batch_s),
        cached_tokens_total=core.cached_tokens,
    )
