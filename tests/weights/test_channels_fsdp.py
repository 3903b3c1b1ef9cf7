"""FSDP2 over two real processes publishes to an embedded engine."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).with_name("fsdp_rank.py")


@pytest.mark.slow
@pytest.mark.parametrize(("channel", "dtype"), [("shm", "float32"), ("gloo", "bfloat16")])
def test_two_ranks_publish_what_they_hold_together(tiny_model, channel, dtype):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), str(tiny_model), str(rank), str(port), channel, dtype],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        outs = [rank.communicate(timeout=200) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outs[0][1][-2000:] + outs[1][1][-2000:]
    assert [line.split()[:2] for line in outs[0][0].splitlines() if line.startswith("same")] == [
        ["same", "1"],
        ["same", "2"],
    ]
