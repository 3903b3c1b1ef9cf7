"""All studies, the records that no scheduler can predict, and the count.

Owns which records belong where. Promise: every record of the table of public numbers is either a study here or in
`NOT_OURS` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.errors import UserError
from gruppetto.sim.reproduce import agents, april, areal, drafts, flows, nemo, rollpacker, seer, traces, verl
from gruppetto.sim.reproduce.study import Outcome, Study, Verdict

STUDIES: tuple[Study, ...] = (
    *seer.STUDIES,
    *rollpacker.STUDIES,
    *april.STUDIES,
    *verl.STUDIES,
    *nemo.STUDIES,
    *areal.STUDIES,
    *flows.STUDIES,
    *drafts.STUDIES,
    *agents.STUDIES,
    *traces.STUDIES,
)

_LEDGER = "FLOPs, bytes and memory: the ledger's"
_TRANSPORT = "weight transport or memory swap: no decision of a scheduler is in it"
_QUALITY = "a learning outcome: nothing learns in a simulation"
_SYSTEMS = "whole systems on other hardware or parallelism compared; what scheduling adds is not told apart"

NOT_OURS: Mapping[str, str] = {
    "verl-dynamic-switch": "GPUs lent between trainer and engines: our engines do not change sides",
    "verl-dsv3-96": _LEDGER,
    "nemo-swe": "tool and sandbox times of the run are not published, and its two figures contradict each other",
    "areal-staleness-quality": _QUALITY,
    "areal-verl-table": _SYSTEMS + "; its hours are unverified",
    "das": "accept lengths by problem class are not published",
    "llamarl-405b": _SYSTEMS,
    "r1-zero": _LEDGER,
    "rollart-step-breakdown": "environment resets that fail: the simulated environment has no resets",
    "rollart-production": "a range over many jobs, not a run",
    "sync-delta": _TRANSPORT,
    "sync-nccl-buckets": _TRANSPORT,
    "sync-meituan-ce": _TRANSPORT,
    "sync-nemo": _TRANSPORT,
    "vllm-sleep": _TRANSPORT,
    "offload-slime": _LEDGER,
    "train-mfu-prime": _LEDGER,
    "train-skyrl-7b": _LEDGER,
    "decode-trtllm-8b": "engine speed: the price list is fitted to it",
    "decode-single-stream": "engine speed: the price list is fitted to it",
    "deepswe-sandbox": "sizes of a sandbox cluster",
    "nemo-gym-swe": "sizes of a sandbox cluster",
    "hybridflow": _LEDGER,
    "a3po-prox": "a forward pass that the trainer leaves out",
    "seed-q1": _LEDGER,
    "recipe-dapo": _LEDGER,
    "recipe-deepseekmath": _LEDGER,
}


def chosen(names: Sequence[str]) -> list[Study]:
    """The studies whose id contains one of `names`; all without any. Raises `UserError` where a name finds none."""
    for name in names:
        if not any(name in study.id for study in STUDIES):
            why = next((f"{record}: {NOT_OURS[record]}" for record in NOT_OURS if name in record), "no such record")
            ids = ", ".join(study.id for study in STUDIES)
            raise UserError(f"nothing to reproduce for {name!r} ({why}); write one of {ids}")
    return [study for study in STUDIES if not names or any(name in study.id for name in names)]


def share_within(outcomes: Sequence[Outcome], *, predicted: bool = False) -> float:
    """Rows within their bands over all rows; `predicted`: over those that no input was fitted to."""
    verdicts = [v for outcome in outcomes for v in outcome.verdicts if not (predicted and v.row.fitted)]
    return sum(v.within for v in verdicts) / len(verdicts) if verdicts else 0.0


def mean_share(outcomes: Sequence[Outcome]) -> float:
    """Mean over records of their share of rows within, so that no record with many rows outweighs the others."""
    return sum(o.hits / len(o.verdicts) for o in outcomes) / len(outcomes) if outcomes else 0.0


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `--json` writes."""
    return {
        "scheduler": {
            "share_within": share_within(outcomes),
            "predicted_share_within": share_within(outcomes, predicted=True),
            "mean_share_of_records": mean_share(outcomes),
            "rows": sum(len(outcome.verdicts) for outcome in outcomes),
            "rows_fitted": sum(v.row.fitted for outcome in outcomes for v in outcome.verdicts),
            "records_within": sum(outcome.within for outcome in outcomes),
            "records": [_record(outcome) for outcome in outcomes],
            "not_predicted": dict(NOT_OURS),
        }
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
        "likely_reason": None if verdict.within else row.doubt or None,
    }
