"""What speculative decoding makes of an engine: accepted tokens and step time by batch, from its own price list.

    accepted(g) = 1 + a + ... + a^g              tokens a step with g drafts, each accepted with probability a
    step(b, g)  = base + row b (1+g) + max(weights + KV, compute b (1+g)) + g * draft share * step(b, 0)      seconds

For each batch the g of the best price per token is taken (0 = off). Sources: Leviathan et al. (2211.17192) for the
first line; Seer (2511.14617) chooses g in the same way.
"""

from __future__ import annotations

from dataclasses import replace

from gruppetto.sim.engine import EngineModel

BATCHES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512, 1024)


def accepted(rate: float, drafts: int) -> float:
    """Tokens of a step with `drafts` drafted tokens of which each is accepted with probability `rate`."""
    return sum(rate**i for i in range(drafts + 1))


def rate_of(length: float, drafts: int) -> float:
    """The acceptance rate that makes steps of `length` tokens (1 = nothing accepted) with so many drafts."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        low, high = (middle, high) if accepted(middle, drafts) < length else (low, middle)
    return low


def speculating(
    model: EngineModel, *, rate: float, context: float, drafts: int, draft_share: float = 0.0, below: int = 1 << 30
) -> EngineModel:
    """`model` with drafts of at most `drafts` tokens where they pay, for rows that hold `context` tokens each.

    `draft_share`: the price of a draft (making it, and what else a step with it costs) over that of a plain step.
    `below`: off from so many rows on.
    """
    table = [
        (rows, *_best(model, rate, int(rows * context), rows, drafts, draft_share)) for rows in BATCHES if rows < below
    ]
    if below <= BATCHES[-1]:
        table.append((below, 1.0, 1.0))
    return replace(model, speculation=tuple(table))


def _best(model: EngineModel, rate: float, kv: int, rows: int, drafts: int, draft_share: float) -> tuple[float, float]:
    """(accepted tokens, step time as a multiple) of the best number of drafts at this batch."""
    plain = model.step_s(rows, kv)
    choices = [(accepted(rate, g), _verify_s(model, rows, kv, g) / plain + g * draft_share) for g in range(drafts + 1)]
    return max(choices, key=lambda choice: choice[0] / choice[1])


def _verify_s(model: EngineModel, rows: int, kv: int, drafts: int) -> float:
    """Seconds of a step that checks `drafts` tokens of each row beside making one."""
    width = rows * (1 + drafts)
    read, compute = model.read_s(width) + model.kv_token_s * kv, model.compute_row_s * width
    return model.base_s + model.row_s * width + max(read, compute)
