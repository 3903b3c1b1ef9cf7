"""Tool seconds in replays: each that a record holds passes again, wherever it stands in the record."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.config.loader import load
from gruppetto.errors import UserError
from gruppetto.record.explain.read import Event, read_run
from gruppetto.sim.replay.again import AS_RUN, prepare
from gruppetto.sim.replay.running import run_again
from gruppetto.sim.replay.seen import BEYOND_S, read_events
from gruppetto.sim.simulate import demand_of, simulate
from gruppetto.sim.workload.base import Turn
from gruppetto.sim.workload.generator import Workload
from gruppetto.sim.workload.recorded import Recorded, TraceWorkload

UNTOLD = "of which the record does not say after which turn"
TOKENS = 20


def rows(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def step_s(path, *overrides):
    """(seconds of the only step that is run, what is assumed about tools)."""
    replay = prepare(path)
    told = [f"run.dir={path.parent}", "run.steps=1", "sim.prefill_token_s=0", *overrides]
    (row,) = rows(run_again(replay.config("sync", overrides=told), replay.demand))
    return row["time/step_s"], [word for word in replay.words if UNTOLD in word]


def lines(*texts):
    return "".join(f"{text}\n" for text in texts)


def in_turns(tools, groups=(0, 1), tokens=None):
    """A table whose rollouts take these tools after turns of so many tokens each."""
    made = tokens or [TOKENS // len(tools)] * len(tools)
    cells = [
        f"{g},{m},{turn},{made[turn]},{seconds}" for g in groups for m in (0, 1) for turn, seconds in enumerate(tools)
    ]
    return lines("group,member,turn,length,tool_s", *cells)


def verl(tool_s):
    one = {"input": "p", "output": "x", "score": 1.0, "step": 1, "response_length": TOKENS, "tool_s": tool_s}
    return lines(*(json.dumps(one) for _ in range(2)))


def slime(tool_s):
    one = {"response_length": TOKENS, "group_index": 0, "non_generation_time": tool_s}
    return json.dumps({"rollout_id": 1, "samples": [one, one]})


def listed(total, *tools):
    turns = [{"tokens": TOKENS // len(tools)} | ({} if s is None else {"tool_s": s}) for s in tools]
    one = {"group": 0, "turns": turns} | ({} if total is None else {"tool_s": total})
    return lines(json.dumps(one), json.dumps(one))


FORMS = {
    "a table without turns": (lambda s: lines("group,length,tool_s", *[f"{g},{TOKENS},{s}" for g in (0, 0)]), 1, True),
    "a verl dump": (verl, 1, True),
    "a slime dump": (slime, 1, True),
    "a last turn": (lambda s: in_turns([s] * 5), 5, False),
    "turns without tokens": (lambda s: in_turns([s] * 4, tokens=[0, TOKENS // 2, 0, TOKENS // 2]), 4, False),
    "a last turn without tokens": (lambda s: in_turns([s] * 2, tokens=[TOKENS, 0]), 2, False),
    "turns whose tools are known as a sum": (lambda s: listed(s, None, None), 1, True),
    "turns of which one has its tool": (lambda s: listed(3 * s, s, None), 3, True),
    "a list of turns": (lambda s: listed(2 * s, s, s), 2, False),
    "a rollout that was cut off": (
        lambda s: lines(
            "group,member,turn,length,tool_s,finish",
            *[f"0,{m},{t},5,{s},{'abort' if m else 'stop'}" for m in (0, 1) for t in (0, 1)],
        ),
        2,
        False,
    ),
}


@pytest.mark.parametrize("form", FORMS)
def test_no_recorded_second_vanishes(tmp_path, form):
    write, calls, untold = FORMS[form]
    (tmp_path / "none").write_text(write(0))
    (tmp_path / "some").write_text(write(100))
    (none, _), (some, words) = step_s(tmp_path / "none"), step_s(tmp_path / "some")
    assert some - none == pytest.approx(100 * calls, abs=0.5)
    assert bool(words) == untold, words


def test_turns_that_begin_late_in_the_record_are_run(tmp_path):
    plain = lines("group,member,turn,length,tool_s", *[f"{g},{m},0,{TOKENS},0" for g in range(80) for m in range(5)])
    late = in_turns([60] * 4, groups=(80, 81)).partition("\n")[2]
    (tmp_path / "t.csv").write_text(plain + late)
    assert step_s(tmp_path / "t.csv")[0] == pytest.approx(240, abs=2)


def test_a_tool_that_takes_longer_than_any_deadline_is_waited_for(tmp_path):
    (tmp_path / "t.csv").write_text(lines("group,length,tool_s", "0,9,3e6", "0,9,0"))
    assert step_s(tmp_path / "t.csv")[0] == pytest.approx(3e6, abs=2)


@pytest.mark.parametrize("row", [listed(50, 30, 30), listed(70, 30, 30), listed(20, 30, None)])
def test_tools_that_do_not_add_up_are_one_line(tmp_path, row):
    (tmp_path / "t").write_text(row)
    with pytest.raises(UserError, match=r"t row 1: tool_s = \d+, but the tools of its turns take \d+ s; correct one"):
        prepare(tmp_path / "t")


def test_a_simulation_of_recorded_rollouts_waits_too(tmp_path):
    seconds = []
    for tool_s in (0, 100):
        (tmp_path / "t.csv").write_text(lines("group,length,tool_s", *[f"{g},{TOKENS},{tool_s}" for g in (0, 0, 1, 1)]))
        size = ["rollout.prompts_per_step=2", "rollout.group_size=2", "run.steps=1", f"run.dir={tmp_path}"]
        run = simulate(load(["sim/reasoning-32k"], [*size, f"sim.workload={tmp_path / 't.csv'}"]))
        seconds.append(rows(run)[0]["time/step_s"])
    assert seconds[1] - seconds[0] == pytest.approx(100, abs=0.5)


# -- whether there are turns ------------------------------------------------------------------------------------------


def test_a_generator_knows_whether_it_has_turns():
    load = Workload.from_mean(60, 0.5, 0.1, 1000, turn_tokens=400)
    assert load.has_turns  # although hardly any rollout takes two
    assert not any(len(load.turns(0, g, m)) > 1 for g in range(64) for m in range(4))
    assert not Workload.from_mean(60, 0.5, 0.1, 400, turn_tokens=400).has_turns
    assert not Workload.from_mean(60, 0.5, 0.1, 400).has_turns


def test_recorded_rollouts_have_turns_where_one_does():
    plain = Recorded((Turn(3, 0, 0.0),))
    for other, found in [
        (plain, False),
        (Recorded((Turn(3, 0, 1.0),)), True),
        (Recorded((Turn(3, 0, 0.0), Turn(1, 0, 0.0))), True),
    ]:
        assert TraceWorkload(groups=(*[(plain, plain)] * 300, (plain, other))).has_turns is found


@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 3), st.integers(0, 3)), min_size=1, max_size=6))
@settings(max_examples=200, deadline=None)
def test_turns_without_tokens_are_put_together_and_nothing_of_them_is_lost(told):
    recorded = Recorded(tuple(Turn(*turn) for turn in told))
    played = recorded.played
    assert all(turn.model_tokens > 0 for turn in played)
    sums = [sum(column) for column in zip(*played, strict=True)]
    assert sums == [max(1, recorded.length), *(sum(turn[part] for turn in told) for part in (1, 2))]
    assert recorded.length < len(told) or played == recorded.turns or not all(turn[0] for turn in told)


# -- a run of ours ----------------------------------------------------------------------------------------------------


def test_a_replay_with_tools_after_the_last_turn_is_replayed_as_the_same_run(tmp_path):
    tools = [0.1, 30.3, 7.7]
    cells = [
        f"{g},{m},{turn},{9 + g + 3 * m},{tools[turn] * (1 + m) * (1 + g / 7)}"
        for g in range(12)
        for m in range(2)
        for turn in range(3)
    ]
    (tmp_path / "t.csv").write_text(lines("group,member,turn,length,tool_s", *cells))
    for told in ((), ("log.rollouts=false",)):
        given_ = [f"run.dir={tmp_path}", "run.steps=3", "rollout.prompts_per_step=4", *told]
        first = prepare(tmp_path / "t.csv")
        run = run_again(first.config("partial", overrides=given_), first.demand)
        second = prepare(run)
        assert not [word for word in second.words if UNTOLD in word]
        again = run_again(second.config(AS_RUN, overrides=given_[:1]), second.demand)
        assert [_without_rewards(row) for row in rows(run)] == [_without_rewards(row) for row in rows(again)]


def _without_rewards(row):
    return {key: value for key, value in row.items() if not key.startswith(("reward/", "perf/cpu"))}


@pytest.mark.parametrize(
    ("placement", "scheduler"),
    [
        ("colocated", ("scheduler.type=partial", "scheduler.depth=2")),
        ("colocated", ("scheduler.type=layered", "scheduler.max_staleness=2", "scheduler.depth=2")),
        ("disaggregated", ("scheduler.type=async_bounded", "scheduler.max_staleness=2")),
    ],
)
def test_a_run_that_ends_with_rollouts_at_their_tools_is_replayed_as_the_same_run(tmp_path, placement, scheduler):
    size = ["rollout.prompts_per_step=4", "rollout.group_size=4", "engine.count=1", "engine.slots=8", "run.steps=2"]
    slow = ["sim.workload=lengths", "sim.lengths.mean_tokens=400", "sim.lengths.turn_tokens=50"]
    tools = ["sim.lengths.tool_median_s=20", "sim.lengths.tool_sigma=1.0", *scheduler]
    run = simulate(
        load(["sim/reasoning-32k"], [*size, *slow, *tools, f"run.placement={placement}", f"run.dir={tmp_path}"])
    )
    again = prepare(run)
    second = run_again(again.config(AS_RUN, overrides=[f"run.dir={tmp_path}"]), again.demand)
    assert [_without_rewards(row) for row in rows(run)] == [_without_rewards(row) for row in rows(second)]


@pytest.mark.parametrize(
    "surplus", [("scheduler.over_members=1.5",), ("scheduler.over_members=1.5", "scheduler.kv=hold")]
)
def test_a_run_that_gives_up_members_at_their_tools_is_replayed_as_the_same_run(tmp_path, surplus):
    size = ["rollout.prompts_per_step=6", "rollout.group_size=4", "engine.count=2", "engine.slots=8", "run.steps=3"]
    told = ["log.rollouts=true", f"run.dir={tmp_path}", "run.seed=1"]
    run = simulate(load(["sim/family-e"], [*size, *told, "scheduler.type=tail_batch", *surplus]))
    again = prepare(run)
    second = run_again(again.config(AS_RUN, overrides=told[1:2]), again.demand)
    assert [_without_rewards(row) for row in rows(run)] == [_without_rewards(row) for row in rows(second)]


def event(t, kind, rollout=None, group=0, **fields):
    return Event(t=t, kind=kind, rollout=rollout, group=group, **fields)


def test_every_wait_that_events_show_has_its_seconds():
    seen, _ = read_events(
        [
            event(0.0, "launch"),
            event(0.0, "launch", group=1),
            event(1.0, "wait", "g0.0", tokens=5),
            event(1.0, "wait", "g0.1", tokens=6),
            event(2.0, "wait", "g1.0", 1, tokens=7),
            event(2.5, "wait", "g1.1", 1, tokens=8),
            event(3.0, "observe", "g0.0", tokens=25, seconds=1.9),
            event(4.0, "wait", "g0.0", tokens=9),
            event(5.0, "finish", "g0.0", tokens=9, seconds=0.75),
            event(5.5, "finish", "g0.1", tokens=6),  # of a version that did not say what the environment took
            event(6.0, "drop", "g1.0", 1),
            event(7.0, "drop", group=1),
            event(8.0, "wait", "g2.0", 2, tokens=3),
            event(8.0, "wait", "g3.0", 3, tokens=4),
            event(8.5, "ready", group=3),  # it had enough without this member, which comes back later
            event(9.0, "observe", "g3.0", 3, tokens=30, seconds=0.9),
            event(9.5, "publish_end", group=None),
        ]
    )
    tools = {name: [turn.tool_s for turn in one.turns(10)] for name, one in seen.items()}
    assert tools.pop((0, 0)) == [1.9, 0.75]
    assert tools.pop((0, 1)) == [4.5]
    assert tools == {(1, 0): [4.0 + BEYOND_S], (1, 1): [4.5 + BEYOND_S], (2, 0): [1.5 + BEYOND_S], (3, 0): [0.9]}
    assert [turn[:2] for turn in seen[0, 0].turns(10)] == [(5, 10), (4, 0)]


@pytest.mark.parametrize("rows_too", ["true", "false"])
def test_each_member_of_a_group_does_what_it_did_itself_also_where_others_were_given_up(tmp_path, rows_too):
    size = ["rollout.prompts_per_step=6", "rollout.group_size=4", "engine.count=2", "engine.slots=8", "run.steps=3"]
    surplus = ["scheduler.type=tail_batch", "scheduler.over_members=1.5", f"run.dir={tmp_path}"]
    run = simulate(load(["sim/family-e"], [*size, *surplus, f"log.rollouts={rows_too}"]))
    seen, takes = read_events(read_run(run).events())
    groups = prepare(run).demand.launched.groups
    numbers = {group: number for number, group in enumerate(takes.first)}
    given_up = 0
    for (group, member), one in seen.items():
        if group in numbers:
            turns = list(one.turns(512))
            recorded = groups[numbers[group]].members[member]
            assert list(recorded.turns[: len(turns)]) == turns
            given_up += not one.finished
    assert given_up > 5


def test_a_run_as_the_workload_of_another_has_its_turns_tools_and_prompts(tmp_path):
    size = ["rollout.prompts_per_step=4", "rollout.group_size=4", "engine.count=1", "engine.slots=8", "run.steps=2"]
    told = ["log.rollouts=true", f"run.dir={tmp_path}"]
    run = simulate(load(["sim/family-e"], [*size, "scheduler.type=partial", *told, "run.name=first"]))
    demand, launches = demand_of(str(run)), prepare(run).demand.launched.groups
    asked = {tuple(demand.turns(0, g, m) for m in range(4)) for g in range(200)}
    assert asked == {tuple(one.played for one in group.members) for group in launches}
    assert {demand.prompt(0, g) for g in range(200)} == {group.members[0].prompt_tokens for group in launches}
    other = simulate(load(["sim/family-e"], [*size, f"sim.workload={run}", *told]))
    seen, _ = read_events(read_run(other).events())
    waits = {seconds for one in seen.values() for seconds, _ in one.answers}
    assert len(waits) > 5
    assert waits <= {turn.tool_s for group in asked for turns in group for turn in turns}


def test_a_member_that_no_group_has_is_one_line(tmp_path):
    run = simulate(load(["sim/reasoning-32k"], ["run.steps=1", "rollout.prompts_per_step=2", f"run.dir={tmp_path}"]))
    with (run / "events.jsonl").open("a") as file:
        file.write('{"t":1e6,"kind":"stop","rollout":"g0.99999999999","group":0,"tokens":3}\n')
    with pytest.raises(
        UserError, match=r"/events\.jsonl names rollout g0\.99999999999, and no group has so many members"
    ):
        prepare(run)


@pytest.mark.parametrize(
    ("events", "said"),
    [
        (
            [event(1.0, "wait", "g0.0", tokens=5), event(2.0, "observe", "g0.0", tokens=9, seconds=1e15)],
            r"took 1e\+15 s for a turn",
        ),
        (
            [event(1.0, "wait", "g0.0", tokens=5), event(2.0, "observe", "g0.0", tokens=9, seconds=-1.0)],
            r"took -1 s for a turn",
        ),
        (
            [event(1.0, "wait", "g0.0", tokens=-5), event(2.0, "observe", "g0.0", tokens=9, seconds=1.0)],
            r"a turn from 0 to -5 model tokens in a context of 9",
        ),
        ([event(1.0, "wait", "g0.0", tokens=5), event(1e12, "publish_end", group=None)], r"took 1e\+12 s for a turn"),
    ],
)
def test_events_that_cannot_be_are_one_line(events, said):
    seen, _ = read_events(events)
    with pytest.raises(
        UserError, match=rf"^events\.jsonl tells of .*{said}, which cannot be; the run folder is damaged"
    ):
        list(seen[0, 0].turns(10))
