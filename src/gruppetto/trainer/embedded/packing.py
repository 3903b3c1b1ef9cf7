"""Sequences packed one behind the other in a row, without padding, and attention that stays inside each of them.

    row      prompt a · response a1 · response a2 · response a3 · prompt b · response b1 · …
    a2 sees  ^^^^^^^^                ^^^^^^^^^^^ (itself so far)

The prompt that the rollouts of a group share is computed once a row: a sequence which begins like the one before it
gives only its own part to the row and attends to the other's columns (so it goes on where answers begin alike). With
eight rollouts a group and short answers most of the tokens are such prompts.

Promises: a sequence's hidden states do not depend on its row-mates (up to rounding), and gradients flow into what is
shared from all who share it; a sequence is never split, so a row is longer than the token budget only when one
sequence alone is; what no trained token can see is not computed.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
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

WORTH_SHARING = 8
"""Tokens. From about here on the columns saved pay for the additional attention calls, even of a tiny model."""


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
    """Tensors of one forward, int64: `ids` and `positions` [1, S]; `lengths` of the sequences' own parts, which sum to
    S; `prefixes` the (first column, tokens) that each shares, (0, 0) for none; `sources` [n] the columns whose hidden
    state predicts a trained token, `targets` [n] those tokens."""

    ids: Tensor
    positions: Tensor
    lengths: tuple[int, ...]
    prefixes: tuple[tuple[int, int], ...]
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


@dataclass(frozen=True, slots=True)
class _Place:
    """A sequence in its row: `shared` of its tokens stand at column `prefix` on, the others at column `start` on."""

    piece: Piece
    start: int
    prefix: int
    shared: int

    @property
    def end(self) -> int:
        return self.start + self.piece.ids.size - self.shared

    def columns(self, positions: NDArray[np.int64]) -> NDArray[np.int64]:
        """Where these positions of the sequence stand in the row."""
        return positions + np.where(positions < self.shared, self.prefix, self.start - self.shared)


def rows(pieces: Iterable[Piece], micro_tokens: int) -> Iterator[list[Piece]]:
    """Pieces in the given order, as many to a row as fit in `micro_tokens`; what they share counts once."""
    row: list[_Place] = []
    for piece in pieces:
        place = _place(piece, row)
        if row and place.end > micro_tokens:
            yield [placed.piece for placed in row]
            row = []
            place = _place(piece, row)
        row.append(place)
    if row:
        yield [placed.piece for placed in row]


def pack(pieces: Sequence[Piece], device: torch.device) -> Row:
    """One row of tensors on `device`."""
    places: list[_Place] = []
    for piece in pieces:
        places.append(_place(piece, places))

    def tensor(parts: Iterable[NDArray[np.int64]]) -> Tensor:
        return torch.from_numpy(np.concatenate(list(parts))).to(device, non_blocking=True)

    return Row(
        ids=tensor(place.piece.ids[place.shared :] for place in places)[None],
        positions=tensor(np.arange(place.shared, place.piece.ids.size) for place in places)[None],
        lengths=tuple(place.end - place.start for place in places),
        prefixes=tuple((place.prefix, place.shared) for place in places),
        sources=tensor(place.columns(place.piece.trained - 1) for place in places),
        targets=tensor(place.piece.targets for place in places),
    )


def _place(piece: Piece, row: Sequence[_Place]) -> _Place:
    """Behind the row's last sequence, sharing the beginning of the last one that is there in whole."""
    whole = next((placed for placed in reversed(row) if not placed.shared), None)
    shared = _common(piece, whole.piece) if whole else 0
    return _Place(piece, row[-1].end if row else 0, whole.start if whole and shared else 0, shared)


def _common(piece: Piece, other: Piece) -> int:
    """Leading tokens of `piece` that `other` has too, trained on or not, but never all; 0 when not worth it.

    A sequence with a prompt of its own stays whole even where it begins like another (a system prompt, a template), so
    that those behind it can share all of their prompt.
    """
    limit = min(piece.ids.size - 1, other.ids.size)
    differs = np.flatnonzero(piece.ids[:limit] != other.ids[:limit])
    common = int(differs[0]) if differs.size else limit
    return common if common >= max(WORTH_SHARING, min(limit, int(piece.trained[0]))) else 0


def segment_attention(
    module: torch.nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    segment_lengths: Sequence[int],
    segment_prefixes: Sequence[tuple[int, int]] | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention inside each segment of a packed row; the signature is transformers' attention interface.

    query [1, heads, S, d], key and value [1, kv_heads, S, d]; returns [1, S, heads, d] and no weights. A segment also
    sees the columns of its (first column, tokens) in `segment_prefixes`, which lie before its own in the sequence.
    Both travel from the forward call through the model's keyword arguments; neighbours that are equal in both are
    computed together. Raises `UserError` for an architecture that changes the scores in a way that is not built here.
    """
    if unknown := [name for name in _NOT_BUILT if others.get(name) is not None]:
        raise UserError(f"model: its attention uses {unknown[0]}, which packed training lacks; use Qwen3, Llama ...")
    repeats = query.shape[1] // key.shape[1]
    if repeats > 1:
        key, value = key.repeat_interleave(repeats, dim=1), value.repeat_interleave(repeats, dim=1)
    prefixes = segment_prefixes or [(0, 0)] * len(segment_lengths)
    runs = [(*run, len(list(same))) for run, same in groupby(zip(segment_lengths, prefixes, strict=True))]
    cuts = [torch.split(tensor, [length * count for length, _, count in runs], dim=2) for tensor in (query, key, value)]
    whole: dict[int, tuple[Tensor, Tensor]] = {}
    outputs, column = [], 0
    for q, k, v, (length, (start, shared), count) in zip(*cuts, runs, strict=True):
        q, k, v = (_side_by_side(tensor, count) for tensor in (q, k, v))
        if shared:  # from its own small piece: the gradient of a slice is as large as what it was cut from
            seen = [tensor[:, :, :shared].expand(count, -1, -1, -1) for tensor in whole[start]]
            k, v = (torch.cat(pair, 2) for pair in zip(seen, (k, v), strict=True))
        else:
            whole |= {column + i * length: (k[i : i + 1], v[i : i + 1]) for i in range(count)}
        outputs.append(_attend(q, k, v, scaling, dropout, sliding_window).transpose(0, 1).flatten(1, 2))
        column += length * count
    return torch.cat(outputs, dim=1).transpose(0, 1)[None].contiguous(), None


def _side_by_side(tensor: Tensor, count: int) -> Tensor:
    """[1, heads, count x L, d], neighbours of one length, as a batch [count, heads, L, d]."""
    _, heads, columns, size = tensor.shape
    return tensor[0].view(heads, count, columns // count, size).transpose(0, 1)


def _attend(q: Tensor, k: Tensor, v: Tensor, scaling: float | None, dropout: float, window: int | None) -> Tensor:
    """The queries are those of the last positions."""
    count, total = q.shape[2], k.shape[2]
    if count == total and (window is None or total <= window):
        return scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True, scale=scaling)
    index = torch.arange(total, device=q.device)
    age = index[total - count :, None] - index
    mask = (age >= 0) & (age < (window or total))
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, scale=scaling)
