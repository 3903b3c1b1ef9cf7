"""The rollout phase in expectation: what must hold whatever the numbers, and the simulated step beside it."""

import importlib.util
from collections.abc import Container
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.generation import (
    LAYERED,
    SYNC,
    Engines,
    Rollouts,
    Schedule,
    Trainer,
    asynchronous,
    critical,
    expected,
    ideal,
    staircase,
    timeline,
)
from gruppetto.ledger.generation.ends import End, Ends
from gruppetto.ledger.generation.line import _HERE, Line
from gruppetto.ledger.generation.lived import Row, Timeline
from gruppetto.ledger.generation.phase import typical_rows
from gruppetto.ledger.generation.timeline import live_through
from gruppetto.ledger.lengths import LognormalLengths, Tools

few = settings(max_examples=12, deadline=None)
MODEL = EngineModel(
    slots=64, base_s=0.003, weights_s=0.012, kv_token_s=5e-8, row_s=1e-5, prefill_token_s=8e-5, kv_capacity=300_000
)
TRAINER = Trainer(token_s=4e-5, step_s=1.0, publish_s=2.0, switch_s=8.0)
BATCH = Rollouts(groups=32, group_size=8, lengths=LognormalLengths.from_mean_cv(1500, 1.0, 16_384, 0.4))


def rows(*tokens: int, prompt: int = 100) -> list[Row]:
    return [Row(prompt, [(n, 0.0)]) for n in tokens]


# -- the timeline ------------------------------------------------------------------------------------------------------


def test_one_rollout_takes_what_the_price_list_says() -> None:
    line = live_through(MODEL, rows(1000), by_kv=False)
    assert line.end_s == pytest.approx(MODEL.alone_s(100, 1000))
    assert (line.row_steps, line.prefill_tokens, line.preemptions) == (1000, 100, 0)
    assert line.progress[-1] == 1000


def test_two_rollouts_share_their_steps() -> None:
    line = live_through(MODEL, rows(100, 300), by_kv=False)
    both, alone = MODEL.steps_s(2, 200, 100), MODEL.steps_s(1, 200, 200)
    assert line.end_s == pytest.approx(200 * MODEL.prefill_token_s + both + alone)
    assert [row.ended_s for row in line.rows] == sorted(row.ended_s for row in line.rows)


def test_kv_that_runs_full_makes_the_youngest_give_way_and_its_context_is_prefilled_again() -> None:
    tight = replace(MODEL, kv_capacity=2000)
    line = live_through(tight, rows(900, 900, 900), by_kv=False)
    assert line.preemptions > 0
    assert line.prefill_tokens > 300
    assert line.row_steps == 2700, "nothing that was made is made again"
    counted = live_through(tight, rows(900, 900, 900), by_kv=True, max_left=900)
    assert counted.preemptions == 0
    assert counted.prefill_tokens == 300


@few
@given(
    tokens=st.lists(st.integers(1, 3000), min_size=1, max_size=40),
    slots=st.integers(1, 16),
    capacity=st.sampled_from([0, 5_000, 20_000]),
    by_kv=st.booleans(),
    tool_s=st.floats(0, 30),
)
def test_every_token_is_made_once_and_progress_never_outruns_the_steps(
    tokens: list[int], slots: int, capacity: int, by_kv: bool, tool_s: float
) -> None:
    model = replace(MODEL, slots=slots, kv_capacity=capacity)
    given_rows = [Row(50, [(n, tool_s), (n, 0.0)], observation=20) for n in tokens]
    line = live_through(model, given_rows, by_kv=by_kv, max_left=6000)
    assert line.row_steps == 2 * sum(tokens)
    assert line.most_rows <= slots
    assert line.end_s == pytest.approx(max(row.ended_s for row in given_rows))
    assert all(row.started_s >= 0 and row.ended_s > row.started_s for row in given_rows)
    assert line.decode_s + line.prefill_s <= line.end_s * (1 + 1e-9)
    assert line.prefill_tokens >= sum(row.prompt + row.observation for row in given_rows)
    assert line.times == sorted(line.times)


class _PlainLine(Line):
    """Sorts anew each time."""

    def put_in_order(self, idle: Container[Row]) -> int:
        def key(row: Row) -> int:
            return -row.context - (_HERE if row in idle else 0)

        self.rows.sort(key=key)
        self.keys[:] = map(key, self.rows)
        self.gone.clear()
        return sum(row in idle for row in self.rows)


class _PlainEnds(Ends):
    """Looks through all each time."""

    def __init__(self) -> None:
        self.all: list[End] = []

    def chunk(self, end: End) -> None:
        self.all.append(end)

    other = chunk

    def next_step(self) -> int:
        return self._first()[0]

    def pop(self, step: int) -> Row | None:
        if not self.all or self._first()[0] > step:
            return None
        first = self._first()
        self.all.remove(first)
        return first[2]

    def _first(self) -> End:
        self.all = [end for end in self.all if end[2].order == end[1]]
        return min(self.all, default=(1 << 60, 0, Row(0, [])))


class _Plain(timeline.Engine):
    """Keeps nothing in order, and takes every row off at the end of a chunk."""

    def __post_init__(self) -> None:
        super().__post_init__()
        self.back, self.ends = _PlainLine(), _PlainEnds()

    def stays(self, row: Row) -> bool:
        return False


@settings(max_examples=150, deadline=None)
@given(
    drawn=st.lists(st.tuples(st.sampled_from([300, 500, 2500, 5000, 9000]), st.floats(0, 200)), max_size=60),
    turns=st.integers(1, 4),
    slots=st.sampled_from([4, 64]),
    capacity=st.sampled_from([0, 9_000, 20_000, 40_000]),
    live=st.sampled_from([None, 12]),
    likely=st.booleans(),
)
def test_what_is_kept_in_order_is_as_if_it_were_sorted_and_taken_off_each_time(
    drawn: list[tuple[int, float]], turns: int, slots: int, capacity: int, live: int | None, likely: bool
) -> None:
    def lived() -> tuple[object, ...]:
        given_rows = [Row(64, [*[(n, wait)] * (turns - 1), (n, 0.0)], observation=50) for n, wait in drawn]
        if likely:
            for row, (n, _) in zip(given_rows, drawn, strict=True):
                row.likely = 0.5 * n, 2.0 * n
        line = live_through(model, given_rows, by_kv=True, live=live, max_left=9000, any_most=4000.0)
        return line.times, line.progress, line.prefill_tokens, [(row.started_s, row.ended_s) for row in line.rows]

    drawn = drawn + drawn[::-1] + drawn  # so many that they are in each other's way
    model = replace(MODEL, slots=slots, kv_capacity=capacity)
    found = lived()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "Engine", _Plain)
        patch.setattr(timeline, "undisturbed", lambda engine: False)
        assert lived() == found


@settings(max_examples=100, deadline=None)
@given(
    drawn=st.lists(st.tuples(st.integers(1, 400), st.floats(0, 20), st.integers(0, 1500)), min_size=4, max_size=40),
    turns=st.integers(2, 12),
    slots=st.sampled_from([2, 4, 64]),
    capacity=st.sampled_from([0, 9_000, 20_000, 60_000, 200_000]),
    live=st.sampled_from([None, 12]),
    speculates=st.booleans(),
)
def test_while_there_is_room_for_everybody_all_happens_as_if_it_had_been_asked_for(
    drawn: list[tuple[int, float, int]], turns: int, slots: int, capacity: int, live: int | None, speculates: bool
) -> None:
    def lived() -> tuple[object, ...]:
        given_rows = [Row(64, [*[(n, wait)] * (turns - 1), (n, 0.0)], observation=more) for n, wait, more in drawn]
        line = live_through(model, given_rows, by_kv=True, live=live, max_left=9000)
        ends = [(row.started_s, row.ended_s) for row in line.rows]
        sums = line.decode_s, line.prefill_s, line.steps, line.row_steps, line.prefill_tokens, line.most_rows
        return line.times, line.progress, line.running, sums, ends

    speculation = ((1, 2.0, 1.5),) if speculates else ()
    model = replace(MODEL, slots=slots, kv_capacity=capacity, speculation=speculation)
    found = lived()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(timeline, "undisturbed", lambda engine: False)
        assert lived() == found


def test_a_context_that_waits_for_a_tool_is_held_where_kv_is_counted() -> None:
    model = replace(MODEL, kv_capacity=12_000)
    many = [Row(500, [(400, 5.0)] * 8 + [(400, 0.0)], observation=200) for _ in range(12)]
    thrash = live_through(model, many, by_kv=False)
    again = [Row(500, [(400, 5.0)] * 8 + [(400, 0.0)], observation=200) for _ in range(12)]
    held = live_through(model, again, by_kv=True, max_left=3600)
    assert held.prefill_tokens < thrash.prefill_tokens / 2


# -- bounds ------------------------------------------------------------------------------------------------------------


@few
@given(
    mean=st.floats(200, 4000),
    cv=st.floats(0.1, 1.5),
    groups=st.integers(4, 64),
    engines=st.integers(1, 8),
    schedule=st.sampled_from([SYNC, LAYERED]),
)
def test_no_schedule_is_expected_below_its_bounds_and_parts_sum(
    mean: float, cv: float, groups: int, engines: int, schedule: Schedule
) -> None:
    batch = Rollouts(groups=groups, group_size=8, lengths=LognormalLengths.from_mean_cv(mean, cv, 32_768, 0.3))
    found = expected(batch, Engines(model=MODEL, count=engines), TRAINER, schedule)
    assert found.rollout_s.value >= 0.97 * found.bound_s
    parts = (found.rollout_s, found.train_s, found.publish_s, found.switch_s)
    assert found.step_s.value == pytest.approx(sum(part.value for part in parts))
    assert 0 < found.utilization.value <= 1
    assert 0 < found.busy_share.value <= 1
    assert found.train_s.value <= TRAINER.token_s * batch.trained_tokens + TRAINER.step_s + 1e-9


@few
@given(engines=st.integers(1, 12), more=st.integers(1, 8), k=st.sampled_from([0, 1, 2]))
def test_more_engines_are_never_slower(engines: int, more: int, k: int) -> None:
    schedule = asynchronous(k, 1.25) if k else SYNC
    a, b = (
        expected(BATCH, Engines(model=MODEL, count=n), TRAINER, schedule).step_s.value
        for n in (engines, engines + more)
    )
    assert b <= a * 1.02


@few
@given(mean=st.floats(300, 2000), longer=st.floats(1.1, 3), schedule=st.sampled_from([SYNC, LAYERED, asynchronous(1)]))
def test_longer_is_never_cheaper(mean: float, longer: float, schedule: Schedule) -> None:
    a, b = (
        expected(
            replace(BATCH, lengths=LognormalLengths.from_mean_cv(value, 0.8, 32_768, 0.3)),
            Engines(model=MODEL, count=4),
            TRAINER,
            schedule,
        ).step_s.value
        for value in (mean, mean * longer)
    )
    assert b >= a


def test_bounds_say_how_they_come_about() -> None:
    engines = Engines(model=MODEL, count=4)
    assert "E[longest of 32 x 8]" in critical(BATCH, engines).formula
    assert "limit:" in ideal(BATCH, engines).formula
    assert staircase(BATCH, engines).value <= 1.01 * max(ideal(BATCH, engines).value, critical(BATCH, engines).value)


def test_staleness_hides_the_tail_and_streaming_hides_training() -> None:
    runaway = replace(BATCH, lengths=LognormalLengths.from_mean(1000, sigma=0.9, icc=0.05, cap=32_768, q0=0.01))
    engines = Engines(model=MODEL, count=8, keep_kv_on_swap=True)
    sync, layered = (expected(runaway, engines, TRAINER, schedule) for schedule in (SYNC, LAYERED))
    assert layered.train_s.value < 0.5 * sync.train_s.value
    one, three = (expected(runaway, engines, TRAINER, asynchronous(k)) for k in (1, 3))
    assert one.rollout_s.value == pytest.approx(sync.rollout_s.value / 2, rel=0.1)
    assert three.rollout_s.value == pytest.approx(sync.rollout_s.value / 4, rel=0.2)


def test_tools_wait_and_a_call_that_hangs_holds_the_batch_up() -> None:
    lengths = LognormalLengths.from_mean(4000, sigma=0.5, icc=0.5, cap=20_000)
    calm = Tools(turn_tokens=250, observation_tokens=100, median_s=1.0)
    hangs = Tools(turn_tokens=250, observation_tokens=100, median_s=1.0, stuck_share=0.01, stuck_s=(300.0, 600.0))
    engines = Engines(model=replace(MODEL, kv_capacity=0), count=4)
    a, b = (
        expected(Rollouts(groups=16, group_size=8, lengths=lengths, tools=tools), engines, TRAINER, SYNC)
        for tools in (calm, hangs)
    )
    assert a.tool_s.value == pytest.approx(15.0, rel=0.01)
    assert b.critical_s.value > a.critical_s.value + 200
    assert b.rollout_s.value > a.rollout_s.value + 200


def test_what_cannot_be_is_refused() -> None:
    with pytest.raises(UserError, match="engines = 0"):
        Engines(model=MODEL, count=0)
    with pytest.raises(UserError, match="groups = 0"):
        replace(BATCH, groups=0)
    with pytest.raises(UserError, match="depth from 1 to 2"):
        asynchronous(1, 3)
    with pytest.raises(UserError, match="max_staleness = 0"):
        asynchronous(0)


def test_equal_rollouts_end_no_earlier_than_the_work_takes() -> None:
    """Where rows give way for want of KV, it is the one that gave way most often that ends last."""
    equal = replace(BATCH, groups=64, lengths=LognormalLengths.from_mean_cv(8192, 0.0, 8192))
    engines = Engines(model=MODEL, count=4)
    for schedule in (SYNC, LAYERED, asynchronous(1)):
        found = expected(equal, engines, TRAINER, schedule)
        assert found.ideal_s.value <= found.rollout_s.value <= 1.35 * found.ideal_s.value


def test_typical_rollouts_are_whole_turns() -> None:
    tools = Tools(turn_tokens=250, observation_tokens=600, median_s=0.4)
    lengths = LognormalLengths.from_mean(4250, sigma=0.5, icc=0.5, cap=20_000)
    found = typical_rows(Rollouts(groups=8, group_size=8, lengths=lengths, tools=tools), 64)
    assert all(tokens == 250 for row in found for tokens, _ in row.turns)
    assert sum(row.tokens for row in found) / 64 == pytest.approx(4250, rel=0.05)
    assert isinstance(live_through(MODEL, found, by_kv=True), Timeline)


# -- beside the simulator ----------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def benchmark() -> ModuleType:
    path = Path(__file__).parents[2] / "benchmarks" / "plan_vs_simulated.py"
    spec = importlib.util.spec_from_file_location("plan_vs_simulated", path)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


CASES = [
    ("A", "sync", 12, 1, 1),
    ("A", "layered", 12, 1, 1),
    ("A", "async", 12, 1, 1),
    ("D", "sync", 12, 1, 1),
    ("R", "async", 12, 1, 1),
    ("R", "sync", 12, 1, 1),
    ("B", "sync", 6, 1, 16),
    ("B", "layered", 6, 1, 16),
    ("B", "async", 6, 1, 16),
    ("C", "sync", 6, 2, 8),
    ("C", "layered", 6, 2, 8),
    ("C", "async", 6, 2, 8),
    ("E", "sync", 6, 2, 8),
    ("E", "layered", 6, 1, 8),
    ("E", "async", 6, 1, 8),
]
"""Family, placement, steps, seeds, and by how much it is scaled down."""


@pytest.mark.slow
@pytest.mark.parametrize(("family", "placement", "steps", "seeds", "scale"), CASES)
def test_the_expected_step_is_the_simulated_one(
    benchmark: ModuleType, family: str, placement: str, steps: int, seeds: int, scale: int
) -> None:
    """Within 10 %, and what so few steps say of a mean (two standard errors)."""
    row = benchmark.compare(family, placement, steps=steps, seeds=seeds, scale=scale)
    assert abs(row["ratio"] - 1) <= 0.1 + 2 * row["error"], row


def test_the_last_of_many_waits_for_all_its_tool_calls() -> None:
    """Calls that take no two lengths: the longest rollout has 48 of 30 s, and nobody ends before it."""
    tools = Tools(turn_tokens=250, median_s=30.0)
    lengths = LognormalLengths.from_mean_cv(5000, 0.7, 12_250, 0.5)
    rollouts = Rollouts(groups=128, group_size=8, lengths=lengths, tools=tools)
    engines = Engines(model=EngineModel(slots=256, base_s=0.001, row_s=1e-5), count=16)
    assert critical(rollouts, engines).value > 48 * 30
    assert expected(rollouts, engines, Trainer(), LAYERED).rollout_s.value > 48 * 30
