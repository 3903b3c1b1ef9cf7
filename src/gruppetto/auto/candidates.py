"""What `auto` tries: from the rule's plain choice to a scheduling policy, and which others beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace

from gruppetto.presets import CHUNK, MAX_DEFER
from gruppetto.scheduler.beliefs.rule import Choice, Limits, neighbours
from gruppetto.scheduler.memory import LONG_SHARE
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.scheduler.policies.order import ORDERS
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.policies.rounds import Continuous, Rounds, ShortLong

WIDEST = 7


def composed(choice: Choice, *, kv_known: bool, pool: bool) -> Composed:
    """The scheduling policy that a choice names."""
    tail = choice.tail_batch is not None
    # nobody to make room for, and too little to move for: chunks would only cost their prefills
    plain = choice.order == "fifo" and choice.max_staleness == 0 and not kv_known
    rounds: Rounds
    if choice.tail_batch is not None:
        rounds = ShortLong(choice.tail_batch, 1.0, MAX_DEFER)
    else:
        rounds = Continuous(choice.depth, MAX_DEFER if choice.defer else None)
    return Composed(
        name="auto",
        rounds=rounds,
        order=ORDERS[choice.order](),
        placing=Placing(
            chunk=None if plain else CHUNK,
            limit=True,
            count_kv=kv_known,
            hold=choice.hold and kv_known,
            kv_pool=pool,
            yields=ORDERS[choice.order]().rekeys,
        ),
        unfinished="drop" if tail else "keep",
        freshness=Freshness(choice.max_staleness, choice.over_age),
        stream=choice.stream,
        finish_first=choice.finish_first,
    )


def candidates(ruled: Choice, present: Choice, limits: Limits, *, history: bool) -> list[Choice]:
    """The present choice, the rule's, far ones of each kind, then neighbours of both; all but the present one keep the
    limits, and the first ones matter most."""
    tried = [present, ruled, *_landmarks(ruled, limits, history=history)]
    tried += [*neighbours(ruled, limits, history=history), *neighbours(present, limits, history=history)]
    return list(dict.fromkeys(tried))


def _landmarks(ruled: Choice, limits: Limits, *, history: bool) -> Iterator[Choice]:
    """One of each kind, so that a wrong rule is found out."""
    k = limits.max_staleness
    plain = replace(ruled, tail_batch=None, defer=False, max_staleness=k, why=())
    yield replace(plain, over_age="wait", depth=1.0 if k == 0 else k + 1.0, order=plain.order if k == 0 else "fifo")
    if history and k <= 1:
        yield replace(plain, over_age="wait", depth=min(ruled.depth, k + 1.0), defer=True)
    if k:
        yield replace(plain, over_age="wait", depth=1.25, order="fifo")
    else:
        yield replace(plain, over_age="wait", depth=1.0, order="fifo")
    if limits.allow_mask:
        yield replace(plain, over_age="mask", depth=1.5 if k else 1.25)
    if limits.allow_censoring:
        yield replace(plain, tail_batch=1.25, max_staleness=0, over_age="wait", depth=1.0)


def warm_up(asked: Sequence[Choice]) -> tuple[int, int]:
    """(steps to forecast, steps to leave out before them) for these candidates together; a wider window than
    `WIDEST` steps is taken for one of so many."""
    k = min(WIDEST, max(choice.max_staleness for choice in asked))
    etas = [choice.tail_batch for choice in asked if choice.tail_batch is not None]
    period = max((math.ceil(eta / (eta - 1)) for eta in etas if eta > 1), default=0)
    if any(choice.defer for choice in asked):
        period = max(period, LONG_SHARE)
    return max(8, 3 * (k + 1), min(2 * period, 12)), k + 1
