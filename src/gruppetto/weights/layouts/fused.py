"""Rows of the tensors that engines and trainers keep fused: query, key and value; gate and up.

Promises: which rows stand where is a function of sizes alone; sizes come from shapes and one number, the head
dimension.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from gruppetto.errors import UserError
from gruppetto.weights.layouts.spec import Range, Spec

Rows = list[tuple[str, Range]]
"""Rows of sources, one under the other."""


@dataclass(frozen=True, slots=True)
class Heads:
    """Attention of one layer: query heads, KV heads, rows a head; `gated`: each query head is followed by its gate."""

    queries: int
    groups: int
    dim: int
    gated: bool

    @property
    def each(self) -> int:
        """Query heads of one KV head."""
        return self.queries // self.groups


def read_heads(specs: Mapping[str, Spec], prefix: str, dim: int) -> Heads:
    """From the shapes of `prefix`'s q_proj, k_proj and o_proj. Raises `UserError` where `dim` does not divide them."""
    rows = {part: specs[f"{prefix}.{part}.weight"].shape[0] for part in ("q_proj", "k_proj")}
    width = specs[f"{prefix}.o_proj.weight"].shape[1]
    gated = rows["q_proj"] == 2 * width
    for part, size in (*rows.items(), ("o_proj", width)):
        if dim < 1 or size % dim:
            raise UserError(f"head_dim = {dim} does not divide {prefix}.{part} ({size}); write the config's head_dim")
    queries, groups = width // dim, rows["k_proj"] // dim
    if rows["q_proj"] not in (width, 2 * width) or queries % groups:
        raise UserError(
            f"{prefix}: q_proj has {rows['q_proj']} rows, o_proj {width} columns, k_proj {rows['k_proj']} rows; with "
            f"head_dim = {dim} that is no grouped attention"
        )
    return Heads(queries, groups, dim, gated)


def by_group(prefix: str, leaf: str, heads: Heads, groups: Range) -> Rows:
    """Megatron-core's linear_qkv: for each KV head its query heads (then their gates), its key, its value."""
    q, k, v = (f"{prefix}.{part}.{leaf}" for part in ("q_proj", "k_proj", "v_proj"))
    rows: Rows = []
    for group in range(*groups):
        first = group * heads.each
        rows += _query_rows(q, heads, first, first + heads.each)
        rows += [(k, _span(group, heads.dim)), (v, _span(group, heads.dim))]
    return rows


def _query_rows(q: str, heads: Heads, first: int, last: int) -> Rows:
    if not heads.gated:
        return [(q, (first * heads.dim, last * heads.dim))]
    queries = [(q, _span(2 * head, heads.dim)) for head in range(first, last)]
    return queries + [(q, _span(2 * head + 1, heads.dim)) for head in range(first, last)]


def by_kind(prefix: str, leaf: str, heads: Heads, ranks: int, rank: int) -> Rows:
    """vLLM's and SGLang's qkv_proj of one rank: its query heads, then keys, then values.

    Where there are more ranks than KV heads, several ranks hold the same one. Raises `UserError` where heads do not
    divide.
    """
    if heads.queries % ranks or max(heads.groups, ranks) % min(heads.groups, ranks):
        fits = (
            n
            for n in range(ranks, 0, -1)
            if heads.queries % n == 0 and max(heads.groups, n) % min(heads.groups, n) == 0
        )
        raise UserError(
            f"tp = {ranks} does not divide {heads.queries} query heads and {heads.groups} KV heads; write "
            f"tp = {next(fits)}"
        )
    queries = heads.queries // ranks * (2 if heads.gated else 1)
    kept = max(1, heads.groups // ranks)
    first = rank // max(1, ranks // heads.groups) * kept
    rows: Rows = [(f"{prefix}.q_proj.{leaf}", (rank * queries * heads.dim, (rank + 1) * queries * heads.dim))]
    for part in ("k_proj", "v_proj"):
        rows.append((f"{prefix}.{part}.{leaf}", (first * heads.dim, (first + kept) * heads.dim)))
    return rows


def halves(names: Sequence[str], size: int, rank: int) -> Rows:
    """This rank's rows of each of `names`, one under the other: gate over up, `size` rows each."""
    return [(name, (rank * size, (rank + 1) * size)) for name in names]


def _span(at: int, size: int) -> Range:
    return at * size, (at + 1) * size
