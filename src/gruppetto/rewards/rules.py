"""Rule verifiers: exact, numeric, regex. Pure functions `(response, answer, extra) -> 0.0 or 1.0`.

Promises: no clock, no process, no state; linear time in the response (a user's own `pattern` apart); a gold answer that
a rule cannot use raises `Ungradable`, because a task without a gold answer is no task that the model failed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple, TypeVar


class Ungradable(ValueError):
    """The task, not the response, is why there is no reward: its answer is missing or is nothing to compare with."""


Rule = Callable[[str, Any, Mapping[str, Any]], float]

Gold = TypeVar("Gold")


class Number(NamedTuple):
    """A number as written: 50 % is (50, True)."""

    value: Fraction
    percent: bool


RELATIVE_TOLERANCE = Fraction(1, 1_000_000)
"""Largest relative difference of two numbers that are not both whole; whole numbers must be equal."""

_MAX_EXPONENT = 400
_PLAIN = r"(?:\d{1,3}(?:,\d{3})+|\d+)(?:\.\d+)?|\.\d+"
_NUMBER = re.compile(
    rf"""(?<![\w.^])(?P<sign>(?<![\w)\]}}])[-+])?\$?
    (?: (?P<whole>\d+)[ ](?P<mixed_top>\d+)/(?P<mixed_bottom>\d+)
      | (?P<top>\d+)[ ]?/[ ]?(?P<bottom>\d+)
      | \\[dt]?frac\{{(?P<latex_top>-?\d+)\}}\{{(?P<latex_bottom>\d+)\}}
      | (?P<plain>{_PLAIN})(?:[eE](?P<exponent>[-+]?\d+))? )
    [ ]?\\?(?P<percent>%?)""",
    re.VERBOSE | re.ASCII,
)
_HARMLESS = re.compile(r"\\(?:[dt]?frac|text|mathrm|textbf|boxed|left|right|circ)\b")
_COMMAND = re.compile(r"\\[a-zA-Z]")


def exact(pattern: str = "") -> Rule:
    """Equal texts, outer white space apart; with `pattern`, what its first group holds in its last match."""
    return _rule(lambda gold: str(gold).strip(), lambda text, gold: text.strip() == gold, pattern)


def numeric(pattern: str = "") -> Rule:
    """The last number of the response (of the pattern's first group, when given) equals the answer's one number.

    Reads signs, thousands commas, decimals, exponents, fractions (3/4, 1 1/2, \\frac{3}{4}), percent, and passes over
    units. A percentage equals both its number and a hundredth of it when only one side writes the sign.
    """
    return _rule(_gold_number, _same_number, pattern)


def regex(pattern: str) -> Rule:
    """What the pattern's first group holds in its last match equals the answer, outer white space apart."""
    return exact(pattern)


def golds(answer: Any) -> list[Any]:
    """The acceptable answers: one, a list, or Search-R1's {"target": [...]}; raises `Ungradable` when there is none."""
    if isinstance(answer, Mapping):
        if "target" not in answer:
            raise Ungradable(f"the answer is a mapping without 'target' (keys: {', '.join(map(str, answer))})")
        answer = answer["target"]
    found = list(answer) if isinstance(answer, list | tuple) else [answer]
    if not found or any(gold is None or str(gold).strip() == "" for gold in found):
        raise Ungradable("the task has no answer to compare with")
    return found


def last_number(text: str) -> Number | None:
    """The last number in `text`; None when there is none."""
    return next(_values(reversed(list(_NUMBER.finditer(_normal(text))))), None)


def numbers(text: str) -> list[Number]:
    """All numbers in `text`, in order."""
    return list(_values(_NUMBER.finditer(_normal(text))))


def _values(matches: Iterable[re.Match[str]]) -> Iterator[Number]:
    for match in matches:
        value = _value(match)
        if value is not None:
            yield Number(value, bool(match["percent"]))


def extract(pattern: str, text: str) -> str | None:
    """What the first group holds in the last match; None when nothing matches."""
    found = None
    for match in re.finditer(pattern, text):
        found = match[1] if match[1] is not None else found
    return found


def _rule(prepare: Callable[[Any], Gold], same: Callable[[str, Gold], bool], pattern: str) -> Rule:
    def rule(response: str, answer: Any, extra: Mapping[str, Any]) -> float:
        wanted = [prepare(gold) for gold in golds(answer)]  # before the response: a wrong task is never a wrong answer
        text = extract(pattern, response) if pattern else response
        return float(text is not None and any(same(text, gold) for gold in wanted))

    return rule


def _gold_number(gold: Any) -> Number:
    """The answer's one number: an answer like \\frac{\\pi}{2} or (3, 2) is not its last digit."""
    text = _normal(str(gold))
    found = [] if isinstance(gold, bool) else numbers(text)
    if len(found) == 1 and not _COMMAND.search(_HARMLESS.sub("", text)):
        return found[0]
    kind = "no number" if not found else "more than one number" if len(found) > 1 else "an expression"
    raise Ungradable(
        f"the answer {str(gold)[:60]!r} holds {kind}; use reward.type = 'math' or 'exact' for such answers"
    )


def _same_number(text: str, gold: Number) -> bool:
    got = last_number(text)
    if got is None:
        return False
    if got.percent == gold.percent or _close(got.value, gold.value):
        return _close(got.value, gold.value)
    return _close(got.value / 100, gold.value) if got.percent else _close(got.value, gold.value / 100)


def _close(a: Fraction, b: Fraction) -> bool:
    if a.denominator == b.denominator == 1:
        return a == b
    return abs(a - b) <= RELATIVE_TOLERANCE * max(abs(a), abs(b))


def _normal(text: str) -> str:
    """Unicode minus signs and LaTeX's thousands comma and dollar, as plain characters."""
    return text.replace("\u2212", "-").replace("{,}", ",").replace("\\$", "$").replace("\\!", "")


def _value(match: re.Match[str]) -> Fraction | None:
    sign = -1 if match["sign"] == "-" else 1
    try:
        if match["mixed_bottom"]:
            part = Fraction(int(match["mixed_top"]), int(match["mixed_bottom"]))
            return sign * (int(match["whole"]) + part if part < 1 else part)
        if match["bottom"]:
            return sign * Fraction(int(match["top"]), int(match["bottom"]))
        if match["latex_bottom"]:
            return sign * Fraction(int(match["latex_top"]), int(match["latex_bottom"]))
        exponent = int(match["exponent"] or 0)
        number = Fraction(match["plain"].replace(",", ""))
    except (ZeroDivisionError, ValueError):  # x/0 and numbers of thousands of digits are no answers
        return None
    return sign * number * Fraction(10) ** exponent if abs(exponent) <= _MAX_EXPONENT else None
