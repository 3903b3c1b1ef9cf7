"""Timings of the embedded engine: decode steps over rows and contexts, and prefill calls. Blocks; one thread.

Of a few tries the fastest counts, as whatever else runs on the machine only ever makes them longer.
"""

from __future__ import annotations

from pathlib import Path

from gruppetto.clock import monotonic
from gruppetto.engines.base import GenerateRequest, Sampling
from gruppetto.engines.embedded.core import Core
from gruppetto.engines.embedded.serving import load
from gruppetto.engines.embedded.settings import Settings
from gruppetto.ledger.models.model import Model
from gruppetto.profile.fit import Step, Work
from gruppetto.rng import stream

ROWS = (1, 4, 16, 64)
PROMPTS = (8, 64, 192)
"""Tokens."""
STEPS = 8
"""Decode steps of a try."""
TRIES = 3


def measure_engine(
    path: Path, model: Model, *, dtype: str, context: int, deterministic: bool, stop_at: float
) -> tuple[list[Step], list[Work]]:
    """(decode steps, prefill calls with their FLOP). Points that would end after `stop_at` (monotonic) are left out,
    the first excepted."""
    settings = Settings(name="profile", slots=max(ROWS), context=context, admit_batch=1, deterministic=deterministic)
    core = load(settings, path, dtype=dtype, device="cpu", lockstep=False, version=0).core
    vocab, steps, calls = model.vocab, list[Step](), list[Work]()
    for tokens in [tokens for tokens in PROMPTS if tokens + STEPS + 2 <= context]:
        for rows in ROWS:
            left_s, soon_s = stop_at - monotonic(), _soon_s(model, rows, tokens, steps, calls)
            if steps and soon_s > left_s:
                continue
            count = TRIES if soon_s * TRIES <= left_s else 1
            tries = [_point(core, model, rows, tokens, vocab) for _ in range(count)]
            steps.append(min((step for step, _ in tries), key=lambda step: step.seconds))
            calls.append(min((call for _, call in tries), key=lambda call: call.seconds))
    return steps, calls


def _soon_s(model: Model, rows: int, tokens: int, steps: list[Step], calls: list[Work]) -> float:
    """About how long one try of a point will take, by the slowest step and the fastest prefill so far."""
    if not steps:
        return 0.0
    rate = max(call.amount / call.seconds for call in calls)
    decode_s = STEPS * max(step.seconds * max(1.0, rows / step.rows) for step in steps)
    return rows * prefill_flops(model, tokens - 1) / rate + decode_s


def _point(core: Core, model: Model, rows: int, tokens: int, vocab: int) -> tuple[Step, Work]:
    """A batch of different prompts of one length: its prefill, and its fastest decode step."""
    draw = stream(0, "profile", rows, tokens)
    sampling = Sampling(max_tokens=STEPS + 2)
    for number in range(rows):
        prompt = [draw.randrange(vocab) for _ in range(tokens)]
        core.submit(GenerateRequest(rid=f"r{number}", token_ids=prompt, sampling=sampling))
    before_s, before_tokens, before_steps = core.prefill_s, core.prefill_tokens, core.decode_steps
    while core.decode_steps == before_steps:
        core.step()
    seconds, done = core.prefill_s - before_s, core.prefill_tokens - before_tokens
    found, kv = [], core.kv_tokens
    for _ in range(STEPS):
        begin = monotonic()
        core.step()
        found.append(monotonic() - begin)
    core.abort()
    core.forget_left()
    flops = rows * prefill_flops(model, tokens - 1)
    return Step(rows, kv, min(found)), Work(flops, done, max(seconds, 1e-9))


def prefill_flops(model: Model, tokens: int) -> float:
    """FLOP of a prompt's prefill as the ledger prices it: no logits but the last token's."""
    head = 2.0 * (model.head_params or model.embed_params)
    return (model.matmul_flops(1) - head) * tokens + model.mixing_flops(tokens)
