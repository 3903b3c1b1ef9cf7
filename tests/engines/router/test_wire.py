"""What is read of bodies and answers, and how prompts that go on from each other are found."""

import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gruppetto.engines.router.prefixes import Prefixes
from gruppetto.engines.router.watch import sglang_reading, vllm_reading
from gruppetto.engines.router.wire import count, last_count, read_facts


def facts(value, session=None):
    return read_facts(json.dumps(value).encode(), session, None)


@settings(deadline=None)  # a busy machine is no failure
@given(ids=st.lists(st.integers(0, 99999), min_size=1, max_size=50), budget=st.integers(1, 999))
def test_ids_are_counted(ids, budget):
    found = facts({"input_ids": ids, "sampling_params": {"max_new_tokens": budget}, "rid": "r", "stream": True})
    assert (found.ask.context, found.ask.budget, found.ask.rows) == (len(ids), budget, 1)
    assert (found.rid, found.stream, found.single) == ("r", True, True)


@settings(deadline=None)  # a busy machine is no failure
@given(
    prompts=st.lists(st.lists(st.integers(0, 9), min_size=1, max_size=9), min_size=1, max_size=5),
    n=st.integers(1, 3),
)
def test_batches_are_counted_in_rows(prompts, n):
    found = facts({"input_ids": prompts, "sampling_params": {"max_new_tokens": 4, "n": n}})
    assert found.ask.rows == len(prompts) * n
    assert found.ask.context == n * sum(map(len, prompts))
    assert found.ask.budget == 4 * found.ask.rows
    assert not found.single


@pytest.mark.parametrize(
    ("value", "rows", "budget"),
    [
        ({"text": "x" * 400}, 1, 128),
        ({"text": ["a", "b"]}, 2, 256),
        ({"text": ["a", "b"], "sampling_params": [{"max_new_tokens": 5}, {"n": 1}]}, 2, 10),
        ({"prompt": [1, 2], "max_tokens": 9, "n": 2}, 2, 18),
        ({"prompt": "hello", "max_tokens": 9}, 1, 9),
        ({"messages": [{"role": "user", "content": "x"}]}, 1, 4096),
        ({"messages": [], "max_completion_tokens": 7}, 1, 7),
        ({"input_ids": "wrong", "sampling_params": 3, "n": "x", "max_tokens": {}}, 1, 128),
        ({}, 1, 128),
    ],
)
def test_shapes(value, rows, budget):
    found = facts(value)
    assert (found.ask.rows, found.ask.budget) == (rows, budget)


def test_the_key_is_the_headers_then_the_bodys():
    value = {"text": "x", "routing_key": "b", "session_id": "c"}
    assert facts(value, "a").ask.session == "a"
    assert facts(value).ask.session == "b"
    assert facts({"text": "x", "session_id": "c"}).ask.session == "c"
    assert facts({"text": "x"}).ask.session is None


@settings(deadline=None)  # a busy machine is no failure
@given(st.binary(max_size=80))
def test_any_bytes_are_read_or_no_json(raw):
    read_facts(raw, None, Prefixes())


def test_counts_of_answers():
    one = b'{"meta_info": {"completion_tokens": 7, "cached_tokens":3}}'
    assert count("completion_tokens", one) == 7
    assert count("completion_tokens", b"[" + one + b"," + one + b"]") == 14
    assert count("cached_tokens", b"{}") is None
    piece = b'data: {"completion_tokens": 1}\n\ndata: {"completion_tokens": 2, "x": 1}\n\n'
    assert last_count("completion_tokens", piece) == 2
    assert last_count("completion_tokens", b'data: {"completion_tokens"') is None


def test_a_prompt_that_goes_on_is_of_the_same_session():
    prefixes = Prefixes()
    first = prefixes.find(b"a" * 1000)
    assert first.share == 0
    second = prefixes.find(b"a" * 1000 + b"b" * 800)
    assert second.session == first.session
    assert 0.3 < second.share <= 1000 / 1800
    assert prefixes.find(b"c" * 1000).session != first.session
    assert prefixes.find(b"short") is None


def test_members_of_a_group_part_where_their_answers_do():
    prefixes = Prefixes()
    prompt = bytes(range(256)) * 8
    shared = {prefixes.find(prompt).session for _ in range(4)}
    assert len(shared) == 1
    second = [prefixes.find(prompt + bytes([member]) * 2000) for member in range(4)]
    assert len({found.session for found in second}) == 4
    assert {found.like for found in second[1:]} <= shared
    third = [prefixes.find(prompt + bytes([member]) * 2000 + b"z" * 3000) for member in range(4)]
    assert [found.session for found in third] == [found.session for found in second]


def test_prefixes_are_bounded():
    prefixes = Prefixes(most=50)
    for i in range(100):
        prefixes.find(str(i).encode() * 500)
    assert len(prefixes) <= 50


def test_what_engines_say_of_their_load():
    ranks = [
        {"num_running_reqs": 2, "num_waiting_reqs": 1, "token_usage": 0.25, "max_total_num_tokens": 100,
         "max_running_requests": 8, "gen_throughput": 50.0},
        {"num_running_reqs": 1, "num_waiting_reqs": 0, "token_usage": 0.5, "max_total_num_tokens": 100,
         "max_running_requests": 8, "gen_throughput": 10.0},
    ]  # fmt: skip
    found = sglang_reading(json.dumps({"loads": ranks, "version": "x"}).encode(), 3.0)
    assert (found.running, found.waiting, found.kv, found.kv_capacity, found.slots) == (3, 1, 0.5, 200, 16)
    assert found.tokens_s == 60.0
    assert sglang_reading(b"[]", 0.0) is None
    assert sglang_reading(b'{"loads": []}', 0.0) is None
    text = (
        '# HELP x\nvllm:num_requests_running{engine="0",model_name="m"} 3.0\n'
        'vllm:num_requests_waiting{engine="0"} 2.0\nvllm:kv_cache_usage_perc{engine="0"} 0.4\n'
        'vllm:num_preemptions_total{engine="0"} 5.0\n'
    )
    found = vllm_reading(text, 1.0)
    assert (found.running, found.waiting, found.kv, found.preemptions) == (3, 2, 0.4, 5)
    assert vllm_reading("nothing 1\n", 0.0) is None
