"""What one step waited for: when most rollouts were done, who came last, which turns were long.

Pure. Promise: a figure that neither the step's events nor its rollouts tell is None, and no sentence is made of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from gruppetto.record.explain.means import Row
from gruppetto.record.explain.read import RolloutRow
from gruppetto.record.explain.timeline import StepTimeline


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
        "last": [_last(f.rollout, f.at_s, f.tokens, timeline.median_tokens, finals) for f in timeline.last],
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


def _step_words(found: Mapping[str, Any], timeline: StepTimeline, step_s: float | None) -> Iterable[str]:
    if not timeline.last:
        return
    yield f"{_tail_words(timeline)}{'' if step_s is None else f'; the whole step took {step_s:,.2f} s'}."
    yield _who(found["last"][0])
    after = timeline.generate_s - timeline.last[0].at_s
    if after > 0.05 * timeline.generate_s:
        yield f"After the last rollout had ended, {after:,.2f} s went by until the batch closed (rewards, freshness)."
    if timeline.turns and timeline.turns[0].seconds > 0.05 * timeline.generate_s:
        turn = timeline.turns[0]
        yield f"The longest tool call was turn {turn.turn} of {turn.rollout}: {turn.seconds:,.2f} s."


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


def _who(last: Mapping[str, Any]) -> str:
    times = f", {last['times_median']:.1f} times the median" if last["times_median"] else ""
    extra = ""
    if last.get("tool_s"):
        extra = f"; {last['tool_s']:,.2f} s of it in tool calls over {last['turns']} turns"
    elif last.get("finish") in ("length", "limit"):
        extra = "; it ran to its limit"
    return f"The last was {last['rollout']} with {last['tokens']:,} tokens{times}{extra}."
