"""Fields of OpenAI's routes, and of SGLang's and vLLM's additions to them, that this engine has nothing for.

Promise: their neutral value, which clients send because it is the default, is taken; any other one is refused by name.
"""

from __future__ import annotations

from typing import Any

import msgspec


class Absent(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    """Each as JSON has it; `NEUTRAL` says what may be in it."""

    store: Any = None
    service_tier: Any = None
    audio: Any = None
    modalities: Any = None
    prediction: Any = None
    verbosity: Any = None
    web_search_options: Any = None
    prompt_cache_retention: Any = None
    functions: Any = None
    function_call: Any = None
    response_format: Any = None
    structured_outputs: Any = None
    regex: Any = None
    ebnf: Any = None
    stop_regex: Any = None
    bad_words: Any = None
    allowed_token_ids: Any = None
    use_beam_search: Any = None
    length_penalty: Any = None
    spaces_between_special_tokens: Any = None
    truncate_prompt_tokens: Any = None
    prompt_logprobs: Any = None
    lora_path: Any = None
    session_params: Any = None
    priority: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    continue_final_message: Any = None
    add_generation_prompt: Any = None
    custom_params: Any = None
    custom_logit_processor: Any = None


NEUTRAL: dict[str, Any] = {
    "store": False,
    "service_tier": ("auto", "default"),
    "audio": None,
    "modalities": ["text"],
    "prediction": None,
    "verbosity": "medium",
    "web_search_options": None,
    "prompt_cache_retention": ("in_memory", "in-memory"),
    "functions": [],
    "function_call": ("none", "auto"),
    "response_format": {"type": "text"},
    "structured_outputs": None,
    "regex": None,
    "ebnf": None,
    "stop_regex": [],
    "bad_words": [],
    "allowed_token_ids": None,
    "use_beam_search": False,
    "length_penalty": 1,
    "spaces_between_special_tokens": True,
    "truncate_prompt_tokens": None,
    "prompt_logprobs": None,
    "lora_path": None,
    "session_params": None,
    "priority": 0,
    "return_hidden_states": False,
    "return_routed_experts": False,
    "continue_final_message": False,
    "add_generation_prompt": True,
    "custom_params": {},
    "custom_logit_processor": None,
}
"""By field what asks for nothing, as null and "" do everywhere; a tuple has several such values."""
