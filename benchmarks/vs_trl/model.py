"""The model that both sides start from: a byte-level Qwen3 of one million parameters that has learned how long to talk.

A short supervised phase on random lower-case letters and digits teaches it to end an answer after each character with
a fixed probability, so that lengths are geometric (p99 = 6.6 x the median), or never.
"""

from __future__ import annotations

import random
import string
from collections.abc import Iterator
from pathlib import Path

from cases import TASKS
from task import rows

CHARACTERS = string.ascii_lowercase + string.digits
STEPS, BATCH = 100, 32


def make_model(folder: Path, *, mean_length: int | None, cap: int) -> Path:
    """Writes the warm-started model as a Hugging Face folder under `folder`; the same arguments give the same model."""
    import torch
    from models import make_tiny_model

    from gruppetto.trainer.embedded.model import load_model, write_folder
    from gruppetto.trainer.embedded.supervised import fit

    torch.set_num_threads(1)
    blank = make_tiny_model(folder / "blank")
    model = load_model(blank, torch.device("cpu"))
    fit(model, _examples(blank, mean_length, cap), steps=STEPS, batch_size=BATCH, lr=3e-3, warmup_steps=10)
    write_folder(model, blank, folder / "model")
    return folder / "model"


def _examples(blank: Path, mean_length: int | None, cap: int) -> Iterator[tuple[list[int], list[int]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(blank)
    rng, prompts = random.Random(0), [row["prompt"] for row in rows(0, TASKS)]
    while True:
        prompt = tokenizer(rng.choice(prompts))["input_ids"]
        length = _length(rng, mean_length, cap)
        answer = tokenizer("".join(rng.choices(CHARACTERS, k=length)))["input_ids"] if length else []
        if length < cap:
            answer.append(tokenizer.eos_token_id)
        yield prompt + answer, [0] * len(prompt) + [1] * len(answer)


def _length(rng: random.Random, mean_length: int | None, cap: int) -> int:
    """Characters before the end; `cap` when there is none."""
    if mean_length is None:
        return cap
    length = 0
    while length < cap and rng.random() >= 1 / mean_length:
        length += 1
    return length
