"""Weights on their way to engines that read them from disk: a model folder for each version.

Promises: a folder has its final name only when it is whole, and has the names of the model's own checkpoint (`names`);
engines of one run share it, and a bucket is written once; a version's folder is deleted when the next one has been
loaded by all that began it: a server that fails to read the new one may go back to the old one; a disk that cannot take
a version is a `RunError`, and no engine is blamed for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import shutil
from collections.abc import Iterator, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gruppetto.engines.http.names import as_checkpoint, checkpoint_names, need_names
from gruppetto.errors import EngineError, RunError
from gruppetto.imports import one_line
from gruppetto.weights.base import Bucket

_SMALL = (".json", ".txt", ".model", ".jinja", ".py")
"""Endings of a model folder's files besides its weights."""


@dataclass(slots=True)
class _Version:
    place: Path
    users: set[str] = field(default_factory=set)
    buckets: dict[int, tuple[int, list[str], int]] = field(default_factory=dict)
    """By index: checksum, names, bytes."""
    folder: Path | None = None
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class Staging:
    """Under `root`; `model` is the folder whose config and tokenizer go with the weights."""

    def __init__(self, root: Path, model: Path) -> None:
        self._root, self.model = root.absolute(), model.absolute()
        self._versions: dict[int, _Version] = {}
        self._expected: set[str] | None = None

    async def begin(self, version: int, engine: str) -> None:
        """`engine` takes part. What is left of an attempt that broke off is thrown away."""
        known = self._versions.get(version)
        if known is None or engine in known.users:
            place = self._root / f"version_{version}.part"
            shutil.rmtree(place, ignore_errors=True)
            shutil.rmtree(self._root / f"version_{version}", ignore_errors=True)
            with _writing(place, version):
                place.mkdir(parents=True)
            known = self._versions[version] = _Version(place)
            for old in sorted(number for number in self._versions if number != version)[:-1]:
                await self._delete(old)
        known.users.add(engine)

    async def add(self, version: int, bucket: Bucket, engine: str) -> None:
        """One bucket. Raises `EngineError` for one that was changed on its way, or that differs from another's."""
        known = self._versions[version]
        async with known.lock:
            written = known.buckets.get(bucket.index)
            if written is None:
                with _writing(known.place, version):
                    known.buckets[bucket.index] = await asyncio.to_thread(
                        _write, known.place, bucket, engine, self._names()
                    )
            elif written[0] != bucket.checksum:
                raise EngineError(engine, f"weights bucket {bucket.index} of version {version} came in two forms")

    async def finish(self, version: int, num_buckets: int, engine: str) -> Path:
        """The whole folder. Raises `EngineError` while a bucket is missing."""
        known = self._versions[version]
        async with known.lock:
            if known.folder is None:
                if (got := len(known.buckets)) != num_buckets:
                    raise EngineError(engine, f"commit of version {version}: {got} of {num_buckets} buckets arrived")
                rows = [known.buckets[index] for index in sorted(known.buckets)]
                need_names(engine, version, self._names(), {name for _, names, _ in rows for name in names})
                target = self._root / f"version_{version}"
                with _writing(known.place, version):
                    await asyncio.to_thread(_finish, known.place, target, self.model, rows)
                known.folder = target
            return known.folder

    async def loaded(self, version: int, engine: str) -> None:
        """`engine` serves it. Folders of versions that nobody can still ask for go."""
        known = self._versions.get(version)
        if known is None:
            return
        known.users.discard(engine)
        if known.users:
            return
        for old in [number for number in self._versions if number < version]:
            await self._delete(old)

    def _names(self) -> set[str]:
        if self._expected is None:
            self._expected = checkpoint_names(self.model)
        return self._expected

    async def _delete(self, version: int) -> None:
        del self._versions[version]
        for path in (self._root / f"version_{version}", self._root / f"version_{version}.part"):
            await asyncio.to_thread(shutil.rmtree, path, ignore_errors=True)

    def close(self) -> None:
        """Deletes all."""
        shutil.rmtree(self._root, ignore_errors=True)


@contextlib.contextmanager
def _writing(place: Path, version: int) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:
        why = getattr(error, "strerror", None) or one_line(error)
        raise RunError(
            f"weights version {version} cannot be written to {place.parent}: {why}; make room there, or write run.dir "
            "= a folder that can take them"
        ) from None


def _write(place: Path, bucket: Bucket, engine: str, expected: Set[str]) -> tuple[int, list[str], int]:
    from safetensors.torch import save_file

    from gruppetto.weights.checksum import checksum

    if (got := checksum(bucket.tensors)) != bucket.checksum:
        raise EngineError(
            engine,
            f"weights bucket {bucket.index}: has checksum {got:#x} where the sender computed {bucket.checksum:#x}; "
            "the version before stays",
        )
    tensors: dict[str, Any] = {name: _own(tensor) for name, tensor in as_checkpoint(bucket.tensors, expected)}
    save_file(tensors, place / _file(bucket.index), metadata={"format": "pt"})
    return bucket.checksum, list(tensors), sum(tensor.numel() * tensor.element_size() for tensor in tensors.values())


def _own(tensor: Any) -> Any:
    """Its values in memory of its own: safetensors takes no views that share any."""
    return tensor.detach().cpu().contiguous().clone()


def _file(index: int) -> str:
    return f"model-{index:05d}.safetensors"


def _finish(place: Path, target: Path, model: Path, rows: Sequence[tuple[int, list[str], int]]) -> None:
    for file in sorted(model.iterdir()):
        if file.is_file() and file.suffix in _SMALL and not file.name.endswith(".safetensors.index.json"):
            shutil.copy2(file, place / file.name)
    where = {name: _file(index) for index, (_, names, _) in enumerate(rows) for name in names}
    index = {"metadata": {"total_size": sum(size for _, _, size in rows)}, "weight_map": where}
    (place / "model.safetensors.index.json").write_text(json.dumps(index))
    place.rename(target)
