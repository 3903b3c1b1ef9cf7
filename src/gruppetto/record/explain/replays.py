"""What the run would have been under other scheduling policies: which to try, and what their replays say.

Pure: who runs the replays hands the figures in. Promises: gains are against the replay of the run as it was, never
against what was measured, so that an error of the fitted prices is on both sides; a gain below what the replay misses
the measurement by is called that, and advice whose replay gains no more is withdrawn; nothing that censors is put
forward, and what asks for more staleness than the run allows says so.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gruppetto.record.explain.policy import Policy

NOISE = 0.03
"""Gains below this are noise (our scheduling study)."""

ENTRIES = (
    "layered:max_staleness=0",
    'layered:max_staleness=1:over_age="wait":depth=1.25',
    'layered:max_staleness=1:over_age="mask":depth=1.5',
    'layered:max_staleness=4:over_age="wait":depth=1.5',
)
"""Whole policies that are tried beside what the rules suggest; none censors."""


@dataclass(frozen=True, slots=True)
class Candidate:
    """A change of run.toml: its lines, in place of the whole [scheduler] table (`whole`) or over what is there."""

    name: str
    lines: tuple[str, ...]
    whole: bool

    @property
    def settings(self) -> list[str]:
        """The same as `key=value` of a command line."""
        found, table = [], ""
        for line in self.lines:
            key, equals, value = line.partition(" = ")
            table = table if equals else line.strip("[]")
            if equals:
                found.append(f"{table}.{key}={value}")
        return found


def candidates(explanation: Mapping[str, Any]) -> list[Candidate]:
    """What to try: what the rules suggest for [scheduler] and for the number of engines, and `ENTRIES`."""
    advised = [
        Candidate(_name(entry["lines"]), tuple(entry["lines"]), whole=False)
        for entry in explanation["advice"]
        if entry["lines"][:1] == ["[scheduler]"] or entry["saves"]
    ]
    entries = [Candidate(entry.replace('"', ""), _lines(entry), whole=True) for entry in ENTRIES]
    known = [set(candidate.lines) for candidate in advised]
    return [*advised, *(entry for entry in entries if set(entry.lines) not in known)]


def _name(lines: Sequence[str]) -> str:
    """Lines as an entry of `--compare` has them."""
    table, *settings = (line.replace(" = ", "=", 1).replace('"', "") for line in lines)
    if table != "[scheduler]":
        return ":".join(f"{table.strip('[]')}.{setting}" for setting in settings)
    return ":".join(setting.removeprefix("type=") for setting in settings)


def _lines(entry: str) -> tuple[str, ...]:
    preset, *options = entry.split(":")
    return ("[scheduler]", f'type = "{preset}"', *(option.replace("=", " = ", 1) for option in options))


def join(
    explanation: Mapping[str, Any], outcome: Mapping[str, Any], tried: Sequence[Candidate], policy: Policy
) -> dict[str, Any]:
    """The explanation with the replays in it.

    `outcome`: `steps`; `as_run` and `measured` (None: not known), figures of the run; `schedules`, figures by the
    candidate's name, without those that were refused; `in_place`, the names of those that had to stand in place of the
    whole table; or only `skipped`, why there are no replays.
    """
    if "skipped" in outcome:
        return {**explanation, "replays": {"schedules": [], "says": [f"None: {outcome['skipped']}."]}}
    base = outcome["as_run"]
    found = [
        {
            **_schedule(replace(candidate, whole=candidate.name in outcome["in_place"]), outcome["schedules"], base),
            "beyond": policy.beyond(candidate.lines),
        }
        for candidate in tried
        if candidate.name in outcome["schedules"]
    ]
    by_lines = {tuple(entry["lines"]): entry for entry in found}
    advice = [{**entry, "replay": by_lines.get(tuple(entry["lines"]))} for entry in explanation["advice"]]
    replays = {
        "miss": _miss(base, outcome["measured"]),
        "steps": outcome["steps"],
        "measured": outcome["measured"],
        "as_run": base,
        "schedules": found,
    }
    error = error_of(replays)
    return {
        **explanation,
        "advice": [entry for entry in advice if _holds(entry, error)],
        "withdrawn": [entry for entry in advice if not _holds(entry, error)],
        "replays": {**replays, "says": list(_words(replays))},
    }


def _holds(advice: Mapping[str, Any], error: float) -> bool:
    """Its replay gains, or loses nothing with fewer engines; or there is none."""
    replay = advice["replay"]
    return replay is None or is_worth_it(replay, error) or (advice["saves"] > 0 and replay["gained"] >= -error)


def _schedule(candidate: Candidate, schedules: Mapping[str, Any], base: Mapping[str, Any]) -> dict[str, Any]:
    """Shares: `saved` of the seconds a step, `gained` in trained tokens a second."""
    figures = schedules[candidate.name]
    return {
        "name": candidate.name,
        "lines": list(candidate.lines),
        "whole": candidate.whole,
        "saved": 1 - figures["step_s"] / base["step_s"] if base["step_s"] else 0.0,
        "gained": figures["tokens_per_s"] / base["tokens_per_s"] - 1 if base["tokens_per_s"] else 0.0,
        "figures": dict(figures),
    }


def _miss(base: Mapping[str, Any], measured: Mapping[str, Any] | None) -> float | None:
    """By what share the replay of the run as it was is off the measurement, in seconds or trained tokens a second."""
    pairs = [] if measured is None else [(base[name], measured.get(name)) for name in ("step_s", "tokens_per_s")]
    return max((abs(replayed / found - 1) for replayed, found in pairs if replayed and found), default=None)


def error_of(replays: Mapping[str, Any]) -> float:
    """The share below which a gain says nothing: noise, or what the replay itself misses."""
    return max(NOISE, replays["miss"] or 0.0)


def best(replays: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The schedule with the most trained tokens a second, where that is more than the error."""
    fair = [entry for entry in replays["schedules"] if not entry["figures"].get("censors")]
    top = max(fair, key=lambda entry: float(entry["gained"]), default=None)
    return top if top is not None and top["gained"] > error_of(replays) else None


def is_worth_it(entry: Mapping[str, Any], error: float = NOISE) -> bool:
    """More trained tokens a second, or shorter steps at as many; beyond the error."""
    return bool(entry["gained"] > error or (entry["saved"] > error and entry["gained"] > -NOISE))


def _words(replays: Mapping[str, Any]) -> Iterator[str]:
    base, measured = replays["as_run"], replays["measured"]
    beside = "" if measured is None else f" (measured: {measured['step_s']:,.3g} s)"
    yield (
        f"The same rollouts again on virtual time, steps {base['first_step']} to {base['last_step']} of "
        f"{base['run_steps']}. As it was: {base['step_s']:,.3g} s a step{beside}, "
        f"{base['tokens_per_s']:,.0f} trained tokens/s."
    )
    error = error_of(replays)
    if error > NOISE:
        yield f"The replay is {error:.1%} off what was measured: a gain below that is within its error."
    if best(replays) is None:
        why = "which is noise" if error == NOISE else "which is that error"
        yield f"None of these gains more than {error:.{0 if error == NOISE else 1}%} in trained tokens/s, {why}."


def gain_words(entry: Mapping[str, Any]) -> str:
    """What one replay says, in a sentence without its end."""
    figures = entry["figures"]
    masked = f", {figures['masked']:.0%} of the tokens masked" if figures.get("masked") else ""
    stale = figures.get("staleness_max") or 0
    age = "strictly on-policy" if not stale else f"up to {stale} version{'' if stale == 1 else 's'} old"
    return (
        f"{figures['step_s']:,.3g} s a step ({-entry['saved']:+z.0%}), {figures['tokens_per_s']:,.0f} trained tokens/s "
        f"({entry['gained']:+z.0%}), {age}{masked}"
    )
