"""From the [reward] section to a reward; rules in this process; optional verifiers in theirs."""

import asyncio

import pytest

from gruppetto.clock import run_virtual
from gruppetto.config.schema import RewardSection
from gruppetto.errors import UserError
from gruppetto.rewards.build import build_reward


@pytest.mark.parametrize(
    ("section", "response", "reward", "error"),
    [
        ({"type": "exact", "processes": 0}, "4", 1.0, None),
        ({"type": "exact", "processes": 1}, "4", 1.0, None),
        ({"type": "exact", "processes": 0}, "5", 0.0, None),
        ({"type": "numeric", "processes": 0}, "it is 4.0", 1.0, None),
        ({"type": "numeric", "processes": 1}, "it is 4.0", 1.0, None),
        ({"type": "regex", "pattern": "A: (.*)", "processes": 1}, "A: 4", 1.0, None),
    ],
)
async def test_rules_score_the_response_without_its_end_token(rollout, decode, section, response, reward, error):
    built = build_reward(RewardSection(**section), decode)
    await built.start()
    try:
        score = await built.score(rollout(response))
        assert (score.reward, score.error) == (reward, error)
        missing = await built.score(rollout(response, answer=""))
        assert (missing.reward, missing.error) == (None, "the task has no answer to compare with")
    finally:
        await built.close()


def test_rules_in_this_process_run_on_virtual_time(rollout, decode):
    built = build_reward(RewardSection(processes=0), decode)
    assert run_virtual(built.score(rollout("4"))).reward == 1.0


@pytest.mark.parametrize(
    ("section", "text"),
    [
        ({"type": "regex"}, r"needs reward\.pattern"),
        ({"type": "regex", "pattern": "("}, "is no regular expression"),
        ({"type": "exact", "pattern": "a"}, "has no group"),
        ({"type": "function"}, r"needs reward\.path"),
        ({"type": "function", "path": "m:f", "processes": 0}, r"write reward\.processes = 1"),
        ({"type": "math", "processes": 0}, r"write reward\.processes = 1"),
        ({"type": "regex", "pattern": "(a)", "processes": 0}, r"'regex' cannot be stopped when it hangs"),
        ({"type": "numeric", "pattern": "(a)", "processes": 0}, r"a pattern cannot be stopped when it hangs"),
    ],
)
def test_sections_that_do_not_fit_are_refused(section, text):
    with pytest.raises(UserError, match=text):
        build_reward(RewardSection(**section), lambda ids: "")


async def test_math_compares_values_and_says_what_it_cannot_read():
    pytest.importorskip("math_verify")
    reward = build_reward(RewardSection(type="math"), lambda ids: "")
    await reward.start()
    try:
        cases = [
            ("so $\\boxed{\\frac{10}{12}}$", "\\frac{5}{6}", 1.0),
            ("$(3, \\pi/2)$", "\\left( 3, \\frac{\\pi}{2} \\right)", 1.0),
            ("I think 4", 4, 1.0),
            ("I think 5", "4", 0.0),
            ("words", "4", 0.0),
            ("words", "", None),
        ]
        scores = [await reward.verify("", response, answer, {}) for response, answer, _ in cases]
        assert [score.reward for score in scores] == [wanted for _, _, wanted in cases]
    finally:
        await reward.close()


async def test_reasoning_gym_scores_with_the_data_sets_own_scorer():
    pytest.importorskip("reasoning_gym")
    from gruppetto.config.schema import DataSection
    from gruppetto.data.load import load_rows

    reward = build_reward(RewardSection(type="reasoning_gym", processes=2), lambda ids: "")
    await reward.start()
    try:
        for name in ("chain_sum", "countdown"):
            rows = load_rows(DataSection(type="reasoning_gym", path=name, size=5), 0).rows
            right = await asyncio.gather(*(reward.verify("", row.answer, row.answer, row.extra) for row in rows))
            wrong = await asyncio.gather(*(reward.verify("", "zz", row.answer, row.extra) for row in rows))
            assert [score.reward for score in right] == [1.0] * 5
            assert all(score.reward < 0.5 for score in wrong)
        other = await reward.verify("", "4", "4", {})
        assert "no reasoning-gym metadata" in other.error
    finally:
        await reward.close()
