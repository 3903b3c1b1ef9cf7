"""The [scheduler] table: a preset, and the settings that replace its choices.

None is the preset's own choice. What does not go together, or has no use, is refused by `preflight`.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from gruppetto.config.section import Positive, Section


class SchedulerSection(Section):
    """[scheduler]: what runs next. `type` is a preset, and every other setting replaces one of its choices."""

    type: Literal["sync", "partial", "tail_batch", "divided", "async_bounded", "windowed", "layered", "auto"] = "sync"
    """sync: all launched, all awaited; partial: stop early, park, resume first (APRIL); tail_batch: short rounds and a
    long one (RollPacker); divided: chunks, probes, longest first (Seer); async_bounded: continuous, admission counted
    (AReaL); windowed: every rollout keeps its version (DORA); layered: exact bound, belief order, chunks, streaming;
    auto: measures, forecasts, takes the best that the limits allow."""
    depth: Annotated[float, Field(ge=1, le=64)] | None = None
    """Rounds: groups live, ready or with the trainer, in batches (1 = synchronous)."""
    max_staleness: Annotated[int, Field(ge=0)] | None = None
    """Freshness: largest staleness of a trained token; for partial and async_bounded none = no bound, the observed
    maximum is reported."""
    over_age: Literal["wait", "mask", "drop"] | None = None
    """Freshness: the batch waits for older tokens, they carry no gradient, or their group is dropped (which censors
    long answers, and the record says so)."""
    unfinished: Literal["wait", "keep", "drop"] | None = None
    """Unfinished when a batch closes: awaited, kept (parked where engines and trainer share machines), or dropped."""
    order: Literal["fifo", "probe_then_longest", "longest_group_first", "finish_first"] | None = None
    """Order of new rollouts: as launched; a probe of each group, then the longest by belief; by the group's longest so
    far; most progress first."""
    finish_first: bool | None = None
    """Order of resumed rollouts of one age: most progress first."""
    chunk: Positive | None = None
    """Order: model tokens after which a rollout may make room or move; none = it runs to its end (layered and divided
    have 2048)."""
    kv: Literal["engine", "limit", "count", "hold"] | None = None
    """Order: engines queue by themselves; each is given fewer while its KV is full, and more again when it is not; the
    scheduler admits by KV (an engine that does not say how much it has is given fewer instead); and keeps room for
    rollouts in a tool call."""
    kv_pool: bool | None = None
    """The engines share a KV pool, so that a rollout moves without a prefill."""
    versions: Literal["newest", "own"] | None = None
    """A publish reaches every engine, or a rollout keeps the version that it began with."""
    stream: bool | None = None
    """The trainer accumulates gradients on finished groups while the tail runs."""
    defer_steps: Positive | None = None
    """Rounds: a prompt that is long by its history, or unfinished in a short round, is put off at most so many
    steps."""
    over_prompts: Annotated[float, Field(ge=1, le=8)] | None = None
    """Rounds of tail_batch: prompts launched in a short round over those it keeps (1.25)."""
    over_members: Annotated[float, Field(ge=1, le=8)] | None = None
    """Rounds of tail_batch: rollouts launched of a prompt over those it keeps (1); above 1 censors most."""
    boundary: Literal["each_round", "frozen"] | None = None
    """Rounds of tail_batch: an optimizer step after every round, or one after `rounds` rounds with frozen weights (in
    effect a batch that many times as large)."""
    rounds: Positive | None = None
    """Rounds of tail_batch with boundary = "frozen" (5)."""
    max_parked_steps: Positive | None = None
    """A group whose oldest token is older than this many steps is dropped, which censors."""
    allow_mask: bool | None = None
    """Limits of auto: tokens may be masked (true)."""
    allow_censoring: bool | None = None
    """Limits of auto: long answers may be censored (false)."""
    max_waste: Annotated[float, Field(ge=0, le=1)] | None = None
    """Limits of auto: largest share of generated tokens that may go untrained (0.35)."""
