"""A field that is null asks for nothing, and takes nothing away that was asked for."""

import pytest
from engines.serve.wire import ok

LONG = {"max_tokens": 6, "ignore_eos": True}
CHAT = {"messages": [{"role": "user", "content": "hi"}], "return_token_ids": True, **LONG}


@pytest.mark.parametrize("more", [{}, {"top_logprobs": None}, {"top_logprobs": 0}])
async def test_logprobs_that_were_asked_for_come_beside_null_top_logprobs(http, more):
    (choice,) = (await ok(http, "/v1/chat/completions", CHAT | {"logprobs": True} | more))["choices"]
    assert len(choice["token_ids"]) == 6
    assert len(choice["logprobs"]["content"]) == 6
    assert all(entry["logprob"] <= 0 for entry in choice["logprobs"]["content"])


async def test_so_do_those_of_generate(http):
    params = {"max_new_tokens": 6, "ignore_eos": True, "stop": None, "n": None}
    body = {"input_ids": [1, 2], "sampling_params": params, "return_logprob": True, "top_logprobs_num": None}
    found = await ok(http, "/generate", body)
    assert len(found["output_ids"]) == len(found["meta_info"]["output_token_logprobs"]) == 6
