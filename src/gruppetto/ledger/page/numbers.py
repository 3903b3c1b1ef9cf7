"""Values as the page writes them: by their unit, or by the name of the field they stand in."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

from gruppetto.ledger.units import show_binary, show_flops, show_seconds, show_share, show_size, show_tokens

_WORDS = {
    "kv": "KV",
    "gpu": "GPU",
    "gpus": "GPUs",
    "cpu": "CPU",
    "mfu": "MFU",
    "flops": "FLOPs",
    "mtp": "MTP",
    "bf16": "BF16",
    "fp8": "FP8",
    "fp32": "FP32",
    "nvlink": "NVLink",
    "pcie": "PCIe",
    "hbm": "HBM",
    "cv": "CV",
    "p50": "median",
    "p99": "99th percentile",
    "logprobs": "logprobs",
    "lora": "LoRA",
}


_NAMES = {
    "params": "parameters",
    "active_params": "active parameters",
    "vision_params": "vision parameters",
    "mtp_params": "MTP parameters",
    "weight_bytes": "weights",
    "window_bytes": "KV of sliding windows",
    "state_bytes": "state of a rollout",
    "bytes_all": "all rollouts at once",
    "gpu_s": "GPU-seconds",
    "gpu_idle_s": "GPUs idle",
    "tool_s": "tool call",
    "image_bytes": "traffic of images",
    "cpu_hours": "CPU time",
    "live": "live at once",
    "tokens_per_gpu_s": "tokens a GPU-second",
}
_PER_SECOND = frozenset({"bandwidth", "nvlink", "pcie", "network", "link"})
_SHARES = frozenset({"mfu", "share", "utilization", "ceiling", "density"})


def words(name: str) -> str:
    """A field's name as a reader says it: kv_bytes_per_token is "KV per token"."""
    if name in _NAMES:
        return _NAMES[name]
    plain = name.removesuffix("_bytes") if name.endswith("_bytes") else name.removesuffix("_s")
    parts = [part for part in plain.replace("_bytes_", "_").split("_") if part]
    return " ".join(_WORDS.get(part.lower(), part) for part in parts)


def number(value: float) -> str:
    """Three digits, or whole with commas; powers of ten where it is very large or small."""
    if not math.isfinite(value):
        return "unbounded" if value > 0 else "unknown"
    if value == int(value) and abs(value) < 1e15:
        return f"{value:,.0f}"
    if abs(value) >= 1e6 or abs(value) < 1e-3:
        return f"{value:.3g}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.3g}"


def count(value: float) -> str:
    """A count in words and exactly: 8.19 B (8,190,735,360)."""
    for name, scale in (("T", 1e12), ("B", 1e9), ("M", 1e6)):
        if abs(value) >= scale:
            return f"{value / scale:.3g} {name} ({value:,.0f})"
    return number(value)


_SHOWN: dict[str, Callable[[float], str]] = {
    "tokens": lambda value: f"{show_tokens(value)} tokens",
    "bytes": show_size,
    "B": show_size,
    "GiB": show_binary,
    "FLOP": show_flops,
    "FLOPs": show_flops,
    "s": lambda value: lasting(value),
    "share": lambda value: share(value),
}


def with_unit(value: object, unit: str) -> str:
    """12.5 min, 16.4 GB, 1.2 PFLOP/s, 147 kB/token: by the unit of a figure ("" for a ratio)."""
    if not isinstance(value, int | float) or isinstance(value, bool):
        return plain(value)
    if not math.isfinite(value):
        return number(value)
    whole, slash, per = unit.partition("/")
    if whole in _SHOWN:
        return _SHOWN[whole](value) + (f"/{per}" if slash else "")
    if whole in ("GPU-s", "CPU-s"):
        return f"{number(float(f'{value:.4g}'))} {unit}"
    return f"{number(value)} {unit}".strip()


def by_name(name: str, value: object) -> str:
    """A value by what its field's name says of its unit (`_s`, `_bytes`, `tokens`, `share`); else as it is."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        return with_unit(value, "")
    parts = name.lower().split("_")
    if parts[-2:] == ["gpu", "s"]:
        return number(value) if "per" in parts else with_unit(value, "GPU-s")
    if parts[-1] in ("s", "seconds"):
        return lasting(value)
    if name == "kv_bytes_per_token":
        return f"{show_size(value)} ({value:,.0f} B)"
    if "bytes" in parts or parts[-1] == "memory":
        return show_size(value) + ("/token" if name.endswith("per_token") else "")
    if parts[-1] in _PER_SECOND:
        return f"{show_size(value)}/s"
    if parts[-1] in ("params", "parameters"):
        return count(value)
    if parts[-1] in _SHARES or parts[0] == "share":
        return share(value)
    if parts[-1] == "flops":
        return show_flops(value) + ("/s" if parts[0] in ("bf16", "fp16", "fp8", "fp4", "fp32", "tf32") else "")
    if parts[-1] == "tokens":
        return f"{show_tokens(value)} tokens"
    return f"{number(value)} h" if parts[-1] == "hours" else number(value)


def share(value: float) -> str:
    """58 %, and one digit more where it is small: 0.4 %."""
    return show_share(value) if abs(value) >= 0.0995 or value == 0 else f"{value:.1%}".replace("%", " %")


def lasting(value: float, longest: float = 0.0) -> str:
    """Seconds as `show_seconds` writes them; in the unit of `longest` where the two stand side by side."""
    if value == 0:
        return "0 s"
    for unit, scale, least in (("h", 3600.0, 10_800.0), ("min", 60.0, 600.0)):
        if longest >= least and value >= scale:
            return f"{number(float(f'{value / scale:.3g}'))} {unit}"
    return show_seconds(value)


def plain(value: object) -> str:
    """What is no number: text as it is, None as a dash, lists and mappings in one line."""
    if value is None or value == "":
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, Mapping):
        return ", ".join(f"{words(str(key))} {by_name(str(key), item)}" for key, item in value.items())
    if isinstance(value, list | tuple):
        return ", ".join(plain(item) if not isinstance(item, int | float) else number(item) for item in value)
    return str(value)


def known(plan: Any) -> Any:
    """The same without what has no value: None, and numbers that are not finite. Entries of a mapping or list go."""
    if isinstance(plan, Mapping):
        return {key: known(value) for key, value in plan.items() if _has_value(value)}
    return [known(value) for value in plan if _has_value(value)] if isinstance(plan, list | tuple) else plan


def _has_value(value: object) -> bool:
    return value is not None and not (isinstance(value, float) and not math.isfinite(value))


def real(value: object) -> float | None:
    """The value as a finite number, or None: what cannot be drawn."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return float(value)


def layout(sizes: Mapping[str, Any]) -> str:
    """TP2 · DP8 · full shard: sizes of one are left out."""
    said = []
    for key, value in sizes.items():
        if isinstance(value, bool):
            said += [words(key)] if value else []
        elif isinstance(value, int | float):
            name = key.upper() if len(key) <= 2 else words(key)
            said += ([f"{name}{value:g}"] if len(key) <= 2 else [f"{value:g} {name}"]) if value != 1 else []
        elif value not in (None, "", "none"):
            said.append(f"{value} shard" if key == "shard" else str(value))
    return " · ".join(said) or "one GPU"
