"""Deadlines that cost no timer a call: of many calls that have the same time, and of one wait begun again and again.

Promises: `overdue` is told once of every call that is still there when its time is over, in the order they were made;
when no call is left no timer is either, so that a deadlock on virtual time is still seen at once.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Generic, Protocol, TypeVar

from gruppetto.clock import now


class Timed(Protocol):
    """A call with the name of its rollout; `due` is set here, `late` says that `overdue` was told of it."""

    rid: str
    due: float
    late: bool


C = TypeVar("C", bound=Timed)


class Deadlines(Generic[C]):
    """The calls in flight by rollout. A dict keeps the order of insertion, which here is the order of deadlines."""

    def __init__(self, timeout_s: float, overdue: Callable[[C], None]) -> None:
        self._timeout_s, self._overdue = timeout_s, overdue
        self._calls: dict[str, C] = {}
        self._timer: asyncio.TimerHandle | None = None

    def __len__(self) -> int:
        return len(self._calls)

    def __iter__(self) -> Iterator[C]:
        return iter(self._calls.values())

    def __contains__(self, call: C) -> bool:
        return self._calls.get(call.rid) is call

    def get(self, rid: str) -> C | None:
        """The rollout's call, if it is in flight."""
        return self._calls.get(rid)

    def add(self, call: C) -> None:
        """Its time begins."""
        call.due = now() + self._timeout_s
        self._calls[call.rid] = call
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_at(call.due, self._look)

    def discard(self, call: C) -> bool:
        """It came back; False when it is not in flight (any more)."""
        if self._calls.get(call.rid) is not call:
            return False
        del self._calls[call.rid]
        if not self._calls:
            self.stop()
        return True

    def stop(self) -> None:
        """Watches no more."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _look(self) -> None:
        """The call that the timer was set for may be long gone: then it is set anew for the oldest that is there."""
        self._timer = None
        time, due = now(), []
        for call in self._calls.values():
            if call.late:
                continue
            if call.due > time:
                self._timer = asyncio.get_running_loop().call_at(call.due, self._look)
                break
            call.late = True
            due.append(call)
        for call in due:
            self._overdue(call)


class Patience:
    """The deadline of a wait that is begun again and again: its one timer is set anew only when it has gone off."""

    def __init__(self, wake: Callable[[], None]) -> None:
        self._wake = wake
        self._due: float | None = None
        self._over = False
        self._timer: asyncio.TimerHandle | None = None

    def begin(self, seconds: float | None) -> None:
        """A wait begins; None: it may last."""
        self._over = False
        self._due = None if seconds is None else now() + seconds
        if self._due is not None and (self._timer is None or self._due < self._timer.when()):
            self._set(self._due)

    def check(self) -> None:
        """Raises `TimeoutError` when the wait has lasted as long as it may."""
        if self._over:
            raise TimeoutError

    def stop(self) -> None:
        """No wait is going on."""
        self._due = None
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _set(self, due: float) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_at(due, self._look)

    def _look(self) -> None:
        self._timer = None
        if self._due is None:
            return
        if now() >= self._due:
            self._over = True
            self._wake()
        else:
            self._set(self._due)
