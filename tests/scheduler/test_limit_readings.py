"""What the limit of an engine reads of its KV: a share, or that it is not told, which is not nothing."""

import pytest
from scheduler.pools import Fixed, loop_of, pool_of

from gruppetto.routing.concurrency import Cap


@pytest.mark.parametrize(
    ("tokens", "capacity", "share"), [(400, 1000, 0.4), (0, 1000, 0.0), (None, 1000, None), (400, 0, None)]
)
def test_kv_that_is_not_told_is_read_as_unknown(monkeypatch, tokens, capacity, share):
    pool, engine, seen = pool_of(10, members=10), Fixed("e0"), []
    read = Cap.read

    def noted(self, reading, live):
        seen.append(reading.kv)
        return read(self, reading, live)

    monkeypatch.setattr(Cap, "read", noted)
    loop = loop_of(pool, [engine], limit=True)
    engine.shows(kv_tokens=tokens, kv_capacity=capacity, running=1)
    pool.start("g0.0", "e0", 0.0)
    loop.tending._look(100.0)
    loop.tending._look(105.0)
    assert seen
    assert set(seen) == {share}
