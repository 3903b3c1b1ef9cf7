"""What every scenario is held to: at each event, at each batch, at the end."""

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from functools import partial

from gruppetto.buffer.batch import build_batch
from gruppetto.record.base import NullRecorder
from gruppetto.scheduler.policies.rounds import ShortLong
from gruppetto.trainer.advantages import group_advantages
from gruppetto.types import DropReason, TokenKind, TokenUse

ADVANTAGES = partial(group_advantages, normalize=True)


class CountingRecorder(NullRecorder):
    """Collects the events, and at each of them recounts what is live."""

    def __init__(self):
        self.events = []
        self.closed = asyncio.Event()
        self.loop = None

    def event(self, kind, t, **fields):
        self.events.append((kind, t, tuple(sorted(fields.items(), key=lambda item: item[0]))))
        if kind == "close":
            self.closed.set()
        if self.loop is not None:
            entries = self.loop.pool.rollouts.values()
            assert self.loop.pool.census.balanced(len(entries), sum(r.tokens for r in entries))

    def times(self, kind):
        return {t for name, t, _ in self.events if name == kind}


@dataclass
class Lineage:
    """What has become final in the history that counts: a kill throws away what came after the last snapshot."""

    batches: list = field(default_factory=list)
    dropped: list = field(default_factory=list)

    def copy(self):
        return Lineage(list(self.batches), list(self.dropped))


def staleness_of(batches):
    """Of every run of model tokens in batches trained one after the other, from version 0."""
    return [
        step - segment.version
        for step, batch in enumerate(batches)
        for group in batch
        for member in group.usable()
        for segment in member.segments
        if segment.kind is TokenKind.MODEL
    ]


def check_part(scenario, groups, version):
    """The batch that trainer `version` consumes."""
    policy = scenario.policy_at(version)
    assert len({group.id for group in groups}) == len(groups) <= scenario.batch_groups
    for group in groups:
        _check_group(scenario, group)
        for member in group.usable():
            _check_ages(policy, member, version, others=bool(scenario.then))
    if scenario.laid_out:
        _check_layout(scenario, groups, version)


def _check_group(scenario, group):
    usable = group.usable()
    assert len(usable) >= 2
    assert len(usable) <= scenario.group_size
    for member in group.members:
        assert member.context == group.prompt + sum(map(len, member.segments))
        if member.score is not None and member.score.reward is not None:
            assert member.failure is None
            assert member.tokens == scenario.expected_tokens(member)
            versions = [s.version for s in member.segments if s.kind is TokenKind.MODEL]
            assert sum(len(s) for s in member.segments if s.kind is TokenKind.MODEL) == member.tokens
            assert versions == sorted(versions) or any(policy.placing.own_version for policy in scenario.policies)
            assert group.oldest <= min(versions, default=group.oldest)
        else:
            assert member.failure or member.doomed is DropReason.SURPLUS or len(usable) == group.needed


def _check_ages(policy, member, version, *, others):
    """What `others` have left may be older: that it is masked then, the layout says."""
    k, over_age = policy.freshness.max_staleness, policy.freshness.over_age
    ages = [version - s.version for s in member.segments if s.kind is TokenKind.MODEL]
    assert all(age >= 0 for age in ages)
    if k is not None and over_age != "mask" and not others:
        assert max(ages, default=0) <= k, (ages, k)
    if policy.max_parked_steps is not None:
        assert max(ages, default=0) <= policy.max_parked_steps


def _check_layout(scenario, groups, version):
    freshness = scenario.policy_at(version).freshness
    batch = build_batch(groups, version, freshness, ADVANTAGES)
    assert [s.rollout_id for s in batch.samples] == [m.id for group in groups for m in group.usable()]
    for sample in batch.samples:
        for made, kind, use in zip(sample.versions, sample.kinds, sample.use, strict=True):
            if kind != TokenKind.MODEL:
                assert (kind, use) in {(0, TokenUse.PROMPT), (2, TokenUse.ENVIRONMENT)}
            elif freshness.max_staleness is None or version - made <= freshness.max_staleness:
                assert use == TokenUse.TRAINED
            else:
                assert use == TokenUse.STALE
                assert freshness.over_age == "mask" or scenario.then
    for group in groups:
        samples = [s for s in batch.samples if s.group_id == group.id]
        mean = sum(s.reward for s in samples) / len(samples)
        assert abs(sum(s.advantage for s in samples)) < 1e-6
        assert all((s.advantage > 0) == (s.reward > mean) for s in samples)


def check_end(run):
    """Exactly once: every group ever launched, and every task ever taken, is in one place and no other."""
    loop, lineage = run.loop, run.lineage
    trained = [group for batch in lineage.batches for group in batch]
    dropped = [*lineage.dropped, *loop.take_dropped()]
    lineage.dropped = dropped
    dropped = [*dropped, *((group, reason) for group, reason, _ in loop.returns._going.values())]
    in_work = [group for group in loop.pool.committed if group.id not in {g.id for g in trained}]
    live = [*loop.pool.groups.values(), *in_work]
    ids = [g.id for g in [*trained, *live]] + [g.id for g, _ in dropped]
    assert sorted(ids) == list(range(loop.pool.next_group_id))
    put_off = any(isinstance(policy.rounds, ShortLong) for policy in run.scenario.policies)
    final = [g for g, reason in dropped if not (put_off and reason is DropReason.SURPLUS)]
    tasks = [g.task for g in [*trained, *live, *final]] + [deferred.task for deferred in loop.pool.deferred]
    assert Counter(task.extra["n"] for task in tasks) == Counter(range(loop.source._next))
