"""What surrounds a publish: who is named, what is whole again after a failure, and what is told of it."""

import asyncio

import pytest
import torch
from weights.test_publish_faults import Bench, tensors

from gruppetto.engines.base import Capabilities
from gruppetto.errors import EngineError
from gruppetto.weights.channels.order import Order, Ordered
from gruppetto.weights.channels.owed import Owed
from gruppetto.weights.channels.probe import Probe
from gruppetto.weights.inprocess import InProcessChannel
from gruppetto.weights.publish import PublishSettings, TwoPhase


class Served(Bench):
    """A bench with the calls around an update; `fails` are those that it fails at."""

    capabilities = Capabilities()

    def __init__(self, name, *fails, **more):
        super().__init__(name, **more)
        self.fails, self.held, self.done = fails, True, []
        self.flushes, self.running = True, 0

    async def release_memory(self, tags):
        self._refuse("release")
        self.held = False

    async def restore_memory(self, tags):
        self._refuse("restore")
        self.held = True

    async def flush(self):
        return self.flushes

    def stats(self):
        return self

    async def begin_update(self, version):
        self._refuse("begin")

    async def load_bucket(self, bucket):
        self._refuse("load")

    async def commit_update(self, version, num_buckets):
        self._refuse("commit")
        self.done.append(version)

    def _refuse(self, what):
        if what in self.fails:
            raise EngineError(self.name, f"cannot {what}")


def over(way, order=None, **settings):
    told = []
    chosen = TwoPhase(PublishSettings(deadline_s=60)) if way == "shm" else InProcessChannel(1500)
    return Ordered(chosen, order or Order(), lambda kind, **fields: told.append(fields), **settings), told


SIZE = sum(tensor.nbytes for tensor in tensors(1).values())


async def test_by_plain_calls_only_the_one_that_failed_is_named():
    publish, told = over("staged")
    with pytest.raises(EngineError, match="engine a: cannot commit"):
        await publish.publish(1, tensors(1).items(), [Served("a", "commit"), Served("b")])
    assert told[-1]["failed"] == ["a"]
    assert told[-1]["kinds"] == {"b": "full"}
    assert told[-1]["bytes"] == SIZE
    with pytest.raises(EngineError, match="engine b: cannot load"):
        await publish.publish(2, tensors(2).items(), [Served("a"), Served("b", "load")])
    assert told[-1]["failed"] == ["b"]
    assert told[-1]["kinds"] == {}
    assert 0 < told[-1]["bytes"] < SIZE
    with pytest.raises(EngineError, match="engine a: cannot commit; and engine b: cannot commit"):
        await publish.publish(3, tensors(2).items(), [Served("a", "commit"), Served("b", "commit"), Served("c")])
    assert (told[-1]["failed"], told[-1]["kinds"]) == (["a", "b"], {"c": "full"})


async def test_in_two_phases_too():
    publish, told = over("shm")
    first, second = Served("a"), Served("b", wires={"model.norm.weight": None})
    second.tensors["model.norm.weight"] += 1
    with pytest.raises(EngineError, match="engine b: version 1"):
        await publish.publish(1, tensors(1).items(), [first, second])
    assert (told[-1]["failed"], told[-1]["kinds"]) == (["b"], {"a": "full"})
    await publish.publish(1, tensors(1).items(), [first])
    assert (told[-1]["failed"], told[-1]["kinds"], told[-1]["bytes"]) == ([], {"a": "had it"}, 0)


@pytest.mark.parametrize("way", ["shm", "staged"])
@pytest.mark.parametrize("step", ["release", "restore"])
async def test_where_one_cannot_give_or_take_its_memory_the_others_have_theirs_and_it_is_told(step, way):
    publish, told = over(way, Order(pause="abort", release_kv=True))
    first, second, third = Served("a"), Served("b", step), Served("c")
    with pytest.raises(EngineError, match=f"engine b: cannot {step}"):
        await publish.publish(1, tensors(1).items(), [first, second, third])
    assert first.held
    assert third.held
    assert [row["failed"] for row in told] == [["b"]]
    await publish.publish(1, tensors(1).items(), [first, third])
    assert told[-1]["failed"] == []


async def test_an_engine_that_keeps_old_cache_though_nothing_runs_has_failed():
    publish, told = over("shm", Order(pause="abort"))
    engine = Served("a")
    engine.flushes = False
    with pytest.raises(EngineError, match="engine a: did not forget what it has cached under older weights"):
        await publish.publish(1, tensors(1).items(), [engine])
    assert told[-1]["failed"] == ["a"]
    kept = Served("b")
    kept.flushes, kept.running = False, 2  # their KV is computed anew, or meant to be kept
    await publish.publish(1, tensors(1).items(), [kept])
    keeping = Served("c")
    keeping.flushes, keeping.capabilities = False, Capabilities(keep_kv_on_pause=True)
    publish, _ = over("shm", Order(pause="keep"))
    await publish.publish(1, tensors(1).items(), [keeping])


# --- what is owed ----------------------------------------------------------------------------------------------------


def test_what_is_owed_stays_owed():
    owed = Owed(3)
    assert owed.takes("a", 1)
    assert owed.takes("a", 1)
    owed.done("a")
    assert not owed.takes("a", 1)
    assert not owed.takes("a", 2)
    assert not owed.takes("a", 3)
    assert owed.takes("a", 4)
    assert owed.takes("a", 5)
    owed.done("a")
    assert owed.takes("a", 5, boot="another")
    owed.done("a")
    assert not owed.owes("a")
    owed.anew("a")
    assert owed.takes("a", 5, boot="another")


async def test_an_audit_stays_due_too_and_returns_move_nobodys_turn():
    publish = TwoPhase(PublishSettings(deadline_s=60, verify_every=3))
    good, bad = Bench("good"), Bench("bad")

    async def lost():
        raise EngineError("bad", "gone")

    weights, bad.weights = bad.weights, lost
    audited = []
    with pytest.raises(EngineError, match="engine bad: gone"):
        await publish.publish(1, tensors(1).items(), [good, bad])
    audited.append(publish.last.audited)
    bad.weights = weights
    for version in (2, 3, 4):
        await publish.publish(version, tensors(version).items(), [good])
        audited.append(publish.last.audited)
        publish.readmit("bad")
        await publish.publish(version, tensors(version).items(), [bad])
        assert publish.last.audited
    assert audited == [True, False, False, True]


class Stumbles(Bench):
    """Acknowledges and does not commit, the first time."""

    async def close_weights(self, version):
        if not self.log and not hasattr(self, "stumbled"):
            self.stumbled = True
            raise EngineError(self.name, "connection reset")
        await super().close_weights(version)


async def test_an_audit_that_ended_without_a_commit_is_still_due():
    publish, engine = TwoPhase(PublishSettings(deadline_s=60, verify_every=0)), Stumbles("e")
    for version in (1, 2):
        with_it = publish.publish(version, tensors(version).items(), [engine])
        if version == 1:
            with pytest.raises(EngineError, match="connection reset"):
                await with_it
            publish.fenced.clear()
        else:
            await with_it
    assert publish.last.audited


@pytest.mark.parametrize("mode", ["full", "delta"])
async def test_one_failed_call_fences_until_the_engine_is_readmitted_with_a_whole_version(mode):
    """The process is the same one, as behind a URL that nobody here can start anew."""
    engine, other = Bench("a"), Bench("b")
    publish = TwoPhase(PublishSettings(mode=mode, deadline_s=60, verify_every=0))
    new = tensors(1)
    await publish.publish(1, new.items(), [engine, other])
    weights, engine.weights = engine.weights, lambda: _reset()
    with pytest.raises(EngineError, match="engine a: connection reset"):
        await publish.publish(2, new.items(), [engine, other])
    engine.weights = weights
    with pytest.raises(EngineError, match="engine a: is fenced: engine a: connection reset"):
        await publish.publish(2, new.items(), [engine, other])
    publish.readmit("a")
    await publish.publish(2, new.items(), [engine])
    assert (publish.last.kinds, publish.last.audited) == ({"a": "full"}, True)
    assert (engine.version, other.version) == (2, 2)
    await publish.publish(3, new.items(), [engine, other])
    assert set(publish.last.kinds.values()) == {mode}  # nobody's changes were forgotten over it


@pytest.mark.parametrize("mode", ["full", "delta"])
async def test_an_engine_that_was_lost_for_another_reason_gets_a_whole_version_too(mode):
    """Nobody knows what became of its weights meanwhile; it says that it has them."""
    engine, other = Bench("a"), Bench("b")
    publish = TwoPhase(PublishSettings(mode=mode, deadline_s=60, verify_every=0))
    await publish.publish(1, tensors(1).items(), [engine, other])
    publish.readmit("a")
    await publish.publish(1, tensors(1).items(), [engine, other])
    assert (publish.last.kinds, publish.last.audited) == ({"a": "full", "b": "had it"}, True)
    assert (engine.log, other.log) == ([1, 1], [1])


async def _reset():
    raise EngineError("a", "connection reset")


# --- the probe's own failures -----------------------------------------------------------------------------------------


async def _zeros(tokens, last):
    return [0.0] * last


class Silent(Served):
    """Takes requests and answers none; or refuses them."""

    refusal = None

    async def generate(self, request):
        if self.refusal:
            raise self.refusal
        await asyncio.Event().wait()


@pytest.mark.parametrize("way", ["shm", "staged"])
async def test_a_probe_that_is_not_answered_is_told_with_its_reason(way):
    from gruppetto.errors import UserError

    publish, told = over(way, probe=Probe([[1]], _zeros, deadline_s=3.0))
    silent, refusing = Silent("a"), Silent("b")
    refusing.refusal = UserError("token 1 is not in the vocabulary")
    await publish.publish(1, tensors(1).items(), [silent, refusing])
    found = await publish.verify(1, [silent, refusing])
    assert sorted(map(str, found)) == [
        "engine a: probe of version 1: no answer within 3 s",
        "engine b: probe of version 1: token 1 is not in the vocabulary",
    ]
    assert sorted(row["failed"] for row in told[1:]) == sorted(map(str, found))


async def test_what_the_trainer_fails_at_in_a_probe_is_not_the_engines():
    from gruppetto.engines.base import EngineFinish, GenerateResult
    from gruppetto.types import Segment, TokenKind

    async def broken(tokens, last):
        raise RuntimeError("out of memory")

    class Answers(Served):
        async def generate(self, request):
            segment = Segment(kind=TokenKind.MODEL, token_ids=(1,), logprobs=(0.0,), version=1)
            return GenerateResult(rid=request.rid, segments=(segment,), finish=EngineFinish.LENGTH)

    publish, _ = over("shm", probe=Probe([[1]], broken))
    engine = Answers("a")
    await publish.publish(1, tensors(1).items(), [engine])
    with pytest.raises(RuntimeError, match="out of memory"):
        await publish.verify(1, [engine])
    assert publish.channel.fenced == {}
    assert torch.equal(engine.tensors["model.norm.weight"], tensors(1)["model.norm.weight"])
