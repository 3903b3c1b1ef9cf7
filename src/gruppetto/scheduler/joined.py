"""A rollout's tokens so far, the prompt and its segments one behind the other, without a copy."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import overload

from gruppetto.types import Segment


class Joined(Sequence[int]):
    """`prompt` and the tokens of `segments`, `length` in all; neither may change afterwards.

    A context of 32k simulated tokens so costs nothing; an engine that needs a list makes one with `list()`.
    """

    __slots__ = ("_len", "_prompt", "_segments")

    def __init__(self, prompt: Sequence[int], segments: Sequence[Segment], length: int) -> None:
        self._prompt, self._segments, self._len = prompt, segments, length

    def __len__(self) -> int:
        return self._len

    def __iter__(self) -> Iterator[int]:
        return chain.from_iterable(self._parts())

    def _parts(self) -> Iterator[Sequence[int]]:
        yield self._prompt
        for segment in self._segments:
            yield segment.token_ids

    @overload
    def __getitem__(self, index: int) -> int: ...
    @overload
    def __getitem__(self, index: slice) -> list[int]: ...
    def __getitem__(self, index: int | slice) -> int | list[int]:
        if isinstance(index, slice):
            return list(self)[index]
        position = range(self._len)[index]  # refuses an index past the end, and counts a negative one from there
        for part in self._parts():
            if position < len(part):
                return part[position]
            position -= len(part)
        raise IndexError(index)

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Sequence):
            return NotImplemented
        return len(self) == len(other) and all(a == b for a, b in zip(self, other, strict=True))

    def __hash__(self) -> int:
        raise TypeError("unhashable type: 'Joined'")

    def __repr__(self) -> str:
        return f"Joined({self._len} tokens, {len(self._segments)} segments behind a prompt)"
