"""The probe samples as the run does: log-probabilities of another meaning are found before they are trained on."""

from dataclasses import replace

import pytest
import torch
from msgspec import structs
from transformers import AutoModelForCausalLM

from gruppetto.config.schema import ModelSection, TrainSection
from gruppetto.engines.base import Sampling
from gruppetto.engines.embedded.engine import EmbeddedEngine
from gruppetto.errors import EngineError
from gruppetto.trainer.embedded.trainer import EmbeddedTrainer
from gruppetto.weights.channels.probe import Probe

PROMPTS = ([5, 6, 7, 8], list(range(20, 60)))


class Engine(EmbeddedEngine):
    """A real one whose answers may be told in another sense: `tells(logits [n, vocabulary], ids) -> logprobs`."""

    tells = None

    async def generate(self, request):
        result = await super().generate(request)
        if self.tells is None:
            return result
        ids = [*request.token_ids, *(i for segment in result.segments for i in segment.token_ids)]
        made = len(ids) - len(request.token_ids)
        with torch.no_grad():
            logits = self.model(torch.tensor([ids])).logits[0, -made - 1 : -1].float()
        told = self.tells(logits, torch.tensor(ids[-made:])).tolist()
        (segment,) = result.segments
        return structs.replace(result, segments=(replace(segment, logprobs=told),))


def before_the_temperature(logits, ids):
    return logits.log_softmax(-1).gather(-1, ids[:, None])[:, 0]


def of_the_nucleus(logits, ids):
    """Of what top_p = 0.5 leaves over, as if there were nothing else."""
    mass = logits.softmax(-1)
    largest = mass.sort(-1, descending=True).values
    count = (largest.cumsum(-1) - largest < 0.5).sum(-1, keepdim=True)
    kept = mass * (mass >= largest.gather(-1, count - 1))
    return (kept / kept.sum(-1, keepdim=True)).gather(-1, ids[:, None])[:, 0].log()


@pytest.fixture
async def check(tiny_model):
    """check(tells, sampling) -> the comparison with a trainer of the same weights and temperature."""
    opened = []

    async def go(tells, **sampling):
        chosen = Sampling(max_tokens=1, **sampling)
        trainer = EmbeddedTrainer(
            tiny_model,
            model=ModelSection(path=str(tiny_model), device="cpu"),
            train=TrainSection(),
            max_tokens=8,
            temperature=chosen.temperature,
            total_steps=4,
            seed=0,
        )
        engine = Engine("e", tiny_model, slots=4, context=128, device="cpu")
        engine.tells, engine.model = tells, AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
        opened.extend((trainer, engine))
        await trainer.start()
        await engine.start()
        return await Probe(PROMPTS, trainer.token_logprobs, tokens=16, sampling=chosen, most_kl=1e-4).check(engine, 0)

    yield go
    for one in opened:
        await one.close()


@pytest.mark.parametrize("sampling", [{"temperature": 0.6}, {"temperature": 0.0}, {"top_p": 0.5}, {"top_k": 3}])
async def test_what_the_trainer_computes_passes(check, sampling):
    found = await check(None, **sampling)
    assert found.tokens == 32
    assert found.mismatch_kl < 1e-6


@pytest.mark.parametrize(
    ("tells", "sampling"), [(before_the_temperature, {"temperature": 0.6}), (of_the_nucleus, {"top_p": 0.5})]
)
async def test_logprobs_of_another_meaning_are_found_and_the_line_says_which_are_meant(check, tells, sampling):
    temperature = sampling.get("temperature", 1)
    with pytest.raises(
        EngineError, match=rf"its logprobs are not those after the temperature \({temperature}\) and before top_p"
    ):
        await check(tells, **sampling)
