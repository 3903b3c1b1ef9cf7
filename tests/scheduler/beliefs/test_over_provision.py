"""How many prompts too many."""

import math
from itertools import product

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.rng import stream
from gruppetto.scheduler.beliefs.rule import ETAS
from gruppetto.scheduler.policies.over_provision import best_eta, expected_round_s

maxima = st.lists(st.floats(0, 1000), min_size=1, max_size=4)


@given(maxima, st.integers(1, 4), st.sampled_from([1.0, 1.2, 1.5, 1.75]))
def test_it_is_the_mean_over_all_draws(seen, n, eta):
    launched = math.ceil(eta * n - 1e-9)
    while len(seen) ** launched > 5000:
        seen = seen[:-1]

    def mean_smallest(rank, draws):
        every = [sorted(draw)[rank - 1] for draw in product(seen, repeat=draws)]
        return math.fsum(every) / len(every)

    expected = (mean_smallest(n, launched) + (eta - 1) * mean_smallest(n, n)) / eta
    assert expected_round_s(seen, n, eta) == pytest.approx(expected, rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("n", [32, 512])
@pytest.mark.parametrize("eta", [1.0, 1.1, 1.5])
def test_large_batches_agree_with_drawing(n, eta):
    draw = stream(4, "maxima", n, eta)
    seen = [math.exp(draw.gauss(7, 0.8)) for _ in range(300)]
    runs = []
    for _ in range(300):
        short = sorted(draw.choices(seen, k=math.ceil(eta * n - 1e-9)))[n - 1]
        runs.append((short + (eta - 1) * max(draw.choices(seen, k=n))) / eta)
    mean = sum(runs) / len(runs)
    error = math.sqrt(sum((x - mean) ** 2 for x in runs)) / len(runs)
    assert abs(expected_round_s(seen, n, eta) - mean) < 4 * error + 1e-9 * mean


def runaways(share, body_sigma=0.3, count=1000):
    draw = stream(6, "atoms", share)
    return [32_768.0 if i < share * count else math.exp(draw.gauss(7.5, body_sigma)) for i in range(count)]


@pytest.mark.parametrize(("share", "best"), [(0.03, {1.1}), (0.06, {1.1, 1.25}), (0.12, {1.25}), (0.2, {1.25, 1.5})])
def test_the_studys_best_etas(share, best):
    assert best_eta(runaways(share), 128) in best


@given(maxima, st.integers(1, 40), st.sampled_from(ETAS))
def test_a_round_is_never_longer_than_the_longest(seen, n, eta):
    assert min(seen) - 1e-6 <= expected_round_s(seen, n, eta) <= max(seen) + 1e-6


def test_equal_groups_need_no_over_provision():
    assert {expected_round_s([5.0] * 9, 8, eta) for eta in ETAS} == {5.0}
    assert best_eta([5.0] * 9, 8, (1.0, *ETAS)) == 1.0


def test_what_cannot_be_is_refused():
    for seen, n, eta in (([], 1, 1.0), ([1.0], 0, 1.0), ([1.0], 1, 0.9)):
        with pytest.raises(ValueError, match="give a maximum"):
            expected_round_s(seen, n, eta)
