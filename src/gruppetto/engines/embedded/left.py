"""KV that requests left behind in their slots when their budget was used up: the next chunk of a rollout begins there.

Owns which slot holds whose KV. Promises: nothing is kept that a live request needs the room of; what is taken up again
is the KV of exactly the same tokens, under the same weights.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence


class LeftKV:
    """Slots without a request that still hold the KV of one, all its tokens but the last."""

    def __init__(self) -> None:
        self._tokens: dict[int, tuple[str, Sequence[int]]] = {}
        self._slots: dict[str, int] = {}

    def leave(self, slot: int, rid: str, tokens: Sequence[int]) -> None:
        """A request has ended in this slot."""
        self.forget(slot)
        self.forget(self._slots.get(rid, -1))
        self._tokens[slot], self._slots[rid] = (rid, tokens), slot

    def take(self, rid: str, tokens: Sequence[int]) -> int | None:
        """The slot that holds the KV for these tokens, which are live again; None where there is none."""
        slot = self._slots.get(rid)
        if slot is None:
            return None
        _, held = self._tokens[slot]
        self.forget(slot)
        return slot if held == tokens else None

    def choose(self, free: Collection[int]) -> int:
        """One of the free slots for a request that has nothing here: the lowest that holds nothing, or the lowest."""
        slot = next((slot for slot in free if slot not in self._tokens), None)
        if slot is None:
            slot = next(iter(free))
            self.forget(slot)
        return slot

    def forget(self, slot: int) -> None:
        """What this slot holds is overwritten."""
        if slot in self._tokens:
            rid, _ = self._tokens.pop(slot)
            del self._slots[rid]

    def forget_all(self) -> None:
        """New weights, or no memory."""
        self._tokens.clear()
        self._slots.clear()

    def exchange(self, one: int, other: int) -> None:
        """Two slots have changed places."""
        held = {slot: self._tokens.pop(slot) for slot in (one, other) if slot in self._tokens}
        for slot, (rid, tokens) in held.items():
            to = other if slot == one else one
            self._tokens[to], self._slots[rid] = (rid, tokens), to

    def position(self, slot: int) -> int:
        """Where a decode step may write in a slot without a request: behind what it holds."""
        held = self._tokens.get(slot)
        return len(held[1]) - 1 if held is not None else 0
