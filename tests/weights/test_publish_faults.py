"""What is wrong with an engine's weights is caught before it serves them, and named."""

import asyncio
import threading

import numpy as np
import pytest
import torch

from gruppetto.errors import EngineError, UserError
from gruppetto.weights.buckets import plan_buckets
from gruppetto.weights.channels.base import Served, Sink, SinkError
from gruppetto.weights.channels.feed import Plain
from gruppetto.weights.channels.transfer import transfer
from gruppetto.weights.publish import PublishSettings, TwoPhase

LAYER = "model.layers.0."
SHAPES = {
    "model.embed_tokens.weight": (32, 16),
    LAYER + "self_attn.q_proj.weight": (16, 16),
    LAYER + "self_attn.k_proj.weight": (8, 16),
    LAYER + "self_attn.v_proj.weight": (8, 16),
    LAYER + "mlp.gate_proj.weight": (24, 16),
    LAYER + "mlp.up_proj.weight": (24, 16),
    LAYER + "mlp.down_proj.weight": (16, 24),
    LAYER + "mlp.down_proj.weight_scale_inv": (1, 1),
    "model.norm.weight": (16,),
}


def tensors(seed: int, **more) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {name: torch.randn(shape, generator=generator) for name, shape in (SHAPES | more).items()}


class Bench:
    """An engine's weights without an engine. `wires` says where a loader really writes a name; None: nowhere."""

    def __init__(self, name="e", wires=None, aliases=None, **more):
        self.name, self.wires, self.aliases = name, wires or {}, aliases or {}
        self.tensors, self.version, self.log = tensors(0, **more), 0, []

    async def weights(self):
        return Served(self.tensors, self.aliases, self.version)

    async def open_weights(self):
        self.version = None
        names = [*self.tensors, *self.aliases]
        to = {name: self.wires.get(name, self.aliases.get(name, name)) for name in names}
        return {n: torch.empty_like(self.tensors[n]) if own is None else self.tensors[own] for n, own in to.items()}

    async def close_weights(self, version):
        self.version = version
        self.log.append(version)


async def two_versions(engine, *, mode="full", bucket_bytes=1500):
    """A good first version, then the second through the engine's loader as it is."""
    publish = TwoPhase(PublishSettings(mode=mode, bucket_bytes=bucket_bytes, deadline_s=60, verify_every=1))
    wires, engine.wires = engine.wires, {}
    await publish.publish(1, tensors(1).items(), [engine])
    engine.wires = wires
    await publish.publish(2, tensors(2).items(), [engine])


CASES = {
    "swapped gate and up": (
        {LAYER + "mlp.gate_proj.weight": LAYER + "mlp.up_proj.weight",
         LAYER + "mlp.up_proj.weight": LAYER + "mlp.gate_proj.weight"},
        "gate_proj.weight and .*up_proj.weight hold each other's values",
    ),
    "swapped key and value": (
        {LAYER + "self_attn.k_proj.weight": LAYER + "self_attn.v_proj.weight",
         LAYER + "self_attn.v_proj.weight": LAYER + "self_attn.k_proj.weight"},
        "k_proj.weight and .*v_proj.weight hold each other's values",
    ),
    "stale scale": ({LAYER + "mlp.down_proj.weight_scale_inv": None}, "down_proj.weight_scale_inv is .* a stale scale"),
    "stale norm": ({"model.norm.weight": None}, "model.norm.weight is still of version 1 where 2 was sent: stale"),
    "skipped bucket": (
        {LAYER + f"self_attn.{k}_proj.weight": None for k in "qkv"},
        "bucket 1 of version 2 was skipped: all 3 of its changed tensors are still of version 1",
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", CASES)
async def test_a_loader_that_does_something_else_is_caught_before_the_commit(case):
    wires, message = CASES[case]
    engine = Bench(wires=wires)
    with pytest.raises(EngineError, match=message):
        await two_versions(engine, bucket_bytes=2048)
    assert engine.log == [1]
    assert engine.version is None


async def test_a_sound_loader_passes():
    engine = Bench()
    await two_versions(engine)
    assert engine.log == [1, 2]
    want = tensors(2)
    assert all(torch.equal(engine.tensors[name], want[name]) for name in want)


async def test_an_untied_head_is_named_on_either_side():
    head = {"lm_head.weight": (32, 16)}
    own = Bench(**head)
    with pytest.raises(EngineError, match=r"lm_head.weight is a tensor of its own in the engine.*untied head"):
        await two_versions(own)
    tied = Bench(aliases={"lm_head.weight": "model.embed_tokens.weight"})
    publish = TwoPhase(PublishSettings(deadline_s=60))
    with pytest.raises(UserError, match="hold different values in the trainer: untied head"):
        await publish.publish(1, tensors(1, **head).items(), [tied])
    both = tensors(1)
    both["lm_head.weight"] = both["model.embed_tokens.weight"]
    await publish.publish(1, both.items(), [tied])
    assert tied.log == [1]


async def test_other_names_and_shapes_are_refused_before_anything_is_written():
    publish = TwoPhase(PublishSettings(deadline_s=60))
    for wrong, message in (
        ({"model.norm.weight": (17,)}, r"model.norm.weight is \(17,\) in the trainer and \(16,\) in the engine"),
        ({"mtp.layers.0.weight": (4,)}, "the trainer has mtp.layers.0.weight"),
    ):
        engine = Bench(wrong.__str__())
        with pytest.raises(EngineError, match=message):
            await publish.publish(1, tensors(1, **wrong).items(), [engine])
        assert engine.version == 0
    short = {name: tensor for name, tensor in tensors(1).items() if name != "model.norm.weight"}
    engine = Bench("short")
    with pytest.raises(EngineError, match="the engine has 1 tensors that the trainer does not send"):
        await publish.publish(1, short.items(), [engine])


async def test_a_delta_onto_bits_that_somebody_changed_becomes_a_full_version():
    engine = Bench()
    publish = TwoPhase(PublishSettings(mode="delta", deadline_s=60, verify_every=1))
    new = tensors(1)
    await publish.publish(1, new.items(), [engine])
    new["model.norm.weight"] = new["model.norm.weight"].clone()
    new["model.norm.weight"][3] = 5.0
    await publish.publish(2, new.items(), [engine])
    assert publish.last.kinds == {"e": "delta"}
    assert publish.last.sent_bytes < 2500
    engine.tensors["model.norm.weight"][2] = 9.0
    new["model.norm.weight"][4] = 6.0
    await publish.publish(3, new.items(), [engine])
    assert publish.last.kinds == {"e": "full"}
    assert torch.equal(engine.tensors["model.norm.weight"], new["model.norm.weight"])


async def test_a_version_that_an_engine_has_costs_nothing_and_a_late_comer_gets_all_of_it():
    first, second = Bench("a"), Bench("b")
    publish = TwoPhase(PublishSettings(mode="delta", deadline_s=60))
    await publish.publish(1, tensors(1).items(), [first])
    receipts = await publish.publish(1, tensors(1).items(), [first, second])
    assert publish.last.kinds == {"a": "had it", "b": "full"}
    assert receipts[0].num_bytes == 0
    assert (first.log, second.log) == ([1], [1])


class Hangs(Bench):
    """Never opens its weights."""

    async def open_weights(self):
        await asyncio.Event().wait()


class Watched(TwoPhase):
    """A publisher whose clock stands still, and passes its deadline, not the longer one of engines that wait for it,
    once only the hung engine is waited for."""

    sink, at = None, 0.0

    def _sink(self, *args):
        self.sink = super()._sink(*args)
        return self.sink

    def monotonic(self):
        if self.sink is not None and self.sink._missing() == {"hung"}:
            self.at = 100.0
        return self.at


@pytest.mark.parametrize("channel", ["shm", "gloo"])
async def test_an_engine_that_hangs_is_fenced_at_the_deadline_and_the_others_have_the_version(channel, monkeypatch):
    good, hung = Bench("good"), Hangs("hung")
    publish = Watched(PublishSettings(channel=channel, deadline_s=60))
    monkeypatch.setattr(f"gruppetto.weights.channels.{channel}.monotonic", publish.monotonic)
    with pytest.raises(EngineError, match=r"engine hung: .*did not come"):
        await publish.publish(1, tensors(1).items(), [good, hung])
    assert good.version == 1
    with pytest.raises(EngineError, match="engine hung: is fenced: "):
        await publish.publish(2, tensors(2).items(), [good, hung])
    assert good.version == 2


async def test_the_trainers_own_failure_is_not_an_engines():
    engine = Bench()
    publish = TwoPhase(PublishSettings(deadline_s=60))

    class Source:
        def specs(self):
            from gruppetto.weights.channels.feed import Plain

            return Plain(tensors(1).items()).specs()

        def fill(self, spec, target, progress):
            raise ValueError("the gather failed")

    with pytest.raises(ValueError, match="the gather failed"):
        await publish.publish(1, Source(), [engine])
    assert publish.fenced == {}
    assert engine.log == []
    await publish.publish(1, tensors(1).items(), [engine])
    assert engine.log == [1]


async def test_one_that_comes_back_alone_costs_the_others_no_full_version():
    """It takes version 2 by itself; that the other one serves it already is remembered, and both take changes after."""
    first, second = Bench("a"), Bench("b")
    publish = TwoPhase(PublishSettings(mode="delta", deadline_s=60))
    new = tensors(1)
    await publish.publish(1, new.items(), [first])
    new["model.norm.weight"] = new["model.norm.weight"] + 1
    await publish.publish(2, new.items(), [first])
    await publish.publish(2, new.items(), [second])
    assert publish.last.kinds == {"b": "full"}
    new["model.norm.weight"] = new["model.norm.weight"] + 1
    await publish.publish(3, new.items(), [first, second])
    assert publish.last.kinds == {"a": "delta", "b": "delta"}
    assert (first.log, second.log) == ([1, 2, 3], [2, 3])


# --- who is to blame -------------------------------------------------------------------------------------------------


class End(Sink):
    """A collective's sending end that knows who broke it: `culprit`, as long as it takes part."""

    buffer_bytes = 1

    def __init__(self, names, culprit):
        self.names, self.culprit, self.left = names, culprit, threading.Event()

    def address(self, engine):
        return {}

    def buffer(self, plan):
        if self.culprit in self.names:
            self.left.wait(20)  # the one that it breaks for has failed first
            raise SinkError(f"{self.culprit} sent nothing", [self.culprit])
        return np.empty(plan.num_bytes, np.uint8)

    def filled(self, plan, end):
        pass

    def finish(self):
        pass

    def gone(self, engine):
        self.left.set()

    def close(self):
        pass


class Member:
    """Answers what it is asked. In a broken collective a culprit hangs, and the others fail with it at once."""

    def __init__(self, name, ends, culprit):
        self.name, self.ends, self.culprit = name, ends, culprit

    async def state(self):
        return None

    async def prepare(self, offer):
        if self.name == self.culprit:
            await asyncio.Event().wait()
        if self.culprit in self.ends[-1].names:
            raise EngineError(self.name, "the group is broken")
        return {}


@pytest.mark.parametrize("culprit", ["a", "b", "c"])
async def test_in_a_collective_the_one_that_is_named_is_out_and_not_the_one_that_failed_first(culprit):
    ends = []

    def sink(plans, names):
        ends.append(End(names, culprit))
        return ends[-1]

    source = Plain(tensors(1).items())
    plans = plan_buckets(source.specs(), 4096)
    ports = {name: Member(name, ends, culprit) for name in "abc"}
    outcome = await transfer(ports, plans, source, sink, lambda address: None, 60.0, together=True)
    assert list(outcome.failed) == [culprit]
    assert sorted(outcome.acks) == sorted({"a", "b", "c"} - {culprit})
    assert [sorted(end.names) for end in ends] == [["a", "b", "c"], sorted({"a", "b", "c"} - {culprit})]
