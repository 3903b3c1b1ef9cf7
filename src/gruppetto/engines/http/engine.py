"""`HttpEngine`: the engine contract over a server that speaks a `wire`.

Promises, besides those of `engines.base`: every call ends, by an answer, an abort or a deadline; while the engine is
paused nothing new is sent; an abort is repeated until its request is back, then the connection is dropped; a pause that
the server does not confirm fails; tokens of weights that nobody here gave the server are refused; a server that ends,
hangs or does not answer fails every call at once. With `stream`, tokens that came before a death are kept.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from gruppetto.engines.base import Capabilities, EngineStats, MemoryTag, PauseMode
from gruppetto.engines.http.account import Told
from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.errors import Lost, Refused, Unavailable
from gruppetto.engines.http.requests import HttpRequests, HttpSettings
from gruppetto.engines.http.staging import Staging
from gruppetto.engines.http.watching import Watch
from gruppetto.engines.http.wire import Facts, Wire
from gruppetto.engines.launch import EngineProcess
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import Bucket

_TAGS: tuple[MemoryTag, ...] = ("weights", "kv")
MENDED = "the model's folder"
"""Label of the weights that a server without valid ones is given, which no version of a run has."""
_TRY_S = 0.2
_END_S = 1.0
"""A connection breaks a little before its process is known to have ended."""


class HttpEngine(HttpRequests):
    """One server. With a `process` it is started and ended here; without, it runs already at the client's URL.

    `connect` makes the wire once the URL is known. Weights come over a channel,
    or as model folders made by `staging`.
    """

    def __init__(
        self,
        name: str,
        connect: Callable[[HttpClient], Wire],
        make_client: Callable[[str], HttpClient],
        settings: HttpSettings,
        staging: Staging,
        *,
        url: str = "",
        process: EngineProcess | None = None,
    ) -> None:
        super().__init__(name, settings)
        self._staging, self._process = staging, process
        self.capabilities = Capabilities(keep_kv_on_pause=settings.keep_kv, context=settings.context, restarts=True)
        self._url, self._connect, self._make_client = url, connect, make_client
        self._update: int | None = None
        self._released: set[MemoryTag] = set()
        self._invalid = False
        self._unreached = ""
        """Why the last try to reach it failed."""
        self._watching: Watch | None = None
        self._watch: asyncio.Task[None] | None = None

    # -- start, death, end --------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the process where there is one, waits until the server answers, and finds out what it has."""
        if self.wire is not None:
            raise EngineError(self.name, "was started before; make a new one")
        await self._open()

    async def restart(self) -> None:
        """A dead engine's process anew, or the wait until whoever runs it has started it anew."""
        if self._closed:
            raise EngineError(self.name, "is closed")
        await self._let_go()
        self._paused, self._released, self._update, self._dead = None, set(), None, None
        self._broken.clear()
        await self._open()
        self._invalid = True

    async def _open(self) -> None:
        deadlines = self.settings.deadlines
        try:
            async with asyncio.timeout(deadlines.start):
                self.wire = await self._reach()
                if await self.wire.paused():
                    self._need_taking_over(self.wire)
                    await self._go_on(self.wire)  # left so by whoever had it before
                self.facts = await self.wire.connect()
        except TimeoutError:
            await self._let_go()
            why = f": {self._unreached}" if self._unreached else ""
            raise EngineError(self.name, f"did not answer at {self._url} within {deadlines.start:g} s{why}") from None
        except BaseException:
            await self._let_go()
            raise
        self._know(self.facts)
        watch = Watch(self.wire, self._process, self.settings.deadlines, self._busy, self._die, self._heard)
        await watch.hear()
        self._watching, self._watch = watch, asyncio.create_task(watch.run())

    def _need_taking_over(self, wire: Wire) -> None:
        if not self.settings.takes_over:
            url = wire.client.url
            raise UserError(
                f"the server at {url} is paused: a run may be publishing to it; try again when that has ended, or, "
                f"where nobody uses it, end the pause: curl -H 'Content-Type: application/json' -d '{{}}' {url}"
                f"{wire.resume_route}"
            )

    async def _go_on(self, wire: Wire) -> None:
        """Ends another's pause. One who died in the middle of an update left a server without memory or without valid
        weights, which cannot go on with them: it is given the model's folder, under a label of its own."""
        try:
            await wire.resume()
            return
        except Refused:
            await wire.pause("abort")
        for tag in _TAGS:
            try:
                await wire.restore([tag])
            except (Lost, Unavailable):
                raise
            except EngineError:
                pass  # it was not released: some answer that with a 500
        await wire.load(self._staging.model, MENDED, "abort")
        await wire.resume()

    async def _reach(self) -> Wire:
        """A server that answers."""
        if self._process is not None:
            self._url = await self._process.start()
        while True:
            client = self._make_client(self._url)
            await client.open()
            self.wire = self._connect(client)
            try:
                await self._until_it_answers(self.wire)
                return self.wire
            except EngineError:
                if self._process is None or not self._process.forgives():
                    raise
            await client.close()
            self._url = await self._process.start()

    def _know(self, facts: Facts) -> None:
        wanted = self.settings.context
        if 0 < facts.context < wanted:
            raise UserError(
                f"engine {self.name} at {self._url} serves contexts of {facts.context} tokens, engine.context = "
                f"{wanted}; write engine.context = {facts.context}, or start it with a longer one"
            )
        self._labels = {facts.version: self._version}
        keeps = self.settings.keep_kv and facts.token_versions
        self.capabilities = replace(self.capabilities, keep_kv_on_pause=keeps)

    async def _until_it_answers(self, wire: Wire) -> None:
        while True:
            if self._process is not None and (ended := self._process.ended()) is not None:
                raise EngineError(self.name, ended)
            try:
                await wire.alive()
                return
            except (Lost, Unavailable) as error:
                self._unreached = str(error).removeprefix(f"engine {self.name}: ")
            await self._next_try()

    async def _next_try(self) -> None:
        if self._process is None:
            await asyncio.sleep(_TRY_S)
        else:
            await self._process.ends_within(_TRY_S)

    async def close(self) -> None:
        """Ends every call with an abort result; a server that was started here ends, another one serves on."""
        if self._closed:
            return
        self._closed = True
        if self.wire is not None and self._dead is None:
            with contextlib.suppress(EngineError, TimeoutError):
                async with asyncio.timeout(5.0):
                    if sent := [call for call in self._calls.stop(None) if call.sent]:
                        await self._ask_to_stop(sent)
                    if self._process is None and self._paused and not self._invalid:
                        await self.wire.resume()
        self._calls.give_up(list(self._calls.live.values()))
        await self._let_go()

    async def _after_a_loss(self) -> None:
        if self._process is not None:
            await self._process.ends_within(_END_S)
            if (ended := self._process.ended()) is not None:
                self._die(EngineError(self.name, ended))

    async def _let_go(self) -> None:
        for task in (*self._tasks, *([self._watch] if self._watch else [])):
            task.cancel()
        if self.wire is not None:
            await self.wire.client.close()
        if self._process is not None:
            await self._process.stop()

    # -- pause --------------------------------------------------------------------------------------------------------

    async def pause(self, mode: PauseMode) -> None:
        """Returns when the server has confirmed it and, with `abort`, all requests are back."""
        wire = self._living()
        if mode == "keep" and self.facts is not None and not self.facts.token_versions:
            mode = "abort"  # else one request would have tokens of two versions, and nobody could say which
        held = self._paused
        self._paused = mode if held in (None, "keep") else "abort"
        self._note_rows()
        async with self._in_time("the pause", self.settings.deadlines.pause):
            await wire.pause(mode)
            if mode == "abort":
                sent = self._calls.stop_sent()
                if sent:
                    await self._ask_to_stop(sent)
                    self._later(self._chase(sent))
                    await self._calls.all_back(sent)
            if await wire.paused() is False:
                raise EngineError(self.name, f"answered the pause ({mode}), and says that it is not paused")

    async def resume(self) -> None:
        """Goes on; `EngineError` while weights are not valid or memory is released."""
        wire = self._living()
        if self._released:
            raise EngineError(self.name, f"resume: {', '.join(sorted(self._released))} are released; restore them")
        if self._invalid:
            raise EngineError(self.name, "resume: what it serves is not known; publish an update first")
        await wire.resume()
        self._paused = None
        self._note_rows()
        self._calls.open_gate()

    @contextlib.asynccontextmanager
    async def _in_time(self, what: str, seconds: float) -> Any:
        try:
            async with asyncio.timeout(seconds):
                yield
        except TimeoutError:
            raise EngineError(self.name, f"{what} did not take hold within {seconds:g} s") from None

    # -- memory and weights -------------------------------------------------------------------------------------------

    async def release_memory(self, tags: Sequence[MemoryTag]) -> None:
        wire = self._stopped("release_memory")
        if self._calls.sent:
            raise EngineError(self.name, f"release_memory: {len(self._calls.sent)} requests are live; abort them first")
        if wanted := [tag for tag in dict.fromkeys(tags) if tag not in self._released]:
            await wire.release(wanted)
            self._released |= set(wanted)
            self._invalid |= "weights" in wanted

    async def restore_memory(self, tags: Sequence[MemoryTag]) -> None:
        wire = self._living()
        if wanted := [tag for tag in dict.fromkeys(tags) if tag in self._released]:
            await wire.restore(wanted)
            self._released -= set(wanted)

    async def begin_update(self, version: int) -> None:
        self._stopped("begin_update")
        if "weights" in self._released:
            raise EngineError(self.name, "weights update: weights are released; call restore_memory first")
        await self._staging.begin(version, self.name)
        self._update = version

    async def load_bucket(self, bucket: Bucket) -> None:
        if self._update is None:
            raise EngineError(self.name, f"weights bucket {bucket.index}: no update is open; call begin_update first")
        try:
            await self._staging.add(self._update, bucket, self.name)
        except BaseException:
            self._update = None
            raise

    async def commit_update(self, version: int, num_buckets: int) -> None:
        wire, opened, self._update = self._stopped("commit_update"), self._update, None
        if opened != version:
            raise EngineError(self.name, f"commit of version {version}: the open update is {opened}")
        folder = await self._staging.finish(version, num_buckets, self.name)
        label = self._label(version)
        assert self._paused is not None
        self._invalid = True
        async with self._in_time(f"the update to version {version}", self.settings.deadlines.update):
            await wire.load(folder, label, self._paused)
            served = await wire.version()
        if served != label:
            raise EngineError(self.name, f"serves weights {served!r} after the update to {label!r}")
        self._labels[label] = self._version = version
        self._invalid = False
        await self._staging.loaded(version, self.name)

    async def flush(self) -> bool:
        """Forgets cached prefixes. False, and nothing is done, where requests are kept with the KV they have."""
        wire = self._stopped("flush")
        if self._paused == "keep" and self.settings.keep_kv:
            return False
        return await wire.flush()

    # -- weights over a channel (`gruppetto.weights.channels.port.Remote`) --------------------------------------------

    @property
    def control_url(self) -> str:
        """Where its routes are; another one after each start of its process."""
        return self._url

    @property
    def control_key(self) -> str:
        """The key for them, "" for none."""
        return "" if self.wire is None else self.wire.client.api_key

    def weights_label(self, version: int) -> str:
        """What the server is to call a version."""
        return self._label(version)

    def weights_taken(self, version: int) -> None:
        """The server has confirmed that it serves it, whole."""
        self._labels[self._label(version)] = self._version = version
        self._invalid = False

    # -- what is known ------------------------------------------------------------------------------------------------

    def stats(self) -> EngineStats:
        """Counters as `account` has them; gauges as seen from here, less what the server says that it has queued."""
        facts, account = self.facts, self._account
        if facts is None:
            raise EngineError(self.name, "is not started; await start() first")
        told = Told() if self._watching is None else self._watching.told
        sent = len(self._calls.sent)
        queued = min(told.waiting or 0, max(0, sent - (told.running or 0)))  # it was told a moment ago
        running = min(sent - queued, self.settings.slots)
        return EngineStats(
            version=self._version,
            running=running,
            waiting=len(self._calls.live) - running,
            slots=self.settings.slots,
            kv_tokens=told.kv_tokens,
            kv_capacity=facts.kv_capacity,
            decode_steps_total=account.steps,
            decode_tokens_total=account.tokens,
            prefill_tokens_total=max(0, account.counted["prefilled"] - account.counted["cached"]),
            decode_s_total=account.busy_s,
            batch_steps=dict(account.batch_steps),
            batch_s=dict(account.batch_s),
            preemptions_total=account.counted["preemptions"],
            cached_tokens_total=account.counted["cached"],
            paused_s=account.paused_s,
        )

    def _stopped(self, what: str) -> Wire:
        if self._paused is None:
            raise EngineError(self.name, f"{what}: the engine is running; pause it first")
        return self._living()
