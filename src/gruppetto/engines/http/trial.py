"""What a running server can really do: every route is used, and what came of it is looked at.

Promises: a trial never fails, what does not work is its answer; the server is left serving, with the weights that it
had unless it was given a model folder to load.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from pathlib import Path

from gruppetto.engines.base import EngineFinish, GenerateRequest, GenerateResult, PauseMode, Sampling
from gruppetto.engines.http.client import HttpClient
from gruppetto.engines.http.engine import HttpEngine
from gruppetto.engines.http.errors import NoRoute
from gruppetto.engines.http.wire import Ability
from gruppetto.errors import GruppettoError, UserError

CONTEXT = 256
"""Of the trial's requests; a server with less is refused."""
_LONG = CONTEXT - 8
_PROMPT = (1, 2, 3, 4)
_RUNS_S = (0.2, 0.05, 0.0)
"""How long requests run before they are aborted: less, where they were over by then."""
_HELD_S = 0.3
_STEP_S = 120.0


Compare = Callable[[HttpEngine], Awaitable[str]]
"""What a server's log-probabilities say of its weights, in words; raises `Failed` for wrong ones."""


class Failed(Exception):
    """A step did something else than it should."""


async def kind_of(url: str, api_key: str = "") -> str:
    """sglang or vllm, by the routes that are there. Raises `UserError` where neither answers."""
    client = HttpClient("trial", url, api_key=api_key)
    await client.open()
    try:
        for path, kind in (("/model_info", "sglang"), ("/get_model_info", "sglang"), ("/version", "vllm")):
            with contextlib.suppress(NoRoute):
                await client.call("GET", path, within_s=20.0)
                return kind
    except GruppettoError as error:
        raise UserError(f"--engine {url}: {str(error).removeprefix('engine trial: ')}") from None
    finally:
        await client.close()
    raise UserError(f"--engine {url} has neither SGLang's /model_info nor vLLM's /version; write the URL of an engine")


async def trial(engine: HttpEngine, model: Path | None = None, compare: Compare | None = None) -> list[Ability]:
    """The table of one started engine that nobody else uses. With `model` its weights are loaded there. `compare` is
    asked what the server then computes with; without it nobody knows, and the table says so."""
    steps: list[tuple[str, Callable[[HttpEngine], Awaitable[str]]]] = [
        ("budget", _budget),
        ("seeds", _seeds),
        ("stop ids", _stop),
        ("abort of one", _abort_one),
        ("abort of all", _abort_all),
        ("pause that keeps", _pause_keep),
        ("pause that aborts", _pause_abort),
        ("KV memory", _memory),
    ]
    if model is not None:
        steps.append(("weights from disk", lambda e: _update(e, model, compare)))
    elif compare is not None:
        steps.append(("logprobs compared", compare))
    assert engine.wire is not None
    found = list(engine.wire.abilities.found.values())
    found += [await _try(name, step, engine) for name, step in steps]
    told = await engine.wire.told()
    counts = told.generated is not None
    return [*found, Ability("counters", counts, "/metrics" if counts else "tokens are counted from the answers")]


async def _try(name: str, step: Callable[[HttpEngine], Awaitable[str]], engine: HttpEngine) -> Ability:
    try:
        async with asyncio.timeout(_STEP_S):
            return Ability(name, True, await step(engine))
    except (GruppettoError, Failed) as error:
        return Ability(name, False, str(error).removeprefix(f"engine {engine.name}: "))
    except TimeoutError:
        return Ability(name, False, f"did not come to an end in {_STEP_S:g} s")
    finally:
        with contextlib.suppress(GruppettoError, TimeoutError):
            async with asyncio.timeout(_STEP_S):
                await engine.abort()
                await engine.restore_memory(["weights", "kv"])
                await engine.resume()


def _request(rid: str, max_tokens: int = 8, *, stop_ids: Sequence[int] = (), seed: int = 1) -> GenerateRequest:
    sampling = Sampling(max_tokens=max_tokens, seed=seed, stop_ids=tuple(stop_ids))
    return GenerateRequest(rid=rid, token_ids=_PROMPT, sampling=sampling)


def _ids(result: GenerateResult) -> list[int]:
    return [token for segment in result.segments for token in segment.token_ids]


def _need(true: bool, what: str) -> None:
    if not true:
        raise Failed(what)


async def _budget(engine: HttpEngine) -> str:
    result = await engine.generate(_request("budget"))
    _need((result.finish, result.num_tokens) == (EngineFinish.LENGTH, 8), f"8 tokens asked, {result.num_tokens} came")
    return "8 of 8 tokens, each with its logprob"


async def _seeds(engine: HttpEngine) -> str:
    twice = [_ids(await engine.generate(_request(f"seed-{n}", 16))) for n in range(2)]
    _need(twice[0] == twice[1], "the same seed made other tokens")
    return "the same seed, the same tokens"


async def _stop(engine: HttpEngine) -> str:
    free = _ids(await engine.generate(_request("free")))
    result = await engine.generate(_request("stop", 16, stop_ids=[free[-1]]))
    _need(result.finish is EngineFinish.STOP and _ids(result)[-1] == free[-1], f"ended with {result.finish}")
    return "the stop id is the last token"


@contextlib.asynccontextmanager
async def _running(
    engine: HttpEngine, count: int, seconds: float
) -> AsyncIterator[tuple[asyncio.Task[GenerateResult], ...]]:
    """Requests that have run for so long. None is left for the next step, whatever fails within."""
    calls = tuple(asyncio.ensure_future(engine.generate(_request(f"long-{n}", _LONG, seed=n))) for n in range(count))
    try:
        await asyncio.sleep(seconds)
        yield calls
    finally:
        for call in calls:
            call.cancel()
        await asyncio.gather(*calls, return_exceptions=True)


async def _abort_one(engine: HttpEngine) -> str:
    for seconds in _RUNS_S:
        async with _running(engine, 2, seconds) as calls:
            await engine.abort("long-0")
            one, other = await asyncio.gather(*calls)
        _need(other.num_tokens == _LONG, f"the other one ended too, with {other.num_tokens} tokens")
        if one.finish is EngineFinish.ABORT:
            return f"{one.finish} with {one.num_tokens} tokens; the other request went on"
    raise Failed(f"it went on to its end, {one.num_tokens} tokens")


async def _abort_all(engine: HttpEngine) -> str:
    for seconds in _RUNS_S:
        async with _running(engine, 2, seconds) as calls:
            await engine.abort()
            results = await asyncio.gather(*calls)
        if all(result.finish is EngineFinish.ABORT for result in results):
            return f"both came back, with {results[0].num_tokens} and {results[1].num_tokens} tokens"
    raise Failed("they went on to their end")


async def _held(engine: HttpEngine, mode: PauseMode) -> tuple[list[GenerateResult], str]:
    async with _running(engine, 1, _RUNS_S[1]) as calls:
        await engine.pause(mode)
        early = calls[0].done()  # it may have come to its end before that
        coming = asyncio.ensure_future(engine.generate(_request("coming")))
        waited = [coming, *(calls if mode == "keep" and not early else [])]
        done, _ = await asyncio.wait(waited, timeout=_HELD_S)
        held = not done
        await engine.resume()
        results = [await call for call in (*calls, coming)]
    keeps = mode == "abort" or (engine.facts is not None and engine.facts.token_versions)
    _need(held or not keeps, "something came back while it was paused")
    return results, "new requests wait"


async def _pause_keep(engine: HttpEngine) -> str:
    results, says = await _held(engine, "keep")
    kept = results[0].num_tokens == _LONG
    return f"{'what runs goes on after it' if kept else 'what runs comes back'}; {says}"


async def _pause_abort(engine: HttpEngine) -> str:
    results, says = await _held(engine, "abort")
    return f"what runs comes back ({results[0].num_tokens} tokens); {says}"


async def _memory(engine: HttpEngine) -> str:
    await engine.pause("abort")
    await engine.release_memory(["kv"])
    await engine.restore_memory(["kv"])
    await engine.resume()
    await engine.generate(_request("memory"))
    return "released and restored"


async def _update(engine: HttpEngine, model: Path, compare: Compare | None) -> str:
    assert engine.wire is not None
    await engine.pause("abort")
    label = await engine.wire.version()
    await engine.wire.load(model, label, "abort")
    await engine.resume()
    await engine.generate(_request("update"))
    return f"loaded {model}, {'not compared' if compare is None else await compare(engine)}"
