"""What a person sees while a run runs: a live screen on a terminal, one short line a step elsewhere.

Both are recorders fed by the same calls as the run folder. Promises: never more than twelve values a step; nothing is
drawn more often than twice a second, and drawing never blocks on the terminal's answer.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from typing import IO, Any, Literal

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from gruppetto.clock import monotonic
from gruppetto.record.base import NullRecorder, Recorder
from gruppetto.record.progress import Progress

SHOWN = {
    "reward": "reward/mean",
    "len": "rollout/tokens/mean",
    "p95": "rollout/tokens/p95",
    "staleness": "staleness/max",
    "parked": "rollout/parked",
    "dropped": "dropped/*",
    "loss": "loss/policy",
    "mismatch_kl": "mismatch_kl/mean",
    "eval": "eval/reward/mean",
    "step_s": "time/step_s",
}
"""Short name on a line: metric (`dropped/*`: the sum over the reasons). The allow-list of both screens."""

_REDRAW_S = 0.5
_BARS = " ▁▂▃▄▅▆▇█"
_TAIL = 0.95


def build_screen(
    mode: Literal["auto", "live", "lines", "none"], *, run: str, steps: int, group_size: int, slots: Mapping[str, int]
) -> Recorder:
    """The screen that `log.screen` asks for; `auto` is live on a terminal outside CI, and lines elsewhere."""
    console = Console()
    if mode == "none":
        return NullRecorder()
    if mode == "live" or (mode == "auto" and console.is_terminal and "CI" not in os.environ):
        return LiveScreen(run=run, steps=steps, group_size=group_size, slots=slots, console=console)
    return LineScreen(steps=steps, file=console.file)


def short(value: float) -> str:
    """A number in at most eight characters: whole ones as such, others to three digits."""
    whole = math.isfinite(value) and abs(value) < 1e7 and value == int(value)
    return f"{value:.0f}" if whole else f"{value:.3g}"


def step_values(metrics: Mapping[str, Any]) -> list[tuple[str, str]]:
    """(short name, text) of the metrics that are shown and that this step has."""
    dropped = [value for key, value in metrics.items() if key.startswith("dropped/") and key.count("/") == 1]
    values = {**metrics, "dropped/*": sum(dropped) if dropped else None}
    return [(name, short(value)) for name, key in SHOWN.items() if (value := values.get(key)) is not None]


def steps_done(step: int, metrics: Mapping[str, Any]) -> int:
    """Steps that are done once `step` is: the weights version after it, where that is recorded."""
    return int(metrics.get("version", step))


class LineScreen(Recorder):
    """One `key=value` line a step, and one for each error and notice."""

    def __init__(self, *, steps: int, file: IO[str]) -> None:
        self._steps = steps
        self._file = file

    def event(self, kind: str, t: float, **fields: Any) -> None:
        if kind in ("error", "notice"):
            self._print(f"{kind} t={t:.1f} {fields.get('reason', '')}")

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self._print(
            " ".join(
                [f"step={steps_done(step, metrics)}/{self._steps}", *(f"{k}={v}" for k, v in step_values(metrics))]
            )
        )

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        return None

    def close(self) -> None:
        return None

    def _print(self, line: str) -> None:
        print(line, file=self._file, flush=True)


class LiveScreen(Recorder):
    """A screen that stays in place: run, stages, engines, lengths with their tail, the last steps."""

    def __init__(
        self, *, run: str, steps: int, group_size: int, slots: Mapping[str, int], console: Console | None = None
    ) -> None:
        self.progress = Progress(steps=steps, group_size=group_size, slots=slots)
        self._run = run
        self._live = Live(console=console, auto_refresh=False, transient=False)
        self._drawn_at = float("-inf")
        self._live.start()

    def event(self, kind: str, t: float, **fields: Any) -> None:
        if kind in ("error", "notice"):
            self._live.console.print(f"{kind} t={t:.1f} {fields.get('reason', '')}", markup=False)
        self.progress.event(kind, fields)
        self._draw()

    def step(self, step: int, metrics: Mapping[str, Any]) -> None:
        self.progress.metrics_of(steps_done(step, metrics), metrics)
        self._draw()

    def rollouts(self, step: int, rows: Iterable[Mapping[str, Any]]) -> None:
        return None

    def close(self) -> None:
        if self._live.is_started:
            self._draw(at_once=True)
            self._live.stop()

    def _draw(self, at_once: bool = False) -> None:
        moment = monotonic()
        if at_once or moment - self._drawn_at >= _REDRAW_S:
            self._drawn_at = moment
            self._live.update(render(self._run, self.progress), refresh=True)


def render(run: str, progress: Progress) -> RenderableType:
    """The screen for the state of a run."""
    eta = progress.eta_s
    head = f"step {progress.step}/{progress.steps} · weights v{progress.version}"
    title = f"[bold]{run}[/] · {head}" + (f" · {_duration(eta)} left" if eta is not None else "")
    parts: list[RenderableType] = [_stages(progress), _engines(progress)]
    if progress.lengths:
        parts.append(_lengths(list(progress.lengths)))
    if progress.metrics:
        parts.extend([_curves(progress), _last_step(progress.metrics[-1])])
    if progress.last_error:
        parts.append(Text(f"error: {progress.last_error}", style="red"))
    return Panel(Group(*parts), title=title, title_align="left", border_style="dim")


def _stages(progress: Progress) -> Text:
    text = Text()
    for stage, count in progress.counts.items():
        text.append(f" {count} ", style="bold" if count else "dim")
        text.append(stage, style="" if count else "dim")
        text.append("  ›" if stage != "training" else "")
    if progress.dropped:
        text.append(f"   {progress.dropped} dropped", style="yellow")
    return text


def _engines(progress: Progress) -> Table:
    table = Table.grid(padding=(0, 1))
    for engine, slots in progress.slots.items():
        used = min(progress.used.get(engine, 0), slots)
        filled = round(24 * used / slots)
        table.add_row(f" {engine}", Text("█" * filled + "░" * (24 - filled), style="cyan"), f"{used}/{slots} slots")
    return table


def _lengths(lengths: Sequence[int]) -> Text:
    """A histogram of answer lengths; the bins of the slowest 5 % in another colour."""
    bins = 32
    longest = max(lengths)
    tail_from = sorted(lengths)[min(len(lengths) - 1, int(_TAIL * len(lengths)))]
    counts = [0] * bins
    for length in lengths:
        counts[min(bins - 1, bins * length // (longest + 1))] += 1
    text = Text(" tokens ")
    for index, bar in enumerate(bars(counts)):
        in_tail = (index + 1) * (longest + 1) > tail_from * bins
        text.append(bar, style="magenta" if in_tail else "green")
    text.append(f" max {longest} · ")
    text.append(f"tail (5 %) from {tail_from}", style="magenta")
    return text


def bars(values: Sequence[float]) -> str:
    """One block character for each value, the highest full, 0 empty and anything above 0 at least a line."""
    top = max(values, default=0) or 1
    return "".join(_BARS[max(1, round(8 * value / top)) if value > 0 else 0] for value in values)


def _curves(progress: Progress) -> Text:
    text = Text()
    for label, name in (("reward", "reward/mean"), ("loss", "loss/policy")):
        values = progress.series(name)
        if values:
            low = min(values)
            text.append(f" {label} ")
            text.append(bars([value - low for value in values[-30:]]), style="cyan")
            text.append(f" {short(values[-1])}  ")
    return text


def _last_step(metrics: Mapping[str, Any]) -> Text:
    return Text(" " + " ".join(f"{name}={text}" for name, text in step_values(metrics)), style="dim")


def _duration(seconds: float) -> str:
    minutes, rest = divmod(int(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes:02} min"
    return f"{minutes} min {rest:02} s" if minutes else f"{rest} s"
