"""When an engine takes new weights, where every rollout keeps the version that it began with (DORA's window).

Engines go over when something waits for one. A version keeps engines in proportion to its rollouts; where these have
become few, so many that all of them at their longest would fill half of the KV, up to an equal part of the engines for
each version. Those left are the longest of their version: drawn together on fewer engines they would slow each other
down or push out each other's KV, and all newer versions wait for them. Beyond that the emptiest engines go over; what
runs there is parked, and goes on beside the others of its version.

Promise: a version with a rollout on an engine, in the queue or in a tool call keeps an engine while it has one.

Source: DORA (engines divided in proportion to pending work; the window slides when its oldest version has drained).
That few rollouts get more is ours: DORA can give an engine back to an older version, and a publish brings only the
newest weights.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence

from gruppetto.scheduler.actions import Action, Update
from gruppetto.scheduler.views import EngineView, PoolView


def update(view: PoolView) -> Sequence[Action]:
    """Engines that go over to the newest weights now."""
    if not view.num_queued:
        return ()
    engines = view.engines()
    behind = [engine for engine in engines if engine.version < view.version and not engine.updating]
    if not behind:
        return ()
    rollouts = _rollouts(view, engines)
    spare: list[str] = []
    for version in sorted({engine.version for engine in behind}):
        own = sorted((engine for engine in behind if engine.version == version), key=lambda engine: -engine.load)
        kept = max(_kept(own, rollouts, len(engines), view.max_tokens), _may_come_back(view, version))
        spare += [engine.name for engine in own[kept:]]
    return (Update(tuple(spare)),) if spare else ()


def _kept(own: Sequence[EngineView], rollouts: Counter[int], engines: int, max_tokens: int) -> int:
    """How many of its engines, the fullest first, a version keeps from newer ones."""
    count = rollouts[own[0].version]
    by_number = engines * count // max(1, rollouts.total())
    equal = engines // max(1, len(+rollouts))
    parked = count - sum(engine.load for engine in own)
    usable = sum(engine.load > 0 for engine in own) + parked  # what runs stays where it is
    return max(min(usable, max(by_number, min(equal, _enough(own[0], count, max_tokens)))), _fits(own, count))


def _enough(engine: EngineView, rollouts: int, max_tokens: int) -> int:
    """Engines like this one on which so many rollouts at their longest fill half of the KV."""
    rows = max(1, engine.kv_capacity // (2 * max_tokens))
    return -(-rollouts // rows)


def _fits(own: Sequence[EngineView], rollouts: int) -> int:
    """How many of these engines, in their order, have a slot for each rollout."""
    count, room = 0, 0
    while count < len(own) and room < rollouts:
        room += own[count].slots
        count += 1
    return count


def _may_come_back(view: PoolView, version: int) -> int:
    """1 where a rollout of this version may be in a tool call, and will want an engine of it; 0 otherwise."""
    return int(view.num_waiting > 0 and view.num_behind(version) > view.num_ready_behind(version))


def _rollouts(view: PoolView, engines: Iterable[EngineView]) -> Counter[int]:
    """Rollouts by the version that they need: on engines and in the queue, where new ones need the newest."""
    rollouts: Counter[int] = Counter()
    for engine in engines:
        rollouts[engine.version] += engine.load
    queued = view.num_queued
    for rollout in view.queue():
        if rollout.oldest is None:
            break
        rollouts[rollout.oldest] += 1
        queued -= 1
    rollouts[view.version] += queued
    return rollouts
