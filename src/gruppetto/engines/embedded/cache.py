"""The KV of all slots, and the view of it that a Hugging Face forward takes as its cache.

One buffer a layer, [rows, 2 x kv heads, capacity, head size]: keys in the first half of the heads, values in the
second. A row's columns are its positions, whatever its batch-mates do. Promises: columns beyond a row's position hold
finite numbers (they are masked, and 0 x NaN would not be 0); moving a row copies the columns in use only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers.cache_utils import Cache, CacheLayerMixin


class SlotKV:
    """KV buffers. `capacity` is in tokens; `layers` is empty while the memory is released."""

    def __init__(
        self, rows: int, capacity: int, shapes: Sequence[tuple[int, int]], dtype: torch.dtype, device: torch.device
    ) -> None:
        self.rows, self.capacity = rows, capacity
        self.device = device
        self._shapes, self._dtype = tuple(shapes), dtype
        self.layers: list[Tensor] = []
        self.restore()

    def restore(self) -> None:
        """Allocates zeros (lazily, where the system does)."""
        self.layers = [
            torch.zeros(self.rows, 2 * heads, self.capacity, size, dtype=self._dtype, device=self.device)
            for heads, size in self._shapes
        ]

    def release(self) -> None:
        """Drops the buffers."""
        self.layers = []

    def copy_row(self, source: int, target: int, length: int) -> None:
        """Copies the first `length` columns of a row to another row."""
        for kv in self.layers:
            kv[target, :, :length] = kv[source, :, :length]

    def swap_rows(self, one: int, other: int, length: int) -> None:
        """Exchanges the first `length` columns of two rows."""
        for kv in self.layers:
            kept = kv[one, :, :length].clone()
            kv[one, :, :length] = kv[other, :, :length]
            kv[other, :, :length] = kept


class SlotLayer(CacheLayerMixin):  # type: ignore[misc]
    """One layer's view: writes where the running call says, returns what its rows may see."""

    def __init__(self, owner: SlotCache, index: int) -> None:
        super().__init__()
        self._owner, self._index = owner, index

    def update(self, key_states: Tensor, value_states: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, Tensor]:
        """Decode: [B, heads, 1, size]; prefill: [n, heads, T, size]; prefill by token: [T, heads, 1, size]."""
        owner, kv, heads = self._owner, self._owner.kv.layers[self._index], key_states.shape[1]
        if owner.slot is not None:
            mine = kv[owner.slot]
            mine[:heads, owner.start : owner.start + len(key_states)] = key_states[:, :, 0].transpose(0, 1)
            mine[heads:, owner.start : owner.start + len(key_states)] = value_states[:, :, 0].transpose(0, 1)
            seen = mine[None, :, : owner.end].expand(len(key_states), -1, -1, -1)
            return seen[:, :heads], seen[:, heads:]
        if owner.positions is not None:
            kv[owner.rows, :heads, owner.positions] = key_states[:, :, 0]
            kv[owner.rows, heads:, owner.positions] = value_states[:, :, 0]
            batch = len(owner.rows)
            return kv[:batch, :heads, : owner.end], kv[:batch, heads:, : owner.end]
        kv[owner.rows, :heads, owner.start : owner.end] = key_states
        kv[owner.rows, heads:, owner.start : owner.end] = value_states
        if owner.start == 0:
            return key_states, value_states
        return kv[owner.rows, :heads, : owner.end], kv[owner.rows, heads:, : owner.end]

    def lazy_initialization(self, key_states: Tensor, value_states: Tensor) -> None:
        """Nothing: the buffers exist."""

    def get_seq_length(self) -> int:
        return int(self._owner.start)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self._owner.end, 0

    def get_max_length(self) -> int:
        return self._owner.kv.capacity


class SlotCache(Cache):  # type: ignore[misc]
    """What a forward call is given as its cache. Set by `prefill` or `decode` just before the call."""

    def __init__(self, kv: SlotKV) -> None:
        self.kv = kv
        self.rows: Tensor = torch.empty(0)
        self.positions: Tensor | None = None
        self.slot: int | None = None
        self.start = self.end = 0
        super().__init__(layers=[SlotLayer(self, i) for i in range(len(kv.layers))])

    def prefill(self, rows: Tensor, start: int, end: int) -> None:
        """The next call writes columns start..end of `rows` [n]."""
        self.rows, self.positions, self.slot, self.start, self.end = rows, None, None, start, end

    def prefill_by_token(self, slot: int, start: int, span: int) -> None:
        """The next call's batch rows are consecutive tokens of one slot, from column `start`; all read `span`."""
        self.positions, self.slot, self.start, self.end = None, slot, start, span

    def decode(self, rows: Tensor, positions: Tensor, span: int) -> None:
        """The next call writes one column a row, at `positions` [B], and reads the first `span`."""
        self.rows, self.positions, self.slot, self.start, self.end = rows, positions, None, span - 1, span
