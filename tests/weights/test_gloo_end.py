"""A process that gave a gloo broadcast up ends as any other: no thread of it is left in torch while Python ends."""

import os
import subprocess
import sys

import pytest

pytest.importorskip("torch")

GIVES_UP = """
import threading
from types import SimpleNamespace
from gruppetto.weights.channels import gloo

plan = SimpleNamespace(index=0, num_bytes=100)
sink = gloo.GlooSink([plan], ["a"], 60.0)
engine = gloo._client(sink.address("a"), 60.0)
engine.set("here/1", "1")  # it reports, and never enters the group

def send():
    try:
        sink.buffer(plan)
    except Exception as error:
        failed.append(error)  # as a traceback that somebody keeps, which keeps the sink

failed = []
sending = threading.Thread(target=send)
sending.start()
engine.wait(["go"])
while not any(thread.name == "gloo" for thread in threading.enumerate()):
    pass
sink.close()
sending.join()
print(failed[0])
"""


def test_a_process_that_gave_a_broadcast_up_ends_with_its_own_exit_code():
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    ended = subprocess.run([sys.executable, "-c", GIVES_UP], env=env, capture_output=True, text=True, timeout=110)
    assert "no group with the engines: the publish was given up" in ended.stdout
    assert ended.returncode == 0, ended.stderr[-2000:]
