"""Control routes: abort, pause, flush, memory, weights. SGLang's bodies and answers.

A field that this engine has no use for (CUDA caches, graphs) is taken only with a value that asks for nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from typing import Any, Literal

import msgspec
from aiohttp import web

from gruppetto.engines.serve.bodies import decode, read, read_body
from gruppetto.engines.serve.calls import BY_REQUEST
from gruppetto.engines.serve.control import Mode
from gruppetto.engines.serve.hub import Hub
from gruppetto.engines.serve.refusal import Refusal, json_response
from gruppetto.engines.serve.sampling import refuse_unsupported
from gruppetto.engines.serve.updates import overall
from gruppetto.errors import GruppettoError


class Body(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """A control call's body; fields besides the named are refused."""


class AbortBody(Body):
    """`rid` exactly."""

    rid: str | None = None
    abort_all: bool | None = None
    abort_message: str | None = None


class PauseBody(Body):
    """How."""

    mode: Mode | None = None


class ContinueBody(Body):
    """There is no CUDA cache to empty: either value is fine."""

    torch_empty_cache: bool | None = None


class MemoryBody(Body):
    """None or empty = all tags."""

    tags: list[str] | None = None


class SelectorBody(Body):
    """There is one model, no draft."""

    selector: Literal["target", "all"] | None = None


class UpdateBody(Body):
    """What every weight update may say."""

    flush_cache: bool | None = None
    abort_all_requests: bool | None = None
    weight_version: str | None = None
    torch_empty_cache: bool | None = None
    selector: Literal["target", "all"] | None = None


class DiskBody(UpdateBody, kw_only=True):
    """`/update_weights_from_disk`."""

    model_path: str
    load_format: str | None = None
    keep_pause: bool | None = None
    recapture_cuda_graph: bool | None = None
    is_async: bool | None = None
    token_step: int | None = None
    manifest: Any = None


class TensorBody(UpdateBody, kw_only=True):
    """`/update_weights_from_tensor`; `checksum` is ours: that of `gruppetto.weights.checksum`."""

    serialized_named_tensors: list[str]
    load_format: str | None = None
    checksum: int | None = None


class VersionBody(Body, kw_only=True):
    """`/update_weight_version`."""

    new_version: str
    abort_all_requests: bool | None = None


class CheckerBody(Body, kw_only=True):
    """`/weights_checker`."""

    action: Literal["checksum", "snapshot", "reset_tensors", "compare"]
    allow_quant_error: bool | None = None
    skip_tensor_list: list[str] | None = None
    selector: Literal["target", "all"] | None = None


async def abort_request(hub: Hub, request: web.Request) -> web.Response:
    """One by its rid, or all. Unknown and empty rids are no error."""
    body = await read(request, AbortBody, hub.settings.limits)
    message = body.abort_message or BY_REQUEST
    if body.abort_all:
        await hub.calls.abort_all(message)
    elif body.rid:
        await hub.calls.abort(body.rid, message)
    return web.Response()


async def pause_generation(hub: Hub, request: web.Request) -> web.Response:
    """Answers when the mode's condition holds."""
    body = await read(request, PauseBody, hub.settings.limits)
    mode = body.mode or "abort"
    await hub.control.pause(mode)
    return json_response({"message": f"Generation paused successfully (mode {mode}).", "status": "ok"})


async def continue_generation(hub: Hub, request: web.Request) -> web.Response:
    """Opens the gate."""
    await read(request, ContinueBody, hub.settings.limits)
    await hub.control.go_on()
    return json_response({"message": "Generation continued successfully.", "status": "ok"})


async def flush_cache(hub: Hub, request: web.Request) -> web.Response:
    """400 while requests run or wait."""
    try:
        timeout_s = float(request.query.get("timeout", "0"))
    except ValueError:
        raise Refusal(f"timeout = {request.query['timeout'][:40]!r} is no number of seconds", param="timeout") from None
    if not 0 <= timeout_s < float("inf"):
        raise Refusal(f"timeout = {timeout_s:g}; write 0 or more seconds", param="timeout")
    if await hub.control.flush(timeout_s):
        return web.Response(text="Cache flushed.\n")
    return web.Response(text="Cache not flushed: requests are running or waiting.\n", status=400)


async def release_memory(hub: Hub, request: web.Request) -> web.Response:
    """By tag."""
    body = await read(request, MemoryBody, hub.settings.limits)
    await hub.control.release(body.tags or [])
    return json_response(None)


async def resume_memory(hub: Hub, request: web.Request) -> web.Response:
    """By tag."""
    body = await read(request, MemoryBody, hub.settings.limits)
    await hub.control.restore(body.tags or [])
    return json_response(None)


# --- weights -----------------------------------------------------------------------------------------------------


async def begin_weight_update(hub: Hub, request: web.Request) -> web.Response:
    """Opens a session."""
    await read(request, SelectorBody, hub.settings.limits)
    return await _outcome(hub.updates.begin(), "Weight update is open.")


async def end_weight_update(hub: Hub, request: web.Request) -> web.Response:
    """Serves what has arrived."""
    await read(request, SelectorBody, hub.settings.limits)
    return await _outcome(hub.updates.end(), "Weights are updated.")


async def update_weights_from_tensor(hub: Hub, request: web.Request) -> web.Response:
    """One bucket."""
    body = decode(await read_body(request, hub.settings.limits.weights_bytes, hub.settings.limits), TensorBody)
    return await _outcome(_add(hub, body), "Tensors have arrived.")


async def _add(hub: Hub, body: TensorBody) -> None:
    if body.load_format not in (None, "safetensors"):
        raise Refusal(
            f"load_format = {body.load_format!r} travels as a pickle, which this server never loads; send base64 of a "
            "safetensors file with load_format = 'safetensors'",
            param="load_format",
        )
    if len(body.serialized_named_tensors) != 1:
        count = len(body.serialized_named_tensors)
        raise Refusal(f"serialized_named_tensors has {count} items; this engine has 1 rank")
    if body.abort_all_requests:
        await hub.calls.abort_all()
    await hub.updates.add(
        body.serialized_named_tensors[0],
        label=body.weight_version,
        expected=body.checksum,
        flush=body.flush_cache is not False,
    )


async def update_weights_from_disk(hub: Hub, request: web.Request) -> web.Response:
    """A whole model folder."""
    body = await read(request, DiskBody, hub.settings.limits)
    paused: Callable[[], dict[str, Any]] = lambda: {"num_paused_requests": len(hub.calls.live)}  # noqa: E731
    return await _outcome(_load(hub, body), "Weights are updated.", paused)


async def _load(hub: Hub, body: DiskBody) -> None:
    refuse_unsupported(body, {"is_async": False, "token_step": 0, "manifest": None})
    if body.load_format not in (None, "auto", "safetensors"):
        raise Refusal(f"load_format = {body.load_format!r} is not supported; write 'safetensors' or leave it out")
    if "\0" in body.model_path:
        raise Refusal("model_path holds a null character")
    if body.abort_all_requests:
        await hub.calls.abort_all()
    await hub.updates.from_disk(body.model_path, label=body.weight_version, flush=body.flush_cache is not False)
    hub.served_name = body.model_path


async def no_collective(hub: Hub, request: web.Request) -> web.Response:
    """Routes whose payload travels outside HTTP."""
    raise Refusal(
        f"{request.path} needs a process group or GPU memory that this engine does not have; send "
        "/update_weights_from_tensor or /update_weights_from_disk"
    )


async def update_weight_version(hub: Hub, request: web.Request) -> web.Response:
    """The label only."""
    body = await read(request, VersionBody, hub.settings.limits)
    if body.abort_all_requests is not False:
        await hub.calls.abort_all()
    hub.updates.relabel(body.new_version)
    return json_response(
        {"success": True, "message": f"Weight version is {body.new_version}", "new_version": body.new_version}
    )


async def weights_checker(hub: Hub, request: web.Request) -> web.Response:
    """Digests of what is served, and whether they are those of a snapshot."""
    body = await read(request, CheckerBody, hub.settings.limits)
    refuse_unsupported(body, {"allow_quant_error": False})
    skipped = set(body.skip_tensor_list or ())
    if body.action == "checksum":
        return await _checksum(hub, skipped)
    if body.action == "snapshot":
        return await _outcome(hub.updates.snapshot(), "Snapshot is taken.")
    if body.action == "reset_tensors":
        return await _outcome(hub.updates.reset(), "Tensors are zero; update them before anything is served.")

    async def compare() -> None:
        if differ := [name for name in await hub.updates.compare() if name not in skipped]:
            raise Refusal(f"{len(differ)} tensors differ from the snapshot, the first is {differ[0]}")

    return await _outcome(compare(), "All tensors are those of the snapshot.")


async def _checksum(hub: Hub, skipped: set[str]) -> web.Response:
    digests = {name: digest for name, digest in (await hub.updates.digests()).items() if name not in skipped}
    rank = {
        "checksums": digests,
        "per_gpu_checksum": overall(digests),
        "parallelism_info": {"tp_rank": 0, "tp_size": 1, "pp_rank": 0, "pp_size": 1, "dp_rank": 0, "dp_size": 1},
    }
    engine = overall({"0": overall(digests)})
    return json_response({"success": True, "message": "", "ranks": [rank], "per_engine_checksum": engine})


async def _outcome(
    work: Coroutine[Any, Any, None], message: str, more: Callable[[], dict[str, Any]] = dict
) -> web.Response:
    """`{"success", "message"}`; 400 when it did not come about, 503 when it may later."""
    try:
        await work
    except Refusal as refusal:
        return json_response({"success": False, "message": refusal.message} | more(), refusal.status)
    except GruppettoError as error:
        return json_response({"success": False, "message": str(error)} | more(), 400)
    return json_response({"success": True, "message": message} | more())
