"""The separate prefill side of a disaggregated engine: first come, first served, then the KV is moved over."""

from __future__ import annotations

import math
from heapq import heappop, heappush

from gruppetto.ledger.engine import EngineModel
from gruppetto.sim.engine.rows import Row


class PrefillSide:
    """Rows whose prefill is being done elsewhere, and when each comes back. Nothing here stops for a pause."""

    __slots__ = ("_count", "_free", "_model", "_rows", "next_ready")

    def __init__(self, model: EngineModel) -> None:
        self._model = model
        self._rows: list[tuple[float, int, Row]] = []
        self._free, self._count = 0.0, 0
        self.next_ready = math.inf
        """When the KV of the next row is here; infinity if none is under way."""

    def send(self, row: Row, tokens: int, at: float, scale: float) -> None:
        """Prefills `tokens` of a row; every time is `scale` times the model's."""
        self._free = max(at, self._free) + tokens * self._model.prefill_token_s * scale
        self._count += 1
        heappush(self._rows, (self._free + tokens * self._model.move_token_s * scale, self._count, row))
        self.next_ready = self._rows[0][0]

    def take(self) -> Row:
        """The row that is ready first."""
        row = heappop(self._rows)[2]
        self.next_ready = self._rows[0][0] if self._rows else math.inf
        return row
