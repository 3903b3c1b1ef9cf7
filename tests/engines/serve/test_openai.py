"""OpenAI's routes: completions, chat, streams, token ids, tools."""

import json

import pytest
from engines.serve.wire import events, get, ok, post, push

SEEDED = {"seed": 5, "max_tokens": 20, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "1+1"}]}
TOOL = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}


async def test_models(http):
    found = await get(http, "/v1/models")
    assert found[1]["object"] == "list"
    assert found[1]["data"][0]["id"] == (await get(http, "/model_info"))[1]["served_model_name"]
    assert found[1]["data"][0]["max_model_len"] == 512


async def test_completions_of_text_and_of_ids(http):
    by_text = await ok(http, "/v1/completions", {"prompt": "abc", "return_token_ids": True} | SEEDED)
    ids = by_text["prompt_token_ids"]
    native = {"input_ids": ids, "sampling_params": {"sampling_seed": 5, "max_new_tokens": 20, "ignore_eos": True}}
    told = await ok(http, "/generate", native)
    by_ids = await ok(http, "/v1/completions", {"prompt": ids, "return_token_ids": True, "logprobs": 0} | SEEDED)
    for found in (by_text, by_ids):
        assert found["object"] == "text_completion"
        choice = found["choices"][0]
        assert (choice["text"], choice["token_ids"]) == (told["text"], told["output_ids"])
        assert (choice["finish_reason"], choice["matched_stop"]) == ("length", None)
        usage = found["usage"]
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (3, 20, 23)
        assert found["metadata"] == {"weight_version": "default"}
    logprobs = by_ids["choices"][0]["logprobs"]
    assert len(logprobs["tokens"]) == len(logprobs["token_logprobs"]) == len(logprobs["text_offset"]) == 20


async def test_several_prompts_and_samples_are_choices_in_order(http):
    body = {"prompt": [[1, 2], [3, 4]], "n": 2, "return_token_ids": True} | SEEDED
    found = await ok(http, "/v1/completions", body)
    assert [choice["index"] for choice in found["choices"]] == [0, 1, 2, 3]
    assert found["usage"]["completion_tokens"] == 80
    first = await ok(http, "/v1/completions", {"prompt": [3, 4], "return_token_ids": True} | SEEDED)
    assert found["choices"][2]["token_ids"] == first["choices"][0]["token_ids"]
    assert len((await ok(http, "/v1/completions", {"prompt": ["a", "b"]}))["choices"]) == 2


async def test_a_completion_stream_adds_up(http):
    body = {"prompt": "abc", "return_token_ids": True, "logprobs": 0, "stop": "\x00\x01"} | SEEDED
    whole = (await ok(http, "/v1/completions", body))["choices"][0]
    chunks = await events(http, "/v1/completions", body | {"stream": True, "stream_options": {"include_usage": True}})
    assert chunks[-1]["choices"] == []
    assert chunks[-1]["usage"]["completion_tokens"] == 20
    choices = [chunk["choices"][0] for chunk in chunks[:-1]]
    assert "".join(choice["text"] for choice in choices) == whole["text"]
    assert [i for choice in choices for i in choice["token_ids"]] == whole["token_ids"]
    assert [p for c in choices for p in c["logprobs"]["token_logprobs"]] == whole["logprobs"]["token_logprobs"]
    assert [choice["finish_reason"] for choice in choices] == [None] * (len(choices) - 1) + ["length"]
    assert "prompt_token_ids" in chunks[0]
    assert len({chunk["id"] for chunk in chunks}) == 1


async def test_chat_uses_the_template_and_streams_the_same(http):
    body = CHAT | SEEDED | {"return_token_ids": True, "logprobs": True, "return_tokens_as_token_ids": True}
    found = await ok(http, "/v1/chat/completions", body)
    rendered = await ok(http, "/generate", {"text": "1+1\n= ", "return_prompt_token_ids": True})
    assert found["prompt_token_ids"] == rendered["prompt_token_ids"]
    choice = found["choices"][0]
    assert choice["message"]["role"] == "assistant"
    assert [c["token"] for c in choice["logprobs"]["content"]] == [f"token_id:{i}" for i in choice["token_ids"]]
    chunks = await events(http, "/v1/chat/completions", body | {"stream": True})
    deltas = [chunk["choices"][0] for chunk in chunks]
    assert deltas[0]["delta"]["role"] == "assistant"
    assert "".join(d["delta"].get("content", "") for d in deltas) == choice["message"]["content"]
    assert [i for d in deltas for i in d["token_ids"]] == choice["token_ids"]
    assert deltas[-1]["finish_reason"] == "length"


async def test_chat_without_a_budget_runs_to_the_context_and_content_may_be_parts(http):
    parts = [{"type": "text", "text": "1+"}, {"type": "text", "text": "1"}]
    body = {"messages": [{"role": "user", "content": parts}], "ignore_eos": True, "return_token_ids": True}
    found = await ok(http, "/v1/chat/completions", body | {"stop_token_ids": [7]})
    choice = found["choices"][0]
    assert choice["finish_reason"] == "stop" or found["usage"]["total_tokens"] == 512
    assert choice["matched_stop"] in (7, None)


async def test_tools_reach_the_template_and_calls_come_back(open_server):
    server, http = await open_server()
    tokenizer = server.hub.tokenizer._tokenizer
    tokenizer.chat_template = (
        "{% for t in tools or [] %}{{ t['function']['name'] }};{% endfor %}"
        "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
        "{{ c['function']['arguments']['a'] }}{% endfor %}{% endfor %}"
    )
    called = {"id": "c", "type": "function", "function": {"name": "add", "arguments": '{"a": 5}'}}
    messages = [
        {"role": "user", "content": "x"},
        {"role": "assistant", "content": None, "tool_calls": [called]},
        {"role": "tool", "tool_call_id": "c", "content": "y"},
    ]
    said = 'sure <tool_call>\n{"name": "add", "arguments": {"a": 1}}\n</tool_call>'
    force(server, said)
    body = {"messages": messages, "tools": [TOOL], "return_token_ids": True, "max_tokens": 200}
    found = await ok(http, "/v1/chat/completions", body)
    assert tokenizer.decode(found["prompt_token_ids"]) == "add;x5y"
    choice = found["choices"][0]
    assert choice["finish_reason"] == "tool_calls"
    assert choice["message"]["content"] == "sure"
    call = choice["message"]["tool_calls"][0]
    assert (call["type"], call["function"]["name"]) == ("function", "add")
    assert json.loads(call["function"]["arguments"]) == {"a": 1}
    deltas = [chunk["choices"][0] for chunk in await events(http, "/v1/chat/completions", body | {"stream": True})]
    streamed = [call for d in deltas for call in d["delta"].get("tool_calls", [])]
    assert [(c["index"], c["function"]) for c in streamed] == [(0, call["function"])]
    assert "".join(d["delta"].get("content", "") for d in deltas) == "sure"
    assert deltas[-1]["finish_reason"] == "tool_calls"
    without = await ok(http, "/v1/chat/completions", body | {"tool_choice": "none"})
    assert without["choices"][0]["message"]["content"] == said
    assert tokenizer.decode(without["prompt_token_ids"]) == "x5y"


def force(server, text):
    """From here on the engine samples `text`, then its end token: a real engine on weights that know nothing else."""
    core = server.hub.engine.calls._thread.serving.core
    ids = [*server.hub.tokenizer.encode(text), server.hub.card.eos_ids[0]]
    sampled = type(core)._append

    def append(live, picks, logprobs):
        for row in live:
            picks[row.slot] = ids[len(row.logprobs)]
        return sampled(core, live, picks, logprobs)

    core._append = append


async def test_versions_and_rids(http, tiny_model):
    from engines.kit import other_weights

    await push(http, other_weights(tiny_model, shift=0.0), "21")
    body = CHAT | {"rid": "chat-1", "return_weight_versions": True, "max_tokens": 4, "ignore_eos": True}
    found = await ok(http, "/v1/chat/completions", body)
    assert found["id"] == "chat-1"
    assert found["metadata"]["weight_version"] == "21"
    assert found["choices"][0]["weight_versions"] == [{"version": "21", "start": 0, "end": 4}]
    await ok(http, "/update_weight_version", {"new_version": "default"})


@pytest.mark.parametrize(
    ("path", "body", "says"),
    [
        ("completions", {}, "prompt"),
        ("completions", {"prompt": ""}, "no tokens"),
        ("completions", {"prompt": []}, "empty"),
        ("completions", {"prompt": ["a", 1]}, "mixes"),
        ("completions", {"prompt": "a", "logprobs": 3}, "logprobs"),
        ("completions", {"prompt": "a", "echo": True}, "echo"),
        ("completions", {"prompt": "a", "best_of": 2}, "best_of"),
        ("completions", {"prompt": "a", "n": -1}, "n = -1"),
        ("completions", {"prompt": "a", "logit_bias": {"1": 1}}, "logit_bias"),
        ("completions", {"prompt": "a", "response_format": {"type": "json_object"}}, "response_format"),
        ("completions", {"prompt": "a", "max_tokens": 5000}, "write max_tokens = 511"),
        ("completions", {"prompt": "a", "rid": "x" * 1000}, "rid"),
        ("completions", {"prompt": "a", "seed": 2**70}, "seed"),
        ("chat/completions", {"messages": []}, "messages"),
        ("chat/completions", {"messages": [{"content": "a"}]}, "no role"),
        ("chat/completions", {"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, "text only"),
        ("chat/completions", {"messages": [{"role": "user", "content": 3}]}, "text only"),
        ("chat/completions", CHAT | {"tools": [TOOL], "tool_choice": "required"}, "tool_choice"),
        ("chat/completions", CHAT | {"tools": [{"type": "function"}]}, "function"),
        ("chat/completions", CHAT | {"top_logprobs": 5}, "top_logprobs"),
        ("chat/completions", CHAT | {"chat_template_kwargs": {"chat_template": "x"}}, "chat_template"),
        ("chat/completions", CHAT | {"reasoning_effort": "high"}, "reasoning_effort"),
    ],
)
async def test_what_is_not_there_is_refused_by_name(http, path, body, says):
    status, found = await post(http, f"/v1/{path}", body)
    assert status == 400, found
    assert says in found["error"]["message"]
