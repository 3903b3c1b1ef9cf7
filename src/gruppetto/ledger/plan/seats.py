"""Models that share the trainer's GPUs with the policy: a critic, a reference, a judge. What they hold, and where.

    critic      16 bytes a parameter over all GPUs of the trainer, as the policy's own state
    reference   2 bytes a parameter over all GPUs, read only
    judge       its weights and a third as much for KV, over the GPUs of one engine of it

Resident, each keeps its place while the others work. Where that does not fit they take turns: what is not at work lies
in host memory, and every turn is paid for over the host link. Promise: a seat is either on the GPU or in host memory.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.layouts.found import NothingFits
from gruppetto.ledger.layouts.memory import OVERHEADS
from gruppetto.ledger.layouts.trainers import HOST_USABLE
from gruppetto.ledger.plan import stages
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.units import show_size

STATE_BYTES = 16.0
"""Of a parameter in training: weights and gradients in 16 bits, fp32 master and two moments (arXiv:1910.02054, 3.1)."""
STATE_SOURCE = "Rajbhandari et al. 2020, arXiv:1910.02054"


class Seat(NamedTuple):
    """One model beside the policy. Bytes of one GPU."""

    name: str
    held: Figure
    """While it works."""
    comes: float
    """Over the host link to the GPU, where it was away."""
    goes: float
    """Over the host link from the GPU; what is only read has a copy in host memory already."""
    resident: bool = True
    """On the GPU while others work."""

    @property
    def reserved(self) -> float:
        """What the policy's trainer cannot have."""
        return self.held.value if self.resident else 0.0

    @property
    def host(self) -> float:
        """In host memory while others work."""
        return 0.0 if self.resident else self.comes


def seats(ask: Ask, gpus: int) -> tuple[Seat, ...]:
    """Who sits beside the policy on `gpus` GPUs. Raises `UserError` where a judge has too few of them."""
    found, params = [], ask.model.params
    if ask.judge is not None:
        found.append(_judge(ask, gpus))
    if ask.reference:
        copy = 2.0 * params / gpus
        text = f"2 B x {params:,} parameters / {gpus} GPUs, read only"
        found.append(Seat(name="reference", held=Figure(copy, "bytes", text), comes=copy, goes=0.0))
    if ask.critic:
        state = STATE_BYTES * params / gpus
        text = f"{STATE_BYTES:g} B x {params:,} parameters / {gpus} GPUs"
        held = Figure(state, "bytes", text, STATE_SOURCE)
        found.append(Seat(name="critic", held=held, comes=state, goes=state))
    return tuple(found)


def _judge(ask: Ask, gpus: int) -> Seat:
    assert ask.judge is not None
    model = ask.judge.model
    weights, tp = model.weight_bytes("bf16"), stages.judge_gpus(ask)
    if tp > gpus:
        raise UserError(
            f"the judge {model.name} needs {tp} x {ask.gpu.name} for {show_size(weights)} of weights and KV, and there "
            f"are {gpus} for the trainer, on whose GPUs it runs; write --gpus {tp} --compare colocated, more GPUs or a "
            "smaller --judge"
        )
    text = f"({show_size(weights)} of weights and a third as much for KV) / {tp} GPUs"
    held = Figure(stages.JUDGE_ROOM * weights / tp, "bytes", text)
    return Seat(name="judge", held=held, comes=weights / tp, goes=0.0)


def in_turn(ask: Ask, found: Sequence[Seat], gpus: int, reserved: float) -> tuple[Seat, ...]:
    """The same seats in host memory while others work. Raises `UserError` where the host, or the GPU, has no room."""
    away = tuple(seat._replace(resident=False) for seat in found)
    room = ask.gpu.memory * OVERHEADS.usable - reserved - OVERHEADS.context
    for seat in away:
        if seat.held.value > room:
            held = show_size(seat.held.value)
            raise _too_few(f"the {seat.name} takes {held} of a GPU even alone, and {show_size(room)} are left")
    each = sum(seat.host for seat in away) + STATE_BYTES * ask.model.params / gpus
    have = HOST_USABLE * ask.gpu.host_memory
    if min(gpus, ask.gpu.gpus_per_node) * each > have:
        names = " and ".join(seat.name for seat in away)
        raise _too_few(
            f"{names} beside {ask.model.name} on {gpus} x {ask.gpu.name} fit neither the GPUs nor, in turn, "
            f"{show_size(have)} of a node's host memory"
        )
    return away


def _too_few(why: str) -> NothingFits:
    return NothingFits(lambda: why, lambda: "write more --gpus")


def turn_s(ask: Ask, seat: Seat, gpus: int) -> Figure:
    """Seconds of one turn: the seat comes and goes; of a judge and a critic also the policy's state goes and comes."""
    speed = ask.gpu.host_link * ask.efficiency.host_link
    policy = 0.0 if seat.name == "reference" else 2 * STATE_BYTES * ask.model.params / gpus
    moved = seat.comes + seat.goes + policy
    text = f"{show_size(seat.comes + seat.goes)} of the {seat.name}"
    if policy:
        text += f" + {show_size(policy)} of the policy's state, there and back"
    text += f" / ({show_size(ask.gpu.host_link)}/s x {ask.efficiency.host_link:.2g})"
    return Figure(moved / speed, "s", text, ask.efficiency.source("host_link"))
