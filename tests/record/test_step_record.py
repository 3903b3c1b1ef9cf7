"""A step's record: what its names promise."""

from array import array
from collections import Counter
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from gruppetto.clock import now
from gruppetto.length_ledger import LengthLedger
from gruppetto.record.account import ks_by_chance
from gruppetto.record.bounds import Rates
from gruppetto.record.explain.read import MetricsRow
from gruppetto.scheduler.census import Census
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.meter import CAUSES, EngineWork, StepWork
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.step_record import StepFacts, rollout_rows, step_metrics
from gruppetto.types import (
    Batch,
    DropReason,
    FinishReason,
    RolloutState,
    Sample,
    Score,
    Segment,
    Task,
    TokenKind,
    TokenUse,
)

RATES = Rates(base_s=0.5, row_s=0.25, slots=4, engines=1)


def segment(version, tokens, kind=TokenKind.MODEL):
    return Segment(kind, version, range(tokens), range(tokens))


def rollout(group, member, segments, *, finish=FinishReason.STOP, failure=None):
    entry = RolloutEntry(f"g{group.id}.{member}", group, member)
    entry.segments = [segment(*args) for args in segments]
    entry.tokens = sum(len(s) for s in entry.segments if s.kind is TokenKind.MODEL)
    entry.state, entry.finish, entry.failure = RolloutState.TRAINED, finish, failure
    entry.score = None if failure else Score(reward=float(member % 2))
    group.members.append(entry)
    return entry


def group_of(index, *members, prompt=3, **fields):
    group = GroupEntry(index, Task(id=f"t{index}", prompt_ids=range(prompt)), len(members), 0)
    for member, segments in enumerate(members):
        rollout(group, member, segments, **fields)
    return group


def sample(group, entry, stale=()):
    use = array("B", [TokenUse.PROMPT] * group.prompt)
    for i, part in enumerate(entry.segments):
        made = TokenUse.STALE if i in stale else TokenUse.TRAINED
        use.extend([made if part.kind is TokenKind.MODEL else TokenUse.ENVIRONMENT] * len(part))
    empty = array("i")
    return Sample(
        rollout_id=entry.id,
        group_id=group.id,
        token_ids=empty,
        logprobs=array("f"),
        versions=empty,
        kinds=array("B"),
        use=use,
        reward=1.0,
        advantage=0.0,
    )


def work(batch_steps, generate_s=100.0, **fields):
    ticks = dict.fromkeys(CAUSES, 0) | {"decode": int(generate_s * (1 << 20))}
    engine = EngineWork(
        engine="e0",
        slots=4,
        batch_steps=batch_steps,
        queued_steps={},
        decode_s=50.0,
        prefill_s=1.0,
        prefill_tokens=20,
        **fields,
    )
    return StepWork(
        engines=(engine,), ticks=ticks, wall_ticks=ticks["decode"], generate_ticks=int(generate_s * (1 << 20))
    )


def pool_of(**fields):
    pool = {
        "version": 6,
        "census": Census(),
        "num_live": 1,
        "num_ready": 0,
        "num_deferred": 0,
        "batch_groups": 2,
        "max_tokens": 1000,
        "groups": {},
        "committed": [],
        "rollouts": {},
        "queue": list,
    }
    return SimpleNamespace(**(pool | fields))


def facts_of(groups, *, stale=None, dropped=(), **fields):
    stale = stale or {}
    samples = [sample(g, m, stale.get(m.id, ())) for g in groups for m in g.usable()]
    given = {
        "step": 5,
        "batch": Batch(version=5, samples=tuple(samples), group_ids=tuple(g.id for g in groups)),
        "groups": groups,
        "dropped": dropped,
        "work": work({4: 10, 1: 30}),
        "generated": {m.id: m.tokens for g in groups for m in g.members},
        "trainer": {},
        "seconds": {"step": 120.0},
        "decisions": 7,
    }
    return StepFacts(**(given | fields))


def metrics_of(facts, pool=None, seen=None):
    seen = seen or LengthLedger()
    seen.add(facts.groups, facts.dropped)
    return step_metrics(facts, pool or pool_of(), seen)


TURNS = [(5, 4), (-1, 100, TokenKind.ENVIRONMENT), (5, 6)]
OLD = [(3, 5), (5, 5)]


@pytest.mark.parametrize("freshness", [None, Freshness(1, "mask")])
def test_tokens_are_counted_by_segment(freshness):
    group = group_of(0, TURNS, OLD)
    found = metrics_of(facts_of([group], stale={"g0.1": (0,)}, freshness=freshness))
    assert (found["tokens/batch_trained"], found["tokens/batch_masked"]) == (15, 5)
    assert found["staleness/histogram"] == [15]
    assert found["masked/by_position"] == [0.5] * 5 + [0.0] * 5
    assert (found["waste/masked_share"], found["waste/share"]) == (0.25, 0.25)


def test_a_masked_turn_after_an_observation():
    group = group_of(0, [(5, 4), (-1, 100, TokenKind.ENVIRONMENT), (3, 6)], [(5, 10)])
    found = metrics_of(facts_of([group], stale={"g0.0": (2,)}))
    assert (found["tokens/batch_trained"], found["tokens/batch_masked"]) == (14, 6)
    assert found["masked/by_position"] == [0.0] * 4 + [0.5] * 6


def test_staleness_by_version():
    found = metrics_of(facts_of([group_of(0, OLD, [(2, 10)])], freshness=Freshness(None, "mask")))
    assert found["staleness/histogram"] == [5, 0, 5, 10]
    assert found["staleness/max"] == 3
    assert found["staleness/mean"] == 2.0
    assert found["staleness/on_policy_share"] == 0.25


def test_a_batch_of_nothing_has_no_staleness():
    found = metrics_of(facts_of([]))
    assert (found["staleness/max"], found["staleness/histogram"], found["schedule/icc"]) == (None, [], None)
    assert "schedule/bound_s" not in found


def test_waste_counts_what_was_dropped_since_the_last_step():
    seen, census = LengthLedger(), Census()
    census.drop(DropReason.STALE, 10)
    census.drop(DropReason.FAILED, 5)
    facts = facts_of([group_of(0, [(5, 20)], [(5, 10)])])
    assert metrics_of(facts, pool_of(census=census), seen)["waste/dropped_share"] == pytest.approx(15 / 45)
    resumed = LengthLedger.from_state(seen.state())
    assert metrics_of(facts, pool_of(census=census), resumed)["waste/share"] == 0


def test_bounds_of_the_cohort_by_given_rates():
    found = metrics_of(facts_of([group_of(0, [(5, 40)], [(5, 10)]), group_of(1, [(5, 20)], [(5, 10)])], rates=RATES))
    assert found["schedule/critical_path_s"] == 30.0
    assert found["schedule/area_s"] == 80 * 0.25 + 0.5 * 20
    assert found["schedule/bound_s"] == 30.0
    assert found["schedule/makespan_s"] - found["schedule/bound_s"] == found["schedule/excess_s"]
    assert found["perf/excess"] == pytest.approx(100 / found["schedule/bound_s"] - 1)
    assert found["schedule/rho"] == found["perf/rho"] == 1.0
    assert found["perf/critical_rollout"] == "g0.0"
    assert "schedule/window_bound_s" not in found


def test_tool_seconds_are_on_the_critical_path():
    group = group_of(0, [(5, 40)], [(5, 10)])
    group.members[1].tool_seconds = 100.0
    found = metrics_of(facts_of([group], rates=RATES))
    assert (found["perf/critical_rollout"], found["schedule/bound_s"]) == ("g0.1", 107.5)


def test_a_window_figure_where_staleness_is_allowed():
    seen = LengthLedger()
    for tokens in (40, 80):
        facts = facts_of([group_of(0, [(5, tokens)], [(4, 8)])], rates=RATES, freshness=Freshness(1, "wait"))
        found = metrics_of(facts, seen=seen)
    assert found["schedule/window_bound_s"] == max(found["schedule/area_s"], 45 / 2)


def test_rates_are_fitted_where_none_are_given():
    steps = {4: 10, 1: 30}
    seconds = {rows: count * (0.5 + 0.25 * rows) for rows, count in steps.items()}
    found = metrics_of(facts_of([group_of(0, [(5, 40)], [(5, 10)])], work=work(steps, batch_s=seconds)))
    assert found["schedule/critical_path_s"] == pytest.approx(40 * 0.75 + 3 * 0.05)
    assert found["perf/rates_error"] == pytest.approx(0, abs=1e-6)
    assert found["schedule/rho"] == 40 / (50 / 4)
    assert found["engine/batch_steps"] == [[1, 30], [4, 10]]
    assert found["engine/batch_s"] == [[1, 22.5], [4, 15.0]]


def test_one_batch_size_does_not_tell_how_fast_a_rollout_is_alone():
    found = metrics_of(facts_of([group_of(0, [(5, 40)], [(5, 10)])], work=work({4: 10})))
    assert found["schedule/bound_s"] == pytest.approx(50 * 50 / 40 + 3 * 0.05)
    assert "perf/rho" not in found


def test_seconds_of_all_engines_are_none_of_the_step():
    one = work({4: 10}).engines[0]
    both = StepWork(engines=(one, one), ticks=dict.fromkeys(CAUSES, 0), wall_ticks=0, generate_ticks=0)
    seconds = {"wait_for_batch": 70.0, "train": 40.0, "switch": 4.0, "publish": 6.0}
    found = metrics_of(facts_of([group_of(0, OLD, OLD)], work=both, seconds=seconds | {"step": 120.0}))
    assert (found["engine/decode_s"], found["engine/prefill_s"]) == (100.0, 2.0)
    parts = {name: value for name, value in found.items() if name.startswith("time/") and name != "time/step_s"}
    assert sum(parts.values()) == found["time/step_s"]


def test_names_of_older_records_are_read_as_those_of_today():
    row = MetricsRow(
        {"step": 1, "time/decode_s": 3.0, "time/prefill_s": 0.5, "time/train_s": 2.0}, Path("metrics.jsonl")
    )
    assert dict(row) == {"step": 1, "engine/decode_s": 3.0, "engine/prefill_s": 0.5, "time/train_s": 2.0}


def test_engine_seconds_add_up():
    found = metrics_of(facts_of([group_of(0, OLD, OLD)]))
    assert sum(found[f"engine_s/{cause}"] for cause in CAUSES) == found["engine_s/total"] == 100.0


def test_bias_names_what_is_claimed_and_what_is_seen():
    kept, lost = group_of(0, [(5, 10)], [(5, 12)]), group_of(1, [(5, 90)], [(5, 95)])
    found = metrics_of(facts_of([kept], dropped=[(lost, DropReason.STALE)], censors=True))
    assert found["bias/censors"] is True
    assert found["bias/length_ks"] == 0.5
    assert found["bias/p99_ratio"] == found["bias/p99_kept"] == found["bias/outstanding"] == 0.0
    assert found["bias/ks_allowance"] > 0.3


def test_what_is_all_trained_on_is_not_biased():
    found = metrics_of(facts_of([group_of(0, [(5, 10)], [(5, 12)]), group_of(1, [(5, 90)], [(5, 12)])]))
    names = ("length_ks", "length_ratio", "p99_ratio", "p99_kept", "outstanding", "ks_allowance")
    assert [found[f"bias/{name}"] for name in names] == [0, 1, 1, 1, 0, 0]


def under_way(index, *members, state=RolloutState.PARKED, **fields):
    """A group that the pool still has: none of its members has finished."""
    group = group_of(index, *members, finish=None)
    for entry in group.members:
        entry.state, entry.score = state, None
        for name, value in fields.items():
            setattr(entry, name, value)
    return group


def test_unfinished_rollouts_count_as_longer_than_they_are():
    short, long = group_of(0, [(5, 10)], [(5, 12)]), under_way(1, [(5, 11)], [(5, 40)])
    pool = pool_of(groups={1: long})
    found = metrics_of(facts_of([short]), pool)
    # one is at least 40 long; the other went on from 11, with the one of 12 or the one of 40
    assert found["bias/length_ks"] == found["bias/ks_allowance"] == 0.375  # they will be trained on
    assert found["bias/outstanding"] == 0.5
    assert found["bias/length_ratio"] == pytest.approx(11 / ((10 + 1.5 * 12 + 1.5 * 40) / 4))
    assert (found["bias/p99_ratio"], found["bias/p99_kept"]) == (0, 1)
    for entry in long.members:
        entry.finish = FinishReason.STOP  # now their lengths are known
    for later in (pool, pool_of(committed=[long])):  # ready, or with the trainer for the next batch
        found = metrics_of(facts_of([short]), later)
        assert found["bias/length_ratio"] == pytest.approx(11 / ((10 + 11 + 12 + 40) / 4))


def test_dropping_unfinished_rollouts_is_told_from_parking_them():
    short, long = group_of(0, [(5, 10)], [(5, 12)]), under_way(1, [(5, 12)], [(5, 40)])
    kept = metrics_of(facts_of([short]), pool_of(groups={1: long}))
    given_up = metrics_of(facts_of([short], dropped=[(long, DropReason.STALE)]))
    for name in ("length_ks", "length_ratio", "p99_ratio"):
        assert kept[f"bias/{name}"] == given_up[f"bias/{name}"]
    assert (kept["bias/p99_kept"], given_up["bias/p99_kept"]) == (1, 0)
    assert kept["bias/ks_allowance"] == kept["bias/length_ks"]
    assert given_up["bias/ks_allowance"] == round(ks_by_chance(2, 2, group_size=2, icc=0), 9)


def test_what_an_engine_has_not_answered_is_told_by_the_time_it_has_had():
    short, out = group_of(0, [(5, 10)], [(5, 30)]), under_way(1, [(5, 5)], state=RolloutState.RUNNING)
    for entry in short.members:
        entry.seconds = entry.tokens / 2  # two tokens a second
    out.members[0].started_at = now() - 7.6
    found = metrics_of(facts_of([short]), pool_of(groups={1: out}))
    assert found["bias/length_ratio"] == pytest.approx(20 / ((10 + 2 * 30) / 3))
    out.members[0].started_at = now() - 9000  # no longer than it may get
    found = metrics_of(facts_of([short]), pool_of(groups={1: out}))
    assert found["bias/length_ratio"] == pytest.approx(20 / ((10 + 30 + 1000) / 3))


def test_surplus_that_is_still_on_its_engine_counts_once():
    group = group_of(0, [(5, 10)], [(5, 20)])
    away = rollout(group, 2, [(5, 15)], finish=None)
    away.state, away.score, away.doomed = RolloutState.RUNNING, None, DropReason.SURPLUS
    seen, pool = LengthLedger(), pool_of(rollouts={away.id: away})
    assert metrics_of(facts_of([group]), pool, seen)["bias/outstanding"] == pytest.approx(1 / 3)
    assert not seen.cut
    away.segments, away.tokens, away.state = [segment(5, 16)], 16, RolloutState.DROPPED  # it has come back
    found = metrics_of(facts_of([group_of(1, [(5, 10)], [(5, 20)])]), pool_of(), seen)
    assert (seen.cut, found["bias/outstanding"]) == (Counter({16: 1}), 0)


def test_capped_rollouts_do_not_speak_for_icc():
    groups = [group_of(i, [(5, n)], [(5, n)]) for i, n in enumerate((10, 100))]
    capped = group_of(2, [(5, 999)], [(5, 3)], finish=FinishReason.LENGTH)
    assert metrics_of(facts_of([*groups, capped]))["schedule/icc"] == 1.0


def test_nothing_looks_at_tokens_without_a_tokenizer():
    class Unread(array):
        def __iter__(self):
            raise AssertionError("a token was read")

    group = group_of(0, OLD, OLD)
    for entry in group.members:
        entry.segments = [Segment(s.kind, s.version, Unread("i", s.token_ids), ()) for s in entry.segments]
    facts = facts_of([group], freshness=Freshness(0, "mask"))
    assert metrics_of(facts)["tokens/batch_trained"] == 10
    rows = list(rollout_rows(facts.batch, facts.groups, [], None))
    assert [(row["fate"], row["response"], row["segments"]) for row in rows] == [
        ("trained", None, [[3, 5], [5, 5]])
    ] * 2
    with pytest.raises(AssertionError, match="was read"):
        list(rollout_rows(facts.batch, facts.groups, [], lambda ids: ""))


def test_members_launched_in_excess_count_as_launched_and_are_surplus_in_the_rows():
    group = group_of(0, [(5, 10)], [(5, 20)])
    cut = rollout(group, 2, [(5, 90)], finish=None)  # the others were scored first
    cut.state, cut.score = RolloutState.DROPPED, None
    failed = rollout(group, 3, [(5, 7)], finish=None, failure="no reward")
    failed.state = RolloutState.DROPPED
    batch = Batch(version=5, samples=tuple(sample(group, m) for m in group.usable()), group_ids=(0,))
    fates = [row["fate"] for row in rollout_rows(batch, [group], [], None)]
    assert fates == ["trained", "trained", "dropped:surplus", "dropped:failed"]
    seen = LengthLedger()
    seen.add([group], [])
    assert seen.consumed == Counter({10: 1, 20: 1})
    assert (seen.cut, seen.unused) == (Counter({90: 1, 7: 1}), Counter())
    assert seen.bias([group], pool_of(), 0.0)["bias/length_ratio"] == pytest.approx(15 / 40)


def test_a_ledger_goes_on_from_its_state():
    seen, whole = LengthLedger(), LengthLedger()
    dropped = [(group_of(1, [(5, 7)]), DropReason.FILTERED), (under_way(2, [(5, 8)]), DropReason.STALE)]
    facts = facts_of([group_of(0, [(5, 40)], [(5, 10)])], dropped=dropped)
    for ledger in (seen, whole):
        metrics_of(facts, seen=ledger)
    resumed = LengthLedger.from_state(msgspec.json.decode(msgspec.json.encode(seen.state())))
    assert metrics_of(facts, seen=resumed) == metrics_of(facts, seen=whole) | {
        "perf/cpu_s_total": pytest.approx(0, abs=1e9)
    }
    assert resumed.consumed == whole.consumed == Counter({40: 2, 10: 2})
    assert (resumed.unused, resumed.cut) == (whole.unused, whole.cut) == (Counter({7: 2}), Counter({8: 2}))


def test_a_state_that_knew_only_what_became_final_goes_on():
    state = LengthLedger().state() | {"consumed": [[10, 2]], "generated": [[10, 3], [90, 1]]}
    del state["unused"], state["cut"]
    resumed = LengthLedger.from_state(state)
    assert (resumed.consumed, resumed.unused, resumed.cut) == (Counter({10: 2}), Counter({10: 1, 90: 1}), Counter())
