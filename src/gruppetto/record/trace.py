"""The timeline: `events.jsonl` as a Chrome trace, which ui.perfetto.dev and chrome://tracing open.

One process per engine, one thread per slot: every span from a `start` to its `stop` is a slice in the lowest lane that
is free. The run itself is a process of its own, with a lane for training and one for publishing, instant marks for
steps, evaluations and errors, and counters of running rollouts and ready groups. Times are microseconds.
Promise: one pass, bounded memory: a longer run is shown from its last `MAX_BYTES` of events on, and the trace says so.
"""

from __future__ import annotations

import heapq
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import msgspec

from gruppetto.record.lines import to_json

MAX_BYTES = 48 << 20
"""Events behind this much of the newest are left out: viewers slow down above a few hundred thousand slices."""

_RUN = 1
_TRAIN, _PUBLISH, _MARKS = 1, 2, 3
_COUNT_EVERY_S = 1e-3
_READ_BYTES = 1 << 18
_SHOWN = re.compile(rb'"kind":"(?:start|stop|ready|close|drop|train_|publish_|eval|error)').search
"""Of a line: whether it may change the trace. Half of a long run's events do not, and are not decoded."""


class _Event(msgspec.Struct, gc=False):
    """The fields of an event that the trace shows."""

    t: float
    kind: str
    group: int | None = None
    rollout: str | None = None
    engine: str | None = None
    version: int | None = None
    tokens: int | None = None
    reason: str | None = None
    step: int | None = None
    groups: list[int] | None = None
    seconds: float | None = None


class _Args(msgspec.Struct, omit_defaults=True, gc=False):
    """What a slice says of itself; what is not known is left out."""

    step: int | None = None
    group: int | None = None
    version: int | None = None
    tokens_before: int | None = None
    tokens: int | None = None
    reason: str | None = None
    made: int | None = None


class _Slice(msgspec.Struct, kw_only=True, gc=False):
    """A span in a lane; times in microseconds."""

    ph: str = "X"
    name: str
    pid: int
    tid: int
    ts: float
    dur: float
    args: _Args


_Entry = _Slice | dict[str, Any]


class _Lanes:
    """Slots of one engine: the lowest free number is given out."""

    def __init__(self) -> None:
        self._free: list[int] = []
        self.used = 0

    def take(self) -> int:
        if self._free:
            return heapq.heappop(self._free)
        self.used += 1
        return self.used

    def give(self, lane: int) -> None:
        heapq.heappush(self._free, lane)


class Trace:
    """Turns events, in their order, into trace entries."""

    def __init__(self) -> None:
        self._engines: dict[str, int] = {}
        self._lanes: dict[str, _Lanes] = {}
        self._open: dict[str, _Event] = {}
        self._lane: dict[str, int] = {}
        """Of each rollout that is open."""
        self._begun: dict[str, _Event] = {}
        self._ready: set[int] = set()
        self._count_at = 0.0
        self._counts = {"running": 0, "ready": 0}
        """What the counters showed last."""
        self._last = 0.0

    def entries(self, events: Iterable[_Event]) -> Iterator[_Entry]:
        """All entries of the trace, names of processes and threads last."""
        for event in events:
            if event.t >= self._count_at:
                self._count_at = event.t + _COUNT_EVERY_S
                yield from self._counters()
            self._last = event.t
            yield from self._entry(event)
        for rollout in list(self._open):
            yield self._slice(rollout, self._last, None, "open")
        yield from self._counters()
        yield from self._names()

    def _entry(self, event: _Event) -> Sequence[_Entry]:
        match event.kind:
            case "start":
                return self._start(event)
            case "stop" if event.rollout in self._open:
                return (self._slice(event.rollout, event.t, event.tokens, event.reason),)
            case "ready" if event.group is not None:
                self._ready.add(event.group)
            case "close":
                self._ready.difference_update(event.groups or ())
                return (_mark(event, f"close {len(event.groups or ())} groups"),)
            case "drop" if event.rollout is None and event.group is not None:
                self._ready.discard(event.group)
            case "train_begin" | "publish_begin":
                self._begun[event.kind.removesuffix("_begin")] = event
            case "train_end" | "publish_end":
                return self._span(event)
            case "eval" | "error":
                return (_mark(event, f"{event.kind} {event.reason or ''}".strip()),)
        return ()

    def _start(self, event: _Event) -> Sequence[_Entry]:
        assert event.rollout is not None
        assert event.engine is not None
        killed = event.rollout in self._open  # its engine, and the run was resumed
        before = (self._slice(event.rollout, event.t, None, "lost"),) if killed else ()
        if event.engine not in self._engines:
            self._engines[event.engine] = len(self._engines) + _RUN + 1
            self._lanes[event.engine] = _Lanes()
        self._open[event.rollout] = event
        self._lane[event.rollout] = self._lanes[event.engine].take()
        return before

    def _slice(self, rollout: str | None, end: float, tokens: int | None, reason: str | None) -> _Slice:
        assert rollout is not None
        start, lane = self._open.pop(rollout), self._lane.pop(rollout)
        assert start.engine is not None
        self._lanes[start.engine].give(lane)
        args = _Args(group=start.group, version=start.version, tokens_before=start.tokens, tokens=tokens, reason=reason)
        if tokens and start.tokens is not None:
            args.made = tokens - start.tokens
        return _complete(rollout, self._engines[start.engine], lane, start.t, end, args)

    def _span(self, event: _Event) -> Sequence[_Slice]:
        kind = event.kind.removesuffix("_end")
        begun = self._begun.pop(kind, None)
        if begun is None:
            return ()
        lane = _TRAIN if kind == "train" else _PUBLISH
        label = f"step {begun.step}" if kind == "train" else f"publish {begun.version}"
        return (_complete(label, _RUN, lane, begun.t, event.t, _Args(step=begun.step, version=begun.version)),)

    def _counters(self) -> Iterator[_Entry]:
        """The counters that show something new, once all events of the last one's time are in; looked at once a
        millisecond at most."""
        for name, unit, count in (("running", "rollouts", len(self._open)), ("ready", "groups", len(self._ready))):
            if self._counts[name] != count:
                self._counts[name] = count
                yield {"ph": "C", "pid": _RUN, "name": name, "ts": self._last * 1e6, "args": {unit: count}}

    def _names(self) -> Iterator[dict[str, Any]]:
        yield _name("process_name", _RUN, 0, "run")
        for lane, label in ((_TRAIN, "trainer"), (_PUBLISH, "weights"), (_MARKS, "marks")):
            yield _name("thread_name", _RUN, lane, label)
        for engine, pid in self._engines.items():
            yield _name("process_name", pid, 0, engine)
            for lane in range(1, self._lanes[engine].used + 1):
                yield _name("thread_name", pid, lane, f"slot {lane}")


def _complete(name: str, pid: int, tid: int, start: float, end: float, args: _Args) -> _Slice:
    duration = round((end - start) * 1e9) / 1e3
    return _Slice(name=name, pid=pid, tid=tid, ts=start * 1e6, dur=duration, args=args)


def _mark(event: _Event, label: str) -> dict[str, Any]:
    return {"ph": "i", "s": "p", "name": label, "pid": _RUN, "tid": _MARKS, "ts": event.t * 1e6}


def _name(kind: str, pid: int, tid: int, label: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, "tid": tid, "args": {"name": label}}


def write_trace(events: Path, target: Path) -> None:
    """Writes the trace of an `events.jsonl` to `target`, whole or not at all."""
    skipped = max(0, events.stat().st_size - MAX_BYTES)
    partial = target.with_name(f".{target.name}.{os.getpid()}")
    with partial.open("wb") as file:
        file.write(b'{"displayTimeUnit":"ms","otherData":' + to_json({"skipped_bytes_of_events": skipped}))
        file.write(b',"traceEvents":[\n')
        separator = b""
        for entry in Trace().entries(_read(events, skipped)):
            file.write(separator + to_json(entry))
            separator = b",\n"
        file.write(b"\n]}\n")
    partial.replace(target)


def _read(path: Path, skip: int) -> Iterator[_Event]:
    """The events behind the first `skip` bytes. A cut last line, as `kill -9` may leave one, is passed over."""
    decoder = msgspec.json.Decoder(_Event)
    with path.open("rb") as file:
        if skip:
            file.seek(skip)
            file.readline()
        while lines := file.readlines(_READ_BYTES):
            if not lines[-1].endswith(b"\n"):
                lines.pop()
            shown = [line for line in lines if _SHOWN(line)]
            if lines and lines[-1] not in shown[-1:]:  # where the run ends, what is open ends
                shown.append(lines[-1])
            yield from decoder.decode_lines(b"".join(shown))
