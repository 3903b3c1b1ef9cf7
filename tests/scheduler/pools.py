"""Pools with one launch of groups, for rules that look at engines."""

from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.pool import Pool
from gruppetto.types import Task


def pool_of(*seats, prompt=100, rates=None, groups=1, members=8, max_tokens=1000):
    pool = Pool(
        batch_groups=groups,
        group_size=members,
        engines=[EngineSeat(f"e{i}", i, slots, slots) for i, slots in enumerate(seats)],
        max_tokens=max_tokens,
    )
    pool.rates = rates
    for _ in range(groups):
        pool.launch(Task(id="t", prompt_ids=range(prompt)), extra=0)
    return pool
