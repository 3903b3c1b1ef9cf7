"""Engines that are killed and come back under load: every request is answered, and none that may run runs again."""

import asyncio
from collections import Counter

from engines.router.conftest import State, until
from engines.router.test_proxy import body, post

from gruppetto.rng import stream


async def test_kills_and_restarts_under_load(open_front):
    rng = stream(3, "chaos")

    def slow(engine):
        engine.slots, engine.think_s = 8, lambda: rng.uniform(0.0, 0.04)

    front, http, engines = await open_front(3, prepare=slow)
    cut, answered = set(), set()

    async def session(number):
        found = []
        for turn in range(6):
            headers = {"X-SMG-Routing-Key": f"s{number}"}
            rid = f"{number}.{turn}"
            found.append((rid, await post(http, "/generate", body(range(20 * turn + 5), rid=rid), headers=headers)))
            answered.add(rid)
        return found

    async def kill():
        for _ in range(8):
            await asyncio.sleep(rng.uniform(0.05, 0.2))
            engine = rng.choice(engines)
            cut.update({seen["rid"] for seen, _ in engine.seen} - answered)
            await engine.stop()
            cut.update({seen["rid"] for seen, _ in engine.seen} - answered)  # also what came while it ended
            await asyncio.sleep(rng.uniform(0.0, 0.2))
            await engine.start()

    tasks = [asyncio.ensure_future(session(number)) for number in range(40)]
    async with asyncio.timeout(60):
        await kill()
        answers = [one for task in tasks for one in await task]
    assert len(answers) == 240
    statuses = Counter(status for _, (status, _) in answers)
    assert set(statuses) <= {200, 502}, statuses
    assert statuses[200] >= 200
    times = Counter(seen["rid"] for engine in engines for seen, _ in engine.seen)
    assert {rid for rid, count in times.items() if count > 1} <= cut, "only what a kill has cut off runs elsewhere"
    for rid, (status, value) in answers:
        if status == 200:
            assert value["meta_info"]["id"] == rid
        else:
            assert "may have been run" in value["error"]["message"]
            assert (times[rid], rid in cut) == (1, True)
    await until(lambda: all(s.state is State.UP for s in front.fleet.engines.values()))
    assert not front.fleet.live
    assert [seat.rows for seat in front.fleet.router.engines()] == [0, 0, 0]
