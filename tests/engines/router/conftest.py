"""A front over scripted engines, in this process."""

import asyncio
import contextlib
from dataclasses import replace

import aiohttp
import pytest
from engines.router.scripted import Scripted

from gruppetto.engines.router.fleet import State
from gruppetto.engines.router.front import Front
from gruppetto.engines.router.settings import HealthRules, RouteLimits, RouteSettings

QUICK = HealthRules(probe_s=0.1, timeout_s=0.5, load_s=0.05, load_timeout_s=0.3, failures=2, passes=2, hung_s=0.5)


@pytest.fixture
async def open_front():
    """Starts so many scripted engines and a front; gives (front, client, engines)."""
    async with contextlib.AsyncExitStack() as stack:

        async def start(count=2, limits=None, prepare=None, health=None, **settings):
            engines = [await Scripted().start() for _ in range(count)]
            for engine in engines:
                stack.push_async_callback(engine.stop)
                if prepare is not None:
                    prepare(engine)
            made = RouteSettings(
                engines=tuple(engine.url for engine in engines),
                port=0,
                health=replace(QUICK, **(health or {})),
                limits=replace(RouteLimits(), **(limits or {})),
                **settings,
            )
            front = Front(made)
            await front.open()
            stack.push_async_callback(front.close)
            await until(lambda: len(front.fleet.up) == count)
            client = await stack.enter_async_context(
                aiohttp.ClientSession(f"http://127.0.0.1:{front.port}", connector=aiohttp.TCPConnector(limit=0))
            )
            return front, client, engines

        yield start


async def until(true, within_s=60.0):
    """Waits until it holds."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110
            await asyncio.sleep(0.01)


def state(front, engine):
    """How the front sees an engine."""
    return front.fleet.engines[engine.url].state


__all__ = ["State", "state", "until"]
