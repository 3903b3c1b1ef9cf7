"""Which group of a run belongs to which task that was taken from the data, from its events.

A task that was put off, by its history or unfinished in a short round, starts afresh in a long round as a group of its
own. A replay takes tasks one after the other, so it needs both under the number of the taking.
"""

from __future__ import annotations

from collections import defaultdict, deque

from gruppetto.record.explain.read import Event


class Takes:
    """`first[n]` is the group of the n-th task taken; `again[n]` the one in which it started afresh."""

    def __init__(self) -> None:
        self._first: list[int | None] = []
        self.tasks: list[str] = []
        """The task of each taking: the same one again in a later epoch."""
        self.again: dict[int, int] = {}
        self._live: dict[str, int] = {}
        self._groups: dict[int, str] = {}
        self._put_off: dict[str, deque[int]] = defaultdict(deque)

    @property
    def first(self) -> list[int]:
        """Groups in the order in which their tasks were taken; one that never started has another's rollouts."""
        found = [self.again.get(take) if group is None else group for take, group in enumerate(self._first)]
        known = [group for group in found if group is not None]
        return [known[take % len(known)] if group is None else group for take, group in enumerate(found) if known]

    def take(self, event: Event) -> None:
        """Books one event."""
        if event.kind == "launch" and event.group is not None:
            self._launch(event.group, event.task or "", long=event.long)
        elif event.kind == "defer":
            self._defer(event.task or "")
        elif event.kind in ("close", "commit") and isinstance(event.groups, list):
            for group in event.groups:
                self._live.pop(self._groups.pop(group, ""), None)

    def _launch(self, group: int, task: str, *, long: bool) -> None:
        if long and self._put_off[task]:
            number = self._put_off[task].popleft()
            self.again[number] = group
        else:
            number = len(self._first)
            self._first.append(group)
            self.tasks.append(task)
            if long:
                self.again[number] = group
        self._live[task] = number
        self._groups[group] = task

    def _defer(self, task: str) -> None:
        number = self._live.pop(task, None)
        if number is None:
            number = len(self._first)
            self._first.append(None)
            self.tasks.append(task)
        self._put_off[task].append(number)
