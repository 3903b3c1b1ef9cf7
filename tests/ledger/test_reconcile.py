"""Forecast beside measured: pieces through the ledger's engine, stages that add up, losses that sum to one."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.ledger.engine import EngineModel
from gruppetto.ledger.generation import Engines, Rollouts, Schedule
from gruppetto.ledger.lengths import TracedLengths
from gruppetto.ledger.reconcile.as_json import as_json
from gruppetto.ledger.reconcile.compare import _SAY, Pair, reconcile
from gruppetto.ledger.reconcile.forecast import Assumed, TrainPrice
from gruppetto.ledger.reconcile.losses import losses
from gruppetto.ledger.reconcile.measured import GENERATE, STAGES, MeasuredRun, MeasuredStep, StepWork
from gruppetto.ledger.reconcile.pieces import Piece, run_pieces

PRICES = EngineModel(slots=4, base_s=0.01, weights_s=0.02, kv_token_s=1e-6, row_s=1e-3, prefill_token_s=1e-4)
CAUSES = (
    "decode",
    "prefill",
    "tail",
    "tool",
    "reward",
    "sync",
    "switch",
    "trainer",
    "kv_full",
    "queue",
    "eval",
    "lost",
)


def assumed(engines=1, **more):
    """Four groups of two with lengths 10, 20, 30, 40."""
    lengths = TracedLengths.of([10, 20, 30, 40, 10, 20, 30, 40], [0, 0, 1, 1, 2, 2, 3, 3])
    values = {"train": TrainPrice(token_s=0.01, step_s=0.5), "publish_s": 0.25, "switch_s": 1.0, "score_s": 0.1}
    return Assumed(
        rollouts=Rollouts(groups=4, group_size=2, lengths=lengths, prompt_tokens=8),
        engines=Engines(model=PRICES, count=engines),
        schedule=more.pop("schedule", Schedule()),
        **{**values, **more},
    )


def step(number=1, *, scale=1.0, tokens=200.0, pieces=(), batch_steps=((4, 50.0),), **more):
    """A step of 10 engine-seconds on one engine."""
    inside = {"decode": 4.0, "prefill": 0.5, "score": 0.1, "waiting": 1.4}
    seconds = {"generate": 6.0, **inside, "train": 3.0, "publish": 0.3, "switch": 0.7, "step": 10.0}
    account = dict.fromkeys(CAUSES, 0.0) | {
        "decode": 4.0, "prefill": 0.5, "tail": 1.0, "queue": 0.4, "reward": 0.1, "trainer": 3.0, "sync": 0.3,
        "switch": 0.7,
    }  # fmt: skip
    work = StepWork(
        tokens=tokens, prefill_tokens=64, trained_tokens=264, micro_batches=1, batch_steps=batch_steps,
        **{key: more.pop(key) for key in ("decode_flops", "prefill_flops", "train_flops") if key in more},
    )  # fmt: skip
    return MeasuredStep(
        step=number,
        seconds={name: scale * value for name, value in seconds.items()},
        work=work,
        engine_s={name: scale * value for name, value in (account | {"total": 10.0}).items()},
        pieces=tuple(pieces),
        **more,
    )


def run_of(*steps, engines=1, apart=False):
    return MeasuredRun(engines=engines, apart=apart, steps=steps)


# -- pieces ------------------------------------------------------------------------------------------------------------


def test_one_piece_takes_what_the_price_list_says():
    ran = run_pieces([Piece(0, 8, 30)], Engines(model=PRICES, count=1))
    assert ran.decode_s == pytest.approx(PRICES.steps_s(1, 8, 30), rel=1e-6)
    assert (ran.end_s, ran.rows, ran.tokens) == (pytest.approx(ran.decode_s), 1.0, 30)


def test_equal_pieces_run_together_and_queue_by_slots():
    pieces = [Piece(i, 8, 10) for i in range(8)]
    ran = run_pieces(pieces, Engines(model=PRICES, count=1))
    assert ran.decode_s == pytest.approx(2 * PRICES.steps_s(4, 32, 10), rel=1e-6)
    assert ran.rows == 4


def test_engines_that_are_done_wait_for_the_last():
    ran = run_pieces([Piece(0, 8, 10), Piece(1, 8, 30)], Engines(model=PRICES, count=2))
    assert ran.end_s == pytest.approx(PRICES.steps_s(1, 8, 30), rel=1e-6)
    assert ran.decode_s == pytest.approx((PRICES.steps_s(1, 8, 30) + PRICES.steps_s(1, 8, 10)) / 2, rel=1e-6)


def test_rollouts_keep_the_engine_that_had_a_slot_for_them():
    """Launched long, short, long, short on two engines with free slots: one has both long ones."""
    pieces = [Piece(i, 8, 10 if i % 2 else 100) for i in range(4)]
    ran = run_pieces(pieces, Engines(model=PRICES, count=2))
    assert ran.end_s == pytest.approx(PRICES.steps_s(2, 16, 100), rel=1e-6)
    assert ran.rows == 2
    waits = run_pieces(
        [Piece(9, 8, 10), *pieces, *(Piece(20 + i, 8, 1) for i in range(4))], Engines(model=PRICES, count=2)
    )
    assert waits.end_s < PRICES.steps_s(4, 32, 111)  # what found no slot goes to whoever has least to do


def test_tool_calls_of_a_piece_add_to_its_end_and_not_to_decoding():
    still = run_pieces([Piece(0, 8, 30)], Engines(model=PRICES, count=1))
    ran = run_pieces([Piece(0, 8, 30, waits=2, tool_s=3.0)], Engines(model=PRICES, count=1))
    assert ran.end_s == pytest.approx(still.end_s + 3.0, rel=1e-3)
    assert ran.decode_s == pytest.approx(still.decode_s, rel=1e-3)


def test_a_step_without_pieces_has_no_phase():
    with pytest.raises(ValueError, match="without a piece"):
        run_pieces([], Engines(model=PRICES, count=1))


sizes = st.lists(st.integers(1, 200), min_size=1, max_size=24)


@settings(max_examples=40, deadline=None)
@given(sizes, st.integers(1, 4))
def test_pieces_are_all_made_within_the_bounds(tokens, engines):
    ran = run_pieces([Piece(i, 8, n) for i, n in enumerate(tokens)], Engines(model=PRICES, count=engines))
    alone = PRICES.steps_s(1, 8, max(tokens))
    assert ran.tokens == sum(tokens)
    assert ran.end_s >= alone * (1 - 1e-6)
    assert ran.decode_s <= ran.end_s * (1 + 1e-9)
    assert 0 < ran.rows <= PRICES.slots


# -- stages ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("pieces", [(), tuple(Piece(i, 8, 25) for i in range(8))], ids=["expected", "pieces"])
@pytest.mark.parametrize("apart", [False, True])
@pytest.mark.parametrize("k", [0, 1])
def test_stages_add_up(pieces, apart, k):
    schedule = Schedule(colocated=not apart, max_staleness=k, depth=1.0 + 0.25 * k)
    found = reconcile(run_of(step(pieces=pieces), apart=apart), assumed(schedule=schedule))
    seconds = found.steps[0].seconds
    assert tuple(seconds) == STAGES
    assert all(value >= 0 for value in seconds.values())
    assert sum(seconds[name] for name in GENERATE) == pytest.approx(seconds["generate"])
    train = 0.0 if apart else seconds["train"]
    parts = seconds["generate"] + seconds["publish"] + seconds["switch"] + train
    assert parts == pytest.approx(seconds["step"])
    assert seconds["train"] == pytest.approx(264 * 0.01 + 0.5)
    assert seconds["switch"] == (0.0 if apart else 1.0)
    assert seconds["prefill"] == pytest.approx(64 * 1e-4)


def test_a_streamed_part_is_not_waited_for():
    pieces = tuple(Piece(i, 8, 25) for i in range(8))
    price = TrainPrice(token_s=0.01, step_s=0.5, beside=0.5)
    whole, streamed = (
        reconcile(run_of(step(pieces=pieces, streamed=share)), assumed(train=price)).steps[0].seconds
        for share in (0.0, 0.5)
    )
    assert whole["step"] - streamed["step"] == pytest.approx(0.5 * 2.64)
    assert streamed["train"] - whole["train"] == pytest.approx(0.5 * 2.64)  # at half the speed, beside the tail


@settings(max_examples=25, deadline=None)
@given(st.lists(st.floats(0.5, 3.0), min_size=1, max_size=5))
def test_the_run_is_the_sum_of_its_steps(scales):
    steps = [step(n + 1, scale=scale, pieces=[Piece(0, 8, 200)]) for n, scale in enumerate(scales)]
    found = reconcile(run_of(*steps), assumed())
    data = as_json(found)
    for name in STAGES:
        for kind in ("forecast_s", "measured_s"):
            assert data["stages"][name][kind] == pytest.approx(sum(one["stages"][name][kind] for one in data["steps"]))
    assert data["stages"]["decode"]["ratio"] == pytest.approx(
        data["stages"]["decode"]["measured_s"] / data["stages"]["decode"]["forecast_s"]
    )


def test_the_factors_of_decoding_multiply_to_its_ratio():
    found = reconcile(run_of(step(pieces=[Piece(i, 8, 50) for i in range(4)])), assumed())
    steps, price = found.decode_factors()
    assert steps * price == pytest.approx(found.stages["decode"].ratio)
    assert (found.rows, found.forecast_rows) == (4.0, pytest.approx(4.0))


# -- losses ------------------------------------------------------------------------------------------------------------


amounts = st.integers(0, 1000).map(lambda tenths: tenths / 10)


@settings(max_examples=80, deadline=None)
@given(st.lists(amounts, min_size=len(CAUSES), max_size=len(CAUSES)), st.booleans(), st.integers(1, 5), amounts)
def test_losses_sum_to_one(spent, apart, engines, train):
    account = dict(zip(CAUSES, spent, strict=True))
    account["total"] = sum(spent)
    one = step(decode_flops=3e9, prefill_flops=2e8, train_flops=9e9)
    seconds = dict(one.seconds) | {"train": train}
    run = run_of(MeasuredStep(step=1, seconds=seconds, work=one.work, engine_s=account), engines=engines, apart=apart)
    found = losses(run, 1e9)
    if account["total"] > 0:
        assert sum(loss.share for loss in found) == pytest.approx(1.0, abs=1e-9)
        machines = account["total"] * (1 + 1 / engines if apart else 1)
        assert found[0].share == pytest.approx(12.2 / machines)
    else:
        assert found == ()


def test_losses_by_hand():
    """10 s on one machine of 1 GFLOP/s: 4 s decoded with 1 GFLOP in it, 3 s trained with 2."""
    found = {loss.name: loss.share for loss in losses(run_of(step(decode_flops=1e9, train_flops=2e9)), 1e9)}
    assert found == {
        "useful FLOP": pytest.approx(0.3),
        "decode below peak": pytest.approx(0.3),
        "prefill below peak": pytest.approx(0.05),
        "train below peak": pytest.approx(0.1),
        "tail": pytest.approx(0.1),
        "queue": pytest.approx(0.04),
        "reward": pytest.approx(0.01),
        "sync": pytest.approx(0.03),
        "switch": pytest.approx(0.07),
    }


def test_without_a_model_there_is_no_mfu():
    found = reconcile(run_of(step()), assumed())
    assert found.mfu is None
    assert found.train_mfu is None
    assert sum(loss.share for loss in found.losses) == pytest.approx(1.0, abs=1e-9)


# -- in words ----------------------------------------------------------------------------------------------------------


def test_emptier_rows_and_dearer_steps_are_told_apart():
    pieces = [Piece(i, 8, 50) for i in range(4)]
    emptier = reconcile(run_of(step(pieces=pieces, batch_steps=((1, 200.0),))), assumed())
    line = next(line for line in emptier.off if line.startswith("decode"))
    assert "rows were 1, forecast 4" in line
    assert "tail" in line
    steps, price = emptier.decode_factors()
    assert steps > 2
    assert price < 1
    dearer = reconcile(run_of(step(pieces=pieces, batch_steps=((4, 50.0),))), assumed())
    assert dearer.decode_factors() == (
        pytest.approx(1.0, rel=0.01),
        pytest.approx(dearer.stages["decode"].ratio, rel=0.01),
    )


def test_train_is_told_by_its_mfu():
    one = step(pieces=[Piece(0, 8, 200)], train_flops=9e8)
    found = reconcile(run_of(one), assumed(train=TrainPrice(flop_s=1 / (0.9 * 1e9))), peak=1e9, train_mfu=0.9)
    assert found.train_mfu == pytest.approx(0.3)
    assert any(line.startswith("train: measured 3 x the forecast: MFU 0.3 measured, 0.9 assumed") for line in found.off)


def test_what_is_alike_is_not_spoken_of():
    found = reconcile(run_of(step(pieces=[Piece(0, 8, 200)])), assumed())
    said = [line.split(":")[0] for line in found.off]
    assert "publish" not in said  # 0.25 s of 10 s, and the difference below 2 %
    ratios = [found.stages[name].ratio for name in said]
    assert all(ratio is None or abs(ratio - 1) > 0.1 for ratio in ratios)


@pytest.mark.parametrize("name", ["decode", "prefill", "score", "waiting", "train", "publish", "switch"])
@pytest.mark.parametrize("spent", [0.0, 7.4e-7])
def test_a_stage_that_did_not_happen_is_none_and_no_tiny_ratio(name, spent):
    """Nor is one that was not forecast a huge one."""
    found = reconcile(run_of(step(pieces=[Piece(0, 8, 200)])), assumed())
    assert f"{name}: measured none, forecast 13.9 s" in _SAY[name](found, Pair(13.9, spent))
    assert f"{name}: measured 13.9 s, forecast none" in _SAY[name](found, Pair(1e-9, 13.9))
