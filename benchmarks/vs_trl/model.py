"""The model that both sides start from: a byte-level Qwen3 of a million parameters that has learned how long to talk.

A short supervised phase on random characters teaches it two kinds of answers, told apart by the characters they are
made of: after each character an answer ends with a probability that its kind fixes, or never does. So lengths are
sampled by the model itself, one token at a time, from a mixture of geometric distributions.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

from cases import TASKS, Lengths
from task import rows

CHARACTERS = ("abcdefghijklm01234", "nopqrstuvwxyz56789")
"""Of short and of long answers: the same share of digits in both."""
STEPS, BATCH = 150, 32


def make_model(folder: Path, *, lengths: Lengths | None, cap: int) -> Path:
    """Writes the warm-started model as a Hugging Face folder under `folder`; the same arguments give the same model."""
    import torch
    from models import make_tiny_model

    from gruppetto.trainer.embedded.model import load_model, write_folder
    from gruppetto.trainer.embedded.supervised import fit

    torch.set_num_threads(1)
    blank = make_tiny_model(folder / "blank")
    model = load_model(blank, torch.device("cpu"))
    fit(model, _examples(blank, lengths, cap), steps=STEPS, batch_size=BATCH, lr=3e-3, warmup_steps=10)
    write_folder(model, blank, folder / "model")
    return folder / "model"


def _examples(blank: Path, lengths: Lengths | None, cap: int) -> Iterator[tuple[list[int], list[int]]]:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(blank)
    rng, prompts = random.Random(0), [row["prompt"] for row in rows(0, TASKS)]
    while True:
        prompt = tokenizer(rng.choice(prompts))["input_ids"]
        is_long = lengths is not None and rng.random() < lengths.share_long
        mean = None if lengths is None else lengths.long if is_long else lengths.short
        length = _length(rng, mean, cap)
        answer = tokenizer("".join(rng.choices(CHARACTERS[is_long], k=length)))["input_ids"]
        if length < cap:
            answer.append(tokenizer.eos_token_id)
        yield prompt + answer, [0] * len(prompt) + [1] * len(answer)


def _length(rng: random.Random, mean: int | None, cap: int) -> int:
    """Characters before the end, at least 1; `cap` when there is none."""
    length = 1
    while length < cap and (mean is None or rng.random() >= 1 / mean):
        length += 1
    return length
