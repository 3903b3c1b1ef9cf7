"""The parts of a channel: digests, sinks and streams, offers."""

import contextlib
import gc
import mmap
import os
import stat
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import load_file
from weights.drawn_tensors import tensors

from gruppetto.errors import RunError
from gruppetto.weights.buckets import plan_buckets
from gruppetto.weights.channels import gloo, shm
from gruppetto.weights.channels.base import BUFFERS, SinkError, places_of, plans_of
from gruppetto.weights.channels.disk import KEEP, DiskSink, DiskStream
from gruppetto.weights.channels.feed import Plain, bytes_of, pump
from gruppetto.weights.channels.gloo import GlooSink, GlooStream
from gruppetto.weights.channels.shm import ShmSink, ShmStream
from gruppetto.weights.channels.sums import CHUNK, WIDTH, copied, summed
from gruppetto.weights.layouts.tensors import specs_of

SIZES = [0, 1, 7, 8, 8 * WIDTH - 1, 8 * WIDTH, 8 * WIDTH + 5, CHUNK - 1, CHUNK, CHUNK + 3, 2 * CHUNK + 8 * WIDTH + 1]


# --- digests ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("size", SIZES)
def test_a_copys_digest_is_that_of_what_was_copied(size):
    source = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    target = np.zeros(size, np.uint8)
    asked = []
    assert copied(target, source, asked.append) == summed(source)
    assert (target == source).all()
    assert asked == sorted(asked)
    assert not size or asked[-1] == size


@given(st.sampled_from(SIZES[1:]), st.data())
def test_any_flipped_bit_is_seen(size, data):
    values = np.random.default_rng(size).integers(0, 256, size, dtype=np.uint8)
    before = summed(values)
    values[data.draw(st.integers(0, size - 1))] ^= 1 << data.draw(st.integers(0, 7))
    assert summed(values) != before


@given(st.sampled_from([16, 64, 256, 1024, 2048, 4096]), st.integers(2, 40), st.data())
def test_two_rows_that_changed_places_are_seen(width, height, data):
    values = np.random.default_rng(width * height).integers(0, 256, (height, width), dtype=np.uint8)
    first, second = data.draw(st.lists(st.integers(0, height - 1), min_size=2, max_size=2, unique=True))
    swapped = values.copy()
    swapped[[first, second]] = values[[second, first]]
    assert summed(swapped.reshape(-1)) != summed(values.reshape(-1))


@given(st.integers(2, 5), st.data())
def test_two_chunks_that_changed_places_are_seen(count, data):
    chunks = np.random.default_rng(count).integers(0, 256, (count, CHUNK), dtype=np.uint8)
    first, second = data.draw(st.lists(st.integers(0, count - 1), min_size=2, max_size=2, unique=True))
    swapped = chunks.copy()
    swapped[[first, second]] = chunks[[second, first]]
    assert summed(swapped.reshape(-1)) != summed(chunks.reshape(-1))


# --- sinks and streams -----------------------------------------------------------------------------------------------


def make_sink(kind, plans, names, tmp_path, version=1, deadline_s=60.0):
    if kind == "disk":
        return DiskSink(version, tmp_path)
    return (ShmSink if kind == "shm" else GlooSink)(plans, names, deadline_s)


def make_stream(kind, address, plans):
    if kind == "disk":
        return DiskStream(address, plans)
    return (ShmStream if kind == "shm" else GlooStream)(address, plans, 60.0)


def drain(kind, address, places, seen, held=None):
    plans = plans_of(places)
    with contextlib.closing(make_stream(kind, address, plans)) as stream:
        for plan, buffer, ready in stream.buckets():
            if held is not None:
                held.add(buffer.ctypes.data)
            if ready is not None:
                ready(plan.num_bytes)
            for slot in plan.slots:
                seen[slot.spec.name] = buffer[slot.offset : slot.offset + slot.spec.num_bytes].tobytes()


@pytest.mark.parametrize("kind", ["shm", "disk", "gloo"])
@pytest.mark.parametrize("bucket", [256, 20_000, 1 << 20])
def test_what_goes_in_comes_out_at_each_engine(kind, bucket, tmp_path):
    named = tensors(14)
    plans = plan_buckets(specs_of(named), bucket, groups=())
    names = ["a", "b"]
    sink = make_sink(kind, plans, names, tmp_path)
    seen = {name: {} for name in names}
    threads = [
        threading.Thread(target=drain, args=(kind, sink.address(name), places_of(plans), seen[name])) for name in names
    ]
    if kind == "disk":
        digests = pump(plans, Plain(named), sink)
    for thread in threads:
        thread.start()
    if kind != "disk":
        digests = pump(plans, Plain(named), sink)
    for thread in threads:
        thread.join(100)
    sink.close()
    for name in names:
        assert seen[name] == {tensor: bytes_of(value).tobytes() for tensor, value in named}
    assert digests == {tensor: summed(bytes_of(value)) for tensor, value in named}


@pytest.mark.parametrize("kind", ["shm", "gloo"])
def test_at_most_two_buckets_are_held_at_either_end(kind, tmp_path):
    named = [(f"t{i}", torch.full((5000,), float(i))) for i in range(12)]
    plans = plan_buckets(specs_of(named), 20_000, groups=())
    assert len(plans) == 12
    sink = make_sink(kind, plans, ["a"], tmp_path)
    sent, received, seen = set(), set(), {}
    buffer_of = sink.buffer

    def buffer(plan):
        found = buffer_of(plan)
        sent.add(found.ctypes.data)
        return found

    sink.buffer = buffer
    thread = threading.Thread(target=drain, args=(kind, sink.address("a"), places_of(plans), seen, received))
    thread.start()
    pump(plans, Plain(named), sink)
    thread.join(100)
    sink.close()
    assert len(seen) == 12
    assert len(sent) == len(received) == BUFFERS
    assert sink.buffer_bytes <= BUFFERS * (max(plan.num_bytes for plan in plans) + 4096)


def test_a_tensor_of_another_type_is_cast_in_the_bucket():
    named = [("w", torch.tensor([1.0, 1.00390625, 3e38, -0.0]))]
    specs = [type(specs_of(named)[0])("w", (4,), "bfloat16")]
    target = np.zeros(8, np.uint8)
    assert Plain(named).fill(specs[0], target, lambda end: None) == summed(target)
    assert torch.equal(torch.from_numpy(target).view(torch.bfloat16), named[0][1].to(torch.bfloat16))


# --- disk ------------------------------------------------------------------------------------------------------------


def test_a_versions_folder_is_whole_or_not_there_and_old_ones_go(tmp_path):
    named = tensors()
    plans = plan_buckets(specs_of(named), 20_000, groups=())
    for version in range(1, 5):
        sink = make_sink("disk", plans, [], tmp_path, version)
        sink.buffer(plans[0])
        assert not (tmp_path / f"weights_v{version:06d}").exists()
        pump(plans, Plain(named), sink)
        sink.close()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["weights_v000003", "weights_v000004"][-KEEP:]
    given_up = make_sink("disk", plans, [], tmp_path, 9)
    given_up.buffer(plans[0])
    given_up.close()
    assert not list(tmp_path.glob("*9*"))


def test_the_files_are_safetensors(tmp_path):
    named = [(name, tensor) for name, tensor in tensors() if tensor.dim()]
    plans = plan_buckets(specs_of(named), 20_000, groups=())
    sink = make_sink("disk", plans, [], tmp_path)
    pump(plans, Plain(named), sink)
    found = {}
    for file in Path(sink.address("e")["folder"]).iterdir():
        found |= load_file(file)
    for name, tensor in named:
        assert torch.equal(found[name], tensor)


def test_a_file_that_is_cut_or_anothers_is_refused(tmp_path):
    named = tensors()
    plans = plan_buckets(specs_of(named), 1 << 20, groups=())
    sink = make_sink("disk", plans, [], tmp_path)
    pump(plans, Plain(named), sink)
    file = next(Path(sink.address("e")["folder"]).iterdir())
    whole = file.read_bytes()
    other = plan_buckets(specs_of(tensors(6)), 1 << 20, groups=())
    with pytest.raises(RunError, match="does not hold bucket 0 as it was offered"):
        drain("disk", sink.address("e"), places_of(other), {})
    for cut, message in ((9, "does not hold"), (len(whole) - 1000, "ends 1000 bytes early"), (0, "cannot be read")):
        file.write_bytes(whole[:cut])
        with pytest.raises(RunError, match=message):
            drain("disk", sink.address("e"), places_of(plans), {})


# --- shared memory ---------------------------------------------------------------------------------------------------


def test_nobody_else_can_reach_the_memory_and_nothing_is_left_of_it():
    plans = plan_buckets(specs_of(tensors()), 1 << 20, groups=())
    sink = make_sink("shm", plans, ["a"], None)
    folder = Path(sink.address("a")["path"]).parent
    assert stat.S_IMODE(os.stat(folder).st_mode) == 0o700
    sink.close()
    assert not folder.exists()


def test_a_sender_that_goes_in_the_middle_is_noticed(tmp_path):
    named = [(f"t{i}", torch.zeros(5000)) for i in range(6)]
    plans = plan_buckets(specs_of(named), 20_000, groups=())
    sink = make_sink("shm", plans, ["a"], tmp_path)
    failed = []

    def receive():
        try:
            drain("shm", sink.address("a"), places_of(plans), {})
        except RunError as error:
            failed.append(str(error))

    thread = threading.Thread(target=receive)
    thread.start()
    sink.buffer(plans[0])
    sink.filled(plans[0], 512)
    sink.close()
    thread.join(100)
    assert "the sender is gone" in failed[0]


def test_a_memory_that_has_grown_is_mapped_anew():
    fd = os.memfd_create("weights")
    ends = os.pipe()
    os.ftruncate(fd, mmap.PAGESIZE)
    small = shm._mapped(os.dup(fd), os.dup(ends[0]))
    assert shm._mapped(os.dup(fd), os.dup(ends[0])) is small
    os.ftruncate(fd, 2 * mmap.PAGESIZE)
    os.pwrite(fd, b"x", mmap.PAGESIZE)
    grown = shm._mapped(os.dup(fd), os.dup(ends[0]))
    assert (len(grown), grown[mmap.PAGESIZE]) == (2 * mmap.PAGESIZE, ord("x"))
    for end in (fd, *ends):
        os.close(end)


def mappings():
    """Bytes of weights that are mapped in this process, by others or by itself."""
    with open("/proc/self/maps") as file:
        return sum("memfd:gruppetto-weights" in line for line in file)


def test_the_memory_of_a_sender_that_has_died_is_let_go(tmp_path):
    """By the process that took weights from it, without a further publish."""
    script = """
import sys, torch
from gruppetto.weights.buckets import plan_buckets
from gruppetto.weights.channels.feed import Plain, pump
from gruppetto.weights.channels.shm import ShmSink
from gruppetto.weights.layouts.tensors import specs_of
named = [(f"t{i}", torch.ones(5000)) for i in range(6)]
plans = plan_buckets(specs_of(named), 20_000, groups=())
sink = ShmSink(plans, ["a"], 60.0)
print(sink.address("a")["path"], flush=True)
pump(plans, Plain(named), sink)
print("sent", flush=True)
sys.stdin.read()
"""
    named = [(f"t{i}", torch.ones(5000)) for i in range(6)]
    places = places_of(plan_buckets(specs_of(named), 20_000, groups=()))
    gc.collect()
    before = mappings()
    with subprocess.Popen([sys.executable, "-c", script], stdin=-1, stdout=-1, text=True) as sender:
        seen = {}
        drain("shm", {"path": sender.stdout.readline().strip(), "name": "a"}, places, seen)
        assert len(seen) == 6
        assert sender.stdout.readline() == "sent\n"
        assert mappings() > before
        sender.kill()
    gc.collect()
    for _ in range(1000):
        if mappings() <= before:
            break
        time.sleep(0.01)
    assert mappings() <= before


# --- gloo ------------------------------------------------------------------------------------------------------------


def test_an_engine_that_dies_on_its_way_into_the_group_holds_nobody_up():
    """It has reported, and the word to go is out. The deadline is longer than this test may take."""
    plans = plan_buckets(specs_of(tensors()), 20_000, groups=())
    sink = GlooSink(plans, ["good", "dead"], 600.0)
    failed = []

    def good():
        try:
            GlooStream(sink.address("good"), plans, 600.0)
        except RunError as error:
            failed.append(str(error))

    def dead():
        store = gloo._client(sink.address("dead"), 600.0)
        store.set(f"here/{sink.address('dead')['rank']}", "1")
        store.wait(["go"])
        sink.gone("dead")

    threads = [threading.Thread(target=part) for part in (good, dead)]
    for thread in threads:
        thread.start()
    with pytest.raises(SinkError, match="dead went before it was there") as caught:
        pump(plans, Plain(tensors()), sink)
    assert caught.value.engines == ("dead",)
    for thread in threads:
        thread.join(60)
    sink.close()
    assert failed == [
        "gloo: no group with the sender: it was called off: another engine is gone, or the publish was given up"
    ]


def test_the_one_that_did_not_come_is_named_and_not_those_that_hear_of_it(monkeypatch):
    """Those who are there may have failed before the sender says whose fault it is."""
    plans = plan_buckets(specs_of(tensors()), 20_000, groups=())
    sink = GlooSink(plans, ["good", "late"], 60.0)
    store, clock = sink._store, iter([0.0])
    store.set("here/1", "1")

    def tell(key, value):
        store.set(key, value)
        sink.gone("good")

    sink._store = SimpleNamespace(check=store.check, set=tell)
    monkeypatch.setattr(gloo, "monotonic", lambda: next(clock, 61.0))
    with pytest.raises(SinkError, match="late did not come to the broadcast") as caught:
        pump(plans, Plain(tensors()), sink)
    assert caught.value.engines == ("late",)
    sink.close()


# --- offers ----------------------------------------------------------------------------------------------------------
