"""Weights of a request: safetensors, from its body or from a folder. The one place here that knows tensors.

Promises: nothing is unpickled; a folder's index names files beside it only; a tensor is read when its bucket is, so a
model larger than memory's rest can be loaded.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError, safe_open
from safetensors.torch import load
from torch import Tensor

from gruppetto.engines.serve.refusal import Refusal
from gruppetto.imports import one_line
from gruppetto.weights.base import Bucket
from gruppetto.weights.checksum import checksum

BUCKET_BYTES = 64 << 20
_SINGLE, _INDEX = "model.safetensors", "model.safetensors.index.json"
Named = tuple[str, Tensor]


def bucket_of(payload: bytes, index: int, expected: int | None) -> Bucket:
    """A bucket from the bytes of a safetensors file. Raises `Refusal`; with `expected` also for another checksum."""
    try:
        tensors = list(load(payload).items())
    except (SafetensorError, ValueError, KeyError, TypeError) as error:
        raise Refusal(f"the payload is not a safetensors file: {one_line(error)}") from None
    got = checksum(tensors)
    if expected is not None and got != expected:
        raise Refusal(f"the payload has checksum {got:#x} where the sender computed {expected:#x}")
    return Bucket(index=index, tensors=tensors, checksum=got)


def buckets_of(folder: Path) -> Iterator[Bucket]:
    """All tensors of a Hugging Face model folder. Raises `Refusal` for what cannot be read."""
    members: list[Named] = []
    size = count = 0
    for name, tensor in _tensors(folder):
        members.append((name, tensor))
        size += tensor.numel() * tensor.element_size()
        if size >= BUCKET_BYTES:
            yield Bucket(index=count, tensors=members, checksum=checksum(members))
            members, size, count = [], 0, count + 1
    if members:
        yield Bucket(index=count, tensors=members, checksum=checksum(members))


def _tensors(folder: Path) -> Iterator[Named]:
    for file in _files(folder):
        try:
            with safe_open(file, framework="pt") as opened:
                for name in opened.keys():  # noqa: SIM118
                    yield name, opened.get_tensor(name)
        except (SafetensorError, OSError, ValueError) as error:
            raise Refusal(f"{file} cannot be read: {one_line(error)}") from None


def _files(folder: Path) -> list[Path]:
    try:
        if (folder / _SINGLE).is_file():
            return [folder / _SINGLE]
    except OSError as error:  # a name too long, a folder that may not be looked into
        raise Refusal(f"{str(folder)[:200]} cannot be read: {one_line(error)[:200]}") from None
    try:
        names = sorted(set(json.loads((folder / _INDEX).read_text())["weight_map"].values()))
    except FileNotFoundError:
        raise Refusal(f"{folder} has neither {_SINGLE} nor {_INDEX}; write a model folder with safetensors") from None
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise Refusal(f"{folder / _INDEX} cannot be read: {one_line(error)}") from None
    if outside := [name for name in names if not isinstance(name, str) or Path(name).name != name]:
        raise Refusal(f"{folder / _INDEX} names {outside[0]!r}; its files have to lie beside it")
    return [folder / name for name in names]
