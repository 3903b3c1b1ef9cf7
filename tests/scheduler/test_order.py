"""Who of the new rollouts starts first."""

import math
from dataclasses import dataclass, replace
from statistics import NormalDist

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.scheduler.beliefs.lengths import LengthBelief
from gruppetto.scheduler.beliefs.posterior import History
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.policies.order import ORDERS, Fifo, FinishFirst, ProbeThenLongest
from gruppetto.scheduler.queueing import RolloutQueue
from gruppetto.types import Task


@dataclass(frozen=True)
class Group:
    id: int
    finished: int = 0
    log_sum: float = 0.0
    longest: int = 0
    history: History | None = None


@dataclass(frozen=True)
class Rollout:
    group_id: int
    member: int
    tokens: int = 0

    @property
    def id(self):
        return f"{self.group_id}.{self.member}"


ALIKE = LengthBelief(
    mu=7.0, s_b=0.9, s_w=0.5, cap=32_768, cap_share=0.0, runaway_groups=0.0, capped_groups=0.0,
    clustered=False, mean=1500.0, groups=64, steps=1,
)  # fmt: skip
UNLIKE = replace(ALIKE, s_b=0.2, s_w=0.9)
MEMBERS = 3


def ordered(name, groups, lengths=None):
    order = ORDERS[name]()
    all_of = [(order.key(Rollout(g.id, m), g, lengths), f"{g.id}.{m}") for g in groups for m in range(MEMBERS)]
    assert len({key for key, _ in all_of}) == len(all_of)
    return [rollout for _, rollout in sorted(all_of)]


def launch_order(*ids):
    return [f"{g}.{m}" for g in ids for m in range(MEMBERS)]


PROBES = ["1.0", "2.0", "3.0"]
SHORT, UNKNOWN, LONG = Group(1, 2, 2 * 5.0, 150), Group(2), Group(3, 2, 2 * 9.5, 14_000)


def test_fifo_is_the_order_of_launch():
    assert ordered("fifo", [LONG, SHORT, UNKNOWN], ALIKE) == launch_order(1, 2, 3)


def test_probes_first_then_the_longest():
    assert ordered("probe_then_longest", [SHORT, UNKNOWN, LONG], ALIKE) == [
        *PROBES, "3.1", "3.2", "2.1", "2.2", "1.1", "1.2",
    ]  # fmt: skip


def test_the_past_of_a_prompt_orders_what_has_no_siblings_yet():
    past = [Group(1, history=History(5.0, 0.2)), Group(2), Group(3, history=History(9.5, 0.2))]
    assert ordered("probe_then_longest", past, ALIKE)[3:] == ["3.1", "3.2", "2.1", "2.2", "1.1", "1.2"]


def test_without_a_belief_probes_first_then_the_order_of_launch():
    assert ordered("probe_then_longest", [SHORT, LONG, UNKNOWN]) == [
        *PROBES, "1.1", "1.2", "2.1", "2.2", "3.1", "3.2",
    ]  # fmt: skip


def test_where_siblings_are_little_alike_there_are_no_probes():
    new = [Group(i) for i in (1, 2, 3)]
    assert ordered("probe_then_longest", new, UNLIKE) == launch_order(1, 2, 3)
    assert ordered("probe_then_longest", [SHORT, UNKNOWN, LONG], UNLIKE) == launch_order(3, 2, 1)


@pytest.mark.parametrize(("icc", "first"), [(0.19, launch_order(1, 2, 3)[:3]), (0.21, PROBES)])
def test_little_alike_is_an_icc_below_a_fifth(icc, first):
    lengths = replace(ALIKE, s_b=icc**0.5, s_w=(1 - icc) ** 0.5)
    assert ordered("probe_then_longest", [Group(i) for i in (1, 2, 3)], lengths)[:3] == first


def test_a_trainer_beside_that_computes_in_over_28_percent_of_a_step_is_fed_whole_groups():
    order = ProbeThenLongest()
    assert order.beside(0.0) == order.beside(0.28) == order
    assert order.beside(0.281) == Fifo()


def test_lengths_are_compared_by_what_only_3_in_100_exceed():
    """Of two groups believed to have the same median the one of which less is known comes first."""
    known, unknown = Group(1, 2, 2 * ALIKE.mu, 1100), Group(2)
    assert ordered("probe_then_longest", [known, unknown], ALIKE)[2:] == ["2.1", "2.2", "1.1", "1.2"]
    (_, longest, *_) = ProbeThenLongest().key(Rollout(2, 1), unknown, ALIKE)
    spread = (ALIKE.s_b**2 + ALIKE.s_w**2) ** 0.5
    assert -longest == pytest.approx(math.exp(ALIKE.mu + NormalDist().inv_cdf(0.97) * spread), rel=0.01)


@pytest.mark.parametrize("name", sorted(set(ORDERS) - {"probe_then_longest"}))
def test_the_other_orders_are_the_same_beside_any_trainer(name):
    order = ORDERS[name]()
    assert order.beside(0.99) == order


def test_a_queue_follows_the_trainer_and_comes_back():
    queue = RolloutQueue(ProbeThenLongest())
    queue.believe(UNLIKE)
    for number, log in ((1, 5.0), (3, 9.5)):
        group = GroupEntry(number, Task(id=str(number), prompt_ids=[1]), 2, 0, finished=2, log_sum=2 * log)
        for member in range(2):
            queue.add(RolloutEntry(f"{number}.{member}", group, member), resumed=False)
    by_length, launched = ["3.0", "3.1", "1.0", "1.1"], ["1.0", "1.1", "3.0", "3.1"]
    assert [entry.id for entry in queue] == by_length
    queue.beside(0.6)
    assert [entry.id for entry in queue] == launched
    queue.follow(ProbeThenLongest(), finish_first=True)  # chosen anew: the trainer still computes as much
    assert [entry.id for entry in queue] == launched
    queue.beside(0.1)
    assert [entry.id for entry in queue] == by_length


def test_seers_rule_takes_the_unknown_for_longest():
    assert ordered("longest_group_first", [SHORT, UNKNOWN, LONG], ALIKE) == [
        *PROBES, "2.1", "2.2", "3.1", "3.2", "1.1", "1.2",
    ]  # fmt: skip


def test_most_progress_first():
    order, group = FinishFirst(), Group(1)
    rollouts = [Rollout(1, m, tokens) for m, tokens in enumerate((10, 900, 50))]
    assert [r.member for r in sorted(rollouts, key=lambda r: order.key(r, group, None))] == [1, 2, 0]


groups = st.lists(
    st.builds(
        lambda n, log, longest: Group(0, n, n * log, longest if n else 0),
        st.integers(0, MEMBERS),
        st.floats(0, 10),
        st.integers(1, 32_768),
    ),
    max_size=6,
)


@given(st.sampled_from(sorted(ORDERS)), groups, st.sampled_from([None, ALIKE, UNLIKE]))
def test_every_order_is_a_total_one(name, held, lengths):
    held = [replace(group, id=i) for i, group in enumerate(held)]
    assert sorted(ordered(name, held, lengths)) == sorted(launch_order(*range(len(held))))


@given(st.sampled_from(sorted(ORDERS)), st.floats(0, 10), st.sampled_from([ALIKE, UNLIKE]))
def test_an_order_says_what_its_keys_depend_on(name, log, lengths):
    order, rollout, before = ORDERS[name](), Rollout(1, 2), Group(1)
    after = Group(1, 1, log, 77)
    assert order.name == name
    if not order.rekeys:
        assert order.key(rollout, before, lengths) == order.key(rollout, after, lengths)
    if not order.needs_belief:
        assert order.key(rollout, after, lengths) == order.key(rollout, after, None)


@pytest.mark.parametrize(("low", "high"), [(5.0, 6.0), (6.0, 9.0)])
def test_a_group_of_longer_siblings_is_never_later(low, high):
    order = ProbeThenLongest()
    shorter, longer = (order.key(Rollout(1, 1), Group(1, 2, 2 * log), ALIKE) for log in (low, high))
    assert longer < shorter
