"""The rollout phase of one step, made of exactly the pieces of rollouts that the step made: no luck in it.

What a step made of a rollout is a piece: whole where it began and ended inside the step, else the part of it. Pieces
are dealt to the engines in their order of launch, and each engine runs its own through the timeline of the ledger at
the assumed prices. Prefill is not in it: the record counts it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.generation import Engines
from gruppetto.ledger.generation.lived import Row
from gruppetto.ledger.generation.timeline import live_through


class Piece(NamedTuple):
    """What a step made of one rollout."""

    order: int
    """Of its launch."""
    context: int
    """Tokens that it had at the begin: the prompt, and what it had made."""
    tokens: int
    """Model tokens made in the step, at least 1."""
    waits: int = 0
    """Tool calls in it."""
    tool_s: float = 0.0
    observation: int = 0
    """Tokens that a call answers with."""
    goes_on: bool = False
    """It had begun before the step."""


@dataclass(frozen=True, slots=True)
class Ran:
    """Seconds of the mean engine, and of the last one; rows of a decode step; tokens of all pieces."""

    decode_s: float
    end_s: float
    rows: float
    tokens: int


def run_pieces(pieces: Sequence[Piece], engines: Engines, *, by_kv: bool = False) -> Ran:
    """Runs the pieces of a step. Raises `ValueError` where there is none."""
    if not pieces:
        raise ValueError("a step without a piece has no phase")
    model = replace(engines.model, prefill_token_s=0.0)
    lines = [_one(model, part, by_kv) for part in _dealt(pieces, engines.model.slots, engines.count) if part]
    steps, made = sum(line[2] for line in lines), sum(line[3] for line in lines)
    return Ran(
        decode_s=sum(line[0] for line in lines) / engines.count,
        end_s=max(line[1] for line in lines),
        rows=made / steps if steps else 0.0,
        tokens=sum(piece.tokens for piece in pieces),
    )


def _one(model: EngineModel, pieces: Sequence[Piece], by_kv: bool) -> tuple[float, float, int, int]:
    """(decode seconds, end, decode steps, row steps) of one engine."""
    rows = [Row(piece.context, _turns(piece), 0.5, piece.observation) for piece in pieces]
    most = max(piece.tokens for piece in pieces)
    line = live_through(model, rows, by_kv=by_kv, max_left=most)
    return line.decode_s, line.end_s, line.steps, line.row_steps


def _turns(piece: Piece) -> list[tuple[int, float]]:
    """Its tokens in even turns, with even waits between them."""
    waits = min(piece.waits, piece.tokens - 1)
    if waits <= 0:
        return [(piece.tokens, 0.0)]
    each, left = divmod(piece.tokens, waits + 1)
    sizes = [each + (turn < left) for turn in range(waits + 1)]
    return [*((size, piece.tool_s / waits) for size in sizes[:-1]), (sizes[-1], 0.0)]


def _dealt(pieces: Sequence[Piece], slots: int, engines: int) -> list[list[Piece]]:
    """Those that go on first, then in order of launch: one after the other over the engines while slots are free, then
    to whichever has least to do."""
    hands: list[list[Piece]] = [[] for _ in range(engines)]
    loads = [(0, place) for place in range(engines)]
    for rank, piece in enumerate(sorted(pieces, key=lambda piece: (not piece.goes_on, piece.order))):
        load, place = loads[rank % engines] if rank < slots * engines else min(loads)
        loads[place] = load + piece.tokens, place
        hands[place].append(piece)
    return hands
