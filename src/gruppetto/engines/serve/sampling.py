"""Sampling parameters of the wire, and what of them this engine has.

Promise: a parameter that the engine does not have is refused by its name unless it asks for nothing; null is default.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import msgspec

from gruppetto.engines.base import Sampling
from gruppetto.engines.serve.refusal import Refusal
from gruppetto.engines.serve.settings import Limits, ModelCard, ServeSettings

GREEDY_BELOW = 1e-6
"""A temperature in [0, this) is greedy, as in SGLang."""


class SamplingParams(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """SGLang's `sampling_params`."""

    max_new_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    n: int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: bool | None = None
    no_stop_trim: bool | None = None
    sampling_seed: int | None = None
    stream_interval: int | None = None
    min_new_tokens: int | None = None
    min_p: float | None = None
    frequency_penalty: float | None = None
    presence_penalty: float | None = None
    repetition_penalty: float | None = None
    stop_regex: str | list[str] | None = None
    json_schema: Any = None
    regex: str | None = None
    ebnf: str | None = None
    structural_tag: Any = None
    logit_bias: dict[str, float] | None = None
    custom_params: Any = None


_NEUTRAL: dict[str, Any] = {
    "min_new_tokens": 0,
    "min_p": 0.0,
    "frequency_penalty": 0.0,
    "presence_penalty": 0.0,
    "repetition_penalty": 1.0,
    "spaces_between_special_tokens": True,
    "stop_regex": [],
    "json_schema": None,
    "regex": None,
    "ebnf": None,
    "structural_tag": None,
    "logit_bias": {},
    "custom_params": {},
}


NATIVE: Mapping[str, str] = {}
"""SGLang's own spelling. Another route's says for a name of SGLang's what its callers write instead."""


def refuse_unsupported(
    values: Any, neutral: Mapping[str, Any], where: str = "", spelling: Mapping[str, str] = NATIVE
) -> None:
    """Raises `Refusal` for the first field of `values` that asks for what the engine does not have."""
    for name, nothing in neutral.items():
        value = getattr(values, name)
        if value is not None and value != "" and value not in (nothing if isinstance(nothing, tuple) else (nothing,)):
            shown = msgspec.json.encode(value).decode()[:60]
            named = f"{where}{spelling.get(name, name)}"
            raise Refusal(f"{named} = {shown} is not supported by the embedded engine; leave it out", param=named)


def sampling_for(
    params: SamplingParams, prompt_tokens: int, seed: int, card: ModelCard, settings: ServeSettings,
    spelling: Mapping[str, str] = NATIVE, *, has_text: bool,
) -> Sampling:  # fmt: skip
    """What the engine is asked for. Raises `Refusal` naming what does not fit, as the caller spells it."""
    refuse_unsupported(params, _NEUTRAL, "" if spelling else "sampling_params.", spelling)
    stops = stop_strings(params.stop, settings.limits, has_text=has_text)
    own = params.stop_token_ids or []
    if len(own) > settings.limits.stop_ids:
        raise Refusal(f"stop_token_ids has {len(own)} ids; send at most {settings.limits.stop_ids}")
    eos = () if params.ignore_eos else card.eos_ids
    temperature = 1.0 if params.temperature is None else params.temperature
    top_k = -1 if params.top_k is None else params.top_k
    top_p = 1.0 if params.top_p is None else params.top_p
    if temperature < 0:
        raise Refusal(f"temperature = {temperature:g}; write 0 (greedy) or more", param="temperature")
    if top_k != -1 and top_k < 1:
        raise Refusal(f"top_k = {top_k}; write -1 (off) or at least 1", param="top_k")
    if params.sampling_seed is not None and not -(2**63) <= params.sampling_seed < 2**63:
        named = spelling.get("sampling_seed", "sampling_seed")
        raise Refusal(f"{named} = {params.sampling_seed} is no 64-bit integer", param=named)
    if not 0 < top_p <= 1:
        raise Refusal(f"top_p = {top_p:g}; write more than 0 and at most 1", param="top_p")
    return Sampling(
        max_tokens=_budget(params.max_new_tokens, prompt_tokens, card, settings, spelling),
        temperature=0.0 if temperature < GREEDY_BELOW else temperature,
        top_p=top_p,
        top_k=max(top_k, 0),
        stop_ids=tuple(dict.fromkeys((*own, *eos))),
        stop=stops,
        seed=seed if params.sampling_seed is None else params.sampling_seed,
    )


def stop_strings(stop: str | list[str] | None, limits: Limits, *, has_text: bool) -> tuple[str, ...]:
    """The stop strings, few and short."""
    stops = (stop,) if isinstance(stop, str) else tuple(stop or ())
    if stops and not has_text:
        raise Refusal("stop needs a tokenizer, which --skip-tokenizer-init left out; send stop_token_ids", param="stop")
    longest = max(map(len, stops), default=1)
    if len(stops) > limits.stops or longest > limits.stop_chars or "" in stops:
        raise Refusal(
            f"stop has {len(stops)} strings, the longest of {longest} characters; send at most {limits.stops} "
            f"that are not empty, of at most {limits.stop_chars} characters",
            param="stop",
        )
    return stops


def _budget(
    asked: int | None, prompt_tokens: int, card: ModelCard, settings: ServeSettings, spelling: Mapping[str, str]
) -> int:
    room = card.context - prompt_tokens
    prompt, budget = (spelling.get(name, name) for name in ("input_ids", "max_new_tokens"))
    if prompt_tokens < 1:
        raise Refusal("the prompt has no tokens; send at least 1", param=prompt)
    if room < 1:
        raise Refusal(
            f"the prompt has {prompt_tokens} tokens, the context {card.context}; send at most {card.context - 1}",
            param=prompt,
        )
    if asked is None:
        return min(settings.default_max_new_tokens, room)
    if asked < 1:
        scored = "the embedded engine does not score prompts: write 1 or more"
        raise Refusal(f"{budget} = {asked}; {scored}", param=budget)
    if asked > room and not settings.truncate:
        raise Refusal(
            f"prompt of {prompt_tokens} tokens + {budget} = {asked} is more than the context of {card.context}; "
            f"write {budget} = {room}, or start the server with --allow-auto-truncate",
            param=budget,
        )
    return min(asked, room)
