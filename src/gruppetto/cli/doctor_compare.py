"""A running server's log-probabilities beside those that a model folder's weights give, on fixed prompts.

The folder is read by transformers, in float32 on this machine's CPU, which shares no code with any engine. Promise: a
head that was not renewed, halves that were exchanged, weights of another version show, since only log-probabilities are
looked at, not what the server says of itself.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gruppetto.engines.http.engine import HttpEngine
from gruppetto.engines.http.trial import CONTEXT, Failed
from gruppetto.weights.channels.probe import TEXTS, Probe

TOKENS = 16
"""Sampled after each prompt."""
MOST = {"float32": 1e-5, "bfloat16": 0.02}
"""The largest mismatch_kl, nats a token, of a server that computes in this type: its rounding makes a tenth of it."""
NEEDS = ("torch", "transformers")


class Reference:
    """The folder's model, read when it is first asked."""

    def __init__(self, folder: Path, dtype: str | None = None) -> None:
        self.folder = folder
        self.dtype = dtype or _dtype_of(folder)
        self._model: Any = None

    def missing(self) -> str:
        """The package without which nothing can be compared, "" where all are there."""
        return next((name for name in NEEDS if find_spec(name) is None), "")

    async def compare(self, engine: HttpEngine) -> str:
        """In words. Raises `Failed` where the server does not compute with the folder's weights, and `UserError` for a
        folder that cannot be read. Without the packages that it takes nothing is compared, and the words say so."""
        if missing := self.missing():
            return f"not compared: {missing} is not installed"
        probe = Probe(self._prompts(), self.logprobs, tokens=TOKENS, most_kl=math.inf)
        found = await probe.check(engine, engine.stats().version)
        most = MOST[self.dtype]
        says = (
            f"mismatch_kl {found.mismatch_kl:.2g} nats a token, largest gap {found.largest:.2g}, {found.tokens} tokens"
        )
        if not found.mismatch_kl <= most:
            raise Failed(f"{says}: over {most:g}, {self.dtype}'s limit; it does not compute with {self.folder}")
        return f"{says}; {self.dtype}'s limit is {most:g}"

    async def logprobs(self, tokens: Sequence[int], last: int) -> list[float]:
        """Of the last `last` of `tokens`, in nats, at temperature 1."""
        return await asyncio.to_thread(self._logprobs, tokens, last)

    def _logprobs(self, tokens: Sequence[int], last: int) -> list[float]:
        import torch

        from gruppetto.model_folder import read_model

        if self._model is None:
            advice = "write the folder of a whole Hugging Face model"
            self._model = read_model(self.folder, torch.float32, advice=advice).eval()
        with torch.no_grad():
            logits = self._model(torch.tensor([list(tokens)])).logits[0, -last - 1 : -1].float()
        chosen = torch.tensor(list(tokens[-last:]))
        found: list[float] = logits.log_softmax(-1).gather(-1, chosen[:, None])[:, 0].tolist()
        return found

    def _prompts(self) -> list[list[int]]:
        from gruppetto.data.tokenizer import HFTokenizer

        encode = HFTokenizer(self.folder).encode
        return [encode(text)[: CONTEXT - TOKENS] for text in TEXTS]


def _dtype_of(folder: Path) -> str:
    """What a server takes where nobody says: the config's type. Coarser ones than bfloat16 are not expected."""
    try:
        config = json.loads((folder / "config.json").read_text("utf-8"))
    except (OSError, ValueError):
        config = {}
    named = config.get("dtype") or config.get("torch_dtype") if isinstance(config, dict) else None
    return "float32" if named in (None, "float32") else "bfloat16"
