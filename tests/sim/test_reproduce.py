"""Reproductions: how rows count, what a bench runs, what only reproductions need, and the command."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.cli.main import main
from gruppetto.ledger.reproduce.counting import share_within
from gruppetto.ledger.reproduce.study import Study, above, between, carry_out, fit, less, more, points, relative
from gruppetto.scheduler.policies.composed import Composed
from gruppetto.scheduler.policies.static import Static
from gruppetto.sim.engine import EngineModel
from gruppetto.sim.engine.rows import PooledKV
from gruppetto.sim.reproduce.bench import Bench, play
from gruppetto.sim.reproduce.catalogue import NOT_OURS, STUDIES, as_json, chosen
from gruppetto.sim.reproduce.oracle import TrueOrder, lengths_of, longest_first
from gruppetto.sim.reproduce.speculate import BATCHES, accepted, rate_of, speculating
from gruppetto.sim.reproduce.traces import recall
from gruppetto.sim.workload import TraceWorkload, Workload

ENGINE = EngineModel(slots=4, base_s=1.0, prefill_token_s=0.01)


def bench(**changes: object) -> Bench:
    lengths = Workload.from_mean(60, 0.8, 0.5, 400, prompt_tokens=20)
    base = Bench(engine=ENGINE, engines=3, demand=lengths, prompts=9, group=4, cap=400)
    return replace(base, **changes)  # type: ignore[arg-type]


def study(values: dict[str, float], *rows: object) -> Study:
    return Study(id="x", source="", setting="", inputs=(), rows=tuple(rows), predict=lambda: values)  # type: ignore[arg-type]


# -- how rows count ---------------------------------------------------------------------------------------------------


@given(st.floats(0.1, 1e4), st.floats(0.01, 0.9), st.floats(0, 2))
def test_a_relative_band_is_a_share_on_both_sides(published: float, share: float, ratio: float) -> None:
    inside = abs(ratio - 1) < share * (1 - 1e-9)
    outside = abs(ratio - 1) > share * (1 + 1e-9)
    holds = relative("r", published, share).holds(published * ratio)
    assert holds or not inside
    assert not (holds and outside)


def test_points_and_trends() -> None:
    assert points("p", 0.4, 0.1).holds(0.49)
    assert not points("p", 0.4, 0.1).holds(0.51)
    assert above("a", 2.0, 1.0).holds(1.5)
    assert not above("a", 2.0, 1.0).holds(0.9)
    assert less("b").holds(0.9)
    assert not less("b").holds(1.1)
    assert more("m", 2.0).holds(2.1)
    assert not more("m", 2.0).holds(1.9)
    assert between("c", 1.1, 1.3, 0.1).holds(1.39)
    assert not between("c", 1.1, 1.3, 0.1).holds(0.99)
    assert not relative("nan", 1.0, 0.5).holds(math.nan)


def test_fitted_rows_are_told_apart() -> None:
    outcome = carry_out(
        study({"a": 1.0, "b": 9.0, "c": 1.0}, fit(points("a", 1, 0.1)), points("b", 1, 0.1), points("c", 1, 0.1))
    )
    assert outcome.hits == 2
    assert not outcome.within
    assert share_within([outcome]) == pytest.approx(2 / 3)
    assert share_within([outcome], predicted=True) == 0.5
    table = as_json([outcome])["scheduler"]
    assert table["rows"] == 3
    assert table["rows_fitted"] == 1
    assert [row["within"] for row in table["records"][0]["rows"]] == [True, False, True]


def test_a_row_that_is_not_predicted_is_an_error() -> None:
    with pytest.raises(KeyError):
        carry_out(study({}, points("a", 1, 0.1)))


# -- the catalogue ----------------------------------------------------------------------------------------------------


def test_every_study_gives_reasons() -> None:
    ids = [s.id for s in STUDIES]
    assert len(set(ids)) == len(ids)
    assert not set(ids) & set(NOT_OURS)
    for s in STUDIES:
        assert all((s.rows, s.inputs, s.says, s.tolerance)), s.id
        assert all(i.name and i.value and i.source for i in s.inputs), s.id
        names = [row.name for row in s.rows]
        assert len(set(names)) == len(names), s.id
        assert all(
            row.low < row.high and (row.said if row.published is None else row.holds(row.published)) for row in s.rows
        ), s.id


def test_a_fitted_row_has_an_input_that_says_so() -> None:
    for s in STUDIES:
        if any(row.fitted for row in s.rows):
            assert any(i.fitted for i in s.inputs), s.id


# -- the bench --------------------------------------------------------------------------------------------------------


def test_static_binds_a_group_to_one_engine() -> None:
    engines: dict[int, set[str]] = {}

    class Spy(Static):
        def fill(self, view):  # type: ignore[no-untyped-def]
            actions = super().fill(view)
            for action in actions:
                engines.setdefault(int(action.rollout[1:].split(".")[0]), set()).add(action.engine)
            return actions

    run = play(bench(), {"type": "sync"}, policy=lambda spec: Composed("sync", placing=Spy()))
    assert engines == {group: {f"engine-{group % 3}"} for group in range(9)}
    assert len(run.finished) == 36


def test_static_placement_is_no_faster_than_least_loaded() -> None:
    static = play(bench(prompts=30), {"type": "sync"}, policy=lambda spec: Composed("sync", placing=Static()))
    assert static.end_s > play(bench(prompts=30), {"type": "sync"}).end_s


def test_a_bench_is_repeatable_and_its_policies_see_the_same_rollouts() -> None:
    one, two = play(bench(), {"type": "sync"}), play(bench(), {"type": "sync"})
    assert one.finished == two.finished
    other = play(bench(), {"type": "divided", "chunk": 16}, pool_kv=True)
    assert {r: n for r, (_, n) in one.finished.items()} == {r: n for r, (_, n) in other.finished.items()}


def test_tail_share() -> None:
    lengths = TraceWorkload.from_lengths([[10] * 9 + [40]], "in_order")
    model = EngineModel(slots=10, base_s=1.0)
    run = play(Bench(engine=model, engines=1, demand=lengths, prompts=1, group=10, cap=50), {"type": "sync"})
    assert run.end_s == 40
    assert run.tail_share(0.1) == pytest.approx(0.75)


def test_pooled_kv_follows_a_rollout() -> None:
    """Chunks that move pay a prefill without a pool and none with it."""
    chunked = {"type": "divided", "order": "fifo", "chunk": 16}
    tight = bench(engine=replace(ENGINE, kv_capacity=500))
    apart, pooled = (play(tight, {**chunked, "kv_pool": pool}, pool_kv=pool).prefill_tokens for pool in (False, True))
    assert pooled == 36 * 20  # the prompts, once
    assert apart > pooled


def test_a_pool_takes_no_room() -> None:
    pool = PooledKV()
    pool.put("a", 100)
    pool.shrink(0)
    assert pool.total == 0
    assert pool.held("a") == 100
    assert pool.take("a") == 100
    assert pool.take("a") == 0


def test_knowing_lengths_helps() -> None:
    setting = bench(prompts=30, demand=Workload.from_mean(60, 0.8, 0.0, 400, prompt_tokens=20))

    def end_s(longest: bool) -> float:
        def policy(spec):  # type: ignore[no-untyped-def]
            return Composed("sync", order=TrueOrder(lengths_of(spec), longest))

        return play(setting, {"type": "sync"}, policy=policy).end_s

    assert end_s(True) < play(setting, {"type": "sync"}).end_s
    assert end_s(True) < end_s(False)
    assert play(setting, {"type": "sync"}, policy=longest_first(16), pool_kv=True).end_s < end_s(False)


# -- speculation ------------------------------------------------------------------------------------------------------


@given(st.floats(0.0, 0.99), st.integers(1, 12))
def test_rate_of_undoes_accepted(rate: float, drafts: int) -> None:
    assert rate_of(accepted(rate, drafts), drafts) == pytest.approx(rate, abs=1e-6)


@given(st.floats(0, 0.95), st.integers(0, 8), st.floats(0, 1))
def test_speculation_is_never_slower_than_none(rate: float, drafts: int, share: float) -> None:
    plain = EngineModel(slots=512, base_s=0.001, weights_s=0.005, compute_row_s=3e-5, row_s=1e-5, kv_token_s=1e-8)
    fast = speculating(plain, rate=rate, context=500, drafts=drafts, draft_share=share)
    for rows in BATCHES:
        assert fast.step_s(rows, rows * 500) <= plain.step_s(rows, rows * 500) * (1 + 1e-12)


def test_speculation_pays_less_the_fuller_the_batch() -> None:
    plain = EngineModel(slots=2048, base_s=0.001, weights_s=0.005, compute_row_s=5e-5)
    fast = speculating(plain, rate=0.7, context=0, drafts=4)
    gains = [plain.step_s(rows, 0) / fast.step_s(rows, 0) for rows in (1, 64, 1024)]
    assert gains[0] > gains[1] > gains[2] >= 1
    off = speculating(plain, rate=0.7, context=0, drafts=4, below=32)
    assert off.step_s(32, 0) == plain.step_s(32, 0)


# -- recall -----------------------------------------------------------------------------------------------------------


def test_recall_of_probes() -> None:
    alike = [[n, n, n] for n in range(1, 101)]
    assert recall(alike, 1, prompts=100) == 1.0
    hidden = [[1, 1, n] for n in range(1, 101)]  # the first two members say nothing: ties go by position
    assert recall(hidden, 2, prompts=100) == 0.0
    assert recall(hidden, 3, prompts=100) == 1.0


# -- the command ------------------------------------------------------------------------------------------------------


def test_command_prints_and_writes(tmp_path, capsys) -> None:  # type: ignore[no-untyped-def]
    target = tmp_path / "table.json"
    assert main(["reproduce", "polytrace-dapo", "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    assert "polytrace-dapo32b" in shown
    assert "MISS" in shown
    assert "FITTED" in shown
    table = json.loads(target.read_text())["scheduler"]
    assert [record["id"] for record in table["records"]] == ["polytrace-dapo32b"]
    assert 0 < table["share_within"] < 1
    missed = [row for row in table["records"][0]["rows"] if not row["within"]]
    assert missed
    assert all(row["likely_reason"] for row in missed)


def test_json_on_standard_output_is_nothing_else(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["reproduce", "polytrace-interns1", "--json", "-"]) == 0
    assert json.loads(capsys.readouterr().out)["scheduler"]["share_within"] == 1.0


def test_an_unknown_record_is_refused(capsys) -> None:  # type: ignore[no-untyped-def]
    assert main(["reproduce", "hybridflow"]) == 2
    assert "ledger" in capsys.readouterr().err
    assert main(["reproduce", "nonsense"]) == 2
    assert "write one of" in capsys.readouterr().err


def test_choosing_by_part_of_a_name() -> None:
    assert [s.id for s in chosen(["nemo"])] == ["nemo-30b-sync", "nemo-30b-async"]
    assert chosen([]) == list(STUDIES)
