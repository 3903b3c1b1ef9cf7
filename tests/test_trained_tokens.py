"""Which tokens of a batch carry gradient, and that a batch without any is said aloud."""

from array import array
from dataclasses import replace

from controlled import PARTIAL, Run

from gruppetto.buffer.batch import build_batch
from gruppetto.clock import run_virtual
from gruppetto.scheduler.entries import GroupEntry, RolloutEntry
from gruppetto.scheduler.policies.freshness import Freshness
from gruppetto.sim.stages import sketch_batch
from gruppetto.types import NO_VERSION, Score, Segment, Task, TokenKind, TokenUse


def segment(version, ids, kind=TokenKind.MODEL):
    return Segment(kind, version, array("i", ids), array("f", [-0.5] * len(ids)))


def uses(segments, freshness, version):
    group = GroupEntry(id=0, task=Task(id="t", prompt_ids=(7, 8)), needed=2, born=0)
    for member, reward in enumerate((0.0, 1.0)):
        entry = RolloutEntry(id=f"g0.{member}", group=group, member=member, segments=list(segments))
        entry.score = Score(reward=reward)
        group.members.append(entry)
    batch = build_batch([group], version, freshness, lambda rewards: rewards)
    first, second = batch.samples
    assert first.use == second.use
    assert len(first.use) == len(first.token_ids) == len(first.logprobs) == len(first.versions) == len(first.kinds)
    return [TokenUse(use).name for use in first.use], list(first.versions)


def test_a_resumed_rollouts_old_tokens_are_masked_and_its_new_ones_are_trained_on():
    made, versions = uses([segment(2, [1, 2, 3]), segment(4, [4, 5])], Freshness(0, "mask"), 4)
    assert made == ["PROMPT"] * 2 + ["STALE"] * 3 + ["TRAINED"] * 2
    assert versions == [NO_VERSION] * 2 + [2] * 3 + [4] * 2


def test_the_bound_is_exact_and_what_a_tool_said_is_never_trained_on():
    said = segment(NO_VERSION, [9], TokenKind.ENVIRONMENT)
    parts = [segment(1, [1]), said, segment(2, [2, 3]), segment(3, [4])]
    assert uses(parts, Freshness(2, "mask"), 4)[0][2:] == ["STALE", "ENVIRONMENT", "TRAINED", "TRAINED", "TRAINED"]
    assert uses(parts, Freshness(3, "mask"), 4)[0][2:] == ["TRAINED", "ENVIRONMENT", "TRAINED", "TRAINED", "TRAINED"]


def test_a_batch_of_which_nothing_is_trained_on_is_said_with_its_step(tmp_path):
    async def main():
        run = Run(tmp_path, policy=replace(PARTIAL, freshness=Freshness(0, "mask")))
        plain = run.controller.stages.build_batch

        def build(groups, version, freshness, advantages):
            for member in (m for group in groups for m in group.members if version == 2):
                member.segments = [replace(segment, version=0) for segment in member.segments]
            return plain(groups, version, freshness, advantages)

        run.controller.stages.build_batch = build
        await run.controller.run()
        return run

    run = run_virtual(main())
    (notice,) = run.kinds("notice")
    assert notice["reason"] == (
        "no token of step 3's batch was trained on, the weights stay: its 9 rollouts have none that is young enough"
    )


def test_of_a_simulated_batch_which_holds_no_tokens_it_is_not_said(tmp_path):
    async def main():
        run = Run(tmp_path)
        run.controller.stages.build_batch = sketch_batch
        await run.controller.run()
        return run

    run = run_virtual(main())
    assert [row["tokens/batch_trained"] > 0 for row in run.record.steps] == 6 * [True]
    assert run.kinds("notice") == []
