"""What an embedded engine is made with, checked once."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gruppetto.config.schema import PREFILL_ALIGN
from gruppetto.engines.embedded.stops import Decode
from gruppetto.errors import UserError

ALIGN = PREFILL_ALIGN
"""Deterministic mode: prefill lengths and decode spans are multiples of this."""
MIN_ROWS = 16
"""Deterministic mode: a decode batch never has fewer rows; below it BLAS kernels sum in another order."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Settings:
    """Sizes and modes of one engine; names as in [engine] of the config."""

    name: str
    slots: int
    context: int
    admit_batch: int = 4
    prefill_chunk: int = 256
    kv_on_swap: Literal["keep", "recompute"] = "recompute"
    deterministic: bool = False
    decode: Decode | None = None

    def __post_init__(self) -> None:
        for key in ("slots", "context", "admit_batch", "prefill_chunk"):
            if getattr(self, key) < 1:
                raise UserError(f"engine.{key} = {getattr(self, key)}; write 1 or more")
        if self.kv_on_swap not in ("keep", "recompute"):
            raise UserError(f"engine.kv_on_swap = {self.kv_on_swap!r}; write 'keep' or 'recompute'")
        if self.context < 2:
            raise UserError("engine.context = 1 leaves no room to generate; write 2 or more")
        if self.deterministic and self.prefill_chunk % ALIGN:
            raise UserError(
                f"engine.prefill_chunk = {self.prefill_chunk} with run.deterministic = true must be a multiple of "
                f"{ALIGN}; write engine.prefill_chunk = {aligned(self.prefill_chunk)}"
            )

    @property
    def kv_rows(self) -> int:
        """Rows of the KV buffers: the slots, and in deterministic mode at least `MIN_ROWS`."""
        return max(self.slots, MIN_ROWS) if self.deterministic else self.slots

    @property
    def admit_at(self) -> int:
        """Free slots to wait for while others decode: never more than a quarter of the slots."""
        return min(self.admit_batch, max(1, self.slots // 4))


def aligned(length: int) -> int:
    """`length` rounded up to a multiple of `ALIGN`."""
    return -(-length // ALIGN) * ALIGN
