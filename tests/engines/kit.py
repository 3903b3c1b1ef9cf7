"""Small builders for engine tests: cores, requests, runs."""

import asyncio
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from gruppetto.engines.base import GenerateRequest, GenerateResult, Sampling
from gruppetto.engines.embedded.core import Core
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.engines.embedded.serving import Serving, load
from gruppetto.engines.embedded.settings import Settings
from gruppetto.weights.inprocess import InProcessChannel


def make_serving(path: Path, **settings) -> Serving:
    chosen = {"name": "e", "slots": 8, "context": 256} | settings
    return load(Settings(**chosen), path, dtype="float32", device="cpu", lockstep=False, version=0)


def make_engine(path: Path, **settings) -> EmbeddedEngine:
    return EmbeddedEngine("e", path, **{"slots": 8, "context": 256, "device": "cpu"} | settings)


def request(rid: str, ids, made: int = 0, **sampling) -> GenerateRequest:
    chosen = {"max_tokens": 8} | sampling
    return GenerateRequest(rid=rid, token_ids=list(ids), sampling=Sampling(**chosen), made=made)


def run(core: Core, requests) -> dict[str, GenerateResult]:
    for r in requests:
        core.submit(r)
    results: dict[str, GenerateResult] = {}
    while core.has_work:
        results |= {r.rid: r for r in core.step()}
    return results


def ids_of(result: GenerateResult) -> list[int]:
    return [i for s in result.segments for i in s.token_ids]


def logprobs_of(result: GenerateResult) -> list[float]:
    return [p for s in result.segments for p in s.logprobs]


def bits(result: GenerateResult) -> tuple[list[int], list[float]]:
    return ids_of(result), logprobs_of(result)


def other_weights(path, shift: float = 0.05):
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(shift * torch.randn(p.shape, generator=generator))
    return model


async def publish(engine, model, version=1, bucket_bytes=300_000, mode="keep"):
    await engine.pause(mode)
    await InProcessChannel(bucket_bytes).publish(version, model.named_parameters(), [engine])
    await engine.resume()


async def until(condition):
    async with asyncio.timeout(60):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.001)


def spawn(engine, requests):
    return [asyncio.ensure_future(engine.generate(r)) for r in requests]
