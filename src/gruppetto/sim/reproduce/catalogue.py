"""All studies, the records that no scheduler can predict, and the count.

Owns which records belong where. Promise: every record of the table of public numbers is either a study here or in
`NOT_OURS` with the reason.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from gruppetto.ledger.reproduce.counting import counted, pick
from gruppetto.ledger.reproduce.study import Outcome, Study
from gruppetto.sim.reproduce import agents, april, areal, drafts, flows, nemo, rollpacker, seer, traces, verl

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

_LEDGER = "FLOPs, bytes and seconds of a stage: the ledger's (gruppetto reproduce ledger)"
_TRANSPORT = "weight transport or memory swap, the ledger's (gruppetto reproduce ledger)"
_SPEED = "engine speed, to which the price list is fitted: the ledger's (gruppetto reproduce ledger)"
_SANDBOX = "sizes of a sandbox cluster, the ledger's (gruppetto reproduce ledger)"
_QUALITY = "a learning outcome: nothing learns in a simulation"
_SYSTEMS = "whole systems on other hardware or parallelism compared; what scheduling adds is not told apart"

NOT_OURS: Mapping[str, str] = {
    "verl-dynamic-switch": "GPUs lent to the other side, as our engines never are: the ledger's "
    "(gruppetto reproduce ledger)",
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
    "decode-trtllm-8b": _SPEED,
    "decode-single-stream": _SPEED,
    "deepswe-sandbox": _SANDBOX,
    "nemo-gym-swe": _SANDBOX,
    "hybridflow": _LEDGER,
    "a3po-prox": "a forward pass that the trainer leaves out: the ledger's (gruppetto reproduce ledger)",
    "seed-q1": _LEDGER,
    "recipe-dapo": _LEDGER,
    "recipe-deepseekmath": _LEDGER,
}


def chosen(names: Sequence[str]) -> list[Study]:
    """The studies whose id contains one of `names`; all without any. Raises `UserError` where a name finds none."""
    return pick(STUDIES, names, NOT_OURS)


def as_json(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """What `--json` writes."""
    return {"scheduler": counted(outcomes, NOT_OURS)}
