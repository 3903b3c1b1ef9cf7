"""Where the socket of shared memory lies when TMPDIR is longer than a socket's path may be, as on many clusters."""

import contextlib
import os
import tempfile
import threading

import pytest

pytest.importorskip("torch")
import torch

from gruppetto.weights.buckets import plan_buckets
from gruppetto.weights.channels.feed import Plain, pump
from gruppetto.weights.channels.shm import ShmSink, ShmStream
from gruppetto.weights.layouts.tensors import spec_of


def test_weights_travel_however_long_the_folder_for_temporary_files_is(tmp_path, monkeypatch):
    far = tmp_path / ("x" * 120)
    far.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(far))
    plans = plan_buckets([spec_of("t", torch.zeros(10))], 1 << 20, groups=())
    sink = ShmSink(plans, ["e"], 30.0)
    where = os.path.dirname(sink.address("e")["path"])
    assert os.stat(where).st_mode & 0o077 == 0
    seen = []

    def take():
        with contextlib.closing(ShmStream(sink.address("e"), plans, 30.0)) as stream:
            for plan, buffer, ready in stream.buckets():
                ready(plan.num_bytes)
                seen.append(bytes(buffer[:40]))

    taking = threading.Thread(target=take)
    taking.start()
    pump(plans, Plain([("t", torch.ones(10))]), sink)
    taking.join(60)
    sink.close()
    assert seen == [torch.ones(10).numpy().tobytes()]
    assert not os.path.exists(where)
    assert not list(far.iterdir())
