"""How much is live, when a batch closes, and who starts where: the parts that `sync` and `partial` share."""

from __future__ import annotations

import math
from collections.abc import Sequence
from heapq import heapify, heappop, heapreplace

from gruppetto.scheduler.actions import Action, CloseBatch, Launch, ParkAll, Start
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.views import PoolView


def close(view: PoolView, freshness: Freshness) -> Sequence[Action]:
    """Closes the batch as soon as N groups are ready and fresh enough; whoever still runs is parked.

    Where the data has ended and nothing is live, what is ready is the last, smaller batch.
    """
    count = min(view.batch_groups, view.num_ready)
    complete = count == view.batch_groups or (view.exhausted and view.num_live == 0 and count > 0)
    if not complete or not freshness.may_close(view):
        return ()
    return (CloseBatch(tuple(view.ready(count))), ParkAll())


def refill(view: PoolView, depth: float) -> Sequence[Action]:
    """Launches groups until `depth` batches are live or ready, so that a dropped group is replaced at once."""
    missing = math.ceil(depth * view.batch_groups - 1e-9) - view.num_live - view.num_ready
    return (Launch(missing),) if missing > 0 and not view.exhausted else ()


def fill(view: PoolView) -> Sequence[Action]:
    """Starts the head of the queue, each rollout on the engine with the smallest share of its capacity in use."""
    if not view.num_queued:
        return ()
    seats = [(seat.load / seat.capacity, i, seat.load, seat) for i, seat in enumerate(view.seats())]
    heapify(seats)
    actions: list[Action] = []
    for rollout in view.queue() if seats else ():
        _, i, load, seat = seats[0]
        actions.append(Start(rollout.id, seat.name))
        if load + 1 < seat.capacity:
            heapreplace(seats, ((load + 1) / seat.capacity, i, load + 1, seat))
        else:
            heappop(seats)
        if not seats:
            break
    return actions
