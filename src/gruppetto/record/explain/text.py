"""An explanation as text for people: short sections, one table, the lines to write last."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from gruppetto.record.explain.read import step_words
from gruppetto.record.explain.replays import NOISE, best, error_of, gain_words

LISTED = 3
"""Last rollouts that are listed of a step."""

SHOWN_SHARE = 5e-4
"""Causes with a smaller share of the engine-seconds are in the data only."""


def to_text(explanation: Mapping[str, Any]) -> str:
    """The whole explanation; ends in a newline."""
    parts = [
        _title(explanation),
        *_held_up(explanation["held_up"]),
        _engine_seconds(explanation["engine_seconds"]),
        _section("The trainer", explanation["trainer"]),
        _section("Engines", explanation["engines"]),
        _section("The least it could have taken", explanation["bound"]),
        _section("Length bias", explanation["bias"]),
        _section("Not trained on", explanation["dropped"]),
        _section("Staleness", explanation["staleness"]),
        _section("Weights to the engines", explanation["publishes"]),
        _replays(explanation["replays"]),
        _advice(explanation),
        _missing(explanation["missing"]),
    ]
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part))) + "\n"


def _title(explanation: Mapping[str, Any]) -> Iterator[str]:
    steps, seconds = explanation["steps"], explanation["seconds"]
    shown = step_words(steps)
    took = "" if seconds is None else f", {seconds:,.1f} s"
    placed = f", {explanation['placement']}" if explanation.get("placement") else ""
    yield f"{explanation['run']}: {shown}{took}, scheduler {explanation['scheduler'].get('type', 'unknown')}{placed}"
    yield from (f"  {line}" for line in explanation["gaps"])


def _held_up(steps: Sequence[Mapping[str, Any]]) -> Iterator[Iterator[str]]:
    for step in steps:
        yield _step(step)


def _step(step: Mapping[str, Any]) -> Iterator[str]:
    if not step["says"]:
        return
    yield f"What held up step {step['step']}"
    yield from (f"  {sentence}" for sentence in step["says"])
    for last in step["last"][1:LISTED]:
        at = "" if last["at_s"] is None else f" at {last['at_s']:,.2f} s"
        times = f" ({last['times_median']:.1f} x median)" if last["times_median"] else ""
        lost = f", {last['lost_s']:,.2f} s lost on {', '.join(last['lost_on'])}" if last.get("lost_s") else ""
        yield f"  before it: {last['rollout']}{at}, {last['tokens']:,} tokens{times}{lost}"


def _engine_seconds(section: Mapping[str, Any]) -> Iterator[str]:
    if not section["causes"]:
        return
    yield "Where the engine-seconds went"
    yield from (f"  {sentence}" for sentence in section["says"])
    for entry in section["causes"]:
        if entry["share"] < SHOWN_SHARE:
            continue
        yield f"  {entry['cause']:<8} {entry['share']:>6.1%} {entry['seconds']:>14,.2f} s   {entry['meaning']}"
    yield f"  {'total':<8} {'':>6} {section['total_s']:>14,.2f} s"


def _section(title: str, section: Mapping[str, Any]) -> Iterator[str]:
    if section["says"]:
        yield title
        yield from (f"  {sentence}" for sentence in section["says"])


def _replays(replays: Mapping[str, Any] | None) -> Iterator[str]:
    """Every replay in a line, and the lines to write for the best."""
    if replays is None:
        return
    yield "What other schedules would have made of these rollouts"
    yield from (f"  {sentence}" for sentence in replays["says"])
    schedules = sorted(replays["schedules"], key=lambda entry: -entry["gained"])
    width = max((len(entry["name"]) for entry in schedules), default=0)
    yield from (f"  {entry['name']:<{width}}  {gain_words(entry)}" for entry in schedules)
    top = best(replays) if schedules else None
    if top is not None:
        where = "in place of the table [scheduler]" if top["whole"] else "over what [scheduler] has"
        yield f"  The most trained tokens a second{_asking(top)}: in run.toml, {where}:"
        yield from (f"       {line}" for line in top["lines"])


def _asking(change: Mapping[str, Any]) -> str:
    """What a change asks for beyond what the run allows, in brackets."""
    return f" ({change['beyond']})" if change["beyond"] else ""


def _advice(explanation: Mapping[str, Any]) -> Iterator[str]:
    yield "What to change"
    yield from _nothing(explanation)
    for number, entry in enumerate(explanation["advice"], start=1):
        replay, why = entry.get("replay"), entry["why"][:1].upper() + entry["why"][1:]
        whole = ", in place of the table [scheduler]" if replay and replay["whole"] else ""
        yield f"  {number}. {why}." + (f" In run.toml{whole}{_asking(entry)}:" if entry["lines"] else "")
        yield from (f"       {line}" for line in entry["lines"])
        yield f"     Price: {entry['price']}."
        if replay:
            yield f"     In a replay: {gain_words(replay)}."
    if explanation["withdrawn"]:
        names = ", ".join(entry["replay"]["name"] for entry in explanation["withdrawn"])
        error = error_of(explanation["replays"])
        more = "nothing" if error == NOISE else "no more than its error"
        yield f"  Suggested by the rules and not put forward, since its replay gains {more}: {names}."


def _nothing(explanation: Mapping[str, Any]) -> Iterator[str]:
    """Where there is no advice: why, and what gains most all the same."""
    if explanation["advice"]:
        return
    replays = explanation["replays"]
    top = best(replays) if replays and replays["schedules"] else None
    if top is not None:
        suggest = "What the rules suggest gains nothing" if explanation["withdrawn"] else "The rules suggest nothing"
        yield f"  {suggest}; of what was replayed, {top['name']} gains most, as its lines above say."
    elif explanation["engine_seconds"]["total_s"]:
        yield "  Nothing." if explanation["withdrawn"] else "  Nothing that the rules know of."
    else:
        yield "  The record says too little to tell."


def _missing(names: Sequence[str]) -> Iterator[str]:
    if names:
        yield f"Not in this record (an older version wrote it, or there was nothing to measure): {', '.join(names)}"
