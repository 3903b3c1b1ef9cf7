"""The account of one step, stage by stage: FLOP, bytes, GPU-seconds and memory, each with its arithmetic.

A stage's GPU-seconds are those of its work at the assumed efficiency, however it is placed: what placements add
(waiting, the tail, hand-overs) is in `placements`. Convention of MFU: a multiply-add is 2 FLOP, training is 3 forwards,
and what is computed again in the backward pass is not counted.
"""

from __future__ import annotations

from functools import lru_cache
from typing import NamedTuple

from gruppetto.ledger.figure import Figure
from gruppetto.ledger.generation import Engines, ideal
from gruppetto.ledger.generation.bounds import decode_steps
from gruppetto.ledger.layouts.layout import ServeLayout
from gruppetto.ledger.lengths import Lengths
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.storage import kv_element_bytes
from gruppetto.ledger.machines.training import forward_seconds, train_seconds
from gruppetto.ledger.plan.ask import Ask
from gruppetto.ledger.units import show_flops, show_seconds, show_size

TYPICAL = 48
"""Lengths that stand for the distribution where a cost is not linear in them."""
JUDGE_ROOM = 4 / 3
"""Times its weights that a judge's engine takes, KV with it; assumed."""


class Stage(NamedTuple):
    """The work of one stage over a whole batch. `memory_bytes` is what it must hold at once, over all GPUs."""

    name: str
    flops: Figure
    bytes: Figure
    """Read from or written to GPU memory (generation), or moved over links."""
    gpu_s: Figure
    memory_bytes: Figure
    passes: int = 0
    """Of the trainer over the batch, a forward counting 1 and an update 3; 0 = an engine's work."""


def forward_flops(ask: Ask) -> Figure:
    """FLOP of one forward pass over the whole batch: prompts, responses and observations."""
    total = sum(ask.model.forward_flops(round(ask.sequence(length))) for length in _typical(ask.lengths))
    mean = total / TYPICAL
    count = ask.rollouts.count
    share = ask.model.attention_share(round(ask.sequence(ask.lengths.mean)))
    text = (
        f"{count:,} sequences x {show_flops(mean)} (2 x {ask.model.active_params_without_input_embedding / 1e9:.3g} B "
        f"active parameters a token, and attention: {share:.0%} at the mean length)"
    )
    return Figure(count * mean, "FLOP", text)


def generate(ask: Ask, engines: Engines, layout: ServeLayout, batches: float = 1.0) -> Stage:
    """Generation with every engine at its best rate all the time, which slots, KV and the rollouts of `batches` batches
    at once allow: the ideal that a tail, queues and waits add to."""
    rollouts, count = ask.rollouts, ask.rollouts.count
    area, steps = ideal(rollouts, engines, batches), decode_steps(rollouts, engines, batches)
    flops = forward_flops(ask)
    kv = ask.model.kv_bytes_per_token(kv_element_bytes(ask.kv_dtype))
    weights = ask.model.weight_bytes(ask.serve_dtype)
    read = steps * weights + rollouts.kv_steps * kv
    resident = count * ask.model.sequence_bytes(round(ask.sequence(ask.lengths.mean)), kv_element_bytes(ask.kv_dtype))
    return Stage(
        name="generate",
        flops=flops,
        bytes=Figure(
            read,
            "bytes",
            f"{steps:,.0f} decode steps x {show_size(weights)} of weights + {rollouts.kv_steps:.3g} token-steps x "
            f"{show_size(kv)} of KV",
        ),
        gpu_s=Figure(
            area.value * engines.count * layout.gpus,
            "GPU-s",
            f"{area.formula} x {engines.count * layout.gpus} GPUs",
            ask.efficiency.source("decode_bandwidth"),
        ),
        memory_bytes=Figure(
            resident, "bytes", f"{count:,} sequences x KV at the mean length, if all were resident at once"
        ),
    )


def forward(ask: Ask, name: str) -> Stage:
    """A forward pass of the policy's size: old logprobs, a reference, a critic's values."""
    flops = forward_flops(ask)
    seconds = forward_seconds(flops.value, ask.gpu, 1, efficiency=ask.efficiency)
    weights = ask.model.weight_bytes("bf16")
    return Stage(
        name=name,
        flops=flops,
        bytes=Figure(weights, "bytes", f"weights once a micro-batch at least: {show_size(weights)}"),
        gpu_s=Figure(seconds.value, "GPU-s", seconds.formula, seconds.source),
        memory_bytes=Figure(weights, "bytes", f"weights in bf16, {show_size(weights)}"),
        passes=1,
    )


def train(ask: Ask, name: str = "train") -> Stage:
    """Forward, backward and update."""
    once = forward_flops(ask)
    flops = Figure(3 * once.value, "FLOP", f"3 x {show_flops(once.value)} (forward and twice as much backward)")
    seconds = train_seconds(flops.value, ask.gpu, 1, experts=ask.model.experts > 0, efficiency=ask.efficiency)
    state = 16.0 * ask.model.params
    return Stage(
        name=name,
        flops=flops,
        bytes=Figure(state, "bytes", f"weights, gradients and optimizer state once: {show_size(state)}"),
        gpu_s=Figure(seconds.value, "GPU-s", seconds.formula, seconds.source),
        memory_bytes=Figure(state, "bytes", f"16 bytes x {ask.model.params:,} parameters"),
        passes=3,
    )


def judge(ask: Ask) -> Stage | None:
    """A judge model that reads each prompt and response and writes a verdict."""
    if ask.judge is None:
        return None
    model, verdict = ask.judge.model, ask.judge.verdict_tokens
    layout = ServeLayout(tp=judge_gpus(ask))
    prices = engine_model(model, ask.gpu, layout, slots=ask.slots, efficiency=ask.efficiency)
    read = ask.rollouts.trained_tokens
    made = ask.rollouts.count * verdict
    context = round(read / ask.rollouts.count) + verdict
    rate = prices.best_rate(context)
    seconds = read * prices.prefill_token_s + made / rate
    flops = ask.rollouts.count * model.forward_flops(context)
    weights = model.weight_bytes("bf16")
    return Stage(
        name="judge",
        flops=Figure(flops, "FLOP", f"{ask.rollouts.count:,} x forward of {context:,} tokens of {model.name}"),
        bytes=Figure(weights, "bytes", f"weights once a batch at least: {show_size(weights)}"),
        gpu_s=Figure(
            seconds * layout.gpus,
            "GPU-s",
            f"({read:,.0f} tokens read x {show_seconds(prices.prefill_token_s)} + {made:,} tokens written / "
            f"{rate:,.0f} tokens/s) x {layout.gpus} GPUs",
            ask.efficiency.source("prefill"),
        ),
        memory_bytes=Figure(weights, "bytes", f"weights in bf16, {show_size(weights)}"),
    )


def beside_training(ask: Ask) -> list[Stage]:
    """What the trainer's GPUs do with a batch, in its order."""
    found = [stage for stage in (judge(ask),) if stage is not None]
    if ask.old_logprobs:
        found.append(forward(ask, "old_logprobs"))
    if ask.reference:
        found.append(forward(ask, "reference"))
    if ask.critic:
        found += [forward(ask, "values"), train(ask, "critic")]
    return [*found, train(ask)]


def judge_gpus(ask: Ask) -> int:
    """GPUs of one engine of the judge: the smallest power of two that holds its weights and a third as much for KV."""
    assert ask.judge is not None
    weights, tp = ask.judge.model.weight_bytes("bf16"), 1
    while weights * JUDGE_ROOM > tp * ask.gpu.memory * ask.efficiency.memory_fraction:
        tp *= 2
    return tp


@lru_cache(maxsize=16)
def _typical(lengths: Lengths) -> tuple[float, ...]:
    return tuple(tokens for _, tokens in lengths.typical(TYPICAL))
