"""Two trainer processes that hold a model's shards publish to a real vLLM: it serves what they hold together."""

import json
import os
import socket
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]
SCRIPT = Path(__file__).with_name("sharded_rank.py")


def run_ranks(*arguments):
    """What each of the two printed."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    model, *rest = map(str, arguments)
    ranks = [
        subprocess.Popen(
            [sys.executable, str(SCRIPT), model, str(rank), str(port), *rest],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        for rank in (0, 1)
    ]
    try:
        outs = [rank.communicate(timeout=250) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    assert [rank.returncode for rank in ranks] == [0, 0], outs[0][1][-2000:] + outs[1][1][-2000:]
    return [out for out, _ in outs]


def test_two_ranks_publish_their_shards_to_vllm(tiny_model, tmp_path, shared_vllm):
    from engines.contract.vllm_server import need_vllm

    need_vllm()
    with shared_vllm.serving(tiny_model) as url:
        lead, _ = run_ranks(tiny_model, url, tmp_path / "weights")
    rows = [json.loads(line) for line in lead.splitlines() if line.startswith("{")]
    assert [row["version"] for row in rows] == [1, 2]
    for row in rows:
        assert row["versions"] == [row["version"]]
        assert row["ids"] == row["greedy"]
        assert row["logprobs"] == pytest.approx(row["said"], abs=2e-3)
        assert row["logprobs"] != pytest.approx(row["said_before"], abs=2e-2)  # the versions can be told apart
        assert row["held"] < 0.6 * row["bytes"]  # no rank has all
