"""Safetensors in a folder: for engines that share no memory with the trainer, only a file system.

    <folder>/weights_v000012/model-00000.safetensors …    one file a bucket

Promises: a version's folder appears whole or not at all (written aside, flushed to the disk, renamed); the tensors are
written straight into the files, so that no bucket is held beside them; the last `KEEP` versions stay, so that an engine
that is being started finds one; each file can be read by any safetensors reader; a folder that cannot take a version is
said in a `RunError`, before anything of the bucket is written.
"""

from __future__ import annotations

import contextlib
import json
import mmap
import os
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from gruppetto.errors import RunError
from gruppetto.weights.buckets import BucketPlan
from gruppetto.weights.channels.base import Sink
from gruppetto.weights.channels.sums import Bytes

KEEP = 2
"""Versions that stay in the folder."""

_TYPES = {
    "float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2", "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "uint64": "U64",
    "uint32": "U32", "uint16": "U16", "uint8": "U8", "bool": "BOOL",
}  # fmt: skip
_ALIGN = 256
_HEADER_LIMIT = 100 << 20


class DiskSink(Sink):
    """One version into `folder`; engines read it once it is finished."""

    buffer_bytes = 0

    def __init__(self, version: int, folder: Path) -> None:
        self._parent = folder
        self._final = folder / f"weights_v{version:06d}"
        self._aside = folder / f".weights_v{version:06d}.{os.getpid()}"
        self._version = version
        for left in (self._aside, *_left_behind(folder)):
            shutil.rmtree(left, ignore_errors=True)
        with self._writing():
            self._aside.mkdir(parents=True)
        self._map: mmap.mmap | None = None

    def address(self, engine: str) -> dict[str, str | int]:
        return {"folder": str(self._final)}

    def buffer(self, plan: BucketPlan) -> Bytes:
        head = _header(plan)
        with self._writing(), (self._aside / _file(plan.index)).open("wb+") as file:
            file.write(head)
            file.flush()
            os.posix_fallocate(file.fileno(), 0, len(head) + max(1, plan.num_bytes))  # else a full disk is a SIGBUS
            self._map = mmap.mmap(file.fileno(), 0)
        return np.frombuffer(self._map, np.uint8)[len(head) : len(head) + plan.num_bytes]

    def filled(self, plan: BucketPlan, end: int) -> None:
        if end == plan.num_bytes and self._map is not None:
            with self._writing():
                self._map.flush()
            self._map = None

    def finish(self) -> None:
        with self._writing():
            _flush(self._aside)
            if self._final.exists():
                shutil.rmtree(self._final)
            self._aside.rename(self._final)
            _flush(self._parent)
        for old in sorted(self._parent.glob("weights_v*"))[:-KEEP]:
            shutil.rmtree(old, ignore_errors=True)

    def gone(self, engine: str) -> None:
        return None

    @contextlib.contextmanager
    def _writing(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            raise RunError(
                f"weights version {self._version} cannot be written to {self._parent}: {error.strerror or error}; make "
                "room there, or write run.dir = a folder that can take them"
            ) from None

    def close(self) -> None:
        self._map = None
        shutil.rmtree(self._aside, ignore_errors=True)


def _left_behind(folder: Path) -> list[Path]:
    """Versions of processes that were killed while they wrote them; each holds the room of a model."""
    return [aside for aside in folder.glob(".weights_v*") if not Path(f"/proc/{aside.suffix[1:]}").exists()]


class DiskStream:
    """The engine's end."""

    def __init__(self, address: Mapping[str, str | int], plans: Sequence[BucketPlan]) -> None:
        self._folder, self._plans = Path(str(address["folder"])), plans

    def buckets(self) -> Iterator[tuple[BucketPlan, Bytes, Callable[[int], None] | None]]:
        for plan in self._plans:
            yield plan, _opened(self._folder / _file(plan.index), plan), None

    def close(self) -> None:
        return None


def _file(index: int) -> str:
    return f"model-{index:05d}.safetensors"


def _header(plan: BucketPlan) -> bytes:
    """Length and JSON, padded with blanks so that the data is aligned; gaps between tensors get a name of their own,
    since the format allows none."""
    rows: dict[str, Any] = {}
    end = 0
    for slot in plan.slots:
        if slot.offset > end:
            rows[f"__gap_{end}"] = {"dtype": "U8", "shape": [slot.offset - end], "data_offsets": [end, slot.offset]}
        end = slot.offset + slot.spec.num_bytes
        spec = slot.spec
        rows[spec.name] = {
            "dtype": _TYPES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [slot.offset, end],
        }
    if plan.num_bytes > end or not rows:
        last = max(1, plan.num_bytes)
        rows[f"__gap_{end}"] = {"dtype": "U8", "shape": [last - end], "data_offsets": [end, last]}
    text = json.dumps(rows).encode()
    text += b" " * (-(len(text) + 8) % _ALIGN)
    return len(text).to_bytes(8, "little") + text


def _opened(path: Path, plan: BucketPlan) -> Bytes:
    """The bucket's bytes, mapped. Raises `RunError` for a file that is not this bucket's."""
    try:
        with path.open("rb") as file:
            raw = np.frombuffer(mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ), np.uint8)
    except (OSError, ValueError) as error:
        raise RunError(f"{path} cannot be read: {error}") from None
    size = int.from_bytes(raw[:8].tobytes(), "little")
    if size > min(len(raw) - 8, _HEADER_LIMIT) or raw[: 8 + size].tobytes() != _header(plan):
        raise RunError(f"{path} does not hold bucket {plan.index} as it was offered")
    data: Bytes = raw[8 + size :]
    if len(data) < plan.num_bytes:
        raise RunError(f"{path} ends {plan.num_bytes - len(data)} bytes early")
    return data


def _flush(folder: Path) -> None:
    """A folder's entries to the disk."""
    fd = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
