"""How much later the last engine ends because long rollouts fall together on it.

Where every rollout has a slot from the start, and reading is the limit of a decode step, an engine's time follows from
its own lengths exactly:

    T = (base + read) x longest + sum of g(L),      g(L) = row x L + kv_token x (P L + L^2 / 2)

(read: of the weights, what as many rows need as are live on average while the longest is)

so the distribution of T is a convolution (by fast Fourier transform, for each value of the longest), and that of the
latest of E engines its E-th power. What comes on top of engines that all carry the mean load is the spread.
"""

from __future__ import annotations

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from gruppetto.ledger.generation.sizes import Engines, Rollouts
from gruppetto.ledger.lengths.base import whole_power
from gruppetto.ledger.lengths.normal import quantile

if TYPE_CHECKING:
    from numpy.typing import NDArray

_LEVELS = 40
_CELLS = 2048
_ENGINES = 16
_KEPT = 16
"""Spreads that are kept: placements have engines and their shares in common."""


@lru_cache(maxsize=_KEPT)
def spread_s(rollouts: Rollouts, engines: Engines, rows: int) -> float:
    """Seconds by which the latest of the engines, with `rows` rollouts each, is later than with the mean load."""
    import numpy as np

    if rows < 2 or engines.count < 2:
        return 0.0
    table = rollouts.lengths.table()
    below = table.weights @ table.below
    grid, share = table.grid, np.diff(below, prepend=0.0)
    own = _own_s(rollouts, engines, grid)
    if own[-1] <= 0:
        return 0.0
    mean = float(share @ own)
    width = rows * mean + 8 * float(np.sqrt(rows * (share @ own**2))) + 2 * float(own[-1])
    edges = np.array(sorted({*np.linspace(0, len(grid) - 1, _LEVELS).astype(int).tolist(), len(grid) - 2}))
    ended = _below_by_level(own, share, edges, rows, width)
    step = _bare_step_s(rollouts, engines, rows)
    times = np.linspace(0.0, step * grid[-1] + width, 3 * _CELLS)
    cells = (np.arange(_CELLS) + 0.5) * width / _CELLS
    spread, level = np.zeros(len(times)), np.zeros(len(times))
    before, before_all = np.zeros(_CELLS), 0.0
    for at, found in zip(edges, ended, strict=True):
        longest = step * float(grid[at])
        added = found - before
        spread += np.interp(times - longest, cells, added, left=0.0)
        all_below = float(below[at]) ** rows
        typical = float(own[at]) + (rows - 1) * float(share[: at + 1] @ own[: at + 1]) / max(float(below[at]), 1e-300)
        level += np.where(times >= longest + typical, all_below - before_all, 0.0)
        before, before_all = found, all_below
    late = np.clip(level, 0, 1) ** engines.count - np.clip(spread, 0, 1) ** engines.count
    return max(0.0, float(np.trapezoid(late, times)))


def own_s(rollouts: Rollouts, engines: Engines, tokens: float) -> float:
    """g(L): what one more rollout of so many tokens adds to its engine's time. Seconds."""
    import numpy as np

    return float(_own_s(rollouts, engines, np.array([tokens]))[0])


def together_s(rollouts: Rollouts, engines: Engines) -> float:
    """T with the longest of a batch and the mean load, every rollout live from the start. Seconds; a floor where slots
    or KV let some wait."""
    rows = rollouts.count / engines.count
    longest = rollouts.lengths.longest(rollouts.groups, rollouts.group_size)
    return _bare_step_s(rollouts, engines, rows) * longest + rows * own_s(rollouts, engines, rollouts.lengths.mean)


def _bare_step_s(rollouts: Rollouts, engines: Engines, rows: float) -> float:
    """base + read: of a decode step, whatever rows and KV add."""
    longest = rollouts.lengths.longest(rollouts.groups, rollouts.group_size)
    live = min(engines.model.slots, rows * rollouts.lengths.mean / longest)
    return engines.model.base_s + engines.model.read_s(max(1.0, live))


def _own_s(rollouts: Rollouts, engines: Engines, tokens: NDArray[Any]) -> NDArray[Any]:
    model = engines.model
    held = rollouts.prompt_tokens * tokens + tokens**2 / 2
    return model.row_s * tokens + model.kv_token_s * held


def _below_by_level(
    own: NDArray[Any], share: NDArray[Any], edges: NDArray[Any], rows: int, width: float
) -> NDArray[Any]:
    """P(longest <= level, sum of own <= cell), levels x cells."""
    import numpy as np

    cell = np.minimum((own / width * _CELLS).astype(int), _CELLS - 1)
    found = np.empty((len(edges), _CELLS))
    for i, at in enumerate(edges):  # one at a time: all of them together would not stay in the processor's cache
        drawn = np.bincount(cell[: at + 1], share[: at + 1], _CELLS)
        summed = np.fft.irfft(whole_power(np.fft.rfft(drawn, 2 * _CELLS), rows))
        np.cumsum(summed[:_CELLS], out=found[i])
    return found


def shifts_s(rollouts: Rollouts, engines: Engines, rows: int, sticky: float, loaded_s: float) -> list[float]:
    """How much later or earlier than a typical engine each of a few equally likely ones ends, where KV is the limit and
    a rollout stays on its engine. Seconds; their mean is 0.

    What a rollout takes from its engine is its token-steps of KV. A group's members are dealt out to the engines in
    turn, so what they share weighs on all engines alike, as far as there are members for all. `sticky`: share of an
    engine's rollouts that it cannot hand on; `loaded_s`: how long the typical engine is full.
    """
    import numpy as np

    if engines.count < 2 or rows < 1 or sticky <= 0:
        return [0.0]
    table = rollouts.lengths.table()
    drawn = np.diff(table.below, prepend=0.0, axis=1)
    more = 1.0 + (rollouts.tools.observation_tokens / rollouts.tools.turn_tokens if rollouts.tools else 0.0)
    held = rollouts.prompt_tokens * table.grid + more * table.grid**2 / 2
    by_kind, square = drawn @ held, drawn @ held**2
    mean = float(table.weights @ by_kind)
    within = float(table.weights @ (square - by_kind**2))
    between = float(table.weights @ by_kind**2) - mean**2
    apart = max(0.0, 1 - rollouts.group_size / engines.count)
    deviation = float(np.sqrt(max(0.0, within + between * apart) / max(1.0, rows * sticky))) / mean
    places = min(engines.count, _ENGINES)
    normal = [quantile((i + 0.5) / places) for i in range(places)]
    wide = float(np.sqrt(sum(z * z for z in normal) / places))  # quantiles in the middle of shares are too close
    sigma = float(np.sqrt(np.log1p(deviation**2)))  # sums of what is skewed are skewed: lognormal again (Fenton)
    shares = [float(np.exp(z / wide * sigma - sigma * sigma / 2)) - 1 for z in normal]
    return [(share - sum(shares) / places) * sticky * loaded_s for share in shares]
