"""`gruppetto doctor --engine URL`: the table of what a running server really does, on the screen and in a file."""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from dataclasses import dataclass
from pathlib import Path

from gruppetto.addresses import server_address
from gruppetto.cli.doctor_compare import Reference
from gruppetto.engines.http.wire import Ability
from gruppetto.errors import UserError
from gruppetto.extras import needs


@dataclass(frozen=True, slots=True)
class Table:
    """What was found. `context` in tokens, 0 where the server does not tell."""

    kind: str
    server: str
    url: str
    weights: str
    context: int
    rows: tuple[Ability, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """What is asked for: `load` this folder's weights there, or compare the server's with those of `model`, computed in
    `dtype` (None: the type of the folder's config)."""

    url: str
    load: Path | None = None
    model: Path | None = None
    dtype: str | None = None


def try_engine(asked: Trial, out: Path | None) -> int:
    """Prints the table, and writes it to `out`; returns the exit code."""
    _refuse_address(asked.url)
    _refuse_folders(asked)
    if out is not None:
        _refuse_place(out)
    with tempfile.TemporaryDirectory() as folder:
        table = asyncio.run(_try(asked, Path(folder)))
    print("\n".join(printed(table)))
    if out is None:
        return 0
    try:
        out.write_text(FORMS[out.suffix.lower()](table), "utf-8")
    except OSError as error:
        raise UserError(f"--out {out} cannot be written: {error.strerror}; write another path") from None
    print(f"written: {out}")
    return 0


def _refuse_address(url: str) -> None:
    if server_address(url) is None:
        raise UserError(f"--engine {url} is no address of a server; write it as http://127.0.0.1:30000")


def _refuse_folders(asked: Trial) -> None:
    if asked.load is not None and asked.model is not None:
        raise UserError(f"--model {asked.model} with --load {asked.load}, which compares too; leave one of them out")
    for name, folder in (("load", asked.load), ("model", asked.model)):
        if folder is not None and not (folder / "config.json").is_file():
            raise UserError(f"--{name} {folder}: no config.json there; write the folder of a Hugging Face model")
    if asked.model is not None and (missing := Reference(asked.model).missing()):
        raise UserError(needs("--model", missing))


def _refuse_place(out: Path) -> None:
    if out.suffix.lower() not in FORMS:
        raise UserError(f"--out {out}: the table is Markdown or JSON; write --out {out.with_suffix('.md')}")
    if not out.absolute().parent.is_dir():
        raise UserError(f"--out {out}: there is no folder {out.parent}; write a path in a folder that exists")


async def _try(asked: Trial, folder: Path) -> Table:
    from gruppetto.engines.http.build import KEY, http_engine
    from gruppetto.engines.http.requests import HttpSettings
    from gruppetto.engines.http.staging import Staging
    from gruppetto.engines.http.trial import CONTEXT, kind_of, trial

    load = None if asked.load is None else asked.load.absolute()
    beside = load or asked.model
    reference = None if beside is None else Reference(beside, asked.dtype)
    compare = None if reference is None else reference.compare
    kind = await kind_of(asked.url, os.environ.get(KEY, ""))
    settings = HttpSettings(slots=4, context=CONTEXT, takes_over=False)
    engine = http_engine(kind, "trial", settings, Staging(folder, load or folder), url=asked.url)
    try:
        await engine.start()
        assert engine.facts is not None
        facts = engine.facts
        found = await trial(engine, load, compare)
    finally:
        await engine.close()
    return Table(kind, facts.server, asked.url, facts.version, facts.context, tuple(found))


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
