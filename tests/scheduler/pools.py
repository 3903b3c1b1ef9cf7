"""Pools with one launch of groups, and engines that say what they are told to, for rules that look at engines."""

from types import SimpleNamespace

from gruppetto.engines.base import EngineStats
from gruppetto.scheduler.entries import EngineSeat
from gruppetto.scheduler.policies.placing import Placing
from gruppetto.scheduler.pool import Pool
from gruppetto.scheduler.tending import Tending
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


class Fixed:
    """An engine of which only the figures are there."""

    def __init__(self, name):
        self.name, self.looked = name, 0
        self.shows()

    def shows(self, **figures):
        zero = dict.fromkeys(("decode_steps_total", "decode_tokens_total", "prefill_tokens_total"), 0)
        gauges = {"version": 0, "running": 0, "waiting": 0, "slots": 100, "kv_tokens": 0, "kv_capacity": 0}
        self._stats = EngineStats(**zero | gauges | figures)

    def stats(self):
        self.looked += 1
        return self._stats

    totals = stats


def loop_of(pool, engines, **placing):
    """What tending needs of a loop; `fenced` and `aborted` are what it asked for."""
    loop = SimpleNamespace(
        settings=SimpleNamespace(lockstep=False, engine_queue=0),
        policy=SimpleNamespace(placing=Placing(**placing)),
        pool=pool,
        engines=engines,
        fenced=[],
        aborted=[],
        tell=lambda kind, **fields: None,
    )

    def fence(engine, why):
        pool.seating.remove(engine)
        loop.tending.forget(engine)
        loop.fenced.append(engine)

    loop.losses = SimpleNamespace(fence=fence)
    loop.calls = SimpleNamespace(abort=loop.aborted.extend, poke=lambda: None)
    loop.tending = Tending(loop)
    return loop
