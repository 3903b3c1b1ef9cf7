"""Virtual time: no waiting, and a deadlock is an error at once."""

import asyncio

import pytest

from gruppetto.clock import now, run_virtual
from gruppetto.errors import StallError


def test_sleep_takes_virtual_time_only():
    async def main():
        await asyncio.gather(asyncio.sleep(1000), asyncio.sleep(5000))
        return now()

    assert run_virtual(main()) == pytest.approx(5000)


def test_timeouts_fire_at_their_virtual_time():
    async def main():
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(7):
                await asyncio.Event().wait()
        return now()

    assert run_virtual(main()) == pytest.approx(7)


def test_deadlock_is_an_error():
    async def main():
        await asyncio.Event().wait()

    with pytest.raises(StallError, match="nothing can ever run again"):
        run_virtual(main())
