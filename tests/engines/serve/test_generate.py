"""/generate: what comes back, whole and as a stream, and what is refused."""

import itertools
import json

import pytest
from engines.kit import ids_of, logprobs_of, request
from engines.serve.wire import events, generate, get, ok, post

REFUSED = {
    "min_p": 0.1,
    "min_new_tokens": 2,
    "frequency_penalty": 0.5,
    "presence_penalty": 0.5,
    "repetition_penalty": 1.1,
    "stop_regex": "a+",
    "json_schema": "{}",
    "regex": "a",
    "ebnf": "root ::= 'a'",
    "structural_tag": "x",
    "logit_bias": {"1": 2.0},
    "custom_params": {"a": 1},
    "no_such_thing": 1,
}


async def test_the_tokens_and_logprobs_are_those_of_the_engine(http, open_engine):
    engine = await open_engine(context=512)
    told = await engine.generate(request("r", [5, 6, 7], max_tokens=12, seed=9, temperature=0.7))
    found = await generate(
        http, [5, 6, 7], rid="mine", return_logprob=True,
        params={"max_new_tokens": 12, "sampling_seed": 9, "temperature": 0.7, "ignore_eos": True},
    )  # fmt: skip
    meta = found["meta_info"]
    assert found["output_ids"] == ids_of(told)
    assert [i for _, i, _ in meta["output_token_logprobs"]] == ids_of(told)
    assert [p for p, _, _ in meta["output_token_logprobs"]] == pytest.approx(logprobs_of(told), abs=1e-5)
    assert {text for *_, text in meta["output_token_logprobs"]} == {None}
    assert meta["id"] == "mine"
    assert meta["finish_reason"] == {"type": "length", "length": 12}
    assert (meta["prompt_tokens"], meta["completion_tokens"], meta["num_retractions"]) == (3, 12, 0)
    assert meta["weight_version"] == "default"
    assert meta["weight_versions"] == [{"version": "default", "start": 0, "end": 12}]
    assert meta["token_versions"] == ["default"] * 12
    assert meta["e2e_latency"] > 0


async def test_greedy_null_and_defaults(http):
    null = {"temperature": None, "top_p": None, "top_k": None, "stop": None, "min_p": None, "max_new_tokens": None}
    assert len((await generate(http, params=null | {"ignore_eos": True}))["output_ids"]) == 128
    same = [await generate(http, params={"temperature": t, "sampling_seed": s}) for t, s in ((0, 1), (1e-9, 2))]
    assert same[0]["output_ids"] == same[1]["output_ids"]


async def test_a_batch_with_values_for_each_and_one_sample_more(http):
    body = {
        "input_ids": [[1, 2], [3, 4]],
        "rid": "batch",
        "sampling_params": [
            {"max_new_tokens": 3, "ignore_eos": True},
            {"max_new_tokens": 4, "n": 2, "ignore_eos": True},
        ],
        "return_logprob": [False, True],
        "return_prompt_token_ids": True,
    }
    found = await ok(http, "/generate", body)
    assert [len(one["output_ids"]) for one in found] == [3, 4, 4]
    assert [one["meta_info"]["id"] for one in found] == ["batch_0", "batch_1", "batch_2"]
    assert [one["prompt_token_ids"] for one in found] == [[1, 2], [3, 4], [3, 4]]
    assert ["output_token_logprobs" in one["meta_info"] for one in found] == [False, True, True]
    assert found[1]["output_ids"] != found[2]["output_ids"]


async def test_samples_of_a_seed_are_the_same_again_and_unseeded_ones_differ(http):
    seeded = {"sampling_seed": 4, "n": 3, "max_new_tokens": 12}
    one, two = [await generate(http, params=seeded) for _ in range(2)]
    assert [a["output_ids"] for a in one] == [a["output_ids"] for a in two]
    assert len({tuple(a["output_ids"]) for a in one}) == 3
    free = [await generate(http, params={"max_new_tokens": 12}) for _ in range(2)]
    assert free[0]["output_ids"] != free[1]["output_ids"]


async def test_stops_end_a_request_and_leave_their_ids(http):
    long = {"max_new_tokens": 60, "sampling_seed": 3, "ignore_eos": True}
    free = await generate(http, params=long)
    at = free["output_ids"].index(free["output_ids"][10])
    by_id = await generate(http, params=long | {"stop_token_ids": [free["output_ids"][10]]})
    assert by_id["output_ids"] == free["output_ids"][: at + 1]
    assert by_id["meta_info"]["finish_reason"] == {"type": "stop", "matched": free["output_ids"][10]}
    word = next(c for c in free["text"] if c.isascii() and c.isprintable())
    by_text = await generate(http, params=long | {"stop": word})
    kept = await generate(http, params=long | {"stop": [word], "no_stop_trim": True})
    assert by_text["meta_info"]["finish_reason"] == {"type": "stop", "matched": word}
    assert by_text["output_ids"] == kept["output_ids"] == free["output_ids"][: len(kept["output_ids"])]
    assert word not in by_text["text"]
    assert kept["text"].endswith(word)


async def test_end_tokens_stop_unless_they_are_ignored(http, tiny_model):
    end = json.loads((tiny_model / "config.json").read_text())["eos_token_id"]
    for seed in range(40):
        params = {"max_new_tokens": 256, "sampling_seed": seed}
        found = await generate(http, params=params)
        if found["meta_info"]["finish_reason"]["type"] == "stop":
            break
    assert found["meta_info"]["finish_reason"] == {"type": "stop", "matched": end}
    assert found["output_ids"][-1] == end
    assert "<|end|>" not in found["text"]
    shown = await generate(http, params=params | {"skip_special_tokens": False, "no_stop_trim": True})
    assert shown["text"].endswith("<|end|>")
    assert len((await generate(http, params=params | {"ignore_eos": True}))["output_ids"]) == 256


async def test_a_cumulative_stream_grows_to_the_whole(http):
    params = {"max_new_tokens": 40, "sampling_seed": 5, "ignore_eos": True}
    body = {"input_ids": [1, 2], "sampling_params": params, "return_logprob": True}
    whole = await ok(http, "/generate", body)
    chunks = await events(http, "/generate", body | {"stream": True})
    assert len(chunks) > 2
    for before, after in itertools.pairwise(chunks):
        assert after["output_ids"][: len(before["output_ids"])] == before["output_ids"]
        assert after["text"].startswith(before["text"])
        assert before["meta_info"]["finish_reason"] is None
    for chunk in chunks:
        assert len(chunk["meta_info"]["output_token_logprobs"]) == len(chunk["output_ids"])
    assert chunks[-1]["output_ids"] == whole["output_ids"]
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["meta_info"]["finish_reason"] == whole["meta_info"]["finish_reason"]


async def test_an_incremental_stream_adds_up_to_the_whole(open_server):
    _, http = await open_server(incremental=True)
    params = {"max_new_tokens": 40, "sampling_seed": 5, "stream_interval": 3}
    body = {"input_ids": [1, 2], "sampling_params": params, "return_logprob": True}
    whole = await ok(http, "/generate", body)
    chunks = await events(http, "/generate", body | {"stream": True})
    assert all(len(chunk["output_ids"]) >= 3 for chunk in chunks[:-1])
    assert [i for chunk in chunks for i in chunk["output_ids"]] == whole["output_ids"]
    assert "".join(chunk["text"] for chunk in chunks) == whole["text"]
    assert sum((c["meta_info"]["output_token_logprobs"] for c in chunks), [])  # noqa: RUF017
    assert [len(c["meta_info"]["output_token_logprobs"]) for c in chunks] == [len(c["output_ids"]) for c in chunks]


async def test_a_batch_streams_with_indexes(http):
    body = {"input_ids": [[1], [2], [3]], "sampling_params": {"max_new_tokens": 5, "ignore_eos": True}, "stream": True}
    chunks = await events(http, "/generate", body)
    last = {chunk["index"]: chunk for chunk in chunks}
    assert sorted(last) == [0, 1, 2]
    assert all(len(chunk["output_ids"]) == 5 and chunk["meta_info"]["finish_reason"] for chunk in last.values())


async def test_text_of_tokens(http):
    found = await generate(http, return_logprob=True, return_text_in_logprobs=True, params={"max_new_tokens": 4})
    assert all(isinstance(text, str) for *_, text in found["meta_info"]["output_token_logprobs"])
    assert (await ok(http, "/generate", {"text": "abc", "return_prompt_token_ids": True}))["prompt_token_ids"] == [
        64, 65, 66,
    ]  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
async def test_a_sampling_parameter_that_is_not_there_is_refused_by_name(http, name):
    body = {"input_ids": [1], "sampling_params": {name: REFUSED[name]}}
    status, found = await post(http, "/generate", body)
    assert status == 400
    assert name in found["error"]["message"]


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"input_ids": []}, "empty"),
        ({"input_ids": [[]]}, "no tokens"),
        ({"input_ids": [1, [2]]}, "mixes"),
        ({"input_ids": [-1]}, "vocabulary"),
        ({"input_ids": [100000]}, "vocabulary"),
        ({"input_ids": [1], "text": "a"}, "exactly one"),
        ({}, "exactly one"),
        ({"input_ids": [1] * 512}, "context of 512|the context 512"),
        ({"input_ids": [1] * 500, "sampling_params": {"max_new_tokens": 13}}, "write max_new_tokens = 12"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": 0}}, "does not score"),
        ({"input_ids": [1], "sampling_params": {"max_new_tokens": True}}, "max_new_tokens"),
        ({"input_ids": [1], "sampling_params": {"temperature": -1}}, "temperature"),
        ({"input_ids": [1], "sampling_params": {"top_p": 0}}, "top_p"),
        ({"input_ids": [1], "sampling_params": {"top_k": 0}}, "top_k"),
        ({"input_ids": [1], "sampling_params": {"n": 0}}, "n = 0"),
        ({"input_ids": [1], "sampling_params": {"n": 100000}}, "at most 4096"),
        ({"input_ids": [1], "sampling_params": {"stop": ""}}, "stop"),
        ({"input_ids": [1], "sampling_params": {"stop": ["a"] * 100}}, "stop"),
        ({"input_ids": [1], "logprob_start_len": 0}, "logprob_start_len"),
        ({"input_ids": [1], "top_logprobs_num": 2}, "top_logprobs_num"),
        ({"input_ids": [1], "lora_path": "x"}, "lora_path"),
        ({"input_ids": [1], "session_params": {"id": "x"}}, "session_params"),
        ({"input_ids": [1], "priority": 3}, "priority"),
        ({"input_ids": [1], "no_such_field": 1}, "no_such_field"),
        ({"input_ids": [1], "rid": ""}, "rid"),
        ({"input_ids": [[1], [2]], "rid": ["a", "a"]}, "rid 'a' is live"),
        ({"input_ids": [[1], [2]], "rid": ["a"]}, "rid has 1"),
        ({"input_ids": [[1], [2]], "return_logprob": [True]}, "return_logprob has 1"),
    ],
)
async def test_what_does_not_fit_is_refused_with_400(http, fields, says):
    status, found = await post(http, "/generate", fields)
    assert status == 400, found
    assert any(word in found["error"]["message"] for word in says.split("|")), found


async def test_a_budget_without_a_number_ends_at_the_context_and_truncation_is_a_choice(http, open_server):
    found = await generate(http, [1] * 500, params={"max_new_tokens": None, "ignore_eos": True})
    assert found["meta_info"]["finish_reason"] == {"type": "length", "length": 12}
    _, cutting = await open_server(truncate=True)
    found = await generate(cutting, [1] * 500, params={"max_new_tokens": 9999, "ignore_eos": True})
    assert len(found["output_ids"]) == 12


async def test_without_a_tokenizer_there_are_ids_and_no_text(open_server):
    _, http = await open_server(choice={"skip_tokenizer": True})
    assert "text" not in await generate(http)
    assert (await generate(http, params={"stop_token_ids": list(range(258))}))["meta_info"]["completion_tokens"] == 1
    for body in ({"text": "a"}, {"input_ids": [1], "sampling_params": {"stop": "a"}}):
        status, found = await post(http, "/generate", body)
        assert status == 400
        assert "skip-tokenizer-init" in found["error"]["message"]
    found = await ok(http, "/v1/completions", {"prompt": [1, 2], "return_token_ids": True, "logprobs": 0})
    assert len(found["choices"][0]["token_ids"]) == len(found["choices"][0]["logprobs"]["tokens"])
    assert (await post(http, "/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}]}))[0] == 400
    assert (await get(http, "/model_info"))[1]["tokenizer_path"] is None


async def test_put_is_post_and_other_methods_are_405(http):
    async with http.put("/generate", json={"input_ids": [1]}) as answer:
        assert answer.status == 200
    async with http.get("/generate") as answer:
        assert answer.status == 405
        error = (await answer.json())["error"]
        assert "GET /generate" in error["message"]
        assert error["type"] == "MethodNotAllowed"
    assert (await get(http, "/nowhere"))[0] == 404
