"""Fixtures of the reward tests: a script of verifiers that misbehave, and rollouts to score."""

from array import array

import pytest

from gruppetto.types import FinishReason, Rollout, Segment, Task, TokenKind

SCRIPT = """
import os, re, signal, sys, time

def score(response, answer):
    print("chatter")
    return globals()["on_" + response](answer)

def on_right(answer): return answer == "4"
def on_echo(answer): return answer
def on_slow_echo(answer): time.sleep(0.01); return answer
def on_half(answer): return 0.5
def on_hang(answer): time.sleep(1000)
def on_regex(answer): re.match(r"(a+)+$", "a" * 60 + "b")
def on_exit(answer): os._exit(3)
def on_sysexit(answer): sys.exit(4)
def on_segfault(answer): os.kill(os.getpid(), signal.SIGSEGV)
def on_raise(answer): raise ValueError("no\\nsecond line")
def on_nan(answer): return float("nan")
def on_none(answer): return None
def on_text(answer): return "1.0"
def on_pid(answer): return os.getpid()
def on_hash(answer): return hash("text") % 1000

def on_grandchild(answer):
    import subprocess
    child = subprocess.Popen(["sleep", "1000"])
    open(answer, "w").write(str(child.pid))
    time.sleep(1000)

def on_alarm(answer):
    def ring(*_): raise TimeoutError
    signal.signal(signal.SIGALRM, ring)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    try:
        time.sleep(30)
    except TimeoutError:
        return 0.25

def on_leftover_alarm(answer):
    signal.signal(signal.SIGALRM, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_REAL, 0.05)
    return 1

def everything(**given): return len(given)
def some(extra, prompt): return extra["x"] if prompt == "p" else 0
def unknown(completions): return 1
def defaulted(response, scale=2.0): return scale
def positional(response, /): return 1
async def later(response): return 1
number = 3
"""


@pytest.fixture
def script(tmp_path):
    path = tmp_path / "verifiers_script.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def rollout():
    """Makes a rollout whose response is a text in bytes, with an end token behind."""

    def make(response, answer="4", extra=None):
        ids = array("i", [*response.encode(), 256])
        task = Task(id="t:1", prompt_ids=[1], prompt="p", answer=answer, extra=extra or {})
        segment = Segment(TokenKind.MODEL, 0, ids, [0.0] * len(ids))
        return Rollout(id="r", group_id=0, member=0, task=task, segments=(segment,), finish=FinishReason.STOP)

    return make


@pytest.fixture
def decode():
    return lambda ids: bytes(i for i in ids if i < 256).decode("utf-8", "replace")
