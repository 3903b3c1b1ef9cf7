"""Bytes that a colocated model moves when it goes from its training layout to its generation layout.

HybridFlow (arXiv:2409.19256, section 5.4, Table 2): per GPU and transition, for a model of M bytes trained with
t-way tensor and p-way pipeline parallelism (d replicas) and generating with t_g and p_g. Exact as published.
"""

from __future__ import annotations

from typing import Literal

from gruppetto.errors import UserError
from gruppetto.ledger.figure import Figure
from gruppetto.ledger.units import show_size

_SOURCE = "HybridFlow, arXiv:2409.19256, Table 2"


def transition_bytes(
    weight_bytes: float,
    *,
    tp: int,
    pp: int = 1,
    serve_tp: int,
    serve_pp: int = 1,
    dp: int = 1,
    method: Literal["hybridflow", "hybridflow-v", "deepspeed-chat"] = "hybridflow",
) -> Figure:
    """Bytes each GPU receives in one transition.

    hybridflow: (t p - t_g p_g) / (t_g p_g t p) M, generation groups chosen such that a rank keeps its shard.
    hybridflow-v: (t p - 1) / (t p) M, an all-gather in the training groups. deepspeed-chat: (t p d - 1) / (t p d) M,
    an all-gather over all GPUs. Raises `UserError` where the training layout is not a multiple of the generation one.
    """
    for name, value in (("tp", tp), ("pp", pp), ("serve_tp", serve_tp), ("serve_pp", serve_pp), ("dp", dp)):
        if value < 1:
            raise UserError(f"{name} = {value}: a number of ranks is at least 1")
    train, serve = tp * pp, serve_tp * serve_pp
    size = show_size(weight_bytes)
    if method == "deepspeed-chat":
        text = f"({train * dp} - 1) / {train * dp} x {size}"
        return Figure((train * dp - 1) / (train * dp) * weight_bytes, "bytes", text, _SOURCE)
    if method == "hybridflow-v":
        return Figure((train - 1) / train * weight_bytes, "bytes", f"({train} - 1) / {train} x {size}", _SOURCE)
    if train % serve:
        raise UserError(
            f"generation tp x pp = {serve} does not divide training tp x pp = {train}; "
            f"use a divisor such as {max(d for d in range(1, train + 1) if train % d == 0 and d <= serve)}"
        )
    text = f"({train} - {serve}) / ({serve} x {train}) x {size}"
    return Figure((train - serve) / (serve * train) * weight_bytes, "bytes", text, _SOURCE)


def redundant_bytes(weight_bytes: float, *, tp: int, pp: int = 1, dp: int = 1, method: str = "hybridflow") -> Figure:
    """Bytes of training weights that each GPU holds twice during generation: none with HybridFlow's groups."""
    share = {"hybridflow": 0.0, "hybridflow-v": 1 / (tp * pp), "deepspeed-chat": 1 / (tp * pp * dp)}[method]
    return Figure(share * weight_bytes, "bytes", f"{share:.3g} x {show_size(weight_bytes)}", _SOURCE)
