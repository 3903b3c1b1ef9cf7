"""The [engine] and [weights] tables: what samples, and how new weights reach it.

What a setting has no use for is refused by `preflight`.
"""

from __future__ import annotations

from typing import Any, Literal

from gruppetto.config.section import Count, Positive, Section


class EngineSection(Section):
    """[engine]: what samples."""

    type: Literal["embedded"] = "embedded"
    """embedded: in this process, on a thread of its own, CPU or CUDA."""
    count: Count = 1
    """Engines."""
    slots: Count = 64
    """Sequences decoded together."""
    context: Positive = 1024
    """Longest prompt + response, in tokens."""
    admit_batch: Positive = 4
    """Free slots to wait for before a prefill while others decode; 1 = at once."""
    prefill_chunk: Positive = 256
    """Prompt tokens of one prefill call, which bounds how long an abort can take."""
    kv_on_swap: Literal["keep", "recompute"] = "recompute"
    """The KV of live rollouts when weights change under them: kept from the old ones, or computed anew."""
    args: dict[str, Any] = {}
    """Passed to the engine verbatim."""


class WeightsSection(Section):
    """[weights]: how new weights reach the engines."""

    channel: Literal["inprocess"] = "inprocess"
    """inprocess: copied, never aliased."""
    bucket_mb: Positive = 64
    """Size of a bucket."""
