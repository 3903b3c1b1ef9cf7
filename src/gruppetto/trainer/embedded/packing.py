"""Sequences packed one behind the other in a row, without padding, and attention that stays inside each of them.

Promises: a sequence's hidden states do not depend on its row-mates (up to rounding); a sequence is never split, so a
row is longer than the token budget only when one sequence alone is; what no trained token can see is not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from gruppetto.errors import UserError

ATTENTION = "gruppetto_segments"
"""Name under which `segment_attention` is registered with transformers."""

_NOT_BUILT = ("softcap", "s_aux", "position_bias")
"""Arguments of the attention interface that change the scores: soft-caps, sinks, learned position biases."""


@dataclass(frozen=True, slots=True)
class Piece:
    """One sequence as fed: `ids` [S] int64, cut before its last trained token; `trained` [n] the positions (in the
    uncut sequence) that are trained on; `targets` [n] their token ids. n >= 1. `owner` is its index in the caller's
    list."""

    owner: int
    ids: NDArray[np.int64]
    trained: NDArray[np.int64]
    targets: NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Row:
    """Tensors of one forward, int64: `ids` and `positions` [1, S]; `lengths` of the sequences, which sum to S;
    `sources` [n] the columns whose hidden state predicts a trained token, `targets` [n] those tokens."""

    ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    sources: Tensor
    targets: Tensor


def cut(owner: int, token_ids: Sequence[int], is_trained: NDArray[np.bool_]) -> Piece | None:
    """The part of a sequence that must be computed; None when no token is trained on.

    `is_trained` [T]. Raises ValueError when the first token is, since nothing predicts it.
    """
    trained = np.flatnonzero(is_trained)
    if trained.size == 0:
        return None
    if trained[0] == 0:
        raise ValueError("the first token of a sequence cannot be trained on: nothing predicts it")
    ids = np.asarray(token_ids, dtype=np.int64)
    return Piece(owner, ids[: trained[-1]], trained, ids[trained])


def rows(pieces: Iterable[Piece], micro_tokens: int) -> Iterator[list[Piece]]:
    """Pieces in the given order, as many to a row as fit in `micro_tokens`."""
    row: list[Piece] = []
    used = 0
    for piece in pieces:
        if row and used + piece.ids.size > micro_tokens:
            yield row
            row, used = [], 0
        row.append(piece)
        used += piece.ids.size
    if row:
        yield row


def pack(pieces: Sequence[Piece], device: torch.device) -> Row:
    """One row of tensors on `device`."""
    lengths = [piece.ids.size for piece in pieces]
    starts = np.cumsum([0, *lengths[:-1]])
    positions = np.concatenate([np.arange(length) for length in lengths])
    sources = np.concatenate([piece.trained - 1 + start for piece, start in zip(pieces, starts, strict=True)])

    def tensor(values: NDArray[np.int64]) -> Tensor:
        return torch.from_numpy(values).to(device, non_blocking=True)

    return Row(
        ids=tensor(np.concatenate([piece.ids for piece in pieces]))[None],
        positions=tensor(positions)[None],
        lengths=tuple(lengths),
        sources=tensor(sources),
        targets=tensor(np.concatenate([piece.targets for piece in pieces])),
    )


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_lengths: Sequence[int],
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of a packed row; the signature is transformers' attention interface.

    query [1, heads, S, d], key and value [1, kv_heads, S, d]; returns [1, S, heads, d] and no weights.
    `segment_lengths` travels from the forward call through the model's keyword arguments. Raises `UserError` for an
    architecture that changes the scores in a way that is not built here.
    """
    if unknown := [name for name in _NOT_BUILT if others.get(name) is not None]:
        raise UserError(f"model: its attention uses {unknown[0]}, which packed training lacks; use Qwen3, Llama ...")
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    cuts = [torch.split(tensor, list(segment_lengths), dim=2) for tensor in (query, key, value)]
    outputs = [_attend(q, k, v, scaling, dropout, sliding_window) for q, k, v in zip(*cuts, strict=True)]
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None) -> Tensor:
    if window is None or q.shape[2] <= window:
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling)
    index = torch.arange(q.shape[2], device=q.device)
    age = index[:, None] - index[None, :]
    return scaled_dot_product_attention(
        q, k, v, attn_mask=(age >= 0) & (age < window), dropout_p=dropout, scale=scaling
    )
