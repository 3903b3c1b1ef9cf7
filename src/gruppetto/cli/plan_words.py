"""Refusals of `gruppetto plan` in the words that its user writes: options instead of the ledger's own names.

Promise: only names change, never numbers; what names no option stays as it is.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from contextlib import contextmanager

from gruppetto.errors import UserError

_OPTIONS = {
    "gpus": "gpus",
    "gpu": "gpu",
    "groups": "prompts",
    "group_size": "group-size",
    "mean": "mean-tokens",
    "cap": "max-tokens",
    "cv": "cv",
    "icc": "icc",
    "q0": "runaways",
    "max_staleness": "max-staleness",
    "depth": "depth",
    "density": "density",
    "slots": "slots",
    "micro_tokens": "micro-tokens",
    "split": "split",
    "dtype": "serve-dtype",
    "kv_dtype": "kv-dtype",
}
_NAME = re.compile(rf"(?<![\w.-])({'|'.join(_OPTIONS)}) = ")
_ADVICE = (
    (re.compile(r"a mean of at most ([\d,]*\d)"), r"--mean-tokens \1 or less"),
    (re.compile(r"a cap of ([\d,]*\d)"), r"--max-tokens \1"),
    (re.compile(r"a smaller cv"), "a smaller --cv"),
)
_WORDS = {"gpu": "H100", "judge": "Qwen3-8B", "serve": "tp8", "train": "tp4", "compare": "colocated",
          "placement": "async", "against": "runs/latest", "serve_dtype": "bf16", "kv_dtype": "bf16"}  # fmt: skip
"""Options that are words, with one that they may be."""


@contextmanager
def named_options() -> Iterator[None]:
    """Of a refusal inside, the names of the ledger as the options that they come from."""
    try:
        yield
    except UserError as error:
        said = in_options(str(error))
        if said == str(error):
            raise
        raise UserError(said) from None


def in_options(text: str) -> str:
    """`mean = 8,192 under cap = 8,192` as `--mean-tokens 8,192 under --max-tokens 8,192`."""
    text = _NAME.sub(lambda found: f"--{_OPTIONS[found[1]]} ", text)
    for words, option in _ADVICE:
        text = words.sub(option, text)
    return text


def refuse_empty(args: argparse.Namespace) -> None:
    """A word that is none is a slip, as of a shell's variable that is not set, and no wish for the usual."""
    for name, such in _WORDS.items():
        value = getattr(args, name)
        if value is not None and not value.strip():
            option = f"--{name.replace('_', '-')}"
            raise UserError(f"{option} {value!r}: nothing is named; leave it out, or write {option} {such}")
