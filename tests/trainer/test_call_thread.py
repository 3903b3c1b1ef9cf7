"""The trainer's thread: order, errors, cancellation, and a call that never ends."""

from __future__ import annotations

import asyncio
import threading

import pytest

pytest.importorskip("torch", reason="needs the train extra")
from gruppetto.trainer.embedded.thread import CallThread


async def test_calls_run_in_order_on_one_thread_and_raise_what_they_raise():
    thread, seen = CallThread("trainer"), []

    def note(number):
        seen.append((number, threading.current_thread().name))
        if number == 2:
            raise ValueError("two")
        return number

    results = await asyncio.gather(*(thread.run(note, n) for n in range(4)), return_exceptions=True)
    assert [str(r) for r in results] == ["0", "1", "two", "3"]
    assert seen == [(n, "trainer") for n in range(4)]
    await thread.close()
    await thread.close()


async def test_a_call_that_hangs_is_left_behind_and_what_waits_is_dropped(monkeypatch, caplog):
    monkeypatch.setattr("gruppetto.trainer.embedded.thread.CLOSE_S", 0.1)
    thread, hold, entered, begun = CallThread("trainer"), threading.Event(), threading.Event(), []

    def hang():
        entered.set()
        return hold.wait()

    hung, dropped = (asyncio.ensure_future(thread.run(call)) for call in (hang, lambda: begun.append(1)))
    while not entered.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    try:
        await asyncio.wait_for(thread.close(), 20)
        with pytest.raises(asyncio.CancelledError):
            await dropped
        assert not hung.done()
        assert "left behind" in caplog.text
        assert all(t.daemon for t in threading.enumerate() if t is not threading.main_thread())
    finally:
        hold.set()
    assert await hung
    assert not begun


async def test_closing_a_trainer_waits_for_no_call_that_hangs(trainer_for, samples, monkeypatch):
    monkeypatch.setattr("gruppetto.trainer.embedded.thread.CLOSE_S", 0.1, raising=False)
    hold = threading.Event()
    async with trainer_for() as trainer:
        monkeypatch.setattr(trainer, "_micro_batch", lambda *_: hold.wait())
        call = asyncio.ensure_future(trainer.forward_backward(samples))
        await asyncio.sleep(0.05)
        await asyncio.wait_for(trainer.close(), 20)
        hold.set()
        with pytest.raises(Exception, match=r"closed|not started|NoneType"):
            await call
