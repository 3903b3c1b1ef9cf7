"""`gruppetto doctor --engine URL`: the table of what a running server really does."""

from __future__ import annotations

import asyncio
import os
import tempfile
from pathlib import Path

from gruppetto.errors import UserError


def try_engine(url: str, load: str | None) -> int:
    """Prints it; returns the exit code."""
    if load is not None and not (Path(load) / "config.json").is_file():
        raise UserError(f"--load {load}: no config.json there; write the folder of a Hugging Face model")
    with tempfile.TemporaryDirectory() as folder:
        return asyncio.run(_try(url, Path(folder), None if load is None else Path(load).absolute()))


async def _try(url: str, folder: Path, load: Path | None) -> int:
    from gruppetto.engines.http.build import KEY, http_engine
    from gruppetto.engines.http.requests import HttpSettings
    from gruppetto.engines.http.staging import Staging
    from gruppetto.engines.http.trial import CONTEXT, kind_of, trial

    kind = await kind_of(url, os.environ.get(KEY, ""))
    settings = HttpSettings(slots=4, context=CONTEXT)
    engine = http_engine(kind, "trial", settings, Staging(folder, load or folder), url=url)
    try:
        await engine.start()
        assert engine.facts is not None
        facts = engine.facts
        print(f"{facts.server} at {url}, weights {facts.version!r}, context {facts.context or 'not told'}")
        found = await trial(engine, load)
    finally:
        await engine.close()
    width = max(len(one.name) for one in found)
    for one in found:
        print(f"{'ok ' if one.works else 'no '} {one.name:{width}}  {one.says}")
    return 0
