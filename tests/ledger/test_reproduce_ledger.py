"""The ledger's reproductions: every public record has a place, rows depend on what is computed, the command."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.cli.main import main
from gruppetto.ledger.machines.efficiency import SETS
from gruppetto.ledger.machines.gpus import GPUS
from gruppetto.ledger.models.catalog import model_of
from gruppetto.ledger.reproduce import beyond, decode, steps, syncs, training
from gruppetto.ledger.reproduce.catalogue import NOT_PREDICTED, SCHEDULERS, STUDIES, apart, as_json, chosen
from gruppetto.ledger.reproduce.counting import share_within
from gruppetto.ledger.reproduce.study import carry_out, exact, ranged, times
from gruppetto.sim.reproduce.catalogue import NOT_OURS
from gruppetto.sim.reproduce.catalogue import STUDIES as SIMULATED

RECORDS = [
    "seer-moonlight",
    "seer-qwen2vl72b",
    "seer-partial-rollout",
    "seer-group-sd-accept",
    "rollpacker-fig11",
    "rollpacker-preempt",
    "april-throughput",
    "verl-fa-7b-32",
    "verl-fa-7b-128",
    "verl-fa-require-batches",
    "verl-dynamic-switch",
    "verl-dsv3-96",
    "nemo-30b-sync",
    "nemo-30b-async",
    "nemo-swe",
    "areal-hours",
    "areal-staleness-quality",
    "areal-verl-table",
    "laminar-core",
    "tlt-sd",
    "skyrl-mtp",
    "das",
    "streamrl",
    "llamarl-405b",
    "r1-zero",
    "thunderagent-skyrl",
    "rollart-e2e",
    "rollart-step-breakdown",
    "rollart-production",
    "heddle",
    "sync-delta",
    "sync-nccl-buckets",
    "sync-meituan-ce",
    "sync-nemo",
    "vllm-sleep",
    "offload-slime",
    "train-mfu-prime",
    "train-skyrl-7b",
    "decode-trtllm-8b",
    "decode-single-stream",
    "agent-env-trace",
    "deepswe-sandbox",
    "nemo-gym-swe",
    "hybridflow",
    "a3po-prox",
    "seed-q1",
    "polytrace-dapo32b",
    "polytrace-deepcoder14b",
    "polytrace-search-r1",
    "polytrace-interns1",
    "magistral-async",
    "recipe-dapo",
    "recipe-deepseekmath",
]
"""The table of public numbers."""

BY_ID = {study.id: study for study in STUDIES}


@pytest.fixture(scope="module")
def outcomes():
    """All of them, once."""
    return {study.id: carry_out(study) for study in STUDIES}


# -- every record has a place ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("record", RECORDS)
def test_a_record_is_the_ledgers_the_schedulers_or_has_a_reason(record):
    places = [record in BY_ID, record in SCHEDULERS, record in NOT_PREDICTED]
    assert sum(places) == 1
    assert all(NOT_PREDICTED.values())


def test_there_are_no_other_records():
    assert sorted([*BY_ID, *SCHEDULERS, *NOT_PREDICTED]) == sorted(RECORDS)


def test_the_schedulers_are_simulated_and_what_it_leaves_to_the_ledger_is_here():
    simulated = {study.id for study in SIMULATED}
    assert set(SCHEDULERS) <= simulated
    for record, why in NOT_OURS.items():
        assert ("ledger" in why) == (record in BY_ID), record
        assert record in BY_ID or record in NOT_PREDICTED
    assert set(RECORDS) == simulated | set(NOT_OURS)


# -- how they are made -------------------------------------------------------------------------------------------------


def test_every_study_gives_reasons():
    for study in STUDIES:
        assert all((study.source, study.setting, study.inputs, study.rows, study.says, study.tolerance)), study.id
        assert all(i.name and i.value and i.source for i in study.inputs), study.id
        names = [row.name for row in study.rows]
        assert len(set(names)) == len(names), study.id
        for row in study.rows:
            assert row.low < row.high
            assert row.said if row.published is None else row.holds(row.published)
        assert any(row.fitted for row in study.rows) == any(i.fitted for i in study.inputs), study.id


def test_what_is_beyond_the_table_is_fitted_to_nothing_and_counted_apart(outcomes):
    others = [carry_out(study) for study in beyond.STUDIES]
    assert not any(v.row.fitted for outcome in others for v in outcome.verdicts)
    assert not {study.id for study in beyond.STUDIES} & set(RECORDS)
    records, found = apart([*outcomes.values(), *others])
    assert records == list(outcomes.values())
    assert found == others
    table = as_json([*records, *others])["ledger"]
    assert table["share_within"] == share_within(records)
    assert table["beyond"]["share_within"] == share_within(others)
    assert table["beyond"]["rows"] == 23


def test_all_studies_have_names_of_their_own():
    ids = [study.id for study in (*STUDIES, *beyond.STUDIES)]
    assert len(set(ids)) == len(ids)


def test_sets_that_are_named_exist_and_a_source_has_one_for_each_page():
    for study in STUDIES:
        named = [i.name.removeprefix("set ") for i in study.inputs if i.name.startswith("set ")]
        assert all(name in SETS for name in named), study.id
        assert len(named) <= 1 + study.source.count(" and "), study.id


def test_at_least_85_percent_within_and_misses_have_a_reason(outcomes):
    assert share_within(list(outcomes.values())) >= 0.85
    for outcome in outcomes.values():
        for verdict in outcome.verdicts:
            assert verdict.within or verdict.row.doubt, (outcome.study.id, verdict.row.name)


def test_a_share_over_rows_not_fitted_is_over_those_only(outcomes):
    rows = [v for outcome in outcomes.values() for v in outcome.verdicts if not v.row.fitted]
    assert 0.4 < len(rows) / sum(len(o.verdicts) for o in outcomes.values()) < 0.6
    expected = sum(v.within for v in rows) / len(rows)
    assert share_within(list(outcomes.values()), predicted=True) == pytest.approx(expected)


def test_a_share_over_forecasts_leaves_out_what_is_fitted_and_what_is_arithmetic(outcomes):
    """Sizes of recipes, a paper's own formula, a worked example and figures that follow from others cannot miss."""
    rows = [v for outcome in outcomes.values() for v in outcome.verdicts if not (v.row.fitted or v.row.arithmetic)]
    table = as_json(list(outcomes.values()))["ledger"]
    assert table["forecast_share_within"] == pytest.approx(sum(v.within for v in rows) / len(rows))
    assert table["rows_forecast"] == len(rows) == 29
    assert table["rows_arithmetic"] == 29
    assert table["forecast_share_within"] < table["predicted_share_within"] < table["share_within"]
    for record in ("recipe-dapo", "recipe-deepseekmath", "deepswe-sandbox", "nemo-gym-swe", "hybridflow", "seed-q1"):
        assert all(v.row.arithmetic for v in outcomes[record].verdicts), record
    assert not any(v.row.fitted and v.row.arithmetic for outcome in outcomes.values() for v in outcome.verdicts)


@pytest.mark.parametrize(
    ("name", "change", "record"),
    [
        ("verl-delta", {"gather": 20e9, "gather_experts": 20e9}, "sync-delta"),
        ("trtllm", {"decode_bandwidth": 0.6}, "decode-trtllm-8b"),
        ("prime-rl", {"micro_batch_s": 0.0}, "train-mfu-prime"),
        ("vllm-sleep", {"disk_read": 0.5e9}, "vllm-sleep"),
        ("verl-checkpoint-engine", {"gather": 20e9, "gather_experts": 20e9}, "sync-nccl-buckets"),
    ],
)
def test_another_set_misses(monkeypatch, outcomes, name, change, record):
    """A row is what its set makes it, not what is published."""
    monkeypatch.setitem(SETS, name, SETS[name].but(**change))
    assert carry_out(BY_ID[record]).hits < outcomes[record].hits


# -- rows --------------------------------------------------------------------------------------------------------------


@given(st.floats(1e-3, 1e6), st.floats(1.01, 10), st.floats(0.01, 100))
def test_a_factor_is_a_band_on_both_sides(published, factor, ratio):
    row = times("r", published, factor)
    if ratio < factor * (1 - 1e-9) and 1 / ratio < factor * (1 - 1e-9):
        assert row.holds(published * ratio)
    if ratio > factor * (1 + 1e-9) or 1 / ratio > factor * (1 + 1e-9):
        assert not row.holds(published * ratio)


def test_ranges_and_exact_rows():
    row = ranged("r", 2.0, 4.0, 0.25)
    assert [row.holds(value) for value in (1.49, 1.51, 4.99, 5.01)] == [False, True, True, False]
    assert exact("e", 8192).holds(8192.0)
    assert not exact("e", 8192).holds(8193.0)


# -- figures by hand ---------------------------------------------------------------------------------------------------


def test_tokens_of_a_published_mfu_by_hand():
    """Qwen3-4B at 64k: 13.9 % and 35.4 % of 8 x 989 TFLOP/s over 6 N + 12 x 36 x 2,560 x length."""
    bench = training.BENCHES[1]
    flops = 6 * 4_022_468_096 + 12 * 36 * 2560 * 65_536
    assert training.at_mfu(bench) == pytest.approx(0.354 * 8 * 989e12 / flops)
    assert training.at_mfu(bench) == pytest.approx(28_970, rel=0.005)


def test_a_single_stream_is_weights_over_bandwidth_and_a_step():
    rates = decode.SINGLE.predict()
    read = 2 * (7_615_616_512 - 152_064 * 3584)
    kv = 500 * 2 * 28 * 4 * 128 * 2
    assert rates["H100"] == pytest.approx(1 / (1.9e-3 + (read + kv) / (3.35e12 * 0.95)), rel=1e-3)


def test_8k_tokens_each_by_hand(outcomes):
    found = {verdict.row.name: verdict.value for verdict in outcomes["seed-q1"].verdicts}
    assert found["tokens"] == pytest.approx(512 * 16 * 8192)
    assert found["KV of all, TiB"] == pytest.approx(8192 * 8192 * 2 * 32 * 8 * 128 * 2 / 2**40)
    forward = 2 * (8_030_261_248 - 128_256 * 4096) + 4 * 32 * 128 * 32 * (8192 + 1) / 2
    assert found["training, seconds"] == pytest.approx(3 * forward * 2**26 / (64 * 989e12 * 0.40), rel=1e-3)


def test_lending_by_hand():
    """16 + 16 takes 1, 24 + 8 takes .825 / .847: 16 and 7.79 GPU-steps of work on 32 GPUs, and a 20th of a step lost on
    16 of them."""
    saved = steps.LENDING.predict()["saved over 16 + 16"]
    assert saved == pytest.approx(1 - (16 + 8 * 0.825 / 0.847 + 16 * 10 / 200) / 32)


@given(st.sampled_from(sorted(syncs.DELTA)), st.floats(0.0, 0.3))
def test_fewer_changes_are_never_slower(name, density):
    case = syncs.DELTA[name][0]
    more = syncs.Case(**{field: getattr(case, field) for field in case.__slots__} | {"density": density + 0.01})
    less = syncs.Case(**{field: getattr(case, field) for field in case.__slots__} | {"density": density})
    assert less.delta_s(SETS["verl-delta"]) <= more.delta_s(SETS["verl-delta"])


def test_longer_answers_make_a_longer_cycle():
    assert steps.zero_s(4000) < steps.zero_s(6000) < steps.zero_s(8000)


def test_models_that_stand_in_are_named_as_such():
    assert model_of("GLM-4.5-Air").params > 100e9
    assert "GLM-4.5-Air" in [i.value for i in training.PRIME.inputs]
    assert set(decode.ALONE) <= set(GPUS)


# -- the command -------------------------------------------------------------------------------------------------------


def test_the_command_prints_and_writes(tmp_path, capsys):
    target = tmp_path / "table.json"
    assert main(["reproduce", "ledger", "--json", str(target)]) == 0
    shown = capsys.readouterr().out
    for text in (
        "sync-delta",
        "MISS",
        "FITTED",
        "(arithmetic)",
        "neither fitted nor arithmetic",
        "Not for a ledger to predict",
        "llamarl-405b",
        "no input was fitted",
        "Beyond the table",
    ):
        assert text in shown
    table = json.loads(target.read_text())["ledger"]
    assert table["share_within"] >= 0.85
    assert {record["id"] for record in table["records"]} == set(BY_ID)
    assert set(table["not_predicted"]) == set(NOT_PREDICTED)


def test_records_can_be_chosen(capsys):
    assert main(["reproduce", "ledger", "recipe", "--json", "-"]) == 0
    table = json.loads(capsys.readouterr().out)["ledger"]
    assert [record["id"] for record in table["records"]] == ["recipe-dapo", "recipe-deepseekmath"]
    assert table["share_within"] == 1.0
    assert [study.id for study in chosen(["sync-n"])] == ["sync-nccl-buckets", "sync-nemo"]


def test_an_unknown_record_is_refused_with_where_it_is(capsys):
    assert main(["reproduce", "ledger", "april"]) == 2
    assert "the scheduler's" in capsys.readouterr().err
    assert main(["reproduce", "ledger", "llamarl"]) == 2
    assert "not published" in capsys.readouterr().err
    assert main(["reproduce", "ledger", "nonsense"]) == 2
    assert "write one of" in capsys.readouterr().err
    assert main(["reproduce", "hybridflow"]) == 2
    assert "gruppetto reproduce ledger" in capsys.readouterr().err


def test_the_ledger_needs_no_heavy_package():
    code = (
        "import sys; from gruppetto.ledger.reproduce.catalogue import STUDIES; "
        "heavy = {'pydantic', 'rich', 'torch', 'gruppetto.sim', 'gruppetto.config'} & set(sys.modules); "
        "assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=250)
