"""One rollout that goes on at every step of a long run: no KV that it left behind is used under newer weights."""

import pytest
import torch
from engines.kit import ids_of, logprobs_of, make_engine, request
from transformers import AutoModelForCausalLM

from gruppetto.weights.inprocess import InProcessChannel

PROMPT = [7, 9, 11] * 8
UPDATES = 100


def drift(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(3e-3 * torch.randn(parameter.shape, generator=generator))


def truth(model, context, ids):
    with torch.no_grad():
        logits = model(torch.tensor([context])).logits[0, -1]
    return logits.log_softmax(-1)[ids[0]].item()


@pytest.mark.parametrize("kv_on_swap", ["recompute", "keep"])
async def test_engine_and_trainer_stay_as_near_as_at_the_start(tiny_model, kv_on_swap):
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()
    engine, channel, gaps = make_engine(tiny_model, kv_on_swap=kv_on_swap), InProcessChannel(1 << 20), []
    await engine.start()
    context, made, reused = list(PROMPT), 0, 0
    for version in range(1, UPDATES + 1):
        drift(model, version)
        await engine.pause("keep")
        await channel.publish(version, model.named_parameters(), [engine])
        await engine.resume()
        for part in range(2):
            result = await engine.generate(request("r", context, made=made, max_tokens=1, seed=5))
            assert [segment.version for segment in result.segments] == [version]
            assert part or result.cached_tokens == 0
            reused += result.cached_tokens
            gaps.append(abs(truth(model, context, ids_of(result)) - logprobs_of(result)[0]))
            context, made = context + ids_of(result), made + 1
    await engine.close()
    assert reused > UPDATES * len(PROMPT)  # under the same weights it goes on where it was
    assert max(gaps) < 1e-4
