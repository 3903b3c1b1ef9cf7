"""Calls of a stage as futures, without a task where the stage can do without.

An engine, reward or environment may offer `submit(request) -> asyncio.Future` beside its coroutine method; it does the
same, in a fraction of the time, and cancelling the future takes the request back. Promise: a subclass or an object
that has its own coroutine method and no `submit` of its own is not passed by.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, Generic, TypeVar

Request = TypeVar("Request")
Result = TypeVar("Result")


class Submission(Generic[Request, Result]):
    """`stage.method(request)`, begun; `direct` says whether by `submit`. Chosen at the first call."""

    __slots__ = ("_method", "_send", "_stage", "direct")

    def __init__(self, stage: object, method: str) -> None:
        self._stage, self._method = stage, method
        self._send: Callable[[Request], asyncio.Future[Result]] | None = None
        self.direct = False

    def __call__(self, request: Request) -> asyncio.Future[Result]:
        send = self._send
        if send is None:
            send = self._send = self._choose()
        return send(request)

    def _choose(self) -> Callable[[Request], asyncio.Future[Result]]:
        own = [getattr(self._stage, "__dict__", {}), *(vars(kind) for kind in type(self._stage).__mro__)]
        first = next(names for names in own if "submit" in names or self._method in names)
        self.direct = "submit" in first
        stage: Any = self._stage
        if self.direct:
            submit: Callable[[Request], asyncio.Future[Result]] = stage.submit
            return submit
        call = getattr(stage, self._method)
        return lambda request: asyncio.get_running_loop().create_task(call(request))
