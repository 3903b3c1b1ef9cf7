"""What is wrong with the weights an engine reads back, by name.

An engine's own digests, mapped back to Hugging Face names (`layouts`), are held against the manifest of the version it
should serve and the one before. Promises: no fault where all bits are right; each fault says which tensors, what they
hold instead where that is known, and what it means.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from gruppetto.weights.buckets import Manifest
from gruppetto.weights.layouts.names import EMBEDDING, HEAD
from gruppetto.weights.layouts.spec import Spec

Kind = Literal["missing_bucket", "missing", "unexpected", "shape", "stale", "swapped", "untied", "changed"]


@dataclass(frozen=True, slots=True)
class Fault:
    """One thing that is wrong. `line` is for people."""

    kind: Kind
    names: tuple[str, ...]
    line: str


@dataclass(frozen=True, slots=True)
class Found:
    """What an engine has under a Hugging Face name."""

    spec: Spec
    digest: int


def faults(
    manifest: Manifest, found: Mapping[str, Found], before: Manifest | None = None, *, tied: bool = False
) -> list[Fault]:
    """Every fault of `found` against `manifest`; `before` is the manifest of the version that was there.

    `tied`: the head is the embedding, whatever names it comes under. Shapes first, then whole buckets, then tensors.
    """
    result = _names_and_shapes(manifest, found, tied)
    wrong = [
        name
        for name, row in manifest.rows.items()
        if name in found and found[name].spec == row.spec and found[name].digest != row.digest
    ]
    untied = [fault for fault in [_untied(found, wrong)] if fault] if tied else []
    taken = {name for fault in untied for name in fault.names}
    left = [name for name in wrong if name not in taken]
    swapped = _swapped(manifest, found, left)
    taken.update(name for fault in swapped for name in fault.names)
    stale = [name for name in left if name not in taken and _is_stale(name, found, before)]
    changed = [name for name in left if name not in taken and name not in stale]
    result += untied + swapped + _stale(manifest, stale, before)
    for name in changed:
        line = f"{name} holds values of no known version: it was changed, cut or quantised on its way"
        result.append(Fault("changed", (name,), line))
    return result


def _names_and_shapes(manifest: Manifest, found: Mapping[str, Found], tied: bool) -> list[Fault]:
    result = []
    for name, row in manifest.rows.items():
        if name not in found:
            result.append(Fault("missing", (name,), f"{name} is not in the engine: its loader did not know the name"))
        elif found[name].spec != row.spec:
            spec = found[name].spec
            line = f"{name} is {spec.dtype} {spec.shape} in the engine, {row.spec.dtype} {row.spec.shape} was sent"
            result.append(Fault("shape", (name,), line))
    for name in found:
        if name not in manifest.rows and not (tied and name == HEAD):
            line = f"{name} is in the engine but was never sent: a buffer or an adapter that the export leaves out"
            result.append(Fault("unexpected", (name,), line))
    return result


def _untied(found: Mapping[str, Found], wrong: Sequence[str]) -> Fault | None:
    """A tied head that is a tensor of its own and was not updated with the embedding, or the other way round."""
    if HEAD not in found or EMBEDDING not in found or found[HEAD].digest == found[EMBEDDING].digest:
        return None
    names = tuple(name for name in (EMBEDDING, HEAD) if name in wrong) or (HEAD,)
    line = f"{HEAD} and {EMBEDDING} are one tensor in this model but hold different values in the engine: untied head"
    return Fault("untied", names, line)


def _swapped(manifest: Manifest, found: Mapping[str, Found], wrong: Sequence[str]) -> list[Fault]:
    """Two tensors that hold each other's values: gate and up, key and value, two experts."""
    holder = defaultdict(list)
    for name in wrong:
        holder[manifest.rows[name].digest].append(name)
    result = []
    seen: set[str] = set()
    for name in wrong:
        for other in holder.get(found[name].digest, ()):
            crossed = found[other].digest == manifest.rows[name].digest
            if crossed and other != name and not {name, other} & seen:
                seen.update((name, other))
                result.append(Fault("swapped", (name, other), f"{name} and {other} hold each other's values"))
    return result


def _is_stale(name: str, found: Mapping[str, Found], before: Manifest | None) -> bool:
    return before is not None and name in before.rows and before.rows[name].digest == found[name].digest


def _stale(manifest: Manifest, stale: Sequence[str], before: Manifest | None) -> list[Fault]:
    """Whole buckets first: all of a bucket's tensors that changed are still of the version before."""
    if before is None:
        return []
    by_bucket = defaultdict(list)
    for name in stale:
        by_bucket[manifest.rows[name].bucket].append(name)
    result = []
    for bucket, names in sorted(by_bucket.items()):
        moved = [
            name
            for name, row in manifest.rows.items()
            if row.bucket == bucket and (name not in before.rows or before.rows[name].digest != row.digest)
        ]
        if len(moved) > 1 and set(moved) == set(names):
            line = (
                f"bucket {bucket} of version {manifest.version} was skipped: all {len(names)} of its changed tensors "
                f"are still of version {before.version}, the first is {names[0]}"
            )
            result.append(Fault("missing_bucket", tuple(names), line))
            continue
        for name in names:
            what = "a stale scale" if "_scale" in name.rpartition(".")[2] else "stale"
            line = f"{name} is still of version {before.version} where {manifest.version} was sent: {what}"
            result.append(Fault("stale", (name,), line))
    return result
