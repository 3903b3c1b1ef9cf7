"""Fields of OpenAI's routes: refused as the caller spells them, taken where their value asks for nothing."""

import msgspec
import pytest
from engines.serve.wire import get, ok, post

from gruppetto.engines.serve.absent import NEUTRAL, Absent

CHAT = {"messages": [{"role": "user", "content": "1+1"}]}
SHORT = {"max_tokens": 2}
ASKED = {"completions": {"prompt": [1, 2]}, "chat/completions": CHAT}
LONG_PROMPT = {
    "completions": {"prompt": [1] * 600},
    "chat/completions": {"messages": [{"role": "user", "content": "a" * 600}]},
}
NATIVE = ("max_new_tokens", "min_new_tokens", "sampling_seed", "sampling_params", "input_ids")
"""Names that only SGLang's native route has."""
SAMPLING = [
    ("temperature", -1), ("top_p", 0), ("top_k", -7), ("min_p", 0.5), ("min_tokens", 3), ("seed", 2**70),
    ("presence_penalty", 1), ("frequency_penalty", 1), ("repetition_penalty", 2), ("logit_bias", {"5": 1}), ("n", 0),
    ("stop", [""]), ("stop_token_ids", [1] * 2000), ("max_tokens", 0), ("max_tokens", 9999),
]  # fmt: skip


@pytest.mark.parametrize("route", ASKED)
@pytest.mark.parametrize(
    "fields",
    [*({name: value} for name, value in SAMPLING), {"min_tokens": 9999, "max_tokens": 1}],
    ids=lambda fields: "-".join(fields),
)
async def test_a_refusal_speaks_of_the_field_that_was_written(http, route, fields):
    status, found = await post(http, f"/v1/{route}", ASKED[route] | SHORT | fields)
    error = found["error"]
    assert status == 400, found
    assert next(iter(fields)) in error["message"]
    assert error.get("param") in (None, *fields)
    assert not [name for name in NATIVE if name in str(error)]
    assert "\n" not in error["message"]


@pytest.mark.parametrize("value", [0, 9999])
async def test_the_newer_name_of_the_budget_is_answered_by_it(http, value):
    for others in ({}, {"max_tokens": 3}):
        status, found = await post(http, "/v1/chat/completions", CHAT | others | {"max_completion_tokens": value})
        assert (status, found["error"]["param"]) == (400, "max_completion_tokens")
        assert f"max_completion_tokens = {value}" in found["error"]["message"]


@pytest.mark.parametrize("route", ASKED)
async def test_a_prompt_that_does_not_fit_is_named_as_the_route_has_it(http, route):
    status, found = await post(http, f"/v1/{route}", LONG_PROMPT[route])
    assert (status, found["error"]["param"]) == (400, next(iter(ASKED[route])))


@pytest.mark.parametrize("route", ASKED)
async def test_neutral_values_are_taken(http, route):
    """All of them in one body, the other spelling where there are two, and null for each."""
    neutral = {name: value[0] if isinstance(value, tuple) else value for name, value in NEUTRAL.items()}
    others = {name: value[1] for name, value in NEUTRAL.items() if isinstance(value, tuple)}
    assert others == {"service_tier": "default", "prompt_cache_retention": "in-memory", "function_call": "auto"}
    usual = {"n": 1, "logit_bias": {}, "presence_penalty": 0, "frequency_penalty": 0, "repetition_penalty": 1.0}
    usual |= {"min_p": 0, "min_tokens": 0, "user": "me", "safety_identifier": "me", "stop": None}
    usual |= {"metadata": {"job": "nightly"}, "prompt_cache_key": "p1"}
    stream = {"stream_options": {"include_obfuscation": False, "continuous_usage_stats": False}}
    for fields in (neutral, others, usual, stream, dict.fromkeys(neutral), dict.fromkeys(usual)):
        await ok(http, f"/v1/{route}", ASKED[route] | SHORT | fields)


@pytest.mark.parametrize("route", ASKED)
@pytest.mark.parametrize("name", [*NEUTRAL, "include_obfuscation"])
async def test_any_other_value_is_refused_by_name(http, route, name):
    fields = {"stream_options": {name: True}} if name not in NEUTRAL else {name: {"a": 1}}
    status, found = await post(http, f"/v1/{route}", ASKED[route] | SHORT | fields)
    assert status == 400
    assert f"{name} = " in found["error"]["message"]
    assert "not supported" in found["error"]["message"]


def test_every_field_that_is_absent_has_its_neutral_value():
    assert [field.name for field in msgspec.structs.fields(Absent)] == list(NEUTRAL)


TELL = [
    "health", "health_generate", "ready", "metrics", "v1/models", "model_info", "get_model_info", "server_info",
    "get_server_info", "v1/loads",
]  # fmt: skip


@pytest.mark.parametrize("path", TELL)
async def test_head_is_get_without_a_body(http, path):
    async with http.head(f"/{path}") as answer:
        assert (answer.status, await answer.read()) == (200, b"")


async def test_head_does_nothing_where_a_get_does_something(http):
    async with http.head("/flush_cache") as answer:
        assert answer.status == 405


async def test_the_seed_that_is_used_is_told(http, open_server):
    for path in ("server_info", "get_server_info"):
        assert isinstance((await get(http, f"/{path}"))[1]["random_seed"], int)
    _, seeded = await open_server(seed=17)
    assert (await get(seeded, "/server_info"))[1]["random_seed"] == 17
