"""The names under which a server that reads checkpoints finds its weights.

Promise: what is written for it has the names of the model's own checkpoint, since a server passes over what it does not
know, and goes on with the old values.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Set
from pathlib import Path
from typing import Any

from gruppetto.errors import EngineError
from gruppetto.weights.layouts.experts import split


def checkpoint_names(model: Path) -> set[str]:
    """Of all tensors in a model folder's safetensors files; none where it has no such files."""
    from safetensors import safe_open

    found: set[str] = set()
    for file in sorted(model.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            found |= set(opened.keys())
    return found


def as_checkpoint(named: Iterable[tuple[str, Any]], expected: Set[str]) -> Iterator[tuple[str, Any]]:
    """Tensors as a checkpoint with the names `expected` has them: experts that the trainer keeps in one, one by one."""
    for name, tensor in named:
        yield from [(name, tensor)] if name in expected else split([(name, tensor)])


def need_names(engine: str, version: int, expected: Set[str], sent: Set[str]) -> None:
    """Raises `EngineError` where tensors go by other names than those `expected`, whose old values would stay. What a
    checkpoint has besides (a tied head), and what it leaves out, may be."""
    strange = sorted(sent - expected - {f"model.{name}" for name in expected})
    left = sorted(expected - sent - {name.removeprefix("model.") for name in sent})
    if strange and left:
        raise EngineError(
            engine,
            f"weights of version {version}: {len(strange)} tensors ({strange[0]}, …) have names that the model's "
            f"checkpoint does not have, and {len(left)} of its own ({left[0]}, …) are not among them; a server that "
            "reads checkpoints would go on with their old values; write engine.type = 'embedded' for this model",
        )
