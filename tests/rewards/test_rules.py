"""Rule verifiers: what counts as equal, and which answers are nothing to compare with."""

import time
from fractions import Fraction

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gruppetto.rewards.rules import Ungradable, exact, golds, last_number, numeric, regex


@pytest.mark.parametrize(
    ("response", "answer", "reward"),
    [
        ("The answer is 10.", "10", 1),
        ("first 3, then 10", 10, 1),
        ("10 then 3", 10, 0),
        ("It costs $1,250", "1250", 1),
        ("1,250,000.5", 1250000.5, 1),
        ("2,50", "250", 0),
        ("5-8=-3", "-3", 1),
        ("10-7", "7", 1),
        ("minus: \u22123", "-3", 1),
        ("x = 3/4", "0.75", 1),
        ("$\\frac{3}{4}$", "3/4", 1),
        ("-\\dfrac{3}{4}", "-0.75", 1),
        ("1 1/2 cups", "1.5", 1),
        ("2 1/2 cups", "1 1/2", 0),
        ("Step 3\n1/2", "0.5", 1),
        ("50%", "50", 1),
        ("50 \\%", "0.5", 1),
        ("0.5", "50%", 1),
        ("5%", "0.5", 0),
        ("5%", "50%", 0),
        ("6.02e3", "6020", 1),
        (".5", 0.5, 1),
        ("0.3333333", "1/3", 1),
        ("0.333", "1/3", 0),
        ("1000001", "1000002", 0),
        ("12 km^2", "12 km", 1),
        ("12 H2O", "12", 1),
        ("10.0", 10, 1),
        ("答案是21元", "21", 1),
        ("007", "7", 1),
        ("none at all", "7", 0),
        ("7/0", "7", 0),
        ("1e999999999", "7", 0),
        ("\\boxed{2{,}500}", "2,500", 1),
        ("", "0", 0),
    ],
)
def test_numeric(response, answer, reward):
    assert numeric()(response, answer, {}) == reward


@pytest.mark.parametrize(
    "answer",
    [None, "", "ten", True, [], {"style": "rule"}, "(3, 2)", "\\frac{\\pi}{2}", "1/0", "2\\sqrt{3}", [1, None]],
)
def test_answers_without_one_number_are_ungradable_whatever_the_response(answer):
    for rule in (numeric(), numeric(r"Answer: (\S+)")):
        with pytest.raises(Ungradable):
            rule("no number here", answer, {})


@pytest.mark.parametrize("answer", ["10 apples", "$1,250", "\\frac{1}{2}", "\\text{10 km}", "90^\\circ", 3, 2.5])
def test_answers_with_one_number_are_gradable(answer):
    assert numeric()(str(answer), answer, {}) == 1


@given(st.integers(-(10**15), 10**15), st.sampled_from(["{}", "{:,}", "${:,}", "so {} apples.", "= {}\n"]))
def test_numeric_reads_whole_numbers_exactly(value, layout):
    text = layout.format(value)
    assert last_number(text).value == value
    assert numeric()(text, value, {}) == 1
    assert numeric()(text, value + 1, {}) == 0


@given(st.fractions(max_denominator=1000))
def test_numeric_reads_fractions_exactly(value):
    assert last_number(f"is {value.numerator}/{value.denominator}").value == Fraction(value)


@given(st.text())
def test_numeric_takes_any_text(text):
    assert numeric()(text, 5, {}) in (0.0, 1.0)


@pytest.mark.parametrize("text", ["9" * 200_000, "1,234," * 50_000, "1 " * 200_000, "1/" * 100_000, "-" * 200_000])
def test_numeric_is_linear(text):
    began = time.process_time()
    numeric()(text, 5, {})
    assert time.process_time() - began < 5


def test_exact_and_regex():
    assert exact()(" 4\n", "4", {}) == 1
    assert exact()("4.", "4", {}) == 0
    assert exact()("4", 4, {}) == 1
    assert exact(r"<a>(.*?)</a>")("x <a> 4 </a>", "4", {}) == 1
    assert exact(r"<a>(.*?)</a>")("4", "4", {}) == 0
    assert regex(r"Answer: (\w+)")("Answer: no\nAnswer: yes", "yes", {}) == 1, "the last match counts"
    assert numeric(r"Answer: (.*)")("Answer: 7 apples\nso 9", 7, {}) == 1
    assert numeric(r"Answer: (.*)")("7", 7, {}) == 0


def test_several_answers_are_alternatives():
    answer = {"target": ["Oslo", "Christiania"]}
    assert golds(answer) == ["Oslo", "Christiania"]
    assert [exact()(text, answer, {}) for text in ("Christiania", "Bergen")] == [1, 0]
    assert golds({"target": "Oslo"}) == ["Oslo"]
    assert numeric()("5", ["4", "5"], {}) == 1
