"""The split of GPUs into two sides: the best is found without laying out all of them."""

import pytest
from ledger.test_plan import asked, lengths_of

from gruppetto.ledger.lengths import Tools
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.plan.placements import Placements


def test_of_many_splits_the_best_is_found_without_looking_at_each():
    ask = asked(gpus=256, groups=128)
    placements = Placements(ask)
    for name in ("disaggregated", "async"):
        best_s = min(placements._about_s(name, count) for count in placements.splits())
        assert min(placements._about_s(name, count) for count in placements._promising(name)) == best_s


@pytest.mark.parametrize("ask", [
    asked(gpus=64, groups=256, lengths=lengths_of(1500),
          tools=Tools.from_mean(5.0, turn_tokens=200, observation_tokens=100)),
    asked(model=model_of("Qwen3-30B-A3B"), gpus=16, groups=32, lengths=lengths_of(1500)),
])  # fmt: skip
def test_of_sixteenths_the_best_is_found_where_bounds_rise_and_fall_again(ask):
    placements = Placements(ask)
    steps = {count: placements._apart("disaggregated", count).step_s.value for count in placements.splits()}
    assert steps[placements.best_split("disaggregated")] <= 1.01 * min(steps.values())


@pytest.mark.parametrize("name", ["disaggregated", "async", "elastic"])
@pytest.mark.parametrize("ask", [
    asked(gpus=64),
    asked(gpus=16, lengths=lengths_of(300)),
    asked(model=model_of("Qwen3-30B-A3B"), gpus=16, groups=32, lengths=lengths_of(1500)),
    asked(model=model_of("Qwen3-32B"), gpus=16),
])  # fmt: skip
def test_the_lowest_bounds_are_found_by_looking_closely_at_few(ask, name):
    """Each look is a bound of the next, so that who is not looked at further is not among the best."""
    placements = Placements(ask)
    bounds = {count: placements._about_s(name, count) for count in placements.splits()}
    for count, bound in bounds.items():
        assert placements._computing_s(name, count) <= placements._engines_s(name, count) <= bound * (1 + 1e-12)
    found = placements._best(name, range(placements._unit(), ask.gpus, placements._unit()), 2)
    assert found == sorted(bounds, key=lambda count: bounds[count])[:2]
