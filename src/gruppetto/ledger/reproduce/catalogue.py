"""All records that a ledger predicts, those that none can, and the count.

Promise: every record of the table of public numbers is a study here, the scheduler's (`gruppetto reproduce`), or in
`NOT_PREDICTED` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.ledger.reproduce import beyond, decode, memory, sizes, steps, syncs, training, verl
from gruppetto.ledger.reproduce.counting import counted, pick
from gruppetto.ledger.reproduce.study import Outcome, Study

STUDIES: tuple[Study, ...] = (
    *decode.STUDIES,
    *training.STUDIES,
    *steps.STUDIES,
    *verl.STUDIES,
    *syncs.STUDIES,
    *memory.STUDIES,
    *sizes.STUDIES,
)

SCHEDULERS: tuple[str, ...] = (
    "seer-moonlight",
    "seer-qwen2vl72b",
    "seer-partial-rollout",
    "seer-group-sd-accept",
    "rollpacker-fig11",
    "rollpacker-preempt",
    "april-throughput",
    "verl-fa-require-batches",
    "nemo-30b-async",
    "areal-hours",
    "laminar-core",
    "tlt-sd",
    "streamrl",
    "thunderagent-skyrl",
    "heddle",
    "agent-env-trace",
    "polytrace-dapo32b",
    "polytrace-deepcoder14b",
    "polytrace-search-r1",
    "polytrace-interns1",
)
"""Records of who runs when, and of lengths and tools: predicted by simulation, without a name after the command."""

NOT_PREDICTED: Mapping[str, str] = {
    "nemo-swe": "turns, tool and sandbox seconds are not published, and its two figures contradict each other",
    "areal-staleness-quality": "a learning outcome",
    "areal-verl-table": "ratios from a survey and hours from memory; the compared system's settings are not published",
    "das": "accept lengths by class of problem are not published",
    "llamarl-405b": "lengths, batch and the baseline's engine are not published; its sync's seconds are unverified",
    "rollart-step-breakdown": "turns and observations are not published; and a failed reset adds 148 s: with the 55 s "
    "of a good one that is half of its rollout, not 78 %",
    "rollart-production": "a range over many jobs, not a run",
}


def chosen(names: Sequence[str]) -> list[Study]:
    """The studies whose id contains one of `names`, those beyond the table last; all without any.

    Raises `UserError` where a name finds none.
    """
    elsewhere = dict.fromkeys(SCHEDULERS, "the scheduler's (gruppetto reproduce, without ledger)")
    return pick((*STUDIES, *beyond.STUDIES), names, {**NOT_PREDICTED, **elsewhere})


def apart(outcomes: Sequence[Outcome]) -> tuple[list[Outcome], list[Outcome]]:
    """Records of the table, and what is beyond it."""
    others = [outcome for outcome in outcomes if outcome.study in beyond.STUDIES]
    return [outcome for outcome in outcomes if outcome not in others], others


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `--json` writes: shares are over the table's records; `beyond` counts the others."""
    records, others = apart(outcomes)
    return {"ledger": {**counted(records, NOT_PREDICTED), "beyond": counted(others, {})}}
