"""How old a trained token may be, and what happens to one that is older.

The close rule is exact: it bounds the staleness of every token, not the number of admissions. With at most (k+1)N
groups live or ready, batch V may close when for every j = 0..k at most j*N groups stay behind whose oldest token has
version at most V - k + j. Then no group is ever older than k when it is trained, nothing is dropped, and the rule never
blocks for ever: when everything live is ready the batch is the N oldest, and what stays behind is within the bound.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from gruppetto.scheduler.views import PoolView

OverAge = Literal["wait", "mask", "drop"]


@dataclass(frozen=True, slots=True)
class Freshness:
    """`max_staleness` k of a trained token (None = no bound) and what is done about older ones."""

    max_staleness: int | None = None
    over_age: OverAge = "wait"

    def may_close(self, view: PoolView) -> bool:
        """Whether the N oldest ready groups may be the next batch. O(k)."""
        if self.max_staleness is None or self.over_age != "wait":
            return True
        oldest_allowed = view.version - self.max_staleness
        return all(
            view.num_behind(oldest_allowed + j) - min(view.batch_groups, view.num_ready_behind(oldest_allowed + j))
            <= j * view.batch_groups
            for j in range(self.max_staleness + 1)
        )

    def expired(self, view: PoolView) -> Iterable[int]:
        """Groups that can no longer be trained whole and are to be dropped (over_age = drop only)."""
        if self.max_staleness is None or self.over_age != "drop":
            return ()
        return view.groups_behind(view.version - self.max_staleness - 1)

    def masks(self, staleness: int) -> bool:
        """Whether a token of this staleness is trained through without gradient."""
        return self.max_staleness is not None and self.over_age == "mask" and staleness > self.max_staleness
