"""The account of a delta sync: only changed elements travel, as (index, value) pairs or behind a bitmap.

A 16-bit weight of RL training seldom changes in a step: an update below about |w| / 256 rounds back to the same bits.
Reported: 1 to 3 % of the elements of dense models, 0.02 to 0.05 % of a large mixture of experts in early steps (verl
docs, advance/delta_weight_sync.md), under 1 to 2 % (PULSE, arXiv:2602.03839).

Promise: the payload is never above a full one, because the encoding with the fewest bytes is taken and "dense" is one.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.layout import TrainLayout
from gruppetto.ledger.machines.efficiency import DEFAULT, Efficiency
from gruppetto.ledger.machines.storage import model_bytes
from gruppetto.ledger.models.model import Model
from gruppetto.ledger.transfers.sync import Sync
from gruppetto.ledger.units import show_seconds, show_size

Encoding = Literal["int32", "gap16", "bitmap", "dense"]
INDEX_BYTES = {"int32": 4.0, "gap16": 2.0, "bitmap": 0.0, "dense": 0.0}
"""Of one changed element: its position, or the gap to the last one (an escape where it is longer than 65,534)."""


class Delta(NamedTuple):
    """One delta sync, next to the full one it replaces."""

    encoding: Encoding
    payload: Figure
    share: Figure
    """Payload over the bytes of a full sync."""
    break_even: Figure
    """Density from which a dense payload is smaller than this encoding's."""
    break_even_seconds: Figure
    """Density from which the full sync is faster; 1 where it never is."""
    snapshot: Figure
    """Host memory of one trainer rank: a copy of its shard, to compare with."""
    scanned: Figure
    parts: tuple[Figure, ...]
    expected: Figure
    saved: Figure
    """Seconds less than the full sync; negative where it is slower."""


def payload_bytes(elements: float, density: float, encoding: Encoding, value_bytes: float = 2.0) -> float:
    """Bytes of the changed elements in one encoding.

    int32: 4 and the value. gap16: 2 and the value. bitmap: one bit an element and the values. dense: all values.
    """
    if encoding == "dense":
        return elements * value_bytes
    bitmap = elements / 8 if encoding == "bitmap" else 0.0
    escapes = 2.0 * elements / 65_535 if encoding == "gap16" else 0.0
    return bitmap + min(escapes, elements) + elements * density * (INDEX_BYTES[encoding] + value_bytes)


def break_even_density(encoding: Encoding, value_bytes: float = 2.0) -> float:
    """Density at which an encoding's bytes are those of a dense payload: 1/3 for int32 and 16-bit values."""
    if encoding == "bitmap":
        return (value_bytes - 0.125) / value_bytes
    if encoding == "gap16":
        return (value_bytes - 2.0 / 65_535) / (2.0 + value_bytes)
    return value_bytes / (INDEX_BYTES[encoding] + value_bytes)


def best_encoding(elements: float, density: float, value_bytes: float = 2.0) -> Encoding:
    """The encoding with the fewest bytes at this density."""
    choices: tuple[Encoding, ...] = ("int32", "gap16", "bitmap", "dense")
    return min(choices, key=lambda one: payload_bytes(elements, density, one, value_bytes))


def delta(
    model: Model,
    train: TrainLayout,
    full: Sync,
    *,
    density: float = 0.02,
    encoding: Encoding | Literal["best"] = "int32",
    value_bytes: float = 2.0,
    params_in_host: bool = False,
    efficiency: Efficiency = DEFAULT,
) -> Delta:
    """The account of a sync in which `density` (0 to 1) of the elements changed, against the `full` sync.

    `encoding`: "int32" is what verl and vLLM send. `value_bytes` 1 for an engine in FP8, where the quantised codes are
    compared (one changed element can change its whole block's). Raises `UserError` for a density that is no share.
    """
    if not 0 <= density <= 1:
        raise UserError(f"density = {density}: a share of elements lies between 0 and 1; write 0.02 for 2 %")
    elements = float(sum(t.elements for t in model.tensors if t.kind != "mtp"))
    chosen = best_encoding(elements, density, value_bytes) if encoding == "best" else encoding
    if payload_bytes(elements, density, chosen, value_bytes) > elements * value_bytes:
        chosen = "dense"
    payload = payload_bytes(elements, density, chosen, value_bytes)
    parts = _parts(model, train, full, payload, params_in_host, efficiency)
    expected = sum(part.value for part in parts)
    return Delta(
        encoding=chosen,
        payload=Figure(payload, "bytes", _payload_text(elements, density, chosen, value_bytes)),
        share=Figure(payload / full.total.value, "", f"{show_size(payload)} / {full.total.formula}"),
        break_even=Figure(break_even_density(chosen, value_bytes), "", "bytes of this encoding = bytes of a dense one"),
        break_even_seconds=_crossing(
            full, expected - payload / efficiency.delta, elements * (4.0 + value_bytes), efficiency
        ),
        snapshot=Figure(_own(model, train), "bytes", "16 bits of what the rank holds, in host memory"),
        scanned=Figure(_own(model, train), "bytes", "each rank compares its own shard"),
        parts=parts,
        expected=Figure(expected, "s", " + ".join(show_seconds(part.value) for part in parts), efficiency.name),
        saved=Figure(
            full.expected.value - expected, "s", f"{show_seconds(full.expected.value)} of a full sync less this"
        ),
    )


def _own(model: Model, train: TrainLayout) -> float:
    """Bytes of parameters one trainer rank compares: ranks that hold copies share the work."""
    return model_bytes(model, "bf16") / train.gpus


def _parts(
    model: Model, train: TrainLayout, full: Sync, payload: float, params_in_host: bool, efficiency: Efficiency
) -> tuple[Figure, ...]:
    own = _own(model, train)
    found = [Figure(efficiency.sync_s, "s", "pause, metadata, resume", efficiency.source("sync_s"))]
    if efficiency.tensor_s:
        tensors = full.tensors.value
        text = f"{tensors:,.0f} tensors x {show_seconds(efficiency.tensor_s)}"
        found.append(Figure(tensors * efficiency.tensor_s, "s", text, efficiency.source("tensor_s")))
    if params_in_host:
        text = f"shard from host memory: {show_size(own)} / {show_size(efficiency.offloaded)}/s"
        found.append(Figure(own / efficiency.offloaded, "s", text, efficiency.source("offloaded")))
    text = f"compared: {show_size(own)} a rank / {show_size(efficiency.scan)}/s"
    found.append(Figure(own / efficiency.scan, "s", text, efficiency.source("scan")))
    text = f"changed elements gathered and sent: {show_size(payload)} / {show_size(efficiency.delta)}/s"
    found.append(Figure(payload / efficiency.delta, "s", text, efficiency.source("delta")))
    return tuple(found)


def _crossing(full: Sync, fixed_s: float, all_bytes: float, efficiency: Efficiency) -> Figure:
    """Density at which int32 pairs (`all_bytes` at density 1) take as long as the full sync."""
    spare = max(0.0, full.expected.value - fixed_s)
    text = f"{show_seconds(spare)} x {show_size(efficiency.delta)}/s / {show_size(all_bytes)} of int32 pairs"
    return Figure(min(1.0, spare * efficiency.delta / all_bytes), "", text)


def _payload_text(elements: float, density: float, encoding: str, value_bytes: float) -> str:
    if encoding == "dense":
        return f"{elements:,.0f} elements x {value_bytes:g} B"
    index = "1 bit an element" if encoding == "bitmap" else f"{INDEX_BYTES[encoding]:g} B index"
    return f"{elements:,.0f} elements x {density:.3%} x ({index} + {value_bytes:g} B value)"
