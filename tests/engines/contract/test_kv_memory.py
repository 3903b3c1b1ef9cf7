"""KV's memory goes and comes back by itself: what was in it is not taken for a prefix any more."""

import pytest
from engines.contract.test_contract import close_to
from engines.contract.truth import truth_of
from engines.kit import ids_of, other_weights, publish, request

from gruppetto.errors import EngineError

pytestmark = pytest.mark.timeout(420)
PROMPT = [7, 9] * 70  # more than a block of any cache


async def test_what_was_cached_before_is_computed_anew(kind):
    if kind.vllm:
        pytest.skip("on a CPU vLLM cannot release KV alone")
    engine = await kind.open()
    await publish(engine, other_weights(kind.model), 1, mode="abort")
    for rid in ("a", "b"):
        before = await engine.generate(request(rid, PROMPT, max_tokens=4))
        close_to(kind, truth_of(kind, 1), PROMPT, before)
    await engine.pause("abort")
    await engine.release_memory(["kv"])
    with pytest.raises(EngineError, match="kv"):
        await engine.resume()
    await engine.restore_memory(["kv"])
    await engine.resume()
    made = ids_of(before)
    for rid, more in (("b", made), ("c", [])):  # one that goes on, and one that begins alike
        after = await engine.generate(request(rid, PROMPT + more, made=len(more), max_tokens=4))
        close_to(kind, truth_of(kind, 1), PROMPT + more, after)
        assert kind.scripted or after.cached_tokens == 0
