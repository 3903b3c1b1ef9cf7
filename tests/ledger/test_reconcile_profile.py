"""Profiles of machines: the file that stands for a GPU, and the fits that its figures come from."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.machines.efficiency import DEFAULT, efficiency_of
from gruppetto.ledger.machines.engines import engine_model
from gruppetto.ledger.machines.gpus import GPU, gpu_of
from gruppetto.ledger.machines.profile import profile_efficiency, profile_text
from gruppetto.ledger.models.catalog import model_of
from gruppetto.profile.fit import Step, Work, fit_decode, fit_pieces, fit_share, line

MACHINE = GPU(name='A "quoted" CPU', bf16_flops=4e11, fp32_flops=5e10, bandwidth=2e10, memory=25e9, gpus_per_node=2)


def measured(**fields):
    return replace(DEFAULT, name="measured", origin="measured here", own=frozenset(fields), **fields)


@settings(max_examples=30, deadline=None)
@given(st.floats(1e9, 1e15), st.floats(1e-4, 1.0), st.floats(0, 10), st.floats(1e6, 1e12))
def test_what_is_written_is_read_back(tmp_path_factory, flops, share, seconds, rate):
    gpu = replace(MACHINE, bf16_flops=flops)
    efficiency = measured(train=share, step_s=seconds, gather=rate)
    path = tmp_path_factory.mktemp("profile") / "profile.toml"
    path.write_text(profile_text(gpu, efficiency, ["a note"]))
    assert gpu_of(str(path)) == gpu
    found = profile_efficiency(str(path))
    assert found == efficiency
    assert found.source("train") == "measured here"
    assert found.source("prefill") == DEFAULT.source("prefill")


def test_a_file_without_efficiency_has_none(tmp_path):
    path = tmp_path / "gpu.toml"
    path.write_text('name = "x"\nbf16_flops = 1e12\nbandwidth = 1e11\nmemory = 1e10\n')
    assert profile_efficiency(str(path)) is None
    assert profile_efficiency("H100") is None
    assert profile_efficiency(str(tmp_path / "absent.toml")) is None


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("trian = 0.4", "did you mean train"),
        ("train = true", "plain number"),
        ('train = "0.4"', "plain number"),
        ("train = nan", "plain number"),
        ("train = 1.5", "to 1; write train=0.5"),
        ("gather = 0.0", "1000 or more"),
    ],
)
def test_a_wrong_figure_is_refused(tmp_path, line, says):
    path = tmp_path / "profile.toml"
    path.write_text(f"[efficiency]\n{line}\n")
    with pytest.raises(UserError, match=says):
        profile_efficiency(str(path))


def test_plan_takes_what_the_file_measured_unless_a_set_is_named(tmp_path):
    from gruppetto.cli.plan_arguments import efficiency_asked

    path = tmp_path / "profile.toml"
    path.write_text(profile_text(MACHINE, measured(train=0.25), []))
    assert efficiency_asked([], str(path)).train == 0.25
    assert efficiency_asked(["engine=0.5"], str(path)).train == 0.25
    assert efficiency_asked(["verl"], str(path)) == efficiency_of("verl")
    assert efficiency_asked([], "H100") == DEFAULT


def test_weights_in_32_bits_meet_their_own_peak():
    assert MACHINE.peak("fp32") == 5e10
    assert MACHINE.peak("bf16") == 4e11
    assert gpu_of("H100").peak("fp32") == gpu_of("H100").bf16_flops


# -- fits --------------------------------------------------------------------------------------------------------------


def test_prices_of_decoding_are_found_again():
    model = model_of("Qwen3-0.6B")
    true = replace(DEFAULT, step_s=2e-3, row_s=3e-4, decode_bandwidth=0.64, decode_compute=0.512)
    prices = engine_model(model, MACHINE, slots=1, dtype="fp32", kv_dtype="fp32", efficiency=true, kv_capacity=0)
    points = [(rows, rows * context) for rows in (1, 4, 16, 64) for context in (10, 200, 2000)]
    found = fit_decode(model, MACHINE, "fp32", [Step(rows, kv, prices.step_s(rows, kv)) for rows, kv in points])
    assert found.error < 1e-6
    again = engine_model(
        model, MACHINE, slots=1, dtype="fp32", kv_dtype="fp32", kv_capacity=0,
        efficiency=DEFAULT.but(**found.fields),
    )  # fmt: skip
    for rows, kv in ((8, 800), (32, 3200)):
        assert again.step_s(rows, kv) == pytest.approx(prices.step_s(rows, kv), rel=1e-3)


shares, costs = st.floats(0.01, 1.0), st.floats(0.0, 0.1)


@settings(max_examples=50, deadline=None)
@given(shares, costs)
def test_share_and_pieces_are_found_again(share, each):
    done = [
        Work(flops, pieces, flops / (1e10 * share) + pieces * each) for flops, pieces in ((1e8, 1), (3e9, 4), (2e9, 1))
    ]
    found = fit_pieces("train", "micro_batch_s", 1e10, done)
    assert found.fields["train"] == pytest.approx(share, rel=1e-6)
    assert found.fields["micro_batch_s"] == pytest.approx(each, abs=1e-9)
    assert found.error < 1e-6


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.floats(1, 100), st.floats(1e-3, 10)), min_size=1, max_size=8))
def test_nothing_found_is_negative(points):
    xs, ys = [x for x, _ in points], [y for _, y in points]
    base, slope = line(xs, ys, ys)
    assert base >= 0
    assert slope >= 0
    works = [Work(x * 1e9, 1, y) for x, y in points]
    for fit in (fit_share("prefill", 1e10, works), fit_pieces("train", "micro_batch_s", 1e10, works)):
        assert all(value >= 0 for value in fit.fields.values())
        assert DEFAULT.but(**fit.fields)  # a share above 1 would be refused


def test_one_measurement_is_all_share_and_says_that_its_error_is_not_known():
    found = fit_pieces("train", "micro_batch_s", 1e10, [Work(1e9, 1, 0.5)])
    assert found.fields == {"train": pytest.approx(0.2), "micro_batch_s": 0.0}
    assert found.words == "one point, so no error is known"
    assert fit_share("prefill", 1e10, [Work(1e9, 1, 0.5), Work(2e9, 1, 1.0)]).words == "error 0% over 2 points"


def test_a_share_of_nothing_is_no_share():
    with pytest.raises(ValueError, match="nothing was measured"):
        fit_share("prefill", 1e10, [])
    with pytest.raises(ValueError, match="no decode step"):
        fit_decode(model_of("Qwen3-0.6B"), MACHINE, "fp32", [])
