"""What the suite waits for."""

import asyncio

from engines.kit import until


async def back(calls, within=60):
    async with asyncio.timeout(within):
        return await asyncio.gather(*calls)


async def made_some(kind, engine, held, count=1):
    """Waits until requests have made tokens, as the engine counts them; of those that it is held back from there are a
    few more. (vLLM and the scripted one go on: theirs last for seconds, and for as long as this loop turns.)"""
    await until(lambda: engine.stats().running >= count)

    async def made():
        return (await engine.wire.told()).generated if kind.over_http else engine.stats().decode_tokens_total

    before = await made()
    held.touch()
    async with asyncio.timeout(60):
        while await made() <= before:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
