"""When an engine takes new weights, where every rollout keeps the version that it began with (DORA's window).

After a publish the rollouts of an older version are drawn together on as few of their engines as hold them; the others,
emptied by that, go over to the new version.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

from gruppetto.scheduler.actions import Action, Update
from gruppetto.scheduler.views import EngineView, PoolView


def update(view: PoolView) -> Sequence[Action]:
    """Engines that go over to the newest weights now."""
    behind = [engine for engine in view.engines() if engine.version < view.version and not engine.updating]
    if not behind or view.training:
        return ()
    by_version: dict[int, list[EngineView]] = defaultdict(list)
    for engine in behind:
        by_version[engine.version].append(engine)
    waiting = _waiting_by_version(view)
    spare = [
        engine.name for version, engines in by_version.items() for engine in _spare(engines, waiting.get(version, 0))
    ]
    return (Update(tuple(spare)),) if spare else ()


def _spare(engines: Sequence[EngineView], waiting: int) -> list[EngineView]:
    """Those that the version's rollouts do not need: the emptiest beyond what all of them fit on."""
    needed, room = 0, 0
    rollouts = sum(engine.load for engine in engines) + waiting
    fullest = sorted(engines, key=lambda engine: -engine.load)
    while needed < len(fullest) and room < rollouts:
        room += fullest[needed].slots
        needed += 1
    return fullest[needed:]


def _waiting_by_version(view: PoolView) -> dict[int, int]:
    """Rollouts that want an engine of their version: parked ones, and those that an update is about to park."""
    waiting: dict[int, int] = defaultdict(int)
    for engine in view.engines():
        if engine.updating:
            waiting[engine.version] += engine.load
    for rollout in view.queue():
        if rollout.oldest is None:
            break
        waiting[rollout.oldest] += 1
    return waiting
