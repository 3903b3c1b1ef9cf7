"""What one step waited for: when most rollouts were done, who came last, which turns were long.

Pure. Promise: a figure that neither the step's events nor its rollouts tell is None, and no sentence is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gruppetto.record.explain.means import Row
from gruppetto.record.explain.read import RolloutRow
from gruppetto.record.explain.timeline import Finish, StepTimeline

SAID = 0.05
"""Share of the time until a batch closed from which on a part of it is said."""


def held_up(timeline: StepTimeline | None, row: Row, finals: Mapping[str, RolloutRow]) -> dict[str, Any]:
    """What one step waited for: when most were done, who came last, which turns were long."""
    found: dict[str, Any] = {"step": row["step"], "generate_s": row.get("schedule/makespan_s"), "last": [], "turns": []}
    if timeline is None:
        ordered = sorted((r for r in finals.values() if r.fate == "trained"), key=lambda r: (r.generate_s, r.tokens))
        median = ordered[(len(ordered) - 1) // 2].tokens if ordered else 0
        last = [_last(r.rollout, None, r.tokens, median, finals) for r in reversed(ordered[-3:])]
        return found | {"last": last, "says": [_who(entry) for entry in last[:1]]}
    found |= {
        "generate_s": timeline.generate_s,
        "rollouts": timeline.rollouts,
        "median_tokens": timeline.median_tokens,
        "most": timeline.most,
        "most_done_s": timeline.most_done_s,
        "tail_s": timeline.tail_s,
        "last": [
            _last(f.rollout, f.at_s, f.tokens, timeline.median_tokens, finals)
            | {"lost_s": f.lost_s, "lost_on": list(f.lost_on)}
            for f in timeline.last
        ],
        "lost_s": timeline.lost_s,
        "failed": _failed(timeline.failed, finals),
        "turns": [{"rollout": t.rollout, "turn": t.turn, "seconds": t.seconds} for t in timeline.turns],
    }
    return found | {"says": list(_step_words(found, timeline, row.get("time/step_s")))}


def _last(
    rollout: str, at_s: float | None, tokens: int, median: int, finals: Mapping[str, RolloutRow]
) -> dict[str, Any]:
    times = tokens / median if median else None
    found: dict[str, Any] = {"rollout": rollout, "at_s": at_s, "tokens": tokens, "times_median": times}
    row = finals.get(rollout)
    if row is not None:
        found |= {name: getattr(row, name) for name in ("generate_s", "tool_s", "turns", "parks", "finish")}
    return found


def _failed(failed: Finish | None, finals: Mapping[str, RolloutRow]) -> dict[str, Any] | None:
    """The last member that failed."""
    if failed is None:
        return None
    row = finals.get(failed.rollout)
    error = None if row is None else row.error
    lost = {"lost_s": failed.lost_s, "lost_on": list(failed.lost_on)}
    return {"rollout": failed.rollout, "at_s": failed.at_s, "error": error, **lost}


def _step_words(found: Mapping[str, Any], timeline: StepTimeline, step_s: float | None) -> Iterable[str]:
    if not timeline.last:
        return
    yield f"{_tail_words(timeline)}{'' if step_s is None else f'; the whole step took {step_s:,.2f} s'}."
    yield _who(found["last"][0], timeline.generate_s)
    yield from _after_words(found, timeline)
    if timeline.turns and timeline.turns[0].seconds > SAID * timeline.generate_s:
        turn = timeline.turns[0]
        yield f"The longest tool call was turn {turn.turn} of {turn.rollout}: {turn.seconds:,.2f} s."


def _after_words(found: Mapping[str, Any], timeline: StepTimeline) -> Iterable[str]:
    """What the batch waited for when the last rollout that it trains on had ended."""
    last, failed = timeline.last[0].at_s, found["failed"]
    after = timeline.generate_s - last
    if after <= SAID * timeline.generate_s:
        return
    if failed is None or failed["at_s"] <= last:
        yield f"After the last rollout had ended, {after:,.2f} s went by until the batch closed (rewards, freshness)."
        return
    why = f": {failed['error']}" if failed["error"] else ""
    lost = f"; {_lost_words(failed)}" if failed["lost_s"] else ""
    yield (
        f"After that, {after:,.2f} s went by until the batch closed: {failed['rollout']} failed after "
        f"{failed['at_s']:,.2f} s{why}{lost}."
    )


def _lost_words(end: Mapping[str, Any]) -> str:
    """Of a rollout that stood on an engine for nothing."""
    return f"{end['lost_s']:,.2f} s of it were calls of {', '.join(end['lost_on'])} that nothing came of"


def _tail_words(timeline: StepTimeline) -> str:
    """When most were done and what the last ones took; shares are of the time until the batch closed."""
    rest, until = timeline.rollouts - timeline.most, f"{timeline.generate_s:,.2f} s until the batch closed"
    if not rest:
        return f"The only rollout was done after {timeline.most_done_s:,.2f} s of the {until}"
    share = timeline.tail_s / timeline.generate_s if timeline.generate_s else 0.0
    most, last = ("95 %", "the last 5 %") if rest > 1 else (f"{timeline.most:,}", "the last one")
    return (
        f"Of {timeline.rollouts:,} rollouts {most} {'was' if most == '1' else 'were'} done after "
        f"{timeline.most_done_s:,.2f} s; {last} took another {timeline.tail_s:,.2f} s, {share:.0%} of the {until}"
    )


def _who(last: Mapping[str, Any], step_s: float | None = None) -> str:
    """Where most of its time was lost on engines, its length is not what made it the last. `step_s`: until the batch
    closed."""
    tokens = f"{last['tokens']:,} tokens"
    if step_s and last.get("lost_s", 0.0) > SAID * step_s:
        return f"The last was {last['rollout']} with {tokens} after {last['at_s']:,.2f} s; {_lost_words(last)}."
    times = f", {last['times_median']:.1f} times the median" if last["times_median"] else ""
    extra = ""
    if last.get("tool_s"):
        extra = f"; {last['tool_s']:,.2f} s of it in tool calls over {last['turns']} turns"
    elif last.get("finish") in ("length", "limit"):
        extra = "; it ran to its limit"
    return f"The last was {last['rollout']} with {tokens}{times}{extra}."
