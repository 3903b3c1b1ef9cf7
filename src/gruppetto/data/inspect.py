"""What a table is like, before anything is trained on it: lengths, duplicates, prompts that do not fit."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from dataclasses import dataclass

from gruppetto.config.schema import DataSection
from gruppetto.data.base import Row, Tokenizer
from gruppetto.data.load import Loaded, duplicates, prompt_key
from gruppetto.data.source import tokenise

PERCENTILES = (50, 90, 99, 100)


@dataclass(frozen=True, slots=True, kw_only=True)
class Inspection:
    """`lengths` belongs to `loaded.rows`, in `unit`; `too_long` are numbers of rows over `limit` (None: unknown)."""

    loaded: Loaded
    unit: str
    lengths: list[int]
    limit: int | None
    too_long: list[int]
    duplicate_pairs: list[tuple[int, int]]

    def percentiles(self) -> dict[str, int]:
        """Lengths by nearest rank: p50, p90, p99, max; empty when there are no rows."""
        ordered = sorted(self.lengths)
        names = {100: "max"}
        return {names.get(p, f"p{p}"): ordered[math.ceil(p / 100 * len(ordered)) - 1] for p in PERCENTILES if ordered}


def inspect_rows(loaded: Loaded, data: DataSection, tokenizer: Tokenizer | None, limit: int | None) -> Inspection:
    """Measures all rows: in tokens as training would see them, or in characters when there is no tokenizer."""
    if tokenizer is None:
        lengths, limit = [_characters(row) for row in loaded.rows], None
    else:
        lengths = [len(ids) for ids in tokenise(loaded.rows, data, tokenizer, loaded.name)]
    over = [row.number for row, n in zip(loaded.rows, lengths, strict=True) if limit is not None and n > limit]
    return Inspection(
        loaded=loaded,
        unit="characters" if tokenizer is None else "tokens",
        lengths=lengths,
        limit=limit,
        too_long=over,
        duplicate_pairs=duplicates(loaded.rows),
    )


def overlap(train: Sequence[Row], held_out: Sequence[Row]) -> list[int]:
    """Numbers of held-out rows whose prompt is a training prompt too."""
    known = {prompt_key(row) for row in train}
    return [row.number for row in held_out if prompt_key(row) in known]


def _characters(row: Row) -> int:
    if isinstance(row.prompt, str):
        return len(row.prompt)
    return sum(len(m["content"] if isinstance(m.get("content"), str) else json.dumps(m)) for m in row.prompt)
