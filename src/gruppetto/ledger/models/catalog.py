"""A model by what a user calls it: a common name, a config.json or the folder it lies in. Nothing is fetched.

Promises: names are found without organisation, case, `-Instruct` and its like; a name that is not there, and a file
that is no config, is one `UserError` line with the nearest thing that works.
"""

from __future__ import annotations

import json
import os
from typing import Any

from gruppetto.errors import UserError
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.models.read import read_config

_ENDINGS = ("-instruct", "-base", "-chat", "-it", "-pt", "-hf", "-thinking", "-preview")
_DATED = ("-2507", "-0528", "-0324", "-0905", "-8k", "-1210")
_FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}


def names() -> tuple[str, ...]:
    """Every name of the catalog, with its organisation."""
    from gruppetto.ledger.models.figures import FIGURES

    return tuple(FIGURES)


def model_of(source: str) -> Model:
    """The model that `source` means: a catalog name, else a config.json or a folder with one.

    Raises `UserError` where it is none of them.
    """
    if not source.strip():
        raise UserError("model is empty; write the path of a config.json, or a name such as Qwen3-8B")
    path = os.path.expanduser(source)
    for file in (path, os.path.join(path, "config.json")):
        if os.path.isfile(file):
            return _from_file(file, source)
    if source.endswith(".json") or source.startswith((".", "/", "~")):
        what = "the folder has no config.json" if os.path.isdir(path) else "no such file"
        raise UserError(f"model {source!r}: {what}; write the path of a config.json, or a name such as Qwen3-8B")
    return _from_name(source)


def _from_file(file: str, source: str) -> Model:
    from pathlib import Path

    path = Path(file)
    try:
        config: Any = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(
            f"model {source!r} cannot be read ({type(error).__name__}); write the path of a config.json"
        ) from None
    except (ValueError, RecursionError) as error:  # also a number of thousands of digits
        raise UserError(
            f"model {source!r} is no JSON ({error}); write the path of a Hugging Face config.json"
        ) from None
    name = path.parent.name if path.name == "config.json" and path.parent.name else path.stem
    return read_config(config, name)


def _from_name(source: str) -> Model:
    from gruppetto.ledger.models.figures import FIGURES

    known = {_plain(name): name for name in FIGURES}
    for name in _shortened(_plain(source)):
        if name in known:
            return read_config(FIGURES[known[name]], known[name].partition("/")[2])
        if name.endswith("-fp8") and (full := known.get(name.removesuffix("-fp8"))):
            return read_config({**FIGURES[full], "quantization_config": _FP8}, full.partition("/")[2] + "-FP8")
    shown = source if len(source) <= 80 else source[:77] + "..."
    raise UserError(f"model {shown!r} is not in the catalog; {_nearest(_plain(shown), known)}")


def _nearest(name: str, known: dict[str, str]) -> str:
    import difflib

    close = [known[found].partition("/")[2] for found in difflib.get_close_matches(name, known, n=3, cutoff=0.5)]
    meant = f"did you mean {' or '.join(close)}? Else write" if close else "write"
    return f"{meant} the path of its config.json"


def _plain(name: str) -> str:
    """Without organisation and case; Llama's older names start with Meta-."""
    return name.strip().lower().rpartition("/")[2].removeprefix("meta-").replace("_", "-").replace(" ", "-")


def _shortened(name: str) -> list[str]:
    """`name`, then without the endings that leave the architecture as it is."""
    found = [name]
    quantised = "-fp8" if name.endswith("-fp8") else ""
    name = name.removesuffix(quantised)
    shorter = True
    while shorter:
        shorter = False
        for ending in (*_ENDINGS, *_DATED):
            if name.endswith(ending):
                name, shorter = name.removesuffix(ending), True
                found.append(name + quantised)
    return found
