"""Engine against trainer on fixed prompts: the last word on whether the weights are right.

The engine samples a few tokens as the run samples its own, with their log-probabilities, and the trainer computes the
same ones. Wrong weights that no digest sees (a swapped gate and up half behind a loader, a stale scale that was
derived, KV kept from older weights) show here, and log-probabilities that mean something else (before the temperature,
after top-p). Promises: fixed prompts and seeds, so that two probes of the same weights are the same; a check ends, and
what an engine fails at is an `EngineError` that says so; a probe does not wait until other requests end by themselves.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass

from msgspec import structs

from gruppetto.engines.base import Engine, GenerateRequest, GenerateResult, Sampling
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.base import MakeRoom

Reference = Callable[[Sequence[int], int], Awaitable[Sequence[float]]]
"""(tokens, n) -> the trainer's log-probabilities of the last n tokens, at the temperature that the probe has."""

TEXTS = ("The riders in the gruppetto share the work.", "def area(width, height):\n    return", "12 + 30 = ")
"""What engines are probed with."""
DEADLINE_S = 120.0
"""A few tokens, from an engine that has room for them."""
ROOM_S = 2.0
"""So long a probe waits before others have to make room."""


@dataclass(frozen=True, slots=True)
class Comparison:
    """Of one engine. `mismatch_kl`: mean of exp(d) - 1 - d, d = trainer - engine (Schulman's k3), in nats a token."""

    engine: str
    version: int
    mismatch_kl: float
    largest: float
    tokens: int


class Probe:
    """`tokens` after each prompt, sampled as `sampling` says (None: at temperature 1). `most_kl` is the alarm, in nats
    a token: float32 gives below 1e-6, bfloat16 below 1e-2. `deadline_s`: an engine that has not answered by then has
    failed."""

    def __init__(
        self,
        prompts: Sequence[Sequence[int]],
        reference: Reference,
        *,
        tokens: int = 8,
        sampling: Sampling | None = None,
        most_kl: float = 0.02,
        deadline_s: float = DEADLINE_S,
    ) -> None:
        self._prompts, self._reference, self.most_kl = prompts, reference, most_kl
        self._sampling = structs.replace(sampling or Sampling(max_tokens=tokens), max_tokens=tokens)
        self._deadline_s = deadline_s
        self.last: dict[str, Comparison] = {}

    async def check(self, engine: Engine, version: int, make_room: MakeRoom | None = None) -> Comparison:
        """Compares. Raises `EngineError` above `most_kl`, for tokens of another version, for none at all and for an
        answer that does not come. `make_room` takes as many other requests back as stand in the way: those that are
        kept over a publish may run for an hour, and the trainer waits for this."""
        results = await self._sampled(engine, version, make_room)
        gaps: list[float] = []
        for prompt, result in zip(self._prompts, results, strict=True):
            gaps += await self._gaps(engine, version, prompt, result)
        if not gaps:
            raise EngineError(engine.name, f"probe of version {version}: it made no tokens")
        kl = sum(_k3(gap) for gap in gaps) / len(gaps)
        found = Comparison(engine.name, version, kl, max(map(abs, gaps)), len(gaps))
        self.last[engine.name] = found
        if not kl <= self.most_kl:
            raise EngineError(
                engine.name,
                f"probe of version {version}: mismatch_kl {kl:.3g} nats a token is over {self.most_kl:g}; it does not "
                f"compute with the trainer's weights{self._or_means_others()}; where it is meant to compute that much "
                "coarser, write a larger weights.probe_kl",
            )
        return found

    def _or_means_others(self) -> str:
        """What else it may be, where log-probabilities before and after the sampling's own changes differ."""
        s = self._sampling
        if s.temperature in (0.0, 1.0) and s.top_p == 1.0 and s.top_k == 0:
            return ""
        return (
            f", or its logprobs are not those after the temperature ({s.temperature:g}) and before top_p and top_k, "
            "which the trainer computes"
        )

    async def _sampled(self, engine: Engine, version: int, make_room: MakeRoom | None) -> list[GenerateResult]:
        try:
            async with asyncio.timeout(self._deadline_s):
                return await self._sample(engine, version, make_room)
        except TimeoutError:
            why = f"no answer within {self._deadline_s:g} s"
        except UserError as error:
            why = str(error)
        raise EngineError(engine.name, f"probe of version {version}: {why}")

    async def _sample(self, engine: Engine, version: int, make_room: MakeRoom | None) -> list[GenerateResult]:
        calls = [
            asyncio.ensure_future(engine.generate(self._request(index, prompt, version)))
            for index, prompt in enumerate(self._prompts)
        ]
        try:
            while engine.capabilities.lockstep and not all(call.done() for call in calls):
                await engine.advance()
                await asyncio.sleep(0)
            _, late = await asyncio.wait(calls, timeout=None if make_room is None else ROOM_S)
            if late and make_room is not None and (waiting := engine.stats().waiting):
                make_room(engine, waiting)  # the others that wait, and for each of these one that runs
            return await asyncio.gather(*calls)
        finally:
            for call in calls:
                call.cancel()
            await asyncio.gather(*calls, return_exceptions=True)

    def _request(self, index: int, prompt: Sequence[int], version: int) -> GenerateRequest:
        sampling = structs.replace(self._sampling, seed=index)
        return GenerateRequest(rid=f"probe-{version}-{index}", token_ids=list(prompt), sampling=sampling)

    async def _gaps(self, engine: Engine, version: int, prompt: Sequence[int], result: GenerateResult) -> list[float]:
        tokens = list(prompt)
        logprobs: list[float] = []
        for segment in result.segments:
            if segment.version != version:
                raise EngineError(engine.name, f"probe of version {version}: it answers as version {segment.version}")
            tokens += segment.token_ids
            logprobs += segment.logprobs
        own = await self._reference(tokens, len(logprobs))
        return [trainer - ours for trainer, ours in zip(own, logprobs, strict=True)]


def _k3(gap: float) -> float:
    return math.expm1(min(gap, 700.0)) - gap
