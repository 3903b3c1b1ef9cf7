"""How rows of reproductions are counted, and how they are written as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.errors import UserError
from gruppetto.ledger.reproduce.study import Outcome, Study, Verdict


def pick(studies: Sequence[Study], names: Sequence[str], elsewhere: Mapping[str, str]) -> list[Study]:
    """The studies whose id contains one of `names`; all without any.

    `elsewhere`: records that are none of these studies, with the reason. Raises `UserError` where a name finds none.
    """
    for name in names:
        if not any(name in study.id for study in studies):
            why = next((f"{record}: {elsewhere[record]}" for record in elsewhere if name in record), "no such record")
            ids = ", ".join(study.id for study in studies)
            raise UserError(f"nothing to reproduce for {name!r} ({why}); write one of {ids}")
    return [study for study in studies if not names or any(name in study.id for name in names)]


def share_within(outcomes: Sequence[Outcome], *, predicted: bool = False, forecast: bool = False) -> float:
    """Rows within their bands over all rows; `predicted`: over those that no input was fitted to; `forecast`: over
    those of them that are no mere arithmetic over published figures."""
    verdicts = [v for outcome in outcomes for v in outcome.verdicts if not (predicted and v.row.fitted)]
    if forecast:
        verdicts = forecasts(outcomes)
    return sum(v.within for v in verdicts) / len(verdicts) if verdicts else 0.0


def forecasts(outcomes: Sequence[Outcome]) -> list[Verdict]:
    """The rows that are neither fitted nor arithmetic."""
    return [v for outcome in outcomes for v in outcome.verdicts if not (v.row.fitted or v.row.arithmetic)]


def mean_share(outcomes: Sequence[Outcome]) -> float:
    """Mean over records of their share of rows within, so that no record with many rows outweighs the others."""
    return sum(o.hits / len(o.verdicts) for o in outcomes) / len(outcomes) if outcomes else 0.0


def counted(outcomes: Sequence[Outcome], not_predicted: Mapping[str, str]) -> dict[str, Any]:
    """All outcomes and their counts as plain data. `not_predicted`: records that are none of them, with the reason."""
    return {
        "share_within": share_within(outcomes),
        "predicted_share_within": share_within(outcomes, predicted=True),
        "forecast_share_within": share_within(outcomes, forecast=True),
        "mean_share_of_records": mean_share(outcomes),
        "rows": sum(len(outcome.verdicts) for outcome in outcomes),
        "rows_fitted": sum(v.row.fitted for outcome in outcomes for v in outcome.verdicts),
        "rows_arithmetic": sum(v.row.arithmetic for outcome in outcomes for v in outcome.verdicts),
        "rows_forecast": len(forecasts(outcomes)),
        "records_within": sum(outcome.within for outcome in outcomes),
        "records": [_record(outcome) for outcome in outcomes],
        "not_predicted": dict(not_predicted),
    }


def _record(outcome: Outcome) -> dict[str, Any]:
    study = outcome.study
    return {
        "id": study.id,
        "source": study.source,
        "setting": study.setting,
        "within": outcome.within,
        "hits": outcome.hits,
        "tolerance": study.tolerance,
        "says": study.says,
        "inputs": [
            {"name": i.name, "value": i.value, "source": i.source, "fitted": i.fitted or None} for i in study.inputs
        ],
        "rows": [_row(verdict) for verdict in outcome.verdicts],
    }


def _row(verdict: Verdict) -> dict[str, Any]:
    row = verdict.row
    finite = {
        name: value if abs(value) != float("inf") else None for name, value in (("low", row.low), ("high", row.high))
    }
    return {
        "name": row.name,
        "published": row.published,
        "said": row.said or None,
        "ours": verdict.value,
        **finite,
        "within": verdict.within,
        "fitted": row.fitted,
        "arithmetic": row.arithmetic,
        "likely_reason": None if verdict.within else row.doubt or None,
    }
