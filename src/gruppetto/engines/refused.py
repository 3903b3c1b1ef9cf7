"""What an engine refuses before it costs anything: the same for one in this process and for a server."""

from __future__ import annotations

from gruppetto.engines.base import GenerateRequest
from gruppetto.errors import UserError


def refuse_unservable(request: GenerateRequest, *, context: int, can_decode: bool, vocab: int | None = None) -> None:
    """Raises `UserError` for the first thing that is wrong with a request; ids are looked at where `vocab` is known."""
    s, ids, rid = request.sampling, request.token_ids, request.rid
    if s.max_tokens < 1:
        raise UserError(f"request {rid}: max_tokens = {s.max_tokens} leaves no budget; send nothing, or 1 or more")
    if not ids:
        raise UserError(f"request {rid}: no tokens; a prompt needs at least 1 (the tokenizer's bos token will do)")
    if vocab is not None and (min(ids) < 0 or max(ids) >= vocab):
        bad = next(i for i in ids if not 0 <= i < vocab)
        raise UserError(
            f"request {rid}: token id {bad} is outside the model's vocabulary of {vocab}; check the tokenizer"
        )
    if len(ids) >= context:
        raise UserError(
            f"request {rid}: {len(ids)} tokens leave no room to generate in a context of {context}; send at most "
            f"{context - 1} tokens or write engine.context = {len(ids) * 2}"
        )
    if not 0 <= request.made <= len(ids):
        raise UserError(f"request {rid}: made = {request.made} of {len(ids)} tokens; write 0 to {len(ids)}")
    _refuse_sampling(request, can_decode)


def _refuse_sampling(request: GenerateRequest, can_decode: bool) -> None:
    s, rid = request.sampling, request.rid
    if s.temperature < 0 or not 0 < s.top_p <= 1 or s.top_k < 0:
        raise UserError(
            f"request {rid}: temperature = {s.temperature}, top_p = {s.top_p}, top_k = {s.top_k}; "
            "write temperature >= 0, 0 < top_p <= 1, top_k >= 0"
        )
    if "" in s.stop:
        raise UserError(f"request {rid}: an empty stop string would stop everywhere; leave it out")
    if s.stop and not can_decode:
        raise UserError(
            f"request {rid}: stop = {s.stop!r} needs the tokenizer's decode; give the engine one, or use stop_ids"
        )
