"""Training tokens per second: packed segments against padding, on long-tailed and on equal lengths.

Three layouts of the same policy-gradient step (forward, loss, backward) on the same sequences, in alternation, medians:
  packed   the embedded trainer's `forward_backward`: one row, attention segment by segment, no padding
  padded   one batch padded to its longest sequence, logits at every position
  micro8   padded micro-batches of eight in random order, logits of the completions only
Only real tokens count. The long tail is lognormal, p99 = 8x the median. `--json FILE` writes the figures.
"""

from __future__ import annotations

import os

os.environ |= {"OMP_WAIT_POLICY": "PASSIVE", "GOMP_SPINCOUNT": "0"}
os.environ.setdefault("OMP_NUM_THREADS", "1")

import argparse
import asyncio
import json
import math
import statistics
import tempfile
import time
from array import array
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from transformers.utils import logging

from gruppetto.config.schema import ModelSection, TrainSection
from gruppetto.trainer.embedded import EmbeddedTrainer
from gruppetto.types import NO_VERSION, Sample, TokenKind, TokenUse

PROMPT, VOCABULARY = 16, 320
SIGMA = math.log(8) / 2.3263
"""Of the lognormal whose 99th percentile is 8 times its median."""


def lengths(kind: str, count: int, median: int, cap: int) -> list[int]:
    """Response lengths; the long tail by quantiles of the lognormal, so that every run has the same mix."""
    if kind == "equal":
        return [median] * count
    normal = statistics.NormalDist()
    quantiles = [math.exp(SIGMA * normal.inv_cdf((i + 0.5) / count)) for i in range(count)]
    order = np.random.default_rng(0).permutation(count)
    return [min(cap, max(2, round(median * quantiles[i]))) for i in order]


def sample(number: int, response: int) -> Sample:
    rng = np.random.default_rng(number)
    total = PROMPT + response
    return Sample(
        rollout_id=str(number),
        group_id=0,
        token_ids=array("i", rng.integers(0, VOCABULARY, total).tolist()),
        logprobs=array("f", [0.0] * PROMPT + [-math.log(VOCABULARY)] * response),
        versions=array("i", [NO_VERSION] * PROMPT + [0] * response),
        kinds=array("B", [TokenKind.PROMPT] * PROMPT + [TokenKind.MODEL] * response),
        use=array("B", [TokenUse.PROMPT] * PROMPT + [TokenUse.TRAINED] * response),
        reward=0.0,
        advantage=1.0 if number % 2 else -1.0,
    )


def save_model(folder: str) -> None:
    """About one million parameters, Qwen3-shaped."""
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=384,
        num_hidden_layers=5,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        tie_word_embeddings=True,
        max_position_embeddings=2048,
    )
    Qwen3ForCausalLM(config).save_pretrained(folder)


def padded_step(model: Any, samples: list[Sample], every_logit: bool) -> None:
    """Forward and backward of one padded batch with the model's own attention and a plain clipped-ratio loss."""
    longest = max(len(s.token_ids) for s in samples)
    ids, attention = torch.zeros(len(samples), longest, dtype=torch.int64), torch.zeros(len(samples), longest)
    old, trained = torch.zeros(len(samples), longest), torch.zeros(len(samples), longest, dtype=torch.bool)
    for i, s in enumerate(samples):
        size = len(s.token_ids)
        ids[i, :size], attention[i, :size], old[i, :size] = torch.tensor(s.token_ids), 1.0, torch.tensor(s.logprobs)
        trained[i, PROMPT:size] = True
    advantage = torch.tensor([s.advantage for s in samples])[:, None].expand_as(trained)[:, 1:]
    keep = 0 if every_logit else longest - PROMPT + 1
    logits = model(input_ids=ids, attention_mask=attention, use_cache=False, logits_to_keep=keep).logits[:, :-1]
    tail = slice(longest - 1 - logits.shape[1], None)
    logprob = logits.float().log_softmax(-1).gather(-1, ids[:, 1:][:, tail, None])[..., 0]
    mask, ratio = trained[:, 1:][:, tail], (logprob - old[:, 1:][:, tail]).exp()
    a = advantage[:, tail]
    loss = torch.maximum(-a * ratio, -a * ratio.clamp(0.8, 1.2))
    loss[mask].sum().backward()


class Bench:
    """The three layouts on one set of samples; each call returns the norm of its gradient."""

    def __init__(self, trainer: EmbeddedTrainer, own: Any, samples: list[Sample], loop: asyncio.Runner) -> None:
        self.trainer, self.own, self.samples, self.loop = trainer, own, samples, loop

    def packed(self) -> float:
        self.loop.run(self.trainer.forward_backward(self.samples))
        return norm_and_clear(self.trainer._model)

    def padded(self) -> float:
        padded_step(self.own, self.samples, every_logit=True)
        return norm_and_clear(self.own)

    def micro8(self) -> float:
        for start in range(0, len(self.samples), 8):
            padded_step(self.own, self.samples[start : start + 8], every_logit=False)
        return norm_and_clear(self.own)

    def measure(self, repeats: int) -> dict[str, float]:
        """Median real tokens per second of each layout, after one warm-up round that also compares gradients."""
        layouts = {"packed": self.packed, "padded": self.padded, "micro8": self.micro8}
        norms = [layout() for layout in layouts.values()]
        if max(norms) > min(norms) * 1.001:
            raise SystemExit(f"the layouts disagree on the gradient norm: {norms}")
        seconds: dict[str, list[float]] = {name: [] for name in layouts}
        for _ in range(repeats):
            for name, layout in layouts.items():
                began = time.perf_counter()
                layout()
                seconds[name].append(time.perf_counter() - began)
        tokens = sum(len(s.token_ids) for s in self.samples)
        return {name: tokens / statistics.median(values) for name, values in seconds.items()}


def norm_and_clear(model: Any) -> float:
    norm = torch.nn.utils.get_total_norm([p.grad for p in model.parameters()]).item()
    model.zero_grad(set_to_none=True)
    return norm


def report(kind: str, rates: dict[str, float], responses: list[int]) -> dict[str, float]:
    real = sum(responses) + PROMPT * len(responses)
    padding = (max(responses) + PROMPT) * len(responses) / real
    print(f"\n{kind}: {len(responses)} sequences, {real} real tokens, one padded batch holds {padding:.1f}x that")
    for name, rate in rates.items():
        print(f"  {name:<8} {rate:9,.0f} real tokens/s   packed is {rates['packed'] / rate:5.2f}x")
    return {f"{kind}.{name}.tokens_per_s": rate for name, rate in rates.items()} | {
        f"{kind}.ratio": rates["packed"] / rates["padded"],
        f"{kind}.ratio_micro8": rates["packed"] / rates["micro8"],
        f"{kind}.padding": padding,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--sequences", type=int, default=64)
    parser.add_argument("--micro-tokens", type=int, default=1024)
    options = parser.parse_args()
    logging.disable_progress_bar()
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory() as folder, asyncio.Runner() as loop:
        save_model(folder)
        own = Qwen3ForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        train = TrainSection(micro_tokens=options.micro_tokens)
        trainer = EmbeddedTrainer(
            folder, model=ModelSection(), train=train, max_tokens=512, temperature=1.0, total_steps=1, seed=0
        )
        loop.run(trainer.start())
        for kind in ("tail", "equal"):
            responses = lengths(kind, options.sequences, median=48, cap=512)
            samples = [sample(number, response) for number, response in enumerate(responses)]
            rates = Bench(trainer, own, samples, loop).measure(options.repeats)
            figures |= report(kind, rates, responses)
        loop.run(trainer.close())
    if options.json:
        options.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
