"""How far a run on virtual time has come: a line on standard error when it begins, and on a terminal its steps.

The steps are read from the run folder as they are written, so whoever simulates need not know that somebody watches.
Until it is whole it stands beside its name (`record.folder.aside`), and there the steps are counted.
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
    from gruppetto.record.folder import aside

    if not sys.stderr.isatty():
        print(f"{name}: {steps} steps on virtual time …", flush=True, file=sys.stderr)
        yield
        return
    done = Event()
    watch = Thread(target=_watch, args=(name, aside(run) / "metrics.jsonl", steps, done), daemon=True)
    watch.start()
    whole = False
    try:
        yield
        whole = True
    finally:
        done.set()
        watch.join()
        if whole:
            _count(name, finished(run / "metrics.jsonl"), steps)
        print(file=sys.stderr)


def _watch(name: str, metrics: Path, steps: int, done: Event) -> None:
    while not done.is_set():
        _count(name, finished(metrics), steps)
        done.wait(LOOK_S)


def _count(name: str, step: int, steps: int) -> None:
    print(f"\r{name}: step {step} of {steps} on virtual time …", end="", flush=True, file=sys.stderr)


def finished(metrics: Path) -> int:
    """Steps that stand in the file; 0 where there is none yet."""
    try:
        return metrics.read_bytes().count(b"\n")
    except OSError:
        return 0
