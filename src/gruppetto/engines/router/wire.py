"""What the router reads of a request's body and of an answer: sizes and keys. Bodies themselves pass as they are.

SGLang's `/generate` and OpenAI's two routes. What does not fit is not judged here: the engine refuses it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import msgspec

from gruppetto.engines.router.prefixes import Prefixes
from gruppetto.engines.router.tickets import Ask

_CHARS = 4
"""Characters of a token, about."""
_BUDGET = 128
"""`max_new_tokens` where none is sent (SGLang's)."""
_OPEN_BUDGET = 4096
"""Tokens believed to be the most of a chat without a limit."""
SESSION_HEADERS = ("X-SMG-Routing-Key", "X-Session-ID", "X-Session-Id")
_COUNT = {
    name: re.compile(rb'"%s"\s*:\s*(\d{1,12})(?!\d)' % name.encode()) for name in ("completion_tokens", "cached_tokens")
}
"""Numbers that no engine can mean are none."""
_MOST = 1 << 31
"""Tokens that a budget is taken for at most, whatever a client writes: the engine refuses it."""


class _Body(msgspec.Struct):
    """Only what is looked at; `Raw` is passed over unread."""

    input_ids: msgspec.Raw = msgspec.Raw()
    text: msgspec.Raw = msgspec.Raw()
    prompt: msgspec.Raw = msgspec.Raw()
    messages: msgspec.Raw = msgspec.Raw()
    sampling_params: msgspec.Raw = msgspec.Raw()
    max_tokens: Any = None
    max_completion_tokens: Any = None
    n: Any = None
    rid: Any = None
    stream: Any = None
    routing_key: Any = None
    session_id: Any = None


class _Params(msgspec.Struct):
    max_new_tokens: Any = None
    n: Any = None


_BODY = msgspec.json.Decoder(_Body)
_PARAMS = msgspec.json.Decoder(_Params)
_PARAMS_LIST = msgspec.json.Decoder(list[_Params])


@dataclass(frozen=True, slots=True, kw_only=True)
class Facts:
    """Of one request. `single` tells whether `/generate` answers with one object."""

    ask: Ask
    rid: str | None
    rids: tuple[str, ...]
    stream: bool
    single: bool
    prompt: bytes
    """The prompt as sent, for the prefix that it shares with others."""


def read_facts(body: bytes, session: str | None, prefixes: Prefixes | None) -> Facts | None:
    """What a body says; None for one that is no JSON object, which the engine will refuse. `session` is the header's
    key. Without a key, the session is the one whose prompt this one goes on from (`prefixes`)."""
    try:
        found = _BODY.decode(body)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    raw, tokens, prompts = _prompt(found)
    budget, samples = _budget(found, prompts)
    rows = max(1, prompts * samples)
    key = session or _text(found.routing_key) or _text(found.session_id)
    shared, like = None, None
    if key is None and prefixes is not None and prompts == 1 and (known := prefixes.find(raw)) is not None:
        key, shared, like = known.session, int(known.share * tokens), known.like
    rids = tuple(rid for rid in found.rid if isinstance(rid, str)) if isinstance(found.rid, list) else ()
    return Facts(
        ask=Ask(
            context=tokens * samples,
            budget=max(1, budget) * rows,
            session=key,
            rows=rows,
            shared=shared,
            like=like,
        ),
        rid=_text(found.rid),
        rids=rids,
        stream=found.stream is True,
        single=rows == 1 and not _is_list(raw),
        prompt=raw,
    )


def _text(value: object) -> str | None:
    return value if isinstance(value, str) and value else None


def _is_list(raw: bytes) -> bool:
    """Whether it is several prompts: a list of lists, or of texts."""
    return raw[:16].replace(b" ", b"").startswith((b"[[", b'["'))


def _prompt(body: _Body) -> tuple[bytes, int, int]:
    """The prompt as sent, its tokens (counted for ids, guessed for text), and how many prompts it is."""
    ids, text = bytes(body.input_ids), bytes(body.text)
    raw = ids or text or bytes(body.prompt)
    if not raw:
        raw = bytes(body.messages)
        return raw, max(1, len(raw) // _CHARS), 1
    if not raw.startswith(b"["):
        return raw, max(1, len(raw) // _CHARS), 1
    if not _is_list(raw):
        return raw, raw.count(b",") + 1, 1
    if raw[:16].replace(b" ", b"").startswith(b"[["):
        return raw, raw.count(b",") + 1, max(1, raw.count(b"[") - 1)
    return raw, max(1, len(raw) // _CHARS), max(1, _texts(raw))


def _texts(raw: bytes) -> int:
    try:
        return len(msgspec.json.decode(raw, type=list[str]))
    except (msgspec.MsgspecError, RecursionError):
        return 1


def _budget(body: _Body, prompts: int) -> tuple[int, int]:
    """Tokens one sample may make, and samples of each prompt."""
    params = bytes(body.sampling_params)
    budget: object = _OPEN_BUDGET if body.messages else _BUDGET
    samples: object = body.n
    try:
        if params.startswith(b"["):
            several = _PARAMS_LIST.decode(params)
            budget = max((p.max_new_tokens for p in several if isinstance(p.max_new_tokens, int)), default=_BUDGET)
            total = sum(p.n if isinstance(p.n, int) else 1 for p in several)
            samples = -(-total // max(1, prompts))
        elif params:
            one = _PARAMS.decode(params)
            budget, samples = one.max_new_tokens, one.n
    except (msgspec.MsgspecError, RecursionError):
        pass
    for value in (body.max_tokens, body.max_completion_tokens):
        budget = value if isinstance(value, int) else budget
    most = min(budget, _MOST) if isinstance(budget, int) and budget > 0 else _BUDGET
    return most, samples if isinstance(samples, int) and samples > 0 else 1


def count(name: str, answer: bytes) -> int | None:
    """The sum of a count over an answer's objects; None where it says none."""
    found = _COUNT[name].findall(answer)
    return sum(map(int, found)) if found else None


def last_count(name: str, piece: bytes) -> int | None:
    """The newest of a count in a piece of a stream, where each event has the number so far."""
    at = piece.rfind(b'"' + name.encode() + b'"')
    match = _COUNT[name].match(piece, at) if at >= 0 else None
    return int(match[1]) if match else None


def aborted(facts: Facts, path: str, message: str) -> Any:
    """The answer to a request that was aborted before any engine had it: no tokens, as engines answer themselves."""
    if path == "/generate":
        reason = {"type": "abort", "message": message}
        rids = facts.rids or (facts.rid or "",) * facts.ask.rows
        found = [
            {
                "text": "",
                "output_ids": [],
                "meta_info": {"id": rid, "finish_reason": reason, "completion_tokens": 0, "output_token_logprobs": []},
            }
            for rid in rids
        ]
        return found[0] if facts.single else found
    if path.endswith("/chat/completions"):
        said = {"message": {"role": "assistant", "content": ""}}
        kind = "chat.completion"
    else:
        said, kind = {"text": ""}, "text_completion"  # type: ignore[dict-item]
    choices = [{"index": i, "finish_reason": "abort", **said} for i in range(facts.ask.rows)]
    usage = {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0}
    return {"id": facts.rid or "aborted", "object": kind, "choices": choices, "usage": usage}
