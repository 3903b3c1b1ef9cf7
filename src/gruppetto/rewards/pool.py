"""Scores in killable processes, each call under its own deadline.

Promises: the loop is never blocked; a call that hangs costs its deadline and nobody else's (its process is killed with
all that it started, and replaced); a failure is `Score(None, error)` whose first word says its kind: `timeout`, `died`,
`raised`, `returned`, or what the verifier said of the task; after `close` no child is left, and none outlives the
parent. The deadline counts from the moment a process takes the call, not while it waits for one.
"""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from gruppetto.clock import now
from gruppetto.errors import RunError, UserError
from gruppetto.imports import one_line
from gruppetto.rewards.base import Reward
from gruppetto.rewards.process import ProcessDied, VerifierProcess
from gruppetto.rewards.verifiers import VerifierSpec
from gruppetto.types import Rollout, Score


class ProcessPoolReward(Reward):
    """`processes` verifier children; `decode` turns response ids into the text that is judged."""

    def __init__(
        self,
        spec: VerifierSpec,
        decode: Callable[[Sequence[int]], str],
        *,
        processes: int = 1,
        timeout_s: float = 10.0,
        log: Path | None = None,
    ) -> None:
        self.name = spec.path.rpartition(":")[2] or spec.type
        self._spec, self._decode, self._timeout_s, self._log = spec, decode, timeout_s, log
        self._count = processes
        self._processes: set[VerifierProcess] = set()
        self._killed: list[VerifierProcess] = []
        self._calls: set[asyncio.Task[Score]] = set()
        self._idle: asyncio.LifoQueue[VerifierProcess | None] = asyncio.LifoQueue()
        self._closed = False

    async def start(self) -> None:
        """Starts all processes; raises `UserError` when the verifier cannot be loaded. Twice is once."""
        if self._processes:
            return
        self._closed, self._idle = False, asyncio.LifoQueue()
        try:
            fresh = [self._spawn() for _ in range(self._count)]
            failures = await asyncio.gather(*(process.ready() for process in fresh), return_exceptions=True)
            if failure := next(filter(None, failures), None):
                raise failure
        except BaseException:
            await self.close()
            raise
        for process in fresh:
            self._idle.put_nowait(process)

    async def score(self, rollout: Rollout) -> Score:
        """Scores one rollout; see `verify`."""
        task = rollout.task
        return await self.verify(task.prompt, self._decode(rollout.response_ids()), task.answer, task.extra)

    async def verify(self, prompt: str, response: str, answer: Any, extra: Mapping[str, Any]) -> Score:
        """Scores one text. Raises `RunError` only when the pool was never started or is closed."""
        try:
            request = pickle.dumps((prompt, response, answer, dict(extra)), protocol=pickle.HIGHEST_PROTOCOL)
        except Exception as error:  # each type that cannot be pickled has its own exception
            return Score(reward=None, error=f"the task cannot be sent to a process: {one_line(error)}")
        process = await self._take()
        if not process.alive:  # it died while idle, which is no fault of this request
            process = self._replace(process)
        call = asyncio.create_task(self._call(process, request))
        self._calls.add(call)
        call.add_done_callback(self._calls.discard)
        return await call

    async def close(self) -> None:
        """Kills every process and waits until it is gone."""
        self._closed = True
        for process in self._processes:
            process.kill()
        if self._calls:
            await asyncio.wait(self._calls)
        self._idle.put_nowait(None)
        for process in (*self._processes, *self._killed):
            process.release()
            process.reap()
        self._processes.clear()
        self._killed.clear()

    async def _take(self) -> VerifierProcess:
        process = await self._idle.get() if self._processes and not self._closed else None
        if process is None:
            self._idle.put_nowait(None)  # for the next one who waits
            raise RunError(f"reward {self.name} was asked for a score, but its processes are not running")
        return process

    async def _call(self, process: VerifierProcess, request: bytes) -> Score:
        """Asks, and makes the process or its replacement idle again."""
        began, fit = now(), False
        try:
            await process.ready()
            began = now()  # loading a replacement is not this rollout's time
            async with asyncio.timeout(self._timeout_s):
                reply = await process.ask(request)
            fit = True
            return Score(reward=reply.get("reward"), error=reply.get("error"), seconds=now() - began)
        except TimeoutError:
            return Score(reward=None, error=f"timeout after {self._timeout_s:g} s", seconds=now() - began)
        except ProcessDied as error:
            return Score(reward=None, error=f"died: the verifier's process {error}", seconds=now() - began)
        except UserError as error:
            return Score(reward=None, error=f"died and did not start again: {error}", seconds=now() - began)
        finally:  # also when cancelled: the answer to this request must not become another one's
            if not self._closed:
                self._idle.put_nowait(process if fit else self._replace(process))

    def _replace(self, process: VerifierProcess) -> VerifierProcess:
        """Kills it and starts another, which loads while nobody waits for it."""
        process.kill()
        process.release()
        self._processes.discard(process)
        self._killed = [killed for killed in (*self._killed, process) if killed.alive]  # reaps those that are gone
        return self._spawn()

    def _spawn(self) -> VerifierProcess:
        try:
            process = VerifierProcess(self._spec, self._log)
        except OSError as error:
            raise RunError(f"reward {self.name}: no process could be started: {one_line(error)}") from error
        self._processes.add(process)
        return process
