"""Useful tokens per second: the embedded engine against padded `model.generate`, batch 64, one thread.

Long tail: lognormal lengths with p99 = 8 x the median (median 48, cap 512), 512 requests; equal: all 48. Prompts of 8
to 32 tokens, temperature 1. `generate` takes the requests 64 at a time, left-padded, and runs each batch to its longest
member; useful tokens are those that were asked for. The two sides alternate in one process; figures are medians.

    python benchmarks/engine_vs_generate.py [--quick] [--reps 3] [--deterministic] [--json FILE]
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from models import make_tiny_model

BATCH, MEDIAN, CAP, CONTEXT = 64, 48, 512, 1024
SIGMA = 0.8940
"""ln(8) / 2.326: the 99th percentile is 8 x the median."""

Request = tuple[list[int], int]


def workload(count: int, long_tail: bool) -> list[Request]:
    """(prompt, tokens to make) pairs, the same every time."""
    rng = random.Random(1)
    drawn = [round(MEDIAN * rng.lognormvariate(0, SIGMA)) for _ in range(count)]
    lengths = [min(CAP, max(1, n)) if long_tail else MEDIAN for n in drawn]
    return [([rng.randrange(256) for _ in range(rng.randint(8, 32))], length) for length in lengths]


def engine_side(path: Path, deterministic: bool) -> Callable[[list[Request]], float]:
    """A function that runs a workload on a fresh engine and returns its seconds (without the loading)."""
    from gruppetto.engines.base import GenerateRequest, Sampling
    from gruppetto.engines.embedded.engine import EmbeddedEngine

    async def serve(requests: list[Request]) -> float:
        engine = EmbeddedEngine("bench", path, slots=BATCH, context=CONTEXT, deterministic=deterministic, device="cpu")
        await engine.start()
        calls = [
            GenerateRequest(rid=str(i), token_ids=prompt, sampling=Sampling(max_tokens=length, seed=i))
            for i, (prompt, length) in enumerate(requests)
        ]
        begin = time.perf_counter()
        results = await asyncio.gather(*map(engine.generate, calls))
        seconds = time.perf_counter() - begin
        assert [r.num_tokens for r in results] == [length for _, length in requests]
        await engine.close()
        return seconds

    return lambda requests: asyncio.run(serve(requests))


def generate_side(path: Path) -> Callable[[list[Request]], float]:
    """A function that runs a workload through padded `model.generate` and returns its seconds."""
    import torch
    from transformers import AutoModelForCausalLM, GenerationConfig

    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()
    model.generation_config = GenerationConfig(do_sample=True, top_k=0, eos_token_id=None, pad_token_id=0)

    def serve(requests: list[Request]) -> float:
        begin = time.perf_counter()
        for at in range(0, len(requests), BATCH):
            part = requests[at : at + BATCH]
            width, longest = max(len(p) for p, _ in part), max(n for _, n in part)
            ids = torch.tensor([[0] * (width - len(p)) + p for p, _ in part])
            mask = torch.tensor([[0] * (width - len(p)) + [1] * len(p) for p, _ in part])
            with torch.inference_mode():
                out = model.generate(ids, attention_mask=mask, max_new_tokens=longest)
            assert out.shape[1] == width + longest
        return time.perf_counter() - begin

    return serve


def measure(path: Path, requests: list[Request], reps: int, deterministic: bool) -> dict[str, float]:
    """Medians of useful tokens/s of both sides, alternating, and their ratio."""
    sides = {"engine": engine_side(path, deterministic), "generate": generate_side(path)}
    useful = sum(length for _, length in requests)
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for side in sides.values():
        side(requests[:16])
    for _ in range(reps):
        for name, side in sides.items():
            rates[name].append(useful / side(requests))
    figures = {f"{name}_tokens_per_s": statistics.median(values) for name, values in rates.items()}
    return figures | {"ratio": figures["engine_tokens_per_s"] / figures["generate_tokens_per_s"]}


def main() -> None:
    """Runs both workloads and prints one table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="128 requests, one repetition")
    parser.add_argument("--reps", type=int, default=3)
    parser.add_argument("--deterministic", action="store_true", help="the engine in its batch-invariant mode")
    parser.add_argument("--json", type=Path, help="write the figures here")
    args = parser.parse_args()
    count, reps = (128, 1) if args.quick else (512, args.reps)
    figures = {}
    with tempfile.TemporaryDirectory() as folder:
        path = make_tiny_model(Path(folder))
        for name in ("long_tail", "equal"):
            figures[name] = measure(path, workload(count, name == "long_tail"), reps, args.deterministic)
    print(f"{count} requests, batch {BATCH}, one thread, deterministic = {str(args.deterministic).lower()}")
    print(f"{'lengths':<12}{'engine tok/s':>14}{'generate tok/s':>16}{'ratio':>8}")
    for name, row in figures.items():
        engine, generate, ratio = row["engine_tokens_per_s"], row["generate_tokens_per_s"], row["ratio"]
        print(f"{name:<12}{engine:>14,.0f}{generate:>16,.0f}{ratio:>7.2f}x")
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
