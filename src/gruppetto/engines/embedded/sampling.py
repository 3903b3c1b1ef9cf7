"""Sampling: one uniform number per token, inverse CDF, and the logprob that the trainer recomputes.

Promises: the token depends on its row's logits, settings and uniform number only; a token of zero probability is never
picked; the returned logprob is log-softmax(logits.float() / temperature) over the FULL vocabulary, before top_k and
top_p (temperature 0: greedy, logprob at temperature 1). Rows that do not truncate pay nothing for those that do.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from gruppetto.engines.base import Sampling

_BLOCK = 64
_TWO_LEVEL_FROM = 2048
_HEAD = 256


def uniforms(seed: int, made: int, count: int) -> list[float]:
    """Entries `made` .. `made + count` of the request's table of float32 uniforms in [0, 1): Philox keyed by `seed`."""
    bits = np.random.Philox(key=seed & (2**64 - 1))
    table: np.ndarray[tuple[int], np.dtype[np.float32]] = np.random.Generator(bits).random(
        made + count, dtype=np.float32
    )
    numbers: list[float] = table[made:].tolist()
    return numbers


@dataclass(frozen=True, slots=True)
class SamplingPlan:
    """The settings of B rows as tensors; None where no row asks. Built when rows come or go, not at every step."""

    temperature: Tensor | None
    """[B, 1] float32; 1 for greedy and dead rows."""
    greedy: Tensor | None
    """[B] bool."""
    truncated: Tensor | None
    """[R] int64, the rows with top_k or top_p."""
    top_k: Tensor | None
    """[R, 1] int64, the vocabulary size where off."""
    top_p: Tensor | None
    """[R, 1] float32, 1 where off."""


def plan_for(rows: Sequence[Sampling | None], vocab: int, device: torch.device) -> SamplingPlan:
    """The plan of one batch; None stands for a dead row."""
    heat = [s.temperature if s is not None and s.temperature > 0 else 1.0 for s in rows]
    greedy = [s is not None and s.temperature == 0 for s in rows]
    cut = [i for i, s in enumerate(rows) if s is not None and s.temperature > 0 and _truncates(s, vocab)]
    asks = [s for s in (rows[i] for i in cut) if s is not None]
    ks = [[s.top_k if 0 < s.top_k < vocab else vocab] for s in asks]
    return SamplingPlan(
        temperature=torch.tensor(heat, device=device)[:, None] if any(t != 1.0 for t in heat) else None,
        greedy=torch.tensor(greedy, device=device) if any(greedy) else None,
        truncated=torch.tensor(cut, device=device) if cut else None,
        top_k=torch.tensor(ks, device=device) if cut else None,
        top_p=torch.tensor([[s.top_p] for s in asks], device=device) if cut else None,
    )


def _truncates(sampling: Sampling, vocab: int) -> bool:
    return 0 < sampling.top_k < vocab or sampling.top_p < 1


def sample(logits: Tensor, u: Tensor, plan: SamplingPlan) -> tuple[Tensor, Tensor]:
    """Picks a token a row: `logits` [B, V] float, `u` [B] float32 in [0, 1) -> ids [B] int64, logprobs [B] float32."""
    x = logits.float()
    if plan.temperature is not None:
        x = x / plan.temperature
    x = x - x.amax(-1, keepdim=True)
    mass = x.exp()
    total, sums = _totals(mass)
    kept, kept_total, kept_sums = mass, total, sums
    if plan.truncated is not None and plan.top_k is not None and plan.top_p is not None:
        kept = mass.clone()
        kept[plan.truncated] = _truncate(mass[plan.truncated], plan.top_k, plan.top_p)
        kept_total, kept_sums = _totals(kept)
    picks = _inverse_cdf(kept, kept_total, kept_sums, u)
    if plan.greedy is not None:
        picks = torch.where(plan.greedy, x.argmax(-1), picks)
    return picks, x.gather(1, picks[:, None])[:, 0] - total[:, 0].log()


def _totals(mass: Tensor) -> tuple[Tensor, Tensor]:
    """Row sums [B, 1] and running sums: over tokens, or over blocks of 64 when the vocabulary is large."""
    if mass.shape[1] < _TWO_LEVEL_FROM:
        sums = mass.cumsum(-1)
    else:
        sums = _blocks(mass).sum(-1).cumsum(-1)
    return sums[:, -1:], sums


def _blocks(mass: Tensor) -> Tensor:
    short = -mass.shape[1] % _BLOCK
    padded = torch.nn.functional.pad(mass, (0, short)) if short else mass
    return padded.view(mass.shape[0], -1, _BLOCK)


def _inverse_cdf(mass: Tensor, total: Tensor, sums: Tensor, u: Tensor) -> Tensor:
    target = _below(u[:, None] * total, total)
    found = torch.searchsorted(sums, target, right=True).clamp_max(sums.shape[1] - 1)  # only NaN gets beyond
    if mass.shape[1] < _TWO_LEVEL_FROM:
        return found[:, 0]
    before = sums.gather(1, (found - 1).clamp_min(0)) * (found > 0)
    inner = _blocks(mass).gather(1, found[:, :, None].expand(-1, 1, _BLOCK))[:, 0].cumsum(-1)
    within = torch.searchsorted(inner, _below((target - before).clamp_min(0), inner[:, -1:]), right=True)
    return (found * _BLOCK + within)[:, 0].clamp_max(mass.shape[1] - 1)


def _below(target: Tensor, bound: Tensor) -> Tensor:
    """`target`, but always less than `bound`: rounding must not step past the last token with mass."""
    return torch.minimum(target, torch.nextafter(bound, torch.zeros_like(bound)))


def _truncate(mass: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """Zeroes what top_k, then top_p leave out; ties at the edge stay in. Sorts whole rows only where 256 do not do."""
    vocab = mass.shape[1]
    need = int(torch.where(top_k < vocab, top_k, 0).max())
    edge, done = _edge(mass, top_k, top_p, min(vocab, max(_HEAD, need)))
    if not bool(done.all()):
        open_rows = (~done[:, 0]).nonzero()[:, 0]
        edge[open_rows] = _edge(mass[open_rows], top_k[open_rows], top_p[open_rows], vocab)[0]
    return mass * (mass >= edge)


def _edge(mass: Tensor, top_k: Tensor, top_p: Tensor, head: int) -> tuple[Tensor, Tensor]:
    """The smallest mass kept [R, 1], and whether the `head` largest tokens were enough to know it."""
    largest = mass.topk(head, dim=-1).values
    kth = largest.gather(1, (top_k - 1).clamp_max(head - 1))
    is_k = top_k < mass.shape[1]
    whole = torch.where(is_k, (largest * (largest >= kth)).sum(-1, keepdim=True), mass.sum(-1, keepdim=True))
    before = largest.cumsum(-1) - largest
    inside = (before < top_p * whole) & (~is_k | (largest >= kth))
    last = inside.sum(-1, keepdim=True).clamp_min(1) - 1
    enough = (head == mass.shape[1]) | (last < head - 1) | (is_k & (top_k <= head))
    return largest.gather(1, last), enough
