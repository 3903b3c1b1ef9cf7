"""Event lines reach the file soon where somebody watches, and in few writes."""

import asyncio
import os

import pytest

from gruppetto.clock import monotonic, run_virtual
from gruppetto.record import folder as module
from gruppetto.record.folder import RunFolder


@pytest.fixture
def folder(tmp_path):
    made = RunFolder.create(tmp_path / "a", "", {}, {})
    yield made
    made.close()


@pytest.fixture
def writes(monkeypatch):
    sizes = []
    write = os.write

    def counted(fd, data):
        sizes.append(len(data))
        return write(fd, data)

    monkeypatch.setattr(os, "write", counted)
    return sizes


def lines(folder):
    return (folder.path / "events.jsonl").read_bytes().count(b"\n")


def test_on_a_real_loop_one_timer_flushes_all_events_of_its_time(folder, writes, monkeypatch):
    monkeypatch.setattr(module, "_FLUSH_EVERY_S", 0.001)

    async def main():
        for number in range(500):
            folder.event("launch", number * 10.0)
        assert lines(folder) == 0
        await asyncio.sleep(0.01)
        assert lines(folder) == 500
        folder.event("ready", 1.0)
        await asyncio.sleep(0.01)
        assert lines(folder) == 501

    asyncio.run(main())
    assert len(writes) == 2


def test_a_step_flushes_and_takes_the_timer_away(folder, writes):
    async def main():
        loop = asyncio.get_running_loop()
        before = len(loop._scheduled)
        folder.event("launch", 0.0)
        assert len(loop._scheduled) == before + 1
        folder.step(1, {})
        assert all(timer.cancelled() for timer in loop._scheduled)

    asyncio.run(main())
    assert lines(folder) == 1
    assert len(writes) == 2


def test_on_virtual_time_no_event_is_a_write(folder, writes):
    async def main():
        for number in range(500):
            folder.event("launch", number * 10.0)
            await asyncio.sleep(10)
        assert writes == []
        folder.step(1, {})

    run_virtual(main())
    assert len(writes) == 2
    assert lines(folder) == 500


def test_without_a_loop_events_are_seen_too(folder, monkeypatch):
    clock = [monotonic()]
    monkeypatch.setattr(module, "monotonic", lambda: clock[0])
    folder.event("a", 0.0)
    assert lines(folder) <= 1
    clock[0] += 10
    folder.event("b", 0.0)
    assert lines(folder) == 2
    folder.event("c", 0.0)
    assert lines(folder) == 2
