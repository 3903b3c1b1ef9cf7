"""Small builders for engine tests: cores, requests, runs."""

from pathlib import Path

from gruppetto.engines.base import GenerateRequest, GenerateResult, Sampling
from gruppetto.engines.embedded.core import Core
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.engines.embedded.serving import Serving, load
from gruppetto.engines.embedded.settings import Settings


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
