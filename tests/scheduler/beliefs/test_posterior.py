"""The posterior of what a rollout still has to make."""

import math
from statistics import NormalDist

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from gruppetto.rng import stream
from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.posterior import (
    History,
    Siblings,
    log_length,
    remaining_quantile,
    sample_remaining,
)

CAP = 32_768


def belief(mu=7.0, s_b=0.6, s_w=0.6, cap_share=0.0, cap=CAP):
    return LengthBelief(
        mu=mu, s_b=s_b, s_w=s_w, cap=cap, cap_share=cap_share, runaway_groups=0.0, capped_groups=0.0,
        clustered=False, mean=1000.0, groups=64, steps=1,
    )  # fmt: skip


beliefs = st.builds(
    belief,
    mu=st.floats(2, 10),
    s_b=st.floats(0, 2),
    s_w=st.floats(0, 2),
    cap_share=st.sampled_from([0.0, 0.01, 0.5, 1.0]),
)
mades = st.integers(0, CAP - 1)
many_siblings = st.builds(lambda n, log: Siblings(n, n * log), st.integers(0, 15), st.floats(0, 10))
histories = st.none() | st.builds(History, st.floats(0, 10), st.floats(0, 3))
units = st.floats(0.001, 0.999)


@given(beliefs, mades, many_siblings, histories, units)
def test_the_quantile_is_the_studys_formula(held, made, siblings, history, q):
    assume(held.s_b > 0.01 and held.s_w > 0.01)
    assume(history is None or history.s_h > 0.01)
    n, normal = siblings.finished, NormalDist()
    prec = 1 / held.s_b**2 + n / held.s_w**2 + (1 / history.s_h**2 if history else 0)
    m = held.mu / held.s_b**2 + siblings.log_sum / held.s_w**2 + (history.log_mean / history.s_h**2 if history else 0)
    m, s = m / prec, math.sqrt(held.s_w**2 + 1 / prec)
    f = normal.cdf((math.log(made) - m) / s) if made else 0.0
    assume(f < 0.999)  # beyond, the formula as written loses its digits
    expected = min(CAP, math.exp(m + s * normal.inv_cdf(1 - (1 - q) * (1 - f)))) - made
    assert remaining_quantile(held, made, siblings, history, q) == pytest.approx(max(1, expected), rel=1e-6, abs=1e-3)


@given(beliefs, mades, many_siblings, histories, units, units)
def test_a_higher_quantile_is_no_shorter(held, made, siblings, history, a, b):
    low, high = (remaining_quantile(held, made, siblings, history, q) for q in sorted((a, b)))
    assert 1 <= low <= high <= CAP - made


@given(beliefs, mades, st.integers(1, 15), st.floats(0, 10), st.floats(0, 10), histories)
def test_longer_siblings_and_a_longer_past_make_it_no_shorter(held, made, n, a, b, history):
    low, high = sorted((a, b))
    shorter, longer = (remaining_quantile(held, made, Siblings(n, n * log), history) for log in (low, high))
    assert shorter <= longer + 1e-6 * longer
    shorter, longer = (remaining_quantile(held, made, Siblings(), History(log, 0.5)) for log in (low, high))
    assert shorter <= longer + 1e-6 * longer


@given(beliefs, mades, many_siblings, histories)
def test_without_spread_between_prompts_it_is_equal_progress(held, made, siblings, history):
    alike = belief(held.mu, 0.0, held.s_w)
    assert remaining_quantile(alike, made, siblings, history) == remaining_quantile(alike, made)


@given(mades, many_siblings, histories)
def test_equal_progress_is_the_limit_and_not_a_jump(made, siblings, history):
    assume(history is None or history.s_h > 0.01)
    near = remaining_quantile(belief(s_b=1e-7), made, siblings, history)
    assert near == pytest.approx(remaining_quantile(belief(s_b=0.0), made), rel=1e-6, abs=1e-3)


def test_far_beyond_the_posterior_the_quantile_does_not_jump():
    alike = belief(s_b=0.0, s_w=0.125)
    for made in (int(math.exp(7 + 0.125 * z)) for z in (20, 27)):  # 20 sd is computed one way, 27 still the same
        z = (math.log(made) - 7) / 0.125
        expected = math.exp(7 + 0.125 * math.sqrt(z * z - 2 * math.log(0.03))) - made
        assert remaining_quantile(alike, made) == pytest.approx(max(1, expected), rel=0.01)
    steep = belief(mu=0.0, s_b=0.0, s_w=0.2)
    at = [remaining_quantile(steep, made) / made for made in (int(math.exp(0.2 * z)) for z in (29.9, 30.1, 37, 45))]
    assert at[0] == pytest.approx(at[1], rel=0.05)
    assert at == sorted(at, reverse=True)


def test_certain_siblings_and_a_certain_past_are_believed():
    assert log_length(belief(s_w=0.0), Siblings(2, 2 * 5.0), None) == (5.0, 0.0)
    assert log_length(belief(), Siblings(), History(6.0, 0.0)) == (6.0, 0.6)
    prior = log_length(belief(), Siblings(), None)
    assert log_length(belief(), Siblings(), History(3.0, math.inf)) == prior
    assert remaining_quantile(belief(s_w=0.0), 100, Siblings(1, math.log(300))) == pytest.approx(200)
    assert remaining_quantile(belief(s_w=0.0), 400, Siblings(1, math.log(300))) == 1


def test_at_the_cap_nothing_remains():
    for made in (CAP, CAP + 5):
        assert remaining_quantile(belief(), made) == 0
        assert sample_remaining(belief(), made, Siblings(), None, 0.5) == 0
    assert remaining_quantile(belief(mu=1.0, s_b=0.1, s_w=0.1), CAP - 10) == 10


@given(beliefs, mades, many_siblings, histories, units, units)
def test_a_draw_grows_with_u_and_stays_within_the_cap(held, made, siblings, history, a, b):
    low, high = (sample_remaining(held, made, siblings, history, u) for u in sorted((a, b)))
    assert 1 <= low <= high <= CAP - made


@pytest.mark.parametrize("made", [0, 500, 4000, 30_000])
@pytest.mark.parametrize("cap_share", [0.0, 0.03])
def test_draws_have_the_conditional_distribution(made, cap_share):
    """Against whole lengths drawn from the mixture and kept where they exceed `made` (two-sample KS)."""
    held, siblings = belief(mu=7.5, s_b=0.8, s_w=0.7, cap_share=cap_share), Siblings(2, 16.5)
    draw, other = stream(1, "whole", made), stream(1, "drawn", made)
    m, s = log_length(held, siblings, None)
    whole = []
    for _ in range(1_000_000):
        length = CAP if draw.random() < cap_share else CAP + 1
        while length > CAP:
            length = math.exp(draw.gauss(m, s))
        if length > made:
            whole.append(max(1, length - made))
        if len(whole) == 2000:
            break
    drawn = sorted(sample_remaining(held, made, siblings, None, other.random()) for _ in range(2000))
    whole.sort()
    assert len(whole) > 20
    assert two_sample_ks(drawn, whole) < 1.95 * math.sqrt(1 / len(drawn) + 1 / len(whole))  # one in a thousand


def two_sample_ks(a, b):
    """The largest distance between the empirical distributions of two sorted lists."""
    i = j = 0
    worst = 0.0
    while i < len(a) and j < len(b):
        x = min(a[i], b[j])
        while i < len(a) and a[i] <= x:
            i += 1
        while j < len(b) and b[j] <= x:
            j += 1
        worst = max(worst, abs(i / len(a) - j / len(b)))
    return worst


def test_the_longer_it_runs_the_likelier_it_runs_away():
    held, shares = belief(mu=6.5, cap_share=0.004), []
    for made in (0, 2000, 8000, 20_000):
        draws = [sample_remaining(held, made, Siblings(), None, (i + 0.5) / 2000) for i in range(2000)]
        shares.append(sum(x == CAP - made for x in draws) / 2000)
    assert shares == sorted(shares)
    assert shares[0] == pytest.approx(0.004, abs=0.001)
    assert shares[-1] > 0.9


@pytest.mark.parametrize("cap_share", [0.0, 0.3, 1.0])
def test_a_share_of_draws_runs_to_the_cap_from_the_start(cap_share):
    draws = [sample_remaining(belief(cap_share=cap_share), 0, Siblings(), None, (i + 0.5) / 1000) for i in range(1000)]
    assert sum(x == CAP for x in draws) == pytest.approx(1000 * cap_share, abs=1)
