"""Memory by owner over one step, phase after phase: what a page draws, and whether colocated parts fit side by side.

Colocated, a GPU's phases are generate, hand over (engine asleep, trainer loading), train, sync (both have weights, no
KV). Disaggregated and async, the two kinds of GPU have their own phases. Promise: each phase's parts sum to `used`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.memory import Memory
from gruppetto.ledger.layouts.serving import ServeMemory

Placement = Literal["colocated", "disaggregated", "async"]
STATE = ("weights", "gradients", "optimizer")
"""What a trainer keeps between steps."""
GUESTS = ("critic", "reference", "judge")
"""Models beside the policy, where they have a place on the trainer's GPUs."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sleep:
    """What gives memory up between phases, and where to."""

    level: Literal[1, 2] = 2
    """1: the engine's weights go to host memory and come back; 2: they are dropped, the sync brings new ones (vLLM)."""
    graphs_stay: bool = True
    """CUDA graphs keep their memory while the engine sleeps (vLLM; SGLang can release them by tag)."""
    trainer_stays: tuple[str, ...] = ()
    """Owners of trainer state that remain on the GPU while engines generate; the others go to host memory."""
    groups_stay: bool = True
    """The trainer's NCCL buffers remain while engines generate; slime destroys the groups and makes them anew, which
    took its residue from 15 to 18 GB down to 3 to 5 GB (release notes of v0.1.0)."""
    bucket: float = 1.0e9
    """Bytes of weights under way at once in a sync: the buffer on either side."""


SLEEP = Sleep()


@dataclass(frozen=True, slots=True)
class Phase:
    """What one GPU holds in one phase. Owners are "trainer ..." and "engine ..."; bytes."""

    name: str
    side: Literal["both", "trainer", "engine"]
    """Whose GPU it is."""
    parts: dict[str, Figure]
    memory: float
    """Of the GPU."""
    host: Figure
    """In host memory for this GPU."""

    @property
    def used(self) -> float:
        return sum(figure.value for figure in self.parts.values())

    @property
    def free(self) -> float:
        """Negative where the phase does not fit."""
        return self.memory - self.used

    @property
    def fits(self) -> bool:
        return self.free >= 0


def timeline(
    placement: Placement, train: Memory, serve: ServeMemory, memory: float, sleep: Sleep = SLEEP
) -> tuple[Phase, ...]:
    """The phases of one step on a GPU of `memory` bytes (disaggregated: on one of each side), in their order."""
    if placement == "colocated":
        return _colocated(train, serve, memory, sleep)
    return _apart(train, serve, memory, sleep)


def _colocated(train: Memory, serve: ServeMemory, memory: float, sleep: Sleep) -> tuple[Phase, ...]:
    awake = _of("engine", serve.parts, tuple(serve.parts))
    asleep = _of("engine", serve.parts, ("context", "communication", *(("graphs",) if sleep.graphs_stay else ())))
    weights = _of("engine", serve.parts, ("weights",))
    rest = _of("trainer", train.parts, ("context", *(("communication",) if sleep.groups_stay else ())))
    stays = _of("trainer", train.parts, sleep.trainer_stays)
    state = _of("trainer", train.parts, (*STATE, *GUESTS, "context", "communication"))
    sender = _of("trainer", train.parts, ("weights", "context", "communication"))
    bucket = {"sync bucket": Figure(sleep.bucket, "bytes", "weights under way at once")}
    away = _away(train, sleep)
    copy = serve.parts["weights"].value if sleep.level == 1 else 0.0
    return (
        Phase("generate", "both", {**awake, **rest, **stays}, memory, _host(train, away, 0.0)),
        Phase("hand over", "both", {**asleep, **state}, memory, _host(train, 0.0, copy)),
        Phase("train", "both", {**asleep, **_of("trainer", train.parts, tuple(train.parts))}, memory,
              _host(train, 0.0, copy)),
        Phase("sync", "both", {**asleep, **weights, **sender, **stays, **bucket}, memory,
              _host(train, max(0.0, away - _value(train, "weights", sleep)), 0.0)),
    )  # fmt: skip


def _apart(train: Memory, serve: ServeMemory, memory: float, sleep: Sleep) -> tuple[Phase, ...]:
    bucket = {"sync bucket": Figure(sleep.bucket, "bytes", "weights under way at once")}
    own = _of("trainer", train.parts, (*STATE, *GUESTS, "context", "communication"))
    engine = _of("engine", serve.parts, tuple(serve.parts))
    none, host = Figure(0.0, "bytes", "0"), train.host
    return (
        Phase("train", "trainer", _of("trainer", train.parts, tuple(train.parts)), memory, host),
        Phase("wait", "trainer", own, memory, host),
        Phase("sync", "trainer", {**own, **bucket}, memory, host),
        Phase("generate", "engine", engine, memory, none),
        Phase("sync", "engine", {**engine, **bucket}, memory, none),
    )


def _of(side: str, parts: dict[str, Figure], owners: tuple[str, ...]) -> dict[str, Figure]:
    """These owners' parts, those that hold nothing left out."""
    return {f"{side} {owner}": parts[owner] for owner in owners if owner in parts and parts[owner].value > 0}


def _value(train: Memory, owner: str, sleep: Sleep) -> float:
    return 0.0 if owner in sleep.trainer_stays else train.parts[owner].value


def _away(train: Memory, sleep: Sleep) -> float:
    """Trainer state that is in host memory while engines generate; gradients are dropped, not kept."""
    away = (owner for owner in (*STATE, *GUESTS) if owner != "gradients" and owner in train.parts)
    return sum(_value(train, owner, sleep) for owner in away)


def _host(train: Memory, away: float, copy: float) -> Figure:
    """In host memory: what is always offloaded, trainer state that made room, the engine's weights."""
    parts = ((train.host.value, "offloaded optimizer"), (away, "trainer state"), (copy, "engine weights"))
    text = " + ".join(f"{name} {value / 1e9:.3g} GB" for value, name in parts if value)
    return Figure(train.host.value + away + copy, "bytes", text or "0")
