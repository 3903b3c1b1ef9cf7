"""Explain where an engine gave nothing back: that held the step up, and no answer's length; and members that failed."""

import pytest
from record.run_folder import demo_run, lines, metrics, rollout_rows

from gruppetto.config.loader import load
from gruppetto.presets import in_force
from gruppetto.record.explain import explain, to_text
from gruppetto.record.explain.read import Event
from gruppetto.record.explain.unanswered import HeldPublish, Unanswered, held_publishes
from gruppetto.sim.simulate import simulate

SMALL = ("rollout.prompts_per_step=8", "rollout.group_size=4", "engine.count=2", "engine.slots=16", "run.steps=3")


def broken(tmp_path, *settings):
    folder = simulate(load(["reasoning-32k"], [*SMALL, f"run.dir={tmp_path}", "run.name=x", *settings]))
    found = explain(folder, compose=in_force)
    return found, to_text(found)


def test_an_engine_that_does_not_answer_held_the_step_up(tmp_path):
    """What is advised notices it sooner and keeps every call that was answered; nothing is masked for it."""
    mute = ('sim.failures=["mute:1@30"]', "scheduler.type=layered")
    found, text = broken(tmp_path, *mute, "rollout.timeout_s=600")
    step, lost = found["held_up"][0], found["unanswered"]
    assert (step["step"], step["last"][0]["lost_on"]) == (1, ["engine-1"])
    assert step["last"][0]["lost_s"] == pytest.approx(630)  # its deadline, and that of the abort
    assert 600 < step["lost_s"] <= 630
    assert (lost["engines"], lost["tail_s"], lost["sync_s"]) == (["engine-1"], step["lost_s"], 0)
    (who,) = [line for line in text.splitlines() if f"The last was {step['last'][0]['rollout']}" in line]
    assert who.endswith("630.00 s of it were calls of engine-1 that nothing came of.")
    assert f"Batches closed {step['lost_s']:,.2f} s" in text
    first = found["advice"][0]
    assert first["lines"][0] == "[rollout]"
    assert not any("mask" in line for entry in found["advice"] for line in entry["lines"])
    sooner, _ = broken(tmp_path, *mute, "rollout." + first["lines"][1].replace(" ", ""))
    assert sooner["seconds"] < found["seconds"] - 300
    assert "failed" not in sooner["dropped"]["rollouts"]


def test_an_engine_that_does_not_answer_a_publish_held_the_weights_up(tmp_path):
    """As far as it took longer than the others; larger batches, so that there are fewer, are no advice."""
    beside = ("scheduler.type=async_bounded", "run.placement=disaggregated", "run.deterministic=false")
    mute = (*beside, 'sim.failures=["mute:1@30"]')
    found, text = broken(tmp_path, *mute, "rollout.timeout_s=600")
    lost = found["unanswered"]
    assert (lost["engines"], lost["tail_s"]) == (["engine-1"], 0)
    assert lost["sync_s"] == pytest.approx(700)  # the publish had taken 2 s
    assert "Weights were 700.00 s" in text
    (first, *others) = found["advice"]
    assert first["lines"][0] == "[rollout]"
    assert not any("prompts_per_step" in line for entry in others for line in entry["lines"])
    sooner, _ = broken(tmp_path, *mute, "rollout." + first["lines"][1].replace(" ", ""))
    assert sooner["seconds"] < found["seconds"] - 200


def test_an_engine_that_died_is_what_to_look_at(tmp_path):
    """No deadline would have been sooner, so none is advised."""
    found, _ = broken(tmp_path, 'sim.failures=["dead:1@10"]', "run.steps=1", "rollout.timeout_s=600")
    about = [entry for entry in found["advice"] if "engine-1" in entry["why"]]
    assert [(entry["lines"], entry["price"]) for entry in about] == [([], "an engine that is sound")]


def test_a_run_whose_engines_answer_loses_nothing(tmp_path):
    found, text = broken(tmp_path)
    assert found["unanswered"] == {"tail_s": 0, "sync_s": 0, "share": 0, "engines": []}
    assert "that nothing came of" not in text


# -- by hand ----------------------------------------------------------------------------------------------------------


def timed(rollout, begin, end, tokens=0, before=0, reason="stop", engine="e0"):
    """One call of an engine."""
    name = {"rollout": rollout, "group": 1, "engine": engine}
    return [
        {"t": begin, "kind": "start", "tokens": before, "version": 0, **name},
        {"t": end, "kind": "stop", "tokens": tokens, "reason": reason, **name},
    ]


def ended(rollout, t, tokens):
    return {"t": t, "kind": "finish", "rollout": rollout, "group": 1, "tokens": tokens, "reason": "stop"}


def scored(rollout, t):
    return {"t": t, "kind": "score", "rollout": rollout, "group": 1, "reward": 1.0}


def step_of(tmp_path, *events, rows=(), close=100.0):
    """(the explanation, how the one step was held up)."""
    run = demo_run(tmp_path)
    lines(run / "metrics.jsonl", [metrics(1, close)])
    end = {"t": close, "kind": "close", "groups": [1], "version": 0}
    lines(run / "events.jsonl", [*sorted(events, key=lambda event: event["t"]), end])
    lines(run / "rollouts" / "step_000001.jsonl", [*rollout_rows(1, [200]), *rows])
    found = explain(run, compose=in_force)
    return found, found["held_up"][0]


def test_only_calls_without_a_token_are_lost_and_only_what_they_cost(tmp_path):
    """g1.1 would have ended after 40 s without its first call, when g1.0 still ran; a call that broke off with tokens
    is not lost."""
    first, again = timed("g1.1", 0, 60, reason="error"), timed("g1.1", 60, 100, tokens=9)
    other, part = timed("g1.0", 40, 70, tokens=8, before=3), timed("g1.0", 0, 40, tokens=3, reason="error")
    ends = [ended("g1.0", 70, 8), ended("g1.1", 100, 9)]
    found, step = step_of(tmp_path, *first, *again, *part, *other, *ends)
    assert [(last["rollout"], last["lost_s"]) for last in step["last"]] == [("g1.1", 60), ("g1.0", 0)]
    assert step["lost_s"] == 30
    assert found["unanswered"]["share"] == pytest.approx(30 / 105)


def test_a_member_that_failed_late_is_what_the_batch_waited_for(tmp_path):
    gave_up = {"t": 90, "kind": "drop", "rollout": "g1.1", "group": 1, "reason": "failed", "error": "timeout"}
    calls = [*timed("g1.0", 0, 10, tokens=9), *timed("g1.1", 0, 90, reason="error", engine="e1")]
    failed = rollout_rows(1, [0, 0], fate="dropped:failed", error="timeout: not finished after 90 s")[1:]
    found, step = step_of(tmp_path, *calls, ended("g1.0", 10, 9), gave_up, rows=failed)
    assert (step["rollouts"], step["lost_s"], step["failed"]["rollout"]) == (1, 80, "g1.1")
    said = "After that, 90.00 s went by until the batch closed: g1.1 failed after 90.00 s: timeout: not finished after"
    assert f"{said} 90 s; 90.00 s of it were calls of e1 that nothing came of." in to_text(found)
    assert "(rewards, freshness)" not in to_text(found)


def test_members_that_the_group_did_not_need_are_none_of_the_step(tmp_path):
    """One that had finished and was not scored yet, and one whose reward failed; neither was the last."""
    no_reward = {"t": 13, "kind": "drop", "rollout": "g1.3", "group": 1, "reason": "failed", "error": "no number"}
    ends = [ended("g1.0", 10, 9), scored("g1.0", 11), ended("g1.2", 12, 50), ended("g1.3", 12, 60), no_reward]
    last = [ended("g1.1", 13, 9), scored("g1.1", 14), {"t": 14, "kind": "ready", "group": 1}]
    given_up = timed("g1.4", 0, 15, tokens=70, reason="abort")
    waits = [
        {"t": t, "kind": kind, "rollout": f"g1.{member}", "group": 1, **more}
        for member, began, ended_at in ((0, 1, 3), (4, 1, 9), (4, 9, 12), (4, 12, 13))
        for t, kind, more in ((began, "wait", {}), (ended_at, "observe", {"seconds": ended_at - began}))
    ]
    found, step = step_of(tmp_path, *ends, *last, *given_up, *waits, close=15.0)
    assert [(turn["rollout"], turn["seconds"]) for turn in step["turns"]] == [("g1.0", 2)]
    assert "The longest tool call was turn 1 of g1.0: 2.00 s." in to_text(found)
    assert (step["rollouts"], step["median_tokens"]) == (2, 9)
    assert [end["rollout"] for end in step["last"]] == ["g1.1", "g1.0"]


def test_what_a_dropped_group_waited_for_held_no_step_up(tmp_path):
    """Its tools and its lost calls are forgotten with it."""
    other = {"group": 2, "rollout": "g2.0"}
    gone = [
        *({**event, **other} for event in timed("g2.0", 0, 40, reason="error", engine="e9")),
        {"t": 41, "kind": "wait", **other},
        {"t": 90, "kind": "observe", "seconds": 49.0, **other},
        {"t": 90, "kind": "drop", "group": 2, "reason": "stale", "tokens": 0},
    ]
    found, step = step_of(tmp_path, *timed("g1.0", 0, 95, tokens=9), ended("g1.0", 95, 9), *gone)
    assert (step["turns"], step["lost_s"], step["rollouts"]) == ([], 0, 1)
    assert found["unanswered"]["engines"] == []


def published(step, begin, took, **given_up):
    """A publish, and after how long it gave engines up."""
    lost = [Event(t=begin + after, kind="error", engine=engine) for engine, after in given_up.items()]
    return [
        Event(t=begin, kind="publish_begin"),
        *sorted(lost, key=lambda event: event.t),
        Event(t=begin + took, kind="publish_end", version=step),
    ]


def test_a_publish_lost_what_it_took_longer_than_the_others_or_until_an_engine_was_given_up():
    """One that refuses at once costs a publish nothing, however long that takes; nor does one that fails before it."""
    early = Event(t=9, kind="error", engine="e2")
    hit = published(1, 10, 40, e0=30, e1=20)
    assert held_publishes([early, *hit, *published(2, 60, 5)], {1, 2}) == [HeldPublish(1, 40, 35, ("e1", "e0"))]
    assert held_publishes(hit, {1}) == [HeldPublish(1, 40, 30, ("e1", "e0"))]
    assert held_publishes(published(1, 10, 40, e0=0), {1}) == [HeldPublish(1, 40, 0, ("e0",))]
    assert held_publishes([early, *published(1, 10, 40)], {1}) == []


@pytest.mark.parametrize(("engines", "who"), [(("e1",), "e1 was"), (("e2", "e0", "e1"), "e0, e1 and e2 were")])
def test_engines_are_named_one_or_several(engines, who):
    lost = Unanswered(tail_s=10.0, sync_s=20.0, of_s=100.0, engines=engines)
    assert f"until {who} given up" in list(lost.words())[1]
    assert f": {who} waited for and gave nothing back" in next(iter(lost.advice({}))).why
