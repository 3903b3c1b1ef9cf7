"""The study's families: what it states comes out of the draws."""

import numpy as np
import pytest

from gruppetto.errors import UserError
from gruppetto.sim.workload import FAMILIES, family, icc_error

CAP_32K = 32_768


@pytest.mark.parametrize(
    ("name", "mean", "cap", "icc", "cap_share"),
    [
        ("A", 1050, CAP_32K, 0.05, 0.004),
        ("B", 2600, 8192, 0.05, None),
        ("C", 7700, 40_960, 0.86, None),
        ("D", 2400, CAP_32K, 0.86, None),
        ("E", 4250, 20_000, 0.5, None),
        ("R", 1894, CAP_32K, 0.24, 0.03),
    ],
)
def test_stated_figures_come_out(name, mean, cap, icc, cap_share):
    one = family(name)
    said = one.workload.describe(groups=1024, group_size=one.group_size)
    assert said.mean == pytest.approx(mean, rel=0.05)
    assert one.workload.mean == pytest.approx(mean, rel=0.001)
    assert one.workload.cap == cap
    assert said.max == cap
    # leaving out samples at the cap takes a little spread, most where the body itself reaches it
    assert abs(said.icc - icc) < 3 * icc_error(icc, 1024, one.group_size) + 0.01
    if cap_share is not None:
        assert said.cap_share == pytest.approx(cap_share, rel=0.2)


def test_runaways_are_independent_in_a_and_clustered_in_r():
    a, r = (family(name).workload.describe(groups=2048) for name in "AR")
    assert a.capped_groups == pytest.approx(1 - (1 - a.cap_share) ** 8, rel=0.1)
    assert r.capped_groups < 0.75 * (1 - (1 - r.cap_share) ** 8)


def test_the_longest_of_a_step_in_d_is_its_share_of_the_cap():
    """Bound 486 s, where a step that holds a rollout at the cap has 557 s."""
    load = family("D").workload
    steps = [max(load.length(s, g, m) for g in range(128) for m in range(8)) for s in range(40)]
    assert np.mean(steps) / CAP_32K == pytest.approx(486 / 557, abs=0.06)


def test_e_has_the_turns_and_tools_it_states():
    load = family("E").workload
    said = load.describe(groups=512)
    assert said.turns == pytest.approx(17, rel=0.03)
    assert load.cap / load.turn_tokens == 80
    rollouts = [load.turns(0, g, m) for g in range(512) for m in range(8)]
    assert all(t.model_tokens == 250 for turns in rollouts for t in turns)
    calls = np.array([t.tool_s for turns in rollouts for t in turns[:-1]])
    assert {t.observation_tokens for turns in rollouts for t in turns[:-1]} == {600}
    assert np.median(calls) == pytest.approx(0.4, rel=0.04)
    assert np.quantile(calls, 0.84) / np.median(calls) == pytest.approx(np.exp(1.7), rel=0.05)
    long = calls[calls > 120]
    assert len(long) / len(calls) == pytest.approx(0.002 + 0.0004, rel=0.25)  # .0004 by the lognormal itself
    assert np.median(long) > 250


def test_the_longest_rollout_of_a_step_in_e_lasts_as_its_bound():
    """893 s, with tokens at the pace of a 32k rollout that takes 557 s."""
    load = family("E").workload
    steps = []
    for seed in range(8):
        rollouts = [load.turns(seed, g, m) for g in range(128) for m in range(8)]
        steps.append(max(sum(t.model_tokens * 557 / CAP_32K + t.tool_s for t in turns) for turns in rollouts))
    assert np.mean(steps) == pytest.approx(893, rel=0.12)


def test_each_family_says_what_was_chosen():
    assert list(FAMILIES) == list("ABCDER")
    assert all(one.chosen for one in FAMILIES.values())
    assert family("C").prompts_per_step * family("C").group_size == 4096


def test_an_unknown_family_is_refused_with_the_nearest():
    with pytest.raises(UserError, match=r"no workload family 'r2'; write R \(there are A, B, C, D, E, R\)"):
        family("r2")
