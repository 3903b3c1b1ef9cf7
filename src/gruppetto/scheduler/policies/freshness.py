"""How old a trained token may be, and what happens to one that is older.

The close rule is exact: it bounds the staleness of every token, not the number of admissions. With at most (k+1)N
groups live or ready, batch V may close when for every j = 0..k at most j*N groups stay behind whose oldest token has
version at most V - k + j. Then no group is ever older than k when it is trained, nothing is dropped, and the rule never
blocks for ever: when everything live is ready the batch is the N oldest, and what stays behind is within the bound.
A group that the trainer has been given early (`Commit`) takes a place in the batch; it may have one only where the rule
can still be met by the places that are left.

Another policy, or a run that was resumed with other settings, may leave more groups than that, or older ones. No token
beyond k is trained on all the same: those of groups that are too old already are masked and nobody waits for them; of
the others as many are waited for as have a place.
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
        """Whether the oldest ready groups may fill the next batch. O(min(k, version))."""
        if self.max_staleness is None or self.over_age != "wait":
            return True
        oldest_allowed = view.version - self.max_staleness
        late = self.left_over(view)
        late_ready = view.num_ready_behind(oldest_allowed - 1) if late else 0
        places = max(0, view.batch_groups - view.num_committed - late_ready)
        return all(
            view.num_ready_behind(oldest_allowed + j) - late_ready
            >= min(places, view.num_behind(oldest_allowed + j) - late - j * view.batch_groups)
            for j in self._bounds(view.version, self.max_staleness + 1)
        )

    def left_over(self, view: PoolView) -> int:
        """Groups with tokens that are too old to be trained on, though this policy waits so that there are none."""
        if self.max_staleness is None or self.over_age != "wait":
            return 0
        too_old = view.version - self.max_staleness - 1
        return view.num_behind(too_old) if too_old >= 0 else 0

    def may_commit(self, view: PoolView) -> int:
        """How many ready groups, oldest first, may have their place in the next batch already now.

        A place given to a group with oldest <= V - k + j is one that such a group needs anyway; one given to a younger
        group is lost to them, and must be to spare.
        """
        places = min(view.batch_groups - view.num_committed, view.num_ready)
        if self.max_staleness is None or self.over_age != "wait":
            return places
        for j in self._bounds(view.version, self.max_staleness):
            allowed = view.version - self.max_staleness + j
            spare = (j + 1) * view.batch_groups - view.num_behind(allowed) - view.num_committed
            places = min(places, view.num_ready_behind(allowed) + max(0, spare))
        return places

    def _bounds(self, version: int, end: int) -> range:
        """The j that can bind: nothing is older than version 0, and what V - k + j < 0 bounds is empty."""
        return range(max(0, (self.max_staleness or 0) - version), end)

    def expired(self, view: PoolView) -> Iterable[int]:
        """Groups that can no longer be trained whole and are to be dropped (over_age = drop only)."""
        if self.max_staleness is None or self.over_age != "drop":
            return ()
        return view.groups_behind(view.version - self.max_staleness - 1)

    def masks(self, staleness: int) -> bool:
        """Whether a token of this staleness is trained through without gradient; where older ones are waited for or
        dropped there are none, but for what another policy has left."""
        return self.max_staleness is not None and staleness > self.max_staleness
