"""What became of the engines: those that were slower than the others, were given up, or came back, from the events.

Promises: each entry has its engine, second, step and the run's own words; what a simulated run was told to break is
said too.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import Any

from gruppetto.record.explain.read import Event, RunRecord

LISTED = 6
"""Entries that are put into words; the others are in the data only."""


def engines(record: RunRecord, steps: Collection[int]) -> dict[str, Any]:
    """What happened to engines in these steps, and in words."""
    told = [str(failure) for failure in record.config.get("sim", {}).get("failures") or ()]
    found = [entry for entry in _happened(record) if entry["step"] in steps]
    return {"sim_failures": told, "happened": found, "says": list(_words(told, found))}


def _happened(record: RunRecord) -> Iterator[dict[str, Any]]:
    step, last = 1, record.steps[-1]
    for event in record.events("publish_end", "error", "pace", "engine_back"):
        if event.kind == "publish_end":  # a step ends with its weights at the engines
            step = (event.version or 0) + 1
        elif event.engine is not None:
            yield {"engine": event.engine, "t": event.t, "step": min(step, last), "what": _what(event)}


def _what(event: Event) -> str:
    if event.kind == "error":
        return f"was given up: {event.reason}"
    if event.kind == "engine_back":
        return "came back"
    if not event.slow:
        return "was as fast as the others again"
    return f"was {event.times:.1f} times slower than the fastest" if event.times else "was slower than the others"


def _words(told: Sequence[str], found: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    if told:
        yield f"The run was told to break engines (sim.failures): {', '.join(told)}."
    for entry in found[:LISTED]:
        yield f"{entry['engine']} {entry['what']} (step {entry['step']}, at {entry['t']:,.2f} s)."
    if len(found) > LISTED:
        yield f"{len(found) - LISTED:,} more of these are in the data (--json)."


def kv_limited(config: Mapping[str, Any]) -> bool:
    """Whether KV can be full before the slots are: not on the embedded engine, whose slots have a context each."""
    return config.get("engine", {}).get("type") != "embedded" or bool(config.get("sim", {}).get("kv_tokens"))
