"""The package's extras: which modules each one brings, and the one line that names the extra of a missing module.

Imports the standard library only, so that whoever finds a module missing can say so.
"""

from __future__ import annotations

EXTRAS = {
    "train": (("torch", "transformers", "tokenizers", "safetensors"), "train, demo, serve and doctor --profile"),
    "parquet": (("pyarrow",), "Parquet files as data.path"),
    "math": (("math_verify",), 'reward.type = "math"'),
    "gym": (("reasoning_gym",), 'data.type and reward.type = "reasoning_gym"'),
    "tensorboard": (("tensorboardX",), 'log.sinks = ["tensorboard"]'),
    "gguf": (("gguf",), "models as GGUF files"),
}
"""Extras of the package: (modules they bring, what needs them)."""


def extra_of(module: str) -> str:
    """The extra that brings a module or a part of it, "" where none does."""
    package = module.partition(".")[0]
    return next((extra for extra, (modules, _) in EXTRAS.items() if package in modules), "")


def needs(what: str, module: str, why: str = "") -> str:
    """The line for a module of an extra that is not there: what needs it, and how it is had."""
    reason = f": {why}" if why else ""
    return f'{what} needs {module}, which is not installed{reason}; run: pip install "gruppetto[{extra_of(module)}]"'
