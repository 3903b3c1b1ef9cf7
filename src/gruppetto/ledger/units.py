"""Numbers as people write and read them: 8k tokens, 80 GB, 1.5 TiB, 400 Gb/s, 90 s. Reading and writing are inverse.

Decimal suffixes are powers of 1,000 (GB = 1e9 bytes), binary ones of 1,024 (GiB). A bare k, m, b, t is a power of 1,000
except for tokens and context lengths, where k is 1,024, as model cards use it (8k = 8,192).
"""

from __future__ import annotations

import math
import re

from gruppetto.errors import UserError

_DECIMAL = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12, "p": 1e15, "e": 1e18}
_BINARY = {"ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40, "pi": 2.0**50}
_TIME = {"us": 1e-6, "ms": 1e-3, "s": 1.0, "m": 60.0, "min": 60.0, "h": 3600.0, "d": 86_400.0}
_NUMBER = re.compile(r"^\s*([+-]?[0-9][0-9_,]*(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|[+-]?\.[0-9]+)\s*([a-zA-Z]*)\s*$")


def tokens(text: str | int | float, name: str = "tokens") -> int:
    """A count of tokens: 8192, "8k" (8,192), "1.5m" (1,572,864). Raises `UserError` where it is none."""
    value, suffix = _split(text, name, "a count such as 8192 or 8k")
    powers = {"": 1, "k": 1 << 10, "m": 1 << 20}
    if suffix.lower() not in powers:
        raise UserError(f"{name} = {text!r}: no unit {suffix!r} for tokens; write a count such as 8192, 8k or 1m")
    return round(_finite(value * powers[suffix.lower()], text, name, "a count such as 8192, 8k or 1m"))


def size(text: str | int | float, name: str = "bytes") -> float:
    """Bytes: "80GB" (8e10), "1.5TiB", a bare number is bytes. Raises `UserError` where it is none."""
    value, suffix = _split(text, name, "a size such as 80GB or 1.5TiB")
    scale = suffix[:-1].lower() if suffix[-1:] in ("B", "b") and suffix.lower() != "b" else suffix.lower()
    if suffix in ("", "B", "b"):
        return value
    if scale in _BINARY:
        return _finite(value * _BINARY[scale], text, name, "a size such as 80GB or 1.5TiB")
    if scale in _DECIMAL:
        return _finite(value * _DECIMAL[scale], text, name, "a size such as 80GB or 1.5TiB")
    raise UserError(f"{name} = {text!r}: no unit {suffix!r} for bytes; write a size such as 80GB or 1.5TiB")


def seconds(text: str | int | float, name: str = "seconds") -> float:
    """Seconds: "30", "90s", "5m", "1.5h", "3ms". Raises `UserError` where it is none."""
    value, suffix = _split(text, name, "seconds such as 30, 90s, 5m or 1.5h")
    scale = _TIME.get(suffix.lower() or "s")
    if scale is None:
        raise UserError(f"{name} = {text!r}: no unit {suffix!r} for time; write seconds such as 30, 90s, 5m or 1.5h")
    return _finite(value * scale, text, name, "seconds such as 30, 90s, 5m or 1.5h")


def _finite(value: float, text: str | int | float, name: str, such: str) -> float:
    if not math.isfinite(value):
        raise UserError(f"{name} = {text!r}: too large for a number; write {such}")
    return value


def _split(text: str | int | float, name: str, such: str) -> tuple[float, str]:
    """The number and what stands behind it."""
    match = _NUMBER.match(str(text))
    value = float(match[1].replace(",", "").replace("_", "")) if match else math.nan
    if match is None or not math.isfinite(value):
        raise UserError(f"{name} = {text!r}: not a number; write {such}")
    return value, match[2]


# -- writing -----------------------------------------------------------------------------------------------------------


def show_tokens(value: float) -> str:
    """1,234 below 100,000, then 67.1 M."""
    return f"{value:,.0f}" if abs(value) < 1e5 else _scaled(value, ("", "k", "M", "G", "T", "P"), 1e3)


def show_size(value: float) -> str:
    """Decimal bytes with three digits: 16.4 GB."""
    return _scaled(value, ("B", "kB", "MB", "GB", "TB", "PB", "EB"), 1e3)


def show_binary(value: float) -> str:
    """Binary bytes, as memory is read: 650 GiB."""
    return _scaled(value, ("B", "KiB", "MiB", "GiB", "TiB", "PiB"), 1024.0)


def show_flops(value: float) -> str:
    """1.2 PFLOP."""
    return _scaled(value, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP", "EFLOP", "ZFLOP"), 1e3)


def show_seconds(value: float) -> str:
    """Three digits in a unit that a reader has a feeling for: 3.2 ms, 41 s, 12.5 min, 3.4 h."""
    if not math.isfinite(value):
        return "never" if value > 0 else str(value)
    for unit, scale, most in (("us", 1e-6, 1e-3), ("ms", 1e-3, 1.0), ("s", 1.0, 600.0), ("min", 60.0, 10_800.0)):
        if abs(value) < most:
            return f"{_digits(value / scale)} {unit}"
    return f"{_digits(value / 3600)} h"


def show_share(value: float) -> str:
    """58 %."""
    return f"{value:.0%}".replace("%", " %")


def _scaled(value: float, names: tuple[str, ...], base: float) -> str:
    rank = 0
    while abs(value) >= base * 0.9995 and rank < len(names) - 1:
        value, rank = value / base, rank + 1
    return f"{_digits(value)} {names[rank]}".rstrip()


def _digits(value: float) -> str:
    """Three digits, trailing zeros of a fraction left out, whole where it has more."""
    if value == 0 or not math.isfinite(value):
        return "0" if value == 0 else str(value)
    if abs(value) >= 100:
        return f"{value:,.0f}"
    text = f"{value:.{max(0, 2 - math.floor(math.log10(abs(value))))}f}"
    return text.rstrip("0").rstrip(".") if "." in text else text
