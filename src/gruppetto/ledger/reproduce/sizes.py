"""Sizes that follow from a recipe: sequences and token ceilings of a batch, sandboxes, cores, GPU-hours.

Owns four records.
"""

from __future__ import annotations

from collections.abc import Mapping

from gruppetto.ledger.environment import Environment
from gruppetto.ledger.generation import Rollouts
from gruppetto.ledger.lengths import LognormalLengths
from gruppetto.ledger.reproduce.study import Input, Study, counts, exact, relative


def _batch(groups: int, group_size: int, cap: int) -> Rollouts:
    return Rollouts(groups=groups, group_size=group_size, lengths=LognormalLengths.from_median(cap / 4, 1.0, 0.5, cap))


def _ceiling(batch: Rollouts) -> float:
    """Response tokens if all were as long as allowed."""
    return float(batch.count * batch.lengths.cap)


def _dapo() -> Mapping[str, float]:
    batch = _batch(512, 16, 20_480)
    return {
        "sequences a step": float(batch.count),
        "tokens of a step at most": _ceiling(batch),
        "updates a step": batch.count / 512,
    }


DAPO = Study(
    id="recipe-dapo",
    source="DAPO, arXiv:2503.14476, section 4.1",
    setting="512 prompts x 16, at most 16,384 + 4,096 tokens, mini-batches of 512",
    inputs=(Input("sizes", "as published", "the paper"),),
    predict=_dapo,
    tolerance="exact",
    rows=(
        counts(exact("sequences a step", 8192)),
        counts(exact("tokens of a step at most", 167_772_160)),
        counts(exact("updates a step", 16)),
    ),
    says="Arithmetic.",
)


def _math() -> Mapping[str, float]:
    batch = _batch(1024 // 64, 64, 1024)
    return {"tokens of a batch at most": _ceiling(batch), "updates a batch": batch.count / 1024}


MATH = Study(
    id="recipe-deepseekmath",
    source="DeepSeekMath, arXiv:2402.03300, section 4.2",
    setting="64 answers a question, at most 1,024 tokens, batches of 1,024",
    inputs=(Input("a batch of 1,024", "sequences", "the paper does not say whether questions; the record takes this"),),
    predict=_math,
    tolerance="exact",
    rows=(counts(exact("tokens of a batch at most", 1_048_576)), counts(exact("updates a batch", 1))),
    says="Arithmetic.",
)

DEEPSWE_GPUS, DEEPSWE_DAYS = 64, 6


def _deepswe() -> Mapping[str, float]:
    batch = Environment(tasks=64, group_size=8, turns=1, execution_s=20 * 60)
    return {
        "containers at a time": batch.live(batch.rollout_s().value).value,
        "GPU-hours": float(DEEPSWE_GPUS * DEEPSWE_DAYS * 24),
    }


DEEPSWE = Study(
    id="deepswe-sandbox",
    source="DeepSWE, Together AI blog (from a chapter that cites it)",
    setting="Qwen3-32B, 64 H100, 6 days, 64 x 8 rollouts at a time",
    inputs=(Input("containers", "one a rollout, all rollouts of a batch at once", "the blog: 512 (64 x 8)"),),
    predict=_deepswe,
    tolerance="none is given: exact for counts, +-10 % for hours",
    rows=(counts(exact("containers at a time", 512)), counts(relative("GPU-hours", 9180, 0.10))),
    says="Arithmetic. Not compared: cores and disks of its nodes, which are bought and not computed; tokens, turns and "
    "seconds of its rollouts are not published.",
)


def _gym() -> Mapping[str, float]:
    batch = Environment(tasks=16, group_size=32, turns=1, execution_s=20 * 60, cores=1.0)
    instances = batch.live(batch.rollout_s().value).value
    return {"cores": instances * batch.cores, "nodes at 32 a node": instances / 32}


GYM = Study(
    id="nemo-gym-swe",
    source="NeMo Gym, engineering note on a SWE case study",
    setting="512 instances of one core on 16 nodes",
    inputs=(Input("instances", "16 x 32 rollouts, each with its own, of one core", "the note"),),
    predict=_gym,
    tolerance="none is given: exact",
    rows=(counts(exact("cores", 512)), counts(exact("nodes at 32 a node", 16))),
    says="Arithmetic. Not compared: its step of 20 minutes, of which turns and tool seconds are not published.",
)

STUDIES = (DAPO, MATH, DEEPSWE, GYM)
