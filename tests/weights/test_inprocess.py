"""The checksum, and buckets on their way to several engines."""

import asyncio

import pytest
import torch

from gruppetto.engines.http.staging import Staging
from gruppetto.errors import EngineError, UserError
from gruppetto.weights.channels.feed import Plain
from gruppetto.weights.checksum import checksum
from gruppetto.weights.inprocess import InProcessChannel


class Taker:
    """Keeps what arrives; refuses one bucket where told."""

    def __init__(self, name: str, bad: int | None = None) -> None:
        self.name, self.bad, self.log, self.buckets = name, bad, [], []

    async def begin_update(self, version: int) -> None:
        self.log.append(("begin", version))

    async def load_bucket(self, bucket) -> None:
        if bucket.index == self.bad:
            raise EngineError(self.name, "cannot take it")
        assert checksum(bucket.tensors) == bucket.checksum
        self.buckets.append([name for name, _ in bucket.tensors])

    async def commit_update(self, version: int, num_buckets: int) -> None:
        self.log.append(("commit", version, num_buckets))


def tensors(*sizes: int):
    return [(f"t{i}", torch.full((n,), float(i))) for i, n in enumerate(sizes)]


async def test_every_engine_gets_every_bucket_then_commits():
    engines = [Taker("a"), Taker("b")]
    receipts = await InProcessChannel(40).publish(5, iter(tensors(4, 5, 2, 30, 1)), engines)
    for engine in engines:
        assert engine.buckets == [["t0", "t1"], ["t2"], ["t3"], ["t4"]]
        assert engine.log == [("begin", 5), ("commit", 5, 4)]
    assert [(r.engine, r.version, r.num_bytes) for r in receipts] == [("a", 5, 168), ("b", 5, 168)]


class Copier(Taker):
    """Copies what arrives, and notes where it lay."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.got, self.places = {}, []

    async def load_bucket(self, bucket) -> None:
        await super().load_bucket(bucket)
        self.got |= {name: tensor.clone() for name, tensor in bucket.tensors}
        self.places.append(bucket.tensors[0][1].data_ptr())


@pytest.mark.parametrize("limit", [1, 700, 1 << 20])
async def test_a_source_is_gathered_bucket_by_bucket_into_one_place(limit):
    sent = tensors(4, 5, 200, 30, 1) + [("half", torch.arange(7.0).bfloat16()), ("scalar", torch.tensor(2.5))]
    engine = Copier("a")
    receipts = await InProcessChannel(limit).publish(3, Plain(sent), [engine])
    assert {name: (t.dtype, t.tolist()) for name, t in engine.got.items()} == {
        name: (t.dtype, t.tolist()) for name, t in sent
    }
    assert len(set(engine.places)) == 1
    assert [name for bucket in engine.buckets for name in bucket] == [name for name, _ in sent]
    assert engine.log == [("begin", 3), ("commit", 3, len(engine.buckets))]
    assert receipts[0].num_bytes == sum(t.numel() * t.element_size() for _, t in sent)


async def test_no_engine_commits_when_one_cannot_take_a_bucket():
    engines = [Taker("a"), Taker("b", bad=1)]
    with pytest.raises(EngineError, match="engine b"):
        await InProcessChannel(16).publish(5, tensors(4, 4, 4), engines)
    assert [e.log for e in engines] == [[("begin", 5)]] * 2


class Slow(Taker):
    """Takes a while to commit, or fails at once; `open` is how many are at it."""

    def __init__(self, name: str, fails: bool) -> None:
        super().__init__(name)
        self.fails, self.open = fails, 0

    async def commit_update(self, version: int, num_buckets: int) -> None:
        if self.fails:
            raise EngineError(self.name, "died")
        self.open += 1
        assert self.open == 1
        await asyncio.sleep(0.05)
        self.open -= 1
        await super().commit_update(version, num_buckets)


async def test_a_publish_ends_with_nobody_at_work_and_names_all_that_failed():
    _, b, _ = engines = [Slow("a", True), Slow("b", False), Slow("c", True)]
    with pytest.raises(EngineError, match=r"engine a: died; and engine c: died") as failed:
        await InProcessChannel(16).publish(5, tensors(4), engines)
    assert failed.value.engine == "a"
    assert (b.open, b.log[-1]) == (0, ("commit", 5, 1))
    await InProcessChannel(16).publish(5, tensors(4), [b])


async def test_a_folder_stays_while_a_server_reads_it(tmp_path):
    """Staged: the retry, which comes at once, does not delete what the others still load."""
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    staging, gone = Staging(tmp_path / "staged", tmp_path / "model"), []

    class Reader(Slow):
        async def begin_update(self, version: int) -> None:
            await staging.begin(version, self.name)

        async def load_bucket(self, bucket) -> None:
            await staging.add(5, bucket, self.name)

        async def commit_update(self, version: int, num_buckets: int) -> None:
            folder = await staging.finish(version, num_buckets, self.name)
            await super().commit_update(version, num_buckets)
            gone.append(not (folder / "config.json").exists())
            await staging.loaded(version, self.name)

    readers = [Reader("a", True), Reader("b", False)]
    with pytest.raises(EngineError, match="engine a"):
        await InProcessChannel(16).publish(5, tensors(4), readers)
    await InProcessChannel(16).publish(5, tensors(4), readers[1:])
    assert gone == [False, False]


def test_a_bucket_has_a_size():
    with pytest.raises(UserError, match="0 bytes"):
        InProcessChannel(0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int64, torch.bool])
def test_the_checksum_sees_values_names_and_shapes_not_layout(dtype):
    x = (torch.arange(24).reshape(4, 6) % 2 + torch.arange(24).reshape(4, 6) // 12).to(dtype)
    y = torch.ones(3, dtype=dtype)
    base = checksum([("x", x), ("y", y)])
    assert base == checksum([("y", y), ("x", x.t().contiguous().t())])
    changed = x.clone()
    changed[3, 5] = 0
    assert base != checksum([("x", changed), ("y", y)])
    assert base != checksum([("x", x)])
    assert base != checksum([("y", x), ("x", y)])
    assert base != checksum([("x", x.reshape(6, 4)), ("y", y)])


def test_scalars_and_empty_tensors_have_a_checksum():
    assert checksum([("s", torch.tensor(1.5))]) != checksum([("s", torch.tensor(2.5))])
    assert checksum([("e", torch.empty(0))]) == checksum([("e", torch.empty(0))])
    assert checksum([]) == 0
