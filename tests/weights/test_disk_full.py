"""A disk that cannot take a version: one line that says so, and the process lives (what is written through memory that
has no room behind it would kill it)."""

import shutil
import subprocess
import sys

import pytest

pytest.importorskip("torch")

ROOM = "2m"
OVER_A_CHANNEL = """
import sys
from pathlib import Path
import torch
from gruppetto.errors import RunError
from gruppetto.weights.buckets import plan_buckets
from gruppetto.weights.channels.disk import DiskSink
from gruppetto.weights.channels.feed import Plain, pump
from gruppetto.weights.layouts.tensors import spec_of

def publish(version, elements):
    named = [(f"t{i}", torch.zeros(elements)) for i in range(4)]
    plans = plan_buckets([spec_of(name, tensor) for name, tensor in named], 1 << 20, groups=())
    sink = DiskSink(version, Path(sys.argv[1]) / "weights")
    try:
        pump(plans, Plain(named), sink)
    finally:
        sink.close()

killed = Path(sys.argv[1]) / "weights" / ".weights_v000000.999999999"
killed.mkdir(parents=True)
(killed / "model-00000.safetensors").write_bytes(bytes(1_500_000))
publish(1, 80_000)
try:
    publish(2, 300_000)
except RunError as error:
    print(error)
print(sorted(path.name for path in (Path(sys.argv[1]) / "weights").iterdir()))
"""
STAGED = """
import asyncio, sys
from pathlib import Path
import torch
from gruppetto.engines.http.staging import Staging
from gruppetto.errors import RunError
from gruppetto.weights.base import Bucket
from gruppetto.weights.checksum import checksum

async def stage():
    staging = Staging(Path(sys.argv[1]) / "weights", Path(sys.argv[1]))
    await staging.begin(2, "e")
    tensors = [("t", torch.zeros(1_200_000))]
    await staging.add(2, Bucket(index=0, tensors=tensors, checksum=checksum(tensors)), "e")

try:
    asyncio.run(stage())
except RunError as error:
    print(error)
"""
SMALL = 'mount -t tmpfs -o size="$1" tmpfs "$2" && exec "$3" -c "$4" "$2"'


def on_a_small_disk(folder, program):
    """What the program says, whose folder is a file system of its own of 2 MB."""
    unshare = shutil.which("unshare")
    small = [unshare, "-rm", "sh", "-c", SMALL, "sh", ROOM, str(folder), sys.executable]
    if unshare is None or subprocess.run([*small, "pass"], capture_output=True).returncode:
        pytest.skip("this system lets nobody mount a file system of its own")
    return subprocess.run([*small, program], capture_output=True, text=True, timeout=110)


def test_a_full_disk_is_said_and_the_version_before_stays(tmp_path):
    """Also the room of a process that was killed in mid-version is had again."""
    ended = on_a_small_disk(tmp_path, OVER_A_CHANNEL)
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])
    said, left = ended.stdout.splitlines()
    assert said.startswith(f"weights version 2 cannot be written to {tmp_path}/weights: No space left on device; make")
    assert left == "['weights_v000001']"


def test_a_full_disk_is_no_engines_fault(tmp_path):
    ended = on_a_small_disk(tmp_path, STAGED)
    assert ended.returncode == 0, (ended.returncode, ended.stderr[-2000:])
    assert ended.stdout.startswith(f"weights version 2 cannot be written to {tmp_path}/weights: ")
    assert "No space left on device" in ended.stdout
