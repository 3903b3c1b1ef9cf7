"""Runs a reward on the data's own gold answers: a task whose gold answer earns nothing can teach nothing.

Promises: every row is graded or named; rules run here, everything else in the processes that training uses. A rule's
`pattern` says how a response is laid out, which a bare answer is not: it is tried on the row's written-out solution
where there is one, and what it leaves to compare is checked without it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from gruppetto.config.schema import RewardSection
from gruppetto.data.base import Row
from gruppetto.errors import RunError
from gruppetto.rewards.build import build_reward
from gruppetto.rewards.pool import ProcessPoolReward
from gruppetto.rewards.rules import Ungradable, extract, golds
from gruppetto.rewards.verifiers import RULES, VerifierSpec, load_rule
from gruppetto.types import Score

_AT_ONCE = 256
_SOLUTIONS = ("solution", "answer", "response")


@dataclass(frozen=True, slots=True)
class GoldFinding:
    """A row whose gold answer does not earn the full reward, and why."""

    row: int
    reason: str


@dataclass(frozen=True, slots=True, kw_only=True)
class GoldReport:
    """`full` is the reward that a right answer should earn: 1, or for a function the highest that a gold answer earned.

    `ungradable` rows can never be rewarded; `low` ones get less than `full` from a function, which may be meant.
    """

    checked: int
    full: float | None
    ungradable: list[GoldFinding] = field(default_factory=list)
    low: list[GoldFinding] = field(default_factory=list)


async def check_golds(section: RewardSection, rows: Sequence[Row]) -> GoldReport:
    """Grades the gold answer of every row; raises `UserError` when the reward cannot be built or loaded."""
    scored = [pair async for pair in _scores(section, rows)]
    rewards = [score.reward for _, score in scored if score.reward is not None]
    full = max(rewards, default=None) if section.type == "function" else 1.0
    failed = [GoldFinding(row.number, score.error) for row, score in scored if score.error is not None]
    low = [
        GoldFinding(row.number, f"the gold answer {_brief(row.answer)} scores {score.reward:g}, not {full:g}")
        for row, score in scored
        if score.reward is not None and full is not None and score.reward < full
    ]
    if section.type == "function":
        return GoldReport(checked=len(scored), full=full, ungradable=failed, low=low)
    ungradable = sorted(failed + low, key=lambda finding: finding.row)
    return GoldReport(checked=len(scored), full=full, ungradable=ungradable)


def gold_response(answer: Any, kind: str) -> str:
    """What a model would say that is right; raises `Ungradable` when the row has no answer."""
    text = str(golds(answer)[0])
    return f"\\boxed{{{text}}}" if kind == "math" and "\\boxed" not in text and "$" not in text else text


async def _scores(section: RewardSection, rows: Sequence[Row]) -> AsyncIterator[tuple[Row, Score]]:
    if section.type in RULES:
        for row in rows:
            yield row, _rule_score(section, row)
        return
    reward = build_reward(section, lambda ids: "")
    if not isinstance(reward, ProcessPoolReward):
        raise RunError(f"reward {reward.name} does not run in processes")
    await reward.start()
    try:
        for start in range(0, len(rows), _AT_ONCE):
            part = rows[start : start + _AT_ONCE]
            scores = await asyncio.gather(*(_pool_score(reward, section, row) for row in part))
            for pair in zip(part, scores, strict=True):
                yield pair
    finally:
        await reward.close()


def _rule_score(section: RewardSection, row: Row) -> Score:
    spec = VerifierSpec(section.type, pattern=section.pattern)
    try:
        response = gold_response(row.answer, section.type)
        if section.pattern:
            laid_out = _laid_out(row.extra, section.pattern)
            response = laid_out if laid_out is not None else response
            if laid_out is None:
                spec = replace(spec, type="numeric" if section.type == "numeric" else "exact", pattern="")
        return Score(reward=load_rule(spec)(response, row.answer, row.extra))
    except Ungradable as error:
        return Score(reward=None, error=str(error))


async def _pool_score(reward: ProcessPoolReward, section: RewardSection, row: Row) -> Score:
    try:
        response = gold_response(row.answer, section.type)
    except Ungradable as error:
        return Score(reward=None, error=str(error))
    prompt = row.prompt if isinstance(row.prompt, str) else str(row.prompt[-1].get("content") or "")
    return await reward.verify(prompt, response, row.answer, row.extra)


def _laid_out(extra: Mapping[str, Any], pattern: str) -> str | None:
    """The row's written-out solution in which the pattern finds something."""
    texts = [extra[key] for key in _SOLUTIONS if isinstance(extra.get(key), str)]
    return next((text for text in texts if extract(pattern, text) is not None), None)


def _brief(answer: Any) -> str:
    text = str(answer)
    return repr(text if len(text) <= 60 else text[:59] + "…")
