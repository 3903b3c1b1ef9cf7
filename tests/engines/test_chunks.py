"""A rollout cut into chunks of any size: the same bits, the same stop, whatever runs beside it."""

import pytest
from engines.kit import bits, ids_of, make_serving, request, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gruppetto.engines.base import EngineFinish

TOKENS = 24
PROMPT = [7, 8, 9]


def letters(ids):
    return "".join(chr(97 + i % 26) for i in ids)


@pytest.fixture(scope="module")
def exact(tiny_model):
    return make_serving(tiny_model, slots=4, context=64, deterministic=True, prefill_chunk=64, decode=letters).core


def in_chunks(core, sizes, mates=0, **sampling):
    """(ids, logprobs), and the last result, of one rollout that comes back after each of `sizes` tokens."""
    ids, logprobs, result = [], [], None
    sizes = iter(sizes)
    while len(ids) < TOKENS and (result is None or result.finish is EngineFinish.LENGTH):
        budget = min(next(sizes, TOKENS), TOKENS - len(ids))
        ask = request("x", PROMPT + ids, made=len(ids), max_tokens=budget, seed=5, **sampling)
        others = [request(f"m{i}", [i + 1, len(ids)], max_tokens=2 + 5 * i, seed=i) for i in range(mates)]
        result = run(core, [*others, ask])["x"]
        ids, logprobs = ids + bits(result)[0], logprobs + bits(result)[1]
    return (ids, logprobs), result


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(sizes=st.lists(st.integers(1, 9), min_size=1, max_size=TOKENS), mates=st.integers(0, 5))
def test_chunks_of_any_size_make_the_same_bits(exact, sizes, mates):
    whole, _ = in_chunks(exact, [TOKENS])
    assert in_chunks(exact, sizes, mates)[0] == whole
    assert len(whole[0]) == TOKENS


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=TOKENS), begin=st.integers(0, 16), length=st.integers(1, 6)
)
def test_a_stop_string_is_found_across_chunk_ends(exact, sizes, begin, length):
    free = in_chunks(exact, [TOKENS])[0][0]
    stop = letters(free)[begin : begin + length]
    whole, end = in_chunks(exact, [TOKENS], stop=(stop,))
    assert (end.finish, end.stop) == (EngineFinish.STOP, stop)
    assert in_chunks(exact, sizes, stop=(stop,))[0] == whole
    assert letters(whole[0]).find(stop) + length == len(whole[0])


def test_a_stop_id_ends_a_chunk_before_its_budget(exact):
    free = in_chunks(exact, [TOKENS])[0][0]
    whole, _ = in_chunks(exact, [TOKENS], stop_ids=(free[9],))
    cut, end = in_chunks(exact, [4] * 6, stop_ids=(free[9],))
    assert cut == whole
    assert (end.finish, ids_of(end)[-1]) == (EngineFinish.STOP, free[9])


def test_the_next_chunk_begins_on_the_kv_of_the_last(exact):
    exact.reset_counters()
    in_chunks(exact, [4] * 6)
    assert exact.prefill_tokens == len(PROMPT) - 1
    assert exact.cached_tokens == sum(len(PROMPT) - 1 + made for made in (4, 8, 12, 16, 20))


def test_kv_left_behind_makes_room_and_is_not_used_under_other_weights(exact):
    first = request("x", PROMPT, max_tokens=4, seed=5)
    made = ids_of(run(exact, [first])["x"])
    run(exact, [request(f"m{i}", [i + 1, 9, 9], max_tokens=3) for i in range(4)])  # takes every slot
    exact.reset_counters()
    again = request("x", PROMPT + made, made=4, max_tokens=4, seed=5)
    run(exact, [again])
    assert exact.prefill_tokens == len(PROMPT) + 3
    made += ids_of(run(exact, [again])["x"])
    exact.set_version(exact.version)
    exact.reset_counters()
    run(exact, [request("x", PROMPT + made, made=8, max_tokens=1, seed=5)])
    assert exact.prefill_tokens == len(PROMPT) + 7
