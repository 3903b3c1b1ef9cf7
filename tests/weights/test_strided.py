"""Tensors that do not lie in one piece: every way to an engine brings their values."""

import threading

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from gruppetto.engines.http.staging import Staging
from gruppetto.weights.base import Bucket
from gruppetto.weights.buckets import plan_buckets
from gruppetto.weights.channels.base import places_of, plans_of
from gruppetto.weights.channels.disk import DiskSink, DiskStream
from gruppetto.weights.channels.feed import Plain, pump
from gruppetto.weights.channels.gloo import GlooSink, GlooStream
from gruppetto.weights.channels.shm import ShmSink, ShmStream
from gruppetto.weights.checksum import checksum
from gruppetto.weights.inprocess import InProcessChannel
from gruppetto.weights.layouts.tensors import specs_of


def strided():
    base = torch.arange(48.0).reshape(6, 8)
    named = [
        ("cut", base[:, :7]),
        ("turned", base.t()),
        ("every_other", base[::2, 1::3]),
        ("broadcast", torch.tensor([1.0, 2.0, 3.0])[:, None].expand(3, 4)),
        ("half", base.bfloat16().t()[1:]),
        ("bytes", base.to(torch.float8_e4m3fn)[:, 3:]),
    ]
    assert not any(tensor.is_contiguous() for _, tensor in named)
    return named


def same(found, wanted):
    return found.dtype == wanted.dtype and torch.equal(found.float(), wanted.float())


@pytest.mark.parametrize("kind", ["shm", "disk", "gloo"])
def test_over_a_channel(kind, tmp_path):
    named = strided()
    plans = plan_buckets(specs_of(named), 256, groups=())
    assert len(plans) > 1
    names = ["e"]
    sink = DiskSink(1, tmp_path) if kind == "disk" else {"shm": ShmSink, "gloo": GlooSink}[kind](plans, names, 10.0)
    seen = {}

    def drain():
        opened = plans_of(places_of(plans))
        address = sink.address("e")
        if kind == "disk":
            stream = DiskStream(address, opened)
        else:
            stream = {"shm": ShmStream, "gloo": GlooStream}[kind](address, opened, 10.0)
        for plan, buffer, ready in stream.buckets():
            if ready is not None:
                ready(plan.num_bytes)
            for slot in plan.slots:
                raw = np.array(buffer[slot.offset : slot.offset + slot.spec.num_bytes])
                dtype = getattr(torch, slot.spec.dtype)
                seen[slot.spec.name] = torch.from_numpy(raw).view(dtype).reshape(slot.spec.shape)
        stream.close()

    receiver = threading.Thread(target=drain)
    if kind == "disk":
        pump(plans, Plain(named), sink)
        receiver.start()
    else:
        receiver.start()
        pump(plans, Plain(named), sink)
    receiver.join(30)
    sink.close()
    assert set(seen) == {name for name, _ in named}
    assert all(same(seen[name], tensor) for name, tensor in named)


class Copier:
    """As an engine in this process takes them."""

    name = "e"

    def __init__(self):
        self.got = {}

    async def begin_update(self, version):
        self.got.clear()

    async def load_bucket(self, bucket):
        assert checksum(bucket.tensors) == bucket.checksum
        self.got |= {name: torch.empty(tensor.shape, dtype=tensor.dtype) for name, tensor in bucket.tensors}
        for name, tensor in bucket.tensors:
            self.got[name].copy_(tensor)

    async def commit_update(self, version, num_buckets):
        pass


@pytest.mark.parametrize("source", [list, Plain])
async def test_in_this_process(source):
    named, engine = strided(), Copier()
    await InProcessChannel(300).publish(1, source(named), [engine])
    assert all(same(engine.got[name], tensor) for name, tensor in named)


async def test_staged_for_a_server_that_reads_folders(tmp_path):
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text("{}")
    named = strided()
    staging = Staging(tmp_path / "staged", tmp_path / "model")
    await staging.begin(1, "e")
    await staging.add(1, Bucket(index=0, tensors=named, checksum=checksum(named)), "e")
    folder = await staging.finish(1, 1, "e")
    found = load_file(next(folder.glob("*.safetensors")))
    assert all(same(found[name], tensor) for name, tensor in named)
