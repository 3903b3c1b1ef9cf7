"""When the last rollout of a batch ends: not a typical one, so it is computed from the distribution of lengths.

A timeline says how many tokens a rollout that is on an engine all the time has made by t, V(t). One that started at s
has ended by t if its length is at most V(t) - V(s), so with starts s_b of equal shares

    P(all ended by t) = product over b of ( sum over kinds of weight x P(L <= V(t) - V(s_b) | kind)^G )^(N / bins)
    E[end of the last] = integral of 1 - P

With tools, one of n turns and W seconds in them has made (V(t) - V(s)) (1 - W / (t - s)); the distribution of W is the
n-fold convolution of a call's.
After the typical rollouts have ended the last ones decode alone.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TYPE_CHECKING, Any, NamedTuple

from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.generation.lived import Timeline
from gruppetto.ledger.generation.sizes import Rollouts
from gruppetto.ledger.lengths.base import Lengths, Table, whole_power

if TYPE_CHECKING:
    from numpy.typing import NDArray

_TIMES = 320
_RAREST = 1e-6
"""Share of rollouts whose tool time may lie beyond the grid of seconds."""
_BINS = 10
_ALONE = 48
_LEVELS = 40


@dataclass(frozen=True, eq=False)
class Tail:
    """The ends of a batch of which every engine lives through `line` (None: every rollout has an engine to itself)."""

    rollouts: Rollouts
    model: EngineModel
    line: Timeline | None = None
    ranked: int = 0
    """Engines, where who starts when follows from the prompt, so that rows stand for their own prompts; else 0."""

    # -- figures ------------------------------------------------------------------------------------------------------

    @cached_property
    def last_s(self) -> float:
        """Expected end of the last rollout. Seconds."""
        return self.mean_of(self.all_ended)

    @cached_property
    def times(self) -> NDArray[Any]:
        """The grid of seconds."""
        import numpy as np

        clock, made = self._pace
        most = float(
            np.interp(float(np.interp(self._starts[-1], clock, made)) + self.rollouts.lengths.cap, made, clock)
        )
        tools = self.rollouts.tools
        if tools is not None:
            seconds, waited = tools.waits(tuple(number - 1 for number in self._turns[0]))
            last = min(int(np.searchsorted(waited[-1], 1 - _RAREST)), len(seconds) - 1)
            most += float(seconds[last])
        return np.linspace(0.0, most * 1.001, _TIMES)

    @cached_property
    def all_ended(self) -> NDArray[Any]:
        """P(all ended) on the grid."""
        import numpy as np

        if self.ranked:
            with np.errstate(divide="ignore"):
                return np.asarray(np.exp(self.ranked * np.log(self._row_ended).sum(axis=0)))
        power = self.rollouts.groups / len(self._starts)
        found = np.ones(len(self.times))
        for share in self._shares:
            found = found * share.groups**power
        return found

    def shifted(self, shifts_s: Sequence[float]) -> float:
        """Expected end of the last rollout where equal shares of the engines are so much later. Seconds."""
        import numpy as np

        if len(shifts_s) < 2:
            return self.last_s
        found, most = np.ones(len(self.times)), max(shifts_s)
        times = np.linspace(0.0, self.times[-1] + most, len(self.times))
        for shift in shifts_s:
            found = found * np.interp(times - shift, self.times, self.all_ended, left=0.0) ** (1 / len(shifts_s))
        return float(np.trapezoid(1 - found, times))

    def mean_of(self, ended: NDArray[Any]) -> float:
        """Expectation of a time from its distribution on the grid."""
        import numpy as np

        return float(np.trapezoid(1 - ended, self.times))

    def quantiles(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the end of the last rollout."""
        import numpy as np

        ended = np.maximum.accumulate(self.all_ended)
        return [float(t) for t in np.interp(shares, ended, self.times)]

    def idle(self, rows: int) -> NDArray[Any]:
        """P(all of `rows` rollouts have ended) on the grid: the share of engines that have nothing left to do."""
        import numpy as np

        with np.errstate(divide="ignore"):
            if self.ranked:
                return np.asarray(np.exp(np.log(self._row_ended).sum(axis=0)))
            logs = sum(np.log(share.ended) for share in self._shares) / len(self._shares)
        return np.asarray(np.exp(rows * logs))

    def share_ended(self) -> NDArray[Any]:
        """Expected share of the rollouts that have ended, on the grid."""
        import numpy as np

        if self.ranked:
            return np.asarray(self._row_ended.mean(axis=0))
        return np.asarray(sum(share.ended for share in self._shares) / len(self._shares))

    def ready_tokens(self) -> NDArray[Any]:
        """Expected tokens, prompts and observations too, of groups that have ended, on the grid."""
        import numpy as np

        observed = self.rollouts.observed / self.rollouts.lengths.mean if self.rollouts.tools else 0.0
        prompts = self.rollouts.group_size * self.rollouts.prompt_tokens
        found = sum((1.0 + observed) * share.tokens + prompts * share.groups for share in self._shares)
        return np.asarray(found * self.rollouts.groups / len(self._shares))

    # -- inside -------------------------------------------------------------------------------------------------------

    @property
    def _table(self) -> Table:
        return self.rollouts.lengths.table()

    @cached_property
    def _pace(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """(seconds, tokens made), past the timeline alone."""
        import numpy as np

        clock, made = [0.0], [0.0]
        if self.line is not None:
            clock = self.line.times
            made = self.line.running if self.rollouts.tools is None else self.line.progress
        cap, tools = self.rollouts.lengths.cap, self.rollouts.tools
        more = tools.observation_tokens / tools.turn_tokens if tools else 0.0
        lone = 0.0 if self.line is None else made[-1]
        context = self.rollouts.prompt_tokens + min(lone, cap / 2) * (1 + more)
        steps = sorted(set(np.linspace(1, cap, _ALONE).astype(int).tolist()))
        rest = [
            self.model.steps_s(1, int(context + n * more / 2), n) + self.model.prefill_token_s * n * more for n in steps
        ]
        steps.append(8 * cap)  # nobody makes more than the cap, but a tool holds up who could have
        rest.append(8 * rest[-1])
        first = 0.0 if self.line is not None else self.model.prefill_token_s * self.rollouts.prompt_tokens
        past = (np.array([clock[-1] + first]), np.array([made[-1]])) if first else (np.empty(0), np.empty(0))
        return (
            np.concatenate([clock, past[0], clock[-1] + first + np.array(rest)]),
            np.concatenate([made, past[1], made[-1] + np.array(steps, dtype=float)]),
        )

    @cached_property
    def _made(self) -> NDArray[Any]:
        """Tokens that a rollout which has been there from the beginning has made, on the grid."""
        import numpy as np

        return np.asarray(np.interp(self.times, *self._pace))

    @cached_property
    def _starts(self) -> list[float]:
        """Seconds at which equal shares of the rollouts start."""
        if self.line is None:
            return [0.0]
        starts = sorted(self._began)
        if starts[-1] <= starts[0] + 1e-9:
            return [starts[0]]
        return [starts[int((i + 0.5) / _BINS * len(starts))] for i in range(_BINS)]

    @cached_property
    def _began(self) -> list[float]:
        """When each typical row would have started if it had never waited; with tools, when it did start."""
        import numpy as np

        assert self.line is not None
        rows = self.line.rows
        if self.rollouts.tools is not None:
            return [row.started_s for row in rows]
        times, running = np.array(self.line.times), np.array(self.line.running)
        ran = np.interp([row.ended_s for row in rows], times, running)
        begun = ran - np.array([row.tokens for row in rows])
        return [float(seconds) for seconds in np.interp(begun, running, times)]

    @cached_property
    def _shares(self) -> list[_Shares]:
        """What has ended of the rollouts of each start, on the grid."""
        return [self._shares_of(start) for start in self._starts]

    def _shares_of(self, start: float) -> _Shares:
        import numpy as np

        lengths, size = self.rollouts.lengths, self.rollouts.group_size
        if self.rollouts.tools is None:  # its length alone says when it ends: kinds are mixed once, by length
            at, grid = self._could(start), self._table.grid
            return _Shares(*(np.interp(at, grid, share, left=0.0) for share in _by_length(lengths, size)))
        made = _look_up(self._table.grid, _moments(lengths), self._could(start))
        return _mixed(self._table.weights, self._ended_by(start), made, size, lengths.cap)

    @cached_property
    def _turns(self) -> tuple[tuple[int, ...], NDArray[Any]]:
        """(numbers of turns, P(a rollout has about so many | kind)); at most `_LEVELS` of them."""
        import numpy as np

        tools, table = self.rollouts.tools, self._table
        assert tools is not None
        most = max(1, round(self.rollouts.lengths.cap / tools.turn_tokens))
        numbers = np.array(sorted(set(np.linspace(1, most, min(most, _LEVELS)).round().astype(int).tolist())))
        edges = np.append((numbers[:-1] + numbers[1:]) / 2, most + 1) * tools.turn_tokens
        below = _look_up(table.grid, table.below, edges)
        return tuple(numbers.tolist()), np.diff(below, prepend=0.0, axis=1)

    def _ended_by(self, start: float) -> NDArray[Any]:
        """P(a rollout with tools that started at `start` has ended | kind), kinds x times."""
        import numpy as np

        could, passed = self._could(start), np.maximum(self.times - start, 1e-9)
        tools = self.rollouts.tools
        assert tools is not None
        numbers, shares = self._turns
        seconds, waited = tools.waits(tuple(number - 1 for number in numbers))
        made = np.array(numbers)[:, None] * tools.turn_tokens / np.maximum(could, 1e-9)
        cell = passed * (1 - made) / seconds[1]  # it is gone while a tool runs, and makes nothing
        left = np.clip(cell, 0, len(seconds) - 2).astype(int)
        rows = np.arange(len(numbers))[:, None]
        ended = waited[rows, left] + np.clip(cell - left, 0, 1) * (waited[rows, left + 1] - waited[rows, left])
        ended = np.where(cell < 0, 0.0, ended)
        return np.asarray(shares @ ended)

    @cached_property
    def _row_ended(self) -> NDArray[Any]:
        """P(ended) of each typical row given its prompt, rows x times."""
        import numpy as np

        assert self.line is not None
        began = np.array(self._began)[:, None]
        could = np.where(self.times > began, self._made - np.interp(began, *self._pace), 0.0)
        kinds = np.array([self.rollouts.lengths.kind(row.rank) for row in self.line.rows])
        found, table = np.empty(could.shape), self._table
        for kind in set(kinds.tolist()):  # numpy's `unique` would import a module that takes longer than all of this
            found[kinds == kind] = np.interp(could[kinds == kind], table.grid, table.below[kind], left=0.0)
        return found

    def _could(self, start: float) -> NDArray[Any]:
        """Tokens that a rollout which has been there since `start` has made, on the grid."""
        import numpy as np

        could = self._made - float(np.interp(start, *self._pace))
        return np.where(self.times > start, could, 0.0)


class _Shares(NamedTuple):
    """What has ended, kinds of prompts mixed by their weights."""

    ended: NDArray[Any]
    """P(a rollout has ended)."""
    groups: NDArray[Any]
    """P(all of a group have ended)."""
    tokens: NDArray[Any]
    """E[model tokens of a group; all of it have ended]."""


def _mixed(weights: NDArray[Any], ended: NDArray[Any], made: NDArray[Any], group_size: int, cap: int) -> _Shares:
    """From P(ended | kind) and E[L; ended | kind], both kinds x points."""
    import numpy as np

    others = whole_power(ended, group_size - 1)
    tokens = weights @ (group_size * others * np.minimum(made, ended * cap))
    return _Shares(weights @ ended, weights @ (others * ended), tokens)


@lru_cache(maxsize=16)
def _by_length(lengths: Lengths, group_size: int) -> _Shares:
    """What has ended when every rollout has made so many tokens, on the grid of the lengths."""
    table = lengths.table()
    return _mixed(table.weights, table.below, _moments(lengths), group_size, lengths.cap)


@lru_cache(maxsize=4)
def _moments(lengths: Lengths) -> NDArray[Any]:
    """E[L; L <= grid | kind], kinds x grid."""
    import numpy as np

    grid, below = lengths.table().grid, lengths.table().below
    inside = np.cumsum((below[:, 1:] + below[:, :-1]) / 2 * np.diff(grid), axis=1)
    area = np.concatenate([np.zeros((len(below), 1)), inside], axis=1)
    return np.asarray(grid * below - area)


def _look_up(grid: NDArray[Any], table: NDArray[Any], at: NDArray[Any]) -> NDArray[Any]:
    """Each row of `table` over `grid` at the points `at`; 0 before the grid, the last value past it."""
    import numpy as np

    right = np.clip(np.searchsorted(grid, at, side="right"), 1, len(grid) - 1)
    part = np.clip((at - grid[right - 1]) / (grid[right] - grid[right - 1]), 0.0, 1.0)
    found = table[:, right - 1] * (1 - part) + table[:, right] * part
    return np.where(at < grid[0], 0.0, found)
