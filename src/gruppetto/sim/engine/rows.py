"""Rows: the requests on a simulated engine, what they have made, and the KV that requests leave behind.

Ids are `range`s and logprobs `Zeros`, so that a rollout of any length takes no memory.
"""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Sequence
from functools import lru_cache

from gruppetto.engines.base import GenerateResult
from gruppetto.types import Segment, TokenKind

WAITING, GONE = -1, -2
"""`Row.order` of a row that does not run yet, and of one that has left."""

_MODEL = TokenKind.MODEL

SEGMENTS_HELD = 1 << 12
"""Different segments that are remembered, the last ones asked for."""


class Zeros(Sequence[float]):
    """`n` logprobs of 0.0 that take no memory."""

    __slots__ = ("_n",)

    def __init__(self, n: int) -> None:
        self._n = n

    def __len__(self) -> int:
        return self._n

    def __getitem__(self, index: int | slice) -> float | Zeros:  # type: ignore[override]
        if isinstance(index, slice):
            return Zeros(len(range(self._n)[index]))
        range(self._n)[index]  # refuses an index past the end, which is what ends an iteration
        return 0.0


@lru_cache(maxsize=SEGMENTS_HELD)
def one_segment(kind: TokenKind, version: int, count: int) -> tuple[Segment, ...]:
    """A segment of `count` tokens with the ids 0, 1, 2 ...; those that are alike are the same one, which never changes:
    what thousands of rollouts have made so takes the memory of a few."""
    return (Segment(kind, version, range(count), Zeros(count)),)


class Row:
    """One request. Two numbers on the engine's count of decode steps say what it has made: `begin` and now."""

    __slots__ = (
        "begin", "block", "cached", "context", "future", "group", "left", "made",
        "order", "parts", "prompt", "rid", "sent", "stops", "swap",
    )  # fmt: skip

    def __init__(
        self,
        rid: str,
        future: asyncio.Future[GenerateResult] | None,
        left: int,
        stops: bool,
        context: int,
        group: int | None = None,
        prompt: int = 0,
    ) -> None:
        self.rid, self.future = rid, future
        self.group, self.prompt = group, prompt
        """Its first `prompt` tokens are those of all rows of this group; None: it shares them with nobody."""
        self.left = left
        """Tokens it has still to make, counted from `begin`."""
        self.stops = stops
        """It ends by itself there, not by its budget."""
        self.context = context
        """Tokens that it held at `begin`."""
        self.order = WAITING
        """Number of its admission; also tells whether its entry among the ends still holds."""
        self.begin = 0
        """The engine's decode steps when it came in."""
        self.swap = 0
        """Index of the weights version it came in under."""
        self.block = -1
        """Number of the prefill block it is in, or was in last."""
        self.cached = 0
        """Context tokens that needed no prefill when it came in."""
        self.sent = False
        """Its prefill is done, or being done, on a separate prefill side."""
        self.made = 0
        """Tokens of this call in `parts`."""
        self.parts: tuple[Segment, ...] = ()
        """What it made before it was preempted or left."""

    def cut(self, steps: int, swaps: list[tuple[int, int]]) -> int:
        """Puts what it made from `begin` until now into `parts`, one segment per weights version. Returns how many.

        `swaps` are (decode steps at the commit, version), ascending.
        """
        count = steps - self.begin
        if count <= 0:
            return 0
        if not self.parts and self.swap == len(swaps) - 1:
            self.parts = one_segment(_MODEL, swaps[-1][1], count)
        else:
            self._cut_at_swaps(steps, swaps)
        self.made += count
        return count

    def _cut_at_swaps(self, steps: int, swaps: list[tuple[int, int]]) -> None:
        parts, at, offset = list(self.parts), self.begin, self.made - self.begin
        for index in range(self.swap, len(swaps)):
            end = swaps[index + 1][0] if index + 1 < len(swaps) else steps
            if end <= at:
                continue
            first, version = at + offset, swaps[index][1]
            if parts and parts[-1].version == version:  # it was preempted in between
                first = parts.pop().token_ids[0]
            ids = range(first, end + offset)
            parts.append(Segment(_MODEL, version, ids, Zeros(len(ids))))
            at = end
        self.parts = tuple(parts)


class IdleKV:
    """KV of requests that left, by rid, least recently used first. `total` is in tokens."""

    __slots__ = ("_held", "total")

    def __init__(self) -> None:
        self._held: OrderedDict[str, int] = OrderedDict()
        self.total = 0

    def put(self, rid: str, tokens: int) -> None:
        """Keeps `tokens` of a request; it is now the most recently used."""
        if tokens > 0:
            self.total += tokens - self._held.pop(rid, 0)
            self._held[rid] = tokens

    def take(self, rid: str) -> int:
        """Tokens held for a request, which owns them from now on."""
        tokens = self._held.pop(rid, 0)
        self.total -= tokens
        return tokens

    def held(self, rid: str) -> int:
        """Tokens held for a request."""
        return self._held.get(rid, 0)

    def shrink(self, room: int) -> None:
        """Evicts the least recently used requests until at most `room` tokens are held."""
        while self.total > room and self._held:
            self.total -= self._held.popitem(last=False)[1]

    def clear(self) -> None:
        """Drops everything."""
        self._held.clear()
        self.total = 0


class PooledKV(IdleKV):
    """KV in a pool beside the engines (Mooncake's, in Seer): every engine finds it, it takes no room on any, and it is
    dropped with its weights only."""

    __slots__ = ()

    def put(self, rid: str, tokens: int) -> None:
        if tokens > 0:
            self._held[rid] = tokens

    def take(self, rid: str) -> int:
        return self._held.pop(rid, 0)

    def shrink(self, room: int) -> None:
        return
