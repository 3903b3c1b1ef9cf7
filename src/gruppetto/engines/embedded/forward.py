"""The two forward calls of the engine, over any full-attention Hugging Face causal LM.

Prefill writes KV and computes no logits; decode takes one token a row, each at its own position. Both use the model's
own code through `SlotCache` and a ready 4-D additive float mask (a bool mask would be converted in every layer).
"""

from __future__ import annotations

import inspect
from abc import ABC, abstractmethod
from typing import Any

import torch
from torch import Tensor

from gruppetto.engines.embedded.cache import SlotCache, SlotKV


class Forward(ABC):
    """Runs one model over one `SlotKV`."""

    name: str
    by_depth: bool = False
    """Whether decode is faster when long contexts are in the low rows (`depth`)."""

    @abstractmethod
    def prefill(self, ids: Tensor, rows: Tensor, start: int) -> None:
        """Computes the KV of `ids` [n, T] int64 at columns start.. of `rows` [n]. Right padding is harmless."""

    @abstractmethod
    def prefill_by_token(self, ids: Tensor, slot: int, start: int) -> None:
        """As `prefill` for `ids` [T] of one slot, each token a batch row of its own, as in `decode`.

        Slower, but every kernel sees the shapes of a decode step, so the KV has the bits that decoding these tokens
        would have given: what makes park and resume exact. `start + T` must be a multiple of 32, as spans are.
        """

    @abstractmethod
    def decode(self, ids: Tensor, positions: Tensor, span: int) -> Tensor:
        """One token for each of rows 0..B-1: `ids` [B] at `positions` [B], all below `span` -> logits [B, V]."""

    def rebind(self) -> None:
        """Called when the model's parameters have new values or new storage."""
        return None


def decode_mask(positions: Tensor, span: int, dtype: torch.dtype) -> Tensor:
    """[B, 1, 1, span] additive: 0 where a row may look (its own position and before), -inf beyond."""
    hidden = torch.arange(span, device=positions.device) > positions[:, None]
    return torch.zeros(hidden.shape, dtype=dtype, device=positions.device).masked_fill_(hidden, -torch.inf)[
        :, None, None
    ]


def chunk_mask(start: int, length: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """[1, 1, T, start + T] additive causal mask of a chunk that begins at column `start`."""
    places = torch.arange(start, start + length, device=device)
    return decode_mask(places, start + length, dtype)[:, 0, 0][None, None]


class HfForward(Forward):
    """The model's own forward: prefill on the base model (no head), decode on the causal-LM class."""

    name = "hf"

    def __init__(self, model: Any, kv: SlotKV) -> None:
        self._model, self._base = model, model.base_model
        self._cache = SlotCache(kv)
        self._dtype, self._device = model.dtype, model.device
        known = inspect.signature(type(model).forward).parameters
        self._argument = "cache" if "cache" in known else "past_key_values"
        self._all_rows = torch.arange(kv.rows, device=self._device)

    def prefill(self, ids: Tensor, rows: Tensor, start: int) -> None:
        length = ids.shape[1]
        self._cache.prefill(rows, start, start + length)
        mask = chunk_mask(start, length, self._dtype, self._device) if start else None
        positions = torch.arange(start, start + length, device=self._device)[None].expand(len(ids), -1)
        self._call(self._base, ids, mask, positions)

    def prefill_by_token(self, ids: Tensor, slot: int, start: int) -> None:
        span = start + len(ids)
        self._cache.prefill_by_token(slot, start, span)
        positions = torch.arange(start, span, device=self._device)
        self._call(self._base, ids[:, None], decode_mask(positions, span, self._dtype), positions[:, None])

    def decode(self, ids: Tensor, positions: Tensor, span: int) -> Tensor:
        self._cache.decode(self._all_rows[: len(ids)], positions, span)
        mask = decode_mask(positions, span, self._dtype)
        logits: Tensor = self._call(self._model, ids[:, None], mask, positions[:, None]).logits
        return logits[:, 0]

    def _call(self, module: Any, ids: Tensor, mask: Tensor | None, positions: Tensor) -> Any:
        cache = {self._argument: self._cache}
        return module(input_ids=ids, attention_mask=mask, position_ids=positions, use_cache=True, **cache)
