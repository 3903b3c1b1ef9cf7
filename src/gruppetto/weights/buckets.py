"""Which tensors travel together, where each lies in its bucket, and what has to have arrived.

Promises: tensors that an engine loads in one step are never in two buckets; buckets are consecutive in the order given;
a bucket holds at most `bucket_bytes`, or is one group that is larger; every tensor begins at a multiple of `ALIGN`
bytes, so that it can be viewed in place; a plan depends on names, shapes and types only, so both sides make the same
one. The manifest of a version names every tensor with type, shape and digest: what is missing, stale, swapped or
untied is named by comparing it with what an engine reads back (`faults`).
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from gruppetto.errors import RunError, UserError
from gruppetto.weights.layouts.groups import groups_of
from gruppetto.weights.layouts.maps import by_name, numpy_dtype
from gruppetto.weights.layouts.spec import Spec

ALIGN = 256
"""Bytes; what CUDA allocations and the widest vector loads ask for."""


@dataclass(frozen=True, slots=True)
class Slot:
    """One tensor in a bucket: bytes `offset` to `offset + spec.num_bytes`."""

    spec: Spec
    offset: int


@dataclass(frozen=True, slots=True)
class BucketPlan:
    """One bucket. `num_bytes` includes the gaps between tensors."""

    index: int
    slots: tuple[Slot, ...]
    num_bytes: int


@dataclass(frozen=True, slots=True)
class Row:
    """One tensor of a version as the trainer sent it."""

    spec: Spec
    bucket: int
    offset: int
    digest: int


@dataclass(frozen=True, slots=True)
class Manifest:
    """All of one weights version. `checksum` covers version, names, types, shapes, places and digests."""

    version: int
    num_buckets: int
    rows: Mapping[str, Row]
    checksum: int


def plan_buckets(
    specs: Iterable[Spec], bucket_bytes: int, groups: Sequence[Sequence[str]] | None = None
) -> tuple[BucketPlan, ...]:
    """Buckets of at most `bucket_bytes`; `groups` are names that must arrive together (None: by `groups_of`).

    A group goes where its first member stands. Raises `UserError` for a group that is not all there.
    """
    if bucket_bytes < ALIGN:
        raise UserError(f"a bucket of {bucket_bytes} bytes holds nothing; write {ALIGN} or more")
    named = by_name(specs)
    plans: list[BucketPlan] = []
    slots: list[Slot] = []
    end = 0
    for group in _in_order(named, groups_of(named.values()) if groups is None else groups):
        size = sum(_aligned(spec.num_bytes) for spec in group)
        if slots and end + size > bucket_bytes:
            plans.append(BucketPlan(len(plans), tuple(slots), end))
            slots, end = [], 0
        for spec in group:
            slots.append(Slot(spec, end))
            end += _aligned(spec.num_bytes)
    if slots:
        plans.append(BucketPlan(len(plans), tuple(slots), end))
    return tuple(plans)


def _aligned(size: int) -> int:
    return -(-size // ALIGN) * ALIGN


def _in_order(named: Mapping[str, Spec], groups: Sequence[Sequence[str]]) -> list[list[Spec]]:
    """Groups and single tensors, each where its first member stands."""
    group_of: dict[str, tuple[str, ...]] = {}
    for group in groups:
        if missing := [name for name in group if name not in named]:
            raise UserError(
                f"{group[0]} has to arrive together with {missing[0]}, which is not among the tensors; give all of "
                f"{', '.join(group)}"
            )
        for name in group:
            if name in group_of:
                raise UserError(f"{name} is in two groups; join them to one")
            group_of[name] = tuple(group)
    order: list[list[Spec]] = []
    placed: set[str] = set()
    for name in named:
        if name not in placed:
            members = group_of.get(name, (name,))
            order.append([named[member] for member in members])
            placed.update(members)
    return order


def views(plan: BucketPlan, buffer: NDArray[np.uint8]) -> dict[str, Any]:
    """The bucket's tensors as arrays inside `buffer`, to be copied into (from any strides) or read in place."""
    if len(buffer) < plan.num_bytes:
        raise RunError(f"bucket {plan.index} has {plan.num_bytes} bytes, the buffer {len(buffer)}")
    return {
        slot.spec.name: buffer[slot.offset : slot.offset + slot.spec.num_bytes]
        .view(numpy_dtype(slot.spec.dtype))
        .reshape(slot.spec.shape)
        for slot in plan.slots
    }


def make_manifest(version: int, plans: Sequence[BucketPlan], digests: Mapping[str, int]) -> Manifest:
    """`digests` by name, of `delta.digest.digest` or any digest that the receiver computes too."""
    rows = {
        slot.spec.name: Row(slot.spec, plan.index, slot.offset, digests[slot.spec.name])
        for plan in plans
        for slot in plan.slots
    }
    return Manifest(version, len(plans), rows, _checksum(version, len(plans), rows))


def _checksum(version: int, num_buckets: int, rows: Mapping[str, Row]) -> int:
    crc = zlib.crc32(f"{version}\x1f{num_buckets}".encode())
    for name, row in rows.items():
        line = f"{name}\x1f{row.spec.dtype}\x1f{row.spec.shape}\x1f{row.bucket}\x1f{row.offset}\x1f{row.digest}\x1e"
        crc = zlib.crc32(line.encode(), crc)
    return crc


def checked(manifest: Manifest) -> Manifest:
    """The manifest, if it is what was sent. Raises `RunError`."""
    if _checksum(manifest.version, manifest.num_buckets, manifest.rows) != manifest.checksum:
        raise RunError(f"the manifest of version {manifest.version} was changed on its way")
    return manifest


class Arrivals:
    """The buckets of one version as they come in."""

    def __init__(self, manifest: Manifest) -> None:
        self._manifest = checked(manifest)
        self._here: set[int] = set()

    def add(self, version: int, index: int) -> None:
        """Raises `RunError` for a bucket of another version, one that is not in the manifest or that came before."""
        if version != self._manifest.version:
            raise RunError(f"bucket {index} is of version {version}, but version {self._manifest.version} is loading")
        if not 0 <= index < self._manifest.num_buckets:
            raise RunError(f"bucket {index} is none of the {self._manifest.num_buckets} of version {version}")
        if index in self._here:
            raise RunError(f"bucket {index} of version {version} came twice")
        self._here.add(index)

    def complete(self) -> None:
        """Raises `RunError` that names the first bucket that did not come, with its first tensor."""
        for index in range(self._manifest.num_buckets):
            if index not in self._here:
                names = [name for name, row in self._manifest.rows.items() if row.bucket == index]
                raise RunError(
                    f"version {self._manifest.version}: bucket {index} of {self._manifest.num_buckets} did not arrive; "
                    f"it holds {len(names)} tensors, the first is {names[0]}"
                )
