"""Control calls: to all engines at once, every answer collected.

Promises: the answer is 200 only if every engine's is; `engines` in it has each one's status and body. An engine that an
update of the weights did not reach while others have it is fenced until it has them. A call that was begun goes to its
end though its caller left.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
from aiohttp import web

from gruppetto.engines.router.fleet import Fleet, Served, State
from gruppetto.engines.router.forward import header_lines, read_body
from gruppetto.engines.router.http1 import Broken
from gruppetto.engines.router.upstream import NotSent
from gruppetto.engines.serve.refusal import Refusal, json_response

UPDATES = frozenset(
    (
        "/update_weights_from_disk",
        "/update_weights_from_tensor",
        "/update_weights_from_distributed",
        "/update_weights_from_ipc",
        "/begin_weight_update",
        "/end_weight_update",
        "/update_weight_version",
        "/pull_weights",
        "/post_process_weights",
    )
)
"""An engine must not miss one that the others have had."""

_LAST = ("/end_weight_update", "/update_weights_from_disk")
"""After which an engine has all of the weights."""
_SHOWN = 4096
"""Bytes of an answer that is no JSON."""

FANNED = (
    *sorted(UPDATES),
    "/abort_request",
    "/pause_generation",
    "/continue_generation",
    "/flush_cache",
    "/release_memory_occupation",
    "/resume_memory_occupation",
    "/init_weights_update_group",
    "/destroy_weights_update_group",
    "/weights_checker",
    "/load_lora_adapter",
    "/unload_lora_adapter",
)
"""What goes to every engine."""


@dataclass(frozen=True, slots=True)
class Answer:
    """One engine's. `status` 0: there is none, and `body` says why."""

    served: Served
    status: int
    body: Any

    @property
    def ok(self) -> bool:
        refused = isinstance(self.body, dict) and self.body.get("success") is False
        return 200 <= self.status < 300 and not refused


class _Control(msgspec.Struct):
    """What the router itself must know of a control call."""

    rid: Any = None
    abort_all: Any = None
    abort_message: Any = None
    mode: Any = None
    weight_version: Any = None
    new_version: Any = None


async def fan_out(fleet: Fleet, request: web.BaseRequest) -> web.StreamResponse:
    """The handler of every path in `FANNED`."""
    limits = fleet.settings.limits
    most = limits.weights_bytes if request.path in UPDATES else limits.body_bytes
    body = await read_body(request, most, limits.body_s)
    lines = header_lines(request, b"", pass_key=not fleet.settings.api_key and not fleet.settings.admin_api_key)
    target = request.path_qs
    return await asyncio.shield(asyncio.ensure_future(_fan_out(fleet, request.method, target, body, lines)))


async def _fan_out(fleet: Fleet, method: str, target: str, body: bytes, lines: bytes) -> web.StreamResponse:
    path = target.partition("?")[0]
    said = _read(body)
    _before(fleet, path, said)
    targets = [served for served in fleet.engines.values() if _reached(served, path)]
    if not targets:
        if path == "/continue_generation":
            fleet.go_on()
        raise Refusal(f"no engine can be reached; {fleet.summary()}; try again", 503)
    answers = await ask_all(fleet, targets, method, target, body, lines)
    _after(fleet, path, said, answers)
    good = [answer for answer in answers if answer.ok]
    worst = max((a.status or 502 for a in answers if not a.ok), default=200)
    if worst < 400:  # success = false beside a 200
        worst = 200 if len(good) == len(answers) else 400
    return json_response(_joined(answers), worst)


def _reached(served: Served, path: str) -> bool:
    """An engine that is down is not asked; one that is only behind is, since an update is what it needs."""
    if served.state in (State.UP, State.DRAINING):
        return True
    return served.missed and not served.dead and path != "/abort_request"


async def ask_all(
    fleet: Fleet, targets: Sequence[Served], method: str, target: str, body: bytes, lines: bytes
) -> list[Answer]:
    """The same call to each of them at once; each has an answer, also where none came."""
    within_s = fleet.settings.limits.control_s

    async def ask(served: Served) -> Answer:
        try:
            sent = served.upstream.key_line + lines
            head, answer = await served.upstream.call(method, target, body, within_s=within_s, lines=sent)
        except (NotSent, Broken) as error:
            return Answer(served, 0, str(error))
        except TimeoutError:
            return Answer(served, 0, f"{served.url} gave no answer within {within_s:g} s")
        return Answer(served, head.status, _value(answer))

    return list(await asyncio.gather(*map(ask, targets)))


def _value(body: bytes) -> Any:
    try:
        return msgspec.json.decode(body) if body else None
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return body[:_SHOWN].decode(errors="replace").strip()


def _read(body: bytes) -> _Control:
    try:
        return msgspec.json.decode(body or b"{}", type=_Control)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return _Control()  # what is wrong with it, the engines say


def _before(fleet: Fleet, path: str, said: _Control) -> None:
    """What the router does with its own requests, before engines are asked, so that nothing new is sent meanwhile."""
    if path == "/pause_generation":
        fleet.pause(said.mode if isinstance(said.mode, str) else "abort")
    elif path == "/abort_request":
        message = said.abort_message if isinstance(said.abort_message, str) else "Aborted by request"
        if said.abort_all is True:
            fleet.abort(None, message)
        elif isinstance(said.rid, str) and said.rid:
            fleet.abort(said.rid, message)


def _after(fleet: Fleet, path: str, said: _Control, answers: Sequence[Answer]) -> None:
    good = [answer for answer in answers if answer.ok]
    if path == "/continue_generation" and good:
        fleet.go_on()
    if path == "/pause_generation" and not good:
        fleet.go_on()  # nobody has paused
    if path in UPDATES and good:
        _updated(fleet, path, said, answers)


def _updated(fleet: Fleet, path: str, said: _Control, answers: Sequence[Answer]) -> None:
    """Some engines have taken it: those that have not must not serve beside them."""
    label = said.new_version if path == "/update_weight_version" else said.weight_version
    if isinstance(label, str):
        fleet.version = label
    fleet.updated = fleet.updated or path != "/begin_weight_update"
    fleet.updating = path == "/begin_weight_update" or (fleet.updating and path not in _LAST)
    by_engine = {answer.served.url: answer for answer in answers}
    for served in fleet.engines.values():
        answer = by_engine.get(served.url)
        if answer is None or not answer.ok:
            served.missed = served.torn = True
            why = answer.body if answer is not None else "it was down"
            fleet.fence(served, f"it has missed {path} ({why})"[:300], dead=served.dead)
        elif path in ("/begin_weight_update", "/update_weights_from_disk"):
            served.torn = False
        if answer is not None and answer.ok and not served.torn and path in _LAST:
            served.missed = False


def _joined(answers: Sequence[Answer]) -> dict[str, Any]:
    """The first failing answer's fields, or the first one's, and beside them every engine's."""
    shown = next((a for a in answers if not a.ok), answers[0])
    if isinstance(shown.body, dict):
        fields = dict(shown.body)
    else:
        fields = {"message": shown.body or ("ok" if shown.ok else "failed")}
    engines = [{"url": a.served.url, "status": a.status, "body": a.body} for a in answers]
    return fields | {"engines": engines}
