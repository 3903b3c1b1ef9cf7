"""The synchronous engine: determinism, logprobs against a plain forward, budgets, stops, refusals."""

import pytest
import torch
from engines.kit import bits, ids_of, logprobs_of, make_serving, request, run
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from transformers import AutoModelForCausalLM

from gruppetto.engines.base import EngineFinish
from gruppetto.engines.embedded import choose
from gruppetto.engines.embedded.cache import SlotKV
from gruppetto.errors import EngineError, UserError

SLOTS = (3, 16, 24)


@pytest.fixture(scope="module")
def exact(tiny_model):
    """One deterministic core for each slot count."""
    made = {slots: make_serving(tiny_model, slots=slots, deterministic=True, prefill_chunk=64) for slots in SLOTS}
    assert all(serving.invariant for serving in made.values())
    return {slots: serving.core for slots, serving in made.items()}


@pytest.fixture(scope="module")
def core(tiny_model):
    return make_serving(tiny_model).core


def prompt(seed: int, length: int) -> list[int]:
    return torch.randint(0, 256, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    shapes=st.lists(st.tuples(st.integers(1, 80), st.integers(1, 30)), min_size=1, max_size=6),
    slots=st.sampled_from(SLOTS),
    data=st.data(),
)
def test_bits_do_not_depend_on_mates_order_slots_or_parking(exact, shapes, slots, data):
    alone = {}
    for i, (length, budget) in enumerate(shapes):
        alone[str(i)] = bits(run(exact[16], [request("x", prompt(i, length), max_tokens=budget, seed=i)])["x"])
    order = data.draw(st.permutations(range(len(shapes))))
    cuts = {i: data.draw(st.integers(0, shapes[i][1]), label=f"park {i}") for i in order}
    first = [request(str(i), prompt(i, shapes[i][0]), max_tokens=cuts[i], seed=i) for i in order if cuts[i]]
    parked = {rid: bits(result) for rid, result in run(exact[slots], first).items()}
    rest = []
    for i in reversed(order):
        made = parked.get(str(i), ([], []))[0]
        if shapes[i][1] > len(made):
            left = shapes[i][1] - len(made)
            rest.append(request(str(i), prompt(i, shapes[i][0]) + made, made=len(made), max_tokens=left, seed=i))
    resumed = {rid: bits(result) for rid, result in run(exact[slots], rest).items()}
    for rid, (ids, logprobs) in alone.items():
        a, b = parked.get(rid, ([], [])), resumed.get(rid, ([], []))
        assert (a[0] + b[0], a[1] + b[1]) == (ids, logprobs)


def test_rows_that_move_while_the_batch_shrinks_keep_their_bits(exact):
    budgets = [2 + (i if i < 12 else 30) for i in range(24)]
    asks = [request(str(i), prompt(i, 10 + i), max_tokens=n, seed=i) for i, n in enumerate(budgets)]
    results = run(exact[24], asks)
    for i in (12, 20, 22, 23):
        assert bits(results[str(i)]) == bits(run(exact[16], [asks[i]])[str(i)])


def test_rows_that_change_places_by_depth_keep_their_bits(exact, monkeypatch):
    swaps = []
    swap = SlotKV.swap_rows
    monkeypatch.setattr(SlotKV, "swap_rows", lambda kv, *a: (swaps.append(a), swap(kv, *a)))
    shapes = [(5, 40), (5, 9), (50, 40), (150, 5), (60, 90), (10, 70), (120, 30), *[(8 + i, 12) for i in range(20)]]
    asks = [request(str(i), prompt(i, length), max_tokens=n, seed=i) for i, (length, n) in enumerate(shapes)]
    results = run(exact[24], asks)
    assert len(swaps) >= 4
    for i in (0, 1, 2, 4, 5, 6, 25):
        assert bits(results[str(i)]) == bits(run(exact[16], [asks[i]])[str(i)])


def test_bits_hold_past_a_kv_block_of_attention(tiny_model):
    core = make_serving(tiny_model, slots=4, context=700, deterministic=True).core
    ids = prompt(5, 500)
    whole = bits(run(core, [request("x", ids, max_tokens=40, seed=1)])["x"])
    mates = [request(f"m{i}", prompt(i, 600), max_tokens=9) for i in range(3)]
    made = whole[0][:23]
    rest = run(core, [*mates, request("x", ids + made, made=23, max_tokens=17, seed=1)])["x"]
    assert bits(rest) == (whole[0][23:], whole[1][23:])


def test_members_of_a_group_share_the_prompt_and_its_bits(exact):
    core = exact[16]
    before = core.prefill_tokens
    results = run(core, [request(str(i), prompt(1, 50), max_tokens=5, seed=i) for i in range(8)])
    assert core.prefill_tokens - before == 49
    assert bits(results["3"]) == bits(run(exact[3], [request("x", prompt(1, 50), max_tokens=5, seed=3)])["x"])


@pytest.mark.parametrize("deterministic", [False, True])
@pytest.mark.parametrize("fused", [False, True])
def test_logprobs_are_those_of_a_plain_forward(tiny_model, monkeypatch, deterministic, fused):
    if not fused:
        monkeypatch.setattr(choose, "supports", lambda config: False)
    serving = make_serving(tiny_model, deterministic=deterministic, prefill_chunk=32)
    assert serving.core.forward.name == ("fused" if fused else "hf")
    heat = [1.0, 0.7, 0.0, 1.3]
    asks = [
        request(str(i), prompt(i, 5 + 30 * i), max_tokens=12 + 5 * i, temperature=heat[i % 4], seed=i) for i in range(7)
    ]
    results = run(serving.core, asks)
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    for ask in asks:
        made = ids_of(results[ask.rid])
        with torch.no_grad():
            logits = model(torch.tensor([[*ask.token_ids, *made]])).logits[0, len(ask.token_ids) - 1 : -1]
        table = (logits / (ask.sampling.temperature or 1.0)).log_softmax(-1)
        want = table.gather(1, torch.tensor(made)[:, None])[:, 0]
        assert float((want - torch.tensor(logprobs_of(results[ask.rid]))).abs().max()) < 1e-4
        if ask.sampling.temperature == 0:
            assert made == table.argmax(-1).tolist()


def test_the_batch_shrinks_while_it_drains(core):
    core.reset_counters()
    run(core, [request(str(i), [i + 1], max_tokens=3 * i + 1) for i in range(8)])
    assert max(core.batch_steps) == 8
    assert core._batch_rows(1) == 1
    assert sum(core.batch_steps.values()) == core.decode_steps == 22


def test_more_requests_than_slots_all_come_back_with_their_budget(core):
    budgets = {str(i): 1 + (7 * i) % 23 for i in range(60)}
    results = run(core, [request(rid, [3, int(rid)], max_tokens=n) for rid, n in budgets.items()])
    assert {rid: r.num_tokens for rid, r in results.items()} == budgets
    assert {r.finish for r in results.values()} == {EngineFinish.LENGTH}
    assert (core.running, core.waiting, core.kv_tokens) == (0, 0, 0)


def test_the_context_ends_a_request(core):
    result = run(core, [request("x", prompt(0, 250), max_tokens=50)])["x"]
    assert (result.num_tokens, result.finish) == (6, EngineFinish.LENGTH)


def test_a_stop_id_stays_in_the_tokens(core):
    free = ids_of(run(core, [request("x", [1, 2, 3], max_tokens=20, seed=4)])["x"])
    result = run(core, [request("x", [1, 2, 3], max_tokens=20, seed=4, stop_ids=(free[6], 999))])["x"]
    end = free.index(free[6]) + 1
    assert (ids_of(result), result.finish, result.stop) == (free[:end], EngineFinish.STOP, free[6])


def test_a_stop_string_stops_also_across_a_park(tiny_model):
    core = make_serving(tiny_model, decode=lambda ids: "".join(chr(97 + i % 26) for i in ids)).core
    free = ids_of(run(core, [request("x", [1, 2, 3], max_tokens=20, seed=4)])["x"])
    stop = "".join(chr(97 + i % 26) for i in free[7:12])
    whole = run(core, [request("x", [1, 2, 3], max_tokens=20, seed=4, stop=(stop,))])["x"]
    assert (whole.num_tokens, whole.finish, whole.stop) == (12, EngineFinish.STOP, stop)
    rest = run(core, [request("x", [1, 2, 3, *free[:9]], made=9, max_tokens=20, seed=4, stop=(stop,))])["x"]
    assert (rest.num_tokens, rest.stop) == (3, stop)


def test_results_of_one_step_come_in_order_of_submission(core):
    for rid in "cab":
        core.submit(request(rid, [ord(rid)], max_tokens=4))
    ended = []
    while core.has_work:
        ended += [r.rid for r in core.step()]
    assert ended == ["c", "a", "b"]


def test_requests_that_may_not_enter_yet_change_nothing(tiny_model):
    def trace(late: int) -> list[list[str]]:
        core = make_serving(tiny_model, slots=8).core
        for i in range(14):
            core.submit(request(str(i), [i + 1], max_tokens=3 + i))
        core.admit_before = core.submitted
        for i in range(late):
            core.submit(request(f"late{i}", [1]))
        steps = []
        while core.has_work:
            steps.append([r.rid for r in core.step()])
        assert core.waiting == late
        return steps

    assert trace(0) == trace(20)


def test_thousands_wait_and_are_aborted_one_by_one(core):
    for i in range(4000):
        core.submit(request(str(i), [1]))
    core.step()
    assert core.running == 8
    for i in range(3999, -1, -1):
        assert len(core.abort(str(i))) == 1
    assert (core.running, core.waiting, core.has_work) == (0, 0, False)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (request("r", [1], max_tokens=0), "max_tokens = 0"),
        (request("r", []), "no tokens"),
        (request("r", [1, 5000]), "5000 is outside"),
        (request("r", range(1, 257)), "leave no room"),
        (request("r", [1], made=2), "made = 2"),
        (request("r", [1], temperature=-1.0), "temperature"),
        (request("r", [1], top_p=0.0), "top_p"),
        (request("r", [1], stop=("x",)), "needs the tokenizer's decode"),
        (request("r", [1], stop=("",)), "empty stop"),
    ],
)
def test_what_cannot_be_served_is_refused_in_one_line(core, bad, message):
    with pytest.raises(UserError, match=message) as refused:
        core.submit(bad)
    assert "\n" not in str(refused.value)
    assert core.waiting == 0


def test_a_live_rid_is_refused_and_free_again_afterwards(core):
    core.submit(request("x", [1]))
    with pytest.raises(EngineError, match="already live"):
        core.submit(request("x", [2]))
    assert core.abort()[0].num_tokens == 0
    assert run(core, [request("x", [1])])["x"].num_tokens == 8


def test_aborted_rows_leave_their_mates_alone(exact):
    core = exact[3]
    want = bits(run(core, [request("x", prompt(1, 20), max_tokens=30, seed=2)])["x"])
    for rid in ("a", "x", "b", "c"):
        core.submit(request(rid, prompt(ord(rid) if rid != "x" else 1, 20), max_tokens=30, seed=2))
    results = {}
    for _ in range(15):
        results |= {r.rid: r for r in core.step()}
    (gone,) = core.abort("a")
    assert gone.finish is EngineFinish.ABORT
    assert 0 < gone.num_tokens < 30
    assert core.abort("a") == core.abort("never") == []
    while core.has_work:
        results |= {r.rid: r for r in core.step()}
    assert bits(results["x"]) == want
    assert sorted(results) == ["b", "c", "x"]
