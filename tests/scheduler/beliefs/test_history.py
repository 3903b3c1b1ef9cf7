"""What a prompt's last group says of its next one."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.rng import stream
from gruppetto.scheduler.beliefs.history import PAIRS_NEEDED, PromptHistory
from gruppetto.sim.workload import FAMILIES

CAP = 1000


def whole(history, task_id, lengths, cap=CAP):
    history.record(task_id, lengths, [n >= cap for n in lengths])


def two_epochs(prompts, s_b, s_w, drift, members=8, cap=32_768):
    """A history of prompts whose means move by `drift` between epochs, and what each epoch's means were."""
    draw, history = stream(3, "history", s_b, drift), PromptHistory(cap)
    homes = [7 + s_b * draw.gauss(0, 1) for _ in range(prompts)]
    for epoch in range(2):
        for i, home in enumerate(homes):
            mean = home + epoch * drift * draw.gauss(0, 1)
            group = [min(cap, max(1, round(math.exp(mean + s_w * draw.gauss(0, 1))))) for _ in range(members)]
            whole(history, str(i), group, cap)
    return history


def test_the_error_and_the_reliability_are_what_the_prompts_have():
    history = two_epochs(400, s_b=1.0, s_w=0.4, drift=0.3)
    error = math.sqrt(0.3**2 + 2 * 0.4**2 / 8)
    assert history.error == pytest.approx(error, rel=0.12)
    assert history.evidence("7").s_h == history.error
    now_and_then = math.hypot(1, 0.4 / math.sqrt(8)), math.sqrt(1 + 0.3**2 + 0.4**2 / 8)
    assert history.reliability == pytest.approx(1 / math.prod(now_and_then), abs=0.03)


def test_a_past_that_says_nothing_switches_itself_off():
    history = two_epochs(400, s_b=0.0, s_w=0.9, drift=0.0)
    assert history.reliability < 0.15
    assert history.error > 0.9 / math.sqrt(8)


def test_there_is_no_evidence_before_prompts_come_back():
    history = PromptHistory(CAP)
    for i in range(20):
        whole(history, str(i), [10 + i, 20 + i])
    assert (history.evidence("3"), history.error, history.reliability) == (None, math.inf, 0)
    for i in range(PAIRS_NEEDED):
        assert history.evidence("3") is None
        whole(history, str(i), [10 + i, 20 + i])
    assert history.evidence("3").log_mean == pytest.approx((math.log(13) + math.log(23)) / 2)
    assert history.evidence("3").s_h == 0
    assert history.reliability == pytest.approx(1)
    assert history.evidence("unknown") is None
    assert history.predicted_max("unknown") is None


def test_where_runaways_cluster_a_prompt_that_had_one_is_expected_to_have_one_again():
    history, load = PromptHistory(32_768), FAMILIES["R"].workload
    for task in range(1000):
        whole(history, str(task), [load.length(5, task, m, task) for m in range(8)], 32_768)
    again = [task for task in range(1000) if history.past(str(task)).capped]
    next_maxima = [max(load.length(5, 1000 + task, m, task) for m in range(8)) for task in again]
    predicted = [history.predicted_max(str(task)) for task in again]
    assert len(again) > 80
    ratio = sum(predicted) / sum(next_maxima)
    assert 0.7 < ratio < 1.1  # a Beta is smoother than prompts that are prone or are not
    assert min(predicted) > 0.4 * 32_768
    others = [history.predicted_max(str(t)) for t in range(1000) if not history.past(str(t)).capped]
    assert sum(others) / len(others) < 0.35 * sum(predicted) / len(predicted)


def test_where_runaways_are_independent_all_prompts_are_alike_in_that():
    history, load = PromptHistory(32_768), FAMILIES["A"].workload
    for task in range(2000):
        whole(history, str(task), [load.length(5, task, m) for m in range(8)], 32_768)
    ran = [str(task) for task in range(2000) if history.past(str(task)).capped]
    assert len(ran) > 30
    assert sum(map(history.predicted_max, ran)) / len(ran) < 0.3 * 32_768


def test_a_prompt_of_which_all_ran_to_the_cap_is_expected_there():
    history = PromptHistory(CAP)
    for i in range(40):
        whole(history, str(i), [10, 20, 30, 40])
    whole(history, "long", [CAP] * 4)
    assert history.past("long").log_mean == math.log(CAP)
    assert history.predicted_max("long") == CAP
    assert history.predicted_max("3") < 100


def test_the_threshold_is_exceeded_by_one_prompt_in_so_many():
    history = PromptHistory(10_000)
    assert history.threshold(5) is None
    for i in range(100):
        whole(history, str(i), [50 * (i + 1)] * 2, 10_000)
    bar = history.threshold(5)
    assert sum(history.predicted_max(str(i)) > bar for i in range(100)) == 20
    assert sum(history.predicted_max(str(i)) > history.threshold(2) for i in range(100)) == 50


def test_the_threshold_is_worked_out_anew_when_a_twentieth_has_come_in():
    history = PromptHistory(10_000)
    for i in range(100):
        whole(history, str(i), [50 * (i + 1)] * 2, 10_000)
    before = history.threshold(5)
    for i in range(5):
        whole(history, str(i), [9_000] * 2, 10_000)
        assert history.threshold(5) == before
    whole(history, "5", [9_000] * 2, 10_000)
    assert history.threshold(5) > before


records = st.lists(
    st.tuples(st.sampled_from("abcdef"), st.lists(st.integers(1, CAP), min_size=0, max_size=5)), max_size=60
)


@given(records, records)
def test_a_state_goes_on_as_if_nothing_had_happened(first, then):
    one, two = PromptHistory(CAP), PromptHistory(CAP)
    for task_id, lengths in first:
        whole(one, task_id, lengths)
    one.threshold(5)
    two.load_state(json.loads(json.dumps(one.state())))
    for task_id, lengths in then:
        for history in (one, two):
            whole(history, task_id, lengths)
    assert one.state() == two.state()
    assert one.threshold(5) == two.threshold(5)
    for task_id in "abcdef":
        assert one.predicted_max(task_id) == two.predicted_max(task_id)
        assert one.evidence(task_id) == two.evidence(task_id)


@given(records)
def test_predictions_are_lengths(seen):
    history = PromptHistory(CAP)
    for task_id, lengths in seen:
        whole(history, task_id, lengths)
    assert 0 <= history.reliability <= 1
    assert history.error >= 0
    for task_id in "abcdef":
        predicted = history.predicted_max(task_id)
        assert predicted is None or 1 - 1e-9 <= predicted <= CAP + 1e-9


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match="1 token or more"):
        PromptHistory(0)
    with pytest.raises(ValueError, match="as many flags"):
        PromptHistory(CAP).record("a", [1, 2], [False])
    with pytest.raises(ValueError, match="write more than 1"):
        PromptHistory(CAP).threshold(1)
    with pytest.raises(ValueError, match="cap of 1000 tokens"):
        PromptHistory(7).load_state(PromptHistory(CAP).state())
