"""What `/generate` answers about one request: text, ids and `meta_info`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from gruppetto.engines.base import EngineFinish
from gruppetto.engines.serve.calls import Call
from gruppetto.engines.serve.hub import Hub
from gruppetto.engines.serve.text import GrowingText, plain

QUEUED = "Abort in waiting queue"


@dataclass(frozen=True, slots=True, kw_only=True)
class View:
    """What the client wants to see of a request."""

    logprobs: bool = False
    text_in_logprobs: bool = False
    prompt_ids: bool = False
    skip_special: bool = True
    trim: bool = True
    interval: int = 1


class Answer:
    """One request's answer, as it grows. `since` > 0 gives what came after so many tokens only."""

    def __init__(self, hub: Hub, call: Call, view: View) -> None:
        self._hub, self._view = hub, view
        self.call = call
        self.sent = 0
        self._sent_chars = 0
        self._growing = GrowingText(self.decode, call.sampling.stop if view.trim else ())
        self._pushed = 0

    def decode(self, ids: Sequence[int]) -> str:
        """Text as this client wants it; only where there is a tokenizer."""
        assert self._hub.tokenizer is not None
        return self._hub.tokenizer.decode(ids, skip_special=self._view.skip_special)

    def text(self) -> str:
        """All text that is safe to show."""
        call = self.call
        if call.ended:
            return plain(self.decode, call.ids, call.stop, self._view.trim)
        new = call.ids[self._pushed :]
        self._pushed = len(call.ids)
        return self._growing.push(new)

    def new_text(self) -> str:
        """Text that was not shown yet."""
        text = self.text()
        new = text[self._sent_chars :]
        self._sent_chars = max(self._sent_chars, len(text))
        return new

    def due(self) -> bool:
        """Whether a stream has a chunk to send."""
        return self.call.ended or len(self.call.ids) - self.sent >= self._view.interval

    def whole(self) -> dict[str, Any]:
        """Everything so far."""
        return self._body(self.text, 0)

    def chunk(self, incremental: bool) -> dict[str, Any]:
        """The next chunk of a stream."""
        body = self._body(self.new_text, self.sent) if incremental else self.whole()
        self.sent = len(self.call.ids)
        return body

    def _body(self, text: Any, since: int) -> dict[str, Any]:
        body: dict[str, Any] = {"text": text()} if self._hub.tokenizer is not None else {}
        body["output_ids"] = self.call.ids[since:].tolist()
        if self._view.prompt_ids:
            body["prompt_token_ids"] = list(self.call.prompt)
        return body | {"meta_info": self._meta(since)}

    def _meta(self, since: int) -> dict[str, Any]:
        call = self.call
        finish = finish_reason(call)
        meta: dict[str, Any] = {"id": call.rid, "finish_reason": finish, "completion_tokens": len(call.ids)}
        meta |= versions(self._hub, call)
        if finish is None or finish.get("message") != QUEUED:
            meta |= {
                "prompt_tokens": len(call.prompt),
                "cached_tokens": call.cached,
                "reasoning_tokens": 0,  # nothing here parses reasoning out of the text
                "num_retractions": call.retractions,
            }
        if self._view.logprobs:
            meta["output_token_logprobs"] = self._logprobs(since)
        if call.ended:
            meta["e2e_latency"] = call.end_s - call.begin_s
        return meta

    def _logprobs(self, since: int) -> list[tuple[float, int, str | None]]:
        ids, logprobs = self.call.ids[since:], self.call.logprobs[since:]
        texts = [self.decode([i]) if self._view.text_in_logprobs else None for i in ids]
        return list(zip(logprobs.tolist(), ids.tolist(), texts, strict=True))


def finish_reason(call: Call) -> dict[str, Any] | None:
    """SGLang's object; None while it runs."""
    if not call.ended:
        return None
    if call.finish is EngineFinish.STOP:
        return {"type": "stop", "matched": call.stop}
    if call.finish is EngineFinish.LENGTH:
        return {"type": "length", "length": len(call.ids)}
    if not call.entered or (not call.ids and call.abort is not None and call.abort.status is None):
        return {"type": "abort", "message": QUEUED}
    abort = call.abort
    message = abort.message if abort is not None else "Aborted"
    return {"type": "abort", "message": message, "status_code": abort.status if abort else None, "err_type": None}


def versions(hub: Hub, call: Call) -> Mapping[str, Any]:
    """The labels of the weights: of the last token, as spans over output tokens, and (at the end) one a token."""
    starts = [start for _, start in call.spans]
    ends = [*starts[1:], len(call.ids)] if starts else []
    labels = [hub.updates.label_of(version) for version, _ in call.spans]
    spans = list(zip(labels, starts, ends, strict=True))
    found: dict[str, Any] = {
        "weight_version": labels[-1] if labels else hub.updates.label,
        "weight_versions": [{"version": label, "start": start, "end": end} for label, start, end in spans],
    }
    if call.ended:
        found["token_versions"] = [label for label, start, end in spans for _ in range(start, end)]
    return found
