"""What an engine behind HTTP did, in the contract's counters, from what is seen of it and what it tells.

A server does not say how many rows each decode step had. Seen from here are the requests that are open (at most `slots`
of them decode) and, from the server's metrics or from the answers, tokens. Tokens made between two looks are spread
over the time with requests in proportion to rows x seconds, one token a row and step. Where a server tells what it has
decoded, steps are booked when it does, else when answers come. Prefill cannot be told apart: its seconds are in those
of decoding. Promise: counters never fall, also where the server is started anew, and the tokens made are exactly those
of the answers.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

from gruppetto.clock import now


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """A server's own counters and gauges; None where it does not tell. Tokens since its start."""

    generated: int | None = None
    """Grows while the server gets on, prefill included where it tells that too."""
    decoded: int | None = None
    """Sampled tokens alone, while they are made."""
    prefilled: int | None = None
    cached: int | None = None
    running: int | None = None
    waiting: int | None = None
    kv_tokens: int | None = None
    preemptions: int | None = None


_COUNTERS = ("prefilled", "cached", "preemptions")
"""Of a server, that are taken over as they are."""


class Account:
    """One engine's account. `rows` is told whenever requests come or go."""

    def __init__(self, slots: int) -> None:
        self._slots = slots
        self._rows, self._since = 0, now()
        self._open: dict[int, float] = {}
        """Seconds by rows that no tokens have been spread over yet."""
        self._owed: dict[int, float] = {}
        self._decoded: int | None = None
        self._ahead = 0
        """Tokens whose steps are booked and that no answer has brought yet."""
        self.batch_s: dict[int, float] = {}
        self.batch_steps: dict[int, int] = {}
        self.tokens = 0
        self.counted: Counter[str] = Counter()
        """By the server, `_COUNTERS`, over all of its starts."""
        self._told: dict[str, int] = {}
        self.paused_s = 0.0
        self._paused = False

    def rows(self, live: int, *, paused: bool = False) -> None:
        """From now on so many requests are open, decoding unless paused."""
        at = now()
        passed, self._since = at - self._since, at
        if self._paused:
            self.paused_s += passed
        elif self._rows:
            self._open[self._rows] = self._open.get(self._rows, 0.0) + passed
        self._rows, self._paused = min(live, self._slots), paused

    def made(self, tokens: int) -> None:
        """An answer has brought so many tokens."""
        self.tokens += tokens
        booked = min(tokens, self._ahead)
        self._ahead -= booked
        if tokens > booked or not tokens:
            self._book(tokens - booked)

    def count_on(self, told: Told) -> None:
        """Adds what the server has counted since it told last; one that has fallen begins at 0."""
        for name in _COUNTERS:
            if (value := getattr(told, name)) is not None:
                before = self._told.get(name, 0)
                self.counted[name] += value - before if value >= before else value
                self._told[name] = value

    def heard(self, decoded: int | None) -> None:
        """What the server says that it has decoded since its start; it also decodes for others, and what it makes for
        requests that nobody waits for any more."""
        before, self._decoded = self._decoded, decoded
        if decoded is None or before is None or decoded < before:
            return
        if not self._rows:
            self._ahead = 0
        elif decoded > before and not self._paused:
            self._ahead += decoded - before
            self._book(decoded - before)

    def _book(self, tokens: int) -> None:
        """Their steps and seconds."""
        self.rows(self._rows, paused=self._paused)
        weight = sum(rows * seconds for rows, seconds in self._open.items())
        if not tokens or weight <= 0:
            self._owed[1] = self._owed.get(1, 0.0) + tokens
        else:
            for rows, seconds in self._open.items():
                self.batch_s[rows] = self.batch_s.get(rows, 0.0) + seconds
                self._owed[rows] = self._owed.get(rows, 0.0) + tokens * seconds / weight
            self._open.clear()
        for rows, owed in self._owed.items():
            whole = int(owed)
            self.batch_steps[rows] = self.batch_steps.get(rows, 0) + whole
            self._owed[rows] = owed - whole

    @property
    def steps(self) -> int:
        """Decode steps."""
        return sum(self.batch_steps.values())

    @property
    def busy_s(self) -> float:
        """Seconds with requests that were not paused, as far as they are booked."""
        return sum(self.batch_s.values())
