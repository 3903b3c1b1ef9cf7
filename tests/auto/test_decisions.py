"""What docs/scheduling.md says of `auto`, rule by rule: when it asks and whom, when it switches, when it is wrong."""

import pytest
from auto.by_hand import ByHand

from gruppetto.scheduler.policies.order import Fifo, ProbeThenLongest
from gruppetto.types import Task

K1 = {"max_staleness": 1}
MASK = K1 | {"allow_mask": True}
CENSOR = K1 | {"allow_censoring": True}
RULE = "wait 2"
"""What the rule has where k = 1 and one rollout of a step is ten times as long as usual."""


def scattered(tokens_s, by):
    """A forecast whose two steps are off by that share; `steady` ones are not."""
    return {"tokens_s": tokens_s, "per_step": tuple((tokens_s * 10 * (1 + sign * by), 10.0) for sign in (1, -1))}


def steady(tokens_s):
    return scattered(tokens_s, 0.0)


# -- how it begins -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("limits", "begins", "order"), [({}, "wait 1", ProbeThenLongest()), (K1, "wait 1.25", Fifo())])
def test_it_begins_shallow_with_the_order_of_layered_and_streams(tmp_path, limits, begins, order):
    hand = ByHand(tmp_path, {}, **limits)
    assert hand.followed == [(0, begins)]
    policy = hand.policies[0]
    assert (policy.order, policy.stream, policy.unfinished) == (order, True, "keep")
    assert policy.freshness.max_staleness == limits.get("max_staleness", 0)


# -- when it asks ------------------------------------------------------------------------------------------------------


def test_it_asks_after_steps_1_and_4_then_every_5_and_more_rarely_while_confirmed(tmp_path):
    hand = ByHand(tmp_path, {"wait 1.25": 2.0}, **K1)
    hand.step(66)
    assert hand.asked_at() == [1, 4, 9, 14, 24, 44, 64]


def test_a_choice_in_doubt_is_asked_about_every_5_steps_again(tmp_path):
    hand = ByHand(tmp_path, {"wait 1.25": 1.1}, **K1)
    hand.step(24)
    hand.answer = {"wait 2": 1.1}
    hand.step(31)
    assert hand.asked_at() == [1, 4, 9, 14, 24, 44, 49, 54]
    assert hand.followed[1:] == [(49, "wait 2")]


@pytest.mark.parametrize(
    ("limits", "steps", "skip"), [(K1, 8, 2), ({"max_staleness": 4}, 15, 5), (CENSOR, 10, 2), ({}, 8, 1)]
)
def test_it_looks_8_to_12_steps_ahead_and_more_with_a_large_k_behind_k_plus_1_that_lead_into_it(
    tmp_path, limits, steps, skip
):
    hand = ByHand(tmp_path, {}, **limits)
    hand.step(4)
    assert hand.asked[-1][2:] == (steps, skip)


# -- whom --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("long", "rules", "kinds", "neighbours"),
    [
        (1, "wait 1.25", ["wait 2", "mask 1.5", "rounds 1.25"], {"wait 1.1", "mask 1.25"}),
        (200, "mask 2", ["wait 2", "wait 1.25", "mask 1.5", "rounds 1.25"], {"mask 3"}),
    ],
)
def test_it_asks_about_the_present_the_rules_one_of_each_kind_and_neighbours(tmp_path, long, rules, kinds, neighbours):
    hand = ByHand(tmp_path, {"wait 1.5": 1.1}, long=long, allow_censoring=True, **MASK)
    hand.step(4)
    candidates = hand.asked[-1][1]
    assert candidates[:2] == ["wait 1.5", rules]
    assert candidates[2 : 2 + len(kinds)] == kinds
    assert len(candidates) <= 8
    assert set(candidates[2 + len(kinds) :]) >= neighbours


def test_at_most_so_many_and_those_that_matter_most(tmp_path):
    hand = ByHand(tmp_path, {}, max_candidates=3, allow_censoring=True, **MASK)
    hand.step(4)
    assert hand.asked[-1][1] == ["wait 1.25", RULE, "mask 1.5"]


def test_what_the_limits_do_not_allow_is_not_asked_about(tmp_path):
    hand = ByHand(tmp_path, {}, **K1)
    hand.step(14)
    assert {one for _, candidates, *_ in hand.asked for one in candidates} == {
        "wait 1.1", "wait 1.25", "wait 1.5", "wait 2",
    }  # fmt: skip


@pytest.mark.parametrize("far", [{"tokens_s": 0.74}, {"waste": 0.35 * 1.21}], ids=["slow", "wasteful"])
@pytest.mark.parametrize("near", [{"tokens_s": 0.76}, {"waste": 0.35 * 1.19}], ids=["less slow", "less wasteful"])
def test_who_is_far_behind_or_far_over_the_waste_sits_out_until_every_fourth_question(tmp_path, far, near):
    hand = ByHand(tmp_path, {"wait 1.1": far, "wait 1.5": near}, **K1)
    hand.step(64)
    assert [("wait 1.1" in candidates, "wait 1.5" in candidates) for _, candidates, *_ in hand.asked] == [
        (True, True), (False, True), (False, True), (False, True), (True, True), (False, True), (False, True),
    ]  # fmt: skip


def test_the_rules_choice_and_the_present_one_never_sit_out(tmp_path):
    """The present one is far behind, and in doubt: one question does not make the run leave it."""
    hand = ByHand(tmp_path, {"wait 1.25": 1.1, RULE: 0.1}, long=10, **K1)
    hand.step(4)
    hand.answer = {"wait 1.25": 0.1, RULE: 0.1, "wait 1.1": 0.1}
    hand.step(10)
    assert [candidates for _, candidates, *_ in hand.asked[-2:]] == [
        ["wait 1.25", RULE, "wait 1.5", "wait 1.1"],
        ["wait 1.25", RULE, "wait 1.5"],
    ]


# -- when it switches --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("gain", "switches"), [(1.031, True), (1.029, False)])
@pytest.mark.parametrize("error", [0.0, 0.5], ids=["certain", "uncertain"])
def test_up_to_step_4_it_switches_at_once_for_more_than_3_percent(tmp_path, gain, switches, error):
    hand = ByHand(tmp_path, {"wait 1.25": steady(1.0), "wait 1.5": scattered(gain, error)}, **K1)
    hand.step()
    assert (hand.present == "wait 1.5") is switches
    hand = ByHand(tmp_path, {"wait 1.25": 1.1}, **K1)
    hand.step()
    hand.answer = {"wait 1.25": steady(1.0), "wait 1.5": scattered(gain, error)}
    hand.step(3)
    assert (hand.present == "wait 1.5") is switches


def later(tmp_path, *answers):
    """Questions that are answered in turn, from step 9 on; where it switched (None = nowhere)."""
    hand = ByHand(tmp_path, {"wait 1.25": 1.1}, **K1)
    hand.step(4)
    for answer in answers:
        hand.answer = {"wait 1.25": steady(1.0)} | answer
        hand.step(5)
    assert hand.asked_at()[2:] == [9 + 5 * i for i in range(len(answers))]
    return hand.followed[-1] if len(hand.followed) > 1 else None


CERTAIN, DOUBTFUL, LITTLE = {"wait 1.5": steady(1.04)}, {"wait 1.5": scattered(1.04, 0.03)}, {"wait 1.5": steady(1.029)}
OTHER, NOBODY = {"wait 2": steady(1.04)}, {}


@pytest.mark.parametrize(
    ("answers", "switched"),
    [
        ((CERTAIN,), None),
        ((CERTAIN, CERTAIN), (14, "wait 1.5")),
        ((DOUBTFUL, DOUBTFUL), None),
        ((DOUBTFUL, CERTAIN), None),
        ((DOUBTFUL, CERTAIN, CERTAIN), (19, "wait 1.5")),
        ((DOUBTFUL, DOUBTFUL, DOUBTFUL), (19, "wait 1.5")),
        ((LITTLE, LITTLE, LITTLE), None),
        ((CERTAIN, OTHER, CERTAIN), None),
        ((CERTAIN, OTHER, OTHER), (19, "wait 2")),
        ((CERTAIN, LITTLE, CERTAIN), None),
        ((CERTAIN, NOBODY), None),
    ],
)
def test_later_it_wants_the_same_gain_twice_running_or_three_times_where_it_is_in_doubt(tmp_path, answers, switched):
    assert later(tmp_path, *answers) == switched


def test_a_question_that_confirms_the_present_choice_ends_no_run(tmp_path):
    """Twice among those that name another choice."""
    hand = ByHand(tmp_path, {"wait 1.25": 1.1}, **K1)
    hand.step(4)
    for answer in (CERTAIN, NOBODY, CERTAIN):
        hand.answer = {"wait 1.25": steady(1.001)} | answer
        hand.step(5 if hand.steps < 14 else 10)
    assert hand.asked_at() == [1, 4, 9, 14, 24]
    assert hand.followed[-1] == (24, "wait 1.5")


def test_it_asks_nobody_while_it_drains(tmp_path):
    hand = ByHand(tmp_path, {"rounds 1.25": 5.0}, **CENSOR)
    hand.run.loop.pool.launch(Task(id="t", prompt_ids=range(4)))
    hand.step(16)
    assert hand.asked_at() == [1, 4]
    assert (hand.present, hand.policies[-1].name) == ("wait 1", "drain")
    hand.run.loop.pool.groups.clear()
    hand.step()
    assert hand.followed[-1] == (17, "rounds 1.25")


@pytest.mark.parametrize("kind", ["mask 1.5", "rounds 1.25"])
def test_nothing_masks_or_censors_before_four_steps(tmp_path, kind):
    hand = ByHand(tmp_path, {kind: 5.0}, allow_censoring=True, **MASK)
    hand.step(3)
    assert hand.asked_at() == [1]
    assert kind not in hand.asked[0][1]
    hand.step()
    assert hand.followed[-1] == (4, kind)


@pytest.mark.parametrize(("share", "switches"), [(0.84, True), (0.86, False)])
def test_a_candidate_may_use_85_percent_of_the_waste(tmp_path, share, switches):
    hand = ByHand(tmp_path, {"mask 1.5": {"tokens_s": 5.0, "waste": share * 0.2}}, max_waste=0.2, **MASK)
    hand.step(4)
    assert (hand.present == "mask 1.5") is switches


@pytest.mark.parametrize(("share", "stays"), [(0.99, True), (1.01, False)])
def test_the_present_choice_may_use_all_of_the_waste(tmp_path, share, stays):
    hand = ByHand(tmp_path, {"mask 1.5": 5.0}, max_waste=0.2, **MASK)
    hand.step(4)
    hand.answer = {"mask 1.5": {"tokens_s": 5.0, "waste": share * 0.2}}
    hand.step(5)
    assert (hand.present == "mask 1.5") is stays
    assert (hand.events("choice")[-1]["gain"] is None) is not stays


@pytest.mark.parametrize(("staleness", "switches"), [(1, True), (2, False)])
def test_a_candidate_that_waits_keeps_the_bound(tmp_path, staleness, switches):
    hand = ByHand(tmp_path, {"wait 1.5": {"tokens_s": 5.0, "staleness": staleness}}, **K1)
    hand.step()
    assert (hand.present == "wait 1.5") is switches


def test_a_candidate_that_cannot_run_is_none_and_the_event_says_why(tmp_path):
    hand = ByHand(tmp_path, {"wait 1.5": {"tokens_s": 5.0, "failed": "no room"}}, **K1)
    hand.step()
    assert hand.present == "wait 1.25"
    (event,) = hand.events("choice")
    assert [row["failed"] for row in event["forecasts"] if "failed" in row] == ["no room"]


def test_its_event_says_what_it_knew(tmp_path):
    hand = ByHand(tmp_path, {"wait 1.25": {"waste": 0.1}, "wait 1.5": {"tokens_s": 1.5, "step_s": 4.0}}, **K1)
    hand.step()
    (event,) = hand.events("choice")
    assert event["after_step"] == 1
    assert (event["present"], event["best"]) == ("depth=1.25 k=1 wait fifo stream", "depth=1.5 k=1 wait fifo stream")
    assert (event["gain"], event["switch"], event["steps"], event["times_smaller"]) == (0.5, True, 8, 1)
    rows = {row["choice"]: row for row in event["forecasts"]}
    assert rows[event["best"]] == {"choice": event["best"], "tokens_s": 1.5, "step_s": 4.0, "waste": 0.0}
    assert rows[event["present"]]["waste"] == 0.1
    assert len(event["why"]) == 1


# -- when it is wrong --------------------------------------------------------------------------------------------------


def wrongs(hand):
    return [event["wrong"] for event in hand.events("forecast_error")]


@pytest.mark.parametrize(("factor", "wrong"), [(1.14, False), (1.16, True), (0.86, False), (0.84, True)])
def test_every_five_steps_more_than_15_percent_off_is_wrong(tmp_path, factor, wrong):
    hand = ByHand(tmp_path, {"wait 1.25": factor}, others=0.1, **K1)
    hand.step(8)  # the forecast of step 4 is the one that is held against five steps
    assert wrongs(hand) == []
    hand.step()
    assert wrongs(hand) == [wrong]
    assert hand.events("forecast_error")[0]["error"] == pytest.approx(factor - 1)


@pytest.mark.parametrize(("scatter", "wrong"), [(0.1, True), (0.4, False)])
def test_what_the_scatter_of_steps_explains_is_not_wrong(tmp_path, scatter, wrong):
    """Twice the standard error of five steps: 0.4 * sqrt(2) * 2 / sqrt(5) is more than 30 %, 0.1 of it is not."""
    hand = ByHand(tmp_path, {"wait 1.25": scattered(1.3, scatter)}, **K1)
    hand.step(9)
    (event,) = hand.events("forecast_error")
    assert event["wrong"] is wrong
    assert event["doubt"] == pytest.approx(scatter * 2**0.5 * 2 / 5**0.5, abs=1e-4)


def distrusted(tmp_path, answer, **limits):
    """One whose forecasts were twice what came, three times, of a present choice that was best by far."""
    hand = ByHand(tmp_path, {"wait 1.25": 2.0} | answer, long=10, **limits)
    hand.step(18)
    assert wrongs(hand) == [True, True]
    assert hand.present == "wait 1.25"
    hand.step()
    assert wrongs(hand) == [True, True, True]
    return hand


def test_after_three_wrong_ones_the_rule_decides_until_one_is_right(tmp_path):
    hand = distrusted(tmp_path, {}, **K1)
    assert [event["reason"] for event in hand.events("notice")] == [
        "forecasts were off by more than 15% three times; the rule decides"
    ]
    hand.answer = {RULE: 1.9, "wait 1.25": 5.0}
    hand.step(5)
    assert hand.followed[-1] == (24, RULE)  # at once, though it was forecast to be slower
    hand.answer = {RULE: 1.0, "wait 1.25": 5.0}
    hand.step(5)
    assert wrongs(hand)[-1]  # of RULE, too
    assert hand.present == RULE
    hand.step(5)
    assert not wrongs(hand)[-1]
    hand.step(10)
    assert hand.followed[-1] == (44, "wait 1.25")  # by the forecasts of steps 39 and 44


def test_a_right_one_between_wrong_ones_keeps_the_trust(tmp_path):
    hand = ByHand(tmp_path, {"wait 1.25": 2.0, RULE: 0.5}, **K1)
    hand.step(14)
    hand.step(5, trained=20.0)
    hand.step(10)
    assert wrongs(hand)[:4] == [True, True, False, True]
    hand.step(40)
    assert hand.events("notice")


def test_where_the_rules_choice_breaks_the_limits_distrust_changes_nothing(tmp_path):
    """A forecast that is not believed is no reason to switch either."""
    hand = distrusted(tmp_path, {RULE: {"failed": "no"}}, **K1)
    hand.answer = {"wait 1.25": 2.0, RULE: {"failed": "no"}, "wait 1.5": 9.0}
    hand.step(15)
    assert hand.present == "wait 1.25"
    assert len(hand.events("choice")) > 4
