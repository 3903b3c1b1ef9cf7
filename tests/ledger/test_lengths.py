"""Lengths: means that hold under the cap, the longest of a batch with siblings alike, and agreement with the draws."""

import math
from hashlib import sha256
from statistics import NormalDist, fmean
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.errors import UserError
from gruppetto.ledger.lengths import LognormalLengths, Tools, TracedLengths
from gruppetto.sim.workload.families import FAMILIES
from gruppetto.sim.workload.generator import Workload
from gruppetto.sim.workload.published import PUBLISHED

few = settings(max_examples=25, deadline=None)


def like(workload: Workload) -> LognormalLengths:
    """The lengths that `workload` draws."""
    return workload.lengths


# -- one response ------------------------------------------------------------------------------------------------------


@few
@given(
    mean=st.floats(50, 5000),
    cv=st.floats(0.1, 1.5),
    room=st.floats(2.5, 30),
    icc=st.floats(0, 1),
    q0=st.floats(0, 0.01),
)
def test_the_mean_holds_after_the_cut(mean: float, cv: float, room: float, icc: float, q0: float) -> None:
    cap = int(mean * room) + 1
    lengths = LognormalLengths.from_mean_cv(mean, cv, cap, icc, q0=q0)
    assert lengths.mean == pytest.approx(mean, rel=0.01)
    assert lengths.icc == pytest.approx(icc)
    assert lengths.quantile(1.0) <= cap
    assert lengths.cdf(cap) == 1.0


def test_responses_of_one_length() -> None:
    lengths = LognormalLengths.from_mean_cv(8192, 0.0, 32_768)
    assert lengths.mean == pytest.approx(8192, rel=1e-4)
    assert lengths.longest(512, 16) == pytest.approx(8192, rel=1e-4)
    assert lengths.cv == pytest.approx(0, abs=1e-3)
    at_cap = LognormalLengths.from_mean_cv(8192, 0.0, 8192)
    assert at_cap.mean == pytest.approx(8192, rel=1e-4)
    assert sum(tokens for _, tokens in at_cap.typical(64)) == pytest.approx(64 * 8192, rel=1e-3)


@few
@given(share=st.floats(0.02, 0.98))
def test_cdf_and_quantile_are_inverse(share: float) -> None:
    lengths = LognormalLengths.from_mean(2600, sigma=0.85, icc=0.05, cap=32_768)
    assert lengths.cdf(lengths.quantile(share)) == pytest.approx(share, abs=1e-6)


def test_it_is_the_simulators_workload() -> None:
    ours = LognormalLengths.from_mean(1050, sigma=0.9, icc=0.05, cap=32_768, q0=0.004)
    theirs = FAMILIES["A"].workload
    assert (ours.mu, ours.s_b, ours.s_w) == pytest.approx((theirs.mu, theirs.s_b, theirs.s_w), rel=1e-6)
    by_cv = LognormalLengths.from_mean_cv(7700, 1.0, 40_960, 0.86)
    assert by_cv.mu == pytest.approx(FAMILIES["C"].workload.mu, rel=1e-6)
    assert like(FAMILIES["R"].workload).runaways == pytest.approx(FAMILIES["R"].workload.runaways)


def test_what_contradicts_itself_is_refused_with_what_works() -> None:
    with pytest.raises(UserError, match=r"cap = 1,024 is below the mean of 8,192 tokens.*write a cap of 8,192 or more"):
        LognormalLengths.from_mean_cv(8192, 1.0, 1024)
    with pytest.raises(UserError, match="cuts more than half") as found:
        LognormalLengths.from_mean_cv(8000, 1.0, 9000)
    assert "cap of" in str(found.value)
    with pytest.raises(UserError, match=r"with cap = 32,768, sigma = 0.9 and 10.00% runaways the mean lies from 3,27"):
        LognormalLengths.from_mean(1000, sigma=0.9, icc=0.1, cap=32_768, q0=0.1)
    with pytest.raises(UserError, match="cv = -1"):
        LognormalLengths.from_mean_cv(100, -1, 1000)
    with pytest.raises(UserError, match="icc = 2"):
        LognormalLengths.from_median(100, 1.0, 2, 1000)
    with pytest.raises(UserError, match=r"write \.99"):
        LognormalLengths.from_median(100, 1.0, 0.2, 1000).quantile(99)


def test_the_cap_that_the_refusal_names_works() -> None:
    with pytest.raises(UserError) as found:
        LognormalLengths.from_mean_cv(8000, 1.0, 9000)
    cap = int(str(found.value).split("a cap of ")[1].split(" ")[0].replace(",", "").rstrip(","))
    assert LognormalLengths.from_mean_cv(8000, 1.0, cap + 1).mean == pytest.approx(8000, rel=0.01)


# -- the longest of many -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["A", "D", "R", "E"])
def test_the_longest_of_a_batch_is_that_of_the_draws(name: str) -> None:
    family = FAMILIES[name]
    workload, groups, size = family.workload, 64, family.group_size
    lengths = like(workload)
    drawn = [
        sorted((workload.length(seed, g, m) for g in range(groups) for m in range(size)), reverse=True)
        for seed in range(60)
    ]
    longest = [batch[0] for batch in drawn]
    error = float(np.std(longest)) / len(drawn) ** 0.5
    assert lengths.longest(groups, size) == pytest.approx(fmean(longest), abs=3 * error + 0.02 * fmean(longest))
    ranked = lengths.ranked(groups, size)
    for k in (4, 9, 19, 99):
        values = [batch[k] for batch in drawn]
        error = float(np.std(values)) / len(drawn) ** 0.5
        assert ranked[k] == pytest.approx(fmean(values), abs=3.5 * error + 0.03 * fmean(values)), k
    assert fmean(map(fmean, drawn)) == pytest.approx(lengths.mean, rel=0.06)


@few
@given(groups=st.integers(1, 300), size=st.integers(1, 32), icc=st.sampled_from([0.0, 0.3, 0.8, 1.0]))
def test_more_rollouts_have_a_longer_longest_and_ranks_sum_to_the_batch(groups: int, size: int, icc: float) -> None:
    lengths = LognormalLengths.from_mean_cv(1000, 1.0, 16_384, icc)
    longest = lengths.longest(groups, size)
    assert lengths.mean * 0.999 <= longest <= lengths.cap
    assert lengths.longest(groups + 1, size) >= longest
    assert lengths.longest(groups, size + 1) >= longest * (1 - 1e-9)
    ranked = lengths.ranked(groups, size)
    assert len(ranked) == groups * size
    assert np.all(np.diff(ranked) <= 1e-6 * longest)
    assert ranked[0] == pytest.approx(longest, rel=1e-6)
    assert ranked.sum() == pytest.approx(groups * size * lengths.mean, rel=0.02)


def test_siblings_that_are_alike_count_for_fewer() -> None:
    longest = [LognormalLengths.from_mean_cv(1000, 1.0, 65_536, icc).longest(32, 16) for icc in (0.0, 0.5, 0.9, 1.0)]
    assert longest == sorted(longest, reverse=True)
    one = LognormalLengths.from_mean_cv(1000, 1.0, 65_536, 1.0)
    assert one.longest(32, 16) == pytest.approx(one.longest(32, 1), rel=0.01), "a group of equals is one draw"


def test_typical_responses_have_the_mean_and_the_siblings_of_all() -> None:
    lengths = like(FAMILIES["C"].workload)
    typical = lengths.typical(512)
    assert fmean(tokens for _, tokens in typical) == pytest.approx(lengths.mean, rel=0.002)
    ranks, logs = np.array([rank for rank, _ in typical]), np.log([tokens for _, tokens in typical])
    order = np.argsort(np.argsort(ranks))
    assert np.corrcoef(order, logs)[0, 1] > 0.85, "ICC .86: the prompt decides"


# -- traces ------------------------------------------------------------------------------------------------------------


def test_a_trace_is_what_it_was() -> None:
    trace = TracedLengths.of([100, 200, 300, 4000], ["a", "a", "b", "b"])
    assert trace.mean == pytest.approx(1150, rel=0.001)
    assert trace.cap == 4000
    assert trace.quantile(0.5) == pytest.approx(200, rel=0.01)
    assert trace.longest(1000, 2) == pytest.approx(4000)
    assert trace.cdf(250) == pytest.approx(0.5)
    with pytest.raises(UserError, match="no lengths"):
        TracedLengths.of([])
    with pytest.raises(UserError, match="1 lengths and 2 group"):
        TracedLengths.of([1], ["a", "b"])


def test_a_trace_of_draws_says_what_their_distribution_says() -> None:
    workload = FAMILIES["C"].workload
    drawn = [(workload.length(7, g, m), g) for g in range(800) for m in range(8)]
    trace, lengths = TracedLengths.of([n for n, _ in drawn], [g for _, g in drawn]), like(workload)
    assert trace.mean == pytest.approx(lengths.mean, rel=0.08)
    assert trace.icc == pytest.approx(lengths.icc, abs=0.05)
    assert trace.longest(32, 8) == pytest.approx(lengths.longest(32, 8), rel=0.06)
    assert trace.ranked(32, 8).sum() == pytest.approx(256 * trace.mean, rel=0.02)


# -- tools -------------------------------------------------------------------------------------------------------------


def test_tool_calls_by_their_mean_and_their_tail() -> None:
    tools = Tools(turn_tokens=250, median_s=0.4, sigma=1.7, stuck_share=0.002, stuck_s=(120.0, 600.0))
    assert tools.mean_s == pytest.approx(0.998 * 0.4 * np.exp(1.7**2 / 2) + 0.002 * 360)
    seconds, below = tools.waits((1, 16))
    for count, row in zip((1, 16), below, strict=True):
        assert float((1 - row).sum() * seconds[1]) == pytest.approx(count * tools.mean_s, rel=0.01)
    at = float(np.interp(200.0, seconds, below[0]))
    assert 1 - at == pytest.approx(tools.above(200.0), rel=0.02)
    assert 1 - float(np.interp(200.0, seconds, below[1])) == pytest.approx(16 * tools.above(200.0), rel=0.35)
    assert tools.above(0) == pytest.approx(1.0, abs=1e-6)
    assert tools.above(tools.call_s(0.9)) == pytest.approx(0.1, abs=1e-6)
    assert Tools.from_mean(30.0, turn_tokens=100, sigma=1.0).mean_s == pytest.approx(30.0)
    with pytest.raises(UserError, match="turn_tokens = 0"):
        Tools(turn_tokens=0)


def test_typical_calls_stand_for_all_and_are_the_same_from_wherever_they_are_taken() -> None:
    tools = Tools.from_mean(30.0, turn_tokens=100, sigma=1.0)
    later = tools.typical(3, first=2000)
    many = tools.typical(4000)
    assert fmean(many) == pytest.approx(30.0, rel=0.01)
    assert tools.typical(3, first=2000) == later == many[2000:2003]
    assert later != many[:3]


# -- what the simulator draws ------------------------------------------------------------------------------------------


def _digest(demand: Workload) -> str:
    found = sha256()
    for seed in (0, 7):
        for group in range(150):
            for member in range(4):
                whole = demand.prompt(seed, group), demand.length(seed, group, member)
                again = demand.length(seed, group, member, f"t{group % 5}"), demand.turns(seed, group, member)
                found.update(repr((*whole, *again)).encode())
    return found.hexdigest()[:16]


@pytest.mark.parametrize(
    ("name", "digest"),
    [
        ("A", "72c1a39ebddd02b6"),
        ("C", "8ce04a002d70d2c6"),
        ("E", "8c6a2925b3e13041"),
        ("R", "93b54c2305a3e99a"),
        ("rollpacker-16k", "8c7a867d910625e4"),
        ("search-r1", "33b56feeb4982487"),
    ],
)
def test_named_workloads_stay_what_they_were(name: str, digest: str) -> None:
    """Their draws are in the figures of docs and tests: a change of them is a change of all those."""
    workload = FAMILIES[name].workload if name in FAMILIES else PUBLISHED[name].workload
    assert _digest(workload) == digest


def test_a_workload_with_runaway_prompts_and_drift_stays_what_it_was() -> None:
    more: dict[str, Any] = {
        "q0": 0.0001,
        "runaway_prompts": 0.1,
        "runaway_rate": (0.1, 0.5),
        "drift": 2.0,
        "drift_groups": 50,
    }
    sigma = math.log(10) / NormalDist().inv_cdf(0.99)
    assert _digest(Workload.from_mean(4000, sigma, 0.5, 20_000, **more)) == "528eb52a28f0bb8a"


@given(mean=st.floats(1, 4000), sigma=st.floats(0, 1.5), icc=st.floats(0, 1), q0=st.sampled_from([0.0, 0.004]))
def test_the_simulator_and_the_forecast_have_the_same_lengths(mean: float, sigma: float, icc: float, q0: float) -> None:
    try:
        drawn = Workload.from_mean(mean, sigma, icc, 8192, q0=q0, turn_tokens=100)
    except UserError:
        assert mean < LognormalLengths.means(sigma, icc, 8192, q0=q0)[0]
        return
    assert drawn.lengths == LognormalLengths.from_mean(mean, sigma, icc, 8192, q0=q0)
    assert drawn.mean == pytest.approx(mean)
