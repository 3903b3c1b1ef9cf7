"""Axes and words of the page: round ticks in one unit, scales that keep order, colours that can be told apart."""

from __future__ import annotations

import math
import re
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.ledger.page import colours
from gruppetto.ledger.page.axes import Scale, ceiling, linear, logarithmic, ticks, unit_of
from gruppetto.ledger.page.numbers import by_name, count, lasting, layout, share, with_unit, words
from gruppetto.ledger.page.style import shipped

HIGH = st.floats(1e-5, 1e17, allow_nan=False)
KINDS = ["s", "bytes", "share", "tokens", "GPUs", ""]


@given(high=HIGH, most=st.integers(3, 10))
def test_linear_ticks_are_round_even_and_few(high: float, most: int) -> None:
    found = linear(0.0, high, most)
    assert found[0] == 0
    assert 2 <= len(found) <= most + 1
    steps = {f"{b - a:.6g}" for a, b in pairwise(found)}
    assert len(steps) == 1
    assert re.fullmatch(r"[125](\.0*)?(e[+-]\d+)?|0\.0*[125]|[125]0*", steps.pop())
    assert found[-1] <= high * (1 + 1e-8)
    assert high - found[-1] < found[1] * (1 + 1e-8)


@given(high=HIGH, kind=st.sampled_from(KINDS))
def test_labels_have_one_unit_and_differ(high: float, kind: str) -> None:
    if kind == "GPUs":
        high = max(high, 1.0)
    found = ticks(Scale(0.0, high, 0.0, 100.0), kind)
    labels = [label for _, label in found]
    assert len(set(labels)) == len(labels) >= 2
    assert labels[0] == "0"
    units = {label.split(" ")[1] for label in labels[1:] if " " in label}
    assert len(units) == (kind in ("s", "bytes", "share"))
    if units:
        name, size = unit_of(kind, high)
        assert units == {name}
        for value, label in found[1:]:
            assert float(label.split(" ")[0]) * size == pytest.approx(value)


@given(low=st.floats(1e-3, 1e6), ratio=st.floats(20, 1e6), kind=st.sampled_from(["s", "bytes", ""]))
def test_logarithmic_ticks_lie_inside_and_are_round(low: float, ratio: float, kind: str) -> None:
    found = ticks(Scale(low, low * ratio, 0.0, 100.0, log=True), kind)
    assert 1 <= len(found) <= 6
    size = unit_of(kind, low * ratio)[1]
    for value, _ in found:
        assert low * (1 - 1e-6) <= value <= low * ratio * (1 + 1e-6)
        assert f"{value / size:e}"[0] in "125"
        assert f"{value / size:.5e}"[1:7] == ".00000"


def test_doublings_are_ticks_of_their_own() -> None:
    assert logarithmic(1024, 65_536, 7, twos=True) == [1024 << n for n in range(7)]
    labels = [label for _, label in ticks(Scale(1024, 65_536, 0, 1, True), "tokens", 7, twos=True)]
    assert labels == ["1k", "2k", "4k", "8k", "16k", "32k", "64k"]
    assert [label for _, label in ticks(Scale(16, 256, 0, 1, True), "GPUs", 7, twos=True)] == [
        "16",
        "32",
        "64",
        "128",
        "256",
    ]


@given(a=st.floats(0.1, 1e6), b=st.floats(0.1, 1e6), log=st.booleans())
def test_a_scale_keeps_order_and_its_ends(a: float, b: float, log: bool) -> None:
    scale = Scale(0.1, 1e6, 50.0, 450.0, log)
    assert scale.at(0.1) == pytest.approx(50.0)
    assert scale.at(1e6) == pytest.approx(450.0)
    assert (scale.at(a) <= scale.at(b)) == (a <= b) or scale.at(a) == pytest.approx(scale.at(b))


@given(high=HIGH, kind=st.sampled_from(KINDS))
def test_an_axis_ends_at_a_tick_above_its_data(high: float, kind: str) -> None:
    end = ceiling(high, kind)
    assert high * (1 - 1e-8) <= end <= high * 2.5
    assert ticks(Scale(0.0, end, 0.0, 1.0), kind if kind != "GPUs" else "", 6)[-1][0] <= end * (1 + 1e-8)


# -- words -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("kv_bytes_per_token", 147_456, "147 kB (147,456 B)"),
        ("params", 8_190_735_360, "8.19 B (8,190,735,360)"),
        ("bf16_flops", 989e12, "989 TFLOP/s"),
        ("flops", 3.5e18, "3.5 EFLOP"),
        ("gpu_s", 20_500.4, "20,500 GPU-s"),
        ("tokens_per_gpu_s", 1918.4, "1,918"),
        ("gpu_idle_s", 0.0, "0 s"),
        ("bandwidth", 3.35e12, "3.35 TB/s"),
        ("share_of_step", 0.0036, "0.4 %"),
        ("cpu_hours", 667.0, "667 h"),
        ("p99", 31_200, "31,200"),
        ("nodes", True, "yes"),
        ("route", None, "–"),
        ("widths", [1, 2.5, "x"], "1, 2.5, x"),
    ],
)
def test_a_field_says_its_unit(name: str, value: object, said: str) -> None:
    assert by_name(name, value) == said


def test_units_of_figures_and_names_of_fields() -> None:
    assert with_unit(2.5e9, "bytes/s") == "2.5 GB/s"
    assert with_unit(147_456.0, "bytes/token") == "147 kB/token"
    assert with_unit(0.42, "share") == "42 %"
    assert with_unit(42, "%") == "42 %"
    assert with_unit(math.inf, "s") == "unbounded"
    assert (count(999.0), share(0.581), lasting(535.0), lasting(535.0, 1000.0)) == ("999", "58 %", "535 s", "8.92 min")
    assert [words(name) for name in ("old_logprobs", "kv_bytes_per_token", "gpu_s", "floor_s")] == [
        "old logprobs",
        "KV per token",
        "GPU-seconds",
        "floor",
    ]
    assert layout({"tp": 4, "pp": 1, "dp": 8, "shard": "full", "offload": True}) == "TP4 · DP8 · full shard · offload"
    assert layout({"tp": 1, "pp": 1, "shard": "none"}) == "one GPU"


# -- colours -----------------------------------------------------------------------------------------------------------


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear_ = [part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts]
    return 0.2126 * linear_[0] + 0.7152 * linear_[1] + 0.0722 * linear_[2]


def contrast(one: str, other: str) -> float:
    lighter, darker = sorted((luminance(one), luminance(other)), reverse=True)
    return (lighter + 0.05) / (darker + 0.05)


def test_every_colour_shows_on_both_grounds_and_carries_text() -> None:
    grounds = ["#ffffff", *re.findall(r"--ground:(#[0-9a-f]{6})", shipped("page.css"))]
    assert len(grounds) == 2
    text = {"on-dark": "#ffffff", "on-light": "#0c0e12"}
    for colour in colours._ORDER:
        assert all(contrast(colour, ground) >= 2.8 for ground in grounds), colour
        assert contrast(colour, text[colours.on(colour)]) >= 4.5, colour


def test_names_keep_their_colour_and_none_is_given_twice() -> None:
    given_ = colours.colours(["weights", "x", "kv", "y"])
    assert (given_["weights"], given_["kv"]) == (colours.BLUE, colours.GREEN)
    assert len(set(given_.values())) == 4
    assert colours.looks(["mine", "async", "colocated"]) == {"mine": 1, "async": 2, "colocated": 0}
