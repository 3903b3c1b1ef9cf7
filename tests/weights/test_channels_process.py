"""Weights into engines in processes of their own, behind `gruppetto serve`."""

import aiohttp
import pytest
import torch
from engines.serve.conftest import serving
from transformers import AutoModelForCausalLM

from gruppetto.errors import EngineError
from gruppetto.weights.channels.feed import Plain
from gruppetto.weights.channels.port import RemotePort
from gruppetto.weights.publish import PublishSettings, TwoPhase


class Far:
    """A served engine as the publisher needs it."""

    def __init__(self, name: str, url: str) -> None:
        self.name, self.control_url, self.control_key = name, url, ""
        self.version = None

    def weights_label(self, version: int) -> str:
        return f"v{version}"

    def weights_taken(self, version: int) -> None:
        self.version = version

    async def post(self, path: str, **body):
        async with aiohttp.ClientSession(self.control_url) as session, session.post(path, json=body) as answer:
            return answer.status, await answer.json(content_type=None)

    async def tokens(self):
        body = {"input_ids": [5, 6, 7], "sampling_params": {"max_new_tokens": 4, "temperature": 0}}
        return await self.post("/generate", **body)


@pytest.fixture(scope="module")
def served(tiny_model):
    sizes = (str(tiny_model), "--slots", "2", "--context", "64", "--skip-tokenizer-init")
    with serving(*sizes) as one, serving(*sizes) as two, serving(*sizes) as three:
        yield one, two, three


@pytest.fixture
def model(tiny_model):
    return AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)


def step(model, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(0.02 * torch.randn(p.shape, generator=generator) * (torch.rand(p.shape, generator=generator) < 0.02))


async def test_two_processes_take_each_version_over_each_channel_and_a_killed_one_is_left_behind(
    served, model, tmp_path
):
    (url, _), (second_url, second), (third_url, third) = served
    pair, last = [Far("one", url), Far("two", second_url)], Far("three", third_url)
    for far in (*pair, last):
        assert (await far.post("/pause_generation", mode="in_place"))[0] == 200
    version = 0
    for channel, mode in (("shm", "full"), ("shm", "delta"), ("disk", "full"), ("gloo", "full"), ("gloo", "delta")):
        publish = TwoPhase(
            PublishSettings(channel=channel, mode=mode, bucket_bytes=1 << 19, folder=tmp_path, deadline_s=60)
        )
        for _ in range(2):
            version += 1
            step(model, version)
            await publish.publish(version, model.state_dict().items(), pair)
            assert [far.version for far in pair] == [version, version]
        states = [await RemotePort(far).state() for far in pair]
        assert [state.version for state in states] == [version, version]
        digests = [await RemotePort(far).audit() for far in pair]
        assert digests[0] == digests[1]
    await pair[0].post("/continue_generation")
    status, answer = await pair[0].tokens()
    assert status == 200
    assert answer["meta_info"]["weight_version"] == f"v{version}"
    with torch.no_grad():
        want = model.generate(torch.tensor([[5, 6, 7]]), max_new_tokens=4, do_sample=False)[0, 3:].tolist()
    assert answer["output_ids"] == want
    await pair[0].post("/pause_generation", mode="in_place")
    for channel, victim, process in (("shm", pair[1], second), ("gloo", last, third), ("shm", last, third)):
        version += 1  # killed in the middle of a transfer; in the end, gone before one begins
        step(model, version)
        publish = TwoPhase(PublishSettings(channel=channel, bucket_bytes=1 << 18, deadline_s=60))
        with pytest.raises(EngineError, match=f"engine {victim.name}"):
            await publish.publish(version, Kills(model.state_dict().items(), process), [pair[0], victim])
        assert pair[0].version == version
        assert (await RemotePort(pair[0]).state()).version == version
        assert list(publish.fenced) == [victim.name]


class Kills(Plain):
    """A source that kills a process once half of the tensors are on their way."""

    def __init__(self, tensors, process) -> None:
        super().__init__(tensors)
        self.process, self.left = process, len(self.specs()) // 2

    def fill(self, spec, target, progress):
        self.left -= 1
        if not self.left:
            self.process.kill()
            self.process.wait()
        return super().fill(spec, target, progress)


async def test_a_running_server_and_a_strange_offer_are_refused(served, model):
    (url, _), _, _ = served
    far = Far("one", url)
    await far.post("/continue_generation")
    publish = TwoPhase(PublishSettings(deadline_s=60))
    with pytest.raises(EngineError, match="pause_generation first"):
        await publish.publish(1000, model.state_dict().items(), [far])
    await far.post("/pause_generation", mode="in_place")
    offer = {"version": 1, "kind": "full", "channel": "post", "address": {}, "places": []}
    assert (await far.post("/gruppetto/weights/prepare", **offer))[0] == 400
    assert (await far.post("/gruppetto/weights/prepare", **(offer | {"channel": 3})))[0] == 400
    assert (await far.post("/gruppetto/weights/commit", version=1))[0] == 400
