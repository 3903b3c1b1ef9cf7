"""Stop strings, found across token boundaries, in time linear in the tokens.

Promises: a stop string is found at the token that completes it, also when it began inside tokens that earlier calls
made, and never when it ended inside them; a code point split over tokens is decoded once it is whole. Text is decoded
incrementally from the last two clean boundaries, so a run of undecodable bytes cannot make the window grow.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

Decode = Callable[[Sequence[int]], str]

_BROKEN = "\ufffd"
_PENDING = 4
"""Tokens that may wait for the rest of a code point (UTF-8 has at most 4 bytes); after that the text is taken as is."""


class StopMatcher:
    """Watches one request's text. `made` are the tokens of earlier calls of the same rollout."""

    def __init__(self, decode: Decode, stops: Sequence[str], made: Sequence[int]) -> None:
        self._decode = decode
        self._stops = tuple(stops)
        self._keep = max(map(len, stops)) - 1
        clean = self._clean_boundary(made)
        text = decode(made[:clean]) if clean else ""
        self._tail = text[len(text) - min(self._keep, len(text)) :]
        self._ids = list(made[max(0, clean - _PENDING) :])
        self._read = min(clean, _PENDING)

    def _clean_boundary(self, made: Sequence[int]) -> int:
        for pending in range(min(_PENDING, len(made) + 1)):
            cut = len(made) - pending
            if not cut or not self._decode(made[max(0, cut - 2 * _PENDING) : cut]).endswith(_BROKEN):
                return cut
        return len(made)

    def push(self, token: int) -> str | None:
        """Adds one sampled token; returns the stop string that it completes, the earliest-ending one, or None."""
        self._ids.append(token)
        old = self._decode(self._ids[: self._read]) if self._read else ""
        delta = self._decode(self._ids)[len(old) :]
        found = self._search(delta)
        if not delta.endswith(_BROKEN) or len(self._ids) - self._read > _PENDING:
            self._commit(delta)
        return found

    def _search(self, delta: str) -> str | None:
        text = self._tail + delta
        best, best_end = None, len(text) + 1
        for stop in self._stops:
            at = text.find(stop, max(0, len(self._tail) - len(stop) + 1))
            if at >= 0 and at + len(stop) < best_end:
                best, best_end = stop, at + len(stop)
        return best

    def _commit(self, delta: str) -> None:
        text = self._tail + delta
        self._tail = text[max(0, len(text) - self._keep) :]
        del self._ids[: self._read]
        self._read = len(self._ids)
