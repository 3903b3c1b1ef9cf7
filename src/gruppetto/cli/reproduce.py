"""`gruppetto reproduce`: what the scheduler and the ledger make of published settings, beside what was published.

Without a name, or with names of its records, the scheduler's, simulated; after the word `ledger`, the ledger's.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING

from gruppetto.cli.output import check_json, write_json
from gruppetto.errors import UserError

if TYPE_CHECKING:
    from collections.abc import Callable
    from typing import Any

    from gruppetto.ledger.reproduce.study import Outcome, Row, Study

    Table = tuple[list[Study], list[str], Callable[[Sequence[Outcome]], dict[str, Any]]]
    """Records to reproduce, what to say of the others, and how to write them."""

LEGEND = """\
A row is within where ours lies in the band that the table of public numbers gives it. Inputs belong to a paper, never
to a row; one that was changed after a result was seen says which rows it was fitted to. A hit on a fitted row says that
the mechanism can make the number, not that it predicts it; one on an arithmetic row, that published figures agree."""
SPEED = {
    "scheduler": "Engine speed is a price list's, not a measurement.",
    "ledger": "Shares of peak come in sets, one a source; a row is predicted with its source's set and no other.",
}
LEDGER = "ledger"


def add_parser(subparsers: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "reproduce",
        help="predict published results: scheduling in simulation, costs by the ledger",
        description="Simulates the settings of published systems and prints ours beside the published figures; "
        "`reproduce ledger` computes published rates, seconds and sizes.",
        epilog="Examples: gruppetto reproduce april rollpacker --json table.json; gruppetto reproduce ledger sync",
    )
    parser.add_argument(
        "names",
        nargs="*",
        metavar="NAME",
        help="records to reproduce, by part of their name (all); `ledger` first: those of the ledger",
    )
    parser.add_argument("--json", metavar="FILE", help="write everything as JSON (- = standard output, and no table)")
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    from gruppetto.ledger.reproduce.study import carry_out

    check_json(args.json)
    if "" in (name.strip() for name in args.names):
        raise UserError("a name is empty, which every record would match; write part of one, or none for all")
    of_ledger = args.names[:1] == [LEDGER]
    names = args.names[1:] if of_ledger else args.names
    studies, elsewhere, as_json = _ledger(names) if of_ledger else _scheduler(names)
    quiet = args.json == "-"
    outcomes = []
    for study in studies:
        outcome = carry_out(study)
        outcomes.append(outcome)
        if not quiet:
            print("\n".join(_lines(outcome)), flush=True)
    if not quiet:
        print("\n".join(_summary_of_ledger(outcomes) if of_ledger else _summary(outcomes, "scheduler")))
        if not names:
            print("\n".join(["", *elsewhere]))
    if args.json:
        _write(as_json(outcomes), args.json)
    return 0


def _scheduler(names: Sequence[str]) -> Table:
    from gruppetto.sim.reproduce.catalogue import NOT_OURS, as_json, chosen

    elsewhere = [
        "Not for a scheduler to predict:",
        *(f"  {record}: {why}" for record, why in NOT_OURS.items()),
        "",
        "Rates, seconds and sizes that the ledger predicts: gruppetto reproduce ledger",
    ]
    return chosen(names), elsewhere, as_json


def _ledger(names: Sequence[str]) -> Table:
    from gruppetto.ledger.reproduce.catalogue import NOT_PREDICTED, SCHEDULERS, as_json, chosen

    elsewhere = [
        "Not for a ledger to predict:",
        *(f"  {record}: {why}" for record, why in NOT_PREDICTED.items()),
        "",
        f"The scheduler's {len(SCHEDULERS)} other records, simulated: gruppetto reproduce",
    ]
    return chosen(names), elsewhere, as_json


def _lines(outcome: Outcome) -> list[str]:
    """One record: rows, then inputs."""
    study = outcome.study
    width = max(len(verdict.row.name) for verdict in outcome.verdicts)
    lines = ["", f"{study.id}   {outcome.hits} of {len(outcome.verdicts)} within", f"  {study.setting}; {study.source}"]
    for verdict in outcome.verdicts:
        row, mark = verdict.row, "within" if verdict.within else "MISS"
        mark += " (fitted)" if row.fitted else " (arithmetic)" if row.arithmetic else ""
        reason = f"   {row.doubt}" if row.doubt and not verdict.within else ""
        band = f"{_shown(row.low)} to {_shown(row.high)}"
        lines.append(
            f"  {row.name:<{width}}  ours {_shown(verdict.value):>7}  published {_published(row):>10}"
            f"  band {band:<16} {mark}{reason}"
        )
    return [*lines, f"  {study.says}", *_inputs(study)]


def _inputs(study: Study) -> list[str]:
    return [
        f"    {i.name} = {i.value} ({i.source})" + (f" FITTED to {i.fitted}" if i.fitted else "") for i in study.inputs
    ]


def _summary(outcomes: Sequence[Outcome], whose: str) -> list[str]:
    from gruppetto.ledger.reproduce.counting import forecasts, mean_share, share_within

    rows = sum(len(outcome.verdicts) for outcome in outcomes)
    fitted = sum(verdict.row.fitted for outcome in outcomes for verdict in outcome.verdicts)
    whole = sum(outcome.within for outcome in outcomes)
    return [
        "",
        f"{share_within(outcomes):.0%} of {rows} rows within, {share_within(outcomes, predicted=True):.0%} of the "
        f"{rows - fitted} that no input was fitted to",
        *_of_forecasts(share_within(outcomes, forecast=True), len(forecasts(outcomes)), rows - fitted),
        f"{whole} of {len(outcomes)} records whole, {mean_share(outcomes):.0%} of a record's rows on average",
        LEGEND,
        SPEED[whose],
    ]


def _of_forecasts(share: float, count: int, unfitted: int) -> list[str]:
    """The share over rows that are forecasts, where that is another one."""
    if count == unfitted:
        return []
    return [f"{share:.0%} of the {count} that are forecasts: neither fitted nor arithmetic over published figures"]


def _summary_of_ledger(outcomes: Sequence[Outcome]) -> list[str]:
    """The same, and what is beyond the table of public numbers apart."""
    from gruppetto.ledger.reproduce.catalogue import apart
    from gruppetto.ledger.reproduce.counting import share_within

    records, others = apart(outcomes)
    rows = sum(len(outcome.verdicts) for outcome in others)
    lines = [
        "",
        f"Beyond the table of public numbers: {share_within(others):.0%} of {rows} rows within, none of them fitted",
    ]
    return (_summary(records, LEDGER) if records else []) + (lines if others else [])


def _published(row: Row) -> str:
    return row.said if row.published is None else _shown(row.published)


def _shown(value: float) -> str:
    """Three digits, or as many as a whole number has."""
    if abs(value) == float("inf"):
        return "any"
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def _write(table: dict[str, object], target: str) -> None:
    import json

    write_json(json.dumps(table, indent=2) + "\n", target)
