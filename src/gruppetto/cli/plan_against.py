"""`gruppetto plan --against RUN`: the forecast of a run beside what it took, and which assumption was off."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from gruppetto.cli.plan_against_run import RunRead, read_against
from gruppetto.cli.plan_numbers import USUAL_GPU
from gruppetto.errors import UserError
from gruppetto.ledger.reconcile.as_json import as_json
from gruppetto.ledger.reconcile.compare import Reconciled, reconcile, rows_of
from gruppetto.ledger.units import show_seconds, show_share

if TYPE_CHECKING:
    from rich.table import Table

WIDTH = 150
STEPS_SHOWN = 12
"""Single steps in the table; of longer runs the first and the last half of so many."""
BUSY = 0.8
"""CPU seconds a second of the wall below which a run on processors did not have a core of its own."""
_INSIDE = ("decode", "prefill", "score", "waiting")


def against(args: argparse.Namespace) -> dict[str, Any]:
    """Compares, prints (unless JSON goes to standard output), and returns the data of `--json`."""
    from gruppetto.cli.plan_arguments import efficiency_asked, serve_layout
    from gruppetto.ledger.machines.gpus import gpu_of

    named = args.gpu or _recorded(Path(args.against))
    gpu, efficiency = gpu_of(named), efficiency_asked(args.efficiency, named)
    read = read_against(args.against, args.model, gpu, efficiency)
    layout = serve_layout(args.serve)
    peak = read.peak * (layout.gpus if layout else 1) if read.peak else None
    found = reconcile(read.run, read.assumed, peak=peak, train_mfu=read.train_mfu)
    if args.json != "-":
        _show(read, found, gpu.name)
    return {
        "against": {
            "run": str(read.path),
            "simulated": read.simulated,
            "gpu": gpu.name,
            "efficiency": efficiency.name,
            "assumed": list(read.words),
            "cores": read.cores,
            **as_json(found),
        }
    }


def _recorded(run: Path) -> str:
    """The machine that the run's record names. Raises `UserError` where a forecast of it needs to be told one: figures
    of a processor come from no data sheet, and those of an H100 say nothing about it."""
    from gruppetto.ledger.machines.gpus import gpu_of

    try:
        environment = json.loads((run / "env.json").read_text("utf-8"))
        device = json.loads((run / "config.resolved.json").read_text("utf-8"))["model"]["device"]
    except (OSError, ValueError, KeyError, TypeError):
        return USUAL_GPU  # no run folder, which is said when it is read
    if not isinstance(environment, dict) or not isinstance(environment.get("gpus") or [], list):
        raise UserError(
            f"{run}/env.json does not say on what it ran: no object with a list of gpus; it is written with the run, "
            "so reconcile the whole folder of one"
        )
    if environment.get("simulated"):
        return USUAL_GPU  # its prices are its own
    gpus, measure = environment.get("gpus") or [], "gruppetto doctor --profile --out profile.toml measures it, then"
    if device == "cpu" or not gpus:
        raise UserError(
            f"--against {run}: it ran on a CPU, which has no data sheet; {measure} write --gpu profile.toml"
        )
    try:
        gpu_of(str(gpus[0]))
    except UserError:
        raise UserError(
            f"--against {run}: it ran on {gpus[0]}, which has no data sheet here; {measure} write --gpu profile.toml"
        ) from None
    return str(gpus[0])


def _show(read: RunRead, found: Reconciled, gpu: str) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=WIDTH)
    for part in _parts(read, found, gpu):
        console.print(part, markup=False) if isinstance(part, str) else console.print(part)


def _parts(read: RunRead, found: Reconciled, gpu: str) -> Iterator[str | Table]:
    run = found.run
    where = "disaggregated" if run.apart else "colocated"
    kind = "simulated" if read.simulated else f"measured; the forecast is for {gpu}"
    yield f"{read.path}: {len(run.steps)} steps, {run.engines} engine{'s' * (run.engines > 1)}, {where}, {kind}"
    yield ""
    yield _stages(found)
    yield ""
    yield _steps(found)
    yield ""
    yield from _utilisation(found)
    yield ""
    off = (*found.off, *_busy(read))
    yield from ("What was off:", *(f"  {line}" for line in off)) if off else ("Nothing was off by much.",)
    yield ""
    yield from ("Assumed:", *(f"  {line}" for line in read.words))


def _busy(read: RunRead) -> Iterator[str]:
    """Something else had the machine, or nothing was to be computed."""
    if read.cores is not None and read.cores < BUSY:
        yield (
            f"machine: the process had {read.cores:.2g} CPU seconds a second, and a forecast is for a core of its own: "
            "it waited for others' work, or for other programs on this machine"
        )


def _table(*columns: str) -> Table:
    from rich.table import Table

    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    for number, column in enumerate(columns):
        table.add_column(column, justify="right" if number else "left", no_wrap=True)
    return table


def _stages(found: Reconciled) -> Table:
    table = _table("stage", "forecast", "measured", "ratio", "of the step")
    for name, forecast_s, measured_s, ratio, share in rows_of(found):
        if not forecast_s and not measured_s:
            continue
        shown = f"  {name}" if name in _INSIDE else name
        table.add_row(shown, show_seconds(forecast_s), show_seconds(measured_s), _ratio(ratio), show_share(share))
    return table


def _steps(found: Reconciled) -> Table:
    table = _table("step", "decode", "measured", "ratio", "train", "measured", "ratio", "whole", "measured", "ratio")
    pairs = list(zip(found.steps, found.run.steps, strict=True))
    half = STEPS_SHOWN // 2
    for number, (ours, real) in enumerate(pairs):
        if half <= number < len(pairs) - half:
            if number == half:
                table.add_row("…")
            continue
        cells = [str(ours.step)]
        for name in ("decode", "train", "step"):
            forecast_s, measured_s = ours.seconds[name], real.seconds[name]
            ratio = measured_s / forecast_s if forecast_s else None
            cells += [show_seconds(forecast_s), show_seconds(measured_s), _ratio(ratio)]
        table.add_row(*cells)
    return table


def _utilisation(found: Reconciled) -> Iterator[str | Table]:
    if found.mfu is None:
        yield "Where the machine-seconds went:"
    else:
        yield f"MFU of the whole step: {found.mfu:.2%}. Where the rest went, which sums to one:"
    table = _table("item", "share", "machine-seconds", "what it is")
    table.columns[-1].justify = "left"
    for loss in found.losses:
        if found.mfu is None and loss.name == "useful FLOP":
            continue
        table.add_row(loss.name, f"{loss.share:.2%}", show_seconds(loss.machine_s), loss.formula)
    table.add_row("sum", f"{sum(loss.share for loss in found.losses):.2%}")
    yield table


def _ratio(ratio: float | None) -> str:
    return "-" if ratio is None else f"{ratio:.2f} x"
