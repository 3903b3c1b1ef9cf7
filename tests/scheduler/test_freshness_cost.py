"""The close rule with a bound that no run reaches costs no more than the versions there are."""

from dataclasses import dataclass, field

from hypothesis import given
from hypothesis import strategies as st

from gruppetto.scheduler.policies.freshness import Freshness


@dataclass
class Groups:
    """A pool's counts from its groups: (oldest version, ready)."""

    groups: list
    version: int
    num_committed: int
    batch_groups: int = 3
    asked: list = field(default_factory=list)

    @property
    def num_ready(self):
        return sum(ready for _, ready in self.groups)

    def num_behind(self, version):
        self.asked.append(version)
        return sum(oldest <= version for oldest, _ in self.groups)

    def num_ready_behind(self, version):
        return sum(ready and oldest <= version for oldest, ready in self.groups)


def test_versions_before_the_first_are_not_asked_for():
    view = Groups([(0, True), (2, False)], version=2, num_committed=0)
    Freshness(1_000_000, "wait").may_close(view)
    Freshness(1_000_000, "wait").may_commit(view)
    assert set(view.asked) <= {0, 1, 2}


@given(
    groups=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20),
    newer=st.integers(0, 3),
    committed=st.integers(0, 3),
    k=st.integers(0, 12),
)
def test_the_rule_is_that_of_every_j(groups, newer, committed, k):
    view = Groups(groups, 4 + newer, committed)
    rule, n = Freshness(k, "wait"), view.batch_groups
    places = n - committed
    ages = [view.version - k + j for j in range(k + 1)]
    closes = all(view.num_behind(age) - min(places, view.num_ready_behind(age)) <= j * n for j, age in enumerate(ages))
    spare = [
        view.num_ready_behind(a) + max(0, (j + 1) * n - view.num_behind(a) - committed) for j, a in enumerate(ages)
    ]
    supposed = all(view.num_behind(age) + committed <= (j + 1) * n for j, age in enumerate(ages))
    if supposed and not view.num_behind(ages[0] - 1):
        assert rule.may_close(view) == closes
    assert rule.may_commit(view) == min([places, view.num_ready, *spare[:k]])


@given(
    groups=st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=20),
    committed=st.integers(0, 3),
    k=st.integers(0, 4),
)
def test_what_another_policy_left_is_waited_for_as_far_as_it_has_a_place(groups, committed, k):
    """Too old: not at all, though it takes places. Of those due, as many as the batches until then have no place for,
    or as this batch has."""
    view = Groups(groups, 4, committed)
    rule, n = Freshness(k, "wait"), view.batch_groups
    fresh = [group for group in groups if group[0] >= 4 - k]
    places = max(0, n - committed - sum(ready for oldest, ready in groups if oldest < 4 - k))
    closes = True
    for j in range(k + 1):
        due = [ready for oldest, ready in fresh if oldest <= 4 - k + j]
        closes = closes and sum(due) >= min(places, len(due) - j * n)
    assert rule.may_close(view) == closes
    assert rule.left_over(view) == len(groups) - len(fresh)
    assert rule.may_close(Groups([(oldest, True) for oldest, _ in groups], 4, committed))  # nobody waits for ever
