"""How far a run on virtual time has come: a line on standard error when it begins, and on a terminal its steps.

The steps are read from the run folder as they are written, so whoever simulates need not know that somebody watches.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Event, Thread

LOOK_S = 0.5
"""Seconds between looks at the run folder."""


@contextmanager
def steps_shown(name: str, run: Path, steps: int) -> Iterator[None]:
    """Says what runs; while the body does, the line of a terminal counts the finished steps of the run folder `run`."""
    if not sys.stderr.isatty():
        print(f"{name}: {steps} steps on virtual time …", flush=True, file=sys.stderr)
        yield
        return
    done = Event()
    watch = Thread(target=_watch, args=(name, run / "metrics.jsonl", steps, done), daemon=True)
    watch.start()
    try:
        yield
    finally:
        done.set()
        watch.join()
        print(file=sys.stderr)


def _watch(name: str, metrics: Path, steps: int, done: Event) -> None:
    while True:
        ended = done.is_set()
        print(f"\r{name}: step {finished(metrics)} of {steps} on virtual time …", end="", flush=True, file=sys.stderr)
        if ended:
            return
        done.wait(LOOK_S)


def finished(metrics: Path) -> int:
    """Steps that stand in the file; 0 where there is none yet."""
    try:
        return metrics.read_bytes().count(b"\n")
    except OSError:
        return 0
