"""Where every engine-second went: the parts are exact, and each goes to the cause that held at the time."""

import asyncio
from fractions import Fraction
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.clock import run_virtual
from gruppetto.engines.base import EngineStats
from gruppetto.scheduler import meter as meters
from gruppetto.scheduler.meter import CAUSES, TICKS, StepMeter

TOLERANCE = 4 / TICKS


class Counters:
    """An engine's counters, moved by hand."""

    def __init__(self, name="e0", slots=4):
        self.name, self.slots, self.asked = name, slots, 0
        self.now = SimpleNamespace(
            batch_steps={},
            batch_s={},
            decode_s_total=0.0,
            prefill_s_total=0.0,
            prefill_tokens_total=0,
            kv_wait_row_s=0.0,
        )

    def stats(self):
        self.asked += 1
        now = {name: dict(value) if isinstance(value, dict) else value for name, value in vars(self.now).items()}
        return EngineStats(
            version=0,
            running=0,
            waiting=0,
            slots=self.slots,
            kv_tokens=None,
            kv_capacity=0,
            decode_steps_total=0,
            decode_tokens_total=0,
            **now,
        )

    def decode(self, rows, steps, seconds, by_rows=True):
        now = self.now
        now.batch_steps[rows] = now.batch_steps.get(rows, 0) + steps
        now.decode_s_total += seconds
        if by_rows:
            now.batch_s[rows] = now.batch_s.get(rows, 0.0) + seconds


def seconds(work):
    parts = work.seconds()
    assert sum(parts[cause] for cause in CAUSES) == parts["total"]
    return {cause: value for cause, value in parts.items() if value and cause != "total"}


def metered(script, engines):
    """The split of what `script(meter)` did on virtual time."""

    async def main():
        meter = StepMeter(engines)
        await script(meter)
        return meter.read()

    return run_virtual(main())


def test_a_tail_by_hand():
    engine = Counters(slots=4)

    async def script(meter):
        meter.note(0, running=4)
        await asyncio.sleep(10)
        meter.note(0, running=1)
        await asyncio.sleep(6)
        engine.decode(4, 100, 10.0)
        engine.decode(1, 60, 6.0)

    assert seconds(metered(script, [engine])) == {"decode": 11.5, "tail": 4.5}


def test_each_cause_gets_the_time_in_which_it_held():
    engine = Counters(slots=4)
    spans = [
        (1, {"running": 0, "queued": 9, "free_slots": 4}, {"queue": 1}),
        (2, {"running": 0, "queued": 9, "free_slots": 4, "kv_blocked": True}, {"kv_full": 2}),
        (4, {"running": 0, "waiting": 2}, {"tool": 4}),
        (8, {"running": 0, "scoring": 1}, {"reward": 8}),
        (16, {"running": 0, "starved": True, "training": True}, {"trainer": 16}),
        (
            32,
            {"running": 0, "queued": 1, "free_slots": 4, "waiting": 2, "scoring": 5},
            {"queue": 8, "tool": 16, "reward": 8},
        ),
        (64, {"running": 0}, {"tail": 64}),
        (128, {"running": 0, "waiting": 1, "training": True, "behind": True}, {"tool": 32, "trainer": 96}),
    ]

    async def script(meter):
        for span, state, _ in spans:
            meter.note(**state)
            await asyncio.sleep(span)

    expected = {cause: sum(part.get(cause, 0) for _, _, part in spans) for cause in meters._EMPTY}
    assert seconds(metered(script, [engine])) == expected


def test_phases_hold_for_all_engines_and_a_busy_engine_is_busy_in_any_phase():
    engines = [Counters("e0"), Counters("e1")]

    async def script(meter):
        meter.note(0, running=8)
        await asyncio.sleep(3)
        engines[0].decode(4, 3, 3.25)
        engines[1].decode(4, 3, 3.0)
        meter.phase("switch")
        await asyncio.sleep(1)
        meter.phase("train")
        await asyncio.sleep(5)
        meter.phase("sync")
        await asyncio.sleep(2)
        meter.phase("generate")

    work = metered(script, engines)
    assert work.generate_s == 3
    parts = seconds(work)
    assert parts["decode"] == 6.25
    assert parts["switch"] + parts["trainer"] + parts["sync"] == 15.75
    assert abs(parts["trainer"] - 5 - 4.84375) < TOLERANCE


def test_what_nobody_waits_for_is_an_engine_that_stood_still():
    engine = Counters(slots=4)

    async def script(meter):
        meter.note(0, running=4)
        await asyncio.sleep(10)
        engine.decode(4, 10, 7.0)
        engine.now.prefill_s_total = 1.0

    assert seconds(metered(script, [engine])) == {"decode": 7.0, "prefill": 1.0, "queue": 2.0}


def test_an_engine_that_held_rows_back_for_kv():
    engine = Counters(slots=4)

    async def script(meter):
        meter.note(0, running=4)
        await asyncio.sleep(8)
        engine.decode(2, 10, 8.0)
        engine.now.kv_wait_row_s = 12.0

    assert seconds(metered(script, [engine])) == {"decode": 4.0, "kv_full": 3.0, "queue": 1.0}


def test_seconds_of_a_dead_engine_and_of_thrown_away_tokens_are_lost():
    engines = [Counters("e0"), Counters("e1")]

    async def main():
        meter = StepMeter(engines)
        meter.note(0, running=8)
        await asyncio.sleep(4)
        for engine in engines:
            engine.decode(4, 4, 4.0)
        meter.died("e1")
        meter.note(0, running=4)
        await asyncio.sleep(6)
        engines[0].decode(4, 6, 6.0)
        meter.lost(14)
        first = meter.read()
        meter.open()
        await asyncio.sleep(5)
        engines[0].decode(4, 5, 5.0)
        meter.lost(10**9)
        return first, meter.read()

    first, second = run_virtual(main())
    assert seconds(first) == {"decode": 10.5, "lost": 9.5}  # 6 s of e1 and 14 of 56 tokens of 14 s
    assert seconds(second) == {"lost": 10.0}


def test_slots_of_a_dead_engine_are_nobodys():
    engines = [Counters("e0"), Counters("e1")]

    async def script(meter):
        meter.note(1, running=2, free_slots=6)
        meter.died("e1")
        meter.note(1, running=2, free_slots=2)
        await asyncio.sleep(8)
        engines[0].decode(2, 8, 8.0)

    assert seconds(metered(script, engines)) == {"decode": 4.0, "queue": 2.0, "tail": 2.0, "lost": 8.0}


def test_without_seconds_by_rows_the_steps_say_how_full_it_was():
    engine = Counters(slots=4)

    async def script(meter):
        meter.note(0, running=2)
        await asyncio.sleep(8)
        engine.decode(4, 6, 5.0, by_rows=False)
        engine.decode(1, 2, 3.0, by_rows=False)

    assert seconds(metered(script, [engine])) == {"decode": 6.5, "tail": 1.5}


STATE = st.fixed_dictionaries(
    {
        "queued": st.integers(0, 9),
        "running": st.integers(0, 20),
        "free_slots": st.integers(0, 9),
        "kv_blocked": st.booleans(),
        "waiting": st.integers(0, 9),
        "scoring": st.integers(0, 3),
        "training": st.booleans(),
        "starved": st.booleans(),
        "behind": st.booleans(),
    }
)
DECODE = st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 90), st.floats(0, 1e4))
STEP = st.one_of(
    st.tuples(st.just("note"), STATE),
    st.tuples(st.just("phase"), st.sampled_from(["generate", "train", "sync", "switch"])),
    st.tuples(st.just("sleep"), st.floats(0, 1e4)),
    st.tuples(
        st.just("decode"), st.tuples(st.integers(0, 2), st.integers(0, 5), st.integers(1, 90), st.floats(0, 1e4))
    ),
    st.tuples(st.just("prefill"), st.floats(0, 1e3)),
    st.tuples(st.just("kv_wait"), st.floats(0, 1e3)),
    st.tuples(st.just("died"), st.integers(0, 2)),
    st.tuples(st.just("lost"), st.integers(0, 10**6)),
)


@given(st.lists(STEP, max_size=40))
def test_the_parts_add_up_exactly_whatever_happens(steps):
    engines = [Counters(f"e{i}", slots=5) for i in range(3)]

    async def main():
        meter = StepMeter(engines)
        slept = 0.0
        for kind, value in steps:
            if kind == "note":
                meter.note(**value)
            elif kind == "sleep":
                await asyncio.sleep(value)
                slept += value
            elif kind == "decode":
                index, *rest = value
                engines[index].decode(*rest)
            elif kind == "prefill":
                engines[0].now.prefill_s_total += value
            elif kind == "kv_wait":
                engines[1].now.kv_wait_row_s += value
            elif kind == "died":
                meter.died(f"e{value}")
            else:
                getattr(meter, kind)(value)
        return slept, meter.read()

    slept, work = run_virtual(main())
    assert set(work.ticks) == set(CAUSES)
    assert min(work.ticks.values()) >= 0
    assert sum(work.ticks.values()) == work.total_ticks == 3 * work.wall_ticks
    assert work.wall_ticks / TICKS == pytest.approx(slept, abs=1e-5)
    parts = work.seconds()
    assert sum(parts[c] for c in CAUSES) == parts["total"] == sum(parts[c] for c in reversed(CAUSES))
    assert sum(Fraction(parts[c]) for c in CAUSES) == Fraction(parts["total"])


def test_a_note_does_not_look_at_the_engines():
    engines = [Counters(f"e{i}") for i in range(50)]

    async def main():
        meter = StepMeter(engines)
        asked = engines[0].asked
        for running in range(1000):
            meter.note(0, running=running)
            meter.phase("generate")
        assert engines[0].asked == asked
        for turn in range(3000):
            meter.note(turn % 2)
        meter.read()
        return engines[0].asked - asked

    assert run_virtual(main()) == meters.MAX_SNAPSHOTS // 50 + 1


def test_steps_with_a_queue_are_told_apart():
    engine = Counters(slots=4)

    async def script(meter):
        meter.note(2)
        engine.decode(4, 10, 1.0)
        meter.note(0)
        engine.decode(4, 7, 1.0)
        meter.note(1)
        engine.decode(3, 5, 1.0)

    (work,) = metered(script, [engine]).engines
    assert (work.batch_steps, work.queued_steps) == ({4: 17, 3: 5}, {4: 10, 3: 5})
    assert (work.decode_steps, work.row_steps) == (22, 83)


def test_an_evaluation_is_a_cause_of_its_own_and_in_no_other_figure():
    engine = Counters(slots=4)

    async def script(meter):
        meter.note(3, running=4)
        engine.decode(4, 5, 5.0)
        await asyncio.sleep(6)
        meter.phase("eval")
        engine.decode(2, 7, 3.5)
        engine.now.prefill_s_total += 1.0
        engine.now.prefill_tokens_total += 90
        engine.now.kv_wait_row_s += 2.0
        await asyncio.sleep(5)
        meter.phase("generate")
        engine.decode(4, 1, 1.0)
        engine.now.prefill_tokens_total += 10
        await asyncio.sleep(2)

    work = metered(script, [engine])
    assert seconds(work) == {"decode": 6.0, "queue": 2.0, "eval": 5.0}
    assert (work.generate_s, work.total_ticks) == (8.0, 13 * TICKS)
    done = work.engines[0]
    assert (done.batch_steps, done.queued_steps, done.batch_s) == ({4: 6}, {4: 6}, {4: 6.0})
    assert (done.prefill_tokens, done.prefill_s, done.kv_wait_row_s) == (10, 0.0, 0.0)
    apart = work.evaluated[0]
    assert (apart.batch_steps, apart.batch_s, apart.prefill_tokens, apart.decode_s) == ({2: 7}, {2: 3.5}, 90, 3.5)
