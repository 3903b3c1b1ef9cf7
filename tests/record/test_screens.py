"""What a person sees: stages that add up, one short line a step, a live screen that draws."""

import io
import os

import pytest
from rich.console import Console

from gruppetto.errors import UserError
from gruppetto.record.base import NullRecorder, Recorder
from gruppetto.record.fanout import Fanout
from gruppetto.record.progress import Progress
from gruppetto.record.screen import LineScreen, LiveScreen, bars, build_screen, render, short
from gruppetto.record.tensorboard import TensorBoardSink

METRICS = {
    "reward/mean": 0.41234,
    "rollout/tokens/mean": 34.0,
    "rollout/tokens/p95": 120,
    "staleness/max": 1,
    "rollout/parked": 12,
    "dropped/stale": 1,
    "dropped/failed": 2,
    "dropped/stale/tokens": 500,
    "loss/policy": 0.00123,
    "mismatch_kl/mean": 2.1e-7,
    "time/step_s": 0.5,
    "optim/lr": 1e-6,
}


def test_a_line_is_short_and_from_the_allow_list():
    out = io.StringIO()
    screen = LineScreen(steps=60, file=out)
    screen.event("start", 1.0, rollout="a")
    screen.step(12, METRICS)
    screen.step(12, {"version": 13, "reward/mean": float("nan"), "loss/policy": None})
    screen.event("error", 4.56, engine="e0", reason="engine e0: died")
    screen.close()
    assert out.getvalue().splitlines() == [
        "step=12/60 reward=0.412 len=34 p95=120 staleness=1 parked=12 dropped=3 loss=0.00123 mismatch_kl=2.1e-07 "
        "step_s=0.5",
        "step=13/60 reward=nan",
        "error t=4.6 engine e0: died",
    ]


def feed(progress: Progress, *events: tuple[str, dict]) -> dict[str, int]:
    for kind, fields in events:
        progress.event(kind, fields)
    return {stage: count for stage, count in progress.counts.items() if count}


def test_every_rollout_is_in_one_stage_through_a_step():
    p = Progress(steps=2, group_size=2, slots={"e0": 2})
    assert feed(p, ("launch", {"group": 1}), ("launch", {"group": 2})) == {"queued": 4}
    begin = [("start", {"rollout": f"g1.{i}", "engine": "e0", "group": 1}) for i in range(2)]
    assert feed(p, *begin) == {"queued": 2, "running": 2}
    assert p.used == {"e0": 2}
    ended = {"rollout": "g1.0", "group": 1, "tokens": 5, "reason": "stop"}
    assert feed(p, ("stop", ended), ("finish", ended)) == {"queued": 2, "running": 1, "finished": 1}
    parked = {"rollout": "g1.1", "group": 1, "tokens": 3, "reason": "abort"}
    assert feed(p, ("stop", parked), ("park", parked)) == {"queued": 2, "parked": 1, "finished": 1}
    again = {"rollout": "g1.1", "engine": "e0", "group": 1}
    limit = {"rollout": "g1.1", "group": 1, "tokens": 9, "reason": "limit"}
    assert feed(p, ("start", again), ("stop", limit), ("finish", limit)) == {"queued": 2, "finished": 2}
    assert feed(p, ("ready", {"group": 1}), ("drop", {"group": 2})) == {"ready": 2}
    assert p.dropped == 2
    assert feed(p, ("close", {"groups": [1]}), ("train_begin", {"step": 1})) == {"training": 2}
    assert feed(p, ("train_end", {"step": 1}), ("publish_end", {"version": 1})) == {}
    assert (p.version, p.used, list(p.lengths)) == (1, {"e0": 0}, [5, 9])


def test_a_run_resumed_in_the_middle_never_counts_below_zero():
    p = Progress(steps=2, group_size=4, slots={"e0": 2})
    again = {"rollout": "g7.3", "engine": "e0", "group": 7}
    ended = {"rollout": "g7.3", "group": 7, "tokens": 9, "reason": "stop"}
    assert feed(p, ("start", again), ("stop", ended), ("finish", ended)) == {"queued": 3, "finished": 1}
    assert feed(p, ("ready", {"group": 7})) == {"ready": 4}
    assert feed(p, ("close", {"groups": [7, 8]})) == {"training": 8}
    assert feed(p, ("train_end", {"step": 1})) == {}


def test_a_dropped_group_frees_the_slots_of_its_members():
    p = Progress(steps=2, group_size=2, slots={"e0": 2})
    feed(p, ("launch", {"group": 1}), ("start", {"rollout": "g1.0", "engine": "e0", "group": 1}))
    assert feed(p, ("drop", {"group": 1, "reason": "stale"})) == {}
    assert p.used == {"e0": 0}


def test_the_time_left_comes_from_the_recent_steps():
    p = Progress(steps=30, group_size=2, slots={})
    assert p.eta_s is None
    for step in range(1, 21):
        p.metrics_of(step, {"time/step_s": 9.0 if step <= 10 else 2.0})
    assert p.eta_s == 20.0


def drawn(screen_of) -> str:
    console = Console(file=io.StringIO(), force_terminal=True, width=100, color_system=None)
    console.print(screen_of)
    return console.file.getvalue()


def test_the_live_screen_shows_stages_engines_tail_and_steps():
    p = Progress(steps=60, group_size=2, slots={"e0": 64, "e1": 64}, step=12, version=12)
    feed(p, ("launch", {"group": 1}), ("start", {"rollout": "g1.0", "engine": "e0", "group": 1}))
    p.lengths.extend([10] * 95 + [200] * 5)
    p.metrics_of(12, METRICS)
    text = drawn(render("first", p))
    assert "first · step 12/60 · weights v12 · 24 s left" in text
    assert "1 queued  › 0 parked  › 1 running" in text
    assert "1/64 slots" in text
    assert "max 200 · tail (5 %) from 200" in text
    assert "reward=0.412" in text


def test_the_live_screen_draws_at_most_twice_a_second(monkeypatch):
    moments = [0.0]
    monkeypatch.setattr("gruppetto.record.screen.monotonic", lambda: moments[0])
    out = io.StringIO()
    screen = LiveScreen(
        run="a", steps=1, group_size=1, slots={"e": 1}, console=Console(file=out, force_terminal=True, width=80)
    )
    sizes = set()
    for group in range(50):
        screen.event("launch", 0.0, group=group)
        sizes.add(len(out.getvalue()))
    assert len(sizes) == 1
    moments[0] = 0.6
    screen.event("launch", 0.0, group=99)
    assert len(out.getvalue()) > max(sizes)
    screen.close()
    screen.close()
    assert "51 queued" in out.getvalue().replace("\x1b[1m", "").replace("\x1b[0m", "")


def test_the_screen_that_was_asked_for(monkeypatch):
    monkeypatch.setitem(os.environ, "TERM", "dumb")
    wanted = {"run": "a", "steps": 1, "group_size": 1, "slots": {"e": 1}}
    assert isinstance(build_screen("auto", **wanted), LineScreen)
    assert isinstance(build_screen("lines", **wanted), LineScreen)
    assert isinstance(build_screen("none", **wanted), NullRecorder)
    live = build_screen("live", **wanted)
    live.close()
    assert isinstance(live, LiveScreen)


def test_bars_and_short_numbers():
    assert bars([0, 0.01, 4, 8]) == " ▁▄█"
    assert bars([0, 0]) == "  "
    assert [short(x) for x in (3, 3.0, 0.123456, 1e9, float("inf"), -2.5e-9)] == [
        "3",
        "3",
        "0.123",
        "1e+09",
        "inf",
        "-2.5e-09",
    ]


class Heard(NullRecorder):
    def __init__(self, fails: bool = False) -> None:
        self.heard: list[object] = []
        self.fails = fails

    def rollouts(self, step, rows):
        self.heard.append(list(rows))

    def close(self):
        self.heard.append("close")
        if self.fails:
            raise RuntimeError("disk full")


def test_all_hear_the_same_and_all_are_closed():
    recorders = [Heard(fails=True), Heard()]
    fanout: Recorder = Fanout(recorders)
    fanout.rollouts(1, iter([{"a": 1}]))
    with pytest.raises(RuntimeError, match="disk full"):
        fanout.close()
    assert [r.heard for r in recorders] == [[[{"a": 1}], "close"]] * 2


def test_tensorboard_says_which_extra_it_needs(monkeypatch, tmp_path):
    monkeypatch.setitem(__import__("sys").modules, "tensorboardX", None)
    with pytest.raises(UserError) as caught:
        TensorBoardSink(tmp_path)
    assert str(caught.value) == (
        'log.sinks = ["tensorboard"] needs tensorboardX, which is not installed; '
        'run: pip install "gruppetto[tensorboard]"'
    )


def test_tensorboard_writes_what_is_finite(tmp_path):
    pytest.importorskip("tensorboardX", reason="needs the extra tensorboard")
    sink = TensorBoardSink(tmp_path)
    sink.step(1, {**METRICS, "loss/kl": float("nan"), "name": "x"})
    sink.close()
    (file,) = tmp_path.iterdir()
    content = file.read_bytes()
    assert b"reward/mean" in content
    assert b"loss/kl" not in content
