"""`gruppetto doctor --engine URL`: the table of what a running server really does, on the screen and in a file."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gruppetto.engines.http.wire import Ability
from gruppetto.errors import UserError


@dataclass(frozen=True, slots=True)
class Table:
    """What was found. `context` in tokens, 0 where the server does not tell."""

    kind: str
    server: str
    url: str
    weights: str
    context: int
    rows: tuple[Ability, ...]


def try_engine(url: str, load: str | None, out: Path) -> int:
    """Prints it and writes it to `out`; returns the exit code."""
    if load is not None and not (Path(load) / "config.json").is_file():
        raise UserError(f"--load {load}: no config.json there; write the folder of a Hugging Face model")
    if out.suffix.lower() not in FORMS:
        raise UserError(f"--out {out}: the table is Markdown or JSON; write --out {out.with_suffix('.md')}")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; write a path in a folder that exists")
    with tempfile.TemporaryDirectory() as folder:
        table = asyncio.run(_try(url, Path(folder), None if load is None else Path(load).absolute()))
    print("\n".join(printed(table)))
    try:
        out.write_text(FORMS[out.suffix.lower()](table), "utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; write another path") from None
    print(f"written: {out}")
    return 0


async def _try(url: str, folder: Path, load: Path | None) -> Table:
    from gruppetto.engines.http.build import KEY, http_engine
    from gruppetto.engines.http.requests import HttpSettings
    from gruppetto.engines.http.staging import Staging
    from gruppetto.engines.http.trial import CONTEXT, kind_of, trial

    kind = await kind_of(url, os.environ.get(KEY, ""))
    settings = HttpSettings(slots=4, context=CONTEXT, takes_over=False)
    engine = http_engine(kind, "trial", settings, Staging(folder, load or folder), url=url)
    try:
        await engine.start()
        assert engine.facts is not None
        facts = engine.facts
        found = await trial(engine, load)
    finally:
        await engine.close()
    return Table(kind, facts.server, url, facts.version, facts.context, tuple(found))


def printed(table: Table) -> list[str]:
    """The lines of the screen."""
    width = max(len(one.name) for one in table.rows)
    rows = [f"{'ok ' if one.works else 'no '} {one.name:{width}}  {one.says}" for one in table.rows]
    return [_head(table), *rows]


def markdown(table: Table) -> str:
    """A heading line and a table, as docs/engines.md has them."""
    cells = [(one.name, "yes" if one.works else "no", one.says.replace("|", "\\|")) for one in table.rows]
    rows = [
        "| capability | works | how, or what came instead |",
        "|---|---|---|",
        *(f"| {' | '.join(c)} |" for c in cells),
    ]
    return "\n".join([f"{_head(table)}", "", *rows, ""])


def as_json(table: Table) -> str:
    """The same for programs."""
    rows = [{"capability": one.name, "works": one.works, "says": one.says} for one in table.rows]
    told = {"kind": table.kind, "server": table.server, "url": table.url, "weights": table.weights}
    return json.dumps({**told, "context": table.context, "capabilities": rows}, indent=2) + "\n"


def _head(table: Table) -> str:
    return f"{table.server} at {table.url}, weights {table.weights!r}, context {table.context or 'not told'}"


FORMS = {".md": markdown, ".json": as_json}
"""By the ending of --out."""
