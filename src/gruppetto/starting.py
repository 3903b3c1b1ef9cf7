"""What a run says of its engines before its first step: which one is awaited, and what of the config does not hold.

Promise: nobody looks at an empty screen while a server that was named wrongly is waited for.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Iterator

from gruppetto.config.schema import Config
from gruppetto.engines.base import Engine
from gruppetto.engines.http.engine import HttpEngine
from gruppetto.presets import choices
from gruppetto.record.base import Recorder
from gruppetto.record.folder import RunFolder

PATIENCE_S = 5.0
"""Of somebody at the screen, while a server starts."""


def awaited(config: Config, index: int, name: str, folder: RunFolder) -> str:
    """What a start waits for, for people; "" where that is this process's own work."""
    if config.engine.type == "embedded":
        return ""
    where = (
        f"{config.engine.urls[index]} does not answer" if config.engine.urls else f"see {folder.path}/logs/{name}.log"
    )
    return f"waiting for {name}: {where} (at most {config.engine.start_s:g} s, engine.start_s)"


@contextlib.contextmanager
def said_when_late(line: str) -> Iterator[None]:
    """On the screen after `PATIENCE_S`, unless it is over by then."""
    told = asyncio.get_running_loop().call_later(PATIENCE_S, lambda: print(line, flush=True) if line else None)
    try:
        yield
    finally:
        told.cancel()


def tell_determinism(config: Config, engines: list[Engine], recorder: Recorder) -> None:
    """What run.deterministic asked for and this machine does not give, in the record and on the screen."""
    failed = [engine.name for engine in engines if not engine.capabilities.deterministic]
    if config.run.deterministic and failed:
        recorder.event(
            "notice",
            0.0,
            engines=failed,
            reason=f"run.deterministic = true does not hold here: the self-test of {', '.join(failed)} found tokens or "
            "logprobs that depend on batch-mates; not guaranteed are equal metrics of two runs with the same seed, and "
            "of a resumed run with one that was not interrupted",
        )


def tell_kv_pool(config: Config, recorder: Recorder) -> None:
    """That the scheduler takes a KV pool for granted, in the record and on the screen: no engine is given one."""
    section = config.scheduler
    pool = section.kv_pool if section.type == "auto" else choices(section)["kv_pool"]
    if pool:
        whose = "" if section.kv_pool else f" (preset {section.type})"
        recorder.event(
            "notice",
            0.0,
            reason=f"scheduler.kv_pool = true{whose} takes it that a rollout keeps its KV when it makes room or moves, "
            "and no engine is started with a pool: unless your servers share one, its context is prefilled again; "
            "write scheduler.kv_pool = false to have that counted",
        )


def tell_slots(config: Config, engines: list[Engine], recorder: Recorder) -> None:
    """Servers that run fewer requests at once than the config says, in the record and on the screen."""
    wanted = config.engine.slots
    said = {engine.name: engine.facts.slots for engine in engines if isinstance(engine, HttpEngine) and engine.facts}
    fewer = {name: slots for name, slots in said.items() if 0 < slots < wanted}
    if fewer:
        runs = ", ".join(f"{name} runs {slots}" for name, slots in fewer.items())
        recorder.event(
            "notice",
            0.0,
            engines=list(fewer),
            reason=f"engine.slots = {wanted}, but {runs} at once: the rest waits there, unseen, and what the record "
            f"says of slots is wrong; write engine.slots = {min(fewer.values())}, or start servers with more",
        )
