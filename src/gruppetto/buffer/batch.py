"""From closed groups to a batch: rollouts laid out flat, advantages per group, and why a token is not trained on.

Promises: a failed member is not in the batch and not in its group's statistics; every token keeps its id, logprob,
version and kind; tokens older than the scheduling policy allows stay in the context and carry no gradient.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Sequence

from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.types import NO_VERSION, Batch, Sample, TokenKind, TokenUse

Advantages = Callable[[Sequence[float | None]], Sequence[float | None]]
"""Rewards of a group (None = failed) to advantages, None where there was no reward."""

_USE = {
    TokenKind.PROMPT: TokenUse.PROMPT,
    TokenKind.MODEL: TokenUse.TRAINED,
    TokenKind.ENVIRONMENT: TokenUse.ENVIRONMENT,
    TokenKind.TEMPLATE: TokenUse.TEMPLATE,
}


def build_batch(groups: Sequence[GroupEntry], version: int, freshness: Freshness, advantages: Advantages) -> Batch:
    """Lays out the usable members of `groups` as the batch that trainer `version` consumes."""
    samples: list[Sample] = []
    for group in groups:
        rewards = [m.score.reward if m.score else None for m in group.members]
        for entry, reward, advantage in zip(group.members, rewards, advantages(rewards), strict=True):
            if reward is not None and advantage is not None:
                samples.append(_sample(group, entry, version, freshness, reward, advantage))
    return Batch(version=version, samples=tuple(samples), group_ids=tuple(g.id for g in groups))


def joined(parts: Sequence[Batch]) -> Batch:
    """The parts of one batch as one."""
    return Batch(
        version=parts[0].version,
        samples=tuple(sample for part in parts for sample in part.samples),
        group_ids=tuple(group for part in parts for group in part.group_ids),
    )


def _sample(
    group: GroupEntry, entry: RolloutEntry, version: int, freshness: Freshness, reward: float, advantage: float
) -> Sample:
    prompt = group.task.prompt_ids
    ids, logprobs = array("i", prompt), array("f", bytes(4 * len(prompt)))
    versions = array("i", [NO_VERSION]) * len(prompt)
    kinds = array("B", [TokenKind.PROMPT]) * len(prompt)
    use = array("B", [TokenUse.PROMPT]) * len(prompt)
    for segment in entry.segments:
        count = len(segment)
        ids.extend(segment.token_ids)
        logprobs.extend(segment.logprobs)
        versions.extend(array("i", [segment.version]) * count)
        kinds.extend(array("B", [segment.kind]) * count)
        stale = segment.kind is TokenKind.MODEL and freshness.masks(version - segment.version)
        use.extend(array("B", [TokenUse.STALE if stale else _USE[segment.kind]]) * count)
    return Sample(
        rollout_id=entry.id,
        group_id=group.id,
        token_ids=ids,
        logprobs=logprobs,
        versions=versions,
        kinds=kinds,
        use=use,
        reward=reward,
        advantage=advantage,
    )
