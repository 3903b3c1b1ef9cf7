"""Engines that die in a run and come back, on virtual time: with the newest weights, or not at all."""

import asyncio
from dataclasses import replace

import pytest
from controlled import STREAMED, Run

from gruppetto.clock import run_virtual
from gruppetto.errors import EngineError, RunError
from gruppetto.sim.engine import SimEngine
from gruppetto.sim.stages import SimChannel


class Returning(SimEngine):
    """Can be brought back in 7 s, after so many tries that fail."""

    failing = 0
    starts = 0

    def __init__(self, *args, **settings):
        super().__init__(*args, **settings)
        self.capabilities = replace(self.capabilities, restarts=True)

    async def restart(self):
        self.starts += 1
        await asyncio.sleep(7.0)
        if self.failing:
            self.failing -= 1
            raise EngineError(self.name, "no memory left")
        self._dead, self._paused = None, False
        self._clockwork.thaw()


def make(tmp_path, engines, *, restarts=3, **settings):
    run = Run(tmp_path, engines=engines, **settings)
    for at, engine in enumerate(run.engines):
        run.engines[at] = Returning(engine.name, slots=8, length_of=engine._length_of)
    rewire(run, restarts)
    return run


def rewire(run, restarts):
    """The same run, with its engines replaced."""
    from gruppetto.controller import Controller, Stages
    from gruppetto.scheduler.loop import RolloutLoop

    old = run.controller.stages
    run.loop = RolloutLoop(run.settings, run.loop.policy, run.engines, run.reward, run.loop.source, run.record)
    fields = {name: getattr(old, name) for name in Stages.__slots__}
    run.controller = Controller(
        Stages(**fields | {"engines": run.engines, "loop": run.loop, "restarts": restarts}), steps=6
    )


def conserved(run):
    last = run.record.steps[-1]
    dropped = sum(value for name, value in last.items() if name.startswith("dropped/"))
    assert last["rollouts/started"] == last["rollouts/trained"] + dropped + last["rollouts/live"]
    assert last["dropped/failed"] == 0
    for step in run.record.steps:
        parts = {
            name: value for name, value in step.items() if name.startswith("engine_s/") and name != "engine_s/total"
        }
        assert sum(parts.values()) == pytest.approx(step["engine_s/total"])


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("colocated", [True, False])
@pytest.mark.parametrize("at_s", [3.0, 20.0, 41.0, 60.0])
def test_an_engine_comes_back_with_the_newest_weights(tmp_path, count, colocated, at_s):
    async def main():
        nonlocal run
        run = make(tmp_path, count, colocated=colocated)
        asyncio.get_running_loop().call_later(at_s, run.engines[0].kill, "power cut")
        await run.controller.run()

    run = None
    run_virtual(main())
    assert [row["version"] for row in run.record.steps] == [1, 2, 3, 4, 5, 6]
    assert [event["engine"] for event in run.kinds("error")] == ["e0"]
    back = run.kinds("engine_back")
    assert [event["engine"] for event in back] in (["e0"], [] if count == 2 else ["e0"])
    for event in back:
        published = [e["version"] for e in run.kinds("publish_begin") if e["t"] <= event["t"]]
        assert event["version"] >= max(published, default=0)
        assert event["t"] >= at_s + 7.0
    starts = [event["t"] for event in run.kinds("start") if event["engine"] == "e0"]
    assert not any(at_s < t < at_s + 7.0 for t in starts)
    if count == 1 and at_s > 40:  # before that is the first evaluation, which no step's account has
        assert sum(step["engine_s/lost"] for step in run.record.steps) >= 7.0
    conserved(run)


def test_it_is_tried_as_often_as_was_asked(tmp_path):
    async def main():
        nonlocal run
        run = make(tmp_path, 1)
        run.engines[0].failing = 2
        asyncio.get_running_loop().call_later(5.0, run.engines[0].kill, "power cut")
        await run.controller.run()

    run = None
    run_virtual(main())
    assert len(run.record.steps) == 6
    assert run.engines[0].starts == 3
    assert [("no memory left" in event["reason"]) for event in run.kinds("notice")] == [True, True]
    conserved(run)


@pytest.mark.parametrize("restarts", [0, 2])
def test_an_engine_that_does_not_come_back_is_given_up_and_the_run_saved(tmp_path, restarts):
    async def main():
        nonlocal run
        run = make(tmp_path, 1, restarts=restarts)
        run.engines[0].failing = 100
        asyncio.get_running_loop().call_later(5.0, run.engines[0].kill, "power cut")
        await run.controller.run()

    run = None
    with pytest.raises(RunError, match=r"no engine is left.*(power cut|no memory left)"):
        run_virtual(main())
    assert run.engines[0].starts == restarts
    assert run.saved()["scheduler"]


def test_the_last_engine_dies_at_a_publish(tmp_path):
    async def main():
        nonlocal run
        run = make(tmp_path, 1)
        begin = run.engines[0].begin_update

        async def dying(version):
            if version == 3 and not run.engines[0].starts:
                run.engines[0].kill("power cut")
            await begin(version)

        run.engines[0].begin_update = dying
        await run.controller.run()

    run = None
    run_virtual(main())
    assert [row["version"] for row in run.record.steps] == [1, 2, 3, 4, 5, 6]
    assert [event["version"] for event in run.kinds("engine_back")] == [3]
    conserved(run)


class Probing(SimChannel):
    """Fences as two-phase publishes do, and finds fault as often as it is told to, by engine."""

    def __init__(self, **faults):
        super().__init__(1.0)
        self.faults, self.fenced, self.log, self.seconds = faults, set(), [], 0.0

    async def publish(self, version, tensors, engines):
        for engine in engines:
            if engine.name in self.fenced:
                raise EngineError(engine.name, "is fenced: its probe failed")
        return await super().publish(version, tensors, engines)

    async def verify(self, version, engines, make_room=None):
        await asyncio.sleep(self.seconds)
        off = [engine.name for engine in engines if version >= 2 and self.faults.get(engine.name)]
        for name in off:
            self.faults[name] -= 1
            self.fenced.add(name)
        self.log.append((version, [engine.name for engine in engines], off))
        return [EngineError(name, "its probe failed") for name in off]

    def readmit(self, engine):
        self.log.append(("readmit", engine))
        self.fenced.discard(engine)


@pytest.mark.parametrize("count", [1, 2])
@pytest.mark.parametrize("times", [1, 2])
def test_an_engine_whose_probe_fails_is_out_alone_and_comes_back_by_a_readmission(tmp_path, count, times):
    """Its process may be the same one as before, as behind a URL: only the word lifts the fence."""

    async def main():
        nonlocal run
        run = make(tmp_path, count, colocated=True)
        run.controller.stages.channel = Probing(e0=times)
        await run.controller.run()

    run = None
    run_virtual(main())
    channel = run.controller.stages.channel
    assert [row["version"] for row in run.record.steps] == [1, 2, 3, 4, 5, 6]
    assert [(event["engine"], event["reason"]) for event in run.kinds("error")] == [
        ("e0", "engine e0: its probe failed")
    ]
    assert len(run.kinds("notice")) == times - 1
    assert [event["engine"] for event in run.kinds("engine_back")] == ["e0"]
    assert [entry for entry in channel.log if entry[0] == "readmit"] == [("readmit", "e0")] * times
    if count == 2:
        assert next(entry for entry in channel.log if entry[0] == 2) == (2, ["e0", "e1"], ["e0"])
        assert (2, ["e1"], []) not in channel.log  # it has the version, and is not given it anew
    conserved(run)


def test_two_engines_whose_probes_fail_are_both_out(tmp_path):
    async def main():
        nonlocal run
        run = make(tmp_path, 2, colocated=False)
        run.controller.stages.channel = Probing(e0=1, e1=1)
        await run.controller.run()

    run = None
    run_virtual(main())
    assert [event["engine"] for event in run.kinds("error")] == ["e0", "e1"]
    assert sorted(event["engine"] for event in run.kinds("engine_back")) == ["e0", "e1"]
    assert len(run.record.steps) == 6
    conserved(run)


def test_a_probes_time_is_not_taken_for_a_publish_that_nobody_answers(tmp_path):
    async def main():
        nonlocal run
        run = make(tmp_path, 2, colocated=True, stall_s=100.0)
        run.controller.stages.channel = Probing()
        run.controller.stages.channel.seconds = 110.0
        await run.controller.run()

    run = None
    run_virtual(main())
    assert len(run.record.steps) == 6
    assert run.kinds("error") == []


def test_room_for_a_probe_is_made_by_the_rollouts_that_started_last(tmp_path):
    class Crowded(SimChannel):
        async def verify(self, version, engines, make_room=None):
            here = [e for e in run.loop.pool.rollouts.values() if e.engine == "e0" and e.state == "running"]
            if len(here) > 3 and not taken:
                here.sort(key=lambda entry: entry.started_at)
                taken.extend((entry.id, entry in here[-2:]) for entry in here)
                before.update({entry.id: entry.parks for entry in here})
                make_room(engines[0], 2)
                await asyncio.sleep(0.5)
                after.update({entry.id: entry.parks for entry in here})
            return []

    async def main():
        nonlocal run
        run = make(tmp_path, 2, colocated=False, policy=STREAMED)
        run.controller.stages.channel = Crowded(1.0)
        await run.controller.run()

    run, taken, before, after = None, [], {}, {}
    run_virtual(main())
    assert len(taken) > 3
    assert {rid: after[rid] - before[rid] for rid in after} == {rid: int(last) for rid, last in taken}
    conserved(run)
