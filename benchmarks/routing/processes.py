"""Processes of the benchmark: engines, our router, SGLang's; each on a port of its own, ended by its own handle."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from routing.load import Sizes

HERE = Path(__file__).parent
_TICK = os.sysconf("SC_CLK_TCK")


def free_port() -> int:
    """A port nobody has now."""
    with socket.socket() as found:
        found.bind(("127.0.0.1", 0))
        return int(found.getsockname()[1])


class Process:
    """One that listens."""

    def __init__(self, popen: subprocess.Popen[str], port: int) -> None:
        self.popen, self.port = popen, port

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def cpu_s(self) -> float:
        """CPU seconds so far, all of its threads and its living children."""
        total = 0
        for pid in [self.popen.pid, *_children(self.popen.pid)]:
            with contextlib.suppress(OSError):
                fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
                total += int(fields[11]) + int(fields[12])
        return total / _TICK

    def peak_bytes(self) -> int:
        """The most memory it has had."""
        lines = Path(f"/proc/{self.popen.pid}/status").read_text().splitlines()
        return next(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM"))

    def get(self, path: str) -> Any:
        """A JSON answer of its own."""
        with urllib.request.urlopen(self.url + path, timeout=10) as answer:
            return json.loads(answer.read())

    def post(self, path: str) -> None:
        """A call without a body."""
        urllib.request.urlopen(urllib.request.Request(self.url + path, b"", method="POST"), timeout=10).close()


def _children(pid: int) -> list[int]:
    found: list[int] = []
    for task in Path(f"/proc/{pid}/task").glob("*/children"):
        with contextlib.suppress(OSError):
            found += map(int, task.read_text().split())
    return found + [inner for child in found for inner in _children(child)]


@contextlib.contextmanager
def running(command: Sequence[str], port: int, **options: Any) -> Iterator[Process]:
    """A process, ended when the block is."""
    popen = subprocess.Popen(command, text=True, stdin=subprocess.PIPE, **options)
    try:
        yield Process(popen, port)
    finally:
        popen.terminate()
        try:
            popen.wait(20)
        except subprocess.TimeoutExpired:
            popen.kill()
            popen.wait()


@contextlib.contextmanager
def engines(count: int, kind: str, sizes: Sizes | None = None) -> Iterator[list[Process]]:
    """So many engines, ready."""
    with contextlib.ExitStack() as stack:
        found = []
        for _ in range(count):
            port = free_port()
            command = [sys.executable, str(HERE / "engine.py"), str(port), kind, json.dumps(asdict(sizes or Sizes()))]
            pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL}
            process = stack.enter_context(running(command, port, **pipes))
            assert process.popen.stdout is not None
            assert process.popen.stdout.readline() == "ready\n"
            found.append(process)
        yield found


@contextlib.contextmanager
def ours(behind: Sequence[Process]) -> Iterator[Process]:
    """`gruppetto route` in front of them, with all of them up."""
    port = free_port()
    command = [sys.executable, "-m", "gruppetto", "route", "--port", str(port)]
    for engine in behind:
        command += ["--engine", engine.url]
    with running(command, port, stdout=subprocess.DEVNULL) as process:
        _until(lambda: all(worker["is_healthy"] for worker in process.get("/workers")["workers"]))
        time.sleep(1.5)  # a look at the loads of all
        yield process


@contextlib.contextmanager
def sglangs(python: str, behind: Sequence[Process], policy: str) -> Iterator[Process]:
    """SGLang's router under one policy, with all of them up. Its log of every request is off."""
    port, metrics = free_port(), free_port()
    policy, _, mode = policy.partition(":")
    command = [python, "-m", "sglang_router.launch_router", "--port", str(port), "--policy", policy]
    command += ["--assignment-mode", mode] if mode else []
    command += ["--prometheus-port", str(metrics), "--log-level", "error"]
    command += ["--worker-urls", *(engine.url for engine in behind)]
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    with running(command, port, **quiet) as process:
        _until(lambda: sum(w["is_healthy"] for w in process.get("/workers")["workers"]) == len(behind))
        yield process


def _until(true: Any, within_s: float = 60.0) -> None:
    end = time.monotonic() + within_s
    while True:
        with contextlib.suppress(urllib.error.URLError, ConnectionError, KeyError, TimeoutError):
            if true():
                return
        if time.monotonic() > end:
            raise SystemExit("a router did not take its engines up in a minute")
        time.sleep(0.1)
